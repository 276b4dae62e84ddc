"""One iteration as text: one row per lane, one letter per task."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.text import Text

from autohete.execution.trace import Trace
from autohete.quantities import format_seconds
from autohete.report.tables import print_text
from autohete.schedule import KIND_MEANING, Kind

#: One letter per kind; kinds not listed use the letter of their task id. Styles distinguish neighbouring tasks.
_LETTERS = {
    Kind.PREFETCH_FORWARD: "P",
    Kind.PREFETCH_BACKWARD: "P",
    Kind.FETCH_ACTIVATIONS: "A",
    Kind.OFFLOAD_ACTIVATIONS: "A",
    Kind.WRITE_BACK_FORWARD: "K",
    Kind.WRITE_BACK_BACKWARD: "K",
}
_MEANINGS = {"P": "prefetch of parameters", "A": "activations", "K": "write-back of parameters"}
_STYLES = {"F": "blue", "L": "bold", "R": "cyan", "B": "yellow", "W": "magenta", "U": "magenta", "G": "green", "H": "red"}


def print_iteration(out: Console, trace: Trace, iteration: int, width: int | None = None) -> None:
    """Print the lanes of ``trace`` from the start of ``iteration`` to the start of the next.

    Args:
        out: the console to print to.
        trace: a simulated or measured trace.
        iteration: counted from 0 in the trace.
        width: characters per row; None: the width of the console, at most 120.
    """
    anchors = trace.anchors()
    begin = int(anchors[iteration])
    end = int(anchors[iteration + 1]) if iteration + 1 < trace.iterations else int(trace.end_ns[iteration].max())
    names = max(4, *(len(lane.name) for lane in trace.schedule.lanes))
    cells = max((width or min(out.width, 120)) - 2 - names, 1)
    edges = np.linspace(begin, end, cells + 1)
    print_text(out, f"one iteration, {format_seconds((end - begin) * 1e-9)} ({trace.clock}):")
    seen: dict[str, str] = {}
    for lane in trace.schedule.lanes:
        row = Text(f"{lane.name:>{names}} ")
        best, letters = np.zeros(cells), [" "] * cells
        for i in trace.lane_tasks(lane.name):
            kind = trace.schedule.tasks[i].id.kind
            letter = _LETTERS.get(kind, str(kind))
            for start, stop in zip(trace.start_ns[:, i].tolist(), trace.end_ns[:, i].tolist(), strict=True):
                covered = np.minimum(stop, edges[1:]) - np.maximum(start, edges[:-1])
                for cell in np.flatnonzero(covered > best):
                    best[cell], letters[cell] = covered[cell], letter
                    seen[letter] = _MEANINGS.get(letter, KIND_MEANING[kind])
        for letter in letters:
            row.append("·" if letter == " " else letter, style=_STYLES.get(letter, "dim" if letter == " " else ""))
        out.print(row, soft_wrap=True)
    blanks = " " * (names + 1)
    print_text(
        out, blanks + ", ".join(f"{letter} {meaning}" for letter, meaning in sorted(seen.items())), style="dim", indent=0
    )
