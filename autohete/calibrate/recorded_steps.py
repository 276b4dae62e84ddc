"""Finds the steps of a recorded training and their phases, and measures what the GPU, the links and the CPU did in each.

The GPU's work belongs to the step and the phase in which the host launched it, not to those in which it ran.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autohete.calibrate.operators import model_flops_of
from autohete.calibrate.recorded import NODE, GpuWork, HostRange, RecordedRun, Work
from autohete.errors import InputError
from autohete.printable import shown

_Floats = NDArray[np.float64]
#: What marks a step if no other name is given, in the order in which they are looked for: ``torch.profiler``'s own ranges, then
#: steps of the optimizer, from the start of one to the start of the next.
_STEP = ("ProfilerStep#", "Optimizer.step#")
#: Ranges of a backward: of autograd, of users, and of DeepSpeed (``instrument_w_nvtx`` names them by the function).
_BACKWARD = re.compile(rf"^{NODE}|(?:^|[^a-z])backward(?:[^a-z]|$)", re.IGNORECASE)
#: Ranges of an optimizer's step: of ``torch.optim.Optimizer.profile_hook_step``, of users, and of DeepSpeed's engine.
_UPDATE = re.compile(r"optimizer[\w.#]*step|^\W*optimizer\W*$|engine\.step$", re.IGNORECASE)
#: Steps of which some last longer than the median by this factor differ.
_DIFFERENT = 1.2
#: Share of a period that a range must fill to last until its end; others mark moments only.
_FILLS = 0.9


class Phase(StrEnum):
    """What an iteration's time is spent on. The first three are passes, with the waits within them for the host's launches."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update on the GPU"
    H2D = "copies to the GPU"
    D2H = "copies to the host"
    COLLECTIVES = "collectives"
    CPU_UPDATE = "update on the CPU"
    IDLE_H2D = "GPU waits for copies to it"
    IDLE_D2H = "GPU waits for copies to the host"
    IDLE_COLLECTIVES = "GPU waits for other GPUs"
    IDLE_UPDATE = "GPU waits for the optimizer"
    IDLE_BETWEEN = "GPU waits between steps"


PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
_LINKS = {Work.H2D: Phase.H2D, Work.D2H: Phase.D2H, Work.COLLECTIVE: Phase.COLLECTIVES}


class Intervals:
    """A union of intervals of time."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        starts: list[float] = []
        ends: list[float] = []
        for start, end in sorted(intervals):
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)
        self.starts, self.ends = starts, ends
        self._points = np.stack([starts, ends], axis=1).ravel() if starts else np.zeros(0)
        done = np.concatenate([[0.0], np.cumsum(np.array(ends) - np.array(starts))])
        self._levels = np.stack([done[:-1], done[1:]], axis=1).ravel() if starts else np.zeros(0)

    def __contains__(self, time: float) -> bool:
        place = bisect_right(self.starts, time) - 1
        return place >= 0 and time <= self.ends[place]

    def within(self, starts: Sequence[float] | _Floats, ends: Sequence[float] | _Floats) -> _Floats:
        """Return how much of each interval from ``starts`` to ``ends`` they cover."""
        if not self.starts:
            return np.zeros(len(starts))
        covered: _Floats = np.interp(ends, self._points, self._levels) - np.interp(starts, self._points, self._levels)
        return covered


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step.

    Args:
        start, end: when the host began it and the next one.
        seconds: from its first kernel on the busiest stream to that of the next step.
        parts: seconds of each part.
        late: of the passes, the seconds in which the GPU waited for the host's launches.
        kernels: number of kernels of each pass.
        flops: of products and attention of each pass, as a model's are counted; 0 if shapes are not recorded.
        bytes: sizes of all copies to the GPU and to the host, and of all messages, that were recorded.
        pageable_bytes: those of copies whose host memory was not page-locked.
    """

    start: float
    end: float
    seconds: float
    parts: dict[Phase, float]
    late: dict[Phase, float]
    kernels: dict[Phase, int]
    flops: dict[Phase, float]
    bytes: dict[Phase, int]
    pageable_bytes: dict[Phase, int]


