"""How many modules a pass of a unit calls, and how many tensors its parameters are: what the hooks of a system multiply by."""

from __future__ import annotations

from autohete.profile.adapters import PEFT_MODULES, PEFT_TENSORS
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
    Norm,
    NormPlace,
)
from autohete.workload.training import linear_layers

#: A tensor with fewer elements is small: DeepSpeed's ``stage3_param_persistence_threshold`` (0.18.6,
#: ``runtime/zero/config.py``). The ``auto`` of transformers, ten times the hidden size, sorts the tensors of most blocks alike.
SMALL_ELEMENTS = 100_000


def called_modules(workload: Workload, unit: int) -> int:
    """Return the number of modules in the unit as ``transformers`` 5.23 builds it, adapters of PEFT included.

    Args:
        workload: the model and its training.
        unit: counted from 0.
    """
    if not workload.is_inner(unit):
        return 2 if workload.role(unit) is BlockRole.HEAD else 1
    block = workload.block(unit)
    around = 1 + (block.norm_place is NormPlace.BOTH) + block.dropout
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
        case Attention():  # a joint product comes with a module for dropout (Phi-3), or for the fused attention (Qwen)
            inside = 2 * (component.head_norm or component.whole_norm) + (component.joint is not None)
        case LatentAttention():
            inside = 1 + (component.query_rank is not None)
        case LinearAttention():
            inside = 1
        case Mlp():
            inside = 1 + component.joint
    return 1 + inside + len(linear_layers(workload.block(unit), workload.hidden_size, component))


def parameter_tensors(workload: Workload, unit: int) -> int:
    """Return the number of parameter tensors in the unit, counted like :func:`called_modules`."""
    if not workload.is_inner(unit):
        return called_modules(workload, unit)
    block = workload.block(unit)
    norms = (1 + (block.norm_place is NormPlace.BOTH)) * (1 + (block.norm is Norm.LAYER))
    of_components = [norms + _tensors(workload, unit, one) for one in workload.components(unit)]
    return sum(of_components) + PEFT_TENSORS * len(workload.adapted_layers(unit))


def small_tensors(workload: Workload, unit: int) -> int:
    """Return how many of :func:`parameter_tensors` have fewer than :data:`SMALL_ELEMENTS` elements: norms and biases, which all
    count as small, and small matrices, such as those of adapters.
    """
    if not workload.is_inner(unit):
        return int(workload.role(unit) is BlockRole.HEAD)  # its norm
    h, block, sizes = workload.hidden_size, workload.block(unit), []
    for component in workload.components(unit):
        if isinstance(component, Experts):  # one tensor for the first products of all experts, and one for the last
            router, *products = component.products(h)
            sizes += [router.parameters, *(one.parameters for one in products[:2])]
            shared = component.shared
            sizes += [one.shape.parameters for one in linear_layers(block, h, shared)] if shared else []
        else:
            sizes += [one.shape.parameters for one in linear_layers(block, h, component)]
    sizes += [product.parameters for product in workload.adapter_products(unit)]
    return parameter_tensors(workload, unit) - sum(size >= SMALL_ELEMENTS for size in sizes)


def _tensors(workload: Workload, unit: int, component: Mixer | FeedForward) -> int:
    """Weights of linear layers and norms in a component, their biases, and tensors that are no module's weight."""
    layers = len(linear_layers(workload.block(unit), workload.hidden_size, component))
    match component:
        case Experts():
            shared = component.shared
            of_shared = 0 if shared is None else (2 + shared.gated) * (1 + shared.bias) + component.shared_gate
            return 1 + component.router_bias + 2 * (1 + component.expert.bias) + of_shared
        case Attention():
            norms = 2 * (component.head_norm or component.whole_norm)
            return layers + component.bias * (layers - 1) + component.output_bias + norms + component.sinks
        case LatentAttention():
            ranked = component.query_rank is not None
            return layers + 1 + ranked + component.bias * (2 + ranked)
        case LinearAttention():
            return layers + 4  # convolution, decay, its bias, and the result's norm
        case Mlp():
            return layers * (1 + component.bias)
