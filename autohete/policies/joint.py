"""One joint decision for parameters, optimizer states, gradients and activations of every unit. No published system makes it.

- Each unit keeps, recomputes or offloads its activations, recomputes them selectively where the profile supports it, or
  recomputes them from an input that rests on the host. Its parameters are on the GPU, or on the host with or without a copy
  that stays between two passes. It is updated by the CPU, or by the GPU with states that stay there or stream from the host.
  With several micro-batches, gradients for the CPU are accumulated on the host or on the GPU. DeepSpeed and Megatron-LM forbid
  most of these combinations.
- Copies, casts, updates and rules are AutoHete's (``autohete.py``), so any gain over it comes from the decisions.
- The plans of the shipped systems, pipelines among them, are tried as well, with every flag that their users can choose and
  with that system's rules, formats and footprint, and used if faster. So this is never slower than any of them that trains
  synchronously.

A linear program over lower bounds of the time and of the memory chooses the start; simulations continue from there
(``autohete/planner/joint_search.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, product

import numpy as np

from autohete.analysis.memory_waits import least_bytes
from autohete.errors import InfeasibleError, InputError, RuleError, check_fields
from autohete.lowering import lower
from autohete.plan import Activations, Format, Plan, Processor, Route, UnitPlan, without_refused_rules
from autohete.plan.policy import Judge, Judgement, Verdict, estimates
from autohete.plan.rules import ByPriority, GpuUpdatesAfterBackward, GpuUpdatesAfterRecompute, Rule, Slots
from autohete.planner.budgets import Budgets, Objective
from autohete.planner.choices import Assignment, Choices, all_choices
from autohete.planner.joint_search import JointSearch
from autohete.planner.relaxation import Relaxation, as_assignment
from autohete.planner.rows import Model
from autohete.planner.search import fastest, infeasible
from autohete.planner.steps import GRADIENT_SLOTS, Counts
from autohete.planner.tuning import tune_prefetches
from autohete.planner.unit_costs import Costs
from autohete.policies.autohete import AutoHete
from autohete.policies.shipped import least_shipped, shipped_plans
from autohete.profile import Profile, analytic_profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, Kind, Schedule
from autohete.workload import Units

#: To find the plan with the least memory: how many fitting plans to start with, and how many to try around the best of them.
_CORNERS, _MEASUREMENTS = 6, 24
#: The same where it has to be quick.
_QUICKLY = 1, 4
#: Up to this many units, plans that need waits for memory are tried where others fit: finding the waits takes long.
_FEW_UNITS = 64
#: Other places are left out if they make the bound lower by no more than this share.
_NOT_WORTH = 1e-3
#: How many of the last blocks keep their activations at most where that is tried one by one.
_KEPT_LAST = 3


@dataclass(frozen=True, slots=True)
class Joint:
    """The joint planner.

    Args:
        quick: spend about a quarter of the time; the plan may be slower than that of another system.
    """

    quick: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`.

        Raises:
            InfeasibleError: no plan fits. States the binding memory and the smallest budget that works.
        """
        return best_plan(profile, judge, every_choice(profile), quick=self.quick)


