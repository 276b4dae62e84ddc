"""What a unit's decisions mean for its values: where they rest between uses, and which copies of them an iteration makes.

This is the only place that reads it off a plan. Lowering adds the copies as the passes need them. A schedule lists what rests
where, unit by unit and in every memory, so an executor knows where everything is before the first task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from autohete.errors import InputError
from autohete.plan import Activations, Footprint, Format, Processor, Route, UnitPlan
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, Value
from autohete.schedule.parts import part_ranges


class Resting(NamedTuple):
    """A value of a unit between its uses.

    Args:
        value: what rests.
        memory: where.
        size_bytes: its size; 0 for what takes no memory of its own, such as states of an optimizer that has none.
    """

    value: Value
    memory: str
    size_bytes: int


class SavedSize(NamedTuple):
    """The size of some of the tensors that a forward saves.

    Args:
        name: their name.
        size_bytes: of one micro-batch.
        selective: selective recomputation makes them again.
    """

    name: str
    size_bytes: int
    selective: bool


class SavedPart(NamedTuple):
    """The saved tensors of a unit that share a route. They are a part of its activations.

    Args:
        rest: where they rest.
        recomputed: they are made again before backward instead.
        size_bytes: of one micro-batch, without the input.
        names: their names.
    """

    route: Route
    recomputed: bool
    size_bytes: int
    names: frozenset[str]


class When(StrEnum):
    """The moment of a unit's iteration at which it makes a copy."""

    BEFORE_FORWARD = "before forward"
    AFTER_FORWARD = "after forward"
    BEFORE_BACKWARD = "before backward"
    AFTER_BACKWARD = "after backward"
    BEFORE_UPDATE = "before update"
    AFTER_UPDATE = "after update"


class Batches(StrEnum):
    """The micro-batches of an iteration in which a copy is made. Updates follow the last one."""

    ALL = "all"
    LAST = "last"
    FIRST = "first"
    OTHERS = "all but the last"
    LATER = "all but the first"

    def includes(self, *, first: bool, last: bool) -> bool:
        """Whether a micro-batch is one of them."""
        some = {Batches.FIRST: first, Batches.LAST: last, Batches.OTHERS: not last, Batches.LATER: not first}
        return some.get(self, True)


class Move(NamedTuple):
    """A copy of one value of a unit.

    Args:
        value: what is copied.
        source, target: memories.
        size_bytes: bytes copied.
        when: the moment.
        batches: the micro-batches with that moment in which the copy is made.
        pinned: the host's side is pinned memory.
        fresh: the host's side is pageable memory that nothing has touched yet.
        part: index of the part of the value: of activations, that of :func:`saved_parts`. Of parameters, which come as a whole,
            that of the recomputation for which they come.
        returned_bytes: bytes that are copied back to the GPU during the copy.
    """

    value: Value
    source: str
    target: str
    size_bytes: int
    when: When
    batches: Batches = Batches.LAST
    pinned: bool = True
    part: int = 0
    fresh: bool = False
    returned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """The sizes of a unit's values, as far as they concern one GPU and its process on the host.

    Args:
        element_bytes: of a parameter or gradient where the GPU computes with it.
        parameters: the value that the GPU keeps: all parameters, or its part of them.
        parameter_bytes: size of all parameters where the GPU computes with them.
        is_trained: whether it has gradients and updates; a frozen unit has not.
        trained: trained parameters.
        kept: those of them that the GPU holds between uses.
        frozen_bytes: size of the frozen ones that it holds.
        gpu_updated, cpu_updated: parameters that the GPU updates, and those that the CPU or a place does.
        gpu_state_bytes, cpu_state_bytes: size of their optimizer states, and of parameters that travel with them.
        summed_bytes: size of the sums of several micro-batches on the GPU; 0 with one.
        saved_bytes: by how much the states on the CPU are smaller than those of AdamW.
        input_bytes, activation_bytes: of one micro-batch: the input; everything that backward needs.
        saved: what that has besides the input, tensor by tensor. Empty: not known.
        results: what its products give. Empty: not known.
        beside_gpu: the places of the hardware that exchange data with the GPU. All others are behind the host.
    """

    element_bytes: int
    parameters: Value
    parameter_bytes: int
    is_trained: bool
    trained: int
    kept: int
    frozen_bytes: int
    gpu_updated: int
    cpu_updated: int
    gpu_state_bytes: int
    cpu_state_bytes: int
    summed_bytes: int
    saved_bytes: int
    input_bytes: int
    activation_bytes: int
    saved: tuple[SavedSize, ...] = ()
    results: tuple[SavedSize, ...] = ()
    beside_gpu: tuple[str, ...] = ()

    def way(self, home: str, processor: Processor = Processor.GPU) -> tuple[str, ...]:
        """The memories on the way from ``home`` to where a processor computes."""
        there = GPU_MEMORY if processor is Processor.GPU else HOST_MEMORY
        through = home not in (there, HOST_MEMORY, *self.beside_gpu)
        return tuple(dict.fromkeys((home, *((HOST_MEMORY,) if through else ()), there)))


