"""Movement of each unit's parameters: fetched, and gathered from all GPUs, for a use; released after it; copied home on change.

What is fetched for a recomputation stays until the unit's backward, like the activations that the recomputation makes. A unit
that is recomputed several times has its parameters on the GPU from the first recomputation on: one fetch per direction and
iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autohete.lowering import durations
from autohete.lowering.builder import Builder, on_gpu
from autohete.lowering.copies import Copies
from autohete.lowering.footprint import passing_parameters
from autohete.lowering.shards import Shards
from autohete.plan import Plan
from autohete.profile import Profile
from autohete.schedule import COLLECTIVE, HOST_MEMORY, BufferId, Kind, TaskId, Value


class Stay(NamedTuple):
    """A stay of fetched parameters on the GPU.

    Args:
        fetch: the task that brought them.
        user: the pass that it brought them for.
        buffer: their buffer.
        back: 1 if the fetch was in the previous iteration.
        end: the task that frees them. None: they are still there.
    """

    fetch: TaskId
    user: TaskId
    buffer: BufferId
    back: int = 0
    end: TaskId | None = None


class Parameters:
    """Adds the copies of parameters to a builder.

    Args:
        builder: collects the tasks.
        profile: their durations.
        plan: the routes.
        shards: what several GPUs shard.
        copies: adds the copies.
        mine: the units of the rank, lowest first.

    Attributes:
        stays: the stays of fetched parameters that have been freed.
    """

    def __init__(
        self, builder: Builder, profile: Profile, plan: Plan, shards: Shards, copies: Copies, mine: Sequence[int]
    ) -> None:
        self._builder, self._profile, self._plan, self._shards, self._copies = builder, profile, plan, shards, copies
        self.stays: list[Stay] = []
        #: Units whose parameters stay between forward and backward, or backward and forward.
        self._one_use = {
            unit
            for unit, one in enumerate(plan.units)
            if one.parameters.stays_after_forward or one.parameters.stays_after_backward
        }
        #: The task that last released the parameters of a unit.
        self._last_end: dict[int, TaskId] = {}
        #: The last fetch of what came through the host.
        self._last_fetch: dict[int, TaskId] = {}
        self._last = last = builder.passes[-1].micro_batch
        #: Stays of units that leave, while they are on the GPU.
        self._here: dict[int, Stay] = {}
        self._mine = mine
        for unit in mine:
            one = plan.units[unit]
            if one.parameters.leaves and one.parameters.stays_after_backward:
                fetch, user = TaskId(Kind.PREFETCH_BACKWARD, unit, last), builder.first_backward(unit, last)
                self._here[unit] = Stay(fetch, user, self._buffer(user), back=1)

    def bring(self, user: TaskId) -> None:
        """Fetch, or gather from all GPUs, the parameters that the pass ``user`` needs, if they are not on the GPU."""
        unit = user.unit
        if not self._shards.comes_and_goes(unit) or unit in self._here:
            return
        buffer = self._buffer(user)
        fetch = self._fetch(user, buffer) if self._plan.units[unit].parameters.leaves else None
        if self._shards.stage(unit) == 3:
            fetch = self._gather(user, buffer, fetch)
        assert fetch is not None, "what comes and goes leaves the GPU or is shared"
        if not self._plan.units[unit].parameters.stays_for_batches:  # which come while another stage still uses them
            self._builder.after(fetch, self._last_end.get(unit))  # never two copies at a time
        self._here[unit] = Stay(fetch, user, buffer)

    def _ahead(self, user: TaskId) -> tuple[int, TaskId | None]:
        """How early the parameters may be fetched, and after which pass at the earliest."""
        route = self._plan.units[user.unit].parameters
        is_forward = user.kind is Kind.FORWARD
        ahead = route.ahead if is_forward else route.ahead_of_backward
        if route.stays_for_batches:
            return self._builder.passes_since(user, ahead), None
        return ahead, None if is_forward else TaskId(Kind.FORWARD, user.unit, user.micro_batch)

    def _fetch(self, user: TaskId, buffer: BufferId) -> TaskId:
        """Fetch the parameters from the host: all of them, or this GPU's part."""
        b, unit, for_forward = self._builder, user.unit, user.kind is Kind.FORWARD
        kind = Kind.PREFETCH_FORWARD if for_forward else Kind.PREFETCH_BACKWARD
        size, priority = self._shards.kept_bytes(unit), unit if for_forward else b.backward_priority(unit)
        read = self._read(user, priority)
        fetch = self._copies.add(kind, unit, priority, user.micro_batch, self._time(user))
        b.read(fetch, Value.PARAMETERS, unit, self._source(fetch))
        if read is not None:
            b.free(fetch, passing_parameters(self._profile, unit, read.kind, user.micro_batch))
            self._last_fetch[unit] = fetch
        if self._shards.stage(unit) == 3:
            b.make(fetch, self._part_of(fetch), size)
        else:
            b.make(fetch, buffer, size if self._plan.slots is None else 0)
        b.beside(fetch, user, *self._ahead(user))
        if self._plan.dealt is not None and not self._shards.is_frozen(unit):
            self._after_update_elsewhere(fetch)
        return fetch

    def _after_update_elsewhere(self, fetch: TaskId) -> None:
        """Let a fetch for forward wait for an update of another rank, which has the unit's backward."""
        unit = fetch.unit
        updated_on = self._plan.backward_ranks()[unit]
        if fetch.kind is Kind.PREFETCH_FORWARD and updated_on != self._plan.forward_ranks()[unit]:
            self._builder.waits_elsewhere.append((fetch, TaskId(Kind.CPU_UPDATE, unit), updated_on, 1))

    def _read(self, user: TaskId, priority: int) -> TaskId | None:
        """Read the parameters to the host if they rest behind it: one pass earlier than their fetch may begin."""
        unit, kind = user.unit, Kind.READ_FORWARD if user.kind is Kind.FORWARD else Kind.READ_BACKWARD
        move = self._copies.find(kind, unit, user.micro_batch)
        if move is None:
            return None
        b, read = self._builder, self._copies.add(kind, unit, priority, user.micro_batch)
        b.read(read, Value.PARAMETERS, unit, move.source)
        b.make(read, passing_parameters(self._profile, unit, kind, user.micro_batch), move.size_bytes)
        ahead, source = self._ahead(user)
        b.beside(read, user, ahead + bool(ahead), source)
        if unit in self._last_fetch:  # never two copies at a time
            b.after(read, self._last_fetch[unit])
        else:
            last = self._builder.passes[-1].micro_batch
            kinds = [kind for kind in (Kind.PREFETCH_BACKWARD, Kind.PREFETCH_FORWARD) if self._copies.find(kind, unit, last)]
            b.after(read, TaskId(kinds[0], unit, last), back=1)
        return read

    def _source(self, copy: TaskId) -> str:
        move = self._copies.find(copy.kind, copy.unit, copy.micro_batch, copy.again)
        assert move is not None, "what is copied moves"
        return move.source

    def _time(self, user: TaskId) -> int:
        """Index of a fetch among those of a unit that is fetched for each of its recomputations."""
        comes_again = user.kind is Kind.RECOMPUTE and self._plan.units[user.unit].parameters.comes_again
        return user.again if comes_again else 0

    def _gather(self, user: TaskId, buffer: BufferId, fetch: TaskId | None) -> TaskId:
        """Gather the parameters from all GPUs, after ``fetch`` has brought each part, or from parts that rest on the GPUs."""
        b, unit, for_forward = self._builder, user.unit, user.kind is Kind.FORWARD
        kind = Kind.GATHER_FORWARD if for_forward else Kind.GATHER_BACKWARD
        size = self._profile.parameter_bytes(unit)
        priority = unit if for_forward else b.backward_priority(unit)
        gather = b.task(kind, unit, COLLECTIVE, durations.collective(unit, size), priority, user.micro_batch)
        if copies := self._plan.flat_buffers.gather_copies:
            b.prolong(user, durations.gpu_copies(size, copies))
        b.read(gather, Value.PARAMETER_SHARD, unit)
        b.make(gather, buffer, size if self._plan.slots is None else 0)
        b.issue_beside(gather, user, *self._ahead(user))  # ahead of reductions that it need not wait for
        if fetch is None:
            b.beside(gather, user, *self._ahead(user))
        else:
            b.free(gather, self._part_of(fetch))
        return gather

    def after_forward(self, forward: TaskId) -> None:
        """Copy home if they move; release if they do not stay."""
        unit = forward.unit
        if self._copies.find(Kind.WRITE_BACK_FORWARD, unit, forward.micro_batch):
            self._builder.after(self._copy_home(Kind.WRITE_BACK_FORWARD, unit, 0, forward.micro_batch), forward)
        route = self._plan.units[unit].parameters
        waits = route.stays_for_batches and forward.micro_batch < self._last
        if self._shards.comes_and_goes(unit) and not (route.stays_after_forward or waits):
            self._release(unit)

    def after_recompute(self, recompute: TaskId) -> None:
        """Release if they come again for a later recomputation."""
        unit = self._plan.units[recompute.unit]
        if unit.parameters.comes_again and recompute.again < len(unit.again):
            self._release(recompute.unit)

    def after_update(self, unit: int) -> None:
        """Copy home if the GPU has changed them; release if they do not stay."""
        if self._copies.find(Kind.WRITE_BACK_BACKWARD, unit):
            self._copy_home(Kind.WRITE_BACK_BACKWARD, unit, unit)
        if home := self._copies.find(Kind.WRITE_PARAMETERS, unit):
            b, write = self._builder, self._copies.add(Kind.WRITE_PARAMETERS, unit, unit)
            b.read(write, Value.PARAMETERS, unit, HOST_MEMORY)
            b.write(write, Value.PARAMETERS, unit, home.target)
            b.free(write, passing_parameters(self._profile, unit, Kind.WRITE_PARAMETERS))
        self.after_backward(unit)

    def between(self, unit: int) -> None:
        """Release after the backward of a micro-batch other than the last, if they do not stay."""
        if not self._plan.units[unit].parameters.stays_for_batches:
            self.after_backward(unit)

    def after_backward(self, unit: int) -> None:
        """Release if they do not stay."""
        if self._shards.comes_and_goes(unit) and not self._plan.units[unit].parameters.stays_after_backward:
            self._release(unit)

    def refresh_all(self) -> None:
        """Copy what the CPU has updated to the copies that stay on the GPU; others come with their next fetch. Then gather the
        parts that each GPU has updated.
        """
        b = self._builder
        units = reversed(self._mine)
        found = [(unit, move) for unit in units if (move := self._copies.find(Kind.REFRESH, unit))]
        refreshes = [(self._refresh(unit), move.size_bytes) for unit, move in found]
        staged = [refresh for refresh, _ in refreshes if self._plan.units[refresh.unit].refresh.staged]
        if staged:
            buffer = on_gpu(Value.PARAMETERS, None, use=Kind.REFRESH)
            b.allocate(staged[0], buffer, sum(size for refresh, size in refreshes if refresh in staged))
            b.free(staged[-1], buffer)
            for refresh in staged[:-1]:
                b.after(staged[-1], refresh)
        for unit in reversed(self._mine):
            if self._shards.stage(unit) in (1, 2) and not self._shards.is_frozen(unit):
                self._gather_updated(unit)

    def _gather_updated(self, unit: int) -> None:
        size = self._profile.units[unit].trained_parameters * self._profile.element_bytes
        gather = self._builder.task(Kind.GATHER_UPDATED, unit, COLLECTIVE, durations.collective(unit, size), unit)
        self._builder.write(gather, Value.PARAMETERS, unit)

    def _refresh(self, unit: int) -> TaskId:
        b, refresh = self._builder, self._copies.add(Kind.REFRESH, unit, unit)
        b.read(refresh, Value.PARAMETERS, unit, HOST_MEMORY)
        b.write(refresh, self._shards.parameters(unit), unit)
        if self._copies.find(Kind.WRITE_PARAMETERS, unit):  # which frees what the refresh reads
            b.after(TaskId(Kind.WRITE_PARAMETERS, unit), refresh)
        return refresh

    def _copy_home(self, kind: Kind, unit: int, priority: int, micro_batch: int = 0) -> TaskId:
        b, copy = self._builder, self._copies.add(kind, unit, priority, micro_batch)
        move, through = self._copies.find(kind, unit, micro_batch), self._copies.find(Kind.WRITE_PARAMETERS, unit)
        assert move is not None, "what is copied moves"
        b.read(copy, Value.PARAMETERS, unit)
        if through is None:
            b.write(copy, Value.PARAMETERS, unit, move.target)
        else:
            b.make(copy, passing_parameters(self._profile, unit, Kind.WRITE_PARAMETERS), through.size_bytes)
        return copy

    def _release(self, unit: int) -> None:
        """Free the parameters once their last user has ended."""
        b, stay = self._builder, self._here.pop(unit)
        end = b.last_access(stay.buffer)
        b.free(end, stay.buffer, stay.back)
        self._last_end[unit] = end
        if self._plan.units[unit].parameters.stays_for_batches:  # never those of two iterations either
            b.after(stay.fetch, end, back=1)
        self.stays.append(Stay(stay.fetch, stay.user, stay.buffer, stay.back, end))

    def _buffer(self, user: TaskId) -> BufferId:
        """The buffer for the pass ``user``. The use distinguishes what is fetched twice in a micro-batch, and the index what is
        fetched for several recomputations.
        """
        unit = user.unit
        if unit in self._one_use:
            return on_gpu(Value.PARAMETERS, unit, user.micro_batch)
        use = Kind.FORWARD if user.kind is Kind.FORWARD else Kind.BACKWARD
        return on_gpu(Value.PARAMETERS, unit, user.micro_batch, use, self._time(user))

    def _part_of(self, fetch: TaskId) -> BufferId:
        """The buffer of this GPU's part of the parameters, between the host and the gather."""
        use = Kind.FORWARD if fetch.kind is Kind.PREFETCH_FORWARD else Kind.BACKWARD
        return on_gpu(Value.PARAMETER_SHARD, fetch.unit, fetch.micro_batch, use)
