"""The passes of the GPU: forward, loss, recomputation and backward, with what each reads, makes and leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice

from autohete.errors import InputError
from autohete.lowering import durations
from autohete.lowering.builder import Builder, on_gpu, task_id
from autohete.lowering.durations import NO_COPY, Awaited, Duration
from autohete.lowering.shards import Shards
from autohete.lowering.stages import PipelineRank
from autohete.lowering.tied import on_one_rank
from autohete.plan import Activations, Plan, Recomputation
from autohete.plan.moves import SavedPart
from autohete.profile import Profile
from autohete.schedule import GPU, BufferId, Kind, TaskId, Value


def begins_of(recomputations: Sequence[Sequence[Recomputation]], first_trained: int, rank: PipelineRank) -> list[int]:
    """The index of the first pass of each of a rank's dealt stages."""
    begins, turns = [], iter(rank.turns)
    for count in rank.visits:
        mine = replace(rank, turns=tuple(islice(turns, count)))
        begins.append(len([*passes_of(recomputations, first_trained, mine)]))
    return [*accumulate(begins, initial=0)][:-1]


def passes_of(recomputations: Sequence[Sequence[Recomputation]], first_trained: int, rank: PipelineRank) -> Iterator[TaskId]:
    """The passes of a GPU in order.

    Args:
        recomputations: for each unit, what is recomputed right before its backward.
        first_trained: the unit at which backward ends.
        rank: the turns of its stages.
    """
    head = len(recomputations) - 1
    for is_forward, stage, m in rank.turns:
        if is_forward:
            yield from (task_id(Kind.FORWARD, unit, m) for unit in stage)
            if head in stage:
                yield task_id(Kind.LOSS, head, m)
            continue
        for unit in reversed(stage):
            if unit >= first_trained:
                yield from (task_id(Kind.RECOMPUTE, one.unit, m, again=one.again) for one in recomputations[unit])
                yield task_id(Kind.BACKWARD, unit, m)


