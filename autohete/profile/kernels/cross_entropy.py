"""The kernels of the loss: what cross-entropy over whole logits reads, writes and holds, by implementation.

Checked by running the real functions and the steps of earlier versions (``tests/models/test_cross_entropy.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from autohete.workload import LossKernels

#: Those that do not compute with the last token of each sequence.
_SHIFTS = (LossKernels.SHIFTED, LossKernels.FP32_SHIFTED, LossKernels.FP32_OUTPUT)
#: Those that compute in fp32, whatever the format of the logits.
_UPCASTS = (LossKernels.FP32, LossKernels.FP32_SHIFTED, LossKernels.FP32_OUTPUT)


@dataclass(frozen=True, slots=True)
class HeadKernels:
    """Cross-entropy over the logits.

    Args:
        traffic: bytes read and written per logit, forward and backward.
        workspace: bytes per logit that are alive at the peak, in addition to the logits and their gradient.
        kernels: kernels launched, forward and backward.
        keeps_logits: the caller holds the model's output until backward has ended.
        wider: bytes that a logit of the model's output has more than its gradient.
    """

    traffic: float
    workspace: float
    kernels: int
    keeps_logits: bool = False
    wider: int = 0


def head_kernels(loss: LossKernels, element: int, *, copies: bool = True, keeps: bool | None = None) -> HeadKernels:
    """The kernels of a loss that does not overwrite the logits.

    Args:
        loss: any but ``IN_PLACE``.
        element: bytes of a logit as the head computes it, 2 or 4.
        copies: logits without last tokens are copied; those of one sequence are contiguous as they are.
        keeps: the caller holds the model's output until backward has ended; None: unless the loss is Megatron's.
    """
    if loss is LossKernels.MEGATRON:
        # A cast to fp32, then passes in place, so fp32 needs neither a workspace nor a separate gradient (NVIDIA Megatron-LM
        # v2.5, megatron/model/gpt_model.py:56, megatron/mpu/cross_entropy.py:31-105).
        return HeadKernels(52 if element == 2 else 40, 4 if element == 2 else 0, 15, bool(keeps))
    keeps, upcasts, shifts = keeps is not False, loss in _UPCASTS and element == 2, loss in _SHIFTS
    each = 4 if upcasts else element  # bytes per logit in the format of the softmax
    output = each if loss is LossKernels.FP32_OUTPUT else element
    # Log-softmax reads and writes; backward writes the gradient of its result, reads both and writes that of its input. A
    # cast reads one format and writes the other, and so does its backward. The slice is copied, and its backward fills
    # zeros and copies into them.
    traffic = 6 * each + 12 * upcasts + (5 if copies else 3) * each * shifts
    held = each if upcasts and output == element else 0  # a local variable of the function, until it returns
    forward = output + held + each * (shifts and copies) + each
    backward = output * keeps + 3 * each  # the result of log-softmax, its gradient, that of its input
    kernels = 6 + 2 * upcasts + (4 if copies else 2) * shifts + 2 * (loss is LossKernels.FP32)  # which pads and copies labels
    return HeadKernels(traffic, max(forward, backward) - output - element, kernels, keeps, output - element)
