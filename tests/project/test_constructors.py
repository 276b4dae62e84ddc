"""Constructors refuse what would be misread in silence: ``is`` tells a plain string from the member that it equals."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import pkgutil
import types
import typing
from enum import StrEnum

import pytest
from support.small import SMALL

import autohete
from autohete.errors import InputError, check_member
from autohete.plan import Activations, Footprint, Format, ParameterSlots, Plan, Route, UnitPlan
from autohete.plan.rules import BlockingCopies, Slots, Window
from autohete.policies import POLICIES
from autohete.policies.checkpointing import with_checkpointing
from autohete.runtime.settings import Execution
from autohete.runtime.takeover import Ledgers
from autohete.schedule import SharedResource
from autohete.train.gpt import GPT
from autohete.train.trainer import Trainer

#: Made by the package alone, from members.
RESULTS = {
    "AnswerDocument",
    "Decision",
    "ExecutedSchedule",
    "Gain",
    "GpuWork",
    "GrownFigure",
    "Lever",
    "Move",
    "PartDifference",
    "Recomputation",
    "Resting",
    "Summary",
    "TimedPass",
    "TracedWorkload",
    "UnitCollective",
    "UnitSizes",
    "ValueGap",
}


def is_named_tuple(value: type) -> bool:
    """Whether it is one, or made of one."""
    return issubclass(value, tuple) and hasattr(value, "_fields")


def public_data() -> list[type]:
    """Every public dataclass and named tuple of the package."""
    found: dict[str, type] = {}
    for module in pkgutil.walk_packages(autohete.__path__, "autohete."):
        if module.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            ours = isinstance(value, type) and value.__module__.startswith("autohete")
            data = ours and (dataclasses.is_dataclass(value) or is_named_tuple(value))
            if data and not name.startswith("_") and name not in RESULTS:
                found[f"{value.__module__}.{name}"] = value
    return [found[name] for name in sorted(found)]


def fields_of(classes: list[type], wanted: type) -> list[tuple[type, str, type]]:
    """(class, field, type) of all fields that are annotated as ``wanted``, a subclass of it, or that or None."""
    found = []
    for cls in classes:
        for name, hint in typing.get_type_hints(cls).items():
            for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
                if isinstance(option, type) and issubclass(option, wanted):
                    found.append((cls, name, option))
    return found


def sample(hint: typing.Any) -> object:
    """Some value of the annotated type."""
    if isinstance(hint, types.UnionType):
        return sample(typing.get_args(hint)[-1])
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return next(iter(hint))
    if typing.get_origin(hint) is tuple:
        inner, *_ = typing.get_args(hint)
        return (sample(inner),) * 3
    simple: dict[object, object] = {int: 1, bool: False, float: 1.0, str: "x"}
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or is_named_tuple(hint)):
        return construct(hint)
    return simple.get(hint)


def construct(cls: type, **given: object) -> object:
    """An instance whose fields are samples, but for those that are given and those that have a default."""
    hints = typing.get_type_hints(cls)
    if dataclasses.is_dataclass(cls):
        required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    else:
        fields, defaults = cls._fields, cls._field_defaults  # type: ignore[attr-defined]
        required = [name for name in fields if name not in defaults]
    return cls(**{name: sample(hints[name]) for name in required} | given)


def refusal(cls: type, **given: object) -> str:
    """What the constructor objects to, empty if nothing."""
    try:
        construct(cls, **given)
    except InputError as error:
        return str(error)
    return ""


CHECKED = public_data()
#: What a policy, or a person, decides.
DECISIONS = [
    UnitPlan, Plan, Route, Format, Footprint, ParameterSlots, BlockingCopies, Slots, Window, SharedResource,
    *POLICIES.values(),
]  # fmt: skip


def test_the_walk_finds_what_there_is() -> None:
    """The walk reaches plans, schedules, profiles, policies and the runtime."""
    found = {f"{cls.__name__}.{field}" for cls, field, _ in fields_of(CHECKED, StrEnum)}
    assert found >= {
        "BlockingCopies.kind",
        "UnitProfile.role",
        "BufferId.value",
        "PredictionComparison.clock",
        "Lane.discipline",
        "StrongHold.checkpointing",
        "TaskId.kind",
        "Trace.clock",
        "UnitPlan.activations",
        "Workload.precision",
    }
    decided = {f"{cls.__name__}.{field}" for cls, field, _ in fields_of(DECISIONS, int)}  # a switch is an int, too
    assert decided >= {"Route.stays_after_forward", "Window.size", "StrongHold.window", "ZeroOffload.delayed_update"}


def test_a_plain_string_is_no_member() -> None:
    """A string that equals a member is refused with field, value and members; the member is not."""
    misread = []
    enums = [(cls, field, enum) for cls, field, enum in fields_of(CHECKED, StrEnum) if issubclass(enum, StrEnum)]
    for cls, field, enum in enums:
        member = next(iter(enum))
        said = refusal(cls, **{field: member.value})
        named = all(choice.name in said or choice.value in said for choice in enum)
        if f"{field} is '{member.value}'" not in said or not named or f"{field} is" in refusal(cls, **{field: member}):
            misread.append((cls.__name__, field, said))
    assert not misread, misread


def test_what_is_merely_true_is_no_switch() -> None:
    """A switch takes True or False, and None where that is its default: the string "off" would mean on."""
    misread = []
    for (cls, field, _), value in itertools.product(fields_of(DECISIONS, bool), ("off", 0, None)):
        optional = isinstance(typing.get_type_hints(cls)[field], types.UnionType)
        allowed = "True, False or None" if optional else "True or False"
        wanted = "" if value is None and optional else f"{field} is {value!r}: give {allowed}"
        if (said := refusal(cls, **{field: value})) != wanted:
            misread.append((cls.__name__, field, value, said))
    assert not misread, misread


def test_a_count_is_a_whole_number() -> None:
    """A count takes an int: True would mean 1."""
    misread = []
    for (cls, field, kind), value in itertools.product(fields_of(DECISIONS, int), ("2", 2.5, True)):
        said = refusal(cls, **{field: value})
        if kind is int and not said.startswith(f"{field} is {value!r}: give a whole number"):
            misread.append((cls.__name__, field, value, said))
    assert not misread, misread


def test_the_message_says_what_to_write() -> None:
    """The example that used to train with everything kept."""
    with pytest.raises(InputError) as caught:
        UnitPlan(activations="recompute")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "activations is 'recompute': give Activations.KEEP, Activations.SELECTIVE, Activations.RECOMPUTE or Activations.DROP"
    )
    check_member("activations", Activations.KEEP, Activations)


@pytest.mark.parametrize("argument", [{"mode": "paced"}, {"on_nonfinite": "skip"}], ids=str)
def test_the_trainer_takes_members(argument: dict[str, typing.Any]) -> None:
    """Mode and what to do with a loss that is not finite are members, also where they are arguments."""
    ((name, value),) = argument.items()
    with pytest.raises(InputError, match=f"{name} is {value!r}: give "):
        Trainer(GPT(SMALL), **argument)


def test_arguments_that_are_members_are_checked() -> None:
    """How memory is counted, and a choice of checkpointing, are members."""
    for value in (Execution, Ledgers):
        with pytest.raises(InputError, match="counting is 'exact': give Counting"):
            value(counting="exact")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"choice is 'none': give Checkpointing\.BEST"):
        with_checkpointing("none", lambda _: pytest.fail("planned"), None, lambda _: pytest.fail("judged"))  # type: ignore[arg-type]
