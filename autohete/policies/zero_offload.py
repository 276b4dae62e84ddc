"""ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840) as DeepSpeed's ZeRO stage 2 runs it, by version.

16-bit parameters stay on the GPU, the optimizer is on the CPU, and the next forward waits for the whole step. Based on
DeepSpeed at 02aa38c3 and its releases, ``deepspeed/runtime/zero/stage_1_and_2.py`` (``stage2.py`` up to 0.5) and
``csrc/adam/cpu_adam.cpp``:

- Gradients are cast to fp32 on the GPU and copied tensor by tensor: 4 bytes. ``overlap_comm`` does not overlap these copies
  with backward, in any version: the overflow check reads a GPU flag for each parameter (v0.8.3 line 1070, v0.16.9 line 1184),
  so the thread that launches backward waits for the copies before it. Only 0.4.0 to 0.4.3 use a separate stream for them
  (``copy_grad_stream``, pull 1067); pull 1219 removed it as a race.
- Sums over micro-batches rest on the host in the gradients' own format. Each later micro-batch copies them to the GPU, adds its
  own, and copies them back (``async_accumulate_grad_in_cpu_via_gpu``). Here the CPU adds them.
- ``step`` unscales all gradients in place on the CPU, then runs CPUAdam over the whole model. Clipping (off by default until
  0.19.2, then 1.0) is done by the same multiplication (``unscale_and_clip_grads`` multiplies by ``1 / combined_scale``). The
  norm is computed on the GPU in backward, before a gradient is copied, whether or not gradients are clipped
  (``set_norm_for_param_grad_in_gpu``), from a copy in fp64. Both read at 02aa38c3. If the workload clips, separate tasks read
  the gradients, and backward has the rest of the norm's traffic.
- Each complete gradient is searched for infinite values (``_has_inf_or_nan``): up to 0.13.2, which 0.14 represents here, by its
  sum in fp32; since then (pull 5115) by the maximum of ``isnan`` and ``isinf``.
- Up to 0.8.3, in fp16, CPUAdam writes updated parameters into fp32 tile buffers, from which the GPU reads and casts them while
  the next tile is updated (``launch_param_update``). In bf16 and fp32, and from 0.9.0 on (pull 3097), the upload follows.
- 0.9.0 to 0.14.0 cast on the CPU into a pageable temporary. 0.14.1 to 0.16.9 (pull 5301) copy the fp32 master of the whole
  group and cast on the GPU, which then holds 6 bytes per parameter. From 0.17.0 on (pull 7309) the CPU casts into a staging
  buffer.
- On the host are an array each of masters, gradients and both moments, 4 bytes per parameter, and the cast, 2 more. PyTorch
  rounds pinned ones up since 1.11, which is as old as 0.6.0. Besides, each tensor has a buffer for its sums over micro-batches
  (``accumulated_grads_in_cpu``), and the largest a pinned one (``temp_grad_buffer_for_cpu_offload``).
- The gradient buffer is pinned up to 0.10.0, then only if ``pin_memory`` is set (pull 4131), from 0.19.5 on by default again
  (pull 8207).
- Several GPUs reduce gradients in backward. Each copies its part to the host and updates it there, and after the step each
  sends the parameters of its part to all others (``all_gather_dp_groups``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, BlockingCopies, RefreshAfterBackward, RefreshAfterUpdates, UpdatesAfterBackward
from autohete.policies import traffic
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations
from autohete.policies.host_arrays import tensors
from autohete.policies.several_gpus import ZERO2, ZERO2_HOOKS, ZERO2_TO_OWNERS, check_bucket_size, deepspeed_buckets, shared
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind
from autohete.workload import Precision

_MIB = 2**20


class DeepSpeed(StrEnum):
    """Versions that differ in the optimizer offload of stage 2. 0.10.1 to 0.14.0 and 0.17 to 0.19.4 do not pin."""

    V0_3 = "0.3"  # 0.3.0
    V0_4_3 = "0.4.3"  # 0.4.0 to 0.4.3
    V0_8_3 = "0.8.3"  # 0.4.4 to 0.8.3
    V0_14 = "0.14"  # 0.9.0 to 0.14.0; up to 0.10.0 with pin_memory=on
    V0_16 = "0.16"  # 0.14.1 to 0.16.9
    V2026 = "2026"  # 0.17 and later; up to 0.19.4 with pin_memory=off


@dataclass(frozen=True, slots=True)
class _Version:
    """The behaviour of one version.

    Args:
        own_stream: gradient copies have a separate stream.
        tiles_bytes: pinned tile buffers from which fp16 parameters are uploaded while others are updated. None: no such path.
        upload: what is uploaded otherwise: the fp32 master, or 16 bit that the CPU casts into a pageable temporary or a staging
            buffer.
        pinned: whether the gradient buffer (and the staging buffer) is pinned by default. None: always.
        bucket_factor: the gradient bucket in multiples of its configured size.
        all_reduces: several GPUs all-reduce gradients, rather than reduce each part to its owner.
        rounds_pinned: the PyTorch of its time rounds pinned arrays up.
        search_bytes: what the search for infinite values accesses for each element, from its cast to fp32 on.
    """

    own_stream: bool = False
    tiles_bytes: int | None = None
    upload: str = "temporary"
    pinned: bool | None = None
    bucket_factor: float = 1.0
    all_reduces: bool = False
    rounds_pinned: bool = True
    search_bytes: int = 4


_VERSIONS = {
    # Tiles of 1 Gi elements, 4 bytes, two of them; 128 Mi from 0.3.15 on. Bucket: stage2.py v0.3.0 line 1591.
    DeepSpeed.V0_3: _Version(tiles_bytes=8 * 1024 * _MIB, bucket_factor=4.5, rounds_pinned=False),
    DeepSpeed.V0_4_3: _Version(own_stream=True, tiles_bytes=1024 * _MIB, rounds_pinned=False),
    DeepSpeed.V0_8_3: _Version(tiles_bytes=1024 * _MIB),
    DeepSpeed.V0_14: _Version(pinned=False, all_reduces=True),
    DeepSpeed.V0_16: _Version(upload="master", pinned=False, all_reduces=True, search_bytes=30),
    DeepSpeed.V2026: _Version(upload="staging", pinned=True, all_reduces=True, search_bytes=30),
}


@dataclass(frozen=True, slots=True)
class ZeroOffload:
    """ZeRO-Offload.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        deepspeed: the version whose behaviour is modelled.
        pin_memory: ``offload_optimizer.pin_memory``; None: the version's default.
        bucket_size: ``reduce_bucket_size`` in millions of elements.
        paper: gradients as the paper describes them: 16 bit, with copies that overlap backward.
        tile_overlap: refresh each block's parameters as soon as they are updated (in the paper; up to 0.8.3 in fp16 anyway).
        delayed_update: one-step delayed parameter update (in the paper, not in the code). Changes the mathematics.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    deepspeed: DeepSpeed = DeepSpeed.V2026
    pin_memory: bool | None = None
    bucket_size: int = 500
    paper: bool = False
    tile_overlap: bool = False
    delayed_update: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.pin_memory is not None and (_VERSIONS[self.deepspeed].pinned is None or self.paper):
            what = "with paper, whose copies need pinned memory" if self.paper else f"in deepspeed={self.deepspeed}"
            raise InputError(f"zero_offload:pin_memory changes nothing {what}, which always pins: leave it out")
        check_bucket_size("zero_offload", self.bucket_size)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[ZeroOffload]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        versions = (
            DeepSpeed.V2026,
            DeepSpeed.V0_16,
            DeepSpeed.V0_14,
        )  # earlier ones need a PyTorch that trains none of today's models
        pinning, buckets = (None, True, False), (500, 50)
        every = combinations(cls, checkpointing=choosable(profile), deepspeed=versions, pin_memory=pinning, bucket_size=buckets)
        # A version's own default is not given.
        yield from (one for one in every if one.pin_memory is not _VERSIONS[one.deepspeed].pinned)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        return with_checkpointing(self.checkpointing, partial(self.with_activations, profile), profile, judge)

    def with_activations(self, profile: Profile, activations: Activations) -> Plan:
        """The plan with given activations."""
        element, mixed, workload = profile.element_bytes, traffic.is_mixed(profile), profile.workload
        version = _VERSIONS[self.deepspeed]
        tiles = version.tiles_bytes is not None and workload.precision is Precision.FP16
        pinned = self.pins
        staged = version.upload == "staging" and mixed
        master = version.upload == "master" and mixed
        cast = mixed and not (tiles or master)
        overlap = self.paper or version.own_stream
        buckets = 1e6 * self.bucket_size * version.bucket_factor * (2 if self.paper else 1)  # one fills, one is copied
        largest_tensor = profile.of_rank.largest_tensor
        parameters = sum(map(profile.part_of, range(len(profile.units))))
        sums = [element * tensor for tensor in tensors(profile)] if workload.micro_batches > 1 else []
        arrays, in_staging = [], pinned and staged
        if pinned:
            arrays = [4 * parameters, *([element * parameters] if staged else []), element * largest_tensor, *sums]
        if master:
            arrays.append(4 * parameters)
        rounded = profile.hardware.host.pinned if version.rounds_pinned else int
        gradients = Route(HOST_MEMORY, carried=Format(element if self.paper else 4, pinned))
        refresh = Format(
            4 if tiles or master else element,
            pinned=tiles or master or (pinned and version.upload == "staging"),
            staged=master,
        )
        sum_bytes = None if self.paper else element
        outer = UnitPlan(update=Update(Processor.CPU), gradients=gradients, refresh=refresh, sum_bytes=sum_bytes)
        return Plan(
            policy="zero_offload",
            units=shared((outer, *[replace(outer, activations=activations)] * (len(profile.units) - 2), outer), 2, profile),
            rules=(
                # A copy that blocks backward follows its reduction, so no bucket has to be waited for besides.
                *(
                    deepspeed_buckets(profile, 2, 1e6 * self.bucket_size)
                    if overlap
                    else [BlockingCopies(Kind.OFFLOAD_GRADIENTS)]
                ),
                UpdatesAfterBackward(),
                *([] if tiles or self.tile_overlap else [RefreshAfterUpdates()]),
                *([RefreshAfterBackward()] if self.delayed_update else []),
                *([] if self.delayed_update else [Barrier()]),
            ),
            update_bytes=traffic.ADAM_KERNEL + (traffic.TILE_BUFFER if tiles else 0),
            elementwise_bytes=traffic.UNSCALE + (traffic.CAST if cast else 0),
            scales_gradients=True,
            check_bytes=0 if self.paper else traffic.norm(profile) + version.search_bytes + (traffic.CAST if mixed else 0),
            delayed=self.delayed_update,
            footprint=Footprint(
                gpu_buffer_bytes=round(buckets + largest_tensor) * element,
                # Master, gradient and both moments, 4 bytes each; which of them is pinned depends on the version.
                host_optimizer_bytes=16 - 4 * (pinned + master) + (element if cast and not in_staging else 0),
                host_buffer_bytes=0 if pinned else sum(sums),
                host_pinned_buffer_bytes=sum(map(rounded, arrays)) + (version.tiles_bytes or 0),
            ),
            flat_buffers=ZERO2 if version.all_reduces and not self.paper else ZERO2_TO_OWNERS,
            hooks=ZERO2_HOOKS,
        )

    @property
    def pins(self) -> bool:
        """Whether the gradient buffer is pinned, which copies that overlap backward require."""
        default = _VERSIONS[self.deepspeed].pinned
        if default is None or self.paper:
            return True
        return default if self.pin_memory is None else self.pin_memory


SYSTEM = ZeroOffload
