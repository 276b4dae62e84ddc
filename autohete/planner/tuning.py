"""Prefetch tuning: after the program, backward prefetches move earlier where GPU memory is surely free.

"Surely" means at every step, whatever the timing: the walk adds a prefetch's bytes to the worst case of each step that it
would newly be alive in, and stops where that exceeds the capacity, or where the passes beside it already hide the copy.
"""

from __future__ import annotations

from dataclasses import replace

from autohete.lowering import GPU_MEMORY, lower
from autohete.plan import BlockPlan, Placement, Plan
from autohete.profile import Profile
from autohete.schedule import Kind, Schedule, TaskId


def tune_prefetches(profile: Profile, plan: Plan) -> tuple[BlockPlan, ...]:
    """The plan's blocks with backward prefetch distances as large as memory surely allows and as time asks for."""
    if not plan.offloaded_parameter_blocks:
        return plan.blocks
    schedule = lower(profile, plan)
    capacity = next(m.capacity_bytes for m in schedule.memories if m.name == GPU_MEMORY)
    steps = [t.id for t in schedule.tasks if t.id.kind in _PASSES]
    place = {task: i for i, task in enumerate(steps)}
    seconds = {t.id: t.duration_ns * 1e-9 for t in schedule.tasks}
    used = worst_case(schedule, steps)
    blocks = list(plan.blocks)
    fetch_seconds = 0.0
    for block in range(len(blocks) - 1, -1, -1):
        if blocks[block].parameters is not Placement.OFFLOADED:
            continue
        user = TaskId(Kind.RECOMPUTE, block)
        start = place[user if user in place else TaskId(Kind.BACKWARD, block)]
        size = profile.blocks[block].parameters * profile.element_bytes
        fetch_seconds = profile.h2d_seconds(size)
        distance = blocks[block].backward_prefetch_distance
        hidden = sum(seconds[steps[i]] for i in range(start - distance, start))
        floor = place[TaskId(Kind.FORWARD, block)] + 1
        while hidden < 2 * fetch_seconds:  # twice: the copy before it may still occupy the link
            earlier = start - distance - 1
            if earlier < floor or used[earlier] + size > capacity:
                break
            used[earlier] += size
            hidden += seconds[steps[earlier]]
            distance += 1
        blocks[block] = replace(blocks[block], backward_prefetch_distance=distance)
    return tuple(blocks)


_PASSES = (Kind.FORWARD, Kind.LOSS, Kind.RECOMPUTE, Kind.BACKWARD)


def worst_case(schedule: Schedule, steps: list[TaskId]) -> list[int]:
    """Bytes of GPU memory at each step if everything allocated so far is freed as late as the edges allow.

    A buffer is alive from the first step during which its allocating task may run to the last step that may pass before
    its freeing task has ended.
    """
    place = {task: i for i, task in enumerate(steps)}
    tasks = {task.id: task for task in schedule.tasks}
    first: dict[TaskId, int] = {}

    def earliest(task: TaskId) -> int:
        """The step during which ``task`` can start at the earliest."""
        if task in place:
            return place[task]
        if task not in first:
            waits = [place[e.task] + 1 if e.task in place else earliest(e.task) for e in tasks[task].after if not e.back]
            first[task] = max(waits, default=0)
        return first[task]

    # What must have ended before a step begins: a buffer that such a task frees is gone by then.
    ends_before: dict[TaskId, int] = {}
    for step in steps:
        stack = [e.task for e in tasks[step].after if not e.back]
        while stack:
            before = stack.pop()
            if before not in place and ends_before.get(before, len(steps)) > place[step]:
                ends_before[before] = place[step]
                stack += [e.task for e in tasks[before].after if not e.back]
    change = [0] * (len(steps) + 1)
    change[0] = sum(buffer.size_bytes for buffer in schedule.resident if buffer.memory == GPU_MEMORY)
    freed_by = {free.name: (task.id, free.back) for task in schedule.tasks for free in task.frees}
    for task in schedule.tasks:
        for buffer in task.allocates:
            if buffer.memory != GPU_MEMORY:
                continue
            end, back = freed_by[buffer.name]
            begin = earliest(task.id)
            stop = place[end] + 1 if end in place else ends_before.get(end, len(steps))
            if back:
                change[0] += buffer.size_bytes
                change[stop] -= buffer.size_bytes
                stop = len(steps)
            change[begin] += buffer.size_bytes
            change[max(stop, begin)] -= buffer.size_bytes
    used, total = [], 0
    for step in range(len(steps)):
        total += change[step]
        used.append(total)
    return used
