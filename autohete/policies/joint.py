"""One decision for parameters, optimizer states, gradients and activations of every unit, which no published system makes.

- Each unit by itself keeps, recomputes or offloads its activations, or recomputes them from an input that rests on the host;
  has its parameters on the GPU, or on the host with a copy that stays between two passes or does not; and is updated by the
  CPU, or by the GPU with states that stay there or stream from the host. Of several micro-batches the CPU's gradients are
  added up on the host or on the GPU. DeepSpeed and Megatron-LM forbid most of these mixtures.
- Copies, casts, updates and rules are AutoHete's (``autohete.py``), so that what is gained over it is gained by decisions.
- What the shipped systems would do with their default flags is tried, too, and taken where it is faster: with that system's
  rules, formats and footprint. So this is never slower than any of them.

A linear program over lower bounds of the time and of the memory chooses where to begin; simulations go on from there
(``autohete/planner/joint.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete import policies
from autohete.errors import InfeasibleError, RuleError
from autohete.plan import Format, Plan, Processor
from autohete.plan.rules import ByPriority, GradientSlots, Rule
from autohete.planner.choices import Assignment, Choices, all_choices
from autohete.planner.joint import JointSearch
from autohete.planner.relaxation import Relaxation
from autohete.planner.rows import Costs, Model
from autohete.planner.steps import GRADIENT_SLOTS, Counts
from autohete.planner.tuning import tune_prefetches
from autohete.policies.autohete import AutoHete
from autohete.policy import Judge, Judgement, Verdict
from autohete.profile import Profile


@dataclass(frozen=True, slots=True)
class Joint:
    """The joint planner."""

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.policy.Policy`.

        Raises:
            InfeasibleError: no plan fits; says which memory binds and the smallest budget that works.
        """
        family = Family(profile, judge)
        shipped = [plan for plan in _shipped(profile, judge) if judge(plan).verdict is Verdict.OK]
        found = family.search(shipped)
        return min([*shipped, *found], key=lambda plan: judge(plan).seconds)


class Family:
    def __init__(self, profile, judge, choices=None):
        self.profile, self._judge = profile, judge
        self._template = AutoHete().plan_for(profile, Counts(0, 0, 0))
        element = Format(profile.element_bytes)
        self.choices = choices or all_choices(profile, upload=element, gradients=element)

    def relaxation(self):
        hardware = self.profile.hardware
        model = Model(Costs(self.profile, self._template, self.choices))
        return Relaxation(self.choices, model, hardware.gpu_capacity_bytes, hardware.host.memory_bytes)

    def plan_for(self, assignment):
        units = self.choices.units(assignment)
        rules = []
        if any(unit.update_on is Processor.CPU for unit in units[GRADIENT_SLOTS:]):
            rules.append(GradientSlots(GRADIENT_SLOTS))
        rules.append(ByPriority())
        plan = replace(self._template, policy="joint", units=units, rules=tuple(rules))
        while True:
            try:
                return replace(plan, units=tune_prefetches(self.profile, plan))
            except RuleError as error:
                plan = replace(plan, rules=tuple(r for r in plan.rules if r != error.rule))

    def judged(self, assignment):
        plan = self.plan_for(assignment)
        while True:
            try:
                return self._judge(plan)
            except RuleError as error:
                plan = replace(plan, rules=tuple(r for r in plan.rules if r != error.rule))

    def search(self, shipped):
        relaxed = self.relaxation()
        bound = relaxed.bound()
        if bound is None: return []
        starts = [a for p in shipped if (a := self.choices.assignment(p.units)) is not None]
        found = JointSearch(relaxed, self.judged, bound).run(starts)
        return [] if found is None else [self.plan_for(found.assignment)]


def _shipped(profile: Profile, judge: Judge) -> Iterator[Plan]:
    for name, system in policies.POLICIES.items():
        if system is Joint or name == "zero_infinity":
            continue
        try:
            plan = system().plan(profile, judge)
        except InfeasibleError:
            continue
        yield plan


SYSTEM = Joint
