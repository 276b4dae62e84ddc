"""AutoHete (arXiv 2503.01890): per block checkpointing, parameter offload and optimizer offload by an integer program.

There is no public code; this follows the paper.

- The *first* blocks are checkpointed, the *first* have their parameters offloaded, and the *last* have their optimizer on the
  CPU: their gradients come first in backward, and their refresh is hidden by the next forward.
- After the program, backward prefetches move earlier where GPU memory is guaranteed to be free.
- Priority scheduling: gradients are copied, and blocks updated, in order of the smallest block index. Forward of the next
  iteration starts as soon as its own block is updated; there is no barrier on the rest.
- Several GPUs: supported, according to the abstract.

Not published, and decided here: forward prefetches are tuned like backward ones; embedding and head keep their parameters
on the GPU and count as the first and last block for the optimizer; the CPU step casts separately from its Adam kernel, as in
DeepSpeed. The text on several GPUs was not available. Assumed: data parallelism in which each GPU updates its part of every
block, on the processor that the plan chooses (ZeRO stage 2). Of an offloaded block each GPU holds a part where it is updated,
fetches it over its own link if that is the host, and gathers the rest from the others (stage 3). All GPUs run the same
collective first: those of backward in its order, then what the next forward needs, the lowest block index first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

from autohete.analysis.memory_waits import least_bytes
from autohete.errors import InputError, check_fields
from autohete.lowering import lower
from autohete.plan import Footprint, Format, Hooks, Plan
from autohete.plan.policy import Judge, Judgement, Verdict, estimates
from autohete.plan.rules import Barrier, ByPriority, Rule, Slots
from autohete.planner.budgets import Budgets, Objective
from autohete.planner.optimistic import lower_bytes
from autohete.planner.program import Allowed, Program
from autohete.planner.search import USUAL, Way, best_counts, infeasible, least_memory
from autohete.planner.steps import GRADIENT_SLOTS, BlockCosts, Counts
from autohete.planner.tuning import tune_prefetches
from autohete.policies import traffic
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, Kind

#: What the torch runtime costs the host besides a plain loop: 0.25 and 0.31 ms for the passes of a block of GPT on a core whose
#: operations take 3.4 us with their launch (benchmarks/README.md, cost of the runtime).
_EXECUTOR = Hooks((6, 0, 0), (8, 0, 0))

#: What searches with a judge have found: that without priority is one of two with it.
_searched: WeakKeyDictionary[Judge, dict[tuple[AutoHete, Profile], Plan | None]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class AutoHete:
    """AutoHete.

    Each technique can be turned off, to see what it adds.

    Args:
        priority: copies and updates run the lowest block index first, unless a plan in issue order is faster. Off: each lane
            runs in issue order, like a CUDA stream.
        prefetch_tuning: move prefetches earlier where memory is guaranteed to be free.
        fused_casts: CPU Adam reads 16-bit gradients and writes 16-bit parameters itself.
        fp32_upload: CPU Adam reads 16-bit gradients; the fp32 master is uploaded, the GPU casts, and the host has no 16-bit
            copy. The offloading of ColossalAI (``auto_parallel/offload``), probably the origin of this system, does the same.
        across_iterations: a forward waits for the update of its own block only. Off: the next iteration waits for all.
        some_checkpointed: the first blocks recompute their activations. Off: all or none do.
        parameter_offload: the first blocks have their parameters offloaded. Off: none.
        gpu_updates: the GPU updates the first blocks. Off: the CPU updates all.
        replicated: several GPUs share nothing: each holds and updates every block as one GPU does. Another reading of the
            system, as the text on several GPUs was not available.
    """

    priority: bool = True
    prefetch_tuning: bool = True
    fused_casts: bool = False
    fp32_upload: bool = False
    across_iterations: bool = True
    some_checkpointed: bool = True
    parameter_offload: bool = True
    gpu_updates: bool = True
    replicated: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fused_casts and self.fp32_upload:
            raise InputError("autohete: fused_casts writes 16-bit parameters, fp32_upload sends none: choose one")

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`.

        Raises:
            InfeasibleError: no plan fits. States the binding memory and the smallest budget that works.
            OptimizerError: the GPU is to update nothing, and the CPU cannot.
        """
        if not self.gpu_updates:
            profile.check_cpu_updates()
        program = self.program(profile)
        plan = self._fastest(profile, program, judge)
        if self.priority:
            plan = self._in_better_order(profile, plan, judge)
        if plan is not None:
            return plan
        relaxed = replace(program, pending=False).solve()
        frugal = self._frugal(profile, program, proven=relaxed is None)
        plan = self.plan_for(profile, frugal, Way(tuned=False, waits=True))
        return replace(plan, bound_seconds=relaxed.value if relaxed else None)

    def _fastest(self, profile: Profile, program: Program, judge: Judge) -> Plan | None:
        """The fastest plan that the search comes across. None if none of them fits."""
        try:
            searched = _searched.setdefault(judge, {})
        except TypeError:  # a judge of somebody's own that cannot be hashed, or not be referred to weakly
            searched = {}
        if (self, profile) not in searched:
            searched[self, profile] = self._search(profile, program, judge)
        return searched[self, profile]

    def _search(self, profile: Profile, program: Program, judge: Judge) -> Plan | None:
        def judged(by: Judge, counts: Counts, way: Way) -> Judgement:
            return by(self.plan_for(profile, counts, way))

        found = best_counts(program, partial(judged, estimates(judge)), partial(judged, judge))
        if found is None:
            return None
        return replace(self.plan_for(profile, found.counts, found.way), bound_seconds=found.bound_seconds)

    def _in_better_order(self, profile: Profile, plan: Plan | None, judge: Judge) -> Plan | None:
        """``plan``, or one that is faster and found without priority: in the order of priority if that fits and helps, or else
        in issue order. Taking the most urgent task that is ready is not always the best order (R. L. Graham, Bounds on
        Multiprocessing Timing Anomalies, 1969).
        """
        in_order = replace(self, priority=False)
        program = in_order.program(profile)
        relaxed = replace(program, pending=False).solve()
        if relaxed is None or (plan is not None and judge(plan).seconds <= relaxed.value):
            return plan
        other = in_order._fastest(profile, program, judge)
        if other is None:
            return plan
        by_priority = [replace(other, rules=(*other.rules, ByPriority()), memory_waits=waits) for waits in (False, True)]
        fitting = next((one for one in by_priority if judge(one).verdict is Verdict.OK), None)
        plans = [one for one in (plan, fitting, other) if one is not None]
        bounds = [one.bound_seconds for one in (plan, other) if one is not None and one.bound_seconds is not None]
        return replace(min(plans, key=lambda one: judge(one).seconds), bound_seconds=min(bounds))

    def program(self, profile: Profile) -> Program:
        """The integer program of this policy for ``profile``."""
        hardware, units = profile.hardware, len(profile.units)
        allowed = Allowed(
            checkpointed=None if self.some_checkpointed else (0, units - 2),
            offloaded=None if self.parameter_offload else (0,),
            cpu_updated=None if self.gpu_updates else (units,),
        )
        return Program(
            costs=BlockCosts(profile, self._untuned(profile, Counts(0, 0, 0))),
            hardware=hardware,
            priority=self.priority,
            budgets=Budgets.of(hardware),
            allowed=allowed,
        )

    def plan_for(self, profile: Profile, counts: Counts, way: Way = USUAL) -> Plan:
        """The plan for the given counts, with tuned prefetches unless they are off."""
        plan = replace(self._untuned(profile, counts), memory_waits=way.waits)
        if not (way.tuned and self.prefetch_tuning):
            return plan
        # With its rules, the order of priority changes no wait, so what is tuned for one order is for the other.
        in_order = replace(plan, rules=tuple(rule for rule in plan.rules if rule != ByPriority()), memory_waits=False)
        return replace(plan, units=tune_prefetches(profile, in_order))

    def _untuned(self, profile: Profile, counts: Counts) -> Plan:
        """The plan for the given counts. Each prefetch overlaps the pass before its own."""
        element = profile.element_bytes
        upload = 4 if self.fp32_upload else element
        kernel_bytes, elementwise_bytes = self._traffic(profile)
        gpus = profile.hardware.gpus
        parts = 1 if self.replicated else gpus
        units = counts.units(len(profile.units), gradients=Format(element), upload=Format(upload), parts=parts)
        rules: list[Rule] = []
        if counts.cpu_updated > GRADIENT_SLOTS * parts:  # of a part each, in the same memory
            rules.append(Slots(Kind.OFFLOAD_GRADIENTS, GRADIENT_SLOTS * parts))
        if self.priority and (counts.moves_several or gpus > 1):
            rules.append(ByPriority())
        if not self.across_iterations and (counts.cpu_updated or counts.offloaded or gpus > 1):
            rules.append(Barrier())
        return Plan(
            policy="autohete",
            units=units,
            rules=tuple(rules),
            update_bytes=kernel_bytes,
            elementwise_bytes=elementwise_bytes,
            # Pinned: the gradient, and what is uploaded: the updated parameter's staging buffer, or the fp32 master itself.
            footprint=Footprint(
                host_optimizer_bytes=profile.optimizer_bytes - (4 if self.fp32_upload and traffic.is_mixed(profile) else 0),
                host_pinned_bytes=(element, upload),
                host_parameter_bytes=upload,
                one_host_copy=self.fp32_upload,
            ),
            hooks=_EXECUTOR,
        )

    def _frugal(self, profile: Profile, program: Program, *, proven: bool) -> Counts:
        """Return the plan that needs the least memory if copies wait for space. Raises if it still exceeds the memory,
        which may be ``proven`` to be so for every plan.

        If a plan fits with more pinned memory, pinned memory binds; if one fits the GPU with a larger host, the host binds;
        otherwise the GPU. The memory of a plan does not depend on time, so the size named here works even if the next
        measurement differs.
        """
        budgets = program.budgets.limits()

        def measured(memory: Objective, counts: Counts) -> float | None:
            plan = self._untuned(profile, counts)
            others = {other: budget for other, budget in budgets.items() if other is not memory}
            rests = lower_bytes(profile, plan)
            if any(rests[other] > budget for other, budget in others.items()):  # no need to lower it
                return None
            schedule = lower(profile, plan)
            fits = all(least_bytes(schedule, other) <= budget for other, budget in others.items())
            return least_bytes(schedule, memory) if fits else None

        for memory, have in budgets.items():
            least = least_memory(program, memory, partial(measured, memory))
            if least is None:
                continue
            needed, counts = least
            if needed <= have:
                return counts
            raise infeasible(memory, have, needed, profile.hardware, proven=proven)
        # No plan fits the GPU, and without updates on the GPU none does without the host, either: then the GPU is named, with
        # what suffices if the host is large enough.
        unlimited = replace(program, budgets=Budgets(math.inf, math.inf))
        least = least_memory(
            unlimited,
            Objective.GPU_BYTES,
            lambda counts: least_bytes(lower(profile, self._untuned(profile, counts)), GPU_MEMORY),
        )
        assert least is not None, "some plan is allowed"
        have = budgets[Objective.GPU_BYTES]
        raise infeasible(Objective.GPU_BYTES, have, max(least[0], have + 1), profile.hardware, proven=proven)

    def _traffic(self, profile: Profile) -> tuple[int, int]:
        """DRAM bytes per parameter of the Adam kernel and of the casts around it."""
        if self.fused_casts:
            return traffic.fused_casts(profile), 0
        if self.fp32_upload:
            return traffic.upcast_kernel(profile), 0
        return traffic.ADAM_KERNEL, traffic.casts(profile)


SYSTEM = AutoHete
