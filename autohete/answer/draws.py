"""Draws of the hardware figures that are only known within ranges."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autohete.errors import InputError, check_fields, check_whole
from autohete.hardware import UncertainFigure, uncertain_figures

Array = NDArray[np.float64]

#: Above this the draws take minutes; 5 and 95 % of a few hundred are as good.
MOST_DRAWS = 1_000
#: Figures that the user knows: their ranges describe the machines on the market, not uncertainty about one machine.
#: A count, such as of sockets, is also nothing that can be drawn between two of its values.
_KNOWN = ("host.memory", "host.memory_domains", "cpu.cores", "gpu.multiprocessors", "interconnect.gpus")
#: How the keys of figures begin that affect several GPUs only.
OF_SEVERAL = ("interconnect.", "cpu.ranks_")
#: Rates of a link that follow its bandwidth where only that is given.
_BANDWIDTH = "bandwidth"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw: a number of points of a Latin hypercube, from a seed."""

    draws: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_whole("draws", self.draws, 0)
        check_whole("seed", self.seed, 0)
        if self.draws > MOST_DRAWS:
            raise InputError(f"draws is {self.draws}: give at most {MOST_DRAWS:,}, or 0 for none")


def open_figures(source: str, given: Collection[str], gpus: int = 1) -> list[UncertainFigure]:
    """Return the figures of hardware ``source`` that have a range and are not given, nor in proportion to one that is.

    The sizes of host memory and all counts, such as the number of cores, are taken as known.
    """
    links = tuple(key.removesuffix(_BANDWIDTH) for key in given if key.startswith("links.") and key.endswith(f".{_BANDWIDTH}"))
    return [
        figure
        for figure in figures_of(source, gpus)
        if figure.key not in {*given, *_KNOWN}
        and not (links and figure.key.startswith(links) and figure.key.endswith(_BANDWIDTH))
    ]


def figures_of(source: str, gpus: int = 1) -> list[UncertainFigure]:
    """Return the figures of hardware ``source`` that have a range and matter to so many GPUs."""
    figures = uncertain_figures(source)
    return [each for each in figures if not each.key.startswith(OF_SEVERAL)] if gpus == 1 else figures


def at_shares(figures: Sequence[UncertainFigure], shares: Array) -> Array:
    """Return the logarithms of ``figures`` at points of the unit cube, points by figures.

    Each figure lies in its range, with its value as the median, on a logarithmic scale.
    """
    columns = [
        np.interp(column, [0.0, 0.5, 1.0], np.log([figure.low, figure.value, figure.high]))
        for figure, column in zip(figures, shares.T, strict=True)
    ]
    return np.array(columns).T.reshape(shares.shape)


def overrides_at(figures: Sequence[UncertainFigure], logarithms: Array) -> dict[str, str]:
    """Return one point of :func:`at_shares` as overrides of :func:`~autohete.hardware.load_hardware`."""
    return {figure.key: figure.text(value) for figure, value in zip(figures, np.exp(logarithms).tolist(), strict=True)}


def draw(figures: Sequence[UncertainFigure], sampling: Sampling) -> list[dict[str, str]]:
    """Return draws of ``figures``, each as overrides of :func:`~autohete.hardware.load_hardware`: a Latin hypercube.

    Each figure is drawn independently, as in :func:`at_shares`.
    """
    rng, count = np.random.default_rng(sampling.seed), sampling.draws
    columns = [(rng.permutation(count) + rng.random(count)) / max(count, 1) for _ in figures]
    points = at_shares(figures, np.array(columns).T.reshape(count, len(figures)))
    return [overrides_at(figures, point) for point in points]
