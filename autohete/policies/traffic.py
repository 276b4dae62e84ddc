"""Traffic of optimizer steps on the CPU, and of checks of gradients, in bytes per parameter, as in the systems' code.

Both are memory-bound, so their time depends on how often they pass over their data.
"""

from __future__ import annotations

from autohete.profile import Profile
from autohete.workload import Precision

#: DeepSpeed's CPUAdam on fp32 gradients: reads parameter, gradient and both moments (16), writes parameter and moments (12);
#: csrc/includes/cpu_adam.h, "Step_8". PatrickStar, StrongHold and ZeRO-Offload use this kernel or a similar one.
ADAM_KERNEL = 28
#: The fp32 tile buffer of DeepSpeed up to 0.8.3: written (4), and read first because the store is not streaming (4).
TILE_BUFFER = 8
#: A cast between 16 and 32 bit on the CPU: reads 2 and writes 4, or vice versa. The rate of elementwise kernels was derived
#: without write-allocation, so it is not counted here either.
CAST = 6
#: Unscaling and clipping fp32 gradients in place, by one multiplication that always runs: DeepSpeed stage_1_and_2.py,
#: ``unscale_and_clip_grads``.
UNSCALE = 8

#: What DeepSpeed's stage 3 does with all gradients on the host, in fp16: ``isinf`` (an absolute value and a comparison),
#: ``isnan``, and ``any`` of each (``has_overflow`` in stage3.py, since 0.9.4, pull 3622); and the size of its temporaries.
_SEARCH, _SEARCH_HELD = 12, 3
#: The copy of a gradient in fp64, written and read, whose norm DeepSpeed computes on the GPU (``double().norm(2)``).
_COPY_FOR_NORM = 16


def is_mixed(profile: Profile) -> bool:
    """Whether parameters and master weights differ in precision."""
    return profile.element_bytes == 2


def casts(profile: Profile) -> int:
    """Casts around CPUAdam: 16-bit gradients are widened before it, updated parameters narrowed after it."""
    return 2 * CAST if is_mixed(profile) else 0


def search(profile: Profile) -> int:
    """Traffic of DeepSpeed's search for infinite values in stage 3: on the CPU, in fp16 only."""
    return _SEARCH if profile.workload.precision is Precision.FP16 else 0


def search_held(profile: Profile) -> int:
    """Bytes per parameter that the host holds during :func:`search`."""
    return _SEARCH_HELD if search(profile) else 0


def norm(profile: Profile) -> int:
    """Traffic on the GPU of the norm that DeepSpeed computes of each gradient. If the workload clips, the task for the norm
    already reads the gradient.
    """
    return _COPY_FOR_NORM + (0 if profile.workload.clips else profile.element_bytes)


def fused_casts(profile: Profile) -> int:
    """One kernel that reads 16-bit gradients and writes 16-bit parameters and the fp32 states: 24 + 2 + 2; fp32: 28."""
    return 24 + profile.element_bytes + (2 if is_mixed(profile) else 0)


def upcast_kernel(profile: Profile) -> int:
    """A kernel that reads gradients in 16 bit, without a cast, and updates only fp32 states: 24 + 2; fp32: 28."""
    return 24 + profile.element_bytes
