"""The variants of a system: combinations of the flags that its users can choose and that change its plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import product
from typing import Any, TypeVar

from autohete.errors import InputError
from autohete.plan import Route
from autohete.profile import Profile

S = TypeVar("S")


def combinations(system: type[S], **values: Iterable[object]) -> Iterator[S]:
    """Yield ``system`` with its default flags, then every other combination of ``values`` that it accepts."""
    default = system()
    yield default
    for some in product(*values.values()):
        try:
            one = system(**dict(zip(values, some, strict=True)))
        except InputError:
            continue
        if one != default:
            yield one


def flags_of(system: Any) -> str:
    """The flags of a system that are not its defaults, as :func:`autohete.policies.parse_policy` reads them."""
    texts = []
    for flag in dataclasses.fields(system):
        value = getattr(system, flag.name)
        if value == flag.default:
            continue
        text = ("on" if value else "off") if isinstance(value, bool) else value.value if isinstance(value, Enum) else value
        texts.append(flag.name if value is True else f"{flag.name}={text}")
    return ",".join(texts)


def place_names(profile: Profile) -> tuple[str, ...]:
    """The places of the hardware besides the GPU and the host."""
    return tuple(place.name for place in profile.hardware.places)


def check_place(system: str, place: str) -> None:
    """Check the flag ``place`` of a system that uses one besides the GPU and the host.

    Raises:
        InputError: it is one of these.
    """
    if not Route(place).far:
        raise InputError(f"{system}:place={place} is no place besides the GPU and the host: give one, such as nvme")


def if_several(profile: Profile, *values: object) -> tuple[object, ...]:
    """The values of a flag that matters to several GPUs only: with one GPU the first."""
    return values if profile.hardware.gpus > 1 else values[:1]
