"""What a configuration that somebody runs will do, and what to change in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autohete.frameworks.changes import KeyChange
from autohete.quantities import format_seconds


@dataclass(frozen=True, slots=True)
class Advice:
    """What a configuration does, and what would be faster.

    Args:
        file, policy: its name and its meaning.
        notes: what was assumed.
        iteration_seconds, explanation: its time; None if it does not train, with the reason.
        better, better_seconds: the best policy that DeepSpeed can run; empty if it is not faster.
        changes: keys to change for it.
        fastest, fastest_seconds, runs_in: the best policy that any framework can run; empty if it is no faster.
    """

    file: str
    policy: str
    notes: tuple[str, ...]
    iteration_seconds: float | None
    explanation: str
    better: str = ""
    better_seconds: float | None = None
    changes: tuple[KeyChange, ...] = ()
    fastest: str = ""
    fastest_seconds: float | None = None
    runs_in: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.iteration_seconds is None:
            yield f"{self.file} is {self.policy}, which does not train here: {self.explanation}"
        else:
            yield f"{self.file} is {self.policy}: it trains, {format_seconds(self.iteration_seconds)} per iteration"
        for note in self.notes:
            yield f"  note: {note}"
        if not self.better:
            yield "  nothing to change: DeepSpeed runs no other plan that is faster"
        else:
            yield f"  DeepSpeed with {self.better}: {self._gain(self.better_seconds)}; change"
            yield from (f"    {change}" for change in self.changes)
        if self.fastest:
            yield f"  {self.fastest} in {' or '.join(self.runs_in)}: {self._gain(self.fastest_seconds)}; --write has its files"

    def _gain(self, seconds: float | None) -> str:
        assert seconds is not None
        faster = "" if self.iteration_seconds is None else f", {self.iteration_seconds / seconds:.2f}x as fast"
        return f"{format_seconds(seconds)} per iteration{faster}"
