"""How fast nbdist is beside the other ways to run torch.distributed from a notebook, measured in one run.

::

    python -m benchmarks                     # everything: about an hour and a half on 2 cores
    python -m benchmarks --short             # one repetition of the quick measurements, nbdist alone
    python -m benchmarks start --products nbdist,torchmonarch

Each product lives in a virtual environment of its own, made below ``--cache``, and is driven through a real Jupyter
kernel. Repetitions go round the products, so that a slow minute of the machine meets all of them; what is printed is
the median, and its ratio to the number that nbdist must reach. Seconds drift from machine to machine, ratios hold.

Files: `environments` makes the virtual environments, `kernel` drives a kernel, `products` and `launchers` know each
product's cells, `start`, `cells`, `transfer`, `training`, `faults` and `times` measure, `report` compares and prints.
`memory`, `telemetry` and `dashboard` stand for themselves, e.g. ``python -m benchmarks.telemetry``: forecasts against
living tensors, what a logged metric and a training step pay, what the kernel and the page pay for many ranks.
"""
