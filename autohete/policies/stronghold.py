"""StrongHold (Sun et al., SC22) as its artifact runs: github strongh2/sc22-ae at f1842755, ``SHv0/megatron``.

A window of ``w`` blocks slides over the model.

- Before forward of block i, H2D of block i + w starts. After it, block i is copied back to the host, unless it is among the
  last w, which backward needs first; forward of block i + w waits for that copy (``training.py``). Backward does the
  same, downwards.
- The first w blocks end backward on the GPU and stay there; so do embedding and head. The artifact updates them with a GPU
  Adam (``optimizer/__init__.py:501-509``). With large blocks its states may not fit; the system's planner then lets the CPU
  update everything.
- A place in the window holds the block's parameters *and* gradients (``model/transformer.py:724-758``).
- After backward of any other block, a thread pool copies its gradients *and* parameters to the host without blocking the GPU
  (``training.py:916-945``), and its CPU update starts at once; backward of block i - w waits for it.
- Host: parameters and gradients pinned, both moments pageable: 16 bytes per parameter in fp32. Its PyTorch is 1.10, which does
  not round pinned arrays up.
- Several GPUs: the artifact reduces the gradients of what stays on the GPU, and leaves those on the host as "todo"
  (``model/distributed.py``, ``allreduce_gradients``). Assumed here: each GPU updates a part of every block, as in ZeRO. The
  first w blocks, embedding and head stay on each GPU; of the others each GPU fetches its part over its own link, and gathers
  the rest from the other GPUs. What is gathered is dropped after its use instead of copied back. ``replicated``: Megatron's
  data parallelism, which the artifact extends, in which each process holds and updates everything. Each then also has a
  pageable buffer for the gradients of what the CPU updates, in the format of the parameters (``model/distributed.py``,
  ``MemoryBuffer``): 20 bytes in fp32. Without ``--gl-enable-ddp``, as in the logs of one GPU, there is none.
- No CPU work crosses the end of the iteration. The artifact checkpoints every block.
- Not modelled, a bug: the artifact's CPU Adam gets matrices and updates ``size(0)`` elements of each
  (``optimizer/cpp/deepspeed/cpu_adam.cpp:402``), one of each row. Its gradients are a buffer that stays zero in fp32
  (``training.py``, ``_layer_to_cpu_and_gather_grads``). Its logs do not say how fast a CPU updates beside the GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Format, ParameterSlots, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge, Verdict, better
from autohete.plan.rules import Barrier, Window
from autohete.policies import traffic
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations, if_several
from autohete.policies.several_gpus import shared
from autohete.policies.too_large import surely_exceeds_gpu
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY


class WindowOptimizer(StrEnum):
    """The processor that updates what stays on the GPU: the first blocks, embedding and head."""

    BEST = "best"
    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class StrongHold:
    """StrongHold.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        window: number of blocks in the window. None: the fastest that fits.
        window_optimizer: the processor that updates what stays on the GPU. The artifact uses the GPU; ``best`` is the
            faster that fits.
        replicated: several GPUs share nothing.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    window: int | None = None
    window_optimizer: WindowOptimizer = WindowOptimizer.BEST
    replicated: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.window is not None and self.window < 1:
            raise InputError(f"stronghold:window={self.window} must be at least 1 block")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[StrongHold]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(
            cls, checkpointing=choosable(profile), window=(None, 1, 2, 4), replicated=if_several(profile, False, True)
        )

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""

        every = [self]
        if self.window_optimizer is WindowOptimizer.BEST:
            on_gpu, on_cpu = (replace(self, window_optimizer=on) for on in (WindowOptimizer.GPU, WindowOptimizer.CPU))
            if profile.workload.micro_batches == 1:
                every = [on_gpu, on_cpu]
            elif self.window is None:
                # A window place cannot hold accumulated gradients while its block is away: with the GPU, none may be.
                every = [on_cpu, replace(on_gpu, window=len(profile.units) - 2)]
            else:
                every = [on_cpu]

        def plan_for(activations: Activations) -> Plan:
            return better([one._windowed(profile, activations, judge) for one in every], judge)

        return with_checkpointing(self.checkpointing, plan_for, profile, judge)

    def _windowed(self, profile: Profile, activations: Activations, judge: Judge) -> Plan:
        """The plan of the given window, or of the fastest: search from the widest that fits down while it gets faster."""

        def plan_for(window: int) -> Plan:
            return shape(profile, activations, window, Processor(self.window_optimizer))

        several = profile.hardware.gpus > 1
        shape = (_replicated_plan if self.replicated else _shared_plan) if several else _plan

        if self.window is not None:
            return plan_for(min(self.window, len(profile.units) - 2))

        def too_wide(window: int) -> bool:  # memory grows with the window
            plan = plan_for(window)
            return surely_exceeds_gpu(profile, plan) or judge(plan).verdict is not Verdict.OK

        best = plan_for(1)
        if too_wide(1):
            return best
        fitting = bisect_left(range(1, len(profile.units) - 1), True, key=too_wide)
        best = plan_for(fitting)
        for window in range(fitting - 1, 0, -1):
            narrower = plan_for(window)
            if judge(narrower).seconds >= judge(best).seconds:
                break
            best = narrower
        return best


