"""MPress (Zhou et al., HPCA 2023): the first ranks of a pipeline let what forward saves rest in the memory of the last ones.

"MPress: Democratizing Billion-Scale Model Training on Multi-GPU Servers via Memory-Saving Inter-Operator Parallelism". There is
no public code, and only descriptions of the text were read:

- In a pipeline with one forward and one backward in turns, a rank keeps what as many micro-batches save as there are ranks from
  it to the end, so memory is short on the first ranks and left over on the last ones.
- What does not fit goes to another GPU through NVLink and comes back ahead of its backward (*D2D swap*), to the host, or is
  recomputed. A planner gives each tensor the cheapest of the three by profile.

Decided here:

- The planner decides for whole transformer blocks: all that a block's forward keeps goes the same way.
- Of each rank that lacks memory, blocks are decided one after another until it has enough. A block costs what its copies take
  beyond the time of the slowest rank's passes for a micro-batch, with those of the blocks before it; or its recomputation. If
  ways cost the same, another GPU comes before the host, and the host before recomputation. If all blocks do not suffice, they
  are recomputed instead, the last ones first, because what comes back takes memory while the rank computes.
- Of the ranks that lend, of the same node and with memory left for what the pipeline keeps of the block, the one with the most
  left lends.
- Copies to and fro run beside the passes of other micro-batches, as in ``pipeline_offload``
  (:class:`ActivationsByTurns <autohete.plan.rules.ActivationsByTurns>`).
- GPUs that do not copy to each other directly, such as GeForce cards, have only the host and recomputation.
- If recomputing all blocks is faster, as where passes wait for memory, that is the plan.

Differences: MPress splits tensors over several links of a GPU, as DGX-1 has them; here a copy has the whole bandwidth of the
interconnect. Transfers between stages take none of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autohete.analysis.ranks import numbered
from autohete.errors import check_fields
from autohete.plan import Activations, PassOrder, Plan
from autohete.plan.policy import Judge, better
from autohete.plan.rules import ActivationsByTurns
from autohete.policies.pipeline import Pipeline
from autohete.policies.pipeline_offload import route_by_turns
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, rank_home


@dataclass(frozen=True, slots=True)
class MPress:
    """MPress, on a pipeline with one stage for each rank.

    Args:
        ranks, zero_stage, fp32_sums: see :class:`autohete.policies.pipeline.Pipeline`.
    """

    ranks: int | None = None
    zero_stage: int = 0
    fp32_sums: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        self._pipeline()

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[MPress]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield cls()
        for one in Pipeline.variants(profile):
            if one.ranks is not None and one == Pipeline(ranks=one.ranks, zero_stage=one.zero_stage):
                yield cls(one.ranks, one.zero_stage)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If nothing fits, returns the plan with the lowest GPU peak."""
        staying, recomputed = (
            replace(self._pipeline().plan_for(profile, every), policy="mpress")
            for every in (Activations.KEEP, Activations.RECOMPUTE)
        )
        if staying.ranks == 1:
            return staying
        return better((_Planner(profile, staying, judge).plan(), recomputed), judge)

    def _pipeline(self) -> Pipeline:
        return Pipeline(
            PassOrder.ONE_FORWARD_ONE_BACKWARD, ranks=self.ranks, zero_stage=self.zero_stage, fp32_sums=self.fp32_sums
        )


