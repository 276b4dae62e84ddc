"""The cost that a loop over experts adds to the passes of a unit, compared with grouped products.

``transformers`` up to 4 computes one expert after another in training (4.57, ``models/gpt_oss/modeling_gpt_oss.py``,
``GptOssExperts.forward``). The matrices of all experts are one tensor, from which an index takes those of one expert: forward
copies them, and backward fills a tensor for all experts with zeros and adds the gradient of this one to it. Autograd then sums
these tensors. For ``k`` experts with tokens this writes the gradients of all experts ``k`` times and adds ``k - 1`` times.
"""

from __future__ import annotations

from autohete.profile.adapters import Additions
from autohete.workload import Workload
from autohete.workload.model import Experts

#: Kernels for an expert, forward and backward: as counted in the loop of transformers 5.23, and the four copies by index.
_KERNELS = (27, 44)


def expert_loop(workload: Workload, unit: int, bandwidth: float) -> Additions:
    """Return the cost that the loop adds to ``unit``: nothing if it has no experts, or they are computed in grouped products.

    Args:
        workload: the model; ``looped_experts`` of its experts get tokens.
        unit: counted from 0.
        bandwidth: of the GPU's memory in bytes/s.
    """
    used = workload.looped_experts
    experts = next((one for one in workload.components(unit) if isinstance(one, Experts)), None)
    if used is None or experts is None:
        return Additions()
    h, element = workload.hidden_size, workload.precision.element_bytes
    one = element * (sum(product.parameters for product in experts.expert.products(h)) + experts.expert.vectors(h))
    trained = workload.trains_base(unit)
    return Additions(
        forward_seconds=2 * used * one / bandwidth,
        backward_seconds=((4 * used - 3) * experts.count + 3 * used) * one / bandwidth * trained,
        forward_kernels=_KERNELS[0] * used,
        backward_kernels=_KERNELS[1] * used,
        workspace_bytes=experts.count * one * trained,  # the tensor that is added to the gradients
    )
