"""Published systems, one file each, by name: ``zero_offload``, ``zero_offload:paper,tile_overlap``, ``stronghold:window=8``."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from enum import Enum

from autohete.errors import InputError, unknown_name
from autohete.plan import Plan
from autohete.policies.autohete import AutoHete
from autohete.policies.patrickstar import PatrickStar
from autohete.policies.resident import Resident
from autohete.policies.stronghold import StrongHold
from autohete.policies.zero_offload import ZeroOffload
from autohete.policy import Judge
from autohete.profile import Profile

_System = Resident | ZeroOffload | PatrickStar | StrongHold | AutoHete

POLICIES: dict[str, type[_System]] = {
    "resident": Resident,
    "zero_offload": ZeroOffload,
    "patrickstar": PatrickStar,
    "stronghold": StrongHold,
    "autohete": AutoHete,
}


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A published system with its flags; implements :class:`autohete.policy.Policy`."""

    name: str
    system: _System

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """The system's plan, under the name that was asked for."""
        return dataclasses.replace(self.system.plan(profile, judge), policy=self.name)


def parse_policy(text: str) -> NamedPolicy:
    """Read ``NAME[:flag,flag=value]``.

    Raises:
        InputError: no such policy, no such flag, or a value the flag does not take.
    """
    name, _, flags = text.strip().partition(":")
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    system = POLICIES[name]
    types_of = typing.get_type_hints(system)
    values: dict[str, object] = {}
    for item in filter(None, (item.strip() for item in flags.split(","))):
        flag, given, value = item.partition("=")
        if flag not in types_of:
            raise unknown_name(f"flag of {name}", flag, types_of)
        if flag in values:
            raise InputError(f"{name}:{flag} is given twice: say it once")
        values[flag] = _flag_value(f"{name}:{flag}", types_of[flag], value if given else None)
    return NamedPolicy(text.strip(), system(**values))  # type: ignore[arg-type]


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
    assert wanted is int or isinstance(wanted, types.UnionType), "flags are switches, choices or numbers"
    if text is None or not text.isdecimal() or len(text) > 9:
        raise InputError(f"{flag}={text or ''} takes a whole number, such as {flag}=8")
    return int(text)
