"""How many modules a pass of a unit calls: what the hooks of a system multiply by."""

from __future__ import annotations

from autohete.profile.adapters import PEFT_MODULES
from autohete.workload import BlockRole, Workload
from autohete.workload.model import (
    Activation,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    LinearAttention,
    Mixer,
    Mlp,
    NormPlace,
)
from autohete.workload.training import linear_layers


def called_modules(workload: Workload, unit: int) -> int:
    """Return the number of modules in the unit as ``transformers`` 5.23 builds it, adapters of PEFT included.

    Args:
        workload: the model and its training.
        unit: counted from 0.
    """
    if not workload.is_inner(unit):
        return 2 if workload.role(unit) is BlockRole.HEAD else 1
    block = workload.block(unit)
    # Norms; and dropout, which is a module in blocks with one matrix for queries, keys and values.
    around = 1 + (block.norm_place is NormPlace.BOTH) + (block.joint or block.dropout)
    of_components = [around + _inside(workload, unit, one) for one in workload.components(unit)]
    whole = block.mixer in workload.components(unit)  # counted with its first part
    return whole + sum(of_components) + PEFT_MODULES * len(workload.adapted_layers(unit))


def _inside(workload: Workload, unit: int, component: Mixer | FeedForward) -> int:
    """A component and the modules in it."""
    match component:
        case Experts():
            shared = component.shared
            inside = 2 + (component.expert.activation is not Activation.CLAMPED_SWIGLU)  # router, experts, activation
            return 1 + inside + (0 if shared is None else 4 + shared.gated + component.shared_gate)
        case Attention():
            inside = 2 * (component.head_norm or component.whole_norm)
        case LatentAttention():
            inside = 1 + (component.query_rank is not None)
        case LinearAttention() | Mlp():
            inside = 1
    return 1 + inside + len(linear_layers(workload.block(unit), workload.hidden_size, component))
