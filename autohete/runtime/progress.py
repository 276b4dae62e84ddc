"""Which step the parameters of each unit are from."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from autohete.schedule import Kind, Task

#: With several ranks, each updates a part, and an update is whole once the parts of all are there.
_UPDATES = (Kind.GPU_UPDATE, Kind.CPU_UPDATE, Kind.GATHER_UPDATED)


class UpdateProgress:
    """The updates that have ended, and those that failed midway.

    Args:
        tasks: the tasks of a schedule; all but its updates are ignored.
        delayed: units whose updates are delayed. A step is whole for them once it has also left its gradients to the next.
        first: number of the first step.

    Attributes:
        lost: returns a sentence that says what has been lost besides; empty: nothing.
    """

    def __init__(self, tasks: Sequence[Task], delayed: Container[int] = (), first: int = 0) -> None:
        self._units = {
            task: each.id.unit
            for task, each in enumerate(tasks)
            if each.id.kind in _UPDATES or (each.id.kind is Kind.OFFLOAD_GRADIENTS and each.id.unit in delayed)
        }
        #: The last iteration in which each update has ended; the iteration in which an update failed midway.
        self._ended = dict.fromkeys(self._units, first - 1)
        self._broken: dict[int, int] = {}
        self.lost: Callable[[], str] = str

    def end(self, task: int, iteration: int) -> None:
        """Note that ``task`` of ``iteration`` has ended."""
        if task in self._units:
            self._ended[task] = iteration

    def fail(self, task: int, iteration: int) -> None:
        """Note that ``task`` of ``iteration`` has failed midway."""
        if task in self._units:
            self._broken[task] = iteration

    def updated(self, iteration: int) -> list[int]:
        """Return the units whose update in ``iteration`` or later has ended or failed midway, once nothing runs."""
        return sorted(
            {unit for task, unit in self._units.items() if max(self._ended[task], self._broken.get(task, -1)) >= iteration}
        )

    def state(self) -> str:
        """Describe which steps the units' parameters are from, once nothing runs; empty if there are no updates."""
        broken = {self._units[task]: step for task, step in self._broken.items()}
        updated: dict[int, int] = {}
        for task, step in self._ended.items():
            unit = self._units[task]
            earlier = updated.setdefault(unit, step)
            if step != earlier:  # of two sides, or of several ranks, each updates a part
                broken.setdefault(unit, max(step, earlier))
        return ". ".join(filter(None, (_described(updated, broken), self.lost())))


def _described(updated: dict[int, int], broken: dict[int, int]) -> str:
    """Describe which steps the parameters of units are from.

    Args:
        updated: the last step whose update of a unit has ended; -1: none.
        broken: a step whose update of a unit failed midway, or has ended on one of two sides.
    """
    if not updated:
        return ""
    of_step: dict[int, list[int]] = {}
    for unit, step in updated.items():
        if unit not in broken:
            of_step.setdefault(step, []).append(unit)
    if len(of_step) == 1 and not broken:
        (step,) = of_step
        return f"All parameters are from step {step}, the last complete one" if step >= 0 else "No parameter has been changed"
    parts = [
        f"{f'step {step}' if step >= 0 else 'before the first step'}: {listed(units)}"
        for step, units in sorted(of_step.items(), reverse=True)
    ]
    parts += [f"updated in part by step {step}: {listed([unit])}" for unit, step in sorted(broken.items())]
    return f"Parameters are from different steps ({'; '.join(parts)}): load a saved state to continue from a complete step"


def listed(units: Iterable[int]) -> str:
    """Format numbers of units as text, such as ``blocks 0, 2 to 5``."""
    runs: list[list[int]] = []
    for unit in sorted(units):
        if runs and runs[-1][-1] == unit - 1:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    text = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"block {text}" if text.isdecimal() else f"blocks {text}"
