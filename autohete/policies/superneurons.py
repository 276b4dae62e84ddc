"""SuperNeurons (Wang et al., PPoPP 2018): outputs of costly layers may go to the host, those of cheap ones are recomputed.

"SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks". Based on github
linnanwang/superneurons-release at d20d25c, with all that ``include/util/common.h`` can switch on:

- Outputs of *checkpoint* layers are kept for backward: convolutions, fully connected layers, joins and forks
  (``include/mem_control.h``). Those of the layers between them, such as activations, norms and dropout, are computed again
  (``src/recompute.cpp``, ``RECOMPUTE_ON``).
- Kept outputs are in a cache. When an allocation fails, the one that was used least recently goes to the host while all waits,
  until the rest fits (``src/tensor.cpp``, ``LRU_ON``). In forward that is the oldest. Backward fetches it ahead of its layer.

Its layers are those of convolutional networks. Of a transformer block, here, all is computed again that the profile can make
again from the rest: norms, softmax, activation functions. What only matrix products and attention make is kept, with the input.
Of the blocks the first ones send this to the host: the fewest with which the training fits. A block of which the profile knows
no such tensors keeps all. Embedding and head keep theirs, the optimizer runs after backward.

Not modelled: where what is between two checkpoints is larger than the largest need of any layer, it is computed layer by layer,
several times, and not at once. A block is computed at once here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from autohete.errors import check_fields
from autohete.plan import Activations, Plan, Route, UnitPlan
from autohete.plan.policy import Judge, Verdict
from autohete.plan.routes import SavedRoute
from autohete.plan.rules import BlockingCopies, GpuUpdatesAfterBackward
from autohete.policies.flags import combinations
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind


@dataclass(frozen=True, slots=True)
class SuperNeurons:
    """SuperNeurons.

    Args:
        cache: what is kept goes to the host only for want of memory. Off: all of it goes.
    """

    cache: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[SuperNeurons]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, cache=(True, False))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If nothing fits, returns the plan in which all blocks use the host."""
        first, last = max(1, profile.first_trained), len(profile.units) - 1

        def plan_for(leaving: int) -> Plan:
            units = [UnitPlan()] * (last + 1)
            for unit in range(first, last):
                units[unit] = _unit(profile, unit, leaves=unit < first + leaving)
            blocking = [BlockingCopies(Kind.OFFLOAD_ACTIVATIONS)] if leaving else []
            return Plan("superneurons", tuple(units), rules=(*blocking, GpuUpdatesAfterBackward()))

        def fits(leaving: int) -> bool:
            return judge(plan_for(leaving)).verdict is not Verdict.GPU_OUT_OF_MEMORY

        return plan_for(bisect_left(range(last - first), True, key=fits) if self.cache else last - first)


def _unit(profile: Profile, unit: int, *, leaves: bool) -> UnitPlan:
    """What can be made again is; the rest is kept, on the host if it ``leaves``."""
    again = tuple(SavedRoute(one.name, recomputed=True) for one in profile.units[unit].saved if one.seconds is not None)
    kept = Route(HOST_MEMORY) if leaves else Route()
    return UnitPlan(Activations.SELECTIVE if again else Activations.KEEP, kept=kept, saved=again)


SYSTEM = SuperNeurons
