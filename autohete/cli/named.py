"""Values of options that name a hardware, as people write them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token

from autohete.errors import InputError


def _hardware_named(_: object, tokens: Sequence[Token]) -> str:
    """Return the preset whose name has all parts of the given one; a file, and what no preset has, as it is given.

    Raises:
        InputError: several presets have them.
    """
    from autohete.hardware import preset_names, presets_like, read_hardware

    given = tokens[0].value
    if given in preset_names() or os.path.sep in given or given.endswith((".toml", ".json")):
        return given
    found = presets_like(given)
    if len(found) > 1:
        named = "; ".join(f"{name} ({read_hardware(name).title})" for name in found)
        raise InputError(f"hardware {given!r} is not the name of one preset but a part of {len(found)}: give one of {named}")
    for name in found:
        print(f"autohete: hardware {given!r} is taken as {name}", file=sys.stderr)
        return name
    return given


#: The value of an option that names a hardware: a preset, by a part of its name if that is of no other, or a file.
HardwareName = Annotated[str, Parameter(converter=_hardware_named)]
