"""Tables for the terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby

import rich.table
from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.text import Text

from autohete.analysis.usage import Cause
from autohete.hardware import node_text
from autohete.plan import PlanCounts, UnitPlan
from autohete.plan.policy import Verdict
from autohete.printable import printable
from autohete.quantities import format_bytes, format_rate, format_seconds
from autohete.schedule import CPU, GPU, GPU_MEMORY
from autohete.simulate import Simulation
from autohete.simulate.summary import (
    Summary,
    UnitTraining,
    counts,
    described_blocks,
    runs_of_equal_roles,
    runs_of_equal_units,
    training_of,
)
from autohete.workload import Units, Workload

#: Where readers find the columns that a table leaves out.
IN_JSON = "--json has them"
#: Columns with the counts of a plan.
_PLAN = ("recomputed", "offloaded", "CPU updates")
#: Minimum width of a text column that can wrap.
_FEW_WORDS = 20
#: Where a line may break: at blanks, but not between a number and its unit.
_BREAKS = re.compile(r"(?<!\d) +| +(?!(?:%|x|B|[kKMGTP]i?B|[kKMGTP]?FLOP|tokens|s|ms|us|ns)(?![\w]))")


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal; in a file or a pipe 160 columns, or the environment's ``COLUMNS``."""
    plain = Console(stderr=stderr)
    return plain if plain.is_terminal or _width_given() else Console(stderr=stderr, width=160)


def _width_given() -> bool:
    asked = os.environ.get("COLUMNS", "")
    return asked.isdecimal() and int(asked) > 0


def wrapped(line: str, width: int, indent: int = 0) -> list[str]:
    """Break a line between words into rows of at most ``width`` cells; the second and further rows begin with blanks.

    A number stays together with its unit. A word that is longer than a row, such as a path, is folded.
    """
    start = line[: len(line) - len(line.lstrip(" "))]
    following = start + " " * indent if len(start) + indent < width // 2 else ""
    rows, row, empty = [], start, True
    for word in _BREAKS.split(line.strip(" ")):
        if not empty and cell_len(row) + 1 + cell_len(word) > width:
            rows.append(row)
            row, empty = following, True
        row, empty = row + ("" if empty else " ") + word, False
        if cell_len(row) > width:
            *full, row = chop_cells(row, width)
            rows += full
    return [*rows, row]


def print_text(out: Console, line: str, style: str | None = None, indent: int = 2) -> None:
    """Print plain text, made :func:`~autohete.printable.printable`: wrapped between words where the width is known, that is, on
    a terminal or with the environment's ``COLUMNS``; unwrapped in another file or pipe. Further rows of a line are indented.
    """
    for each in map(printable, line.split("\n")):
        for row in wrapped(each, out.width, indent) if out.is_terminal or _width_given() else [each]:
            out.print(row, style=style, markup=False, emoji=False, soft_wrap=True)


