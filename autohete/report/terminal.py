"""One iteration as text: one row per lane, one letter per task."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.text import Text

from autohete.execution.trace import Trace
from autohete.quantities import format_seconds
from autohete.report.tables import print_text
from autohete.schedule import KIND_MEANING, TRANSFERS, Kind

#: The kinds that share a letter, and what it means. Any other kind has the letter of its task ids.
_SHARED = {
    ("P", "prefetch of parameters"): (Kind.PREFETCH_FORWARD, Kind.PREFETCH_BACKWARD, Kind.READ_FORWARD, Kind.READ_BACKWARD),
    ("K", "write-back of parameters"): (Kind.WRITE_BACK_FORWARD, Kind.WRITE_BACK_BACKWARD, Kind.WRITE_PARAMETERS),
    ("A", "activations"): (Kind.FETCH_ACTIVATIONS, Kind.OFFLOAD_ACTIVATIONS, Kind.READ_ACTIVATIONS, Kind.WRITE_ACTIVATIONS),
    ("S", "optimizer states"): (Kind.FETCH_STATES, Kind.WRITE_BACK_STATES, Kind.READ_STATES, Kind.WRITE_STATES),
    ("g", "fetch or write of gradients"): (Kind.FETCH_GRADIENTS, Kind.WRITE_GRADIENTS),
    ("+", KIND_MEANING[Kind.ACCUMULATE]): (Kind.ACCUMULATE,),
    ("c", "gather of parameters"): (Kind.GATHER_FORWARD, Kind.GATHER_BACKWARD, Kind.GATHER_UPDATED),
    ("u", KIND_MEANING[Kind.PLACE_UPDATE]): (Kind.PLACE_UPDATE,),
    ("p", KIND_MEANING[Kind.READ_UPDATED]): (Kind.READ_UPDATED,),
    ("r", KIND_MEANING[Kind.REDUCE_GRADIENTS]): (Kind.REDUCE_GRADIENTS,),
    ("X", "transfer between pipeline stages"): TRANSFERS,
}
#: One letter and its meaning for every kind. Styles distinguish neighbouring tasks.
LETTERS = {kind: (str(kind), KIND_MEANING[kind]) for kind in Kind} | {
    kind: shared for shared, kinds in _SHARED.items() for kind in kinds
}
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
            letter, meaning = LETTERS[trace.schedule.tasks[i].id.kind]
            for start, stop in zip(trace.start_ns[:, i].tolist(), trace.end_ns[:, i].tolist(), strict=True):
                covered = np.minimum(stop, edges[1:]) - np.maximum(start, edges[:-1])
                for cell in np.flatnonzero(covered > best):
                    best[cell], letters[cell] = covered[cell], letter
                    seen[letter] = meaning
        for letter in letters:
            row.append("·" if letter == " " else letter, style=_STYLES.get(letter, "dim" if letter == " " else ""))
        out.print(row, soft_wrap=True)
    blanks = " " * (names + 1)
    print_text(
        out, blanks + ", ".join(f"{letter} {meaning}" for letter, meaning in sorted(seen.items())), style="dim", indent=0
    )
