"""Does the simulator predict what the runtime does?

Command: ``python experiments/fidelity.py [--out DIR] [--paced N] [--native N] [--more N] [--seed N]``. Machine: any with
PyTorch, otherwise idle. Takes about 2 s per paced setting and 15 s per native one.

Settings are drawn with a seed: policy, model, memory budget, speed of links and CPU. Each is simulated, and executed by the
torch runtime, which trains a small GPT for real in lane threads within a byte-exact memory budget. Two questions, two answers:

- *paced* (clock ``emulated``): every task lasts as long as in the schedule, by deadlines, with links and host memory shared.
  Sizes are measured on the small model; times are those of a large model on a drawn node, stretched to a quarter of a second
  per iteration, or until the CPU keeps up. Measurements are wall-clock times. This tests order and waiting.
- *native* (clock ``measured-cpu``): as fast as the CPU allows. Blocks, copies and optimizer steps are first measured one by
  one; the simulator predicts how they run together and slow each other down. This tests the model of time. More native
  settings are of policies that move other kinds of values, some of them to a drive: the one with DIR.

Writes ``fidelity.{csv,png,pdf}``, ``fidelity_lanes.csv`` (work of each lane, idle time by cause, order) and
``fidelity_timeline.{png,pdf}``. What would refute it: a mean absolute error of the iteration time above 2 % paced or 8 %
native, any above 5 % paced, or a memory peak more than 3 % off.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from cyclopts import App
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich.progress import track
from torch import Tensor

from autohete.analysis.comparison import Comparison, compare
from autohete.analysis.usage import Cause
from autohete.cli.app import run_app
from autohete.errors import InfeasibleError
from autohete.execution.trace import Clock, Trace
from autohete.files import make_folder, write_text
from autohete.hardware import Hardware, load_hardware
from autohete.policies import parse_policy
from autohete.profile import Profile, analytic_profile
from autohete.report.gantt import two_row_figure
from autohete.report.style import BLUE, VERMILION, save_figure, style
from autohete.report.tables import console, print_text, table
from autohete.runtime.ledger import Counting
from autohete.runtime.settings import Execution
from autohete.runtime.torch_executor import TorchExecutor
from autohete.simulate import Simulation, judge_for, safety, simulate_plan, simulate_schedule
from autohete.train.as_executed import as_executed, everything_resident
from autohete.train.gpt import GPT
from autohete.train.measured import measured_hardware, measured_profile_on
from autohete.workload import Precision, Workload
from experiments.shared import csv_text

POLICIES = [
    "resident",
    "zero_offload",
    "zero_offload:paper,tile_overlap",
    "patrickstar:chunk_size=1",
    "stronghold",
    "stronghold:window=1",
    "autohete",
    "autohete:priority=off",
]
#: Native only: they move optimizer states, activations or parameters, or let values rest on a drive.
MORE = ["streamed_states:weights", "offload_activations", "zero3_offload", "joint", "zero_infinity", "zero_infinity:pipeline"]
#: Policies that decide by the memory budget; the others decide without it.
SEARCHING = ("autohete", "joint")
#: Paced, and native; native runs are shorter, and disturbed by other work on the machine.
ITERATIONS = {Clock.EMULATED: 6, Clock.MEASURED_CPU: 7}
#: Native runs per setting; blocks are measured before, between and after them, because such machines drift by tens of percent
#: within seconds.
RUNS = 8
#: Minimum length of a paced iteration, and minimum ratio of a pass's length to its work.
ITERATION_SECONDS, PACE_MARGIN = 0.25, 1.5
#: If a task of a paced run ends this long after its deadline, the machine stalled, and the run says nothing about the schedule:
#: it is repeated, whether or not it agrees with the prediction.
STANDSTILL_SECONDS, PACED_ATTEMPTS = 0.01, 4
#: A node is drawn again if its passes are so short next to its copies and updates that iterations would take longer than this.
LONGEST_SECONDS = 0.6
#: Goals for the mean and the worst absolute error of the iteration time, in percent (None: no goal).
GOALS: dict[Clock, tuple[float, float | None]] = {Clock.EMULATED: (2.0, 5.0), Clock.MEASURED_CPU: (8.0, None)}
PEAK_GOAL_PERCENT = 3.0
#: The setting whose timeline is drawn: the last native one of this policy.
DRAWN_POLICY = "autohete"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained, under which policy and budget, and on which node.

    Args:
        policy: name and flags.
        workload: the small model that is actually trained.
        budget_share: device memory, as a share of what fully resident training would need; None: no limit.
        large: for a paced setting, the model whose times are used; None: native.
        overrides: for a paced setting, changes to the node.
    """

    policy: str
    workload: Workload
    budget_share: float | None
    large: Workload | None
    overrides: dict[str, str]

    @property
    def uses_drive(self) -> bool:
        """Whether values rest on a drive."""
        return self.policy.startswith("zero_infinity")

    @property
    def clock(self) -> Clock:
        """Clock of the measurement."""
        return Clock.MEASURED_CPU if self.large is None else Clock.EMULATED

    @property
    def name(self) -> str:
        """Name that is short and unique enough for a table."""
        w = self.large or self.workload
        budget = "" if self.budget_share is None else f" memory {self.budget_share:.0%}"
        return f"{w.transformer_blocks}x{w.hidden_size} b{w.batch_size} s{w.sequence_length}{budget}" + "".join(
            f" {value}" for value in self.overrides.values()
        )


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Prediction and measurement of one setting.

    Args:
        setting: the setting that was drawn.
        predicted: the simulation.
        runs: traces of the executed runs.
        measured_peak_bytes: peak of the device.
        late_seconds: largest delay of a paced task after its deadline.
        attempts: number of paced runs until one was not disturbed.
        comparison: comparison of the prediction with the last run.
    """

    setting: Setting
    predicted: Simulation
    runs: tuple[Trace, ...]
    measured_peak_bytes: int
    late_seconds: float
    attempts: int
    comparison: Comparison

    @property
    def seconds(self) -> tuple[float, float]:
        """Predicted and measured iteration time: paced, the mean of the second half; native, the median, as for the blocks."""
        if self.setting.clock is Clock.EMULATED:
            return self.predicted.iteration_seconds, self.measured.steady().period_seconds
        intervals = np.concatenate([np.diff(run.anchors()[2:]) for run in self.runs])
        return self.predicted.iteration_seconds, float(np.median(intervals)) * 1e-9

    @property
    def measured(self) -> Trace:
        """The last run."""
        return self.runs[-1]

    @property
    def error_percent(self) -> float:
        """Predicted against measured."""
        predicted, measured = self.seconds
        return 100 * (predicted / measured - 1)

    @property
    def peak_error_percent(self) -> float:
        """Predicted against measured."""
        return 100 * (self.predicted.gpu.peak_bytes / self.measured_peak_bytes - 1)


def draw(rng: random.Random, policy: str, native: bool) -> Setting:
    """Draw a random setting of a policy."""
    share = rng.choice([0.3, 0.4, 0.6, 1.2]) if policy.startswith(SEARCHING) else None
    blocks, tied = rng.randint(3, 6), rng.random() < 0.5
    if native:
        hidden, batch_size, sequence_length = rng.choice(
            [(256, 2, 64), (256, 4, 128), (384, 1, 32), (384, 2, 64), (512, 1, 32), (512, 1, 64)]
        )
        small = Workload(
            "native",
            hidden,
            blocks,
            4,
            vocabulary_size=512,
            sequence_length=sequence_length,
            batch_size=batch_size,
            precision=Precision.FP32,
            tied_embeddings=tied,
        )
        return Setting(policy, small, share, None, {})
    small = Workload(
        "tiny",
        rng.choice([32, 48, 64]),
        blocks,
        2,
        vocabulary_size=101,
        sequence_length=16,
        batch_size=2,
        precision=rng.choice([Precision.FP32, Precision.BF16]),
        tied_embeddings=tied,
    )
    large = Workload(
        "large", rng.choice([1024, 2048, 4096]), blocks, 16, batch_size=rng.choice([2, 4, 8]), tied_embeddings=tied
    )
    link = f"{rng.choice([6, 12, 25, 50])}GB/s"
    overrides = {
        "links.h2d.bandwidth": link,
        "links.d2h.bandwidth": link,
        "cpu.update_bandwidth": f"{rng.choice([20, 40, 80])}GB/s",
        "host.memory_bandwidth": f"{rng.choice([60, 200])}GB/s",
    }
    return Setting(policy, small, share, large, overrides)


def batches(workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random tokens without end."""
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch_size, workload.sequence_length)
    while True:
        ids = torch.randint(0, workload.vocabulary_size, shape, generator=generator)
        yield ids, ids