class FittedTable:
    """A table that never wraps or cuts a number, whatever the width of the console.

    If the table is too wide, headers and words first wrap between words. If that is not enough, columns are left out: those
    of ``give_way`` in order, then the others from the right, never the first. A line below the table names them.

    Args:
        title: printed above.
        columns: headers.
        words: places of the columns with words, left-aligned; the others have numbers, right-aligned.
        give_way: headers of the least important columns, least important first; ``wait`` stands for ``wait A`` and
            ``wait B``, which are left out together.
        elsewhere: where to find the columns left out, such as ``--json has them``.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[str],
        words: Collection[int],
        give_way: Sequence[str],
        elsewhere: str,
    ) -> None:
        self._title = printable(title)
        self._columns = [*map(printable, columns)]
        self._words = words
        self._give_way = give_way
        self._elsewhere = elsewhere
        self._rows: list[tuple[Sequence[str], bool]] = []

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def add_row(self, *cells: str, end_section: bool = False) -> None:
        """Add a row of plain text, one cell per column; ``end_section`` draws a line below it."""
        self._rows.append(([*map(printable, cells)], end_section))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._fit(options.max_width)
        shown = rich.table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for place, width in widths.items():
            justify: JustifyMethod = "left" if place in self._words else "right"
            shown.add_column(Text(self._columns[place]), justify=justify, width=width, overflow="fold")
        for cells, end_section in self._rows:
            plain = (console.render_str(cells[place], markup=False, emoji=False) for place in widths)
            shown.add_row(*plain, end_section=end_section)
        for row in wrapped(self._title, options.max_width):
            yield Text(row, style="table.title")
        # Wider than the console only if even the narrowest form is.
        yield from console.render(shown, options.update_width(max(options.max_width, _total_width(widths))))
        left_out = [header for place, header in enumerate(self._columns) if place not in widths]
        if left_out:
            elsewhere = f"; {self._elsewhere}" if self._elsewhere else ""
            for row in wrapped(f"not shown at this width: {', '.join(left_out)}{elsewhere}", options.max_width, indent=2):
                yield Text(row, style="dim")
        yield Text()

    def _fit(self, room: int) -> dict[int, int]:
        """Return the shown columns with their widths."""
        natural, least = {}, {}
        for place, header in enumerate(self._columns):
            cells = [cells[place] for cells, _ in self._rows]
            natural[place] = max(map(cell_len, [header, *cells]))
            if place in self._words:
                # A word longer than half the console is folded; a text column keeps room for a few words.
                least[place] = max(min(_longest_word([header, *cells]), room // 2), min(natural[place], _FEW_WORDS))
            else:
                least[place] = max(map(cell_len, [*header.split(), *cells]), default=0)
        for places in self._order():
            if _total_width(least) <= room:
                break
            for place in places:
                del least[place], natural[place]
        while _total_width(natural) > room and (wide := [place for place in natural if natural[place] > least[place]]):
            natural[max(wide, key=natural.__getitem__)] -= 1
        return natural

    def _order(self) -> list[list[int]]:
        """Return all columns but the first in the order in which they are left out, grouped if left out together."""
        columns = list(enumerate(self._columns))
        named = [[place for place, column in columns if f"{column} ".startswith(f"{start} ")] for start in self._give_way]
        others = [[place] for place in range(len(columns) - 1, 0, -1) if not any(place in group for group in named)]
        return named + others


def _longest_word(texts: Iterable[str]) -> int:
    return max((cell_len(word) for text in texts for word in text.split()), default=0)


def _total_width(widths: Mapping[int, int]) -> int:
    """Return the width of a table with these column widths and two blanks between columns."""
    return sum(widths.values()) + 2 * (len(widths) - 1)


def table(
    title: str,
    columns: Sequence[str],
    left: int = 1,
    *,
    remark: bool = False,
    give_way: Sequence[str] = (),
    elsewhere: str = "",
) -> FittedTable:
    """Return an empty table. The first ``left`` columns are words, and the last if it is a ``remark``; the others numbers.

    ``give_way`` and ``elsewhere`` are those of :class:`FittedTable`.
    """
    words = {*range(left), *([len(columns) - 1] if remark else [])}
    return FittedTable(title, columns, words, give_way, elsewhere)


def print_plan(summary: Summary, simulation: Simulation | None) -> None:
    """Print a plan's decisions, one row per run of equal blocks, and its result; without a plan, print the reason."""
    out = console()
    if simulation is not None:
        _print_decisions(out, simulation)
    if summary.iteration_seconds is None:
        print_text(out, f"{summary.policy}: {summary.verdict}: {summary.explanation}")
    else:
        peaks = [or_dash(peak, format_bytes) for peak in (summary.gpu_peak_bytes, summary.host_peak_bytes)]
        reserved = "" if summary.gpu_reserved_bytes is None else f" ({format_bytes(summary.gpu_reserved_bytes)} reserved)"
        pinned = "" if summary.pinned_peak_bytes is None else f", {format_bytes(summary.pinned_peak_bytes)} of it pinned"
        print_text(
            out,
            f"{summary.verdict}: {format_seconds(summary.iteration_seconds)} an iteration, peaks {peaks[0]} of GPU memory"
            f"{reserved} and {peaks[1]} of host memory{pinned} ({summary.clock})",
        )
        if summary.proven_within is not None:
            print_text(out, _proof(summary.proven_within, summary.iteration_seconds))
        if late := _if_late(summary):
            print_text(out, late)
    for note in summary.notes:
        print_text(out, f"note: {note}")


def _print_decisions(out: Console, simulation: Simulation) -> None:
    plan, profile = simulation.plan, simulation.profile
    node, by_block = (
        profile.hardware.title,
        profile.workload.units is Units.BLOCK,
    )
    shown = table(
        f"{profile.workload.name}{units_text(profile.workload)} on {node}: {plan.policy}: {counts(simulation).words}",
        ["blocks" if by_block else "units", "activations", "parameters", "optimizer", "prefetch forward", "prefetch backward"],
        left=4,
        elsewhere=IN_JSON,
    )
    for first, last, unit in runs_of_equal_units(simulation) if by_block else runs_of_equal_roles(simulation):
        route, role = unit.parameters, "" if by_block else f", {profile.units[first].role}"
        trained = training_of(profile, first)
        shown.add_row(
            (str(first) if first == last else f"{first} to {last}") + role,
            "-" if trained is UnitTraining.FROZEN_BELOW else _forwards(unit),
            f"in {route.home}" if route.far else "offloaded" if route.home != GPU_MEMORY else "resident",
            _optimizer(unit) if trained is UnitTraining.TRAINED else "frozen",
            _passes(route.ahead) if route.home != GPU_MEMORY else "-",
            _passes(route.ahead_of_backward) if route.home != GPU_MEMORY else "-",
        )
    out.print(shown)
    if plan.rules:
        print_text(out, f"rules: {', '.join(map(str, plan.rules))}")


