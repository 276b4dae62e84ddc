"""From a plan to tasks: :func:`lower` is the only maker of tasks from plans.

Read it as an iteration passes: the GPU's passes in order, then for each block what is fetched before a pass, what is
released after it, where its gradient goes, who updates it and how the new parameters come back. What separates the
published systems are a few waits; each is one clearly named flag of the plan and one line here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from autohete.errors import InputError
from autohete.hardware import Hardware
from autohete.plan import Activations, BlockPlan, Placement, Plan, Processor
from autohete.profile import Profile
from autohete.schedule import (
    CPU,
    D2H,
    GPU,
    GPU_MEMORY,
    H2D,
    HOST_MEMORY,
    KIND_MEANING,
    Buffer,
    BufferId,
    Discipline,
    Edge,
    Flow,
    Free,
    Kind,
    Lane,
    Memory,
    Schedule,
    SharedResource,
    Task,
    TaskId,
    Value,
)
from autohete.units import rounded_when_pinned
from autohete.workload import Precision

#: A year and a half. Some thousands of such tasks in a row still fit 64-bit nanoseconds.
_LONGEST_TASK_SECONDS = 5e7


def lower(profile: Profile, plan: Plan) -> Schedule:
    """The schedule of ``plan`` for the workload and hardware of ``profile``.

    Raises:
        InputError: the plan is for another number of blocks, or its gradients replace parameters that are still needed.
    """
    if len(plan.blocks) != len(profile.blocks):
        raise InputError(f"the plan has {len(plan.blocks)} blocks, the profile {len(profile.blocks)}: plan for this workload")
    fp32 = profile.workload.precision is Precision.FP32
    if plan.gradients_replace_parameters and fp32 and plan.offloaded_optimizer_blocks < len(plan.blocks):
        raise InputError(
            "gradients cannot replace fp32 parameters that the GPU updates: they are their own master weights; update on the "
            "CPU, or train in 16 bit"
        )
    return _Lowering(profile, plan).schedule()


def least_parameter_slots(profile: Profile, plan: Plan) -> int:
    """The fewest ``parameter_slots`` with which ``plan`` can be lowered; 0 if no block's parameters leave."""
    lowering = _Lowering(profile, replace(plan, parameter_slots=None))
    lowering.schedule()
    lives = _Lives(lowering.lives, len(lowering.passes))
    return max((lives.alive_at(life.begin) for life in lowering.lives), default=0)


class _Draft:
    """A task that still collects its edges."""

    def __init__(self, task: TaskId, lane: str, seconds: float, priority: int) -> None:
        self.id, self.lane, self.priority = task, lane, priority
        if not seconds < _LONGEST_TASK_SECONDS:
            raise InputError(
                f"{task} ({KIND_MEANING[task.kind]}) would last {seconds:.3g} s: the workload is too large for this hardware, "
                f"or a rate too low; a task may last {_LONGEST_TASK_SECONDS:.0e} s"
            )
        self.duration_ns = round(seconds * 1e9)
        self.after: dict[Edge, None] = {}
        self.allocates: list[Buffer] = []
        self.frees: list[Free] = []

    def wait(self, task: TaskId | None, back: int = 0) -> None:
        if task is not None:
            self.after[Edge(task, back)] = None

    def task(self) -> Task:
        return Task(
            self.id, self.lane, self.duration_ns, tuple(self.after), self.priority, tuple(self.allocates), tuple(self.frees)
        )


#: What ends the life of parameters that do not stay for backward.
_AFTER_FORWARD = (Kind.FORWARD, Kind.WRITE_BACK_FORWARD)


@dataclass(frozen=True, slots=True)
class _Life:
    """Fetched parameters on the GPU: what brings them, places of their first and last user, what ends them, where and when."""

    fetch: TaskId
    begin: int
    stop: int
    end: TaskId
    lane: str
    back: int