def paced_profile(measured: Profile, large: Workload, overrides: dict[str, str]) -> Profile:
    """Combine the sizes of ``measured`` with the times of ``large`` on a drawn node."""
    node = load_hardware("a100-40gb-epyc7713", overrides)
    wanted = analytic_profile(large, node)
    # Copying a small block takes as long as copying a large one; all bandwidths keep their proportions.
    smaller = (measured.units[1].parameters * measured.element_bytes) / (wanted.units[1].parameters * wanted.element_bytes)
    blocks = tuple(
        replace(
            small,
            forward_seconds=big.forward_seconds,
            backward_seconds=big.backward_seconds,
            gpu_update_seconds=big.gpu_update_seconds,
            cpu_update_seconds=big.parameters * 28 / node.cpu.update_bandwidth,
        )
        for small, big in zip(measured.units, wanted.units, strict=True)
    )
    return replace(
        measured,
        hardware=replace(_scaled(node, smaller), gpu=measured.hardware.gpu),
        units=blocks,
        loss=replace(measured.loss, seconds=wanted.loss.seconds),
    )


def _scaled(node: Hardware, factor: float) -> Hardware:
    """Return ``node`` with all bandwidths of links and host multiplied by ``factor``."""
    h2d, d2h = (
        replace(link, bandwidth=link.bandwidth * factor, duplex_bandwidth=link.duplex_bandwidth * factor)
        for link in (node.h2d, node.d2h)
    )
    host = replace(node.host, memory_bandwidth=node.host.memory_bandwidth * factor)
    return replace(
        node,
        h2d=h2d,
        d2h=d2h,
        host=host,
        cpu=replace(node.cpu, update_bandwidth=node.cpu.update_bandwidth * factor, concurrent_share=1.0),
    )


