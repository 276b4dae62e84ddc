"""Measured profiles as JSON files that state where, when and with which versions they were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter, ValidationError

from autohete.documents import as_json
from autohete.errors import InputError
from autohete.files import read_text, write_text
from autohete.hardware import HardwareFile
from autohete.hardware.document import LARGEST_PROFILE
from autohete.printable import shown
from autohete.profile import LossProfile, Profile, UnitProfile
from autohete.workload import Workload

#: Upper limit for seconds and bytes. No real value reaches it.
_ABSURD = 2**62
_FORMAT: Literal["autohete-profile 1"] = "autohete-profile 1"
_BLOCKS, _LOSS, _WORKLOAD = TypeAdapter(tuple[UnitProfile, ...]), TypeAdapter(LossProfile), TypeAdapter(Workload)


@dataclass(frozen=True, slots=True)
class ProfileDocument:
    """A measured profile.

    Args:
        format: the form of this document.
        measured: date, machine and versions, as text.
        workload: what was measured.
        blocks: times and sizes of each unit.
        loss: time and sizes of the loss.
        hardware: the machine, as a hardware file describes it.
    """

    format: Literal["autohete-profile 1"]
    measured: Mapping[str, str]
    workload: Workload
    blocks: tuple[UnitProfile, ...]
    loss: LossProfile
    hardware: Annotated[Mapping[str, Any], HardwareFile]


def write_profile(path: str | Path, profile: Profile, hardware: dict[str, Any], measured: dict[str, str]) -> None:
    """Write ``profile``, measured on ``hardware``.

    Args:
        path: a .json file.
        profile: times and sizes.
        hardware: the hardware of the measurement, as the document of a hardware file: each figure with unit, source and date.
        measured: date, machine and versions, as text.

    Raises:
        InputError: ``path`` cannot be written.
    """
    document = ProfileDocument(_FORMAT, measured, profile.workload, profile.units, profile.loss, hardware)
    write_text(path, json.dumps(as_json(document), indent=1) + "\n")


def read_profile(path: str | Path) -> Profile:
    """Read a profile written by :func:`write_profile`.

    Raises:
        InputError: no such file, not a profile file, or invalid values.
    """
    try:
        document: Any = json.loads(read_text(path, "profile", "write one with autohete profile", LARGEST_PROFILE))
    except (ValueError, RecursionError) as error:
        raise InputError(f"profile {str(path)!r} is not JSON: {str(error)[:200]}; write one with autohete profile") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise InputError(f"{str(path)!r} is no profile ({_FORMAT!r} is missing): write one with autohete profile")
    try:
        workload = _WORKLOAD.validate_python(document.get("workload"))
        units = _BLOCKS.validate_python(document.get("blocks"))
        loss = _LOSS.validate_python(document.get("loss"))
        hardware = HardwareFile.of(document.get("hardware")).hardware()
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise InputError(f"profile {str(path)!r}: {error.title} {where}: {fault['msg']}; measure it again") from error
    except InputError as error:
        raise InputError(f"profile {str(path)!r}: {error}; measure it again") from error
    saved = [one for unit in units for one in unit.saved]
    numbers = [n for unit in units for n in astuple(replace(unit, saved=(), measured_selective_workspace_bytes=None))]
    numbers += [n for unit in units for n in unit.measured_selective_workspace_bytes or ()]
    numbers += [n for some in (*map(astuple, saved), astuple(loss)) for n in some]
    for number in (n for n in numbers if isinstance(n, (int, float))):
        if not 0 <= number < _ABSURD:  # also NaN
            raise InputError(
                f"profile {str(path)!r} holds {shown(number)}: times and sizes are finite and not negative; measure it again"
            )
    if len(units) != workload.unit_count:
        raise InputError(f"profile {str(path)!r} has {len(units)} blocks, its workload {workload.unit_count}: measure it again")
    return Profile(workload, hardware, units, loss)
