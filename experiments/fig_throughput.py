"""How fast do GPT models of 2B to 22B train on one A100-40GB under four offloading systems, and how certain is that?

Command: ``python experiments/fig_throughput.py [--out DIR]``. Machine: any; everything is simulated.

Writes:

- ``fig_throughput.{png,pdf,csv}``: throughput of every model under every policy;
- ``fig_throughput_ratios.csv``: AutoHete's speed-ups with their 5 to 95 % intervals, beside the paper's;
- ``fig_throughput_variants.csv``: the speed-ups of AutoHete with another CPU step, which the paper does not describe;
- ``fig_throughput_bounds.csv``: what the paper's ratios would require.

It takes neither ``--model`` nor ``--hardware`` nor ``--set``, because the paper's numbers and the intervals are of its models
and its node; ``autohete simulate`` answers for others. The intervals come from ``paper_figs/fig_throughput_intervals.csv``,
written by ``intervals.py``.

What would refute it: a published speed-up outside its interval, or a model that the paper trained but that does not fit in the
simulation (or vice versa).
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from cyclopts import App
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from autohete.cli.app import run_app
from autohete.files import make_folder, write_text
from autohete.hardware import load_hardware
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.quantities import format_bytes, format_seconds
from autohete.report.style import save_figure, style
from autohete.report.tables import console, or_dash, print_text, table
from autohete.schedule import GPU
from autohete.simulate import simulate
from autohete.simulate.summary import Summary
from experiments.comparison import (
    AUTOHETE,
    MODELS,
    NO_PRIORITY,
    NODE,
    POLICIES,
    PUBLISHED,
    ZERO_OFFLOAD,
    ZERO_OFFLOAD_LIMIT,
    Job,
    SpeedUp,
    grid,
    speedup,
)
from experiments.intervals import Interval
from experiments.intervals import read as read_intervals
from experiments.looks import look
from experiments.setting import batch_of
from experiments.shared import csv_text, run_all

GPUS = 1
INTERVALS = Path(__file__).resolve().parents[1] / "paper_figs" / "fig_throughput_intervals.csv"
#: Steps of AutoHete on the CPU beside the nominal one, which casts separately.
VARIANTS = ("fused_casts", "fp32_upload")
Rows = Mapping[tuple[str, str], Summary]


# --- what it says -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """AutoHete's speed-up over one policy: nominal, interval, and the paper's, for the average and the maximum."""

    nominal: SpeedUp
    average: Interval
    maximum: Interval

    @property
    def over(self) -> str:
        """The other policy."""
        return self.nominal.over


def inside(interval: Interval, paper: float) -> bool:
    """Whether the paper's number is in the interval."""
    return interval.low <= paper <= interval.high


def ratios(rows: Rows, known: Sequence[Interval]) -> list[Ratio]:
    """Return the speed-ups over every other policy."""
    rates = {cell: summary.samples_per_second for cell, summary in rows.items()}
    of = {(i.what, i.policy): i for i in known if not i.model}
    return [Ratio(speedup(over, rates), of["average", over], of["maximum", over]) for over in PUBLISHED]


def throughput_csv(rows: Rows) -> str:
    """One row per model and policy; times and rates are empty if training does not fit."""
    header = (
        "gpus model parameters policy verdict iteration_seconds samples_per_second tflops_per_gpu "
        "gpu_peak_bytes host_peak_bytes plan clock kernels"
    )
    lines = [header.split()]
    for (model, policy), s in rows.items():
        numbers = (s.iteration_seconds, s.samples_per_second, s.tflops_per_gpu)
        lines.append(
            [
                str(GPUS),
                model,
                str(MODELS[model].parameters),
                policy,
                s.verdict,
                *("" if number is None else f"{number:.6g}" for number in numbers),
                *("" if size is None else str(size) for size in (s.gpu_peak_bytes, s.host_peak_bytes)),
                str(s.plan or ""),
                s.clock,
                MODELS[model].kernels,
            ]
        )
    return csv_text(lines)


def ratios_csv(rows: Sequence[Ratio]) -> str:
    """One row per policy: averages, then maxima. ``figures_low`` and ``_high`` leave the model's own error out."""
    names = ["", "low", "high", "paper", "inside", "figures_low", "figures_high"]
    lines = [["over", "version", *(_column(what, name) for what in ("average", "maximum") for name in names)]]
    for r in rows:
        system, _, version = r.over.partition(":deepspeed=")
        cells = [system, version]
        for what in ("average", "maximum"):
            interval, paper = getattr(r, what), getattr(PUBLISHED[r.over], what)
            numbers = (getattr(r.nominal, what), interval.low, interval.high, paper)
            cells += [f"{number:.5g}" for number in numbers]
            cells += ["yes" if inside(interval, paper) else "no", f"{interval.figures_low:.5g}", f"{interval.figures_high:.5g}"]
        lines.append(cells)
    return csv_text(lines)


