"""DTR (Kirisame et al., ICLR 2021): when memory runs out, the tensor goes that is cheap to compute again, large and stale.

"Dynamic Tensor Rematerialization". Based on github uwsampl/dtr-prototype at eff53cc, ``dtr_code/dtr-implementation.patch``,
``aten/src/ATen/CheckpointTensorImpl.cpp``. There is no plan: when an allocation exceeds the budget (``auto_evict``), the tensor
is dropped of which cost / (size x staleness) is least (``CheckpointInfo::cost``), until the rest fits. The cost is the time of
the operation that makes the tensor, and of those that make the dropped tensors next to it, and next to these
(``neighbor_ecn``). Staleness is the time since the last access. An access to a dropped tensor computes it again, and what that
takes, which may drop others. Nothing leaves the GPU.

Here the same decisions are made in advance for one iteration, whose passes, sizes and times are known, and the plan does what
happened. Each later iteration would start from the same state. The tensors are those that the profile names: the input of a
unit, what it saves and can be made again by itself, and the rest, which goes with all that is left of the unit. What is dropped
before its use is not kept in the first place, which needs less memory than keeping it for a while. Other differences:

- The patch measures each operation, and may drop any of its tensors. While a unit computes, it drops none of its own here; if
  they do not fit beside all others, all of them.
- A plan keeps an input from the first recomputation that starts from it to its backward. An input goes only when the units
  on both sides have lost all else.
- The patch looks at a random subset of tensors by default; here all are looked at, and small ones are as good as others.
- The time that it takes to look, which grows with the number of tensors, is not modelled.
- Embedding and head keep their activations. The optimizer runs after backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from autohete.errors import check_fields
from autohete.plan import Activations, Plan, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.routes import SavedRoute
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.policies.chain_costs import activation_budget_bytes, stages
from autohete.profile import Profile, SavedTensors


@dataclass(frozen=True, slots=True)
class Dtr:
    """DTR.

    Args:
        tensors: what a unit saves goes tensor by tensor where the profile says how each is made again. Off: as a whole.
    """

    tensors: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[Dtr]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield cls()
        if any(one.seconds is not None for unit in profile.units for one in unit.saved):
            yield cls(tensors=False)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If nothing fits, returns a plan that drops all it can."""
        iteration = Iteration(profile, tensors=self.tensors)
        iteration.run()
        units = (*[UnitPlan()] * profile.first_trained, *iteration.units())
        return Plan("dtr", units, rules=(GpuUpdatesAfterBackward(),))


class _Victim(NamedTuple):
    """What can be dropped: the input of a unit, a saved tensor by name, or all that it keeps besides the input."""

    unit: int
    name: str | None = None
    is_input: bool = False


