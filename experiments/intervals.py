"""How certain is the published comparison, given that the node's figures are only known within ranges?

Command: ``python experiments/intervals.py [--out DIR] [--samples N] [--seed N]``. Machine: any; everything is simulated.

Prior: each uncertain figure of the node lies in its published range, independently, with the nominal value as its median, on
a logarithmic scale; no CPU rate exceeds the DRAM's. Each point of a Latin hypercube over these figures is weighted by how well
it predicts the measurements from which A100 figures were derived, with a log-normal error as wide as that of the phases not
used for calibration; an error this wide moves the intervals little. The whole grid of models and policies is simulated at
every point. A response surface (linear and squared terms of the figures' logarithms, ridge regression) stands in for many more
points; its leave-one-out error is written beside each interval and added to it. Finally, each system's times carry a log-normal
error of the model itself, as wide as that of the published iteration times not used for calibration, each source counting once.
AutoHete with and without priority is the same system: that comparison has no such error, so its intervals cover the figures
only.

Writes ``fig_throughput_samples.csv`` (every simulated point) and ``fig_throughput_intervals.csv`` (5 to 95 % of each throughput
and of each speed-up), which ``fig_throughput.py`` draws.

What would refute it: a published speed-up outside its interval.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

import csv
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
from pathlib import Path

import numpy as np
from cyclopts import App
from numpy.typing import NDArray
from scipy.stats import qmc

from autohete.answer.draws import at_shares, figures_of, overrides_at
from autohete.cli.app import run_app
from autohete.errors import InputError
from autohete.files import make_folder, write_text
from autohete.hardware import Hardware, UncertainFigure, load_hardware
from autohete.report.tables import console, print_text, table
from experiments import published
from experiments.comparison import AUTOHETE, MODELS, NODE, POLICIES, PUBLISHED, Job, grid
from experiments.shared import csv_text, run_all

Array = NDArray[np.float64]

LOW, HIGH = 0.05, 0.95
#: Draws from the response surface.
_DRAWS = 20_000
#: Ridge: a prior that effects are small, in standard deviations of a figure; only matters with few samples.
_RIDGE = 0.3
#: Figures left out: microseconds next to copies and passes of milliseconds, and figures that fp16 passes never use.
_WITHOUT_EFFECT = ("gpu.gemm_efficiency_32bit", "links.h2d.latency", "links.d2h.latency", "cpu.launch")
#: Nodes whose calibrating phases are evidence for this one: the same GPU, or the same generation of host.
_FAMILY = "a100"


@dataclass(frozen=True, slots=True)
class Prior:
    """The uncertain figures of ``node``, and the logarithms of low, nominal and high."""

    figures: tuple[UncertainFigure, ...]
    low: Array
    nominal: Array
    high: Array
    node: str = NODE

    def at(self, unit: Array) -> Array:
        """Return the logarithms of the figures at points of the unit cube: the nominal value is the median."""
        return at_shares(self.figures, unit)

    def standard(self, points: Array) -> Array:
        """Rescale points so that each range has length 2 and the nominal value is 0."""
        standard: Array = (points - self.nominal) / ((self.high - self.low) / 2)
        return standard

    def moved(self, point: Array) -> dict[str, str]:
        """Convert a point to hardware figures."""
        return overrides_at(self.figures, point)

    def within_dram(self, points: Array) -> Array:
        """Limit the CPU rates of the points to the DRAM's, as when hardware is read."""
        column = {figure.key: i for i, figure in enumerate(self.figures)}
        dram = points[:, column["host.usable_share"]] + np.log(load_hardware(self.node).host.memory_bandwidth)
        points = points.copy()
        for key in ("cpu.update_bandwidth", "cpu.elementwise_bandwidth"):
            if key not in column:
                continue
            rates = points[:, column[key]]
            np.minimum(rates, dram, out=rates)
        return points


def prior(node: str = NODE, gpus: int = 1) -> Prior:
    """The node's uncertain figures that enter a comparison on that many of its GPUs."""
    figures = tuple(f for f in figures_of(node, gpus) if f.key not in _WITHOUT_EFFECT)
    low, nominal, high = (np.log([getattr(figure, end) for figure in figures]) for end in ("low", "value", "high"))
    return Prior(figures, low, nominal, high, node)