def _optimizer(unit: UnitPlan) -> str:
    share = f", {100 * unit.update.share:.0f} % gpu" if unit.update.share else ""
    return f"{unit.update.on}{share}{f', states in {unit.states.home}' if unit.states.far else ''}"


def _forwards(unit: UnitPlan) -> str:
    """Describe what the unit's forwards keep, except the last recomputation, which keeps all: ``drop x 2, recompute``."""
    kept = ((what, len(list(same))) for what, same in groupby((unit.activations, *unit.again)))
    return ", ".join(f"{what} x {times}" if times > 1 else what for what, times in kept)


def _batch(workload: Workload) -> str:
    times = f"{workload.micro_batches} x " if workload.micro_batches > 1 else ""
    return f"{times}{workload.batch_size} x {workload.sequence_length}"


def units_text(workload: Workload) -> str:
    """The kind of unit, if it is not a block."""
    return "" if workload.units is Units.BLOCK else f", units {workload.units}"


def _passes(distance: int) -> str:
    return f"{distance} pass{'' if distance == 1 else 'es'} ahead"


def print_summaries(summaries: Sequence[Summary], workload: Workload) -> None:
    """Print the comparison of policies, where their time goes, and what does not fit."""
    out = console()
    first = summaries[0]
    shape = f"{workload.parameters / 1e9:.2f}B parameters, batch {_batch(workload)} tokens{units_text(workload)}"
    title = f"{first.workload} ({shape}) on {node_text(first.hardware, first.gpus, first.parallelism)}, {first.clock}"
    limited = first.pinned_capacity_bytes is not None
    memories = ["GPU peak", "GPU reserved", "host peak", *(["pinned peak"] if limited else [])]
    columns = ["policy", "verdict", "iteration", "samples/s", "tokens/s", "TFLOP/s", *memories, *_PLAN]
    give_way = ["GPU reserved", "TFLOP/s", "samples/s", "host peak", *_PLAN]
    speeds = table(title, columns, left=2, give_way=give_way, elsewhere=IN_JSON)
    for s in summaries:
        speeds.add_row(
            s.policy,
            s.verdict,
            or_dash(s.iteration_seconds, format_seconds),
            or_dash(s.samples_per_second, "{:.2f}".format),
            or_dash(s.tokens_per_second, format_rate),
            or_dash(s.tflops_per_gpu, "{:.1f}".format),
            or_dash(s.gpu_peak_bytes, format_bytes),
            or_dash(s.gpu_reserved_bytes, format_bytes),
            or_dash(s.host_peak_bytes, format_bytes),
            *([or_dash(s.pinned_peak_bytes, format_bytes)] if limited else []),
            *(_counts(s.plan) if s.plan else ["-"] * len(_PLAN)),
        )
    out.print(speeds)
    print_text(out, _assumed(workload), style="dim")
    if first.gpus > 1:
        print_text(
            out,
            f"each {'group' if first.parallelism else 'GPU'} has this batch and this plan, but stages of a pipeline share "
            "them; each GPU has an equal part of its host; samples/s and tokens/s are those of all GPUs",
        )
    for note in dict.fromkeys(note for s in summaries for note in s.notes):
        print_text(out, f"note: {note}")
    running = [s for s in summaries if s.verdict is Verdict.OK]
    if running:
        _print_reasons(out, running)
    units = "blocks" if workload.units is Units.BLOCK else f"units (embedding, {workload.units}s, head)"
    meaning = "how many are recomputed, have their parameters offloaded, and are updated on the CPU"
    print_text(out, f"plans: of {workload.unit_count} {units}, {meaning}", style="dim")
    for s in summaries:
        if s.explanation:
            print_text(out, f"{s.policy}: {s.verdict}: {s.explanation}")