def rests(unit: UnitPlan, sizes: UnitSizes, held: Footprint, pinned: str) -> Iterator[Resting]:
    """Yield what rests in every memory between uses.

    Args:
        unit: the decisions.
        sizes: the sizes of its values.
        held: what the system holds for what the CPU updates.
        pinned: the memory of pinned buffers.
    """
    on_cpu = unit.update.on is not Processor.GPU
    if not unit.parameters.leaves:
        yield Resting(sizes.parameters, GPU_MEMORY, sizes.kept * sizes.element_bytes + sizes.frozen_bytes)
    else:
        copy = 0 if (held.one_host_copy and on_cpu) or unit.parameters_with_states else sizes.kept * held.host_parameter_bytes
        memory = pinned if unit.parameters.carried.pinned else HOST_MEMORY
        if unit.parameters.far:
            copy, memory = sizes.kept * sizes.element_bytes, unit.parameters.home
        yield Resting(Value.PARAMETERS, memory, copy + sizes.frozen_bytes)
    if not sizes.is_trained:
        return
    if on_cpu:
        elsewhere = sizes.cpu_state_bytes if unit.states.far else 0
        states = max(sizes.cpu_updated * held.host_optimizer_bytes - sizes.saved_bytes - elsewhere, 0)
        if states or not unit.states.far:
            yield Resting(Value.OPTIMIZER_STATES, pinned if held.pins_optimizer else HOST_MEMORY, states)
    if not unit.fetches_states and (not on_cpu or sizes.gpu_updated):
        yield Resting(Value.OPTIMIZER_STATES, GPU_MEMORY, sizes.gpu_state_bytes)
    elif unit.fetches_states and not unit.states.far:
        yield Resting(Value.OPTIMIZER_STATES, pinned, sizes.gpu_state_bytes)
    if unit.states.far:
        yield Resting(Value.OPTIMIZER_STATES, unit.states.home, sizes.cpu_state_bytes if on_cpu else sizes.gpu_state_bytes)
    if unit.sums_leave and sizes.summed_bytes:
        yield Resting(Value.GRADIENTS, pinned, sizes.summed_bytes)
    if unit.gradients.far:
        yield Resting(
            Value.GRADIENTS, unit.gradients.home, unit.gradients.carried.bytes_of(sizes.cpu_updated, sizes.element_bytes)
        )


def moves(unit: UnitPlan, sizes: UnitSizes, *, has_backward: bool = True) -> Iterator[Move]:
    """Yield the copies of one iteration between the memories of a GPU and its host, and the drives.

    Args:
        unit: the decisions.
        sizes: the sizes of its values.
        has_backward: whether the unit has a backward. Frozen units below all trained ones have none.
    """
    yield from _moves_of_parameters(unit, sizes, has_backward)
    if has_backward:
        yield from _moves_of_activations(unit, sizes)
    if sizes.is_trained:
        yield from _moves_of_gradients(unit, sizes)
        yield from _moves_of_states(unit, sizes)