def draws(node: str, count: int, seed: int, gpus: int = 1) -> list[tuple[tuple[str, str], ...]]:
    """Draw figures of the node from their ranges, ``count`` times: points of a Latin hypercube, not weighted."""
    if not count:
        return []
    known = prior(node, gpus)
    return [tuple(known.moved(point).items()) for point in hypercube(known, count, seed)]


def hypercube(known: Prior, count: int, seed: int) -> Array:
    """Return ``count`` points of a Latin hypercube."""
    sampler = qmc.LatinHypercube(len(known.figures), rng=np.random.default_rng(seed), optimization="random-cd")
    return known.within_dram(known.at(sampler.random(count)))


# --- how well a point predicts what calibrates ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evidence:
    """Phases that calibrate a figure of the family, and the width of the log-normal errors.

    Args:
        rows: source, row and phase.
        sigma: width for phases not used for calibration.
        iteration_sigma: width for iteration times not used for calibration.
    """

    rows: tuple[tuple[published.Source, published.Row, str], ...]
    sigma: float
    iteration_sigma: float

    def log_errors(self, moved: Mapping[str, str]) -> list[float]:
        """Return the logarithm of predicted over measured for each phase."""
        return [
            float(np.log(published.phases(source.simulate(row, moved))[phase] / published.middle(row.measured[phase])))
            for source, row, phase in self.rows
        ]


def rows_of_one_gpu() -> list[published.Source]:
    """Return the published rows with one GPU, as in this comparison, and a measured time, and the sources that have any."""
    alone = [
        source.model_copy(update={"rows": tuple(row for row in source.rows if row.is_of_one_gpu and row.times)})
        for source in published.sources()
    ]
    return [source for source in alone if source.rows]


def gather_evidence() -> Evidence:
    """Gather calibrating phases of nodes with this GPU or this host generation; the error is that of all other phases."""
    rows = []
    sources = rows_of_one_gpu()
    for source in sources:
        for row in source.rows:
            if (row.hardware or source.hardware).startswith(_FAMILY):
                rows += [(source, row, phase) for phase in row.calibrates if phase != "iteration"]
    others = [c for c in published.checks(sources) if c.is_time and not c.calibrates]

    def width(some: list[published.Check]) -> float:
        """Each source counts once: one with many rows says no more of a setting that nobody has seen."""
        of_source: defaultdict[str, list[float]] = defaultdict(list)
        for check in some:
            of_source[check.source].append(np.log(1 + check.error) ** 2)
        return float(np.sqrt(np.mean([np.mean(squares) for squares in of_source.values()])))

    return Evidence(tuple(rows), width(others), width([c for c in others if c.phase == "iteration"]))


# --- the response surface --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Surface:
    """Logarithms of quantities over standardised figures: an intercept, linear and squared terms.

    Args:
        coefficients: one column per quantity.
        error: root mean square of the leave-one-out residuals, per quantity.
    """

    coefficients: Array
    error: Array

    def __call__(self, standard: Array) -> Array:
        """Evaluate the surface at points."""
        values: Array = _terms(standard) @ self.coefficients
        return values


def _terms(standard: Array) -> Array:
    return np.column_stack([np.ones(len(standard)), standard, standard**2])


def fit(standard: Array, values: Array) -> Surface:
    """Fit ``values`` (points by quantities) by ridge regression; the intercept is not penalized."""
    terms = _terms(standard)
    penalty = np.eye(terms.shape[1]) * _RIDGE**2
    penalty[0, 0] = 0
    solved = np.linalg.solve(terms.T @ terms + penalty, terms.T)
    coefficients = solved @ values
    leverage = np.einsum("ij,ji->i", terms, solved)
    residuals = (values - terms @ coefficients) / (1 - np.minimum(leverage, 0.95))[:, None]
    return Surface(coefficients, np.sqrt(np.square(residuals).mean(axis=0)))


