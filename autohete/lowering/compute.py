"""What the GPU computes: forward, loss, recomputation and backward, and what each of them reads, makes and leaves behind."""

from __future__ import annotations

from autohete.lowering.builder import Builder
from autohete.plan import Activations, Plan
from autohete.profile import Profile
from autohete.schedule import GPU, Kind, TaskId, Value


def passes_of(plan: Plan) -> list[TaskId]:
    """The GPU's passes in order."""
    last = len(plan.blocks) - 1
    passes = [*(TaskId(Kind.FORWARD, unit) for unit in range(last + 1)), TaskId(Kind.LOSS, last)]
    for unit in range(last, -1, -1):
        if plan.blocks[unit].activations is Activations.RECOMPUTE:
            passes.append(TaskId(Kind.RECOMPUTE, unit))
        passes.append(TaskId(Kind.BACKWARD, unit))
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
        self._last = len(plan.blocks) - 1
        self._tied = profile.workload.tied_embeddings

    def _reads_parameters(self, task: TaskId) -> None:
        self._builder.read(task, Value.PARAMETERS, task.unit)
        if self._tied and task.unit == self._last:
            self._builder.read(task, Value.PARAMETERS, 0)

    def forward(self, unit: int) -> None:
        """Activations, or only the output."""
        b, times = self._builder, self._profile.blocks[unit]
        task = b.task(Kind.FORWARD, unit, GPU, times.forward_seconds)
        self._reads_parameters(task)
        if self._plan.blocks[unit].activations is Activations.RECOMPUTE:
            b.workspace(task, times.checkpointed_workspace_bytes)
        else:
            # Nobody hands the first unit its input over.
            b.make(task, Value.ACTIVATIONS, unit, times.activation_bytes if unit == 0 else times.kept_bytes)
            b.workspace(task, times.forward_workspace_bytes)
        if unit < self._last:
            b.allocate(task, Value.INPUT, unit + 1, self._profile.blocks[unit + 1].input_bytes)
        else:
            b.allocate(task, Value.LOGITS, unit, self._profile.loss.logits_bytes)

    def loss(self) -> None:
        """The loss, and the gradient of its logits."""
        b, loss = self._builder, self._profile.loss
        task = b.task(Kind.LOSS, self._last, GPU, loss.seconds)
        b.allocate(task, Value.LOGITS_GRADIENT, self._last, loss.logits_bytes)
        if not loss.keeps_logits:
            b.free(task, Value.LOGITS, self._last)
        b.workspace(task, loss.workspace_bytes)

    def _recompute(self, unit: int) -> None:
        """Forward again, for its activations."""
        b, times = self._builder, self._profile.blocks[unit]
        task = b.task(Kind.RECOMPUTE, unit, GPU, times.forward_seconds)
        self._reads_parameters(task)
        b.make(task, Value.ACTIVATIONS, unit, times.kept_bytes)
        # Its output is of no use a second time.
        b.workspace(task, times.forward_workspace_bytes + self._profile.blocks[unit + 1].input_bytes)

    def backward(self, unit: int) -> None:
        """Gradients of the parameters and of the input."""
        b, times, last = self._builder, self._profile.blocks[unit], unit == self._last
        if self._plan.blocks[unit].activations is Activations.RECOMPUTE:
            self._recompute(unit)
        task = b.task(Kind.BACKWARD, unit, GPU, times.backward_seconds)
        self._reads_parameters(task)
        b.read(task, Value.ACTIVATIONS, unit)
        offloaded = self._plan.blocks[unit].activations is Activations.OFFLOAD
        if unit and not offloaded:
            b.free(task, Value.INPUT, unit)
        b.free(task, Value.ACTIVATIONS, unit, use=Kind.BACKWARD if offloaded else None)
        if last:
            b.free(task, Value.LOGITS_GRADIENT, unit)
        else:
            b.free(task, Value.INPUT_GRADIENT, unit + 1)
        if unit:
            b.allocate(task, Value.INPUT_GRADIENT, unit, times.input_bytes)
        elif self._profile.loss.keeps_logits:
            b.free(task, Value.LOGITS, self._last)
        b.workspace(task, times.backward_workspace_bytes)
        self._gradients(task)

    def _gradients(self, task: TaskId) -> None:
        """The gradient of a tied embedding begins to exist with the head's."""
        b, plan, unit = self._builder, self._plan, task.unit
        tied = self._tied and unit in (0, self._last)
        for owned in [0, unit] if tied and unit else [] if tied else [unit]:
            in_slot = plan.gradients_in_slots and plan.blocks[owned].leaves
            size = self._profile.blocks[owned].parameters * self._profile.element_bytes
            b.make(task, Value.GRADIENTS, owned, 0 if in_slot else size)
            if plan.gradients_replace_parameters:
                b.write(task, Value.PARAMETERS, owned)
                b.free(task, Value.GRADIENTS, owned)
        if tied and not unit:
            b.write(task, Value.GRADIENTS, 0)
            if plan.gradients_replace_parameters:
                b.write(task, Value.PARAMETERS, 0)
