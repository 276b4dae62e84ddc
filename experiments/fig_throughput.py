"""How fast do GPT models of 2B to 22B train on one A100-40GB under four offloading systems?

Command: ``python experiments/fig_throughput.py [--out DIR]``. Machine: any; everything is simulated.

Writes ``fig_throughput.{png,pdf,csv}`` (throughput of every model under every policy) and
``fig_throughput_sensitivity.csv`` (how AutoHete's speed-ups move when an uncertain figure moves across its published
range), and prints both, with the paper's one-GPU speed-ups beside them.

What would refute it: a speed-up outside the paper's by more than the uncertain figures can explain, or a model that the
paper trained and the simulation does not fit (or the contrary).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python experiments/fig_throughput.py` from anywhere

if __name__ == "__main__":  # before the imports that take time
    from autohete.interrupt import catch_interrupts

    catch_interrupts("fig_throughput")

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from cyclopts import App
from joblib import Parallel, delayed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autohete.cli import run_app
from autohete.hardware import load_hardware, uncertain_figures
from autohete.interrupt import children_uninterrupted
from autohete.policies import parse_policy
from autohete.policy import Verdict
from autohete.profile import analytic_profile
from autohete.report.style import POLICY_LOOKS, save_figure, style
from autohete.report.tables import console, or_dash, table
from autohete.report.write import make_folder, write_text
from autohete.summary import Summary, answer
from autohete.units import format_bytes, format_seconds
from autohete.workload import WORKLOADS
from experiments import paper

NODE = "a100-40gb-epyc7713"
GPUS = 1
AUTOHETE, NO_PRIORITY = "autohete", "autohete:priority=off"
BASELINES = list(paper.SPEEDUPS)
POLICIES = [*BASELINES, NO_PRIORITY, AUTOHETE]
#: Sensitivities are taken at one size that every system trains; the whole range would say the same, slowly.
PROBE = "gpt-10b"


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that is changed from the comparison as published, and what is simulated under it."""

    label: str
    value: str
    overrides: dict[str, str] = field(default_factory=dict)
    fused_attention: bool = False
    #: Policy -> the flags it runs with instead.
    variants: dict[str, str] = field(default_factory=dict)


NOMINAL = Setting("nominal", "")


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation: a model under a policy in a setting."""

    model: str
    policy: str
    setting: Setting = NOMINAL

    def run(self) -> Summary:
        """Simulate it. Takes from 0.1 to 1 s."""
        workload = replace(WORKLOADS[self.model], fused_attention=self.setting.fused_attention)
        hardware = load_hardware(NODE, self.setting.overrides)
        policy = parse_policy(self.setting.variants.get(self.policy, self.policy))
        summary, _ = answer(analytic_profile(workload, hardware), policy)
        return summary


def settings() -> list[Setting]:
    """Each uncertain hardware figure at both ends of its published range, then what is uncertain about the systems."""
    moved = [Setting(key, end, {key: end}) for key, ends in uncertain_figures(NODE).items() for end in ends]
    return [
        *moved,
        Setting("attention", "fused", fused_attention=True),
        Setting("autohete", "fused_casts", variants={AUTOHETE: "autohete:fused_casts"}),
        Setting("patrickstar", "gpu_share=80", variants={"patrickstar": "patrickstar:gpu_share=80"}),
        Setting("zero_offload", "paper", variants={"zero_offload": "zero_offload:paper,tile_overlap"}),
    ]


def run_all(jobs: Sequence[Job]) -> dict[tuple[str, str, str, str], Summary]:
    """All jobs on all cores, with a progress bar where there is a terminal."""
    found: dict[tuple[str, str, str, str], Summary] = {}
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        bar = progress.add_task("simulating", total=len(jobs))
        # Batches of one: a policy that searches takes ten times as long as one that does not.
        parallel = Parallel(n_jobs=os.cpu_count(), return_as="generator_unordered", batch_size=1)
        with children_uninterrupted():
            results = parallel(delayed(_run)(job) for job in jobs)
        for job, summary in results:
            found[job.model, job.policy, job.setting.label, job.setting.value] = summary
            progress.advance(bar)
    return found


def _run(job: Job) -> tuple[Job, Summary]:
    return job, job.run()


# --- what it says -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """AutoHete's throughput over another's, over the models that both train."""

    over: str
    average: float
    maximum: float
    paper_average: float
    paper_maximum: float


def ratio(fast: Summary, slow: Summary) -> float | None:
    """Throughput of ``fast`` over ``slow``; None where one of them does not fit."""
    if fast.samples_per_second is None or slow.samples_per_second is None:
        return None
    return fast.samples_per_second / slow.samples_per_second


def speedups(rows: dict[tuple[str, str], Summary]) -> list[SpeedUp]:
    """Average and maximum over the models, beside the paper's."""
    found = []
    for over, published in [*paper.SPEEDUPS.items(), (NO_PRIORITY, paper.PRIORITY_SPEEDUP)]:
        ratios = [r for model in WORKLOADS if (r := ratio(rows[model, AUTOHETE], rows[model, over])) is not None]
        found.append(SpeedUp(over, mean(ratios), max(ratios), *published))
    return found


