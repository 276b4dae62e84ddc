"""What the figures share of their settings: the models, the hardware that options may change, and how titles name both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from autohete.cli.question import Question
from autohete.workload import Workload
from autohete.workload.config import read_model
from experiments.comparison import MODELS, NODE

#: Hardware figures that differ from the preset, as ``--set`` takes them.
Moved = tuple[tuple[str, str], ...]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The hardware of a figure.

    Parameters
    ----------
    hardware:
        A preset's name, a TOML file, or the profile (.json) of a machine.
    set_:
        Change a hardware figure: KEY=VALUE, with its unit, such as links.h2d.bandwidth=50GB/s. Repeatable. What the figure
        itself varies keeps its values.
    """

    hardware: str = NODE
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)] = ()

    @property
    def moved(self) -> Moved:
        """The figures given.

        Raises:
            InputError: one is given twice, or is not KEY=VALUE.
        """
        return tuple(Question(set_=self.set_).overrides().items())

    @property
    def text(self) -> str:
        """The hardware in a title."""
        return ", ".join([self.hardware, *(f"{key} = {text}" for key, text in self.moved)])


def with_gpu(where: Where, gib: float) -> Moved:
    """The figures of ``where``, with a GPU of ``gib`` GiB."""
    return tuple((dict(where.moved) | {"gpu.memory": f"{gib}GiB"}).items())


#: The node of the published comparison.
PUBLISHED_NODE = Where()
#: An option that names one model, or several if it is repeated.
Models = Annotated[tuple[str, ...], Parameter(name=("--models", "--model"))]


def model_of(name: str) -> Workload:
    """Return a model of the published comparison, or another by the name or ``config.json`` that ``--model`` takes.

    Raises:
        InputError: no such model.
    """
    return MODELS[name] if name in MODELS else read_model(name)


def size_of(name: str) -> str:
    """The parameters of a model, and its name if it is not one of the published comparison."""
    size = f"{model_of(name).parameters / 1e9:.1f}B"
    return size if name in MODELS else f"{name} ({size})"


def batch_of(workload: Workload) -> str:
    """The batch and the kernels of a workload, for a title."""
    return f"batch {workload.batch_size} x {workload.sequence_length} tokens, {kernels_of(workload)}"


def kernels_of(workload: Workload) -> str:
    """The format and the kernels of a workload, for a title."""
    return f"{workload.precision}, {workload.kernels} kernels"