def _column(what: str, name: str) -> str:
    """Columns of averages have plain names, those of maxima a prefix."""
    if not name:
        return what
    return name if what == "average" else f"maximum_{name}"


@dataclass(frozen=True, slots=True)
class Bound:
    """What a published number would require, beside what is possible and what was measured elsewhere."""

    claim: str
    needed: str
    possible: str
    elsewhere: str

    def cells(self) -> list[str]:
        """As a row."""
        return [self.claim, self.needed, self.possible, self.elsewhere]


def bounds(rows: Rows) -> list[Bound]:
    """Return what the paper's ratios over ZeRO-Offload would require of the host, and of the GPU's memory."""
    node = load_hardware(NODE)
    limit = list(MODELS)[: list(MODELS).index(ZERO_OFFLOAD_LIMIT) + 1]
    ratio, dram = PUBLISHED[ZERO_OFFLOAD[0]].maximum, node.host.memory_bandwidth
    needs = []
    gpu_seconds = [_gpu_seconds(rows[model, AUTOHETE]) for model in limit]
    for policy, copies in ((ZERO_OFFLOAD[0], "overlapped"), (ZERO_OFFLOAD[1], "blocking"), (ZERO_OFFLOAD[2], "blocking")):
        needed = [_needed_bandwidth(m, policy, ratio * seconds) / 1e9 for m, seconds in zip(limit, gpu_seconds, strict=True)]
        version = policy.partition("=")[2]
        needs.append(
            Bound(
                f"{copies} fp32 copies (DeepSpeed {version}) and GPU-bound AutoHete: at most {ratio} at 2B to 12B",
                f"{min(needed):.0f} to {max(needed):.0f} GB/s of DRAM by Adam ({', '.join(f'{x:.0f}' for x in needed)})",
                f"DRAM peak {dram / 1e9:.0f} GB/s",
                f"{node.cpu.update_bandwidth / 1e9:.0f} GB/s (one process, EPYC 7543P)",
            )
        )
    model = MODELS[ZERO_OFFLOAD_LIMIT]
    needs.append(
        Bound(
            f"DeepSpeed 0.14.1 to 0.16.9 trains {model.parameters / 1e9:.1f}B: fp32 master of the whole model on the GPU",
            format_bytes(6 * model.parameters),
            format_bytes(node.gpu_capacity_bytes),
            "pull 7309: 'about 3x that of params_FP16'",
        )
    )
    limits = [_priority_limit(rows, name) for name in MODELS]
    needs.append(
        Bound(
            "priority gain of these plans, on average, even if every wait outside the schedule's lower bound vanished",
            f"{PUBLISHED[NO_PRIORITY].average}",
            f"{mean(limits):.2f} ({', '.join(f'{limit:.2f}' for limit in limits)} from 2B to 22B)",
            "-",
        )
    )
    return needs


def _gpu_seconds(summary: Summary) -> float:
    """Return the GPU's own work in an iteration."""
    assert summary.iteration_seconds is not None
    return summary.lanes[GPU] * summary.iteration_seconds


def _needed_bandwidth(model: str, policy: str, seconds: float) -> float:
    """Return the DRAM traffic of Adam at which ``policy`` takes at most ``seconds``; infinite if no rate is enough."""
    simulation = simulate(MODELS[model], load_hardware(NODE), parse_policy(policy))
    traffic = sum(block.parameters for block in simulation.profile.units) * simulation.plan.update_bytes
    rest = simulation.iteration_seconds - traffic / simulation.profile.hardware.cpu.update_bandwidth
    return traffic / (seconds - rest) if seconds > rest else float("inf")


def _priority_limit(rows: Rows, model: str) -> float:
    """Return the iteration time without priority over the lower bound of AutoHete's schedule with priority."""
    fifo, best = rows[model, NO_PRIORITY], rows[model, AUTOHETE]
    assert fifo.iteration_seconds is not None
    assert best.bound_seconds is not None
    return fifo.iteration_seconds / best.bound_seconds


@dataclass(frozen=True, slots=True)
class Variant:
    """AutoHete with another CPU step, which the paper does not describe, over each policy; without priority it is its own."""

    flags: str
    speedups: list[SpeedUp]


