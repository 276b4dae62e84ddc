"""What the GPU computes: forward, loss, recomputation and backward, and what each of them reads, makes and leaves behind."""

from __future__ import annotations

from autohete.lowering.builder import Builder
from autohete.lowering.shards import Shards
from autohete.plan import Activations, Plan
from autohete.profile import Profile
from autohete.schedule import GPU, GPU_MEMORY, BufferId, Kind, TaskId, Value


def passes_of(plan: Plan, micro_batches: int) -> list[TaskId]:
    """The GPU's passes in order."""
    last = len(plan.units) - 1
    passes: list[TaskId] = []
    for m in range(micro_batches):
        passes += (TaskId(Kind.FORWARD, unit, m) for unit in range(last + 1))
        passes.append(TaskId(Kind.LOSS, last, m))
        for unit in range(last, -1, -1):
            if plan.units[unit].activations is Activations.RECOMPUTE:
                passes.append(TaskId(Kind.RECOMPUTE, unit, m))
            passes.append(TaskId(Kind.BACKWARD, unit, m))
    return passes


class Compute:
    """Adds the passes of ``plan`` to a builder.

    Args:
        builder: collects them.
        profile: how long they last, and what they need.
        plan: whose activations are kept, recomputed or offloaded.
    """

    def __init__(self, builder: Builder, profile: Profile, plan: Plan) -> None:
        self._builder, self._profile, self._plan = builder, profile, plan
        self._last = len(plan.units) - 1
        self._tied = profile.workload.tied_embeddings
        self._shards = Shards(profile, plan)

    def _pass(self, kind: Kind, unit: int, micro_batch: int, seconds: float) -> TaskId:
        task = self._builder.task(kind, unit, GPU, seconds, micro_batch=micro_batch)
        self._builder.read(task, Value.PARAMETERS, unit)
        if self._tied and unit == self._last:
            self._builder.read(task, Value.PARAMETERS, 0)
        return task

    def _input_leaves(self, unit: int) -> bool:
        """Whether the unit's input alone is kept for backward, and not on the GPU."""
        plan = self._plan.units[unit]
        return plan.activations is Activations.RECOMPUTE and plan.kept.leaves

    def forward(self, unit: int, micro_batch: int) -> None:
        """Activations, or only the output."""
        b, times = self._builder, self._profile.blocks[unit]
        task = self._pass(Kind.FORWARD, unit, micro_batch, times.forward_seconds)
        if self._input_leaves(unit):
            b.read(task, Value.INPUT, unit)
        if self._plan.units[unit].activations is Activations.RECOMPUTE:
            b.workspace(task, times.checkpointed_workspace_bytes)
        else:
            # Nobody hands the first unit its input over.
            size = times.activation_bytes if unit == 0 else times.kept_bytes
            b.make(task, on_gpu(Value.ACTIVATIONS, unit, micro_batch), size)
            b.workspace(task, times.forward_workspace_bytes)
        if unit < self._last:
            make = b.make if self._input_leaves(unit + 1) else b.allocate
            make(task, on_gpu(Value.INPUT, unit + 1, micro_batch), self._profile.blocks[unit + 1].input_bytes)
        else:
            b.allocate(task, on_gpu(Value.LOGITS, unit, micro_batch), self._profile.loss.logits_bytes)

    def loss(self, micro_batch: int) -> None:
        """The loss, and the gradient of its logits."""
        b, loss = self._builder, self._profile.loss
        task = b.task(Kind.LOSS, self._last, GPU, loss.seconds, micro_batch=micro_batch)
        b.allocate(task, on_gpu(Value.LOGITS_GRADIENT, self._last, micro_batch), loss.logits_bytes)
        if not loss.keeps_logits:
            b.free(task, on_gpu(Value.LOGITS, self._last, micro_batch))
        b.workspace(task, loss.workspace_bytes)

    def _recompute(self, unit: int, micro_batch: int) -> None:
        """Forward again, for its activations."""
        b, times = self._builder, self._profile.blocks[unit]
        task = self._pass(Kind.RECOMPUTE, unit, micro_batch, times.forward_seconds)
        if self._input_leaves(unit):
            b.read(task, Value.INPUT, unit)
        b.make(task, on_gpu(Value.ACTIVATIONS, unit, micro_batch), times.kept_bytes)
        # Its output is of no use a second time.
        b.workspace(task, times.forward_workspace_bytes + self._profile.blocks[unit + 1].input_bytes)

    def backward(self, unit: int, micro_batch: int) -> None:
        """Gradients of the parameters and of the input."""
        b, times, plan = self._builder, self._profile.blocks[unit], self._plan.units[unit]
        recomputed, fetched = plan.activations is Activations.RECOMPUTE, Kind.BACKWARD if plan.kept.leaves else None
        if recomputed:
            self._recompute(unit, micro_batch)
        task = self._pass(Kind.BACKWARD, unit, micro_batch, times.backward_seconds)
        b.read(task, Value.ACTIVATIONS, unit)
        if self._input_leaves(unit):
            b.read(task, Value.INPUT, unit)
        if unit and (recomputed or not fetched):  # else it is among the activations that were fetched
            b.free(task, on_gpu(Value.INPUT, unit, micro_batch, fetched))
        b.free(task, on_gpu(Value.ACTIVATIONS, unit, micro_batch, None if recomputed else fetched))
        if unit == self._last:
            b.free(task, on_gpu(Value.LOGITS_GRADIENT, unit, micro_batch))
        else:
            b.free(task, on_gpu(Value.INPUT_GRADIENT, unit + 1, micro_batch))
        if unit:
            b.allocate(task, on_gpu(Value.INPUT_GRADIENT, unit, micro_batch), times.input_bytes)
        elif self._profile.loss.keeps_logits:
            b.free(task, on_gpu(Value.LOGITS, self._last, micro_batch))
        b.workspace(task, times.backward_workspace_bytes)
        self._gradients(task)

    def _gradients(self, task: TaskId) -> None:
        """Of the unit's parameters; those of a tied embedding begin to exist with the head's, and end with its own."""
        tied = self._tied and task.unit in (0, self._last)
        for unit in sorted({0, task.unit}) if tied else [task.unit]:
            begins, complete = not (tied and not task.unit), not (tied and task.unit and not unit)
            self._gradients_of(task, unit, begins, complete)

    def _gradients_of(self, task: TaskId, unit: int, begins: bool, complete: bool) -> None:
        """Each micro-batch has its own: the first one's live on, or on the GPU the others' are added to them."""
        b, plan, gradients = self._builder, self._plan.units[unit], on_gpu(Value.GRADIENTS, unit, task.micro_batch)
        added_here = not plan.accumulates_on_host and self._shards.stage(unit) < 2
        if begins:
            size = 0 if self._plan.in_slot(unit) else self._profile.blocks[unit].parameters * self._profile.element_bytes
            if task.micro_batch and added_here:
                b.allocate(task, gradients, size)
            else:
                b.make(task, gradients, size)
            if plan.gradients_replace_parameters:
                b.free(task, gradients)
        if not begins or (task.micro_batch and added_here):
            b.write(task, Value.GRADIENTS, unit)
        if complete and task.micro_batch and added_here:
            b.free(task, gradients)
        if plan.gradients_replace_parameters:
            b.write(task, Value.PARAMETERS, unit)


def on_gpu(value: Value, unit: int | None, micro_batch: int = 0, use: Kind | None = None) -> BufferId:
    """A buffer in the GPU's memory."""
    return BufferId(value, GPU_MEMORY, unit, use, micro_batch)
