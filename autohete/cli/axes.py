"""The axes of a sweep: ``KEY=VALUES`` on the command line, or a table of lists in a TOML file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from decimal import Decimal
from enum import Enum
from functools import cache
from itertools import chain, product
from typing import Annotated, get_args, get_type_hints

from cyclopts import App, Parameter
from pydantic import TypeAdapter, ValidationError

from autohete.cli.question import BLANK, SHORT_FOR, Question, Shape, key_value
from autohete.errors import InputError, unknown_name
from autohete.files import LARGEST_TOML, parse_toml, read_text
from autohete.printable import shown

POLICY = "policy"
#: More settings than this are refused.
MOST_SETTINGS = 1_000_000

_NUMBER = r"\d{1,15}(?:\.\d{1,12})?"  # sums of such numbers are exact in Decimal
_UNIT = r"[A-Za-z/]*"
_RANGE = re.compile(rf"({_NUMBER})({_UNIT})\.\.({_NUMBER})({_UNIT}):({_NUMBER})({_UNIT})")


@dataclass(frozen=True, slots=True)
class Axis:
    """A key and its values, each once.

    Args:
        key: ``policy``, an option of :class:`~autohete.cli.question.Question` without its dashes, or a hardware figure.
        values: text as it is written into the sweep's file -> value of the option.
    """

    key: str
    values: Mapping[str, object]

    def __post_init__(self) -> None:
        if not self.values:
            raise InputError(f"{self.key} has no values: give at least one")
        for text in self.values:
            _check_text(self.key, text)


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of a sweep: the question, and the text of its value on each axis."""

    question: Question
    policy: str
    texts: tuple[str, ...]


def _check_text(key: str, text: str) -> None:
    if not text or not text.isprintable():
        raise InputError(f"{key} has the value {text!r}: give printable text of one line, with one comma between values")


# --- texts --------------------------------------------------------------------------------------------------------


def parse_over(item: str, *, bare: bool = False) -> tuple[str, list[str]]:
    """Split ``KEY=V1,V2,...`` into the key and its values; a value may be a range, and a ``bare`` KEY has none."""
    key, equals, values = item.partition("=")
    key = key.strip()
    if bare and key and not equals:
        return key, []
    if not (key and equals):
        raise InputError(f"--over {item!r} is not KEY=V1,V2,...: write it such as batch-size=1,2,4")
    return key, [value.strip() for value in values.split(",")]


def read_grid(path: str) -> list[tuple[str, list[str]]]:
    """Read the table ``[over]`` of a TOML file: each key has a list of values, which are not split at commas."""
    try:
        document = parse_toml(read_text(path, "grid", "give a TOML file", LARGEST_TOML))
    except ValueError as error:
        raise InputError(f"grid {path!r} is not valid TOML: {str(error)[:200]}") from error
    over = document.pop("over", None)
    if not isinstance(over, dict) or document:
        raise InputError(f"grid {path!r} must have one table [over], such as: [over] batch-size = [1, 2, 4]")
    return list(_lists(path, over, ""))


def _lists(path: str, table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, list[str]]]:
    for key, given in table.items():
        if given and isinstance(given, dict):  # a dotted key without quotes
            yield from _lists(path, given, f"{prefix}{key}.")
        elif isinstance(given, list) and all(isinstance(value, (str, int, float)) for value in given):
            yield f"{prefix}{key}", [_text(value) for value in given]
        else:
            raise InputError(
                f"grid {path!r}: {shown(f'{prefix}{key}')} must be a list of strings, numbers or switches, such as [1, 2, 4]"
            )


