"""Tables for the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autohete.analysis import Cause
from autohete.hardware import preset_names, read_hardware
from autohete.plan import Placement
from autohete.policies import POLICIES
from autohete.policy import Verdict
from autohete.simulate import Simulation
from autohete.summary import Summary
from autohete.units import format_bytes, format_seconds
from autohete.workload import WORKLOADS, Workload


def console(*, stderr: bool = False) -> Console:
    """A console that does not fold tables when its output goes into a file or a pipe."""
    plain = Console(stderr=stderr)
    return plain if plain.is_terminal else Console(stderr=stderr, width=160)


def table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    """An empty table: the first ``left`` columns are words, the others numbers."""
    made = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right")
    return made


def print_plan(found: Simulation) -> None:
    """The decisions of a plan, a row for each run of equal blocks."""
    out = console()
    plan, profile = found.plan, found.profile
    shown = table(
        f"{profile.workload.name} on {profile.hardware.name}: {plan.policy}, plan {plan.counts}",
        ["blocks", "activations", "parameters", "optimizer", "prefetch forward", "prefetch backward"],
        left=4,
    )
    start = 0
    for i, block in enumerate(plan.blocks):
        if i + 1 < len(plan.blocks) and plan.blocks[i + 1] == block and i > 0:
            continue
        offloaded = block.parameters is Placement.OFFLOADED
        shown.add_row(
            str(i) if i == start else f"{start} to {i}",
            block.activations,
            block.parameters,
            block.optimizer,
            f"{block.forward_prefetch_distance} passes ahead" if offloaded else "-",
            f"{block.backward_prefetch_distance} passes ahead" if offloaded else "-",
        )
        start = i + 1
    out.print(shown)
    out.print(
        f"{found.verdict}: {format_seconds(found.iteration_seconds)} an iteration, peaks {format_bytes(found.gpu.peak_bytes)} "
        f"of GPU memory and {format_bytes(found.host.peak_bytes)} of host memory (simulated)",
        soft_wrap=True,
    )


def print_summaries(summaries: Sequence[Summary], workload: Workload) -> None:
    """The comparison of policies, why each is as fast as it is, and what does not fit."""
    out = console()
    first = summaries[0]
    shape = f"{workload.parameters / 1e9:.2f}B parameters, batch {workload.batch_size} x {workload.sequence_length} tokens"
    title = f"{first.workload} ({shape}) on {first.hardware}, {first.clock}"
    columns = ["policy", "verdict", "iteration", "samples/s", "tokens/s", "TFLOP/s", "GPU peak", "host peak", "plan"]
    speeds = table(title, columns, left=2)
    for s in summaries:
        speeds.add_row(
            escape(s.policy),
            s.verdict.value,
            or_dash(s.iteration_seconds, format_seconds),
            or_dash(s.samples_per_second, "{:.2f}".format),
            or_dash(s.tokens_per_second, "{:,.0f}".format),
            or_dash(s.tflops_per_gpu, "{:.1f}".format),
            or_dash(s.gpu_peak_bytes, format_bytes),
            or_dash(s.host_peak_bytes, format_bytes),
            str(s.plan) if s.plan else "-",
        )
    out.print(speeds)
    running = [s for s in summaries if s.verdict is Verdict.OK]
    if running:
        _print_reasons(out, running)
    out.print("plan: blocks c checkpointed, p with parameters offloaded, o with the optimizer on the CPU", style="dim")
    for s in summaries:
        if s.explanation:
            out.print(f"{s.policy}: {s.verdict}: {s.explanation}", markup=False, soft_wrap=True)


def _print_reasons(out: Console, running: Sequence[Summary]) -> None:
    lanes = list(running[0].lanes)
    waits = [cause for cause in Cause if any(s.idle_seconds[cause] > 1e-9 for s in running)]
    columns = ["policy", *(f"{lane} busy" for lane in lanes), *(f"waits: {cause}" for cause in waits), "bound"]
    reasons = table("where the time goes, per iteration: busy share of each lane, and what the GPU waits for", columns)
    for s in running:
        assert s.bound_seconds is not None
        reasons.add_row(
            escape(s.policy),
            *(f"{100 * s.lanes[lane]:.0f} %" for lane in lanes),
            *(format_seconds(s.idle_seconds[cause]) if s.idle_seconds[cause] > 1e-9 else "-" for cause in waits),
            format_seconds(s.bound_seconds),
        )
    out.print(reasons)
    for s in running:
        assert s.first_iteration_seconds is not None
        assert s.drain_seconds is not None
        ends = f"first iteration {format_seconds(s.first_iteration_seconds)}, drain {format_seconds(s.drain_seconds)}"
        unsettled = "" if s.settled else "; no steady state in sight, times are an average"
        out.print(f"{s.policy}: bound by {s.binds}; {ends}{unsettled}", markup=False, soft_wrap=True, style="dim")


def or_dash(value: float | None, write: Callable[[float], str]) -> str:
    """``value`` as ``write`` writes it, a dash where there is none."""
    return "-" if value is None else write(value)


def print_presets() -> None:
    """What can be named on the command line."""
    out = console()
    models = table("workloads", ["name", "parameters", "hidden", "blocks", "heads", "vocabulary", "sequence", "batch"])
    for w in WORKLOADS.values():
        numbers = (w.hidden_size, w.transformer_blocks, w.heads, w.vocabulary_size, w.sequence_length, w.batch_size)
        models.add_row(w.name, f"{w.parameters / 1e9:.2f}B", *map(str, numbers))
    out.print(models)
    nodes = table("hardware", ["name", "what it is"], left=2)
    for name in preset_names():
        nodes.add_row(name, read_hardware(name).title)
    out.print(nodes)
    systems = table("policies", ["name", "flags (with their defaults)"], left=2)
    for name, system in POLICIES.items():
        flags = (f"{field.name}={_flag_text(field.default)}" for field in dataclasses.fields(system))
        systems.add_row(name, ", ".join(flags))
    out.print(systems)


def _flag_text(value: object) -> str:
    return {True: "on", False: "off", None: "auto"}[value] if value is None or isinstance(value, bool) else str(value)
