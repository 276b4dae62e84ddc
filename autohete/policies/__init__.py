"""Policies by name: ``zero_offload``, ``zero_offload:paper,tile_overlap``, ``my.module:MyPolicy,flag=value``.

A published system is a module of this package with a dataclass ``SYSTEM``: the module name is its name, the fields are its
flags. Other packages register theirs with an entry point of the group ``autohete.policies``. Any other policy is named by its
module and class; the module is installed, or in a folder of the environment's ``PYTHONPATH``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import pkgutil
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from autohete.errors import AutoHeteError, InputError, OptimizerError, unknown_name
from autohete.plan import Plan
from autohete.plan.policy import Judge
from autohete.policies.flags import flags_of
from autohete.printable import shown
from autohete.profile import Profile

#: Entry point group in which other packages register their policies.
ENTRY_POINTS = "autohete.policies"


class System(typing.Protocol):
    """A dataclass that plans. Its fields are flags: switches, choices (enumerations), names or whole numbers.

    It may have a class method ``variants(profile)`` that yields the system with each combination of flags that its users can
    choose and that changes its plan, the defaults first.
    """

    __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field[typing.Any]]]

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. The plan is renamed to the name that was asked for."""
        ...


def _shipped() -> Iterator[tuple[str, type[System]]]:
    for module in pkgutil.iter_modules(__path__):
        system = getattr(importlib.import_module(f"{__name__}.{module.name}"), "SYSTEM", None)
        if system is not None:
            yield module.name, system


#: The systems of this package.
POLICIES: dict[str, type[System]] = dict(_shipped())
#: Systems whose GPUs have stages of a pipeline.
PIPELINES = ("pipeline", "pipeline_offload", "mpress")
#: Compared by default: the systems that the AutoHete paper compares, and ordinary training.
COMPARED = ("resident", "zero_offload", "patrickstar", "stronghold", "autohete")
#: Compared by default if several GPUs share a model.
COMPARED_BY_SEVERAL = (
    "resident:zero_stage=3",
    "zero_offload",
    "zero3_offload",
    "fsdp2_offload",
    "twin_flow",
    "deep_optimizer_states",
    "patrickstar",
    "stronghold",
    "autohete",
)
#: Compared systems whose updates cannot wait for the norm of all gradients.
CANNOT_CLIP = ("stronghold",)
#: Those that update on the CPU, which needs a kernel for the optimizer there.
UPDATE_ON_CPU = (
    "zero_offload",
    "patrickstar",
    "stronghold",
    "zero3_offload",
    "fsdp2_offload",
    "twin_flow",
    "deep_optimizer_states",
)
#: Those whose plan another system finds sooner: who asks all systems leaves them out.
FOUND_SOONER = ("checkmate",)
#: Those that train with stale parameters unless told otherwise: an answer compares what trains alike, so it leaves them out.
STALE = ("roundpipe", "zenflow")
#: Those whose gradients take the place of the parameters.
CANNOT_ACCUMULATE = ("patrickstar",)


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A system with its flags; implements :class:`autohete.plan.policy.Policy`."""

    name: str
    system: System

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """The system's plan, renamed to the name that was asked for."""
        try:
            plan = self.system.plan(profile, judge)
        except OptimizerError as error:
            raise OptimizerError(f"{self.name}: {error}") from error
        return plan if plan.policy == self.name else dataclasses.replace(plan, policy=self.name)