@dataclass(frozen=True, slots=True)
class Phased:
    """A recording with its steps.

    Args:
        recorded: the recording.
        steps: its steps; there is at least one.
        passes: the pass of each work of the recording, in its order; None for what belongs to no step.
        remarks: what was assumed, and what is unusual, in words.
    """

    recorded: RecordedRun
    steps: tuple[RecordedStep, ...]
    passes: tuple[Phase | None, ...]
    remarks: tuple[str, ...]

    def median(self, part: Phase) -> float:
        """Seconds of a part in the median step."""
        return float(np.median([step.parts[part] for step in self.steps]))

    @property
    def seconds(self) -> float:
        """Time of the median step."""
        return float(np.median([step.seconds for step in self.steps]))


class _PassesOfHost:
    """To which pass an instant of a thread belongs."""

    def __init__(self, ranges: Sequence[HostRange]) -> None:
        found: dict[tuple[int, Phase], list[tuple[float, float]]] = {}
        for one in ranges:
            if part := _pass_of(one.name):
                found.setdefault((one.thread, part), []).append((one.start, one.end))
        self._found = {key: Intervals(some) for key, some in found.items()}
        marks = sorted((start, part) for (_, part), some in self._found.items() for start in some.starts)
        self._starts, self._marks = [start for start, _ in marks], [part for _, part in marks]
        #: Threads that do nothing but backwards: those of autograd that have no other pass, and no steps.
        others = {one.thread for one in ranges if not one.name.startswith(NODE) and _marks_main(one.name)}
        self._engines = {one.thread for one in ranges if one.name.startswith(NODE)} - others

    def of(self, thread: int, time: float) -> Phase:
        for part in (Phase.UPDATE, Phase.BACKWARD):
            if (found := self._found.get((thread, part))) is not None and time in found:
                return part
        if thread in self._engines:
            return Phase.BACKWARD
        # Between a backward and an update gradients are scaled and clipped; what else is launched is of a forward.
        after = bisect_right(self._starts, time)
        between = self._marks[max(after - 1, 0) : after + 1]
        return Phase.UPDATE if between == [Phase.BACKWARD, Phase.UPDATE] else Phase.FORWARD


def _marks_main(name: str) -> bool:
    return name.startswith(_STEP) or _pass_of(name) is not None


def _pass_of(name: str) -> Phase | None:
    if _BACKWARD.search(name):
        return Phase.BACKWARD
    return Phase.UPDATE if _UPDATE.search(name) and "zero_grad" not in name else None


def _bounds(recorded: RecordedRun, name: str | None) -> tuple[list[tuple[float, float]], list[str]]:
    """Start and end of each step on the host, and remarks."""
    for wanted in (name,) if name is not None else _STEP:
        marks: list[HostRange] = []
        by_optimizer = wanted == _STEP[1]
        if by_optimizer:  # of several optimizers, the first
            wanted = next((one.name for one in recorded.ranges if one.name.startswith(wanted)), wanted)
        for one in recorded.ranges:
            if one.name.startswith(wanted) and (not marks or one.end > marks[-1].end):  # not one within another
                marks.append(one)
        if by_optimizer:
            marks = _after_backward(marks, recorded.ranges)
        if not marks or (by_optimizer and name is None and len(marks) == 1):  # a step goes to the next, and there is none
            continue
        bounds = list(pairwise(one.start for one in marks))
        filled = sum(one.end - one.start for one in marks[:-1]) >= _FILLS * (marks[-1].start - marks[0].start)
        if filled:
            bounds.append((marks[-1].start, marks[-1].end))
        what = f"steps are the ranges {wanted}" if filled else f"steps go from one {wanted} to the next"
        return bounds, [] if wanted == _STEP[0] else [what]
    if name is not None:
        names = sorted({re.sub(r"\d+$", "", one.name) for one in recorded.ranges if not one.name.startswith(NODE)})
        listed = ", ".join(map(shown, names[:8])) or "no ranges at all"
        raise InputError(f"no range of {shown(recorded.name)} begins with {shown(name)}: steps can be called {listed}")
    first = min(min(one.start for one in recorded.work), min((one.start for one in recorded.ranges), default=np.inf))
    last = max(one.end for one in recorded.work)
    remark = (
        "no steps are marked: the whole recording is taken as one. Call prof.step() after each, or name a range that marks "
        "them with --step-name"
    )
    return [(float(first), last)], [remark]