def variants(rows: Rows, jobs: int | None = None) -> list[Variant]:
    """Return AutoHete's speed-ups with each CPU step, over the policies that the paper compares it with."""
    names = {flags: {AUTOHETE: f"autohete:{flags}", NO_PRIORITY: f"autohete:{flags},priority=off"} for flags in VARIANTS}
    rates = run_all(Job.run, [Job(model, name) for some in names.values() for name in some.values() for model in MODELS], jobs)
    nominal = {cell: summary.samples_per_second for cell, summary in rows.items()}
    made = []
    for flags, named in names.items():
        own = {(m, policy): rates[Job(m, name)].samples_per_second for m in MODELS for policy, name in named.items()}
        made.append(Variant(flags, [speedup(over, nominal | own) for over in PUBLISHED]))
    return made


def variants_csv(rows: Sequence[Variant]) -> str:
    """One row per variant and policy."""
    lines = [["autohete", "over", "average", "maximum"]]
    lines += [[v.flags, s.over, f"{s.average:.5g}", f"{s.maximum:.5g}"] for v in rows for s in v.speedups]
    return csv_text(lines)


# --- what it shows ------------------------------------------------------------------------------------------------


def print_throughput(rows: Rows) -> None:
    """Print the comparison as a table: one row per model and policy."""
    title = f"{GPUS} GPU of {NODE}, fp16, eager kernels, simulated"
    columns = ["model", "policy", "verdict", "iteration", "samples/s", "TFLOP/s", "GPU peak", "host peak", "plan"]
    give_way = ["TFLOP/s", "host peak", "plan"]
    shown = table(title, columns, left=3, give_way=give_way, elsewhere="fig_throughput.csv has them")
    for (model, policy), s in rows.items():
        shown.add_row(
            model if policy == POLICIES[0] else "",
            policy,
            s.verdict,
            or_dash(s.iteration_seconds, format_seconds),
            or_dash(s.samples_per_second, "{:.2f}".format),
            or_dash(s.tflops_per_gpu, "{:.1f}".format),
            or_dash(s.gpu_peak_bytes, format_bytes),
            or_dash(s.host_peak_bytes, format_bytes),
            str(s.plan or "-"),
            end_section=policy == POLICIES[-1],
        )
    console().print(shown)


def print_ratios(rows: Sequence[Ratio]) -> None:
    """Print simulated against published speed-ups: one row per average, then one per maximum."""
    columns = ["AutoHete over", "simulated", "figures only", "5 to 95 %", "paper", "difference", "inside"]
    for what in ("average", "maximum"):
        shown = table(f"{what} speed-ups over the models that both train", columns)
        for r in rows:
            nominal, interval = getattr(r.nominal, what), getattr(r, what)
            paper = getattr(PUBLISHED[r.over], what)
            shown.add_row(
                r.over,
                f"{nominal:.2f}",
                f"{interval.figures_low:.2f} to {interval.figures_high:.2f}",
                f"{interval.low:.2f} to {interval.high:.2f}",
                f"{paper:.2f}",
                f"{100 * (nominal / paper - 1):+.0f} %",
                "yes" if inside(interval, paper) else "no",
            )
        console().print(shown)


def print_variants(rows: Sequence[Variant]) -> None:
    """Print the average speed-ups of AutoHete with another CPU step."""
    shown = table("average speed-ups of AutoHete with another CPU step", ["over", *(v.flags for v in rows)])
    for i, over in enumerate(PUBLISHED):
        shown.add_row(over, *(f"{v.speedups[i].average:.2f}" for v in rows))
    console().print(shown)


def print_bounds(rows: Sequence[Bound]) -> None:
    """Print the bounds."""
    out = console()
    print_text(out, "what the published numbers would require")
    for bound in rows:
        print_text(out, f"  {bound.claim}")
        print_text(out, f"    needed: {bound.needed}")
        print_text(out, f"    possible: {bound.possible}; measured elsewhere: {bound.elsewhere}")


def draw(rows: Rows, speedups: Sequence[Ratio], known: Sequence[Interval]) -> Figure:
    """Draw throughput by model on the left, speed-ups beside the paper's on the right."""
    with style():
        figure = Figure(figsize=(10.2, 4.0), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2.9, 1.3))
        _draw_throughput(left, rows, known)
        _draw_ratios(right, speedups)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return figure