class Iteration:
    """An iteration, in which allocations drop what has to go.

    Attributes:
        fits: no allocation has failed for good.
    """

    def __init__(self, profile: Profile, *, tensors: bool) -> None:
        self._stages, self._budget, self.fits = stages(profile), activation_budget_bytes(profile), True
        count = len(self._stages)
        self._times = profile.units[profile.first_trained :]
        self._left = [sum(stage.left_bytes for stage in self._stages[unit + 1 :]) for unit in range(count)]
        self._clock = 0
        self._saved: list[dict[str, SavedTensors]] = [{} for _ in range(count)]
        for unit, stage in enumerate(self._stages):
            if tensors and not stage.keeps:
                alone = (one for one in self._times[unit].saved if one.seconds is not None and one.size_bytes)
                self._saved[unit] = {one.name: one for one in alone}
        self._inputs = [False] * count  # there, or not
        self._kept = [False] * count
        self._without: list[set[str]] = [set() for _ in range(count)]  # saved tensors that are not there, though others are
        self._again: list[frozenset[str]] = [frozenset()] * count  # those that were made again
        self._seen = [0] * (count + 1)  # time of the last access to what a unit keeps
        self._input_seen = [0] * (count + 1)
        self._starts: list[list[bool]] = [[] for _ in range(count)]  # of each recomputation: whether others began with it
        self._top = count  # the unit of the next backward

    def run(self) -> None:
        """Run forward and backward."""
        count = len(self._stages)
        self._inputs[0] = True
        for unit in range(count):
            self._compute(unit, self._stages[unit].forward_ns, 0)
        for top in reversed(range(count)):
            self._top = top
            stage = self._stages[top]
            held = stage.gradient_bytes + self._left[top]
            if not self._kept[top]:
                start = max(unit for unit in range(top + 1) if self._inputs[unit])
                for unit in range(start, top + 1):
                    self._starts[unit].append(unit == start)
                    self._without[unit].clear()
                    self._compute(unit, stage.recompute_ns if unit == top else self._stages[unit].forward_ns, held)
            elif self._without[top]:
                names = self._again[top] = frozenset(self._without[top])
                self._make_room(self._times[top].bytes_of(names) + held + stage.keeping_bytes, {top})
                self._without[top].clear()
                self._clock += round(self._times[top].again_seconds(names) * 1e9)
            self._make_room(held + stage.backward_bytes, {top})
            self._clock += round(self._times[top].backward_seconds * 1e9)
            self._kept[top] = self._inputs[top] = False

    def _compute(self, unit: int, nanoseconds: int, held: int) -> None:
        """Run a forward or a recomputation."""
        stage, above = self._stages[unit], unit + 1
        beside = stage.output_bytes + held
        needed, dropping = stage.kept_bytes + stage.keeping_bytes + beside, stage.dropping_bytes + beside
        optional = not stage.keeps and unit != self._top
        self._kept[unit] = self._make_room(max(needed, dropping), {unit, above}, optional=optional)
        if not self._kept[unit]:
            self._make_room(dropping, {unit, above})
        self._clock += nanoseconds
        self._seen[unit] = self._input_seen[unit] = self._input_seen[above] = self._clock
        if above < min(self._top + 1, len(self._stages)):
            self._inputs[above] = True

    def _there(self) -> int:
        """Bytes of all inputs and of all that units keep."""
        total = 0
        for unit, stage in enumerate(self._stages):
            total += self._inputs[unit] * stage.input_bytes
            total += self._kept[unit] * (stage.kept_bytes - self._times[unit].bytes_of(self._without[unit]))
        return total

    def _make_room(self, needed: int, locked: set[int], *, optional: bool = False) -> bool:
        """Drop what is least worth keeping until ``needed`` bytes are free. If they are not, returns False where that is
        ``optional``, and else goes on without them.
        """
        there = self._there()
        while there + needed > self._budget and (scores := [(self._score(one), one) for one in self._victims(locked)]):
            (_, size), victim = min(scores, key=lambda scored: (scored[0][0], scored[1].unit, scored[1].name or ""))
            there -= size
            if victim.is_input:
                self._inputs[victim.unit] = False
            elif victim.name is None:
                self._kept[victim.unit] = False
                self._without[victim.unit].clear()
            else:
                self._without[victim.unit].add(victim.name)
        enough = there + needed <= self._budget
        self.fits &= enough or optional
        return enough or not optional

    def _victims(self, locked: set[int]) -> Iterator[_Victim]:
        for unit, stage in enumerate(self._stages):
            if unit in locked or stage.keeps:
                continue
            if self._kept[unit]:
                yield _Victim(unit)
                if not self._starts[unit]:
                    yield from (_Victim(unit, name) for name in self._saved[unit] if name not in self._without[unit])
            elif (
                self._inputs[unit] and unit and not self._kept[unit - 1] and not (self._starts[unit] and self._starts[unit][-1])
            ):
                yield _Victim(unit, is_input=True)

    def _score(self, victim: _Victim) -> tuple[float, int]:
        """Cost / (size x staleness) in units of no meaning, and the size."""
        unit, stage, times = victim.unit, self._stages[victim.unit], self._times[victim.unit]
        if victim.name is not None:
            one = self._saved[unit][victim.name]
            size, cost = one.size_bytes, round(times.again_seconds({victim.name, *self._without[unit]}) * 1e9)
        elif victim.is_input:
            size, cost = stage.input_bytes, self._dropped_beside(unit, below=True) + self._dropped_beside(unit)
        else:
            size = stage.kept_bytes - times.bytes_of(self._without[unit])
            cost = stage.forward_ns + self._dropped_beside(unit, below=not self._inputs[unit])
            cost += self._dropped_beside(unit + 1) if unit + 1 < self._top and not self._inputs[unit + 1] else 0
        seen = (self._input_seen if victim.is_input else self._seen)[unit]
        return cost / (max(size, 1) * max(self._clock - seen, 1)), size

    def _dropped_beside(self, unit: int, *, below: bool = False) -> int:
        """Time of the units without a gap that have been dropped, from ``unit`` up, or from the one below it down."""
        cost, place, step = 0, unit - 1 if below else unit, -1 if below else 1
        while 0 <= place < min(self._top, len(self._stages)) and not self._kept[place]:
            cost += self._stages[place].forward_ns
            edge = place if below else place + 1
            if edge >= len(self._inputs) or self._inputs[edge]:
                break
            place += step
        return cost

    def units(self) -> Iterator[UnitPlan]:
        """What each forward of each unit kept until its next use."""
        for unit, starts in enumerate(self._starts):
            if starts:
                kept = [Activations.RECOMPUTE if start else Activations.DROP for start in starts]
                yield UnitPlan(kept[0], again=tuple(kept[1:]))
            elif self._again[unit]:
                saved = tuple(SavedRoute(name, recomputed=True) for name in self._saved[unit] if name in self._again[unit])
                yield UnitPlan(Activations.SELECTIVE, saved=saved)
            else:
                yield UnitPlan()


SYSTEM = Dtr
