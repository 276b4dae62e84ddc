"""How certain a time is: the ranges of the hardware's figures, and the error of the model, together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from autohete.answer.draws import Sampling, draw, open_figures
from autohete.answer.result import Interval
from autohete.answer.site import Site
from autohete.profile import analytic_profile
from autohete.quantities import parse_quantity
from autohete.schedule import GPU_MEMORY
from autohete.simulate import Simulation, simulate_again

#: Mean absolute error of iterations that nobody had looked at while the model was made: 400 predicted blind, of 28 sources,
#: 19 %, also where each source counts once, of 2026-11-26. For others it is smaller (``make published``).
MODEL_ERROR = 0.19
#: Both ends of the interval.
_LOW, _HIGH = 0.05, 0.95
#: Standard deviations of a normal distribution from one end to the other.
RANGE = float(ndtri(_HIGH) - ndtri(_LOW))
#: The ends lie within this many standard deviations of all drawn times.
_FAR = 6.0


def deviation_of(mean_error: float) -> float:
    """Standard deviation of the logarithm of measured over predicted time: that of a normal distribution with this error."""
    return mean_error * math.sqrt(math.pi / 2)


_DEVIATION = deviation_of(MODEL_ERROR)
#: A measured time lies within this factor of the predicted one with a probability of 90 %, if the hardware's figures are right.
MODEL_FACTOR = math.exp(_DEVIATION * RANGE / 2)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One draw of the uncertain figures of a site: the recommended plan and the one that moves nothing, executed there.

    Args:
        site: the hardware.
        simulation: of the recommended plan.
        staying: of the fastest plan that moves nothing; None if there is none, or if that is the recommended one.
        moved: the figures drawn.
    """

    site: Site
    simulation: Simulation
    staying: Simulation | None
    moved: Mapping[str, str]

    def __call__(self) -> tuple[float, float | None, str]:
        """The time of an iteration of the recommended plan, that in which the other trains as many tokens, and the memory that
        is too small for the recommended plan; empty if it fits.

        Sizes of GPU memory decide whether the plan fits, not how long it takes.
        """
        sizes = {name: self.moved[f"gpu.{name}"] for name in ("memory", "reserved_memory") if f"gpu.{name}" in self.moved}
        rates = {key: text for key, text in self.moved.items() if key.removeprefix("gpu.") not in sizes}
        hardware = self.site.hardware(rates)
        profile = analytic_profile(self.simulation.profile.workload, hardware)
        found = simulate_again(self.simulation, profile)
        other = None
        if self.staying is not None:
            tokens = found.tokens_per_second * found.iteration_seconds
            other = tokens / simulate_again(self.staying, profile).tokens_per_second
        whole, reserved = (
            parse_quantity(sizes[name], "bytes") if name in sizes else now
            for name, now in (("memory", hardware.gpu.memory_bytes), ("reserved_memory", hardware.gpu.reserved_bytes))
        )
        if found.gpu.peak_bytes > whole - reserved:
            return found.iteration_seconds, other, GPU_MEMORY
        return found.iteration_seconds, other, next((one.memory for one in found.memories[1:] if not one.fits), "")


def draws(site: Site, simulation: Simulation, staying: Simulation | None, sampling: Sampling) -> list[Drawn]:
    """Draws of the uncertain figures of ``site``; without any, its own figures."""
    figures = open_figures(site.source, site.given, site.gpus)
    if not sampling.draws:
        return []
    return [Drawn(site, simulation, staying, moved) for moved in (draw(figures, sampling) if figures else [{}])]


def interval(site: Site, sampling: Sampling, results: Sequence[tuple[float, float | None, str]]) -> Interval | None:
    """The interval from the results of all draws; None without any.

    A time is that of a draw, times a factor for the error of the model. The error of the ratio between two plans is taken to be
    as large as that of one time: some of it is common to both, but each has some of its own.
    """
    if not results:
        return None
    times = np.log([seconds for seconds, _, _ in results])
    ratios = [math.log(other / seconds) for seconds, other, _ in results if other is not None]
    short: dict[str, int] = {}
    for memory in (memory for _, _, memory in results if memory):
        short[memory] = short.get(memory, 0) + 1

    def quantile(share: float) -> float:
        reach = _FAR * _DEVIATION
        below = brentq(lambda at: ndtr((at - times) / _DEVIATION).mean() - share, times.min() - reach, times.max() + reach)
        return math.exp(below)

    return Interval(
        Sampling(len(results), sampling.seed),
        len(open_figures(site.source, site.given, site.gpus)),
        MODEL_ERROR,
        quantile(_LOW),
        quantile(_HIGH),
        dict(sorted(short.items())),
        float(ndtr(np.array(ratios) / _DEVIATION).mean()) if ratios else None,
    )
