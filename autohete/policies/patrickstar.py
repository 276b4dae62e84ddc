"""PatrickStar (Fang et al. 2021, arXiv 2108.05818) as its code runs: github Tencent/PatrickStar at 23845355.

Model states live in chunks that *move* between host and GPU; a chunk is in one place at a time.

- A pass fetches what it needs, synchronously (``core/chunk_list.py access_chunk``): no prefetch, no overlap. The chunk used
  furthest in the future, known from a warm-up iteration, is evicted to make room (``core/eviction_policy.py``). Forward runs up
  and backward down, so the last blocks stay from forward to backward and the first from backward to forward. Unchanged
  parameters are copied back as well: a chunk has no dirty flag.
- Chunks on the host are pinned, including those of optimizer states (``core/chunk_data.py``, ``allocate_payload``).
- Gradients replace the 16-bit parameters in their chunk (``core/hook.py``).
- ``ops/fp16_cpu_adam.py``: after backward, serially for each chunk: gradient to the host, CPU Adam on 16-bit gradients,
  updated parameters back as fp32 and cast on the GPU.
- ``--with_async_move`` (off by default, one GPU only) puts moves on a copy stream: the host still waits for each, but kernels
  that are already queued overlap it (``core/chunk_data.py:263-273``).
- Several GPUs (``core/client.py``, ``access_dist`` and ``_fetch_remote_chunks``): each owns one chunk of a group, brings it to
  the GPU and gathers the others with a blocking all-gather, for forward and again for backward; they are released after each
  use. Gradients go to the owner of the chunk, which updates it. Here blocks are gathered instead of groups of chunks, the
  chunks that rest on the GPU are those of the first blocks, and a gradient has memory of its own until it is reduced.
- Hybrid Adam: if all 16-bit chunks fit, the *first* optimizer chunks fill the remaining memory ("margin") and are updated on
  the GPU, after backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, BlockingCopies, GpuUpdatesAfterBackward, SerialUpdates
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations
from autohete.policies.several_gpus import shared
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, Kind
from autohete.workload import Precision

#: ``utils/memory_monitor`` / ``core/memtracer.py``: share of the margin that optimizer chunks may take.
_MARGIN_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class PatrickStar:
    """PatrickStar.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        chunk_size: elements of a chunk, in Mi (the run script's default is 256).
        gpu_share: share of the GPU's memory that may be used (``overall_gpu_mem_ratio``; 0.8 in the code, 0.9 in its
            benchmarks), in percent.
        hybrid_adam: use the margin for optimizer chunks.
        async_move: moves overlap the pass before the one that needs them.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    chunk_size: int = 256
    gpu_share: int = 90
    hybrid_adam: bool = True
    async_move: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.chunk_size <= 4096:
            raise InputError(f"patrickstar:chunk_size={self.chunk_size} must be between 1 and 4096 Mi elements")
        if not 1 <= self.gpu_share <= 100:
            raise InputError(f"patrickstar:gpu_share={self.gpu_share} must be between 1 and 100 percent")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[PatrickStar]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(
            cls,
            checkpointing=choosable(profile),
            chunk_size=(256, 32),
            gpu_share=(90, 100),
            hybrid_adam=(True, False),
            async_move=(False, True) if profile.hardware.gpus == 1 else (False,),
        )

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        if profile.workload.micro_batches > 1 and profile.workload.precision is not Precision.FP32:
            raise InputError(
                "patrickstar cannot accumulate gradients: they take the place of the 16-bit parameters, which the next "
                "micro-batch needs. Use one micro-batch, or another policy, such as autohete"
            )
        return with_checkpointing(
            self.checkpointing, lambda activations: self._place(profile, activations, judge), profile, judge
        )

    def _place(self, profile: Profile, activations: Activations, judge: Judge) -> Plan:
        element, gpus = profile.element_bytes, profile.hardware.gpus
        whole = [profile.parameter_bytes(block) for block in range(len(profile.units))]
        # Of each block, the part in this GPU's chunks. A tied embedding is in all GPUs' chunks.
        weights = [profile.hardware.part_of(size) for size in whole]
        if profile.workload.tied_embeddings:
            weights[0] = whole[0]
        transformer = range(1, len(weights) - 1)

        def plan_for(kept: int, on_gpu: int) -> Plan:
            """The plan if ``kept`` transformer blocks fit on the GPU at a time; it updates the first ``on_gpu`` blocks."""
            # The system trains in 16 bit only. In fp32 the parameters are the master weights and must not be overwritten.
            replaced = profile.workload.precision is not Precision.FP32 and gpus == 1
            common = UnitPlan(refresh=Format(4), gradients_replace_parameters=replaced)
            on_cpu = replace(common, update=Update(Processor.CPU), gradients=Route(HOST_MEMORY))

            @cache
            def inner(unit: UnitPlan, where: Route) -> UnitPlan:
                return replace(unit, activations=activations, parameters=where)

            units = []
            for block in range(len(weights)):
                unit = common if block < on_gpu else on_cpu
                units.append(inner(unit, route(block, kept)) if block in transformer else unit)
            # The norm of gradients accumulated on the host needs all of them before the first update.
            needed_before = profile.workload.clips and profile.workload.micro_batches > 1
            copied_late = tuple(i for i, unit in enumerate(units) if unit.refreshed and not needed_before)
            leaving = tuple(i for i, unit in enumerate(units) if unit.update.on is Processor.CPU and not unit.refreshed)
            return Plan(
                policy="patrickstar",
                units=shared(units, 3, profile) if gpus > 1 else tuple(units),
                rules=(
                    *([] if self.async_move else [BlockingCopies(Kind.WRITE_BACK_FORWARD)]),
                    BlockingCopies(Kind.REDUCE_GRADIENTS),
                    BlockingCopies(Kind.OFFLOAD_GRADIENTS, leaving),
                    SerialUpdates(with_copies=copied_late),
                    GpuUpdatesAfterBackward(),
                    Barrier(),
                ),
                update_bytes=24 + element,
                footprint=Footprint(
                    gpu_buffer_bytes=self.chunk_size * 2**20 * element,
                    host_optimizer_bytes=profile.optimizer_bytes,
                    host_parameter_bytes=element,
                    pins_optimizer=True,
                ),
            )

        @cache
        def route_of(*, stays_after_forward: bool, stays_after_backward: bool) -> Route:
            return Route(
                HOST_MEMORY,
                ahead=int(self.async_move),
                stays_after_forward=stays_after_forward,
                stays_after_backward=stays_after_backward,
                moves=not stays_after_forward,
            )

        def route(block: int, kept: int) -> Route:
            if gpus > 1:
                home = GPU_MEMORY if block <= kept else HOST_MEMORY
                return Route(home, ahead=int(self.async_move))
            if kept >= len(transformer):
                return Route()
            return route_of(stays_after_forward=block > len(transformer) - kept, stays_after_backward=block <= kept)

        # The warm-up iteration: memory that training needs in addition to its chunks.
        everything = plan_for(len(transformer), 0)
        beside_chunks = judge(everything).gpu_peak_bytes - sum(weights)
        share = self.gpu_share / 100 * profile.hardware.gpu.memory_bytes
        room = min(share, profile.hardware.gpu_capacity_bytes) - beside_chunks
        margin = (room - sum(weights)) * _MARGIN_SHARE
        if margin >= 0:
            on_gpu = 0
            while self.hybrid_adam and on_gpu < len(weights) - 1:
                margin -= profile.state_bytes(on_gpu, profile.part_of(on_gpu))
                if margin < 0:
                    break
                on_gpu += 1
            return plan_for(len(transformer), on_gpu)
        room -= weights[0] + weights[-1]
        kept = int(room // max(weights[1:-1]))
        return plan_for(max(kept, 1 if gpus == 1 else 0), 0)


SYSTEM = PatrickStar