def _after_backward(updates: Sequence[HostRange], ranges: Sequence[HostRange]) -> list[HostRange]:
    """Of each group of updates without a backward between them, as of several optimizers, the first; all if there is none."""
    backwards = sorted(one.start for one in ranges if _pass_of(one.name) is Phase.BACKWARD)
    passed = [bisect_right(backwards, one.start) for one in updates]
    return [one for one, (before, now) in zip(updates, pairwise([-1, *passed]), strict=True) if now > before or not backwards]


def find_steps(recorded: RecordedRun, name: str | None = None) -> Phased:
    """Find steps and passes.

    Args:
        recorded: a recording with work of a GPU.
        name: how the names of the ranges begin that mark steps. None: ``ProfilerStep#``, or else steps of the optimizer, or
            else the whole recording is one step.

    Raises:
        InputError: no range has that name, or the GPU did nothing in any step.
    """
    bounds, remarks = _bounds(recorded, name)
    starts, passes = [start for start, _ in bounds], _PassesOfHost(recorded.ranges)
    members: list[list[int]] = [[] for _ in bounds]
    parts: list[Phase | None] = []
    for place, one in enumerate(recorded.work):
        time = one.start if np.isnan(one.issued) else one.issued
        step = bisect_right(starts, time) - 1
        if step < 0 or time >= bounds[step][1] > bounds[step][0]:
            parts.append(None)
            continue
        members[step].append(place)
        parts.append(passes.of(one.thread, time))
    if not any(members):
        raise InputError(f"the GPU did nothing in the steps of {shown(recorded.name)}: record whole steps, after a warm-up")
    if not any(part in (Phase.BACKWARD, Phase.UPDATE) for part in parts):
        remarks.append(
            "no backward was found, by autograd's ranges or others: all work counts as forward; record CPU activities"
        )
    timeline, main = _StepTimes(recorded, parts), _busiest_stream(recorded.work)
    active = [(bound, some) for bound, some in zip(bounds, members, strict=True) if some]
    firsts = []
    for _, some in active:  # a stream runs in order, while copies for the next step may begin early
        of_main = [recorded.work[place].start for place in some if recorded.work[place].stream == main]
        firsts.append(min(of_main or [recorded.work[place].start for place in some]))
    steps, begins = [], [one.start for one in recorded.operators]
    for number, (bound, some) in enumerate(active):
        ends = max(recorded.work[place].end for place in some)
        follows = number + 1 < len(active) and active[number + 1][0][0] <= bound[1] * (1 + 1e-9)
        end = firsts[number + 1] if follows else max(ends, firsts[number] + bound[1] - bound[0])
        counted = dict.fromkeys(PASSES, 0.0)
        for operator in recorded.operators[bisect_left(begins, bound[0]) : bisect_left(begins, bound[1])]:
            counted[passes.of(operator.thread, operator.start)] += model_flops_of(operator)
        steps.append(timeline.step(*bound, firsts[number], max(end, firsts[number]), some, counted))
    remarks += _differing(steps)
    return Phased(recorded, tuple(steps), tuple(parts), (*recorded.remarks, *remarks))


def _busiest_stream(work: Sequence[GpuWork]) -> int:
    busy: dict[int, float] = {}
    for one in work:
        if one.work is Work.KERNEL:
            busy[one.stream] = busy.get(one.stream, 0.0) + one.end - one.start
    return max(busy, key=busy.__getitem__, default=-1)


def _differing(steps: Sequence[RecordedStep]) -> list[str]:
    seconds, kernels = [step.seconds for step in steps], {sum(step.kernels.values()) for step in steps}
    if len(steps) == 1:
        return ["there is one step, so that figures of whole steps have no spread"]
    remarks, updating = [], sum(step.parts[Phase.UPDATE] + step.parts[Phase.CPU_UPDATE] > 0 for step in steps)
    if 0 < updating < len(steps):
        remarks.append(
            f"{updating} of {len(steps)} steps update: the others may be micro-batches. Mark whole iterations, or give "
            "--step-name Optimizer.step"
        )
    if max(seconds) > _DIFFERENT * float(np.median(seconds)):
        why = "" if len(kernels) == 1 else f", with {min(kernels):,} to {max(kernels):,} kernels"
        remarks.append(f"steps differ: {min(seconds):.4g} to {max(seconds):.4g} s{why}; medians are shown. Leave warm-up out")
    return remarks


