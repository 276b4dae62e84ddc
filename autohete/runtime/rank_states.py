"""Model states of one of several ranks: what its tasks of the collective lane do, and what all ranks do between steps.

With ZeRO each rank updates an equal part of every unit's elements, its *shard*, which may begin and end within a parameter.
From stage 2 on it has the sums of these gradients only, and at stage 3 these parameters only, which are gathered for each use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autohete.errors import RankError, ScheduleError
from autohete.runtime.collectives import CALLERS, Collectives
from autohete.runtime.nonfinite import first_not_finite
from autohete.runtime.units import UnitTensors
from autohete.schedule import COLLECTIVE, COLLECTIVES, GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY, Discipline, Kind, Schedule, Value
from autohete.schedule.order import delayed_units

if TYPE_CHECKING:
    from autohete.runtime.states import States

_GATHERS = {Kind.GATHER_FORWARD, Kind.GATHER_BACKWARD}
_NEAR = (GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY)


class RankStates:
    """What the ranks do together with their model states.

    Args:
        states: this rank's; their units get their stages and shards here.
        collectives: to the other ranks.

    Attributes:
        agrees: after each sum, the ranks agree on whether all sums are finite: a step may be skipped, and nothing later in the
            step lets them agree.
        gives_back: the model is given back: what ranks that have failed had is left out.

    Raises:
        ScheduleError: the schedule is for another number of ranks, or has what only one rank can do.
    """

    def __init__(self, states: States, collectives: Collectives) -> None:
        self._states, self._collectives = states, collectives
        self.agrees = self.gives_back = False
        self._changes: list[str] = []
        stages = _stages_of(states.schedule, len(states.units))
        for unit, stage in zip(states.units, stages, strict=True):
            unit.stage = stage
            if unit.layout.is_mixed:
                raise ScheduleError(
                    f"a block has parameters of {' and '.join(sorted({*map(str, unit.layout.dtypes)}))}, which several ranks "
                    "cannot yet: give all trained parameters of a block one type"
                )
            if stage:
                unit.shard = collectives.shares(unit.elements)[collectives.rank]
        _check(states.schedule, states.units, collectives.ranks)

    @property
    def actions(self) -> dict[Kind, Callable[[int], None]]:
        """The action of each kind of collective."""
        return {
            Kind.GATHER_FORWARD: self.gather_for_pass,
            Kind.GATHER_BACKWARD: self.gather_for_pass,
            Kind.REDUCE_GRADIENTS: self.reduce_gradients,
            Kind.GATHER_UPDATED: self.gather_updated,
        }

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self._collectives.ranks

    def lost(self) -> str:
        """A sentence that says what is lost, now that a rank has failed; empty: nothing, or none has."""
        stage = max(unit.stage for unit in self._states.units)
        if not stage or not self._collectives.channel.has_failed:
            return ""
        what = "Optimizer states" if stage < 3 else "Parameters and optimizer states"
        return f"{what} of other ranks are NaN in what is given back: load a saved state"

    def largest_share(self, unit: UnitTensors) -> int:
        """The most elements of a unit that a rank has."""
        return len(self._collectives.shares(unit.elements)[0])

    # --- collectives of a step

    def gather_for_pass(self, i: int) -> None:
        """Gather the parameters of a unit for a pass."""
        self._collectives.exchange(self._states.memories.current.task)
        self.gather_parameters(i)

    def gather_parameters(self, i: int) -> None:
        """Gather the parameters of a unit from the shards of all ranks; a shard that was fetched for that is released."""
        unit = self._states.units[i]
        shard = unit.device.shard
        if shard is None:
            raise ScheduleError(f"{self._states.memories.current.task} gathers parameters whose part is not on the device")
        self._collectives.gather(shard, self._collectives.shares(unit.elements), self._states.put(i))
        unit.bind()
        if unit.host.parameters is not None and Kind.REFRESH not in self._states.kinds[i]:
            self._states.memories.current.alive.append(shard)
            unit.device.shard = None

    def gather_updated(self, i: int) -> None:
        """Gather the parameters that each rank has updated."""
        self._collectives.exchange(self._states.memories.current.task)
        unit = self._states.units[i]
        flat = unit.device.parameters
        if flat is None:
            raise ScheduleError(f"{self._states.memories.current.task} gathers parameters that are not on the device")
        mine = flat[unit.shard.start : unit.shard.stop]
        self._collectives.gather(mine, self._collectives.shares(unit.elements), flat)

    def reduce_gradients(self, i: int) -> None:
        """Add the gradients of all ranks. Without ZeRO each rank gets all sums, otherwise those of its shard."""
        states, unit = self._states, self._states.units[i]
        side, current = unit.device, states.memories.current
        gradients, reserved = side.unreduced.pop(current.micro_batch, (side.gradients, None))
        gradients = gradients or [None] * len(unit.parameters)
        owners = self._owners(gradients)
        side.iteration = current.iteration
        sums: list[Tensor | None]
        if unit.stage < 2:
            for place, some in enumerate(owners):
                if not some:
                    gradients[place] = None
                elif gradients[place] is None:  # within what is reserved for the gradients
                    gradients[place] = torch.empty(
                        unit.layout.shapes[place], dtype=unit.dtype, device=states.memories.torch_device
                    )
            side.gradients = sums = gradients
        if unit.stage:
            sums = self._shard_of_sums(unit, owners)
            if any(owners):
                self._collectives.reduce(gradients, unit.sizes, owners, sums)
            current.alive += [gradients, reserved]
            if unit.stage >= 2:
                sums = self._add(unit, sums, current.micro_batch if Kind.ACCUMULATE in states.kinds[i] else 0)
        elif any(owners):
            self._collectives.reduce(gradients, unit.sizes, owners, None)
        if current.micro_batch + 1 == states.micro_batches:
            self._check_sums(i, sums)

    def _owners(self, gradients: Sequence[Tensor | None]) -> list[list[int]]:
        """The ranks that have a gradient of each parameter. None if the step is skipped on any rank; it then is on all."""
        current, skipped = self._states.memories.current, self._states.gate.skipped
        facts = {"has": [gradient is not None for gradient in gradients], "skipped": skipped.get(current.iteration)}
        found = self._collectives.exchange(current.task, facts)
        if self._skips([one["skipped"] for one in found]):
            return [[] for _ in gradients]
        return [[rank for rank, one in enumerate(found) if one["has"][place]] for place in range(len(gradients))]

    def _skips(self, reasons: Sequence[str | None]) -> bool:
        """Whether any rank skips the step; if so, this rank does."""
        for rank, reason in enumerate(reasons):
            if reason is not None:
                mine = rank == self._collectives.rank
                self._states.gate.shut(self._states.memories.current.iteration, reason if mine else f"rank {rank}: {reason}")
                return True
        return False

    def _shard_of_sums(self, unit: UnitTensors, owners: Sequence[Sequence[int]]) -> list[Tensor | None]:
        """For each parameter, where the sums of this rank's elements go; None: there is no gradient."""
        parts = unit.parts
        if unit.stage == 1:
            return unit.gradients_of(parts)
        flat = self._states.memories.on_device(self.largest_share(unit), unit.dtype, "gradient_shard")
        views = torch.split(flat[: len(unit.shard)], [part.elements for part in parts])
        return [view if some else None for view, some in zip(views, owners, strict=True)]

    def _add(self, unit: UnitTensors, sums: list[Tensor | None], entry: int) -> list[Tensor | None]:
        """Add to what earlier micro-batches have left; return all sums so far."""
        reduced = unit.device.reduced
        for place, held in enumerate(reduced.get(entry, ())):
            found = sums[place]
            if held is not None:
                sums[place] = held if found is None else held.add_(found)
        reduced[entry] = sums
        return sums

    def end_backward(self, i: int) -> None:
        """Keep the gradients of a micro-batch until they are reduced, as the next backward may come before that."""
        unit, side = self._states.units[i], self._states.units[i].device
        if unit.stage >= 2:
            side.unreduced[self._states.memories.current.micro_batch] = side.gradients, side.reserved
            side.gradients, side.places, side.reserved = [], [], None

    def _check_sums(self, i: int, sums: Sequence[Tensor | None]) -> None:
        """Report sums that are not finite though each gradient is, as in 16 bit."""
        bad = first_not_finite([held for held in sums if held is not None])
        if bad is not None and self._states.not_finite is not None:
            self._states.not_finite(i, [place for place, held in enumerate(sums) if held is not None][bad])
        if self.agrees and self._states.units[i].stage:
            current, skipped = self._states.memories.current, self._states.gate.skipped
            found = self._collectives.exchange(f"sums of {current.task}", {"skipped": skipped.get(current.iteration)})
            self._skips([one["skipped"] for one in found])

    # --- norms

    def own_only(self, i: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Those of ``gradients`` that no other rank has a part of."""
        unit = self._states.units[i]
        if not unit.stage:
            return list(gradients)
        return [one if part.elements == part.size > 0 else None for part, one in zip(unit.parts, gradients, strict=True)]

    def measure_shared(self, i: int, gradients: Sequence[Tensor | None]) -> None:
        """Compute the norms of gradients that several ranks share. Each is gathered for that: norms of its parts would give
        other bits than in one process.
        """
        states, unit = self._states, self._states.units[i]
        if not unit.stage:
            return
        current, norms = states.memories.current, dict[int, float]()
        self._collectives.exchange(f"{current.task} of block {i}")
        for place, gradient in enumerate(gradients):
            shares = self._shares_of(unit, place)
            if gradient is None or sum(map(bool, shares)) < 2:
                continue
            whole = torch.empty(unit.sizes[place], dtype=unit.dtype, device=gradient.device)
            self._collectives.gather(gradient, shares, whole)
            (norm,) = states.clipping.norms([whole], 1.0 / states.updates_of(current.iteration).loss_scale)
            norms[place] = norm.item()
        states.clipping.note(current.iteration, i, norms, unit.dtype)

    def complete_norms(self, on_host: Collection[int]) -> None:
        """Let each rank have the norms of all gradients of the iteration.

        Args:
            on_host: the units whose norms are computed on the host.
        """
        states, collectives = self._states, self._collectives
        sharded = [i for i, unit in enumerate(states.units) if unit.stage and unit.elements]
        if not sharded:
            return
        current, clipping = states.memories.current, states.clipping
        norms = {i: {place: norm.item() for place, norm in clipping.known(current.iteration, i).items()} for i in sharded}
        facts = {"norms": norms, "skipped": states.gate.skipped.get(current.iteration)}
        found = collectives.exchange(current.task, facts)
        if self._skips([one["skipped"] for one in found]):
            return
        for i in sharded:
            all_norms = {int(place): norm for one in found for place, norm in one["norms"][str(i)].items()}
            clipping.note(current.iteration, i, all_norms, states.units[i].dtype)
            if i in on_host:
                self.measure_shared(i, states.complete_gradients(i))

    def _shares_of(self, unit: UnitTensors, place: int) -> list[range]:
        """The elements of a parameter that each rank has."""
        begin = sum(unit.sizes[:place])
        end = begin + unit.sizes[place]
        return [
            range(min(max(share.start, begin), end) - begin, min(max(share.stop, begin), end) - begin)
            for share in self._collectives.shares(unit.elements)
        ]

    # --- between steps

    def note_change(self, i: int, place: int, values: Tensor) -> None:
        """Note that the caller has written to a parameter, which all ranks must do alike."""
        written = hashlib.sha256(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        self._changes.append(f"parameter {place} of block {i}: {written.hexdigest()[:16]}")

    def changes(self) -> list[str]:
        """What the caller has changed since the last call."""
        found, self._changes = self._changes, []
        return found

    def meet(self, label: str) -> None:
        """Wait for all ranks to do the same."""
        self._collectives.exchange(label, stream=CALLERS)

    def whole(self, i: int, place: int, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather parts of a parameter's values or states, flat on the host. If a rank has failed, what was there is NaN."""
        unit, shares = self._states.units[i], self._shares_of(self._states.units[i], place)
        found = {name: torch.full((unit.sizes[place],), torch.nan, dtype=part.dtype) for name, part in mine.items()}
        try:
            self.meet(f"{' and '.join(mine)} of parameter {place} of block {i}")
            for name, part in mine.items():
                self._collectives.gather(part, shares, found[name])
        except RankError:
            if not self.gives_back:
                raise
            for name, part in mine.items():
                share = shares[self._collectives.rank]
                found[name][share.start : share.stop] = part
        return found


def _stages_of(schedule: Schedule, units: int) -> list[int]:
    """The ZeRO stage of each unit."""
    stages = [0] * units
    for task in schedule.tasks:
        unit = task.id.unit
        if task.id.kind in _GATHERS:
            stages[unit] = 3
        elif task.id.kind is Kind.GATHER_UPDATED:
            stages[unit] = max(stages[unit], 1)
        if any(buffer.id.value is Value.GRADIENT_SHARD for buffer in task.allocates):
            stages[unit] = max(stages[unit], 2)
    return stages


def _check(schedule: Schedule, units: Sequence[UnitTensors], ranks: int) -> None:
    """Check that several ranks can execute a schedule.

    Raises:
        ScheduleError: says why not, and what to do.
    """
    if not any(task.id.kind in COLLECTIVES for task in schedule.tasks):
        raise ScheduleError(
            f"the schedule is for one GPU, but there are {ranks} ranks: lower it for hardware with {ranks} GPUs"
        )
    if any(lane.name == COLLECTIVE and lane.discipline is not Discipline.FIFO for lane in schedule.lanes):
        raise ScheduleError("collectives by priority may come in another order on each rank: let their lane be fifo")
    if delayed_units(schedule):
        raise ScheduleError("the schedule delays updates, which several ranks cannot yet: choose a policy that does not")
    reduced = {task.id.unit for task in schedule.tasks if task.id.kind is Kind.REDUCE_GRADIENTS}
    for buffer in (*schedule.resident, *(buffer for task in schedule.tasks for buffer in task.allocates)):
        i, value = buffer.id.unit, buffer.id.value
        if value is Value.PARAMETER_SLOTS:
            raise ScheduleError("the schedule has slots for parameters, which several ranks cannot yet: choose another policy")
        if buffer.memory not in _NEAR and i is not None and units[i].stage:
            raise ScheduleError(
                f"the {value} of block {i} rest in {buffer.memory}, which several ranks cannot yet: let them rest "
                "on the GPU or on the host"
            )
        if i is None or value not in (Value.GRADIENT_SHARD, Value.PARAMETER_SHARD):
            continue
        unit = units[i]
        expected = -(-unit.elements // ranks) * unit.dtype.itemsize
        if buffer.size_bytes != expected:
            raise ScheduleError(
                f"the {value.replace('_', ' ')} of block {i} has {buffer.size_bytes} bytes in the schedule, but with {ranks} "
                f"ranks it has {expected}: lower it for this model and for hardware with {ranks} GPUs"
            )
    for i, unit in enumerate(units):
        if unit.elements and i not in reduced:
            raise ScheduleError(f"the schedule reduces no gradients of block {i}: lower it for hardware with {ranks} GPUs")