def throughput_csv(rows: dict[tuple[str, str], Summary]) -> str:
    """One row per model and policy; times and rates are empty where the training does not fit."""
    header = (
        "gpus model parameters policy verdict iteration_seconds samples_per_second tflops_per_gpu "
        "gpu_peak_bytes host_peak_bytes plan clock"
    )
    lines = [header.split()]
    for (model, policy), s in rows.items():
        numbers = (s.iteration_seconds, s.samples_per_second, s.tflops_per_gpu)
        lines.append(
            [
                str(GPUS),
                model,
                str(WORKLOADS[model].parameters),
                policy,
                s.verdict,
                *("" if number is None else f"{number:.6g}" for number in numbers),
                *("" if size is None else str(size) for size in (s.gpu_peak_bytes, s.host_peak_bytes)),
                str(s.plan or ""),
                s.clock,
            ]
        )
    return _csv(lines)


def _csv(lines: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Speed-ups over each baseline at the probe size with one thing changed; None where something does not fit."""

    setting: Setting
    ratios: dict[str, float | None]


def sensitivities(found: dict[tuple[str, str, str, str], Summary]) -> list[Sensitivity]:
    """Nominal first, then every setting."""

    def at(setting: Setting) -> Sensitivity:
        label, value = setting.label, setting.value
        fast = found[PROBE, AUTOHETE, label, value]
        return Sensitivity(setting, {over: ratio(fast, found[PROBE, over, label, value]) for over in BASELINES})

    return [at(NOMINAL), *(at(setting) for setting in settings())]


def sensitivity_csv(rows: Sequence[Sensitivity]) -> str:
    """One row per setting: what was changed, to what, and AutoHete's speed-up over each baseline."""
    lines = [["figure", "value", "model", *BASELINES]]
    for row in rows:
        ratios = ("" if r is None else f"{r:.4f}" for r in row.ratios.values())
        lines.append([row.setting.label, row.setting.value, PROBE, *ratios])
    return _csv(lines)


# --- what it shows ------------------------------------------------------------------------------------------------


def print_throughput(rows: dict[tuple[str, str], Summary]) -> None:
    """The comparison as a table: a row per model and policy."""
    title = f"{GPUS} GPU of {NODE}, simulated"
    columns = ["model", "policy", "verdict", "iteration", "samples/s", "TFLOP/s", "GPU peak", "host peak", "plan"]
    give_way = ["TFLOP/s", "host peak", "plan"]
    shown = table(title, columns, left=3, give_way=give_way, elsewhere="fig_throughput.csv has them")
    for (model, policy), s in rows.items():
        shown.add_row(
            model if policy == POLICIES[0] else "",
            policy,
            s.verdict.value,
            or_dash(s.iteration_seconds, format_seconds),
            or_dash(s.samples_per_second, "{:.2f}".format),
            or_dash(s.tflops_per_gpu, "{:.1f}".format),
            or_dash(s.gpu_peak_bytes, format_bytes),
            or_dash(s.host_peak_bytes, format_bytes),
            str(s.plan or "-"),
            end_section=policy == POLICIES[-1],
        )
    console().print(shown)


def print_speedups(found: Sequence[SpeedUp]) -> None:
    """Simulated against published."""
    columns = ["AutoHete over", "average", "paper", "difference", "maximum", "paper", "difference"]
    shown = table("speed-ups over the models that both train", columns)
    for s in found:
        shown.add_row(
            s.over,
            f"{s.average:.2f}",
            f"{s.paper_average:.2f}",
            f"{100 * (s.average / s.paper_average - 1):+.0f} %",
            f"{s.maximum:.2f}",
            f"{s.paper_maximum:.2f}",
            f"{100 * (s.maximum / s.paper_maximum - 1):+.0f} %",
        )
    console().print(shown)


def print_sensitivities(rows: Sequence[Sensitivity]) -> None:
    """Speed-ups with one thing changed; only what moves one by a percent or more."""
    nominal = rows[0].ratios
    shown = table(f"sensitivity of AutoHete's speed-ups, {PROBE}", ["figure", "set to", *BASELINES], left=2)
    quiet: list[str] = []
    loud: set[str] = set()
    for row in rows:
        moves = [abs(r / n - 1) if r and n else 1.0 for r, n in zip(row.ratios.values(), nominal.values(), strict=True)]
        if row is not rows[0] and max(moves) < 0.01:
            quiet.append(row.setting.label)
        else:
            loud.add(row.setting.label)
            ratios = (f"{r:.2f}" if r else "does not fit" for r in row.ratios.values())
            shown.add_row(row.setting.label, row.setting.value, *ratios)
    console().print(shown)
    still = [label for label in dict.fromkeys(quiet) if label not in loud]
    console().print(f"less than 1 % at either end: {', '.join(still)}", style="dim", soft_wrap=True)


def draw(rows: dict[tuple[str, str], Summary], found: Sequence[SpeedUp], sensitive: Sequence[Sensitivity]) -> Figure:
    """Throughput by model on the left, speed-ups beside the paper's on the right."""
    with style():
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 1.25))
        _draw_throughput(left, rows)
        _draw_speedups(right, found, sensitive)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(POLICIES))
    return figure