def _draw_throughput(axes: Axes, rows: Rows, known: Sequence[Interval]) -> None:
    models = list(MODELS)
    width = 0.84 / len(POLICIES)
    ranges = {(i.model, i.policy): i for i in known if i.model}
    for place, policy in enumerate(POLICIES):
        seen = look(policy)
        for x, model in enumerate(models):
            summary = rows[model, policy]
            at = x + (place - (len(POLICIES) - 1) / 2) * width
            label = seen.label if x == 0 else None
            rate, flops = summary.samples_per_second, summary.tflops_per_gpu
            axes.bar(
                at, flops or 0.0, width, color=seen.colour, hatch=seen.hatch, label=label, edgecolor="white", linewidth=0.3
            )
            if summary.verdict is not Verdict.OK:
                if policy == ZERO_OFFLOAD[1]:  # all three versions run out of memory together
                    axes.annotate("out of memory", (at, 1.5), rotation=90, ha="center", va="bottom", fontsize=6, color="0.25")
            elif (i := ranges.get((model, policy))) is not None and rate is not None and flops is not None:
                low, high = flops * i.low / rate, flops * i.high / rate
                axes.plot([at, at], [low, high], color="black", linewidth=0.8, solid_capstyle="butt")
    axes.set_xticks(range(len(models)), [f"{MODELS[model].parameters / 1e9:.1f}B" for model in models])
    axes.set_xlabel("parameters of the model")
    axes.set_ylabel("throughput (model TFLOP/s per GPU)")
    setting = batch_of(MODELS[models[0]])
    axes.set_title(f"simulated throughput with 5 to 95 % interval, 1 x A100-40GB, {setting}", fontsize="medium")


def _draw_ratios(axes: Axes, speedups: Sequence[Ratio]) -> None:
    for y, r in enumerate(reversed(speedups)):
        seen, paper = look(r.over), PUBLISHED[r.over]
        colour = seen.ink
        axes.plot([r.average.low, r.average.high], [y, y], color=colour, linewidth=1.2)
        figures = [r.average.figures_low, r.average.figures_high]
        axes.plot(figures, [y, y], color=colour, linewidth=5, alpha=0.4, solid_capstyle="butt")
        axes.plot(r.nominal.average, y, "o", color=colour, markersize=6)
        axes.plot(paper.average, y, "D", color="black", markersize=5, fillstyle="none")
        axes.annotate(seen.label, (0.02, y + 0.2), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
    axes.set_yticks([])
    axes.set_ylim(-0.6, len(speedups) - 0.2)
    axes.set_xlim(left=min(0.95, *(r.average.low - 0.05 for r in speedups)))
    axes.set_xlabel("AutoHete's average speed-up over")
    axes.set_title("against the paper", fontsize="medium")
    legend = [
        Line2D([], [], marker="o", linestyle="none", color="0.4", label="simulated, nominal"),
        Line2D([], [], linewidth=5, color="0.75", label="5 to 95 %, uncertain figures"),
        Line2D([], [], linewidth=1.2, color="0.4", label="5 to 95 %, model error too"),
        Line2D([], [], marker="D", linestyle="none", color="black", fillstyle="none", label="paper"),
    ]
    axes.legend(handles=legend, loc="lower right", fontsize=7)


def main(*, out: Path = Path("paper_figs"), jobs: int | None = None) -> None:
    """Simulate, print and draw.

    Parameters
    ----------
    out:
        Folder for the figure and the CSV files.
    jobs:
        Number of processes. By default one per core.
    """
    make_folder(out)
    known = read_intervals(INTERVALS)
    rates = run_all(Job.run, grid(), jobs)
    rows = {(job.model, job.policy): rates[job] for job in grid()}
    speedups, proofs, others = ratios(rows, known), bounds(rows), variants(rows, jobs)
    write_text(out / "fig_throughput.csv", throughput_csv(rows))
    write_text(out / "fig_throughput_ratios.csv", ratios_csv(speedups))
    write_text(out / "fig_throughput_variants.csv", variants_csv(others))
    header = ["claim", "needed", "possible", "measured_elsewhere"]
    write_text(out / "fig_throughput_bounds.csv", csv_text([header, *(bound.cells() for bound in proofs)]))
    figure = draw(rows, speedups, known)
    for suffix in ("png", "pdf"):
        save_figure(figure, out / f"fig_throughput.{suffix}")
    print_throughput(rows)
    print_ratios(speedups)
    print_variants(others)
    print_bounds(proofs)
    print_text(console(), f"written: {out}/fig_throughput.{{png,pdf,csv}}, {out}/fig_throughput_{{ratios,variants,bounds}}.csv")


if __name__ == "__main__":
    run_app(App(name="fig_throughput", default_command=main, help=__doc__))
