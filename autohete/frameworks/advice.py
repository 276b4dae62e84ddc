"""What a configuration that somebody runs will do, and what to change in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autohete.frameworks.changes import KeyChange
from autohete.quantities import format_rate, format_seconds


@dataclass(frozen=True, slots=True)
class AdvisedSpeed:
    """Time of an iteration, and tokens/s on all GPUs: an iteration has fewer tokens if stages of a pipeline share a batch."""

    iteration_seconds: float
    tokens_per_second: float

    def __str__(self) -> str:
        return f"{format_seconds(self.iteration_seconds)} per iteration, {format_rate(self.tokens_per_second)} tokens/s"


@dataclass(frozen=True, slots=True)
class Advice:
    """What a configuration does, and what would be faster.

    Args:
        file, policy: its name and its meaning.
        notes: what was assumed.
        now, explanation: how fast it is; None if it does not train, with the reason.
        better, then: the best policy that DeepSpeed can run, and how fast that is; empty if it is not faster.
        changes: keys to change for it.
        fastest, at_best, runs_in: the best policy that any framework can run; empty if it is no faster.
    """

    file: str
    policy: str
    notes: tuple[str, ...]
    now: AdvisedSpeed | None
    explanation: str
    better: str = ""
    then: AdvisedSpeed | None = None
    changes: tuple[KeyChange, ...] = ()
    fastest: str = ""
    at_best: AdvisedSpeed | None = None
    runs_in: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.now is None:
            yield f"{self.file} is {self.policy}, which does not train here: {self.explanation}"
        else:
            yield f"{self.file} is {self.policy}: it trains, {self.now}"
        for note in self.notes:
            yield f"  note: {note}"
        if not self.better:
            yield "  nothing to change: DeepSpeed runs no other plan that is faster"
        else:
            yield f"  DeepSpeed with {self.better}: {self._gain(self.then)}; change"
            yield from (f"    {change}" for change in self.changes)
        if self.fastest:
            yield f"  {self.fastest} in {' or '.join(self.runs_in)}: {self._gain(self.at_best)}; --write has its files"

    def _gain(self, speed: AdvisedSpeed | None) -> str:
        assert speed is not None
        faster = "" if self.now is None else f", {speed.tokens_per_second / self.now.tokens_per_second:.2f}x as fast"
        return f"{speed}{faster}"
