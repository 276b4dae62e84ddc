"""Test support: Hypothesis strategies (``strategies``), properties of every valid plan (``checks``), and a second scheduler
to compare with (``list_scheduler``).

Policies are tested on small and extreme inputs of every kind, and each fault is described in words::

    from hypothesis import given
    from autohete.plan import Plan, Processor, UnitPlan, Update
    from autohete.simulate import judge_for
    from autohete.testing import checks, strategies

    class HeadOnTheCpu:
        name = "head_on_the_cpu"

        def plan(self, profile, judge):
            units = (*[UnitPlan()] * (len(profile.units) - 1), UnitPlan(update=Update(Processor.CPU)))
            return Plan(self.name, units, update_bytes=28)

    @given(strategies.profiles())
    def test_no_wait_is_missing_and_memory_balances(profile):
        assert checks.policy_faults(profile, HeadOnTheCpu(), judge_for(profile)) == []

``strategies`` needs ``pip install autohete[testing]``, so nothing is imported here.
"""