class _StepTimes:
    """Measures the parts of steps."""

    def __init__(self, recorded: RecordedRun, passes: Sequence[Phase | None]) -> None:
        self._work, self._passes = recorded.work, passes
        self._busy = {work: Intervals((one.start, one.end) for one in recorded.work if one.work is work) for work in Work}
        self._updates = _cpu_updates(recorded)

    def step(
        self, start: float, end: float, first: float, last: float, members: Sequence[int], flops: dict[Phase, float]
    ) -> RecordedStep:
        computing = [place for place in members if self._work[place].work in (Work.KERNEL, Work.D2D)]
        parts = dict.fromkeys(Phase, 0.0)
        late, kernels = dict.fromkeys(PASSES, 0.0), dict.fromkeys(PASSES, 0)
        gaps: list[tuple[float, float, GpuWork | None, Phase]] = []
        until, part = first, Phase.FORWARD
        for place in computing:
            one = self._work[place]
            part = self._passes[place] or part
            if min(one.start, last) > until:
                gaps.append((until, min(one.start, last), one, part))
            parts[part] += max(0.0, min(one.end, last) - max(one.start, until))
            kernels[part] += one.work is Work.KERNEL
            until = max(until, one.end)
        if until < last:
            gaps.append((until, last, None, part))
        self._waits(gaps, parts, late)
        sizes, pageable = dict.fromkeys(_LINKS.values(), 0), dict.fromkeys(_LINKS.values(), 0)
        for place in members:
            one = self._work[place]
            if link := _LINKS.get(one.work):
                sizes[link] += one.bytes
                pageable[link] += 0 if one.pinned else one.bytes
        for work, link in _LINKS.items():
            parts[link] = float(Intervals(self._spans(members, work)).within([-np.inf], [np.inf])[0])
        parts[Phase.CPU_UPDATE] = float(self._updates.within([start], [end])[0])
        return RecordedStep(start, end, last - first, parts, late, kernels, flops, sizes, pageable)

    def _spans(self, members: Sequence[int], work: Work) -> list[tuple[float, float]]:
        return [(one.start, one.end) for one in (self._work[place] for place in members) if one.work is work]

    def _waits(
        self,
        gaps: Sequence[tuple[float, float, GpuWork | None, Phase]],
        parts: dict[Phase, float],
        late: dict[Phase, float],
    ) -> None:
        """Add the time of each gap of the GPU to what it waits for: a copy, another GPU, the optimizer on the CPU, or the pass
        that follows.
        """
        starts, ends = [gap[0] for gap in gaps], [gap[1] for gap in gaps]
        causes = (
            (Phase.IDLE_COLLECTIVES, self._busy[Work.COLLECTIVE]),
            (Phase.IDLE_H2D, self._busy[Work.H2D]),
            (Phase.IDLE_D2H, self._busy[Work.D2H]),
            (Phase.IDLE_UPDATE, self._updates),
        )
        covered = [(part, busy.within(starts, ends)) for part, busy in causes]
        for place, (start, end, following, part) in enumerate(gaps):
            left = end - start
            for cause, seconds in covered:
                taken = min(left, float(seconds[place]))
                parts[cause] += taken
                left -= taken
            if following is None:
                parts[Phase.IDLE_BETWEEN] += left
                continue
            parts[part] += left
            if following.issued > start:
                late[part] += left


def _cpu_updates(recorded: RecordedRun) -> Intervals:
    """When the CPU updated: the steps of an optimizer that launch no kernel, without their waits for the GPU."""
    launches: dict[int, list[float]] = {}
    for one in recorded.work:
        if one.work is Work.KERNEL and not np.isnan(one.issued):
            launches.setdefault(one.thread, []).append(one.issued)
    for times in launches.values():
        times.sort()
    found = []
    for update in recorded.ranges if launches else ():  # where the CPU stands in for the GPU, nothing is launched
        times = launches.get(update.thread, [])
        launched = bisect_right(times, update.end) - bisect_right(times, update.start)
        if _pass_of(update.name) is Phase.UPDATE and not launched:
            within = (wait for wait in recorded.waits if wait[0] == update.thread and update.start <= wait[1] <= update.end)
            waited = sum(end - start for _, start, end in within)
            found.append((update.start, max(update.start, update.end - waited)))
    return Intervals(found)
