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

from dataclasses import dataclass

from autohete.errors import InputError
from autohete.plan import Activations, BlockPlan, Placement, Plan, Processor
from autohete.policies import traffic
from autohete.policies.checkpointing import Checkpointing, with_checkpointing
from autohete.policy import Judge, better
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
        if self.window is not None and self.window < 1:
            raise InputError(f"stronghold:window={self.window} must be at least 1 block")

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.policy.Policy`."""
        blocks = len(profile.blocks) - 2
        windows = [min(self.window, blocks)] if self.window else _candidates(blocks)

        def plan_for(activations: Activations) -> Plan:
            return better([_plan(profile, activations, window) for window in windows], judge)

        return with_checkpointing(self.checkpointing, plan_for, judge)


def _candidates(blocks: int) -> list[int]:
    """Window sizes worth trying, about a quarter apart."""
    return [window for window in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40) if window <= blocks]


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
            backward_prefetch_distance=window,
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
        parameter_slots=min(2 * window, transformer),
        host_optimizer_bytes=profile.optimizer_bytes + 2 * element,
        host_parameter_bytes=element,
    )