@dataclass(frozen=True, slots=True)
class JointFrom:
    """The joint planner with more plans to start from, such as the best one for less memory. Its plan is never slower than
    one of these that fits.
    """

    starts: tuple[Plan, ...]
    quick: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`Joint`."""
        return best_plan(profile, judge, every_choice(profile), self.starts, quick=self.quick)


def every_choice(profile: Profile) -> Choices:
    """The choices for each unit. Gradients and updated parameters are copied in the format the GPU computes with. On unified
    hardware nothing is copied, so only recomputation is left to decide.
    """
    element = Format(profile.element_bytes)
    choices = all_choices(profile, upload=element, gradients=element)
    return choices.where(_needs_no_host) if profile.hardware.unified else choices


def _needs_no_host(unit: UnitPlan) -> bool:
    leaves = unit.parameters.leaves or unit.states.leaves or unit.activations_leave
    return not leaves and unit.update.on is Processor.GPU


def best_plan(profile: Profile, judge: Judge, choices: Choices, known: Sequence[Plan] = (), *, quick: bool = False) -> Plan:
    """The best plan of ``choices``, or a ``known`` one or, unless ``quick``, that of a shipped system if that is faster. Raises
    the errors of :meth:`Joint.plan`.
    """
    estimate = estimates(judge)
    every = PlanFamily(profile, estimate, choices)
    relaxed = every.relaxation()
    bound = relaxed.bound(quick=quick)
    family = every.where(_needs_no_place) if profile.hardware.places else every
    near = bound if family is every else family.relaxation().bound(quick=quick)
    parts = [] if near is None else list(_parts(family, quick=quick))
    if bound is not None and family is not every and (near is None or bound < near * (1 - _NOT_WORTH)):
        parts.append(every)
    problems = [relaxed if part is every else part.relaxation() for part in parts]
    several = profile.workload.micro_batches
    possible = [*_possible(known, estimate)]
    known_seconds = _least_seconds(possible, estimate)
    unfit = len(known) > 0 and known_seconds == math.inf  # so a search has further to go
    searches = [
        JointSearch(problem, part.judged, bound or 0.0, several, quick=quick and not unfit)
        for part, problem in zip(parts, problems, strict=True)
    ]
    for part, search in zip(parts, searches, strict=True):
        search.start(part.where(_keeps_on_gpu).relaxation(), below=known_seconds)
    limit = min(searches[0].seconds, known_seconds) if searches else math.inf
    candidates = [*possible, *(() if quick else shipped_plans(profile, estimate, limit, Joint))]
    coarse = of_blocks(parts[-1], quick=quick) if parts and not (quick and known) else None
    fits = known_seconds < math.inf or any(search.best is not None for search in searches)
    if quick and fits:  # search on only where that found something: what is known was searched for already
        faster = [search.seconds < known_seconds for search in searches]
        parts, searches = list(compress(parts, faster)), list(compress(searches, faster))
    # Each part starts from all earlier results and runs the same search as the last part would: more choices never hurt.
    for part, search in zip(parts, searches, strict=True):
        for plan in candidates:
            if (assignment := part.choices.assignment(plan.units)) is not None:
                search.try_(assignment)
        if coarse is not None and (assignment := part.choices.assignment(coarse)) is not None:
            search.try_(assignment)
        search.go_on()
        for assignment in search.best_few():
            candidates += part.plans(assignment, polish=not quick)
    if len(profile.units) <= _FEW_UNITS and not quick:
        best = _least_seconds(candidates, estimate)
        waiting = [every.waiting(relaxed, best)]
        if family is not every:
            waiting.append(family.waiting(family.relaxation(), best))
        candidates += [plan for plan in waiting if plan is not None]
    found: Plan | None = fastest({plan: estimate(plan) for plan in candidates}, judge)
    if found is None:
        thrifty = every.frugal(relaxed, proven=bound is None, quick=quick)
        return thrifty if quick else every.polished(thrifty)
    if found.is_pipeline:  # the bound is of plans that are none
        return found
    seconds = judge(found).seconds
    return replace(found, bound_seconds=seconds if bound is None else min(seconds, bound))


def _least_seconds(plans: Iterable[Plan], judge: Judge) -> float:
    """The time of the fastest plan that fits; infinite if none does."""
    return min((judge(plan).seconds for plan in plans if judge(plan).verdict is Verdict.OK), default=math.inf)


def _possible(plans: Iterable[Plan], judge: Judge) -> Iterator[Plan]:
    """The plans that can be carried out here, whether they fit or not."""
    for plan in plans:
        with suppress(InputError):
            judge(plan)
            yield plan


def of_blocks(family: PlanFamily, *, quick: bool = False) -> tuple[UnitPlan, ...] | None:
    """The best decisions if both sublayers of each block are planned alike, so that the finer search is never worse than that.

    None if units are blocks already, if the profile was measured, or if nothing is found.
    """
    profile = family.profile
    workload = replace(profile.workload, units=Units.BLOCK)
    if profile.workload.units is Units.BLOCK or profile != analytic_profile(profile.workload, profile.hardware):
        return None
    units = analytic_profile(workload, profile.hardware)

    def judge(plan: Plan) -> Judgement:
        assignment = family.choices.assignment(refined(plan.units))
        if assignment is None:
            raise InputError("the sublayers of a block have no such choice")
        return family.judged(assignment)

    try:
        plan = best_plan(units, judge, every_choice(units), quick=quick)
        return refined(plan.units)
    except (InfeasibleError, InputError):  # or the sublayers differ too much, as where only one of them is trained
        return None


def refined(units: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
    """The decisions for embedding, two sublayers of each block, and head."""
    first, *inner, last = units
    return (first, *(unit for unit in inner for _ in range(2)), last)


def _parts(family: PlanFamily, *, quick: bool) -> Iterator[PlanFamily]:
    """Nested subsets of the choices, then all; one of these if it has to be quick. Selective recomputation, and sums of
    gradients that leave the GPU, add so many neighbours that a search misses others. They are added one after the other, so
    that a plan that is found without selective recomputation is found with it.
    """
    kept = family.where(lambda unit: unit.activations is not Activations.SELECTIVE)
    plain = kept.where(lambda unit: not unit.sums_leave)
    if quick:
        yield family if family.profile.workload.micro_batches > 1 else plain
        return
    for part, more in ((plain, kept), (kept, family)):
        if part.choices != more.choices:
            yield part
    yield family


def _needs_no_place(unit: UnitPlan) -> bool:
    """Exclude places besides the GPU and the host: they matter only where they are fast, or the host is small."""
    return {GPU_MEMORY, HOST_MEMORY}.issuperset(unit.homes)


def _keeps_on_gpu(unit: UnitPlan) -> bool:
    """Exclude offloaded activations: the rows do not capture how strongly their copies contend with each other."""
    return not unit.activations_leave


class PlanFamily:
    """The plans made of the given choices for each unit.

    Args:
        profile: times and sizes.
        judge: evaluates plans.
        choices: the available choices of every unit.
    """

    def __init__(self, profile: Profile, judge: Judge, choices: Choices) -> None:
        self.profile, self.choices, self._judge = profile, choices, judge
        self._template = replace(AutoHete().plan_for(profile, Counts(0, 0, 0)), policy="joint")
        self._known: dict[tuple[UnitPlan, ...], tuple[Plan, Judgement]] = {}

    def where(self, allowed: Callable[[UnitPlan], bool]) -> PlanFamily:
        """The family of the choices that are ``allowed``. The two families share their judgements."""
        part = PlanFamily(self.profile, self._judge, self.choices.where(allowed))
        part._known = self._known
        return part

    def relaxation(self) -> Relaxation:
        """The relaxed problem for the search."""
        model = Model(Costs(self.profile, self._template), self.choices)
        return Relaxation(self.choices, model, Budgets.of(self.profile.hardware))

    def judged(self, assignment: Assignment) -> Judgement:
        """Time and memory of the plan of ``assignment``."""

        return self._tuned(assignment)[1]

    def _tuned(self, assignment: Assignment) -> tuple[Plan, Judgement]:
        def tuned(plan: Plan) -> tuple[Plan, Judgement]:
            plan = replace(plan, units=tune_prefetches(self.profile, plan))
            return plan, self._judge(plan)

        plan = self._untuned(assignment)
        if plan.units not in self._known:
            _, found = without_refused_rules(plan, tuned)
            if found[1].verdict is Verdict.GPU_OUT_OF_MEMORY and (sooner := _updates_in_backward(plan)) != plan:
                _, found = without_refused_rules(sooner, tuned)
            self._known[plan.units] = found
        return self._known[plan.units]

    def plans(self, assignment: Assignment, *, polish: bool) -> list[Plan]:
        """The plan of ``assignment``, and a variant with fewer rules or other distances if that is faster."""
        plan = self._tuned(assignment)[0]
        return [plan, self.polished(plan)] if polish else [plan]

    def waiting(self, relaxed: Relaxation, best: float) -> Plan | None:
        """The plan that would be best if copies waited for memory at no cost, with the waits that make it fit; None if they
        do not, if it fits without any, or if it takes ``best`` seconds even so.
        """
        assignment = replace(relaxed, pending=False).assignment()
        if assignment is None:
            return None
        judged = self._judge(self._untuned(assignment))
        if judged.verdict is Verdict.OK or judged.seconds >= best:
            return None
        plan = replace(self._lowered(assignment)[0], memory_waits=True)
        return self.polished(plan) if self._judge(plan).verdict is Verdict.OK else None

    def polished(self, best: Plan) -> Plan:
        """The best of ``best`` and of its neighbours with fewer rules, other distances, or parts of their own. Of a few units,
        a neighbour may need waits for memory.
        """
        for change in _NEIGHBOURS:
            changed = change(best)
            if changed == best or self.choices.assignment(changed.units) is None:
                continue
            waiting = () if len(best.units) > _FEW_UNITS or best.memory_waits else (replace(changed, memory_waits=True),)
            for plan in (changed, *waiting):
                try:
                    found = self._judge(plan)
                except RuleError:
                    break
                if found.seconds >= self._judge(best).seconds:  # waits only take longer
                    break
                if found.verdict is Verdict.OK:
                    best = plan
                    break
        return best

    def frugal(self, relaxed: Relaxation, *, proven: bool, quick: bool = False) -> Plan:
        """Return the plan that needs the least memory if copies wait for space. Raises if it still exceeds the memory, which
        may be ``proven`` to be so for every plan.

        If a plan fits with more pinned memory, pinned memory binds; if one fits the GPU with a larger host, the host binds;
        otherwise the GPU.
        """
        binds: tuple[Objective, float, float] | None = None
        for objective, have in relaxed.budgets.limits().items():
            least = self._least(replace(relaxed, objective=objective), quick=quick)
            if least is None:
                continue
            needed, plan = least
            if needed <= have:
                return plan if plan.is_pipeline else replace(plan, memory_waits=True)
            binds = binds or (objective, have, needed)
        assert binds is not None, "on a GPU that is large enough everything fits without a host"
        memory, have, needed = binds
        raise infeasible(memory, have, needed, self.profile.hardware, proven=proven)

    def _least(self, problem: Relaxation, *, quick: bool) -> tuple[float, Plan] | None:
        """The plan that needs the least of one memory within the others' budgets, with its bytes. None if none is found."""
        if quick:
            return self._least_of_choices(problem, *_QUICKLY)
        best = self._least_of_choices(problem, _CORNERS, _MEASUREMENTS)
        other = least_shipped(self.profile, self._judge, problem.objective, math.inf if best is None else best[0], Joint)
        return other or best

    def _least_of_choices(self, problem: Relaxation, most: int, measurements: int) -> tuple[float, Plan] | None:
        """The same, of the plans of the choices; see :data:`_CORNERS`."""
        best: tuple[float, Plan] | None = None
        others = {memory: budget for memory, budget in problem.budgets.limits().items() if memory is not problem.objective}

        def measured(assignment: Assignment) -> tuple[float, bool]:
            """Bytes of the one memory, and whether the plan fits the others."""
            nonlocal best
            plan, schedule = self._lowered(assignment)
            needed = least_bytes(schedule, problem.objective)
            fits = all(least_bytes(schedule, other) <= budget for other, budget in others.items())
            if fits and (best is None or needed < best[0]):
                best = needed, plan
            return needed, fits

        values = problem.values()
        corners = sorted(_corners(self.choices), key=lambda corner: values.value(values.of(corner)))
        relaxed = problem.assignment()
        fitting: list[tuple[float, Assignment]] = []
        for corner in corners if relaxed is None else [relaxed, *corners]:  # the first one that fits needs the least
            needed, fits = measured(corner)
            if fits:
                fitting.append((needed, corner))
            if len(fitting) == most:
                break
        if not fitting:
            return None
        least, start = min(fitting)
        here, allowed = np.array(start), np.ones(len(start), bool)
        for _ in range(measurements):
            rows = values.of(here)
            unit, half, choice = values.best(here, rows, allowed)
            if values.value(values.after(here, rows, unit, half, choice)) >= values.value(rows):
                break
            before, here[unit, half] = here[unit, half], choice
            needed, fits = measured(as_assignment(here))
            if not fits or needed > least:
                here[unit, half], allowed[unit] = before, False
            least = min(least, needed) if fits else least
        return best

    def _untuned(self, assignment: Assignment) -> Plan:
        """The plan without tuned prefetches: each fetch overlaps the pass before its own."""
        units, rules, gpus = self.choices.units(assignment), list[Rule](), self.profile.hardware.gpus
        slots = GRADIENT_SLOTS * gpus  # of a part each, in the same memory
        if sum(unit.update.on is Processor.CPU or unit.sums_leave for unit in units) > slots:
            rules.append(Slots(Kind.OFFLOAD_GRADIENTS, slots))
        leaves = any(unit.parameters.leaves or unit.states.leaves or unit.activations_leave for unit in units)
        if gpus > 1 and any(unit.update.on is Processor.GPU for unit in units):
            rules.append(GpuUpdatesAfterBackward())  # otherwise backward waits for each reduction
        if leaves or rules or gpus > 1:
            rules.append(ByPriority())
        return replace(self._template, units=units, rules=tuple(rules))

    def _lowered(self, assignment: Assignment) -> tuple[Plan, Schedule]:
        return without_refused_rules(self._untuned(assignment), partial(lower, self.profile))


