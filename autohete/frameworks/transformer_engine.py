"""Transformer Engine: activations of the first layers on the host.

``get_cpu_offload_context`` in ``transformer_engine/pytorch/cpu_offload.py`` at 2.18: layers 0 to ``num_layers`` - 1 are
offloaded, and the last one may not be among them. Megatron-LM has the same as ``--cpu-offloading-num-layers``.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import ClassVar

from autohete.errors import InputError
from autohete.frameworks.framework import Abilities, Decided, ModelFiles
from autohete.frameworks.training_script import facts
from autohete.plan import Activations
from autohete.schedule import HOST_MEMORY
from autohete.workload import Kernels
from autohete.workload.optimizers import Optimizer

_ABILITIES = Abilities(tuple(Optimizer), lora=True, quantised=True, chunked_loss=True, traced=True)

_MODULE = '''\
"""Offloading of activations with Transformer Engine {version}.

{facts}

Call ``forward`` in place of the loop over the layers of your model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from transformer_engine.pytorch import get_cpu_offload_context

NUM_LAYERS, MODEL_LAYERS = {offloaded}, {layers}

_context, _synchronize = get_cpu_offload_context(enabled=True, num_layers=NUM_LAYERS, model_layers=MODEL_LAYERS)


def forward(layers: Iterable[torch.nn.Module], hidden: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    for layer in layers:
        with _context:
            hidden = layer(hidden, *arguments, **options)
        hidden = _synchronize(hidden)
    return hidden
'''


def offloaded_layers(decided: Decided) -> int:
    """Return the number of first blocks whose activations rest on the host, where nothing else leaves the GPU.

    Raises:
        InputError: the plan does something else.
    """
    leaving = [each.activations_leave for each in decided.blocks]
    count = sum(leaving)
    if not decided.stays:
        raise InputError("offloads activations only")
    if not count or leaving != [True] * count + [False] * (len(leaving) - count) or count == len(leaving):
        raise InputError("offloads the activations of the first blocks, but not of none or all")
    if any(each.activations is not Activations.KEEP or each.saved for each in decided.blocks):
        raise InputError("offloads all that a block keeps, and recomputes none")
    if any(each.kept.home not in (HOST_MEMORY,) for each in decided.blocks[:count]):
        raise InputError("offloads to the host only")
    return count


@dataclass(frozen=True, slots=True)
class TransformerEngineFiles:
    """Transformer Engine."""

    name: str = "transformer_engine"
    version: str = "2.18"
    kernels: ClassVar[Kernels] = Kernels.FUSED
    abilities: ClassVar[Abilities] = _ABILITIES

    def check(self, decided: Decided) -> None:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        _ABILITIES.check(decided)
        offloaded_layers(decided)

    def files(self, decided: Decided, model: ModelFiles) -> dict[str, str]:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        self.check(decided)
        module = _MODULE.format(
            version=self.version,
            facts=textwrap.fill(facts(decided), 110),
            offloaded=offloaded_layers(decided),
            layers=len(decided.blocks),
        )
        return {"activation_offload.py": module, "requirements.txt": f"transformer_engine[pytorch]=={self.version}\n"}

    def command(self, decided: Decided) -> str:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        return "import activation_offload in your training script"
