"""What may be decided per unit: its activations, its parameters, and who updates it with states from where.

A choice for a unit is a pair of :class:`~autohete.plan.UnitPlan`: one that decides the activations and one that decides the
rest. Times and bytes of the two add up, except where parameters and updates interact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from autohete.lowering.shards import refused_stage
from autohete.plan import Activations, Format, Processor, Route, UnitPlan, Update
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY

#: For each unit, the indices of its two choices in their lists.
Assignment = tuple[tuple[int, int], ...]

KEEP = UnitPlan()
RECOMPUTE = UnitPlan(Activations.RECOMPUTE)
SELECTIVE = UnitPlan(Activations.SELECTIVE)
#: What backward needs arrives while the unit above is computed, which takes two passes if that unit is recomputed.
OFFLOAD = UnitPlan(kept=Route(HOST_MEMORY, ahead=1))
OFFLOAD_INPUT = UnitPlan(Activations.RECOMPUTE, kept=Route(HOST_MEMORY, ahead=2))
OFFLOAD_SELECTED = UnitPlan(Activations.SELECTIVE, kept=Route(HOST_MEMORY, ahead=2))

RESIDENT = Route()
FETCHED = Route(HOST_MEMORY)
#: Fetched once, for forward: suits the last units, whose backward follows soon.
STAYS_AFTER_FORWARD = Route(HOST_MEMORY, stays_after_forward=True)
#: Fetched once, for backward: suits the first units, whose next forward follows soon.
STAYS_AFTER_BACKWARD = Route(HOST_MEMORY, stays_after_backward=True)

#: Each part is a copy and an update of its own. Bundled models want at most 12, but next to tiny blocks it could be any number.
_MOST_PARTS = 32
#: Searches combine the same few decisions again and again.
_REMEMBERED = 2**12


@dataclass(frozen=True, slots=True)
class Choices:
    """The available choices of every unit.

    Args:
        activations: for each unit, the choices for its activations.
        others: for each unit, the choices for its parameters and updates.
    """

    activations: tuple[tuple[UnitPlan, ...], ...]
    others: tuple[tuple[UnitPlan, ...], ...]

    def units(self, assignment: Assignment) -> tuple[UnitPlan, ...]:
        """The unit plans of ``assignment``."""
        pairs = zip(self.activations, self.others, assignment, strict=True)
        return tuple(_combined(activations[a], others[o]) for activations, others, (a, o) in pairs)

    def where(self, allowed: Callable[[UnitPlan], bool]) -> Choices:
        """The choices for which ``allowed`` is true. Every unit must retain at least one."""
        return Choices(*(tuple(tuple(filter(allowed, some)) for some in every) for every in (self.activations, self.others)))

    def assignment(self, units: tuple[UnitPlan, ...]) -> Assignment | None:
        """The choices that make up ``units``, ignoring prefetch distances. None if they are not among these choices."""
        found = []
        for activations, others, unit in zip(self.activations, self.others, units, strict=True):
            kept = next((place for place, one in enumerate(activations) if _kept_alike(one, unit)), None)
            rest = next((place for place, one in enumerate(others) if _rest_alike(one, unit)), None)
            if kept is None or rest is None:
                return None
            found.append((kept, rest))
        return tuple(found)


@lru_cache(_REMEMBERED)
def _combined(kept: UnitPlan, rest: UnitPlan) -> UnitPlan:
    """The unit with the activations of the one and all else of the other."""
    return replace(rest, activations=kept.activations, kept=kept.kept, saved=kept.saved)


def _kept_alike(one: UnitPlan, other: UnitPlan) -> bool:
    """Whether the decisions on activations are equal, ignoring distances."""
    if one.saved or other.saved:
        return (one.activations, one.kept, one.saved) == (other.activations, other.kept, other.saved)
    return one.activations is other.activations and one.kept.home == other.kept.home


def _rest_alike(one: UnitPlan, other: UnitPlan) -> bool:
    """Whether all other decisions are equal, ignoring distances."""
    return _places(one) == _places(other) and _rest_without_distances(one) == _rest_without_distances(other)


def _places(unit: UnitPlan) -> tuple[object, ...]:
    """The fields in which most choices differ."""
    route = unit.parameters
    return unit.update.on, unit.states.home, route.home, route.stays_after_forward, route.stays_after_backward


@lru_cache(_REMEMBERED)
def _rest_without_distances(unit: UnitPlan) -> UnitPlan:
    route = replace(unit.parameters, ahead=1, ahead_in_backward=None)
    states = replace(unit.states, ahead=1, parts=1)
    return replace(unit, activations=Activations.KEEP, kept=Route(), saved=(), parameters=route, states=states)


def _largest_block(profile: Profile) -> int:
    """The largest number of trained parameters of a unit between embedding and head."""
    return max(1, *(unit.trained_parameters for unit in profile.units[1:-1]))


def all_choices(profile: Profile, upload: Format, gradients: Format) -> Choices:
    """Every choice available for ``profile``. Embedding and head keep their activations.

    Args:
        profile: defines the units.
        upload: format in which what the CPU updates is copied to the GPU.
        gradients: format in which their gradients are copied to the host.
    """
    last = len(profile.units) - 1
    summed_here, summed_away = Route(GPU_MEMORY, carried=gradients), Route(HOST_MEMORY, carried=gradients)
    on_gpu = UnitPlan(gradients=summed_here, refresh=upload)
    on_cpu = replace(on_gpu, update=Update(Processor.CPU))
    largest = _largest_block(profile)
    gpu_sums, cpu_sums = [summed_here], [summed_away]
    if profile.workload.micro_batches > 1:
        gpu_sums.append(summed_away)
        cpu_sums.append(summed_here)
    routes = [RESIDENT, FETCHED, STAYS_AFTER_FORWARD, STAYS_AFTER_BACKWARD]
    places = profile.hardware.places

    def in_places(parts: int) -> Iterator[UnitPlan]:
        """Updates with states that rest in other places, whose parameters may rest there as well."""
        for place in places:
            updates = [replace(on_gpu, states=Route(place.name, parts=parts), gradients=summed) for summed in gpu_sums]
            if place.beside == HOST_MEMORY and profile.cpu_updates:
                updates += (replace(on_cpu, states=Route(place.name), gradients=summed) for summed in cpu_sums)
            for update in updates:
                yield from (replace(update, parameters=route) for route in routes)
                if update.update.on is Processor.GPU or profile.workload.has_masters:
                    yield replace(update, parameters=Route(place.name))

    def others(unit: int) -> tuple[UnitPlan, ...]:
        shared = unit == 0 and profile.workload.tied_embeddings
        if profile.units[unit].is_frozen:  # nothing to update; and without backward, nothing to stay for
            where = routes[:1] if shared else routes if unit >= profile.first_trained else routes[:2]
            where = where if shared else [*where, *(Route(place.name) for place in places)]
            return tuple(replace(on_gpu, parameters=route) for route in where)
        # Of a unit larger than the blocks, such as the head of a large vocabulary, no more states are there than of a block.
        wanted = -(-profile.units[unit].trained_parameters // largest)
        parts = min(max(1, wanted), _MOST_PARTS) if profile.updates_any_share(unit) else 1
        states = (Route(), Route(HOST_MEMORY, parts=parts))
        updates = [replace(on_gpu, states=where, gradients=summed) for summed in gpu_sums for where in states]
        if profile.cpu_updates:
            updates += (replace(on_cpu, gradients=summed) for summed in cpu_sums)
        planned = [replace(update, parameters=route) for route in routes for update in updates]
        return tuple(
            replace(one, parameters=replace(one.parameters, carried=upload)) if one.parameters.leaves else one
            for one in (*planned, *in_places(parts))
            if not (shared and one.parameters.leaves)
        )

    def activations(unit: int) -> tuple[UnitPlan, ...]:
        if unit in (0, last) or unit < profile.first_trained:
            return (KEEP,)
        some = (SELECTIVE, OFFLOAD_SELECTED) if profile.units[unit].selected else ()
        offloads = (OFFLOAD, OFFLOAD_INPUT, *some[1:])
        away = [replace(one, kept=replace(one.kept, home=place.name)) for place in places for one in offloads]
        return (KEEP, RECOMPUTE, OFFLOAD, OFFLOAD_INPUT, *some, *away)

    def shared_by_gpus(unit: int) -> Iterator[UnitPlan]:
        """The same at every ZeRO stage. Stage 2 takes less memory than stage 1 and reduces gradients more often."""
        yield from others(unit)
        stages = (2, 3) if profile.workload.micro_batches == 1 else (1, 2, 3)
        if profile.hardware.gpus == 1 or not profile.updates_any_share(unit):
            return
        for stage in (3,) if profile.units[unit].is_frozen else stages:
            yield from (replace(one, zero_stage=stage) for one in others(unit) if not refused_stage(profile, unit, one, stage))

    return Choices(
        tuple(activations(unit) for unit in range(last + 1)),
        tuple(tuple(shared_by_gpus(unit)) for unit in range(last + 1)),
    )