def _draw_throughput(axes: Axes, rows: dict[tuple[str, str], Summary]) -> None:
    models = list(WORKLOADS)
    width = 0.82 / len(POLICIES)
    for place, policy in enumerate(POLICIES):
        look = POLICY_LOOKS[policy]
        xs = [x + (place - (len(POLICIES) - 1) / 2) * width for x in range(len(models))]
        heights = [rows[model, policy].tflops_per_gpu or 0.0 for model in models]
        axes.bar(xs, heights, width, color=look.colour, hatch=look.hatch, label=look.label, edgecolor="white", linewidth=0.4)
        for x, model in zip(xs, models, strict=True):
            if rows[model, policy].verdict is not Verdict.OK:
                axes.annotate("out of memory", (x, 1.5), rotation=90, ha="center", va="bottom", fontsize=6, color="0.25")
    axes.set_xticks(range(len(models)), [f"{WORKLOADS[model].parameters / 1e9:.1f}B" for model in models])
    axes.set_xlabel("parameters of the model")
    axes.set_ylabel("throughput (model TFLOP/s per GPU)")
    axes.set_title("simulated throughput, 1 x A100-40GB, batch 8 x 1024 tokens", fontsize="medium")


def _draw_speedups(axes: Axes, found: Sequence[SpeedUp], sensitive: Sequence[Sensitivity]) -> None:
    for y, s in enumerate(reversed(found)):
        look = POLICY_LOOKS[s.over]
        nominal = sensitive[0].ratios.get(s.over)
        if nominal is not None:
            # The range that the uncertain figures open at the probe size, carried over to the average.
            moved = [r / nominal for row in sensitive if (r := row.ratios[s.over]) is not None]
            low, high = s.average * min(moved), s.average * max(moved)
            axes.plot([low, high], [y, y], color=look.colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
        axes.plot(s.average, y, "o", color=look.colour, markersize=7)
        axes.plot(s.paper_average, y, "D", color="black", markersize=5, fillstyle="none")
        axes.annotate(look.label, (0.02, y + 0.2), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
    axes.set_yticks([])
    axes.set_ylim(-0.5, len(found) - 0.3)
    axes.set_xlim(left=1.0)
    axes.set_xlabel("AutoHete's average speed-up over")
    axes.set_title("against the paper", fontsize="medium")
    legend = [
        Line2D([], [], marker="o", linestyle="none", color="0.4", label="simulated"),
        Line2D([], [], linewidth=5, color="0.75", label="if uncertain figures move"),
        Line2D([], [], marker="D", linestyle="none", color="black", fillstyle="none", label="paper"),
    ]
    axes.legend(handles=legend, loc="lower right", fontsize=7)


def main(*, out: Path = Path("paper_figs")) -> None:
    """Simulate, print, draw.

    Parameters
    ----------
    out:
        Folder for the figure and the CSV files.
    """
    make_folder(out)
    grid = [Job(model, policy) for model in WORKLOADS for policy in POLICIES]
    probes = [Job(PROBE, policy, setting) for setting in settings() for policy in [*BASELINES, AUTOHETE]]
    found = run_all([*grid, *probes])
    rows = {(job.model, job.policy): found[job.model, job.policy, NOMINAL.label, NOMINAL.value] for job in grid}
    ratios, sensitive = speedups(rows), sensitivities(found)
    write_text(out / "fig_throughput.csv", throughput_csv(rows))
    write_text(out / "fig_throughput_sensitivity.csv", sensitivity_csv(sensitive))
    figure = draw(rows, ratios, sensitive)
    for suffix in ("png", "pdf"):
        save_figure(figure, out / f"fig_throughput.{suffix}")
    print_throughput(rows)
    print_speedups(ratios)
    print_sensitivities(sensitive)
    console().print(f"written: {out}/fig_throughput.{{png,pdf,csv}}, {out}/fig_throughput_sensitivity.csv", soft_wrap=True)


if __name__ == "__main__":
    run_app(App(name="fig_throughput", default_command=main, help=__doc__))