class _Lives:
    """Lives in the order of the passes. Each iteration has the same ones; places before it are negative."""

    def __init__(self, lives: list[_Life], passes: int) -> None:
        self._passes = passes
        self._begins, self._stops = sorted(life.begin for life in lives), sorted(life.stop for life in lives)
        self._places = sorted(life.stop % passes for life in lives)
        #: By their ends in two iterations, the last end first, and for each lane their indices in this list.
        self._ends = sorted(lives, key=lambda life: (life.stop % passes, life.end), reverse=True) * 2
        self._of_lane: dict[str, list[int]] = {}
        for index, life in enumerate(self._ends):
            self._of_lane.setdefault(life.lane, []).append(index)

    def alive_at(self, place: int) -> int:
        """How many blocks' parameters are on the GPU when the pass at ``place`` runs."""
        begun = len(self._begins) + bisect_right(self._begins, place)  # of the iteration before, and of this one
        return begun - bisect_left(self._stops, place + self._passes) - bisect_left(self._stops, place)

    def over_before(self, place: int, spare: int, unordered: Collection[str]) -> list[tuple[int, _Life]]:
        """What must have ended before the pass at ``place``, all lives that are over by then but the ``spare`` last.

        Returns:
            (place of its end, life), the last end first; of a lane that ends lives in order, which is any but the
            ``unordered``, the last of them alone.
        """
        count = len(self._places)
        first = count - bisect_left(self._places, place)  # the last end before ``place``; that of each life is among ``count``
        found: list[int] = []
        for lane, indices in self._of_lane.items():
            begin, stop = bisect_left(indices, first + spare), bisect_left(indices, first + count)
            found += indices[begin : stop if lane in unordered else min(begin + 1, stop)]
        return [
            (self._ends[index].stop % self._passes - index // count * self._passes, self._ends[index])
            for index in sorted(found)
        ]


class _Lowering:
    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.profile, self.plan = profile, plan
        self.last = len(plan.blocks) - 1
        self.drafts: dict[TaskId, _Draft] = {}
        self.tied = profile.workload.tied_embeddings
        #: The GPU passes in order, and each one's place; a prefetch may run beside some number of those before its own.
        self.passes: list[TaskId] = []
        self.place: dict[TaskId, int] = {}
        #: Copies that hold up a pass, and prefetches that are as synchronous as the pass itself.
        self.blockers: dict[TaskId, list[TaskId]] = {}
        self.synchronous: list[tuple[_Draft, TaskId]] = []
        self.lives: list[_Life] = []
        self.slot_bytes = max((self.parameter_bytes(i) for i, b in enumerate(plan.blocks) if _leaves(b)), default=0)
        if plan.gradients_in_slots:
            self.slot_bytes *= 2

    # --- sizes and names

    def parameter_bytes(self, block: int) -> int:
        return self.profile.blocks[block].parameters * self.profile.element_bytes

    def gradients_of(self, block: int) -> list[int]:
        """Blocks whose gradient begins to exist with backward of ``block``: a tied embedding's does with the head's."""
        if not self.tied:
            return [block]
        return [0, block] if block == self.last else [block] if block else []

    # --- drafting

    def add(self, kind: Kind, block: int, lane: str, seconds: float, priority: int = 0) -> _Draft:
        task = TaskId(kind, block)
        draft = self.drafts[task] = _Draft(task, lane, seconds, priority if self.plan.priority else 0)
        return draft

    def get(self, kind: Kind, block: int) -> _Draft:
        return self.drafts[TaskId(kind, block)]

    def id_of(self, kind: Kind, block: int) -> TaskId | None:
        task = TaskId(kind, block)
        return task if task in self.drafts else None

    def first_backward_pass(self, block: int) -> TaskId:
        """What needs the block's parameters first in backward."""
        return self.id_of(Kind.RECOMPUTE, block) or TaskId(Kind.BACKWARD, block)

    def schedule(self) -> Schedule:
        self.gpu_passes()
        for block, plan in enumerate(self.plan.blocks):
            if _leaves(plan):
                self.offloaded_parameters(block, plan)
            if plan.activations is Activations.OFFLOAD:
                self.offloaded_activations(block, plan)
        self.gpu_updates()
        self.cpu_updates()
        for block, plan in enumerate(self.plan.blocks):
            if _leaves(plan):
                self.parameter_slot(block, plan)
        self.free_slots()
        self.parameters_before_forward()
        self.barriers()
        for fetch, user in self.synchronous:
            for blocker in self.blockers.get(user, []):
                fetch.wait(blocker)
        priority = Discipline.PRIORITY if self.plan.priority else Discipline.FIFO
        hardware = self.profile.hardware
        flows, resources = shared_bandwidth(hardware, updates_beside_gpu=self.plan.updates_beside_gpu)
        return Schedule(
            lanes=(Lane(GPU), Lane(H2D, priority), Lane(D2H, priority), Lane(CPU, priority)),
            tasks=tuple(draft.task() for draft in self.issue_order()),
            memories=(
                Memory(GPU_MEMORY, hardware.gpu_capacity_bytes),
                Memory(HOST_MEMORY, hardware.host.memory_bytes),
            ),
            resident=tuple(self.resident_buffers()),
            flows=flows,
            resources=resources,
        )

    # --- GPU passes

    def gpu_passes(self) -> None:
        blocks, loss = self.profile.blocks, self.profile.loss
        for block, plan in enumerate(self.plan.blocks):
            times = blocks[block]
            forward = self.add(Kind.FORWARD, block, GPU, times.forward_seconds)
            if plan.activations is Activations.RECOMPUTE:
                self.workspace(forward, times.checkpointed_workspace_bytes)
            else:
                # Nobody hands the first block its input over.
                kept = times.activation_bytes if block == 0 else times.kept_bytes
                forward.allocates.append(_buffer(Value.ACTIVATIONS, block, kept))
                self.workspace(forward, times.forward_workspace_bytes)
            if block < self.last:
                forward.allocates.append(self.input_of(block + 1))
            self.passes.append(forward.id)
        head = self.last
        self.get(Kind.FORWARD, head).allocates.append(_buffer(Value.LOGITS, head, loss.logits_bytes))
        computed = self.add(Kind.LOSS, head, GPU, loss.seconds)
        computed.allocates.append(_buffer(Value.LOGITS_GRADIENT, head, loss.logits_bytes))
        if not loss.keeps_logits:
            computed.frees.append(_free(Value.LOGITS, head))
        self.workspace(computed, loss.workspace_bytes)
        self.passes.append(computed.id)
        for block in range(self.last, -1, -1):
            self.backward(block)
        for before, after in zip(self.passes, self.passes[1:], strict=False):
            self.drafts[after].wait(before)
        self.place = {task: i for i, task in enumerate(self.passes)}

    def backward(self, block: int) -> None:
        times, plan = self.profile.blocks[block], self.plan.blocks[block]
        if plan.activations is Activations.RECOMPUTE:
            recompute = self.add(Kind.RECOMPUTE, block, GPU, times.forward_seconds)
            recompute.allocates.append(_buffer(Value.ACTIVATIONS, block, times.kept_bytes))
            # Its output is of no use a second time.
            self.workspace(recompute, times.forward_workspace_bytes + self.profile.blocks[block + 1].input_bytes)
            self.passes.append(recompute.id)
        backward = self.add(Kind.BACKWARD, block, GPU, times.backward_seconds)
        if block and plan.activations is not Activations.OFFLOAD:
            backward.frees.append(_free(Value.INPUT, block))
        fetched = Kind.BACKWARD if plan.activations is Activations.OFFLOAD else None
        backward.frees.append(_free(Value.ACTIVATIONS, block, use=fetched))
        last = block == self.last
        backward.frees.append(_free(Value.LOGITS_GRADIENT, block) if last else _free(Value.INPUT_GRADIENT, block + 1))
        if block:
            backward.allocates.append(_buffer(Value.INPUT_GRADIENT, block, times.input_bytes))
        if block == 0 and self.profile.loss.keeps_logits:
            backward.frees.append(_free(Value.LOGITS, self.last))
        self.workspace(backward, times.backward_workspace_bytes)
        for owned in self.gradients_of(block):
            in_slot = self.plan.gradients_in_slots and _leaves(self.plan.blocks[owned])
            backward.allocates.append(_buffer(Value.GRADIENTS, owned, 0 if in_slot else self.parameter_bytes(owned)))
            if self.plan.gradients_replace_parameters:
                backward.frees.append(_free(Value.GRADIENTS, owned))  # moved into the parameters' place
        self.passes.append(backward.id)

    def input_of(self, block: int) -> Buffer:
        """What the block below hands on to ``block``, which keeps it for backward."""
        return _buffer(Value.INPUT, block, self.profile.blocks[block].input_bytes)

    def workspace(self, draft: _Draft, size_bytes: int) -> None:
        if size_bytes:
            buffer = _buffer(Value.WORKSPACE, draft.id.unit, size_bytes, use=draft.id.kind)
            draft.allocates.append(buffer)
            draft.frees.append(Free(buffer.id))

    # --- parameters and activations that come and go

    def beside(self, draft: _Draft, user: TaskId, distance: int) -> None:
        """Let ``draft`` start when all passes but the ``distance`` last before ``user`` have ended."""
        place = self.place[user] - 1 - min(distance, len(self.passes) - 1)
        if user.kind is not Kind.FORWARD:  # what forward still reads is not fetched a second time
            place = max(place, self.place[TaskId(Kind.FORWARD, user.unit)])
        draft.wait(self.passes[place % len(self.passes)], back=int(place < 0))
        self.drafts[user].wait(draft.id)
        if distance == 0:
            self.synchronous.append((draft, user))

    def offloaded_parameters(self, block: int, plan: BlockPlan) -> None:
        """Fetch, release and write back; a slot lives from its fetch to the end of its last user."""
        carried = self.plan.fetch_bytes if plan.optimizer is Processor.CPU else None
        carried = self.profile.element_bytes if carried is None else carried
        seconds = self.profile.h2d_seconds(self.profile.blocks[block].parameters * carried)
        forward, backward = TaskId(Kind.FORWARD, block), TaskId(Kind.BACKWARD, block)
        if not plan.keep_after_backward:
            fetch = self.add(Kind.PREFETCH_FORWARD, block, H2D, seconds, priority=block)
            self.beside(fetch, forward, plan.forward_prefetch_distance)
        if not plan.keep_after_forward:
            # Urgent before anything that the next forward needs, and the higher block is needed first.
            fetch = self.add(Kind.PREFETCH_BACKWARD, block, H2D, seconds, priority=-1 - block)
            self.beside(fetch, self.first_backward_pass(block), plan.backward_prefetch_distance)
        if plan.write_back_after_forward:
            back = self.add(Kind.WRITE_BACK_FORWARD, block, D2H, self.profile.d2h_seconds(self.parameter_bytes(block)))
            back.wait(forward)
            if not plan.keep_after_forward:
                self.get(Kind.PREFETCH_BACKWARD, block).wait(back.id)
                if plan.backward_prefetch_distance == 0:  # a synchronous mover holds up the next pass
                    self.next_pass(forward, back.id)
            if self.plan.window is not None and block + self.plan.window <= self.last:
                self.get(Kind.FORWARD, block + self.plan.window).wait(back.id)
        if plan.optimizer is Processor.GPU and not (plan.keep_after_backward and plan.write_back_after_forward):
            # Updated on the GPU: the host's copy is stale until it is written back.
            back = self.add(Kind.WRITE_BACK_BACKWARD, block, D2H, self.profile.d2h_seconds(self.parameter_bytes(block)), block)
            for fetch_kind in (Kind.PREFETCH_FORWARD, Kind.PREFETCH_BACKWARD):  # whichever is the next to read it
                if fetched := self.id_of(fetch_kind, block):
                    self.drafts[fetched].wait(back.id, back=1)
                    break
        self.drafts[backward].wait(self.id_of(Kind.PREFETCH_BACKWARD, block))

    def parameter_slot(self, block: int, plan: BlockPlan) -> None:
        """Who allocates and who frees the block's place on the GPU; a preallocated place costs nothing more."""
        size = self.parameter_bytes(block) if self.plan.parameter_slots is None else 0
        after_forward = self.id_of(Kind.WRITE_BACK_FORWARD, block) or TaskId(Kind.FORWARD, block)
        after_backward = self.id_of(Kind.WRITE_BACK_BACKWARD, block) or TaskId(Kind.BACKWARD, block)
        with_gradient = self.plan.gradients_replace_parameters or self.plan.gradients_in_slots
        if with_gradient and plan.optimizer is Processor.CPU:
            after_backward = TaskId(Kind.OFFLOAD_GRADIENTS, block)  # until then it holds the gradient
        lives: list[tuple[Kind | None, Kind, TaskId, int]]
        if plan.keep_after_forward:
            lives = [(None, Kind.PREFETCH_FORWARD, after_backward, 0)]
        elif plan.keep_after_backward:
            lives = [(None, Kind.PREFETCH_BACKWARD, after_forward, 1)]
            # The write-back of the update reads them, too.
            self.drafts[after_forward].wait(self.id_of(Kind.WRITE_BACK_BACKWARD, block), back=1)
        else:
            lives = [
                (Kind.FORWARD, Kind.PREFETCH_FORWARD, after_forward, 0),
                (Kind.BACKWARD, Kind.PREFETCH_BACKWARD, after_backward, 0),
            ]
        for use, fetch, end, back in lives:
            parameters = _buffer(Value.PARAMETERS, block, size, use=use)
            self.get(fetch, block).allocates.append(parameters)
            self.drafts[end].frees.append(Free(parameters.id, back))
            user = TaskId(Kind.FORWARD, block) if fetch is Kind.PREFETCH_FORWARD else self.first_backward_pass(block)
            late = {
                Kind.WRITE_BACK_BACKWARD: self.plan.gpu_update_after_backward,
                Kind.OFFLOAD_GRADIENTS: self.copied_after_backward(block),
            }
            last_user = TaskId(Kind.FORWARD if end.kind in _AFTER_FORWARD else Kind.BACKWARD, block)
            if late.get(end.kind, False):
                last_user = self.passes[-1]
            begin, stop = self.place[user], self.place[last_user] + back * len(self.passes)
            self.lives.append(_Life(TaskId(fetch, block), begin, stop, end, self.drafts[end].lane, back))

    def free_slots(self) -> None:
        """A fetch into preallocated slots waits until one is surely free.

        In the order of the passes a life lasts from its first to its last user. Of the lives that are over by then when a
        fetch's user runs, all must really have ended but as many as there are slots to spare.
        """
        slots, passes = self.plan.parameter_slots, len(self.passes)
        if slots is None:
            return
        fifo = not self.plan.priority
        lives = _Lives(self.lives, passes)
        unordered = frozenset() if fifo else frozenset(life.lane for life in self.lives if life.lane != GPU)
        known: dict[str, int] = {}  # per fifo lane the latest place whose life an earlier fetch has seen end
        for life in sorted(self.lives, key=lambda life: life.begin):
            there = lives.alive_at(life.begin)
            if there > slots:
                raise InputError(
                    f"parameter_slots is {slots}, but {there} blocks have their parameters on the GPU when "
                    f"{self.passes[life.begin]} runs: give at least {there}"
                )
            fetch = self.drafts[life.fetch]
            after = [self.place[e.task] - e.back * passes for e in fetch.after if e.task in self.place]
            seen = {**(known if fifo else {}), GPU: max(after, default=-2 * passes)}
            for stop, other in lives.over_before(life.begin, slots - there, unordered):
                if stop > seen.get(other.lane, -2 * passes):
                    fetch.wait(other.end, (other.stop - stop) // passes - other.back)
                    if other.lane not in unordered:
                        seen[other.lane] = stop
            known = seen

    def offloaded_activations(self, block: int, plan: BlockPlan) -> None:
        size = self.profile.blocks[block].activation_bytes
        forward, backward = TaskId(Kind.FORWARD, block), TaskId(Kind.BACKWARD, block)
        away = self.add(Kind.OFFLOAD_ACTIVATIONS, block, D2H, self.profile.d2h_seconds(size), priority=-1 - block)
        away.wait(forward)
        away.allocates.append(_buffer(Value.ACTIVATIONS, block, size, HOST_MEMORY))
        away.frees += [_free(Value.INPUT, block), _free(Value.ACTIVATIONS, block)]
        fetch = self.add(Kind.FETCH_ACTIVATIONS, block, H2D, self.profile.h2d_seconds(size), priority=-1 - block)
        fetch.wait(away.id)
        fetch.allocates.append(_buffer(Value.ACTIVATIONS, block, size, use=Kind.BACKWARD))
        fetch.frees.append(_free(Value.ACTIVATIONS, block, HOST_MEMORY))
        self.beside(fetch, backward, plan.backward_prefetch_distance)

    # --- updates

    def gpu_updates(self) -> None:
        for block, plan in enumerate(self.plan.blocks):
            if plan.optimizer is not Processor.GPU:
                continue
            update = self.add(Kind.GPU_UPDATE, block, GPU, self.profile.blocks[block].gpu_update_seconds)
            update.wait(TaskId(Kind.BACKWARD, 0 if self.plan.gpu_update_after_backward else block))
            update.wait(TaskId(Kind.BACKWARD, block))
            self.release_gradients(update)
            self.workspace(update, self.profile.blocks[block].gpu_update_workspace_bytes)
            if back := self.id_of(Kind.WRITE_BACK_BACKWARD, block):
                self.drafts[back].wait(update.id)

    def release_gradients(self, draft: _Draft) -> None:
        if not self.plan.gradients_replace_parameters:
            draft.frees.append(_free(Value.GRADIENTS, draft.id.unit))

    def cpu_updates(self) -> None:
        plan, profile = self.plan, self.profile
        updated = [block for block in range(self.last, -1, -1) if plan.blocks[block].optimizer is Processor.CPU]
        for block in updated:
            parameters = profile.blocks[block].parameters
            seconds = profile.d2h_seconds(parameters * plan.gradient_bytes, pinned=plan.gradients_pinned)
            gradients = self.add(Kind.OFFLOAD_GRADIENTS, block, D2H, seconds, priority=block)
            gradients.wait(TaskId(Kind.BACKWARD, block))
            self.release_gradients(gradients)
            seconds = profile.cpu_update_seconds(
                block, plan.update_bytes, plan.elementwise_bytes, beside_gpu=plan.updates_beside_gpu
            )
            update = self.add(Kind.CPU_UPDATE, block, CPU, seconds, priority=block)
            update.wait(gradients.id, back=int(plan.delayed))
            if plan.delayed:
                # The host's gradient may be overwritten only after its update has read it.
                gradients.wait(update.id)
            if self.needs_refresh(block):
                seconds = profile.h2d_seconds(parameters * plan.refresh_bytes, pinned=plan.refresh_pinned)
                refresh = self.add(Kind.REFRESH, block, H2D, seconds, priority=block)
                refresh.wait(update.id)
                if plan.delayed:
                    # The GPU's copy may be overwritten only after backward has read it, the host's after the refresh has.
                    refresh.wait(TaskId(Kind.BACKWARD, 0))
                    update.wait(refresh.id, back=1)
                    if plan.gradients_replace_parameters:
                        refresh.wait(gradients.id)
        self.update_waits(updated)

    def needs_refresh(self, block: int) -> bool:
        """Whether updated parameters are sent to a copy that stays on the GPU (others come with their next prefetch)."""
        plan = self.plan.blocks[block]
        return not _leaves(plan) or plan.keep_after_backward

    def update_waits(self, updated: list[int]) -> None:
        """``updated`` are the blocks that the CPU updates, in the order in which backward reaches them."""
        plan = self.plan
        for place, block in enumerate(updated):
            gradients, update = self.get(Kind.OFFLOAD_GRADIENTS, block), self.get(Kind.CPU_UPDATE, block)
            if plan.blocking_gradients and not self.copied_after_backward(block):
                self.next_pass(TaskId(Kind.BACKWARD, block), gradients.id)
            if plan.gradient_slots is not None and block - plan.gradient_slots >= 0:
                self.get(Kind.BACKWARD, block - plan.gradient_slots).wait(gradients.id)
            if plan.window is not None and block - plan.window >= 0:
                self.drafts[self.first_backward_pass(block - plan.window)].wait(update.id)
            if plan.serial_updates:
                begin = gradients if self.copied_after_backward(block) else update
                begin.wait(TaskId(Kind.BACKWARD, 0))
                if place:
                    previous = updated[place - 1]
                    begin.wait(self.id_of(Kind.REFRESH, previous) or TaskId(Kind.CPU_UPDATE, previous))
        if plan.update_after_backward and updated:
            first = self.get(Kind.CPU_UPDATE, updated[0])
            first.wait(TaskId(Kind.BACKWARD, 0), back=int(plan.delayed))
            for block in updated:
                first.wait(TaskId(Kind.OFFLOAD_GRADIENTS, block), back=int(plan.delayed))
        refreshed = [block for block in updated if self.id_of(Kind.REFRESH, block)]
        if plan.refresh_after_updates and refreshed:
            self.get(Kind.REFRESH, refreshed[0]).wait(TaskId(Kind.CPU_UPDATE, updated[-1]))
        if plan.refresh_through_buffer and refreshed:
            size = sum(self.profile.blocks[block].parameters for block in refreshed) * plan.refresh_bytes
            self.get(Kind.REFRESH, refreshed[0]).allocates.append(_buffer(Value.PARAMETERS, None, size, use=Kind.REFRESH))
            last = self.get(Kind.REFRESH, refreshed[-1])
            last.frees.append(_free(Value.PARAMETERS, None, use=Kind.REFRESH))
            for block in refreshed[:-1]:
                last.wait(TaskId(Kind.REFRESH, block))

    def copied_after_backward(self, block: int) -> bool:
        """Whether the gradient's copy is a part of a serial update instead of following its backward."""
        return self.plan.serial_updates and self.needs_refresh(block)

    def next_pass(self, done: TaskId, blocker: TaskId) -> None:
        place = self.place[done] + 1
        if place < len(self.passes):
            self.drafts[self.passes[place]].wait(blocker)
            self.blockers.setdefault(self.passes[place], []).append(blocker)

    def parameters_before_forward(self) -> None:
        """Every forward sees the update of the iteration before."""
        for block, plan in enumerate(self.plan.blocks):
            updated = self.id_of(Kind.CPU_UPDATE, block) or self.id_of(Kind.GPU_UPDATE, block)
            if refresh := self.id_of(Kind.REFRESH, block):
                readers = [TaskId(Kind.FORWARD, block)]
                if self.tied and block == 0:
                    readers.append(TaskId(Kind.FORWARD, self.last))
                for reader in readers:
                    self.drafts[reader].wait(refresh, back=1)
            elif _leaves(plan) and not plan.keep_after_backward and plan.optimizer is Processor.CPU:
                self.get(Kind.PREFETCH_FORWARD, block).wait(updated, back=1)
            else:
                self.get(Kind.FORWARD, block).wait(updated, back=1)

    def barriers(self) -> None:
        if self.plan.barrier:
            forward = self.get(Kind.FORWARD, 0)
            for kind in (Kind.CPU_UPDATE, Kind.REFRESH, Kind.GPU_UPDATE, Kind.WRITE_BACK_BACKWARD):
                for block in range(len(self.plan.blocks)):
                    forward.wait(self.id_of(kind, block), back=1)
            # A prefetch that does not wait for a pass of its own iteration must not slip past the barrier.
            for block in range(len(self.plan.blocks)):
                fetch = self.drafts.get(TaskId(Kind.PREFETCH_FORWARD, block))
                if fetch and all(edge.back for edge in fetch.after):
                    fetch.after.update(forward.after)

    # --- order and memory

    def issue_order(self) -> Iterable[_Draft]:
        """Tasks as a program would issue them: each lane's in the order in which they can become ready."""
        order: list[_Draft] = []

        def issue(task: TaskId | None) -> None:
            if task is not None:
                order.append(self.drafts[task])

        updates = [b for b in range(self.last, -1, -1) if self.id_of(Kind.GPU_UPDATE, b)]
        for task in self.passes:
            if task.kind is Kind.FORWARD:
                issue(self.id_of(Kind.PREFETCH_FORWARD, task.unit))
            elif task == self.first_backward_pass(task.unit) and task.kind is not Kind.LOSS:
                issue(self.id_of(Kind.PREFETCH_BACKWARD, task.unit))
                issue(self.id_of(Kind.FETCH_ACTIVATIONS, task.unit))
            issue(task)
            if task.kind is Kind.FORWARD:
                issue(self.id_of(Kind.WRITE_BACK_FORWARD, task.unit))
                issue(self.id_of(Kind.OFFLOAD_ACTIVATIONS, task.unit))
            elif task.kind is Kind.BACKWARD:
                if not self.plan.gpu_update_after_backward:
                    issue(self.id_of(Kind.GPU_UPDATE, task.unit))
                    issue(self.id_of(Kind.WRITE_BACK_BACKWARD, task.unit))
                if not self.copied_after_backward(task.unit):
                    issue(self.id_of(Kind.OFFLOAD_GRADIENTS, task.unit))
                issue(self.id_of(Kind.CPU_UPDATE, task.unit))
        if self.plan.gpu_update_after_backward:
            for block in updates:
                issue(self.id_of(Kind.GPU_UPDATE, block))
                issue(self.id_of(Kind.WRITE_BACK_BACKWARD, block))
        for block in range(self.last, -1, -1):
            if self.copied_after_backward(block):
                issue(self.id_of(Kind.OFFLOAD_GRADIENTS, block))
        # Refreshes last: on a fifo lane one that waits for its update must not hold up what backward needs.
        for block in range(self.last, -1, -1):
            issue(self.id_of(Kind.REFRESH, block))
        assert len(order) == len(self.drafts), "every task is issued once"
        return order

    def resident_buffers(self) -> Iterable[Buffer]:
        profile, plan = self.profile, self.plan
        element, optimizer = profile.element_bytes, profile.optimizer_bytes
        host_states = host_parameters = 0
        updated: list[int] = []
        for block, decisions in enumerate(plan.blocks):
            count = profile.blocks[block].parameters
            if not _leaves(decisions):
                yield _buffer(Value.PARAMETERS, block, count * element)
            if decisions.optimizer is Processor.GPU:
                yield _buffer(Value.OPTIMIZER_STATES, block, count * optimizer)
            else:
                host_states += count * plan.host_optimizer_bytes
                updated.append(count)
            if _leaves(decisions) and not (plan.one_host_copy and decisions.optimizer is Processor.CPU):
                host_parameters += count * plan.host_parameter_bytes
        if plan.parameter_slots is not None and self.slot_bytes:
            yield _buffer(Value.PARAMETER_SLOTS, None, plan.parameter_slots * self.slot_bytes)
        if plan.gpu_buffer_bytes:
            yield _buffer(Value.POLICY_BUFFERS, None, plan.gpu_buffer_bytes)
        arrays = [sum(updated)] if plan.host_pinned_together else updated
        host_pinned = sum(rounded_when_pinned(count * size) for count in arrays for size in plan.host_pinned_bytes)
        for value, size in (
            (Value.OPTIMIZER_STATES, host_states),
            (Value.PINNED_STATES, host_pinned),
            (Value.PARAMETERS, host_parameters),
            (Value.POLICY_BUFFERS, plan.host_buffer_bytes),
        ):
            if size:
                yield _buffer(value, None, size, HOST_MEMORY)


def _buffer(value: Value, unit: int | None, size_bytes: int, memory: str = GPU_MEMORY, use: Kind | None = None) -> Buffer:
    return Buffer(BufferId(value, memory, unit, use), size_bytes)


def _free(value: Value, unit: int | None, memory: str = GPU_MEMORY, use: Kind | None = None) -> Free:
    return Free(BufferId(value, memory, unit, use))


def _leaves(plan: BlockPlan) -> bool:
    """Whether the block's parameters are ever away from the GPU."""
    return plan.parameters is Placement.OFFLOADED and not (plan.keep_after_forward and plan.keep_after_backward)


def shared_bandwidth(hardware: Hardware, *, updates_beside_gpu: bool) -> tuple[tuple[Flow, ...], tuple[SharedResource, ...]]:
    """What the two directions of the link take from each other, and they and the CPU from host DRAM.

    Both directions together never exceed the sum of their duplex bandwidths; the weights divide it as measured. A copy
    moves each byte through DRAM once; the CPU's demand is the traffic of its optimizer, and its weight makes it and the
    copies slow down alike when DRAM is full, as memory controllers serve what is asked. Where the CPU stands for the device,
    every lane is a thread on its cores as well.
    """
    h2d, d2h, cpu = hardware.h2d, hardware.d2h, hardware.cpu
    update = cpu.update_bandwidth * (cpu.concurrent_share if updates_beside_gpu else 1.0)
    flows = (
        Flow(H2D, h2d.bandwidth, h2d.duplex_bandwidth),
        Flow(D2H, d2h.bandwidth, d2h.duplex_bandwidth),
        Flow(CPU, update, update),
    )
    usable = hardware.host.memory_bandwidth * hardware.host.usable_share
    resources = (
        SharedResource("link", max(h2d.duplex_bandwidth + d2h.duplex_bandwidth, h2d.bandwidth, d2h.bandwidth), (H2D, D2H)),
        SharedResource("host_memory", max(usable, update), (H2D, D2H, CPU)),
    )
    if hardware.shared_cores is None:
        return flows, resources
    cores = SharedResource("cores", hardware.shared_cores, (GPU, H2D, D2H, CPU), counts_lanes=True)
    return (Flow(GPU, 1.0, 1.0), *flows), (*resources, cores)
