"""Shifts of a question for ``autohete sweep --sensitivity``: one figure or option at a time, the rest unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autohete.cli.axes import Setting, axis_of, check_keys, option_field
from autohete.cli.question import SHORT_FOR, Question, key_value
from autohete.errors import InputError
from autohete.quantities import split_quantity

#: How far a figure is moved that has no range.
_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Shift:
    """A figure or an option, its value in the question as text, and the values to try."""

    key: str
    base: str
    values: tuple[str, ...]


def shifts(question: Question, over: Sequence[tuple[str, list[str]]]) -> list[Shift]:
    """Return the requested moves, or those of all figures of the hardware that have a range and were not set.

    Args:
        question: the question whose values are the base.
        over: keys and their values; a key without values is moved over its range, or by 10 % either way if it has none.

    Raises:
        InputError: an unknown key, a key without a number to move, values that the key does not accept, or no figure.
    """
    if question.profile is not None and not over:
        raise InputError("--sensitivity: a measured profile has no figures with ranges: name what to move, with --over KEY")
    figures = {} if question.profile is not None else _figures(question)
    if not over:
        fixed = {key_value(item)[0] for item in question.set_} | {
            key for option, key in SHORT_FOR.items() if getattr(question, option.replace("-", "_")) is not None
        }
        over = [(key, []) for key, (_, ends) in figures.items() if ends is not None and key not in fixed]
    if any(key in ("policy", "model", "workload", "profile", "hardware") for key, _ in over):
        raise InputError("--sensitivity moves numbers: give policies with --policy, and one model and hardware as options")
    check_keys([key for key, _ in over], [question.hardware])
    return [_move(question, figures, key, values) for key, values in over]


def _figures(question: Question) -> dict[str, tuple[str, tuple[str, str] | None]]:
    """Return the value of each figure of the hardware, as it is set, and its range if it is not set."""
    from autohete.answer.draws import OF_SEVERAL
    from autohete.hardware import written_figures

    figures: dict[str, tuple[str, tuple[str, str] | None]] = {}
    for figure in written_figures(question.hardware):
        idle = question.ranks() == 1 and figure.key.startswith(OF_SEVERAL)
        ends = None if figure.range is None or idle else (str(figure.range[0]), str(figure.range[1]))
        figures[figure.key] = (str(figure.value), ends)
    given = [key_value(item) for item in question.set_]
    given += [
        (key, value) for option, key in SHORT_FOR.items() if (value := getattr(question, option.replace("-", "_"))) is not None
    ]
    return figures | {key: (value, None) for key, value in given}


def _move(
    question: Question, figures: Mapping[str, tuple[str, tuple[str, str] | None]], key: str, values: Iterable[str]
) -> Shift:
    base, ends = figures[full] if (full := SHORT_FOR.get(key, key)) in figures else (_option_text(question, key), None)
    tried = list(values) or list(ends or _nearby(key, base))
    return Shift(key, base, tuple(axis_of(key, tried).values))


def _option_text(question: Question, key: str) -> str:
    """Return the value of an option, given or the workload's own."""
    field = option_field(key)
    value = getattr(question.shape, field, None) if field else None
    if field and value is None:
        value = getattr(question.answerable().workload, field, getattr(question, field, None))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"--sensitivity: {key} has no number to move: give a number as its option, or leave it out of --over")
    return str(value)


def _nearby(key: str, base: str) -> tuple[str, str]:
    written = split_quantity(base)
    if written is None:
        raise InputError(f"--sensitivity: {key} is {base!r}, not a number: name its values, --over {key}=V1,V2")
    number, unit = float(written[0]), written[1]
    low, high = (1 - _SHARE) * number, (1 + _SHARE) * number
    if not unit and written[0].isdecimal():  # such as cores
        return str(max(1, math.floor(low))), str(math.ceil(high))
    return f"{low:.6g}{unit}", f"{high:.6g}{unit}"


def shifted(question: Question, some: Iterable[Shift], policies: Sequence[str]) -> Iterator[Setting]:
    """Return the settings to answer: the base of each policy, then every value of every move. Texts: key, value, policy."""
    for policy in policies:
        yield Setting(question, policy, ("", "", policy))
    for move in some:
        for text, value in axis_of(move.key, move.values).values.items():
            changed = _changed(question, move.key, value)
            for policy in policies:
                yield Setting(changed, policy, (move.key, text, policy))


def _changed(question: Question, key: str, value: Any) -> Question:
    field = option_field(key)
    change: dict[str, Any] = {field: value}
    if field and hasattr(question.shape, field):
        return replace(question, shape=replace(question.shape, **change))
    if field:
        return replace(question, **change)
    short = {figure: option.replace("-", "_") for option, figure in SHORT_FOR.items()}
    others = tuple(item for item in question.set_ if key_value(item)[0] != key)
    cleared: dict[str, Any] = {short[key]: None} if key in short else {}
    return replace(question, set_=(*others, f"{key}={value}"), **cleared)