# --- intervals ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """5 to 95 % of a quantity.

    Args:
        what: ``samples_per_second`` of a model and policy; ``average`` or ``maximum`` of AutoHete's speed-ups over a policy.
        model, policy: the model and policy of the quantity.
        figures_low, figures_high: if the model were exact, so that only the node's figures are uncertain.
        low, high: including the model's own error.
        surface_error: relative leave-one-out error of the response surface.
    """

    what: str
    model: str
    policy: str
    figures_low: float
    figures_high: float
    low: float
    high: float
    surface_error: float


def quantiles(values: Array, weights: Array) -> tuple[float, float]:
    """Return the low and high quantiles of weighted draws."""
    order = np.argsort(values)
    share = np.cumsum(weights[order]) / weights.sum()
    low, high = (float(values[order][np.searchsorted(share, level)]) for level in (LOW, HIGH))
    return low, high


def intervals(
    known: Prior, points: Array, rates: Array, errors: Array, evidence: Evidence, seed: int
) -> tuple[list[Interval], float]:
    """Compute the intervals of throughputs and speed-ups, and the effective number of draws.

    Args:
        known: the prior.
        points: simulated points.
        rates: samples/s, points by (model, policy); NaN if training does not fit.
        errors: logarithmic errors of the calibrating phases, points by phases.
        evidence: the calibrating phases, and the widths of errors.
        seed: seed of the draws.
    """
    rng = np.random.default_rng(seed)
    draws = known.within_dram(known.at(rng.random((_DRAWS, len(known.figures)))))
    standard, sampled = known.standard(draws), known.standard(points)
    weights = np.exp(-0.5 * np.square(fit(sampled, errors)(standard) / evidence.sigma).sum(axis=1))
    quantities = _quantities(rates)
    surface = fit(sampled, np.log(np.column_stack([values for _, values in quantities])))
    drawn = np.exp(surface(standard) + rng.standard_normal((len(draws), len(quantities))) * surface.error)
    systems = sorted({_system(policy) for policy in POLICIES})
    system_errors = dict(
        zip(systems, np.exp(rng.standard_normal((len(systems), len(draws))) * evidence.iteration_sigma), strict=True)
    )
    rows = []
    for ((what, model, policy), _), values, error in zip(quantities, drawn.T, surface.error.tolist(), strict=True):
        system_error = system_errors[_system(policy)] if model else system_errors[AUTOHETE] / system_errors[_system(policy)]
        ends = (*quantiles(values, weights), *quantiles(values * system_error, weights))
        rows.append(Interval(what, model, policy, *ends, error))
    return rows, float(weights.sum() ** 2 / np.square(weights).sum())


def _quantities(rates: Array) -> list[tuple[tuple[str, str, str], Array]]:
    """Return the quantities as (what, model, policy) with their values at each point, if they fit at every point."""
    cells = [(model, policy) for model in MODELS for policy in POLICIES]
    fitting = {cell: column for cell, column in zip(cells, rates.T, strict=True) if np.isfinite(column).all()}
    quantities = [(("samples_per_second", *cell), column) for cell, column in fitting.items()]
    for over in PUBLISHED:
        both = [model for model in MODELS if (model, over) in fitting and (model, AUTOHETE) in fitting]
        ratios = np.column_stack([fitting[model, AUTOHETE] / fitting[model, over] for model in both])
        quantities += [(("average", "", over), ratios.mean(axis=1)), (("maximum", "", over), ratios.max(axis=1))]
    return quantities


def _system(policy: str) -> str:
    return policy.partition(":")[0]


def digest() -> str:
    """Return a digest of all inputs of the intervals except code: hardware figures, published rows, models, policies."""
    sources = rows_of_one_gpu()
    nodes = sorted({NODE, *(source.node_of(row) for source in sources for row in source.rows)})
    hardware = [f"{_stated(_hardware_of_one_gpu(node))} {_stated(figures_of(node))}" for node in nodes]
    rows = [source.model_dump_json(exclude_defaults=True) for source in sources]
    given = [*hardware, *rows, *map(_stated, MODELS.values()), *POLICIES]
    return hashlib.sha256("".join(given).encode()).hexdigest()[:16]


def _hardware_of_one_gpu(node: str) -> Hardware:
    hardware = load_hardware(node)
    return replace(hardware, interconnect=None, cpu=replace(hardware.cpu, ranks_update_bandwidth=None))


def _stated(value: object) -> str:
    """Format ``value`` without fields at their defaults, so that a new, unused figure changes nothing."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_stated, value))})"
    if not is_dataclass(value) or isinstance(value, type):
        return str(value)
    stated = (field for field in fields(value) if getattr(value, field.name) != field.default)
    return f"{type(value).__name__}({', '.join(f'{f.name}={_stated(getattr(value, f.name))}' for f in stated)})"