def _assumed(workload: Workload) -> str:
    """Return the assumptions of the answer, given or default."""
    w = workload
    tied = "tied" if w.tied_embeddings else "untied"
    times = "" if w.loss_chunks is None else f" in {w.loss_chunks} chunks"
    chunked = f", {'loss' + times if times else 'chunked loss'}" if w.chunked_loss else ""
    loss = f", loss {w.loss}" if w.loss is not None else ""
    packed = f", sequences packed of documents of {w.document_length} tokens" if w.document_length is not None else ""
    packed += f", samples of {min(w.sample_lengths)} to {max(w.sample_lengths)} tokens" if w.sample_lengths else ""
    packed += ", expandable segments" if w.expandable_segments else ""
    apart = w.training.lora is not None or w.training.last_blocks is not None
    trained = f", {w.trained_parameters / 1e6:,.1f}M parameters trained" if apart else ""
    clipped = f", gradients clipped to {w.clip_norm:g}" if w.clip_norm else ""
    precision = f"{w.precision} under autocast to {w.autocast}" if w.autocast is not None else w.precision
    attention = f", attention {w.attention}" if w.attention is not None else ""
    attention += f", attention mask {w.attention_mask}" if w.attention_mask is not None else ""
    return (
        f"assumed: hidden {w.hidden_size}, {'; '.join(described_blocks(w))}; vocabulary {w.vocabulary_size} ({tied}), "
        f"{precision}, kernels {w.kernels}{attention}{units_text(w)}{loss}{chunked}{packed}, {w.training}{trained}{clipped}; "
        "flags of policies as `autohete presets` lists them"
    )


def _counts(plan: PlanCounts) -> list[str]:
    """Return the cells of :data:`_PLAN`; the total is the same for all policies."""
    return [str(count) for count in (plan.checkpointed_units, plan.offloaded_parameter_units, plan.offloaded_optimizer_units)]


def _print_reasons(out: Console, running: Sequence[Summary]) -> None:
    lanes = list(dict.fromkeys(lane for s in running for lane in s.lanes))  # only some have drives
    waits = [cause for cause in Cause if any(s.idle_seconds[cause] > 1e-9 for s in running)]
    columns = ["policy", *(f"{lane} busy" for lane in lanes), *(f"waits: {cause}" for cause in waits), "bound"]
    title = "where the time goes, per iteration: busy share of each lane, and what the GPU waits for"
    copies = [f"{lane} busy" for lane in lanes if lane not in (GPU, CPU)]
    reasons = table(title, columns, give_way=[*copies, "bound"], elsewhere=IN_JSON)
    for s in running:
        assert s.bound_seconds is not None
        reasons.add_row(
            s.policy,
            *(f"{100 * s.lanes[lane]:.0f} %" if lane in s.lanes else "-" for lane in lanes),
            *(format_seconds(s.idle_seconds[cause]) if s.idle_seconds[cause] > 1e-9 else "-" for cause in waits),
            format_seconds(s.bound_seconds),
        )
    out.print(reasons)
    for s in running:
        assert s.first_iteration_seconds is not None
        assert s.drain_seconds is not None
        ends = f"first iteration {format_seconds(s.first_iteration_seconds)}, drain {format_seconds(s.drain_seconds)}"
        unsettled = "" if s.settled else "; no steady state in sight, times are an average"
        print_text(out, f"{s.policy}: bound by {s.binds}; {ends}{unsettled}", style="dim")
        if s.proven_within is not None and s.iteration_seconds is not None:
            print_text(out, f"{s.policy}: {_proof(s.proven_within, s.iteration_seconds)}", style="dim")
        if late := _if_late(s):
            print_text(out, f"{s.policy}: {late}", style="dim")


def _proof(within: float, iteration_seconds: float) -> str:
    least = format_seconds(iteration_seconds / (1 + within))
    return f"proven within {100 * within:.1f} %: no plan of its kind takes less than {least}"


def _if_late(summary: Summary) -> str:
    """Describe what it takes to fit under any timing; empty if nothing."""
    waits = f"{summary.memory_waits} wait{'' if summary.memory_waits == 1 else 's'} for memory"
    needs = " and ".join(
        f"{'any amount' if worst is None else format_bytes(worst)} of {memory} memory, there are {format_bytes(capacity)}"
        for memory, worst, capacity in (
            ("GPU", summary.gpu_worst_bytes, summary.gpu_capacity_bytes),
            ("host", summary.host_worst_bytes, summary.host_capacity_bytes),
            ("pinned", summary.pinned_worst_bytes, summary.pinned_capacity_bytes),
        )
        if capacity is not None and (worst is None or worst > capacity)
    )
    if not needs:
        return f"fits with {waits}, however long tasks take" if summary.memory_waits else ""
    late = f"if copies are late it may need {needs}"
    if summary.memory_waits is None or summary.safe_iteration_seconds is None or summary.iteration_seconds is None:
        return f"{late}; no waits are known that prevent it"
    cost = 100 * (summary.safe_iteration_seconds / summary.iteration_seconds - 1)
    return f"{late}; {waits} prevent that and make the iteration {abs(cost):.1f} % {'shorter' if cost < 0 else 'longer'}"


def or_dash(value: float | None, write: Callable[[float], str]) -> str:
    """Format ``value`` with ``write``; a dash if it is None."""
    return "-" if value is None else write(value)
