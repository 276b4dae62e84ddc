"""Answers as ``plan --json`` saved them, read back as far as two of them are compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Never

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError

from autohete.answer.result import Budget, Interval, Need, Offloading
from autohete.errors import InputError, check_fields
from autohete.execution.trace import Clock
from autohete.files import read_text
from autohete.plan.policy import Verdict
from autohete.printable import shown

_FORMAT = "autohete-answer 1"
_CURE = "write one with autohete plan, as JSON"
#: Digits of a whole number; no real one has as many.
_MOST_DIGITS = 30


def _verdict(text: object) -> Verdict:
    try:
        return Verdict(str(text))
    except InputError as error:
        raise ValueError(str(error)) from error


_Verdict = Annotated[Verdict, PlainValidator(_verdict)]
_Count = Annotated[int, Field(gt=0)]
_Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """The result of one policy, with fields of :class:`autohete.simulate.summary.Summary`."""

    policy: str
    clock: Clock
    verdict: _Verdict
    iteration_seconds: _Positive | None
    tokens_per_second: _Positive | None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class SavedChange:
    """What changes, with fields of :class:`autohete.answer.result.Change`."""

    name: str
    exact: bool


@dataclass(frozen=True, slots=True)
class SavedGain:
    """The effect of a change, with fields of :class:`autohete.answer.result.Gain`."""

    change: SavedChange
    verdict: _Verdict
    iteration_seconds: _Positive | None
    tokens_per_second: _Positive | None


@dataclass(frozen=True, slots=True)
class SavedInterval(Interval):
    """An interval whose ends can be divided."""

    low_seconds: _Positive
    high_seconds: _Positive
    model_error: _Positive


@dataclass(frozen=True, slots=True)
class SavedBudget(Budget):
    """One memory that has a size."""

    total_bytes: _Count


@dataclass(frozen=True, slots=True)
class SavedNeed(Need):
    """The least memory, of those that are known to grow."""

    grows: tuple[Literal["gpu", "pinned", "host"], ...]
    iteration_seconds: _Positive
    tokens_per_second: _Positive


@dataclass(frozen=True, slots=True)
class SavedAnswer:
    """A saved answer: fields of :class:`autohete.answer.answer_document.AnswerDocument`."""

    format: Literal["autohete-answer 1"]
    tokens: _Count
    training_seconds: _Positive | None
    offloading: Offloading | None
    interval: SavedInterval | None
    budgets: tuple[SavedBudget, ...]
    policies: Annotated[tuple[SavedPolicy, ...], Field(min_length=1)]
    levers: tuple[SavedGain, ...]
    purchases: tuple[SavedGain, ...]
    needs: tuple[SavedNeed, ...]
    left_out: tuple[str, ...]
    workload: Mapping[str, Any]
    hardware: Mapping[str, Any]
    system_bytes: int
    runnable: tuple[str, ...]

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def best(self) -> SavedPolicy | None:
        """The recommended policy; None if none fits."""
        return self.policies[0] if self.policies[0].tokens_per_second is not None else None


_ADAPTER = TypeAdapter(SavedAnswer)


def read_answer(path: str) -> SavedAnswer:
    """Read an answer.

    Raises:
        InputError: ``path`` cannot be read, or is not an answer of this version.
    """
    try:
        document = json.loads(read_text(path, "answer", _CURE), parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
        form = document.get("format") if isinstance(document, dict) else None
        if form != _FORMAT:
            raise InputError(f"answer {shown(path)} has the form {shown(form)}, not {_FORMAT!r}: {_CURE} of this version")
        return _ADAPTER.validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"answer {shown(path)} is damaged ({where}: {first['msg']}): {_CURE} again") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"answer {shown(path)} is not JSON ({error}): {_CURE} again") from error


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _whole(text: str) -> int:
    return int(text) if len(text) <= _MOST_DIGITS else _refuse(f"{text[:_MOST_DIGITS]}…")


def _refuse(text: str) -> Never:
    raise ValueError(f"{text} is not finite, or too large")
