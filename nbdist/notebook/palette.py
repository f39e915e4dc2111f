"""The colours of the dashboard and of the static figure, in one place.

Chosen after the colour-blind safe set of Okabe and Ito ("Color Universal Design", 2008), brought to a middle lightness
so that one set has enough contrast on white and on a dark theme alike.
"""

from __future__ import annotations

__all__ = ["BLUE", "MANY_RANKS", "MEMORY_COLOURS", "PART_COLOURS", "RANK_COLOURS", "VERMILION"]

BLUE, VERMILION, GREEN, PINK = "#1f83c7", "#d9601a", "#129e77", "#c9699e"
ORANGE, SKY, PURPLE, GREY = "#dd9c0a", "#57b2e4", "#7b6bc4", "#8b929c"

RANK_COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, PURPLE, GREY)

MANY_RANKS = 16
"""With more ranks than this, single curves give way to mean and spread, and a heat strip."""

PART_COLOURS: dict[str, str] = {
    "data_s": ORANGE,
    "forward_s": SKY,
    "backward_s": BLUE,
    "wait_s": "#c3cad3",
    "optimizer_s": GREEN,
    "rest_s": GREY,
}

MEMORY_COLOURS: dict[str, str] = {
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer state": GREEN,
    "tensors": BLUE,
    "activations and others": ORANGE,
    "cached by torch": "#e8cf7a",
    "outside torch": PINK,
    "process": "#aeb6c0",
}
