"""The cost that a loop over experts adds to the passes of a unit, compared with grouped products.

``transformers`` up to 4 computes one expert after another in training, in one of three ways
(:class:`~autohete.workload.model.ExpertLoop`):

- copies: the matrices of all experts are one tensor, from which an index takes those of one expert (4.57,
  ``models/gpt_oss/modeling_gpt_oss.py``, ``GptOssExperts.forward``). Forward copies them.
- views: the same, but a number takes them, so forward copies nothing (4.52, ``models/granitemoe/modeling_granitemoe.py``,
  ``GraniteMoeParallelExperts.forward``). Rows are sorted by expert once, as for grouped products.
- modules: each expert has matrices of its own (4.48, ``models/mixtral/modeling_mixtral.py``,
  ``MixtralSparseMoeBlock.forward``).

What is taken from one tensor has a gradient of the whole tensor: backward fills one for all experts with zeros, writes that of
this expert to it, and autograd sums them. For ``k`` experts with tokens this writes ``k`` times and adds ``k - 1`` times. So it
is with the matrices of the first two ways, and with the tokens where each expert takes its rows from all of them.
"""

from __future__ import annotations

from autohete.profile.adapters import Additions
from autohete.workload import Workload
from autohete.workload.model import ExpertLoop, Experts

#: Kernels for an expert, forward and backward, products included: as counted in such loops, those of gpt-oss and JetMoe of
#: transformers 5.23 among them, with the four copies by index that are views there.
_KERNELS = {ExpertLoop.COPIES: (27, 44), ExpertLoop.VIEWS: (2, 10), ExpertLoop.MODULES: (10, 20)}
#: Accesses of an expert's matrices: copies in forward; in backward its gradient is written to that of all.
_COPIED = {ExpertLoop.COPIES: (2, 3), ExpertLoop.VIEWS: (0, 2), ExpertLoop.MODULES: (0, 0)}


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
    h, element, sums = workload.hidden_size, workload.precision.element_bytes, 4 * used - 3
    one = element * (sum(product.parameters for product in experts.expert.products(h)) + experts.expert.vectors(h))
    of_all = experts.count * one * (workload.has_base_gradients(unit) and experts.loop is not ExpertLoop.MODULES)
    of_tokens = element * workload.tokens * h * (experts.loop is not ExpertLoop.VIEWS)
    copied, written = _COPIED[experts.loop]
    kernels = _KERNELS[experts.loop]
    return Additions(
        forward_seconds=copied * used * one / bandwidth,
        backward_seconds=(sums * (of_all + of_tokens) + written * used * one * workload.has_base_gradients(unit)) / bandwidth,
        forward_kernels=kernels[0] * used,
        backward_kernels=kernels[1] * used,
        forward_workspace_bytes=of_all,
        backward_workspace_bytes=of_all,  # the tensor that is added to the gradients
    )