def with_budget(profile: Profile, share: float | None) -> Profile:
    """Return ``profile`` with the given device memory."""
    if share is None:
        return profile
    resident = simulate_plan(profile, everything_resident(profile)).gpu.peak_bytes
    gpu = replace(profile.hardware.gpu, memory_bytes=round(share * resident) + profile.hardware.gpu.reserved_bytes)
    return replace(profile, hardware=replace(profile.hardware, gpu=gpu))


def evaluate(setting: Setting, machine: Hardware, folder: Path) -> Result | None:
    """Simulate and execute one setting; return None if it does not fit, or would take too long.

    Args:
        setting: a drawn setting.
        machine: the machine's hardware, for paced settings; native ones measure the machine again at the time.
        folder: on the drive.
    """
    torch.manual_seed(0)
    model, batch = GPT(setting.workload), next(batches(setting.workload))
    if setting.large is None:
        return _native(setting, model, batch, str(folder) if setting.uses_drive else None)
    return _paced(setting, setting.large, measured_profile_on(machine, model, batch), model)


def _paced(setting: Setting, large: Workload, measured: Profile, model: GPT) -> Result | None:
    profile = with_budget(paced_profile(measured, large, setting.overrides), setting.budget_share)
    planned = _planned(setting, profile)
    if planned is None:
        return None
    predicted = with_times(planned, stretched(profile, measured, planned.iteration_seconds))
    if predicted.iteration_seconds > LONGEST_SECONDS:
        return None
    executor = TorchExecutor(model, batches(setting.workload), None, Execution(paced=True, counting=Counting.SCHEDULED))
    attempts, disturbed = 0, True
    while disturbed and attempts < PACED_ATTEMPTS:
        run, attempts = executor.run(predicted.schedule, ITERATIONS[Clock.EMULATED]), attempts + 1
        disturbed = _late_seconds(executor) > STANDSTILL_SECONDS
    return _result(setting, predicted, executor, [run], attempts)


