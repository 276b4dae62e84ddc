"""Preallocated slots for parameters that come and go."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from autohete.errors import InputError
from autohete.lowering.builder import Builder
from autohete.lowering.parameters import Stay
from autohete.schedule import GPU, TaskId


@dataclass(frozen=True, slots=True)
class ParameterLife:
    """Fetched parameters on the GPU: the fetch, indices of first and last user, and the task that ends them with its lane."""

    fetch: TaskId
    begin: int
    stop: int
    end: TaskId
    lane: str
    back: int


class ParameterLives:
    """Lives in the order of the passes. Each iteration has the same ones; indices of the previous iteration are negative."""

    def __init__(self, lives: list[ParameterLife], passes: int) -> None:
        self._passes = passes
        self._begins, self._stops = sorted(life.begin for life in lives), sorted(life.stop for life in lives)
        self._places = sorted(life.stop % passes for life in lives)
        #: Lives of two iterations, latest end first; and for each lane their indices in this list.
        self._ends = sorted(lives, key=lambda life: (life.stop % passes, life.end), reverse=True) * 2
        self._of_lane: dict[str, list[int]] = {}
        for index, life in enumerate(self._ends):
            self._of_lane.setdefault(life.lane, []).append(index)

    def alive_at(self, place: int) -> int:
        """Number of units whose parameters are on the GPU when the pass at ``place`` runs."""
        begun = len(self._begins) + bisect_right(self._begins, place)  # of the previous iteration, and of this one
        return begun - bisect_left(self._stops, place + self._passes) - bisect_left(self._stops, place)

    def over_before(self, place: int, spare: int, unordered: Collection[str]) -> list[tuple[int, ParameterLife]]:
        """The lives that must have ended before the pass at ``place``: all that are over by then, except the last ``spare``.

        Returns:
            (index of its end, life), the latest end first. Of a lane that ends lives in order, which is any lane not in
            ``unordered``, only the last one.
        """
        count = len(self._places)
        first = count - bisect_left(self._places, place)  # the last end before ``place``; each life has one among ``count``
        found: list[int] = []
        for lane, indices in self._of_lane.items():
            begin, stop = bisect_left(indices, first + spare), bisect_left(indices, first + count)
            found += indices[begin : stop if lane in unordered else min(begin + 1, stop)]
        return [
            (self._ends[index].stop % self._passes - index // count * self._passes, self._ends[index])
            for index in sorted(found)
        ]


def lives_of(builder: Builder, stays: Iterable[Stay], order: Sequence[int]) -> list[ParameterLife]:
    """Fetched parameters in the order of the passes. Each lasts to the last pass that precedes its end under any timing.

    Args:
        builder: the tasks and their dependencies.
        stays: the stays of fetched parameters.
        order: the issue order of the tasks.
    """
    count = len(builder.passes)
    places = {builder.index(task): place for place, task in enumerate(builder.passes)}
    latest = builder.waits.latest(order, places, count)
    found = []
    for stay in stays:
        assert stay.end is not None, "parameters that come and go are freed"
        end = builder.index(stay.end)
        stop = latest[end] + stay.back * count
        found.append(ParameterLife(stay.fetch, builder.place[stay.user], stop, stay.end, builder.drafts[end].lane, stay.back))
    return found


def share_slots(builder: Builder, all_lives: list[ParameterLife], slots: int) -> None:
    """Make each fetch into preallocated slots wait until a slot is free under any timing.

    In the order of the passes a life lasts from its first to its last user. When the user of a fetch runs, a number of lives
    are over. All of them must actually have ended, except as many as there are spare slots.

    Args:
        builder: the tasks.
        all_lives: the lives of one iteration.
        slots: number of slots.

    Raises:
        InputError: more units than slots have parameters on the GPU at a time.
    """
    passes, fifo = len(builder.passes), not builder.by_priority  # fifo lanes end lives in the order in which they are issued
    lives = ParameterLives(all_lives, passes)
    unordered = frozenset() if fifo else frozenset(life.lane for life in all_lives if life.lane != GPU)
    known: dict[str, int] = {}  # per fifo lane, the latest index whose life an earlier fetch waited for
    for life in sorted(all_lives, key=lambda life: life.begin):
        there = lives.alive_at(life.begin)
        if there > slots:
            raise InputError(
                f"there are {slots} slots for parameters, but {there} units have their parameters on the GPU when "
                f"{builder.passes[life.begin]} runs: give at least {there}"
            )
        waits = builder.waits.of(builder.index(life.fetch))
        passed = [(builder.place.get(builder.drafts[before].id), back) for before, back in waits]
        after = [place - back * passes for place, back in passed if place is not None]
        seen = {**(known if fifo else {}), GPU: max(after, default=-2 * passes)}
        for stop, other in lives.over_before(life.begin, slots - there, unordered):
            if stop > seen.get(other.lane, -2 * passes):
                builder.after(life.fetch, other.end, (other.stop - stop) // passes - other.back)
                if other.lane not in unordered:
                    seen[other.lane] = stop
        known = seen


def least_slots(all_lives: list[ParameterLife], passes: int) -> int:
    """The maximum number of simultaneous lives; 0 if there are none."""
    lives = ParameterLives(all_lives, passes)
    return max((lives.alive_at(life.begin) for life in all_lives), default=0)