def expand(key: str, text: str) -> list[str]:
    """Return the values of ``START..STOP:STEP``, the last of them at most STOP; of any other text, the text itself."""
    match = _RANGE.fullmatch(text)
    if match is None:
        if ".." in text:
            raise InputError(
                f"{key}: {text!r} is not a range: write START..STOP:STEP, each a plain number with its unit, such as "
                "10GB/s..100GB/s:10GB/s or 1..8:1"
            )
        return [text]
    start, stop, step = (Decimal(match[place]) for place in (1, 3, 5))
    units = {match[place] for place in (2, 4, 6)}
    if len(units) > 1:
        raise InputError(f"{key}: {text!r} has different units: write start, stop and step in the same one")
    if not step or start > stop:
        problem = "its step is 0" if not step else f"it starts at {match[1]} and stops at {match[3]}"
        raise InputError(f"{key}: the range {text!r} is empty: {problem}; write such as 1..8:1, from the smaller to the larger")
    count = int((stop - start) // step) + 1 if (stop - start) / step < MOST_SETTINGS else math.inf
    if count > MOST_SETTINGS:
        raise InputError(f"{key}: the range {text!r} has more than {MOST_SETTINGS:,} values: take a larger step")
    return [f"{(start + n * step).normalize():f}{match[2]}" for n in range(int(count))]


# --- keys ---------------------------------------------------------------------------------------------------------


def _option(name: str, annotation: object) -> str:
    for extra in getattr(annotation, "__metadata__", ()):
        if isinstance(extra, Parameter) and extra.name:
            return next(iter(extra.name)).removeprefix("--")
    return name.replace("_", "-")


def _options(cls: type) -> dict[str, str]:
    """Return the options of a class of the question, without dashes, and the field that each of them sets."""
    hints = get_type_hints(cls, include_extras=True)
    return {_option(field.name, hints[field.name]): field.name for field in fields(cls) if field.name not in ("shape", "set_")}


_TOP, _SHAPE = _options(Question), _options(Shape)


def _kinds(cls: type, names: Mapping[str, str]) -> dict[str, object]:
    """Return the type of each option, that of a value if it may be left out."""
    hints = get_type_hints(cls)
    return {key: next(iter(get_args(hints[field])), hints[field]) for key, field in names.items()}


_KINDS = _kinds(Question, _TOP) | _kinds(Shape, _SHAPE)


@cache
def _option_parser() -> App:
    def read(*, question: Annotated[Question, Parameter(name="*")] = BLANK) -> Question:
        return question

    app = App(name="autohete sweep", version_flags=(), help_flags=())
    app.default(read)
    return app


#: Conversions that give what the command line gives, a thousand times as fast. pydantic's of switches and names differ.
_NUMBERS: Mapping[object, TypeAdapter[object]] = {hint: TypeAdapter(hint) for hint in (int, float)}


def _option_value(key: str, text: str) -> object:
    """Read a value exactly as the option does."""
    kind = _KINDS[key]
    if kind is str:
        return text
    if kind in _NUMBERS:
        with suppress(ValidationError):  # another way to write a number, or an error that the parser explains
            return _NUMBERS[kind].validate_python(text)
    question: Question = _option_parser()(
        [f"--{key}={text}"], exit_on_error=False, print_error=False, result_action="return_value"
    )
    return getattr(question, _TOP[key]) if key in _TOP else getattr(question.shape, _SHAPE[key])


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, Enum) else value)


#: Keys whose values name something; they have no ranges.
_NAMES = (POLICY, "hardware", "workload", "model", "profile")


def _check_name(key: str, text: str) -> None:
    """Check that the preset or model that a value of :data:`_NAMES` names exists."""
    from autohete.hardware import read_hardware
    from autohete.policies import parse_policy
    from autohete.profile.profile_file import read_profile
    from autohete.workload import named_workload
    from autohete.workload.config import read_model

    checks: tuple[Callable[[str], object], ...] = (parse_policy, read_hardware, named_workload, read_model, read_profile)
    checks[_NAMES.index(key)](text)


def _expanded(key: str, texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts if key in _NAMES else chain.from_iterable(expand(key, each) for each in texts)))


def option_field(key: str) -> str:
    """Return the field that the option ``key`` sets, in :class:`Question` or in its shape; empty for an unknown option."""
    return _TOP.get(key) or _SHAPE.get(key, "")


def axis_of(key: str, texts: Iterable[str]) -> Axis:
    """Return the axis of a key that has passed :func:`check_keys`, with each value read as its option reads it."""
    values: dict[str, object] = {}
    for text in texts:
        _check_text(key, text)  # before the option's own check, whose message could have several lines
        value = _option_value(key, text) if key in _TOP or key in _SHAPE else text
        values.setdefault(_text(value), value)
    for text in values if key in _NAMES else ():
        _check_name(key, text)
    return Axis(key, values)