def _native(setting: Setting, model: GPT, batch: tuple[Tensor, Tensor], drive: str | None) -> Result | None:
    machine = measured_hardware(drive=drive)
    profiles = [measured_profile_on(machine, model, batch)]
    planned = _planned(setting, with_budget(profiles[0], setting.budget_share))
    if planned is None:
        return None
    runs = list[Trace]()
    execution = Execution(counting=Counting.SCHEDULED, folder=drive)
    executor = TorchExecutor(model, batches(setting.workload), None, execution)
    for _ in range(RUNS):
        runs.append(executor.run(planned.schedule, ITERATIONS[Clock.MEASURED_CPU]))
        profiles.append(measured_profile_on(machine, model, batch))
    predicted = with_times(planned, with_budget(mean_of(profiles), setting.budget_share))
    return _result(setting, predicted, executor, runs)


def _planned(setting: Setting, profile: Profile) -> Simulation | None:
    """Simulate the policy's plan with the waits that make it fit under any timing; None if it does not fit without them."""
    try:
        plan = as_executed(parse_policy(setting.policy).plan(profile, judge_for(profile)), profile)
    except InfeasibleError:
        return None
    planned = simulate_plan(profile, plan)
    return safety(planned).safe if planned.gpu.fits and planned.host.fits else None


def with_times(planned: Simulation, profile: Profile) -> Simulation:
    """Simulate the same schedule with the times of another profile."""
    timed = simulate_plan(profile, planned.plan)
    pairs = zip(planned.schedule.tasks, timed.schedule.tasks, strict=True)
    tasks = tuple(task._replace(duration_ns=other.duration_ns) for task, other in pairs)
    return simulate_schedule(profile, planned.plan, replace(timed.schedule, tasks=tasks))


def _result(setting: Setting, predicted: Simulation, executor: TorchExecutor, runs: list[Trace], attempts: int = 1) -> Result:
    device, comparison = executor.result.device, compare(predicted.trace, runs[-1])
    assert device is not None
    return Result(setting, predicted, tuple(runs), device.peak_bytes, _late_seconds(executor), attempts, comparison)


def _late_seconds(executor: TorchExecutor) -> float:
    return max(executor.result.late.values(), default=0) * 1e-9


def stretched(profile: Profile, real: Profile, iteration_seconds: float) -> Profile:
    """Stretch all times of ``profile`` until an iteration lasts long enough and the CPU keeps up with the blocks' passes.

    Tasks that are still too short last as long as they take on this machine.
    """
    ratios = [ITERATION_SECONDS / iteration_seconds]
    for ideal, here in zip(profile.units[1:-1], real.units[1:-1], strict=True):
        ratios.append(PACE_MARGIN * here.forward_seconds / ideal.forward_seconds)
        ratios.append(PACE_MARGIN * here.backward_seconds / ideal.backward_seconds)
    factor = max(ratios)
    blocks = tuple(
        replace(
            ideal,
            forward_seconds=max(ideal.forward_seconds * factor, PACE_MARGIN * here.forward_seconds),
            backward_seconds=max(ideal.backward_seconds * factor, PACE_MARGIN * here.backward_seconds),
            gpu_update_seconds=max(ideal.gpu_update_seconds * factor, PACE_MARGIN * here.gpu_update_seconds),
            cpu_update_seconds=(ideal.cpu_update_seconds or 0.0) * factor,
        )
        for ideal, here in zip(profile.units, real.units, strict=True)
    )
    slower = _scaled(profile.hardware, 1 / factor)
    h2d, d2h = (replace(link, latency_seconds=link.latency_seconds * factor) for link in (slower.h2d, slower.d2h))
    loss = replace(profile.loss, seconds=max(profile.loss.seconds * factor, PACE_MARGIN * real.loss.seconds))
    return replace(profile, hardware=replace(slower, h2d=h2d, d2h=d2h), units=blocks, loss=loss)


def mean_of(profiles: list[Profile]) -> Profile:
    """Return the mean of several measurements of the same blocks."""
    blocks = tuple(
        replace(
            same[0],
            forward_seconds=mean(block.forward_seconds for block in same),
            backward_seconds=mean(block.backward_seconds for block in same),
            gpu_update_seconds=mean(block.gpu_update_seconds for block in same),
            cpu_update_seconds=mean(block.cpu_update_seconds or 0.0 for block in same),
        )
        for same in zip(*(profile.units for profile in profiles), strict=True)
    )
    loss = replace(profiles[0].loss, seconds=mean(profile.loss.seconds for profile in profiles))
    return replace(profiles[0], units=blocks, loss=loss)


