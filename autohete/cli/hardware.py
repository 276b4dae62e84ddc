"""``autohete hardware``: its commands ``show``, ``check`` and ``new``."""

from __future__ import annotations

import os
from pathlib import Path

from cyclopts import App

from autohete.cli.named import HardwareName
from autohete.cli.outputs import check_outputs
from autohete.errors import InputError
from autohete.printable import printable

hardware = App(name="hardware", help="Show, check and begin hardware files.")


@hardware.command
def show(name: HardwareName, /) -> None:
    """Show every figure of a hardware with its range, date and source.

    Parameters
    ----------
    name:
        A preset's name, a TOML file, or the profile (.json) of a machine.
    """
    from autohete.report.preset_tables import print_hardware

    print_hardware(name)


@hardware.command
def check(file: str, /) -> None:
    """Check a hardware file: one line if it is valid; otherwise all its errors, and exit code 2.

    Parameters
    ----------
    file:
        The TOML file.
    """
    from collections import Counter

    from autohete.hardware import left_out, read_hardware, written_figures
    from autohete.hardware.pcie import DEFAULT

    notes = read_hardware(file).hardware().remarks
    homes = Counter(figure.home for figure in written_figures(file) if figure.home != DEFAULT)
    inherited = (f", {count} of them from {home}" for home, count in homes.items() if home != str(Path(file)))
    print(printable("; ".join([f"{file}: ok, {homes.total()} figures{''.join(inherited)}", *left_out(file), *notes])))


@hardware.command
def new(file: str, /, *, base: HardwareName) -> None:
    """Write a hardware file to fill in: it takes over all of its base, whose figures are in it as comments.

    Parameters
    ----------
    file:
        The TOML file to write; it must not exist yet.
    base:
        A preset's name, a TOML file, or the profile (.json) of a machine.
    """
    from autohete.files import write_text
    from autohete.hardware.template import new_hardware_text

    if not file.endswith(".toml"):
        raise InputError(f"{file!r} is not the name of a TOML file: give one such as {file or 'my-node'}.toml")
    if os.path.lexists(file):
        raise InputError(f"{file!r} exists: give another name, or remove it first")
    check_outputs({"FILE": file})
    write_text(file, new_hardware_text(file, base))
    print(printable(f"{file} written: fill in what differs from {base}, then run autohete hardware check {file}"))
