"""StrongHold (Sun et al., SC22) as its artifact runs: github strongh2/sc22-ae at f1842755, ``SHv0/megatron``.

A window of ``w`` blocks slides over the model.

- Before forward of block i, H2D of block i + w starts; after it, block i goes back to the host, unless it is among the last
  w, which backward needs first; forward of block i + w waits for that (``training.py``). Backward likewise, downwards.
- The first w blocks end backward on the GPU and stay there with a GPU Adam; so do embedding and head.
- After backward of any other block its gradients *and* parameters are copied to the host (``_layer.cpu()``, the gradient's
  copy blocking) and its CPU update starts at once; backward of block i - w waits for it.
- No CPU work crosses the iteration. The artifact checkpoints every block.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, BlockPlan, Placement, Plan, Processor
from autohete.policies import traffic
from autohete.policies.checkpointing import Checkpointing, with_checkpointing
from autohete.policy import Judge, Verdict
from autohete.profile import Profile


@dataclass(frozen=True, slots=True)
class StrongHold:
    """StrongHold.

    Args:
        checkpointing: full, none, or the better of both.
        window: blocks in the window; without it the fastest that fits.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    window: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.window is not None and self.window < 1:
            raise InputError(f"stronghold:window={self.window} must be at least 1 block")

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.policy.Policy`."""

        def plan_for(activations: Activations) -> Plan:
            if self.window is not None:
                return _plan(profile, activations, min(self.window, len(profile.blocks) - 2))
            return _fastest_window(profile, activations, judge)

        return with_checkpointing(self.checkpointing, plan_for, judge)


def _fastest_window(profile: Profile, activations: Activations, judge: Judge) -> Plan:
    """From the widest window that fits (memory grows with the window) downwards as long as that is faster."""

    def plan_for(window: int) -> Plan:
        return _plan(profile, activations, window)

    def too_wide(window: int) -> bool:
        return judge(plan_for(window)).verdict is not Verdict.OK

    best = plan_for(1)
    if too_wide(1):
        return best
    fitting = bisect_left(range(1, len(profile.blocks) - 1), True, key=too_wide)
    best = plan_for(fitting)
    for window in range(fitting - 1, 0, -1):
        narrower = plan_for(window)
        if judge(narrower).seconds >= judge(best).seconds:
            break
        best = narrower
    return best


def _plan(profile: Profile, activations: Activations, window: int) -> Plan:
    element = profile.element_bytes
    transformer = len(profile.blocks) - 2
    outer = BlockPlan()
    inner = [
        BlockPlan(
            activations,
            Placement.OFFLOADED,
            Processor.GPU if block <= window else Processor.CPU,
            keep_after_forward=block > transformer - window,
            keep_after_backward=block <= window,
            write_back_after_forward=block <= transformer - window,
            forward_prefetch_distance=window,
            # "When backward of block i begins": a recomputed block makes two passes on its way down.
            backward_prefetch_distance=window * (2 if activations is Activations.RECOMPUTE else 1),
        )
        for block in range(1, transformer + 1)
    ]
    return Plan(
        policy="stronghold",
        blocks=(outer, *inner, outer),
        gradient_bytes=2 * element,  # the layer's parameters go with its gradients
        blocking_gradients=True,
        window=window,
        update_bytes=traffic.separate_casts(profile),
        refresh_bytes=element,
        barrier=True,
        # The cache of min(2 w, L) units, less those whose block never leaves.
        parameter_slots=max(1, min(2 * window, transformer) - max(0, 2 * window - transformer)),
        host_optimizer_bytes=profile.optimizer_bytes + 2 * element,
        host_parameter_bytes=element,
    )