def parse_policy(text: str) -> NamedPolicy:
    """Read ``NAME[:flag,flag=value]`` or ``MODULE:CLASS[,flag,flag=value]``.

    Raises:
        InputError: unknown policy, unknown flag, or invalid value for a flag.
    """
    if not text.isprintable():
        raise InputError(f"policy {shown(text)} is not printable text: write NAME[:flag,flag=value]")
    name, _, rest = text.strip().partition(":")
    flags = [item.strip() for item in rest.split(",") if item.strip()]
    if name in POLICIES:
        system = POLICIES[name]
    elif name in (others := importlib.metadata.entry_points(group=ENTRY_POINTS)).names:
        system = _imported(*others[name].value.split(":"))
    elif flags and re.fullmatch(r"[A-Z]\w*", flags[0]):
        system = _imported(name, flags.pop(0))
    else:
        raise unknown_name("policy", name, [*POLICIES, *others.names], "autohete presets policies")
    types_of = {field.name: typing.get_type_hints(system)[field.name] for field in dataclasses.fields(system) if field.init}
    values: dict[str, object] = {}
    for item in flags:
        flag, given, value = item.partition("=")
        if flag not in types_of:
            raise unknown_name(f"flag of {name}", flag, types_of)
        if flag in values:
            raise InputError(f"{name}:{flag} is given twice: give it once")
        values[flag] = _flag_value(f"{name}:{flag}", types_of[flag], value if given else None)
    for field in dataclasses.fields(system):
        if field.init and field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise InputError(
                f"{name}:{field.name} is missing: give {field.name}=VALUE, or a default to this field of the class"
            )
    return NamedPolicy(text.strip(), system(**values))


def variants(system: type[System], profile: Profile) -> Iterator[System]:
    """Yield ``system`` with its default flags, then with the others that its users can choose and that change its plan here.

    Flags that describe a paper, a version that no longer installs, or an ablation are left out.
    """
    own = getattr(system, "variants", None)
    yield from (system(),) if own is None else own(profile)


def search_space(name: str, profile: Profile) -> tuple[str, ...]:
    """Return ``name`` with every combination of flags that is worth judging for ``profile``, the defaults first.

    Args:
        name: of a policy, as :func:`parse_policy` reads it. With flags, it is the only one.
        profile: leaves out flags that change nothing on its hardware, such as those of drives that it does not have.

    Raises:
        InputError: as for :func:`parse_policy`.
    """
    policy = parse_policy(name)
    if flags_of(policy.system):
        return (policy.name,)
    flags = map(flags_of, variants(type(policy.system), profile))
    return tuple(f"{policy.name}:{some}" if some else policy.name for some in flags)


def _imported(module: str, name: str) -> type[System]:
    """Import a class from a module: an installed one, or one in a folder of the environment's ``PYTHONPATH``.

    Never from the current folder by itself, since a file with settings may name any module.
    """
    try:
        found = getattr(importlib.import_module(module), name, None)
    except AutoHeteError:
        raise
    except Exception as error:  # a third-party module may raise anything
        raise InputError(
            f"the policy's module {module!r} cannot be imported: {type(error).__name__}: {error}. Looked among the installed "
            "packages and in the folders of PYTHONPATH; for a module in the current folder set PYTHONPATH=."
        ) from error
    if not (
        isinstance(found, type)
        and dataclasses.is_dataclass(found)
        and callable(getattr(found, "plan", None))
        and found is not NamedPolicy
    ):
        raise InputError(
            f"{module}:{name} is no policy: name a class such as my.module:MyPolicy, a dataclass with a method "
            "plan(profile, judge) whose fields are its flags"
        )
    return typing.cast("type[System]", found)


_SWITCH = {"on": True, "off": False}


def _flag_value(flag: str, wanted: object, text: str | None) -> object:
    if wanted is bool or wanted == bool | None:
        if text is None:
            return True
        if text in _SWITCH:
            return _SWITCH[text]
        raise InputError(f"{flag}={text} is a switch: write {flag}=on or {flag}=off")
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        choices = [str(member.value) for member in wanted]
        if text in choices:
            return wanted(text)
        raise InputError(f"{flag}={text or ''}: choose one of {', '.join(choices)}")
    if wanted is str:
        if not text:
            raise InputError(f"{flag} takes a name, such as {flag}=nvme")
        return text
    if not (wanted is int or (isinstance(wanted, types.UnionType) and int in wanted.__args__)):
        raise InputError(f"{flag} cannot be given in words: only switches, choices, names and whole numbers can")
    if text is None or not text.isdecimal() or len(text) > 12:
        raise InputError(f"{flag}={text or ''} takes a whole number from 0 on, of at most 12 digits, such as {flag}=1")
    return int(text)
