"""Training frameworks that can run a plan: which of them can, and the files that make them do so.

Each module has one framework, at a stated version. A framework refuses a plan with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from autohete.errors import InputError, unknown_name
from autohete.frameworks.deepspeed import DeepSpeedFiles
from autohete.frameworks.framework import Decided, Framework, ModelFiles, as_run, kernels_of
from autohete.frameworks.fsdp2 import Fsdp2Files
from autohete.frameworks.llamafactory import LlamaFactoryFiles
from autohete.frameworks.megatron import MegatronFiles
from autohete.frameworks.musubi import MusubiFiles
from autohete.frameworks.plain_torch import TorchFiles
from autohete.frameworks.this_trainer import TrainerFiles
from autohete.frameworks.torchtitan import TorchtitanFiles
from autohete.frameworks.torchtune import TorchtuneFiles
from autohete.frameworks.transformer_engine import TransformerEngineFiles

__all__ = [
    "FRAMEWORKS",
    "Decided",
    "Framework",
    "ModelFiles",
    "as_run",
    "kernels_of",
    "named_frameworks",
    "refusal",
    "runs_in",
]

#: In the order of preference for a plan that several of them run.
FRAMEWORKS: tuple[Framework, ...] = (
    DeepSpeedFiles(),
    Fsdp2Files(),
    TorchFiles(),
    LlamaFactoryFiles(),
    TorchtuneFiles(),
    TorchtitanFiles(),
    MegatronFiles(),
    TransformerEngineFiles(),
    MusubiFiles(),
    TrainerFiles(),
)


def refusal(framework: Framework, decided: Decided) -> str:
    """Return why ``framework`` cannot run the plan; empty if it can."""
    try:
        framework.check(decided)
    except InputError as error:
        return f"{framework.name} {error}"
    return ""


def runs_in(decided: Decided) -> tuple[str, ...]:
    """Return the names of the frameworks that can run the plan, in order of preference."""
    return tuple(each.name for each in FRAMEWORKS if not refusal(each, decided))


def named_frameworks(names: Sequence[str]) -> tuple[Framework, ...]:
    """Return frameworks by their names, in the order of the names; all for none.

    Raises:
        InputError: an unknown name.
    """
    known = {each.name: each for each in FRAMEWORKS}
    for name in names:
        if name not in known:
            raise unknown_name("framework", name, known)
    return tuple(known[name] for name in names) or FRAMEWORKS