def as_csv(results: list[Result]) -> str:
    """One row per setting."""
    columns = "setting policy clock predicted_seconds measured_seconds error_percent predicted_peak_bytes measured_peak_bytes"
    lines: list[Sequence[object]] = [columns.split()]
    for r in results:
        times = [f"{seconds:.6f}" for seconds in r.seconds]
        peaks = [r.predicted.gpu.peak_bytes, r.measured_peak_bytes]
        lines.append([r.setting.name, r.setting.policy, r.setting.clock, *times, f"{r.error_percent:.3f}", *peaks])
    return csv_text(lines)


def lanes_csv(results: list[Result]) -> str:
    """One row per setting: work of each lane and idle time by cause, in seconds per iteration; neighbours that swapped."""
    lanes = list(dict.fromkeys(difference.lane for r in results for difference in r.comparison.lanes))
    causes = [cause for cause in Cause if cause is not Cause.COLLECTIVE]  # one GPU
    quantities = [*(f"busy_{lane}" for lane in lanes), *(f"idle_{cause.name.lower()}" for cause in causes)]
    columns = [f"{quantity}_{which}_seconds" for quantity in quantities for which in ("predicted", "measured")]
    lines: list[Sequence[object]] = [
        ["setting", "policy", "clock", *columns, "neighbours", "swapped", "late_seconds", "attempts"]
    ]
    for r in results:
        busy = {d.lane: d.busy_seconds for d in r.comparison.lanes}
        pairs = [*(busy.get(lane) for lane in lanes), *(r.comparison.idle_seconds.get(cause) for cause in causes)]
        times = [f"{value:.6f}" for pair in pairs for value in ((pair.a, pair.b) if pair else (0.0, 0.0))]
        order = [sum(d.neighbours for d in r.comparison.lanes), sum(d.swapped for d in r.comparison.lanes)]
        late = f"{r.late_seconds:.6f}"
        lines.append([r.setting.name, r.setting.policy, r.setting.clock, *times, *order, late, r.attempts])
    return csv_text(lines)


def show(results: list[Result]) -> None:
    """Print the errors by clock and policy."""
    out = console()
    for clock, policies in [(Clock.EMULATED, POLICIES), (Clock.MEASURED_CPU, POLICIES), (Clock.MEASURED_CPU, MORE)]:
        here = [r for r in results if r.setting.clock is clock and r.setting.policy in policies]
        if not here:
            continue
        goal, worst_goal = GOALS[clock]
        columns = ["policy", "settings", "mean |error|", "worst", "worst peak error", "order changed"]
        shown = table(f"iteration time, predicted against measured ({clock})", columns)
        for policy in [*policies, "all"]:
            rows = [r for r in here if policy in (r.setting.policy, "all")]
            if rows:
                errors = [abs(r.error_percent) for r in rows]
                pairs = sum(d.neighbours for r in rows for d in r.comparison.lanes)
                swapped = sum(d.swapped for r in rows for d in r.comparison.lanes)
                shown.add_row(
                    policy,
                    str(len(rows)),
                    f"{mean(errors):.2f} %",
                    f"{max(errors):.2f} %",
                    f"{max(abs(r.peak_error_percent) for r in rows):.4f} %",
                    f"{100 * swapped / max(pairs, 1):.2f} %",
                )
        out.print(shown)
        bias = mean(r.error_percent for r in here)
        worst = "" if worst_goal is None else f", worst at most {worst_goal} %"
        again = sum(r.attempts - 1 for r in here)
        repeated = f"; repeated because the machine stalled: {again} runs" if again else ""
        print_text(out, f"signed mean error {bias:+.2f} %; goal: mean at most {goal} %{worst}{repeated}")