def _plan(profile: Profile, activations: Activations, window: int, window_optimizer: Processor) -> Plan:
    element = profile.element_bytes
    transformer = len(profile.units) - 2
    carried = Format(2 * element)  # the layer's parameters are copied with its gradients
    gradients = {Processor.CPU: Route(HOST_MEMORY, carried=carried), Processor.GPU: Route(carried=carried)}
    outer = UnitPlan(update=Update(window_optimizer), gradients=gradients[window_optimizer])
    inner = [
        UnitPlan(
            activations,
            Route(
                HOST_MEMORY,
                stays_after_forward=unit > transformer - window,
                stays_after_backward=unit <= window,
                moves=unit <= transformer - window,
                ahead=window,
                # "When backward of block i begins": a recomputed block has two passes in backward.
                ahead_in_backward=window * (1 if activations is Activations.KEEP else 2),
            ),
            Update(on := window_optimizer if unit <= window else Processor.CPU),
            gradients[on],
        )
        for unit in range(1, transformer + 1)
    ]
    slides = window < transformer or window_optimizer is Processor.CPU  # otherwise no block takes another's place
    if slides and profile.workload.clips:
        raise InputError(
            "stronghold cannot clip gradients: a block takes the place in the window of one that has been updated, and clipped "
            f"updates wait for the last backward. Leave clip_norm out, give window={transformer},window_optimizer=gpu, which "
            "keeps all blocks on the GPU, or choose another policy"
        )
    return Plan(
        policy="stronghold",
        units=(outer, *inner, outer),
        rules=(Window(window), Barrier()),
        # The cache of min(2 w, L) units, less those of blocks that never leave.
        slots=ParameterSlots(max(1, min(2 * window, transformer) - max(0, 2 * window - transformer)), with_gradients=True),
        update_bytes=traffic.ADAM_KERNEL,
        elementwise_bytes=traffic.casts(profile),
        footprint=Footprint(
            host_optimizer_bytes=profile.optimizer_bytes,
            host_pinned_bytes=(element, element),
            rounds_pinned=False,
            host_parameter_bytes=2 * element,
            one_host_copy=True,
        ),
    )


def _replicated_plan(profile: Profile, activations: Activations, window: int, window_optimizer: Processor) -> Plan:
    """The plan of several GPUs that share nothing: with a buffer for gradients in pageable memory."""
    plan = _plan(profile, activations, window, window_optimizer)
    held = plan.footprint.host_optimizer_bytes + profile.element_bytes
    return replace(plan, footprint=replace(plan.footprint, host_optimizer_bytes=held))


def _shared_plan(profile: Profile, activations: Activations, window: int, window_optimizer: Processor) -> Plan:
    """The plan of several GPUs that each update a part of every block."""
    plan, last = _plan(profile, activations, window, window_optimizer), len(profile.units) - 1
    staying = shared(plan.units, 2, profile)
    leaving = [
        replace(
            unit,
            parameters=replace(unit.parameters, moves=False, stays_after_backward=False),
            zero_stage=3,
        )
        for unit in plan.units
    ]
    units = [replace(staying[i], parameters=Route()) if i in (0, last) or i <= window else leaving[i] for i in range(last + 1)]
    return replace(plan, units=tuple(units), slots=None)


SYSTEM = StrongHold