def _corners(choices: Choices) -> Iterator[Assignment]:
    """Assignments in which every unit uses its n-th choices."""
    most = [max(map(len, every)) for every in (choices.activations, choices.others)]
    for a, o in product(range(most[0]), range(most[1])):
        pairs = zip(choices.activations, choices.others, strict=True)
        yield tuple((min(a, len(some) - 1), min(o, len(others) - 1)) for some, others in pairs)


def _without_slots(plan: Plan) -> Plan:
    return replace(plan, rules=tuple(rule for rule in plan.rules if not isinstance(rule, Slots)))


def _without_priority(plan: Plan) -> Plan:
    return replace(plan, rules=tuple(rule for rule in plan.rules if not isinstance(rule, ByPriority)))


def _with_priority(plan: Plan) -> Plan:
    return plan if ByPriority() in plan.rules else replace(plan, rules=(*plan.rules, ByPriority()))


def _updates_in_backward(plan: Plan) -> Plan:
    """Update on the GPU as soon as gradients are reduced, which frees them."""
    return replace(plan, rules=tuple(rule for rule in plan.rules if not isinstance(rule, GpuUpdatesAfterBackward)))


def _states_later(plan: Plan) -> Plan:
    return _with_states_ahead(plan, 0)


def _states_earlier(plan: Plan) -> Plan:
    return _with_states_ahead(plan, 2)


