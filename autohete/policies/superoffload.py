"""SuperOffload, in DeepSpeed since 0.18: ZeRO stage 3 whose updates on the CPU begin during backward.

Based on github deepspeedai/DeepSpeed at edaa7221, ``runtime/superoffload/superoffload_stage3.py``; ``"super_offload": true`` in
``offload_optimizer``. Made for superchips, such as those of the preset ``gh200``. The optimizer is that of
:mod:`autohete.policies.twin_flow`, and parameters rest on the GPU, but:

- When the gradients of a sub-group have been copied, for which the launching thread waits (``partition_grads``), another
  process updates it while backward goes on. It does so before the step knows of an overflow, after which it is rolled back.
- ``step`` waits for these updates, and casts and copies the parameters. Sub-groups of the GPU are updated there.
- If gradients are clipped, whose norm is known at the end only, no update runs before (``_step_with_clipping``).

A sub-group is a unit here. Not modelled: the copy of updated masters from the process, and a pass over the gradients after
their update (``unscale_and_clip_grads``), which ``step`` makes, are part of the update here; a fifth of the cores is left to
other work (``cpuadam_cores_perc``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete.errors import InputError, check_fields
from autohete.plan import Plan
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, BlockingCopies, GpuUpdatesAfterBackward, RefreshAfterBackward
from autohete.policies.checkpointing import Checkpointing, choosable
from autohete.policies.flags import combinations
from autohete.policies.twin_flow import TwinFlow
from autohete.profile import Profile
from autohete.schedule import Kind

#: The copy of updated masters from the process that updates reads and writes 4 bytes.
_COPY = 8


@dataclass(frozen=True, slots=True)
class SuperOffload:
    """SuperOffload.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        ratio: percentage of the optimizer on the CPU. None: the least that fits.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    ratio: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ratio is not None and not 0 <= self.ratio <= 100:
            raise InputError(f"superoffload:ratio={self.ratio} must be between 0 and 100 percent")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[SuperOffload]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, checkpointing=choosable(profile))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        plan = TwinFlow(self.checkpointing, self.ratio).plan(profile, judge)
        if profile.workload.clips:
            return replace(plan, policy="superoffload")
        return replace(
            plan,
            policy="superoffload",
            rules=(
                BlockingCopies(Kind.OFFLOAD_GRADIENTS, last_only=True),
                RefreshAfterBackward(),
                GpuUpdatesAfterBackward(),
                Barrier(),
            ),
            elementwise_bytes=plan.elementwise_bytes + _COPY,
        )


SYSTEM = SuperOffload
