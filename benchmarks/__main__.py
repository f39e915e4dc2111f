"""Command line of the benchmarks; see the package's docstring."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import cells, environments, faults, start, times, training, transfer
from benchmarks.launchers import LAUNCHERS
from benchmarks.products import PRODUCTS as SESSIONS
from benchmarks.products import Product
from benchmarks.report import Row, table, verdicts

MEASURES = ("start", "restart", "empty", "stream", "transfer", "training", "faults", "times")
PRODUCTS = SESSIONS | {launcher.name: launcher for launcher in LAUNCHERS}
REPETITIONS = 5
TIMES_REPETITIONS = 10
PAIRS = 20


def _ints(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 2,4, not {text!r}") from None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure nbdist beside its peers.")
    parser.add_argument("measures", nargs="*", help=f"what to measure (default: all of {', '.join(MEASURES)})")
    parser.add_argument(
        "--products", default=",".join(PRODUCTS), help="names, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=_ints, default=[2, 4, 8], help="numbers of ranks (default: 2,4,8)")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="(default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, help="alternating pairs for training (default: %(default)s)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "nbdist-benchmarks",
        help="where the products' environments are made and kept (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="also write every measured value there, as JSON lines")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target was missed")
    parser.add_argument("--short", action="store_true", help="nbdist alone, 2 ranks, one repetition, no training")
    args = parser.parse_args()
    for name in args.measures:
        if name not in MEASURES:
            parser.error(f"unknown measure {name!r}: expected some of {', '.join(MEASURES)}")
    for name in args.products.split(","):
        if name not in PRODUCTS:
            parser.error(f"unknown product {name!r}: expected some of {', '.join(PRODUCTS)}")
    return args


def _jobs(args: argparse.Namespace, products: list[Product]) -> list[tuple[str, Callable[[], list[Row]]]]:
    """Everything to measure, in an order in which repetitions go round the products."""
    chosen = args.measures or list(MEASURES)
    cache: Path = args.cache
    jobs: list[tuple[str, Callable[[], list[Row]]]] = []

    def add(what: str, product: Product, n: int, measure: Callable[[Product, int, Path], list[Row]]) -> None:
        jobs.append((f"{what}, {product.name}, {n} ranks", lambda: measure(product, n, cache)))

    kinds = {
        "start": ("start", (start.cold, start.warm)),
        "restart": ("start", (start.restart,)),
        "empty": ("empty", (cells.empty,)),
        "stream": ("stream", (cells.stream,)),
        "transfer": ("transfer", (transfer.transfer,)),
    }
    for name in (m for m in MEASURES if m in chosen):
        if name == "training":
            if any(p.name == "nbdist" for p in products):
                for n in (1, 2):
                    jobs.append((f"training, {n} ranks", lambda n=n: training.throughput(n, cache, args.pairs)))
        elif name == "times":
            often = 1 if args.short else TIMES_REPETITIONS
            for event in (*times.EVENTS, times.KERNEL_KILLED) if any(p.name == "nbdist" for p in products) else ():
                jobs.append((event, lambda e=event, often=often: times.times(e, cache, often)))
        elif name == "faults":
            for kind in faults.FAULTS:
                for product in (p for p in products if "faults" in p.can):
                    jobs.append((f"{kind}, {product.name}", lambda p=product, k=kind: faults.fault(p, k, cache)))
        else:
            needs, functions = kinds[name]
            ranks = args.ranks[:1] if name in ("stream", "transfer") else args.ranks
            for n in ranks:
                for _ in range(args.repetitions if name != "transfer" else 1):
                    for product in (p for p in products if needs in p.can):
                        if name == "restart" and product.restart(n) is None:
                            continue
                        for function in functions:
                            add(f"{name} ({function.__name__})", product, n, function)
    return jobs


def main() -> int:
    """Measure, print the table and the verdicts; 1 if a measurement failed, or with --strict a target was missed."""
    args = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that kernels and what they started are ended
    if args.short:
        args.products, args.ranks, args.repetitions = "nbdist", [2], 1
        args.measures = args.measures or [m for m in MEASURES if m != "training"]
    products = [PRODUCTS[name] for name in args.products.split(",")]
    args.cache.mkdir(parents=True, exist_ok=True)
    environments.stubs(args.cache)
    for product in products:
        environments.python_of(product.name, args.cache)

    rows: list[Row] = []
    failed = []
    jobs = _jobs(args, products)
    for nth, (what, job) in enumerate(jobs, 1):
        begun = time.monotonic()
        try:
            found = job()
        except KeyboardInterrupt:  # what was measured so far is still worth its table
            failed.append(f"interrupted at {what}")
            break
        except Exception as error:  # one product's failure must not cost the others' numbers; it is counted and shown
            failed.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
            found = []
        rows += found
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                for row in found:
                    file.write(json.dumps({**dataclasses.asdict(row), "load": os.getloadavg()[0]}) + "\n")
        text = "; ".join(f"{row.measure} {row.value:.3g} {row.unit}" for row in found) or "failed"
        print(f"[{nth}/{len(jobs)}] {what}: {text} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)

    print(table(rows, [p.name for p in products]))
    lines = verdicts(rows)
    print("\n" + "\n".join(lines))
    if failed:
        print("\nfailed:\n" + "\n".join(failed))
    missed = any(line.startswith("MISSED") for line in lines)
    return 1 if failed or (args.strict and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