class _Planner:
    """Decides for the blocks of the ranks that lack memory, with what the others have left."""

    def __init__(self, profile: Profile, staying: Plan, judge: Judge) -> None:
        self._profile, self._staying, self._judge = profile, staying, judge
        hardware, join = profile.hardware, profile.hardware.interconnect
        apart = hardware.gpus // staying.ranks
        self._node = [rank * apart // hardware.gpus_of_node for rank in range(staying.ranks)]
        self._direct = join is not None and not join.through_host
        self._left = {rank: hardware.gpu_capacity_bytes - peak for rank, peak in enumerate(self._peaks(staying))}
        #: Time of the slowest rank for the passes of a micro-batch: what copies can hide behind.
        self._hidden = max(
            sum(profile.units[i].forward_seconds + profile.units[i].backward_seconds for i in stage) for stage in staying.stages
        )

    def plan(self) -> Plan:
        """The plan in which each rank that lacks memory decides for as few blocks as it has to.

        Ranks hardly affect each other's memory, so each judged plan is a step of a binary search for all of them.
        """
        capacity = self._profile.hardware.gpu_capacity_bytes
        low = [0] * self._staying.ranks
        high = [2 * len(self._blocks(rank)) * (left < 0) for rank, left in self._left.items()]
        while low != high:
            middle = [(one + other) // 2 for one, other in zip(low, high, strict=True)]
            for rank, peak in enumerate(self._peaks(self._decided(middle))):
                if low[rank] < high[rank]:
                    low[rank], high[rank] = (low[rank], middle[rank]) if peak <= capacity else (middle[rank] + 1, high[rank])
        return self._decided(low)

    def _blocks(self, rank: int) -> list[int]:
        stage, last = self._staying.stages[rank], len(self._staying.units) - 1
        return [unit for unit in stage if 0 < unit < last and not self._profile.units[unit].is_frozen]

    def _decided(self, steps: Sequence[int]) -> Plan:
        """The plan after so many steps of each rank: each of the first ones decides for another block, and each later one
        recomputes a block instead, the last one first.
        """
        left, ways = dict(self._left), list[tuple[int, str | None]]()
        for rank, taken in enumerate(steps):
            blocks = self._blocks(rank)
            staying = len(blocks) - max(0, taken - len(blocks))
            ways += self._ways(rank, blocks[: min(taken, staying)], left)
            ways += [(unit, None) for unit in blocks[staying:]]
        return self._with(ways)

    def _with(self, ways: Iterable[tuple[int, str | None]]) -> Plan:
        """The plan in which the activations of some units have another home; None: they are recomputed."""
        units = list(self._staying.units)
        for unit, home in ways:
            one = units[unit]
            units[unit] = (
                replace(one, activations=Activations.RECOMPUTE)
                if home is None
                else replace(one, kept=route_by_turns(home, self._profile))
            )
        leaving = any(unit.activations_leave for unit in units)
        rules = (*self._staying.rules, *([ActivationsByTurns()] if leaving else []))
        return replace(self._staying, units=tuple(units), rules=rules)

    def _peaks(self, plan: Plan) -> list[int]:
        """Peak occupancy of each rank's GPU."""
        peaks = self._judge(plan).peaks
        return [peaks.get(numbered(GPU_MEMORY, rank), 0) for rank in range(plan.ranks)]

    def _ways(self, rank: int, blocks: Iterable[int], left: dict[int, int]) -> Iterator[tuple[int, str | None]]:
        """The cheapest way of each block, in order. Takes what is lent from ``left``."""
        profile = self._profile
        at_once = min(self._staying.ranks - rank, profile.workload.micro_batches)
        lenders = [one for one in left if self._direct and one != rank and self._node[one] == self._node[rank]]
        loads: defaultdict[str, float] = defaultdict(float)
        for unit in blocks:
            size = profile.units[unit].activation_bytes
            homes = {HOST_MEMORY: max(profile.d2h_seconds(size), profile.h2d_seconds(size))}
            lender = max(lenders, key=left.__getitem__, default=rank)
            if lender != rank and left[lender] >= size * at_once:
                homes = {rank_home(lender): profile.transfer_seconds(size, 0, 0)} | homes
            beyond = {home: max(0.0, seconds - max(0.0, self._hidden - loads[home])) for home, seconds in homes.items()}
            home = min(beyond, key=beyond.__getitem__)  # the first of the cheapest
            if beyond[home] > profile.units[unit].forward_seconds:
                yield unit, None
                continue
            loads[home] += homes[home]
            if home == rank_home(lender):
                left[lender] -= size * at_once
            yield unit, home


SYSTEM = MPress