def _moves_of_parameters(unit: UnitPlan, sizes: UnitSizes, has_backward: bool) -> Iterator[Move]:
    route, on_cpu = unit.parameters, unit.update.on is not Processor.GPU
    way = sizes.way(route.home)
    if route.leaves:
        # Of parameters that the GPU updates, the host has only a copy in the format in which the GPU computes.
        element = sizes.element_bytes
        carried = route.carried.bytes_of(sizes.kept, element) if on_cpu and sizes.is_trained else sizes.kept * element
        for source, target in pairwise(way):
            fetch = Move(
                Value.PARAMETERS,
                source,
                target,
                carried + sizes.frozen_bytes,
                When.BEFORE_FORWARD,
                Batches.FIRST if route.stays_for_batches else Batches.ALL,
                route.carried.pinned,
            )
            if not route.stays_after_backward:
                yield fetch
            if not route.stays_after_forward and has_backward:
                for part in range(1 + len(unit.again) * route.comes_again):
                    yield fetch._replace(when=When.BEFORE_BACKWARD, part=part)
    pinned = route.carried.pinned or not route.moves  # what is only copied home when it has changed has pinned room there
    if route.moves and not route.stays_after_forward:  # what has not changed as well
        size, fresh = sizes.parameter_bytes, route.carried.fresh
        yield Move(Value.PARAMETERS, GPU_MEMORY, HOST_MEMORY, size, When.AFTER_FORWARD, Batches.ALL, pinned, fresh=fresh)
    if not sizes.is_trained:
        return
    moved_later = route.stays_after_backward and route.moves  # after the next forward
    if route.leaves and not moved_later and (route.far or not on_cpu) and not unit.parameters_with_states:
        size = sizes.parameter_bytes if route.moves else (sizes.kept if on_cpu else sizes.trained) * sizes.element_bytes
        there = Processor.CPU if on_cpu else Processor.GPU
        for source, target in pairwise(reversed(sizes.way(route.home, there))):
            yield Move(Value.PARAMETERS, source, target, size, When.AFTER_UPDATE, pinned=pinned)
    if unit.update.on is Processor.PLACE:
        size = Format(unit.update.returned_bytes).bytes_of(sizes.cpu_updated, sizes.element_bytes)
        yield Move(Value.PARAMETERS, unit.states.home, HOST_MEMORY, size, When.AFTER_UPDATE)
    if unit.refreshed:
        size = unit.refresh.bytes_of(sizes.cpu_updated, sizes.element_bytes)
        yield Move(Value.PARAMETERS, HOST_MEMORY, GPU_MEMORY, size, When.AFTER_UPDATE, pinned=unit.refresh.pinned)


@lru_cache(maxsize=2**10)  # most units are alike
def saved_parts(unit: UnitPlan, saved: tuple[SavedSize, ...], kept_bytes: int) -> tuple[SavedPart, ...]:
    """The saved tensors of a unit that keeps activations, or some of them, by route.

    What is recomputed comes first, then what stays on the GPU, then what rests with the input elsewhere, then all others. A
    part is there even if it is empty where something is made again from it, or where the input belongs to it.

    Args:
        unit: the decisions.
        saved: the sizes of the tensors. Empty: not known.
        kept_bytes: of all of them.

    Raises:
        InputError: the plan names tensors that the profile does not.
    """
    routes = {one.name: one for one in unit.saved}
    sizes = {one.name: one.size_bytes for one in saved}
    if unknown := routes.keys() - sizes.keys():
        known = f"it names {', '.join(sizes)}" if sizes else "it names none"
        raise InputError(
            f"the plan has a route for the saved tensors {min(unknown)!r}, which the profile does not name ({known}): plan for "
            "this profile"
        )
    again = {one.name for one in unit.saved if one.recomputed}
    if unit.activations is Activations.SELECTIVE and not again:
        again = {one.name for one in saved if one.selective} - routes.keys()
    kept = unit.kept if unit.kept.leaves else Route()
    names: dict[tuple[Route, bool], list[str]] = {}
    staying = 0  # bytes of tensors of which a part leaves
    for name in sizes:
        route, share = (routes[name].route, routes[name].share) if name in routes else (kept, 1.0)
        names.setdefault((Route(), True) if name in again else (route if route.leaves else Route(), False), []).append(name)
        if share < 1:
            names.setdefault((Route(), False), [])
            staying += (less := sizes[name] - round(sizes[name] * share))
            sizes[name] -= less
    unnamed = kept_bytes - sum(sizes.values()) - staying  # all that there is if nothing has a name
    if unnamed or unit.saved or kept.leaves or all(recomputed for _, recomputed in names):
        names.setdefault((kept, False), [])

    def order(key: tuple[Route, bool]) -> tuple[bool, ...]:
        route, recomputed = key
        return not recomputed, route.leaves, route != kept

    def size(key: tuple[Route, bool]) -> int:
        more = unnamed * (key == (kept, False)) + staying * (key == (Route(), False))
        return sum(sizes[name] for name in names[key]) + more

    return tuple(SavedPart(*key, size(key), frozenset(names[key])) for key in sorted(names, key=order))


def kept_results(unit: UnitPlan, results: tuple[SavedSize, ...]) -> tuple[SavedPart, ...]:
    """The results of products that a forward keeps for the recomputation of its unit, in the order of the plan.

    Args:
        unit: the decisions.
        results: the sizes of all results. Empty: not known.

    Raises:
        InputError: the plan names a result that the profile does not.
    """
    sizes = {one.name: one.size_bytes for one in results}
    if unknown := [one.name for one in unit.results if one.name not in sizes]:
        known = f"it names {', '.join(sizes)}" if sizes else "it names none"
        raise InputError(f"the plan keeps the result {unknown[0]!r}, which the profile does not name ({known}): plan for it")
    return tuple(SavedPart(one.route, False, sizes[one.name], frozenset({one.name})) for one in unit.results)


