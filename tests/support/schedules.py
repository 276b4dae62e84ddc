"""Schedules drawn from plans, policies and by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import reject
from hypothesis import strategies as st

from autohete.errors import InputError
from autohete.lowering import lower
from autohete.schedule import Schedule
from autohete.simulate import judge_for
from autohete.testing import strategies

#: A copy frees what forward allocates; the next forward waits for it only where that is said.
COPIED = """autohete-schedule 2
lane gpu fifo
lane d2h fifo
memory gpu 100
resident other:gpu:7
task F0 gpu 10 {}allocates=activations.0:gpu:30
task AO0 d2h 1 after=F0 frees=activations.0:gpu
"""


def drawn_schedule(data: st.DataObject) -> Schedule:
    """The schedule of a random plan or policy, or one that no plan would give."""
    kind = data.draw(st.sampled_from(["plan", "policy", "by hand"]))
    if kind == "by hand":
        return data.draw(strategies.schedules(sharing=data.draw(st.booleans())))
    profile = data.draw(strategies.profiles())
    plan = strategies.plans(profile)
    if kind == "policy":
        policy = data.draw(strategies.policies().filter(lambda policy: not policy.name.startswith(("autohete", "joint"))))
        try:
            plan = st.just(policy.plan(profile, judge_for(profile)))
        except InputError:  # it cannot clip gradients
            reject()
    return lower(profile, data.draw(plan))


def redrawn(data: st.DataObject, schedule: Schedule) -> Schedule:
    """``schedule`` with other durations: none, some, or very long ones."""
    durations = st.sampled_from([0, 1, 1000]) | st.integers(0, 10**6) | st.integers(0, 10**12)
    tasks = tuple(task._replace(duration_ns=data.draw(durations)) for task in schedule.tasks)
    return replace(schedule, tasks=tasks)