class Compute:
    """Adds the passes of ``plan`` to a builder.

    Args:
        builder: collects the tasks.
        profile: their durations and sizes.
        plan: whether activations are kept, recomputed or offloaded.
        shards: how several GPUs shard gradients.
        recomputations: for each unit, what is recomputed right before its backward.
        rank: the stages that this GPU computes.
    """

    def __init__(
        self,
        builder: Builder,
        profile: Profile,
        plan: Plan,
        shards: Shards,
        recomputations: Sequence[Sequence[Recomputation]],
        rank: PipelineRank,
    ) -> None:
        self._builder, self._profile, self._plan, self._shards = builder, profile, plan, shards
        self._last, self._first_trained = len(plan.units) - 1, profile.first_trained
        #: The units at which the backward of a stage ends, and the one at which that of the head's stage does.
        self._ends = {max(stage[0], self._first_trained) for stage in rank.stages}
        self._last_backward = next((max(stage[0], self._first_trained) for stage in rank.stages if self._last in stage), None)
        self._in_place = plan.sums_in_place or plan.sums_in_fp32
        #: Units whose inputs, and gradients of these, stay until the last backward.
        self._holding = frozenset(
            unit
            for unit in rank.units
            if plan.holds_inputs and plan.units[unit].activations is Activations.RECOMPUTE and shards.frozen_bytes(unit)
        )
        self._tied = on_one_rank(profile, plan)
        self._recomputations = {(one.unit, one.again): one for some in recomputations for one in some}
        #: For each unit, whether only its input is kept for backward, and not on the GPU.
        self._input_leaves = [unit.kept.leaves and unit.activations is Activations.RECOMPUTE for unit in plan.units]
        #: The input of each unit in a micro-batch, while it is on the GPU and has not been offloaded.
        self._inputs: dict[tuple[int, int], BufferId] = {}
        #: Copies of weights in autocast's cache, which the loss frees, of the forward that is being added. In a pipeline, each
        #: counts only while its unit is computed.
        self._cached: list[BufferId] = []
        self._caches = len(rank.stages) == 1 and len(rank.stages[0]) == len(plan.units)
        #: What is held, of the backward that is being added.
        self._held: list[BufferId] = []

    def _pass(self, task: TaskId, duration: Duration) -> None:
        self._builder.add(task, GPU, duration)
        self._builder.read(task, Value.PARAMETERS, task.unit)
        if self._tied and task.unit == self._last:
            self._builder.read(task, Value.PARAMETERS, 0)
        if self._input_leaves[task.unit]:
            self._builder.read(task, Value.INPUT, task.unit)

    def _awaited(self, task: TaskId) -> Awaited:
        """The copy of parameters for which the host waits before it launches the rest of a pass, if it does."""
        unit, micro_batch, forward = task.unit, task.micro_batch, task.kind is Kind.FORWARD
        fetch = Kind.PREFETCH_FORWARD if forward else Kind.PREFETCH_BACKWARD
        first = forward or task == self._builder.first_backward(unit, micro_batch)
        if not (self._plan.hooks.waits and first and self._builder.find(fetch, unit, micro_batch)):
            return NO_COPY
        return self._shards.kept_bytes(unit), self._plan.units[unit].parameters.carried.pinned

    def _parts(self, unit: int) -> tuple[SavedPart, ...]:
        """The parts of what a forward that does not recompute everything keeps."""
        plan, found = self._plan.units[unit], self._shards.saved_parts(unit)
        if plan.activations is Activations.SELECTIVE and not (found and found[0].recomputed):
            raise InputError(
                f"unit {unit} ({self._profile.units[unit].role}) is to be recomputed selectively, but its profile does not "
                "say how: keep or recompute it; or if the profile is older than selective recomputation, measure it again"
            )
        costs = self._profile.units[unit]
        if found and found[0].recomputed:
            alone = next((one for one in costs.saved if one.name in found[0].names and one.seconds is None), None)
            if alone is not None:
                raise InputError(
                    f"the saved tensors {alone.name} of unit {unit} ({costs.role}) are to be made again, but only a "
                    "recomputation of the whole unit makes them: let them rest somewhere, or recompute the unit"
                )
        return found

    def forward(self, task: TaskId) -> None:
        """Add a forward, which leaves the activations or only the output."""
        b, unit = self._builder, task.unit
        self._pass(task, durations.forward(unit, self._plan.hooks.forward, awaited=self._awaited(task)))
        if unit >= self._first_trained:
            self._keep(task, self._plan.units[unit].activations)
        else:
            self._keep_nothing(task)
        if unit < self._last:
            self._hand_on(task)
        else:
            b.allocate(task, on_gpu(Value.LOGITS, unit, task.micro_batch), self._profile.loss.logits_bytes)

    def recompute(self, task: TaskId) -> None:
        """Add a recomputation, for the unit's activations or for the input of the unit above."""
        unit, recomputation = task.unit, self._recomputations[task.unit, task.again]
        if self._plan.units[unit].activations is Activations.SELECTIVE:
            again, *others = self._parts(unit)
            self._pass(task, durations.selective(unit, again.names))
            for part, _ in enumerate(others, 1):
                self._builder.read(task, Value.ACTIVATIONS, unit, part=part)
        else:
            duration = durations.forward if recomputation.hands_on else durations.recompute
            whole = duration(unit, self._plan.hooks.forward, self._plan.hooks.recomputation, self._awaited(task))
            results = self._shards.results(unit)
            names = frozenset(name for one in results for name in one.names)
            self._pass(task, durations.without_products(unit, whole, names) if names else whole)
            self._take_results(task, results)
        # Its output is not needed again, except within a segment.
        self._keep(task, recomputation.keeps, 0 if recomputation.hands_on else self._profile.units[unit + 1].input_bytes)
        if recomputation.hands_on:
            self._hand_on(task)

    def _take_results(self, task: TaskId, results: Sequence[SavedPart]) -> None:
        """Let the recomputation ``task`` take the results that forward has kept."""
        for part, one in enumerate(results, 1):
            use = Kind.BACKWARD if one.route.leaves else None
            self._builder.read(task, Value.ACTIVATIONS, task.unit, part=part)
            self._builder.free(task, on_gpu(Value.ACTIVATIONS, task.unit, task.micro_batch, use, part))

    def _hand_on(self, task: TaskId) -> None:
        """Make the output, which is the input of the unit above."""
        above = task.unit + 1
        again = (task.kind, task.again) if task.kind is Kind.RECOMPUTE else (None, 0)
        self._inputs[above, task.micro_batch] = buffer = on_gpu(Value.INPUT, above, task.micro_batch, *again)
        make = self._builder.make if self._input_leaves[above] else self._builder.allocate
        make(task, buffer, self._profile.units[above].input_bytes)

    def _keep(self, task: TaskId, kept: Activations, unused_bytes: int = 0) -> None:
        """Allocate what ``task`` leaves of the unit, and what lives only while it runs."""
        b, unit, times = self._builder, task.unit, self._profile.units[task.unit]
        if kept not in (Activations.SELECTIVE, Activations.KEEP):
            cached = times.cast_bytes * (self._caches and task.kind is Kind.FORWARD)
            if cached:
                self._cached.append(on_gpu(Value.OTHER, unit, task.micro_batch, Kind.LOSS))
                b.allocate(task, self._cached[-1], cached)
            b.workspace(task, times.checkpointed_workspace_bytes + unused_bytes - cached)
            for part, one in enumerate(self._shards.results(unit) if task.kind is Kind.FORWARD else (), 1):
                b.make(task, on_gpu(Value.ACTIVATIONS, unit, task.micro_batch, again=part), one.size_bytes)
        elif self._plan.units[unit].activations in (Activations.RECOMPUTE, Activations.DROP):  # all of it again
            size = times.kept_bytes if unit else times.activation_bytes
            b.make(task, on_gpu(Value.ACTIVATIONS, unit, task.micro_batch), size)
            b.workspace(task, times.forward_workspace_bytes + unused_bytes)
        else:
            parts, again = self._parts(unit), task.kind is Kind.RECOMPUTE
            for part, one in enumerate(parts):
                if one.recomputed is again:
                    size = one.size_bytes if unit else times.activation_bytes  # the first unit has no input from below
                    b.make(task, on_gpu(Value.ACTIVATIONS, unit, task.micro_batch, again=part), size)
            workspaces = times.workspace_bytes_without(parts[0].names if parts[0].recomputed else ())
            b.workspace(task, workspaces[again])
        if kept is Activations.DROP:
            b.free(task, self._inputs.pop((unit, task.micro_batch)))

    def _keep_nothing(self, task: TaskId) -> None:
        """Keep nothing of a unit without backward. The first unit's input comes from no other task."""
        unit, times = task.unit, self._profile.units[task.unit]
        self._builder.workspace(task, times.checkpointed_workspace_bytes + (0 if unit else times.input_bytes))
        if unit:
            self._builder.free(task, self._inputs.pop((unit, task.micro_batch)))

    def receive_input(self, receive: TaskId) -> None:
        """Let ``receive`` make the input of a unit, as the unit below it would."""
        buffer = self._inputs[receive.unit, receive.micro_batch] = on_gpu(Value.INPUT, receive.unit, receive.micro_batch)
        self._builder.make(receive, buffer, self._profile.units[receive.unit].input_bytes)

    def send_input(self, send: TaskId) -> None:
        """Let ``send`` take the input of a unit to another GPU."""
        if self._input_leaves[send.unit]:  # it may come back for a backward
            self._builder.read(send, Value.INPUT, send.unit)
        self._builder.free(send, self._inputs.pop((send.unit, send.micro_batch)))

    def loss(self, task: TaskId) -> None:
        """Add the loss and the gradient of its logits."""
        b, loss = self._builder, self._profile.loss
        b.add(task, GPU, durations.loss)
        b.allocate(task, on_gpu(Value.LOGITS_GRADIENT, self._last, task.micro_batch), loss.gradient_bytes)
        if not (loss.keeps_logits or loss.in_place):
            b.free(task, on_gpu(Value.LOGITS, self._last, task.micro_batch))
        b.workspace(task, loss.workspace_bytes)
        for buffer in self._cached:
            b.free(task, buffer)
        self._cached.clear()

    def backward(self, task: TaskId) -> None:
        """Add a backward: gradients of the parameters and of the input."""
        b, unit, micro_batch = self._builder, task.unit, task.micro_batch
        times, plan = self._profile.units[unit], self._plan.units[unit]
        parts = self._shards.saved_parts(unit)
        checks = self._plan.check_bytes * self._shards.share(unit) * (micro_batch == self._builder.passes[-1].micro_batch)
        extra = (self._plan.gradient_bytes + checks) * times.trained_parameters
        self._pass(task, durations.backward(unit, self._plan.hooks.backward, self._awaited(task), extra))
        if unit and not (parts and plan.kept.leaves):  # otherwise it is part of what was fetched
            rests = plan.kept.leaves
            self._release(
                task, unit, on_gpu(Value.INPUT, unit, micro_batch, Kind.BACKWARD) if rests else self._inputs[unit, micro_batch]
            )
        for part, one in enumerate(parts) if parts else [(0, None)]:
            fetched = one is not None and one.route.leaves
            b.read(task, Value.ACTIVATIONS, unit, part=part)
            b.free(task, on_gpu(Value.ACTIVATIONS, unit, micro_batch, Kind.BACKWARD if fetched else None, part))
        if unit == self._last:
            b.free(task, on_gpu(Value.LOGITS_GRADIENT, unit, micro_batch))
            if self._profile.loss.in_place:
                b.free(task, on_gpu(Value.LOGITS, unit, micro_batch))
        else:
            self._release(task, unit + 1, on_gpu(Value.INPUT_GRADIENT, unit + 1, micro_batch))
        made = on_gpu(Value.INPUT_GRADIENT, unit, micro_batch)
        if unit > self._first_trained:
            b.allocate(task, made, times.input_bytes)
        elif unit in self._holding:  # whose input requires a gradient although nothing below uses it
            b.allocate(task, made, times.input_bytes)
            self._held.append(made)
        if self._profile.loss.keeps_logits and unit == self._last_backward:
            b.free(task, on_gpu(Value.LOGITS, self._last, micro_batch))
        if unit in self._ends:
            for buffer in self._held:
                b.free(task, buffer)
            self._held.clear()
        b.workspace(task, times.backward_workspace_bytes)
        self._gradients(task)

    def _release(self, task: TaskId, unit: int, buffer: BufferId) -> None:
        """Free the input of ``unit`` or its gradient after ``task``, or with the last backward if it is held."""
        if unit in self._holding:
            self._held.append(buffer)
        else:
            self._builder.free(task, buffer)

    def _gradients(self, task: TaskId) -> None:
        """Gradients of the unit's parameters. Those of a tied embedding begin with the head's backward and end with its own."""
        tied = self._tied and task.unit in (0, self._last)
        for unit in sorted({0, task.unit}) if tied else [task.unit]:
            if self._shards.is_frozen(unit):
                continue
            begins, complete = not (tied and not task.unit), not (tied and task.unit and not unit)
            self._gradients_of(task, unit, begins, complete)

    def _gradients_of(self, task: TaskId, unit: int, begins: bool, complete: bool) -> None:
        """Make or accumulate gradients: those of the first micro-batch stay, or on the GPU the others are added to them.

        A backward adds the gradient of each parameter as soon as it has it, except for a matrix that two units share; or has
        its products add to the sums.
        """
        b, plan, gradients = self._builder, self._plan.units[unit], on_gpu(Value.GRADIENTS, unit, task.micro_batch)
        added_here = not plan.accumulates_on_host and not self._shards.reduces_each(unit)
        if begins:
            count, at_a_time = self._profile.gradient_elements(unit), self._profile.added_elements(unit)
            size = 0 if self._plan.in_slot(unit) or self._plan.sums_in_fp32 else count * self._profile.element_bytes
            if task.micro_batch and added_here:
                whole = not complete or self._plan.flat_buffers.adds_whole
                at_once = size if whole else at_a_time * self._profile.element_bytes
                b.allocate(task, gradients, 0 if self._in_place else at_once)
            else:
                b.make(task, gradients, size)
            if plan.gradients_replace_parameters:
                b.free(task, gradients)
        later = not complete and plan.sums_leave  # a tied embedding's sums come for its own backward
        if not (task.micro_batch and later) and (not begins or (task.micro_batch and added_here)):
            b.write(task, Value.GRADIENTS, unit)
        if complete and task.micro_batch and added_here:
            b.free(task, gradients)
        if plan.gradients_replace_parameters:
            b.write(task, Value.PARAMETERS, unit)