def _moves_of_activations(unit: UnitPlan, sizes: UnitSizes) -> Iterator[Move]:
    """Of activations each part that rests elsewhere, the input with that of ``unit.kept``; or only the input."""
    if unit.activations in (Activations.RECOMPUTE, Activations.DROP):
        if unit.kept.leaves:
            yield from _there_and_back(Value.INPUT, sizes.way(unit.kept.home), sizes.input_bytes)
        for index, result in enumerate(kept_results(unit, sizes.results), 1):
            if result.route.leaves:
                yield from _there_and_back(Value.ACTIVATIONS, sizes.way(result.route.home), result.size_bytes, index)
        return
    if not (unit.kept.leaves or unit.saved):
        return
    parts = saved_parts(unit, sizes.saved, sizes.activation_bytes - sizes.input_bytes)
    for index, part in enumerate(parts):
        if part.route.leaves:
            size = part.size_bytes + sizes.input_bytes * (part.route == unit.kept)
            yield from _there_and_back(Value.ACTIVATIONS, sizes.way(part.route.home), size, index)


def _there_and_back(value: Value, way: tuple[str, ...], size_bytes: int, part: int = 0) -> Iterator[Move]:
    """To where it rests after forward, and back for backward; ``way`` begins there."""
    for source, target in pairwise(reversed(way)):
        yield Move(value, source, target, size_bytes, When.AFTER_FORWARD, Batches.ALL, part=part)
    for source, target in pairwise(way):
        yield Move(value, source, target, size_bytes, When.BEFORE_BACKWARD, Batches.ALL, part=part)


def _moves_of_gradients(unit: UnitPlan, sizes: UnitSizes) -> Iterator[Move]:
    if unit.sums_leave and sizes.summed_bytes:
        size = sizes.summed_bytes
        yield Move(Value.GRADIENTS, GPU_MEMORY, HOST_MEMORY, size, When.AFTER_BACKWARD, Batches.OTHERS)
        yield Move(Value.GRADIENTS, HOST_MEMORY, GPU_MEMORY, size, When.BEFORE_BACKWARD, Batches.LATER)
    if unit.update.on is Processor.GPU:
        return
    carried = unit.gradients.carried
    size, pinned = carried.bytes_of(sizes.cpu_updated, sizes.element_bytes), carried.pinned
    last = Move(
        Value.GRADIENTS,
        GPU_MEMORY,
        HOST_MEMORY,
        size,
        When.AFTER_BACKWARD,
        pinned=pinned,
        fresh=carried.fresh,
        returned_bytes=carried.returned_bytes * sizes.cpu_updated,
    )
    if unit.accumulates_on_host:
        summed = size if unit.sum_bytes is None else unit.sum_bytes * sizes.cpu_updated
        yield last._replace(size_bytes=summed, batches=Batches.OTHERS, pinned=pinned or unit.sums_pinned)
    yield last
    if unit.gradients.far:
        yield Move(Value.GRADIENTS, HOST_MEMORY, unit.gradients.home, size, When.AFTER_BACKWARD)
        if unit.update.on is Processor.CPU:
            yield Move(Value.GRADIENTS, unit.gradients.home, HOST_MEMORY, size, When.BEFORE_UPDATE)


def _moves_of_states(unit: UnitPlan, sizes: UnitSizes) -> Iterator[Move]:
    """The states of a whole unit, as one processor updates it, part by part."""
    if not unit.states.leaves or unit.update.on is Processor.PLACE:
        return
    on_cpu = unit.update.on is Processor.CPU
    way = sizes.way(unit.states.home, unit.update.on)
    total, count = (sizes.cpu_state_bytes, sizes.cpu_updated) if on_cpu else (sizes.gpu_state_bytes, sizes.gpu_updated)
    for part, elements in enumerate(part_ranges(count, unit.states.parts)):
        size = total * elements.stop // max(count, 1) - total * elements.start // max(count, 1)
        for source, target in pairwise(way):
            yield Move(Value.OPTIMIZER_STATES, source, target, size, When.BEFORE_UPDATE, part=part)
        for source, target in pairwise(reversed(way)):
            yield Move(Value.OPTIMIZER_STATES, source, target, size, When.AFTER_UPDATE, part=part)
