"""``autohete profile``."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from autohete.cli.groups import HARDWARE, OUTPUT
from autohete.cli.outputs import check_outputs
from autohete.cli.runtime import check_runtime
from autohete.cli.text_options import PLAIN_MODEL, TextModel


def profile(
    out: Annotated[str, Parameter(group=OUTPUT)],
    *,
    device: Annotated[Literal["emulated", "cuda"], Parameter(group=HARDWARE)] = "emulated",
    gpu_memory: Annotated[str | None, Parameter(group=HARDWARE)] = None,
    model: TextModel = PLAIN_MODEL,
    drive: Annotated[str | None, Parameter(group=HARDWARE)] = None,
    quick: Annotated[bool, Parameter(group=HARDWARE)] = False,
) -> None:
    """Measure this machine, and one block of each kind of a GPT; write both to OUT (.json).

    Parameters
    ----------
    out:
        The file to write; `autohete simulate --profile` and `autohete train --profile` read it.
    device:
        emulated: the CPU stands in for a GPU.
    gpu_memory:
        Memory of the device, such as 64MiB.
    drive:
        A folder on a drive: measure how fast files in it are read and written, past the page cache where its file system allows
        that. It is the place `nvme` of the measured machine.
    quick:
        Measure copies up to 64 MiB instead of 1 GiB.
    """
    from autohete.cli.text_model import profile as run

    check_outputs({"OUT": out})
    check_runtime()
    run(model, out, device, gpu_memory, quick=quick, drive=drive)
