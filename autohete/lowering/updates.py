"""Updates of the units, and the movement of gradients to them: reduced over the GPUs, and copied to the host."""

from __future__ import annotations

from collections.abc import Sequence

from autohete.lowering import durations
from autohete.lowering.builder import Builder, on_gpu, task_id
from autohete.lowering.clipping import ClippingTasks, scaled_bytes
from autohete.lowering.copies import Copies, update_lane
from autohete.lowering.durations import Duration
from autohete.lowering.footprint import passing_parameters, pinned_memory
from autohete.lowering.shards import Shards
from autohete.lowering.tied import copied_parameters
from autohete.plan import Plan, Processor, UnitPlan
from autohete.plan.moves import Move
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.profile import Profile
from autohete.schedule import (
    COLLECTIVE,
    CPU,
    GPU,
    HOST_MEMORY,
    SEND,
    BufferId,
    Kind,
    TaskId,
    Value,
)
from autohete.schedule.parts import part_ranges


class Updates:
    """Adds the updates of ``plan``, and copies of gradients, to a builder.

    Args:
        builder: collects the tasks.
        profile: their durations.
        plan: the processors that update.
        shards: what several GPUs shard.
        clipping: adds norms, and the scaling of gradients.
        copies: adds the copies.
        mine: the units of the rank, lowest first.
    """

    def __init__(
        self,
        builder: Builder,
        profile: Profile,
        plan: Plan,
        shards: Shards,
        clipping: ClippingTasks,
        copies: Copies,
        mine: Sequence[int],
    ) -> None:
        self._builder, self._profile, self._plan, self._shards = builder, profile, plan, shards
        self._clipping, self._copies, self._mine = clipping, copies, mine
        self._last = builder.passes[-1].micro_batch
        #: Whether the host has a second copy of parameters, and of gradients: see ``Plan.delayed``.
        self._has_two_parameters = plan.delayed and plan.dealt is not None
        #: Whether a delayed update takes sums of micro-batches that the host adds up.
        self._sums_delayed = plan.delayed and plan.dealt is None and self._last > 0
        self._has_two_gradients = self._has_two_parameters or self._sums_delayed
        #: Elements of a matrix that two ranks train, and these ranks.
        self._copied = copied_parameters(profile, plan)
        self._outer = tuple((unit.rank or 0) * shards.gpus for unit in (plan.units[0], plan.units[-1]))
        units = [(i, plan.units[i]) for i in reversed(mine)]
        if clipping.clips and plan.delayed:  # only delayed updates run before the last backward
            units.sort(key=lambda unit: unit[1].update.on is Processor.GPU)
        #: Parts of units whose states are fetched to the GPU, and those whose states come to the host, in update order.
        self._fetched = [part for i, unit in units if unit.fetches_states for part in self._parts(i)]
        self._read = [part for i, _ in units if copies.find(Kind.READ_STATES, i) for part in self._parts(i)]

    def after_backward(self, backward: TaskId) -> None:
        """Send complete gradients to where they are used, and compute their norm on the way.

        A delayed update uses the gradients of the previous iteration.
        """
        unit, last = backward.unit, backward.micro_batch
        if self._shards.is_frozen(unit):
            return
        self._reduce_gradients(unit, last)
        if self.waits_for_other_rank(unit):
            self._sum_copies(unit)
        leaves, norm_on = self._plan.units[unit].update.on is not Processor.GPU, self._clipping.norm_on(unit)
        if leaves and self._plan.delayed and not self._sums_delayed:
            self._cpu_update(unit)
        if norm_on is Processor.GPU:
            self._clipping.norm(unit)
        if leaves:
            self._offload_gradients(unit, last)
        if norm_on is Processor.CPU:
            self._clipping.norm(unit)

    def waits_for_other_rank(self, unit: int) -> bool:
        """Whether the unit's gradients are complete only once another rank has made its last backward."""
        return self._copied > 0 and unit in (0, len(self._plan.units) - 1)

    def _sum_copies(self, unit: int) -> None:
        """Sum the gradients of the matrix that embedding and head have on two ranks."""
        b, size = self._builder, self._copied * self._shards.gradient_bytes
        task = b.add(TaskId(Kind.SUM_TIED_GRADIENTS, 0), SEND, durations.all_reduce(size, self._outer))
        if self._plan.gradients_in_parameters(unit):
            b.read(task, Value.PARAMETERS, unit)
        b.write(task, self._shards.gradients(unit), unit)

    def update(self, unit: int) -> None:
        """Add the update with the gradients of this iteration."""
        if self._shards.updates_on(unit, Processor.GPU):
            self._gpu_update(unit)
        if self._shards.updates_on(unit, Processor.CPU) and not self._plan.delayed:
            self._cpu_update(unit)
        if self._shards.updates_on(unit, Processor.PLACE):
            self._place_update(unit)

    def between(self, backward: TaskId) -> None:
        """Handle the gradients of a micro-batch other than the last."""
        unit, micro_batch = backward.unit, backward.micro_batch
        if self._shards.is_frozen(unit):
            return
        if self._sums_delayed and not micro_batch:  # it takes the sums of the iteration before
            self._cpu_update(unit)
        if self._plan.units[unit].accumulates_on_host or self._shards.reduces_each(unit):
            self._reduce_gradients(unit, micro_batch)
        elif self._plan.flat_buffers.adds_whole:
            self._put_together(unit, micro_batch)
        if self._copies.find(Kind.OFFLOAD_GRADIENTS, unit, micro_batch):
            self._offload_gradients(unit, micro_batch)

    def bring_sums(self, backward: TaskId) -> None:
        """Fetch the sums of earlier micro-batches, to which ``backward`` adds, if they rest on the host."""
        unit, micro_batch = backward.unit, backward.micro_batch
        move = None if self._shards.is_frozen(unit) else self._copies.find(Kind.FETCH_GRADIENTS, unit, micro_batch)
        if move is None:
            return
        b = self._builder
        fetch = self._copies.add(Kind.FETCH_GRADIENTS, unit, b.backward_priority(unit), micro_batch)
        b.read(fetch, Value.GRADIENTS, unit, HOST_MEMORY)
        b.make(fetch, sums_of(self._plan.units[unit], unit, micro_batch), move.size_bytes)
        b.beside(fetch, backward, self._plan.units[unit].gradients.ahead)

    def _reduce_gradients(self, unit: int, micro_batch: int) -> None:
        """Reduce the gradients over the GPUs: each gets the full sums, or those of its part."""
        b, stage = self._builder, self._shards.stage(unit)
        if self._shards.gpus == 1:
            return
        element = self._shards.gradient_bytes
        size = self._profile.gradient_elements(unit) * element
        self._put_together(unit, micro_batch)
        rounds = 2 if not stage or self._plan.flat_buffers.reduces_all else 1
        # A part of backward: no gather for a later backward overtakes it, which would keep the gradients on the GPU.
        priority, seconds = b.backward_priority(unit), durations.collective(unit, size, rounds)
        reduce = b.task(Kind.REDUCE_GRADIENTS, unit, COLLECTIVE, seconds, priority, micro_batch)
        if stage < 2:
            if self._plan.gradients_in_parameters(unit):
                b.read(reduce, Value.PARAMETERS, unit)
            b.write(reduce, Value.GRADIENTS, unit)
            return
        b.read(reduce, Value.GRADIENTS, unit)
        on_host = self._plan.units[unit].accumulates_on_host
        first = micro_batch if on_host or self._shards.reduces_each(unit) else 0  # whose buffer the sums are
        b.free(reduce, on_gpu(Value.GRADIENTS, unit, first))
        if first and not on_host:
            b.write(reduce, Value.GRADIENT_SHARD, unit)
        else:
            b.make(reduce, on_gpu(Value.GRADIENT_SHARD, unit, first), self._shards.reduced(unit) * element)

    def _put_together(self, unit: int, micro_batch: int) -> None:
        """Let backward copy the gradients to the flat buffer of a reduction."""
        copies = self._plan.flat_buffers.reduce_copies if self._shards.gpus > 1 else 0
        if copies:
            size = self._profile.gradient_elements(unit) * self._profile.element_bytes
            self._builder.prolong(task_id(Kind.BACKWARD, unit, micro_batch), durations.gpu_copies(size, copies))

    def _gpu_update(self, unit: int) -> None:
        count = self._shards.updated_on(unit, Processor.GPU)
        whole, parts = self._shards.share(unit, Processor.GPU), self._parts(unit)
        scaled = scaled_bytes(self._profile, self._plan, unit, Processor.GPU)
        for (_, part), elements in zip(parts, part_ranges(count, self._plan.units[unit].states.parts), strict=True):
            share = whole if len(parts) == 1 else whole * len(elements) / count
            self._update_part(unit, part, durations.gpu_update(unit, scaled, share), is_last=part == len(parts) - 1)

    def _parts(self, unit: int) -> list[tuple[int, int]]:
        """The unit's index with that of each part of its states."""
        plan = self._plan.units[unit]
        side = Processor.CPU if plan.update.on is Processor.CPU and not plan.update.share else Processor.GPU
        return [(unit, i) for i, _ in enumerate(part_ranges(self._shards.updated_on(unit, side), plan.states.parts))]

    def _update_part(self, unit: int, part: int, seconds: Duration, *, is_last: bool) -> None:
        """Update a part of the unit on the GPU, between the copies of its states."""
        b = self._builder
        self._bring_states(unit, part)
        update = b.add(task_id(Kind.GPU_UPDATE, unit, again=part), GPU, seconds)
        self._takes_gradients(update, is_last=is_last)
        self._clipping.scale(update)
        if not self._plan.units[unit].parameters_with_states:
            b.write(update, self._shards.parameters(unit), unit)
        # A partial update needs no less workspace if the kernel works in pieces.
        workspace = self._profile.units[unit].gpu_update_workspace_bytes + self._plan.footprint.gpu_update_bytes
        b.workspace(update, workspace + self._foreach_bytes(unit))
        if self._plan.units[unit].fetches_states:
            b.write(update, Value.OPTIMIZER_STATES, unit)
        self._bring_states_home(unit, part)

    def _foreach_bytes(self, unit: int) -> int:
        """What foreach kernels hold while the unit is updated: after backward, one call updates all that the GPU updates."""
        together = self._mine if GpuUpdatesAfterBackward() in self._plan.rules else (unit,)
        elements = sum(self._shards.updated_on(each, Processor.GPU) for each in together)
        return elements * self._profile.workload.foreach_bytes

    def _bring_states(self, unit: int, part: int = 0) -> None:
        """Bring the states from where they rest to where they are updated, in one hop or two."""
        b = self._builder
        if home := self._copies.find(Kind.WRITE_STATES, unit, part=part):
            read = self._copies.add(Kind.READ_STATES, unit, unit, part=part)
            b.read(read, Value.OPTIMIZER_STATES, unit, home.target)
            b.make(read, self._states_on_host(unit, part), home.size_bytes)
            if written := self._copies.find(Kind.WRITE_GRADIENTS, unit, self._last):
                b.read(read, Value.GRADIENTS, unit, written.target)
                b.make(read, self._gradients_on_host(unit), written.size_bytes)
            self._in_turn(read, Kind.WRITE_STATES, self._read)
        if up := self._copies.find(Kind.FETCH_STATES, unit, part=part):
            fetch = self._copies.add(Kind.FETCH_STATES, unit, unit, part=part)
            b.read(fetch, Value.OPTIMIZER_STATES, unit, up.source)
            if self._plan.units[unit].parameters_with_states:
                b.read(fetch, Value.PARAMETERS, unit, up.source)
            b.make(fetch, on_gpu(Value.OPTIMIZER_STATES, unit, again=part), up.size_bytes)
            self._in_turn(fetch, Kind.WRITE_BACK_STATES, self._fetched)

    def _in_turn(self, fetch: TaskId, leave: Kind, parts: list[tuple[int, int]]) -> None:
        """Start the fetch no earlier than the unit's gradients, and after the states whose place it takes have left."""
        ahead = self._plan.units[fetch.unit].states.ahead
        self._builder.beside(fetch, TaskId(Kind.BACKWARD, fetch.unit, self._last), 1)
        place = parts.index((fetch.unit, fetch.again)) - 1 - ahead
        if len(parts) > ahead + 1:
            left, part = parts[place]
            self._builder.after(fetch, TaskId(leave, left, again=part), back=int(place < 0))

    def _bring_states_home(self, unit: int, part: int = 0) -> None:
        b = self._builder
        if down := self._copies.find(Kind.WRITE_BACK_STATES, unit, part=part):
            back = self._copies.add(Kind.WRITE_BACK_STATES, unit, unit, part=part)
            b.read(back, Value.OPTIMIZER_STATES, unit)
            b.write(back, Value.OPTIMIZER_STATES, unit, down.target)
            if self._plan.units[unit].parameters_with_states:
                b.write(back, Value.PARAMETERS, unit, down.target)
            b.free(back, on_gpu(Value.OPTIMIZER_STATES, unit, again=part))
        if home := self._copies.find(Kind.WRITE_STATES, unit, part=part):
            write = self._copies.add(Kind.WRITE_STATES, unit, unit, part=part)
            b.read(write, Value.OPTIMIZER_STATES, unit, HOST_MEMORY)
            b.write(write, Value.OPTIMIZER_STATES, unit, home.target)
            b.free(write, self._states_on_host(unit, part))

    def _offload_gradients(self, unit: int, micro_batch: int) -> None:
        """Copy gradients to their place on the host. Those of later micro-batches go next to it, and the CPU adds them."""
        b, plan = self._builder, self._plan.units[unit]
        copy = self._copies.add(Kind.OFFLOAD_GRADIENTS, unit, unit, micro_batch)
        # With a shared update, the part on the GPU is the last reader.
        self._takes_gradients(copy, is_last=plan.sums_leave or not self._shards.updates_on(unit, Processor.GPU))
        if written := self._copies.find(Kind.WRITE_GRADIENTS, unit, micro_batch):
            self._write_gradients(copy, written)
            return
        if not (micro_batch and plan.accumulates_on_host):
            if self._has_two_gradients:
                b.renew(copy, Value.GRADIENTS, unit, HOST_MEMORY)
                b.after(copy, TaskId(Kind.CPU_UPDATE, unit), back=1)
            else:
                b.write(copy, Value.GRADIENTS, unit, HOST_MEMORY)
            return
        arrived, added = self._arrived(unit, micro_batch), self._copies.find(Kind.OFFLOAD_GRADIENTS, unit, micro_batch)
        summed = self._copies.find(Kind.OFFLOAD_GRADIENTS, unit)
        assert added is not None, "what was copied moves"
        assert summed is not None, "the first of several micro-batches is copied in the format of the sums"
        b.make(copy, arrived, added.size_bytes)
        # Adding reads two values and writes one. Where sums are copied back to the GPU, it has added them already.
        seconds = durations.cpu_kernel(3 * summed.size_bytes if plan.cpu_adds else 0)
        add = b.task(Kind.ACCUMULATE, unit, CPU, seconds, unit, micro_batch)
        b.read(add, Value.ARRIVED_GRADIENTS, unit, HOST_MEMORY)
        b.write(add, Value.GRADIENTS, unit, HOST_MEMORY)
        b.free(add, arrived)

    def _write_gradients(self, copy: TaskId, written: Move) -> None:
        b, unit = self._builder, copy.unit
        arrived = self._arrived(unit, copy.micro_batch)
        b.make(copy, arrived, written.size_bytes)
        write = self._copies.add(Kind.WRITE_GRADIENTS, unit, unit, copy.micro_batch)
        b.read(write, Value.ARRIVED_GRADIENTS, unit, HOST_MEMORY)
        b.write(write, Value.GRADIENTS, unit, written.target)
        b.free(write, arrived)

    def _cpu_update(self, unit: int) -> None:
        b, plan, share = self._builder, self._plan, self._shards.share(unit, Processor.CPU)
        self._bring_states(unit)
        traffic = plan.update_bytes, plan.elementwise_bytes, scaled_bytes(self._profile, plan, unit, Processor.CPU)
        seconds = durations.cpu_update(unit, *traffic, share)
        update = b.task(Kind.CPU_UPDATE, unit, CPU, seconds, unit)
        b.read(update, Value.GRADIENTS, unit, HOST_MEMORY)
        self._clipping.scale(update)
        if home := self._copies.find(Kind.WRITE_PARAMETERS, unit):
            b.make(update, passing_parameters(self._profile, unit, Kind.WRITE_PARAMETERS), home.size_bytes)
        elif self._has_two_parameters:
            b.renew(update, Value.PARAMETERS, unit, HOST_MEMORY)
        else:
            b.write(update, Value.PARAMETERS, unit, HOST_MEMORY)
        if plan.units[unit].states.far:
            b.write(update, Value.OPTIMIZER_STATES, unit, HOST_MEMORY)
        if plan.units[unit].gradients.far:
            b.free(update, self._gradients_on_host(unit))
        self._bring_states_home(unit)

    def _place_update(self, unit: int) -> None:
        """Update in the place where states and gradients rest; the parameters leave it."""
        b, plan, sizes = self._builder, self._plan.units[unit], self._shards.sizes(unit)
        place, written = plan.states.home, self._copies.find(Kind.WRITE_GRADIENTS, unit, self._last)
        assert written is not None, "a place updates with gradients that rest in it"
        seconds = durations.place_update(place, 2 * sizes.cpu_state_bytes + written.size_bytes)
        update = b.task(Kind.PLACE_UPDATE, unit, update_lane(place), seconds, unit)
        b.read(update, Value.GRADIENTS, unit, place)
        self._clipping.scale(update)
        b.write(update, Value.OPTIMIZER_STATES, unit, place)
        read = self._copies.add(Kind.READ_UPDATED, unit, unit)
        b.read(read, Value.OPTIMIZER_STATES, unit, place)
        b.write(read, Value.PARAMETERS, unit, HOST_MEMORY)

    def _takes_gradients(self, task: TaskId, *, is_last: bool) -> None:
        """``task`` reads the unit's gradients on the GPU, possibly in the memory of its parameters; the last reader frees
        them.
        """
        b, unit = self._builder, self._plan.units[task.unit]
        value = self._shards.gradients(task.unit)
        b.read(task, value, task.unit)
        if self._plan.gradients_in_parameters(task.unit):
            b.read(task, Value.PARAMETERS, task.unit)
        if not is_last or unit.gradients_replace_parameters:
            return
        if unit.sums_leave and self._last:
            micro_batch = self._last if task.kind is Kind.GPU_UPDATE else task.micro_batch
            b.free(task, sums_of(unit, task.unit, micro_batch))
        else:
            b.free(task, on_gpu(value, task.unit, task.micro_batch if unit.accumulates_on_host else 0))

    def _states_on_host(self, unit: int, part: int) -> BufferId:
        return BufferId(Value.OPTIMIZER_STATES, pinned_memory(self._profile), unit, again=part)

    def _gradients_on_host(self, unit: int) -> BufferId:
        """The gradients that were read together with the states."""
        return BufferId(Value.GRADIENTS, pinned_memory(self._profile), unit)

    def _arrived(self, unit: int, micro_batch: int) -> BufferId:
        plan = self._plan.units[unit]
        pinned = plan.gradients.carried.pinned or (plan.sums_pinned and micro_batch < self._last)
        memory = pinned_memory(self._profile) if pinned else HOST_MEMORY
        return BufferId(Value.ARRIVED_GRADIENTS, memory, unit, None, micro_batch)


def sums_of(plan: UnitPlan, unit: int, micro_batch: int) -> BufferId:
    """The buffer of the unit's gradients on the GPU, summed up to this micro-batch."""
    if not plan.sums_leave or not micro_batch:
        return on_gpu(Value.GRADIENTS, unit)
    return on_gpu(Value.GRADIENTS, unit, micro_batch, Kind.BACKWARD)
