"""All that a schedule allows, tried out: orders of its events, the plainest way."""

from __future__ import annotations

import random
from collections.abc import Iterator

from autohete.schedule import Discipline, Schedule

#: How often each task has started, and how often each has ended.
State = tuple[tuple[int, ...], tuple[int, ...]]


class Orders:
    """The events of a schedule: a task starts when what it waits for has ended, and ends when it has started.

    Fifo lanes take their tasks in turn; of a priority lane only the turns of each task are kept.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        tasks = schedule.tasks
        index = {task.id: i for i, task in enumerate(tasks)}
        self.waits = [[(index[edge.task], edge.back) for edge in task.after] for task in tasks]
        for lane in schedule.lanes:
            members = [i for i, task in enumerate(tasks) if task.lane == lane.name]
            for place, i in enumerate(members):
                if lane.discipline is Discipline.FIFO:
                    self.waits[i].append((members[place - 1], int(not place)))
                else:
                    self.waits[i].append((i, 1))
        ends = {free.id: (i, free.back) for i, task in enumerate(tasks) for free in task.frees}
        self.buffers = [(b.memory, b.size_bytes, i, *ends[b.id]) for i, task in enumerate(tasks) for b in task.allocates]

    def begin(self) -> State:
        """Before the first task."""
        nothing = (0,) * len(self.waits)
        return nothing, nothing

    def held(self, state: State, memory: str) -> int:
        """Bytes in use."""
        starts, ends = state
        counted = [one.name for one in self.schedule.memories if memory in (one.name, one.part_of)]
        resident = sum(b.size_bytes for b in self.schedule.resident if b.memory in counted)
        return resident + sum(
            size * (starts[a] + back - ends[f]) for where, size, a, f, back in self.buffers if where in counted
        )

    def starting(self, state: State, iterations: int) -> Iterator[int]:
        """Tasks that can start."""
        starts, ends = state
        for task, waits in enumerate(self.waits):
            if starts[task] < iterations and all(ends[u] > starts[task] - back for u, back in waits):
                yield task

    def ending(self, state: State) -> Iterator[int]:
        """Tasks that can end."""
        starts, ends = state
        return (task for task in range(len(starts)) if ends[task] < starts[task])

    def after(self, state: State, task: int, ends: bool) -> State:
        """The state when ``task`` has started or ended once more."""
        counts = list(state[ends])
        counts[task] += 1
        return (state[0], tuple(counts)) if ends else (tuple(counts), state[1])

    def peak_of_all(self, memory: str, iterations: int) -> int:
        """The most bytes of every state of the first ``iterations`` iterations."""
        seen = {self.begin()}
        stack = [self.begin()]
        while stack:
            state = stack.pop()
            events = [(task, False) for task in self.starting(state, iterations)] + [
                (task, True) for task in self.ending(state)
            ]
            for task, ends in events:
                following = self.after(state, task, ends)
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
        return max(self.held(state, memory) for state in seen)

    def peaks_of_one(self, seed: int, iterations: int) -> dict[str, int]:
        """The most bytes of each memory in one order, in which some tasks start, and some end, only when nothing else can."""
        rng = random.Random(seed)
        tasks, share = range(len(self.waits)), rng.choice([0.0, 0.1, 0.3, 0.6])
        late = {(task, ends): rng.random() < share for task in tasks for ends in (False, True)}
        state = self.begin()
        peaks = {memory.name: self.held(state, memory.name) for memory in self.schedule.memories}
        while True:
            events = [(task, False) for task in self.starting(state, iterations)] + [
                (task, True) for task in self.ending(state)
            ]
            if not events:
                return peaks
            state = self.after(state, *rng.choice([event for event in events if not late[event]] or events))
            for memory in peaks:
                peaks[memory] = max(peaks[memory], self.held(state, memory))