def check_keys(keys: Sequence[str], nodes: Iterable[str]) -> None:
    """Check that all keys exist, on at least one of the hardware ``nodes``, and that no two of them set the same.

    Raises:
        InputError: there is no such key, or a key is given twice.
    """
    from autohete.hardware import written_figures
    from autohete.hardware.document import settable

    figures = settable(figure.key for node in nodes for figure in written_figures(node))
    allowed = dict.fromkeys([POLICY, *_TOP, *_SHAPE, *figures])
    meant = [SHORT_FOR.get(key, key) for key in keys]
    for key, meaning in zip(keys, meant, strict=True):
        if key not in allowed:
            raise unknown_name("key of --over", key, allowed, "autohete sweep --help, with autohete hardware show NAME,")
        if meant.count(meaning) > 1:
            raise InputError(f"{key} is given twice: give all its values in one --over, and no option or --set for it")


# --- settings -----------------------------------------------------------------------------------------------------


def _given(question: Question) -> Iterator[Axis]:
    """Return the options of a question that were given, as axes of one value."""
    for names, instance, blank in ((_TOP, question, BLANK), (_SHAPE, question.shape, BLANK.shape)):
        for key, field in names.items():
            value = getattr(instance, field)
            if value != getattr(blank, field):
                yield Axis(key, {_text(value): value})
    for item in question.set_:
        key, text = key_value(item)
        yield Axis(key, {text: text})


def all_axes(question: Question, policies: Sequence[str], over: Iterable[tuple[str, list[str]]]) -> list[Axis]:
    """Return the axes of a sweep: the specified options, which have one value, the requested axes, and the policies.

    Raises:
        InputError: an unknown key or name, a key given twice, a value that its option does not accept, an empty range, or
            more than :data:`MOST_SETTINGS` settings.
    """
    asked = list(over)
    if not policies and not any(key == POLICY for key, _ in asked):
        policies = ("autohete",)
    if policies:
        asked.append((POLICY, list(policies)))
    given = list(_given(question))
    nodes = [text for key, texts in asked if key == "hardware" for text in texts] or [question.hardware]
    check_keys([*(axis.key for axis in given), *(key for key, _ in asked)], nodes)
    expanded = [(key, _expanded(key, texts)) for key, texts in asked]
    count = math.prod(len(texts) for _, texts in expanded)
    if count > MOST_SETTINGS:
        sizes = " x ".join(f"{len(texts):,} of {key}" for key, texts in expanded if len(texts) > 1)
        raise InputError(f"{count:,} settings ({sizes}) are more than {MOST_SETTINGS:,}: leave out values, or split the sweep")
    return [*given, *(axis_of(key, texts) for key, texts in expanded)]


def settings(axes: Sequence[Axis]) -> Iterator[Setting]:
    """Return the product of all axes; the last varies fastest."""
    for point in product(*(axis.values.items() for axis in axes)):
        yield _setting(axes, point)


def diagonal(axes: Sequence[Axis]) -> Iterator[Setting]:
    """Return settings that use every value of every axis at least once, as few as possible."""
    items = [list(axis.values.items()) for axis in axes]
    for n in range(max(map(len, items))):
        yield _setting(axes, [each[n % len(each)] for each in items])


def _setting(axes: Sequence[Axis], point: Iterable[tuple[str, object]]) -> Setting:
    top: dict[str, object] = {}
    shape: dict[str, object] = {}
    figures: list[str] = []
    policy, texts = "", []
    for axis, (text, value) in zip(axes, point, strict=True):
        texts.append(text)
        if axis.key == POLICY:
            policy = text
        elif axis.key in _TOP:
            top[_TOP[axis.key]] = value
        elif axis.key in _SHAPE:
            shape[_SHAPE[axis.key]] = value
        else:
            figures.append(f"{axis.key}={text}")
    question = Question(shape=Shape(**shape), set_=tuple(figures), **top)  # type: ignore[arg-type]
    return Setting(question, policy, tuple(texts))