def plot(results: list[Result]) -> Figure:
    """Draw one point per setting: predicted against measured, and the error by policy."""
    marks = {Clock.EMULATED: ("o", BLUE, "paced"), Clock.MEASURED_CPU: ("s", VERMILION, "native")}
    names = [name for name in (*POLICIES, *MORE) if any(r.setting.policy == name for r in results)]
    with style():
        figure = Figure(figsize=(7.2, 3.0), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.15])
        everything = [seconds for r in results for seconds in r.seconds]
        ends = [0.8 * min(everything), 1.25 * max(everything)]
        left.plot(ends, ends, color="0.6", linewidth=0.8)
        for clock, (mark, color, label) in marks.items():
            here = [r for r in results if r.setting.clock is clock]
            if not here:
                continue
            left.plot(*zip(*(r.seconds for r in here), strict=True), mark, color=color, alpha=0.6, markersize=4, label=label)
            places = [names.index(r.setting.policy) + (0.15 if clock is Clock.MEASURED_CPU else -0.15) for r in here]
            right.plot([r.error_percent for r in here], places, mark, color=color, alpha=0.6, markersize=4)
            goal = GOALS[clock][0]
            for side in (-goal, goal):
                right.axvline(side, color=color, linestyle="--", linewidth=0.8)
        left.set(xscale="log", yscale="log", aspect="equal")
        ticks = [tick for tick in (0.05, 0.1, 0.2, 0.5, 1.0) if ends[0] <= tick <= ends[1]]
        for axis in (left.xaxis, left.yaxis):
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_minor_formatter(NullFormatter())
        left.set_xlabel("predicted iteration time (s)")
        left.set_ylabel("measured (s)")
        left.legend(loc="upper left", fontsize=7)
        right.axvline(0, color="0.6", linewidth=0.8)
        right.set_yticks(range(len(names)), names, fontsize=6.5)
        right.invert_yaxis()
        right.set_xlabel("error of the prediction (%); dashed: goal")
    return figure


def timeline(results: list[Result]) -> Figure | None:
    """Draw one native iteration, simulated above and measured below, of the run with the median iteration time."""
    drawn = [r for r in results if r.setting.policy == DRAWN_POLICY and r.setting.clock is Clock.MEASURED_CPU]
    if not drawn:
        return None
    chosen = drawn[-1]
    last = min(chosen.predicted.trace.iterations, chosen.measured.iterations) - 2
    title = f"{chosen.setting.policy}, {chosen.setting.name}: simulated above, this CPU below"

    def unusual(run: Trace) -> float:
        return abs(float(np.diff(run.anchors())[last]) * 1e-9 - chosen.seconds[1])

    return two_row_figure(chosen.predicted.trace, min(chosen.runs, key=unusual), last, title)


def main(*, out: Path = Path("paper_figs"), paced: int = 60, native: int = 16, more: int = 12, seed: int = 0) -> None:
    """Draw settings, simulate and execute them, and compare.

    Parameters
    ----------
    out:
        Folder for the figures and the CSV files.
    paced:
        Number of fitting paced settings to compare.
    native:
        Number of fitting native settings to compare.
    more:
        Number of fitting native settings of policies that move other kinds of values.
    seed:
        Seed of the settings.
    """
    make_folder(out)
    torch.set_num_threads(1)
    machine = measured_hardware()
    rng, results, refused = random.Random(seed), list[Result](), 0
    jobs = [(POLICIES[i % len(POLICIES)], i >= paced) for i in range(paced + native)]
    jobs += [(MORE[i % len(MORE)], True) for i in range(more)]
    quiet = not sys.stderr.isatty()
    for policy, is_native in track(jobs, "comparing", console=console(stderr=True), disable=quiet, transient=True):
        result = None
        while result is None:
            result = evaluate(draw(rng, policy, is_native), machine, out)
            refused += result is None
        results.append(result)
    write_text(out / "fidelity.csv", as_csv(results))
    write_text(out / "fidelity_lanes.csv", lanes_csv(results))
    figures = {"fidelity": plot(results), "fidelity_timeline": timeline(results)}
    for name, figure in figures.items():
        if figure is not None:
            for suffix in ("png", "pdf"):
                save_figure(figure, out / f"{name}.{suffix}")
    show(results)
    print_text(console(), f"{refused} drawn settings did not fit or would take too long; written: {out}/fidelity*")


if __name__ == "__main__":
    run_app(App(name="fidelity", default_command=main, help=__doc__))