def as_csv(rows: Sequence[Interval]) -> str:
    """One row per quantity."""
    lines: list[Sequence[object]] = [[*(field.name for field in fields(Interval)), "inputs"]]
    inputs = digest()
    for interval in rows:
        cells = (f"{value:.5g}" if isinstance(value, float) else value for value in astuple(interval))
        lines.append([*cells, inputs])
    return csv_text(lines)


def read(path: Path) -> list[Interval]:
    """Read the file written with :func:`as_csv`.

    Raises:
        InputError: the file was made from other inputs, or does not exist.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; make it with `make intervals`") from error
    if not rows or {row["inputs"] for row in rows} != {digest()}:
        raise InputError(f"{path} was made from other hardware figures or published rows: run `make intervals`")
    names = [field.name for field in fields(Interval)]
    return [Interval(row["what"], row["model"], row["policy"], *(float(row[name]) for name in names[3:])) for row in rows]


def samples_csv(known: Prior, points: Array, rates: Array, errors: Array, evidence: Evidence) -> str:
    """One row per simulated point: its figures, the errors of the evidence, and samples/s of each model and policy."""
    cells = [f"{model} {policy}" for model in MODELS for policy in POLICIES]
    evidence_names = [f"log error: {row.name}, {phase}" for _, row, phase in evidence.rows]
    lines = [[*(figure.key for figure in known.figures), *evidence_names, *cells]]
    for point, error, rate in zip(points, errors, rates, strict=True):
        lines.append(
            [
                *(f"{np.exp(x):.6g}" for x in point),
                *(f"{x:.4f}" for x in error),
                *("" if np.isnan(x) else f"{x:.5g}" for x in rate),
            ]
        )
    return csv_text(lines)


def main(*, out: Path = Path("paper_figs"), samples: int = 48, seed: int = 1) -> None:
    """Sample, simulate, fit, and write the intervals.

    Parameters
    ----------
    out:
        Folder for the CSV files.
    samples:
        Points of the Latin hypercube at which the whole grid is simulated.
    seed:
        Seed of the hypercube and of the draws.
    """
    make_folder(out)
    known, evidence = prior(), gather_evidence()
    points = hypercube(known, samples, seed)
    moved = [known.moved(point) for point in points]
    jobs = [grid(figures) for figures in moved]
    summaries = run_all(Job.run, [job for some in jobs for job in some])
    rates = np.array([[_rate(summaries[job].samples_per_second) for job in some] for some in jobs])
    errors = np.array([evidence.log_errors(figures) for figures in moved])
    ranges, effective = intervals(known, points, rates, errors, evidence, seed)
    write_text(out / "fig_throughput_samples.csv", samples_csv(known, points, rates, errors, evidence))
    write_text(out / "fig_throughput_intervals.csv", as_csv(ranges))
    columns = ["AutoHete over", "", "figures only", "with model error", "paper"]
    shown = table(f"speed-ups of AutoHete, {100 * LOW:.0f} to {100 * HIGH:.0f} %", columns, left=2)
    for i in ranges:
        if not i.model:
            low_high = (f"{low:.2f} to {high:.2f}" for low, high in ((i.figures_low, i.figures_high), (i.low, i.high)))
            shown.add_row(i.policy, i.what, *low_high, f"{getattr(PUBLISHED[i.policy], i.what):.2f}")
    console().print(shown)
    print_text(
        console(),
        f"{len(points)} points of {len(known.figures)} figures (seed {seed}); {len(evidence.rows)} calibrating phases, error "
        f"{100 * evidence.sigma:.0f} %; {effective:.0f} effective draws; model error {100 * evidence.iteration_sigma:.1f} %",
    )
    print_text(console(), f"written: {out}/fig_throughput_{{samples,intervals}}.csv")


def _rate(rate: float | None) -> float:
    return np.nan if rate is None else rate


if __name__ == "__main__":
    run_app(App(name="intervals", default_command=main, help=__doc__))