def _with_states_ahead(plan: Plan, ahead: int) -> Plan:
    units = (replace(unit, states=replace(unit.states, ahead=ahead)) if unit.fetches_states else unit for unit in plan.units)
    return replace(plan, units=tuple(units))


def _updates_later(plan: Plan) -> Plan:
    """Let updates on the GPU wait for the recomputation that follows, and their states come in halves: backward has the memory
    for one half at most, a recomputation for more.
    """
    if not any(unit.fetches_states for unit in plan.units) or not plan.checkpointed_units:
        return plan
    units = (
        replace(unit, states=replace(unit.states, parts=2 * unit.states.parts, ahead=2)) if unit.fetches_states else unit
        for unit in plan.units
    )
    return replace(plan, units=tuple(units), rules=(GpuUpdatesAfterRecompute(), *plan.rules))


def _outer_units_stay(plan: Plan) -> Plan:
    """Fetch the embedding once for backward and the next forward, and the head once for forward and backward."""
    first, *inner, last = plan.units
    if first.parameters.leaves:
        first = replace(first, parameters=replace(first.parameters, stays_after_forward=False, stays_after_backward=True))
    if last.parameters.leaves:
        last = replace(last, parameters=replace(last.parameters, stays_after_forward=True, stays_after_backward=False))
    return replace(plan, units=(first, *inner, last))


def _last_kept(plan: Plan) -> Plan:
    """Keep the activations of the last unit that does not: its backward follows soon."""
    places = [
        place for place, unit in enumerate(plan.units) if unit.activations is not Activations.KEEP or unit.activations_leave
    ]
    if not places:
        return plan
    units = list(plan.units)
    units[places[-1]] = replace(units[places[-1]], activations=Activations.KEEP, kept=Route(), saved=(), again=())
    return replace(plan, units=tuple(units))


def _activations_earlier(plan: Plan) -> Plan:
    units = (
        replace(unit, kept=replace(unit.kept, ahead=unit.kept.ahead + 2)) if unit.kept.leaves else unit for unit in plan.units
    )
    return replace(plan, units=tuple(units))


#: The changes in the order in which they are tried.
_NEIGHBOURS = (
    _without_slots,
    _updates_in_backward,
    _without_priority,
    _states_later,
    _states_earlier,
    _activations_earlier,
    _updates_later,
    _outer_units_stay,
    *[_last_kept] * _KEPT_LAST,
    _with_priority,
)
SYSTEM = Joint
