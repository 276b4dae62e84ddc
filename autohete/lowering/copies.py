"""What comes and goes: parameters and activations that are offloaded, gradients, and updated parameters; and who updates."""

from __future__ import annotations

from autohete.lowering.builder import Builder
from autohete.lowering.slots import Life
from autohete.plan import Activations, BlockPlan, Plan, Processor
from autohete.profile import Profile
from autohete.schedule import CPU, D2H, GPU, H2D, HOST_MEMORY, Kind, TaskId, Value


class Copies:
    """Adds the copies and updates of ``plan`` to a builder.

    Args:
        builder: collects them.
        profile: how long they last.
        plan: what moves, and who updates.

    Attributes:
        lives: of parameters that come and go.
    """

    def __init__(self, builder: Builder, profile: Profile, plan: Plan) -> None:
        self._builder, self._profile, self._plan = builder, profile, plan
        self.lives: list[Life] = []

    def parameter_bytes(self, unit: int) -> int:
        """As the GPU computes with them."""
        return self._profile.blocks[unit].parameters * self._profile.element_bytes

    def _urgency(self, urgency: int) -> int:
        return urgency if self._plan.priority else 0

    # --- parameters

    def fetch_for_forward(self, unit: int) -> None:
        """Parameters for the unit's forward, if they are not there."""
        plan = self._plan.blocks[unit]
        if plan.leaves and not plan.keep_after_backward:
            fetch = self._fetch(Kind.PREFETCH_FORWARD, unit, unit)
            self._builder.beside(fetch, TaskId(Kind.FORWARD, unit), plan.forward_prefetch_distance)

    def fetch_for_backward(self, unit: int) -> None:
        """Parameters for the unit's recomputation and backward, if they are not there."""
        plan = self._plan.blocks[unit]
        if plan.leaves and not plan.keep_after_forward:
            # Urgent before anything that the next forward needs, and the higher unit is needed first.
            fetch = self._fetch(Kind.PREFETCH_BACKWARD, unit, -1 - unit)
            self._builder.beside(fetch, self._builder.first_backward(unit), plan.backward_prefetch_distance)

    def _fetch(self, kind: Kind, unit: int, urgency: int) -> TaskId:
        b, plan = self._builder, self._plan
        carried = plan.fetch_bytes if plan.blocks[unit].optimizer is Processor.CPU else None
        carried = self._profile.element_bytes if carried is None else carried
        seconds = self._profile.h2d_seconds(self._profile.blocks[unit].parameters * carried)
        fetch = b.task(kind, unit, H2D, seconds, self._urgency(urgency))
        b.read(fetch, Value.PARAMETERS, unit, HOST_MEMORY)
        size = self.parameter_bytes(unit) if plan.parameter_slots is None else 0
        b.make(fetch, Value.PARAMETERS, unit, size, use=_use(plan.blocks[unit], kind))
        return fetch

    def after_forward(self, unit: int) -> None:
        """What becomes of parameters when the unit's forward has ended."""
        b, plan = self._builder, self._plan.blocks[unit]
        last_user = forward = TaskId(Kind.FORWARD, unit)
        if plan.write_back_after_forward:
            seconds = self._profile.d2h_seconds(self.parameter_bytes(unit))
            last_user = b.task(Kind.WRITE_BACK_FORWARD, unit, D2H, seconds)
            b.after(last_user, forward)
            b.read(last_user, Value.PARAMETERS, unit)
            b.write(last_user, Value.PARAMETERS, unit, HOST_MEMORY)
        if plan.leaves and not plan.keep_after_forward:
            kept = plan.keep_after_backward
            kind = Kind.PREFETCH_BACKWARD if kept else Kind.PREFETCH_FORWARD
            self._life(unit, kind, forward, last_user, back=int(kept))

    def after_backward(self, unit: int) -> None:
        """What becomes of parameters when the unit's backward and update have ended."""
        b, plan, whole = self._builder, self._plan.blocks[unit], self._plan
        if not plan.leaves or plan.keep_after_backward:
            return
        last_pass = TaskId(Kind.BACKWARD, unit)
        last_user = b.find(Kind.WRITE_BACK_BACKWARD, unit) or last_pass
        if last_user.kind is Kind.WRITE_BACK_BACKWARD and whole.gpu_update_after_backward:
            last_pass = b.passes[-1]
        if (whole.gradients_replace_parameters or whole.gradients_in_slots) and plan.optimizer is Processor.CPU:
            last_user = TaskId(Kind.OFFLOAD_GRADIENTS, unit)  # until then it holds the gradient
            if whole.copied_after_backward(unit):
                last_pass = b.passes[-1]
        kind = Kind.PREFETCH_FORWARD if plan.keep_after_forward else Kind.PREFETCH_BACKWARD
        self._life(unit, kind, last_pass, last_user)

    def _life(self, unit: int, fetch: Kind, last_pass: TaskId, end: TaskId, back: int = 0) -> None:
        """From a fetch to the end of what uses the parameters last."""
        b = self._builder
        b.free(end, Value.PARAMETERS, unit, use=_use(self._plan.blocks[unit], fetch), back=back)
        user = TaskId(Kind.FORWARD, unit) if fetch is Kind.PREFETCH_FORWARD else b.first_backward(unit)
        stop = b.place[last_pass] + back * len(b.passes)
        self.lives.append(Life(TaskId(fetch, unit), b.place[user], stop, end, b.lane(end), back))

    # --- activations

    def offload_activations(self, unit: int) -> None:
        """To the host when the unit's forward has ended, if they are offloaded."""
        if self._plan.blocks[unit].activations is not Activations.OFFLOAD:
            return
        b, size = self._builder, self._profile.blocks[unit].activation_bytes
        away = b.task(Kind.OFFLOAD_ACTIVATIONS, unit, D2H, self._profile.d2h_seconds(size), self._urgency(-1 - unit))
        b.read(away, Value.ACTIVATIONS, unit)
        b.make(away, Value.ACTIVATIONS, unit, size, HOST_MEMORY)
        b.free(away, Value.INPUT, unit)
        b.free(away, Value.ACTIVATIONS, unit)

    def fetch_activations(self, unit: int) -> None:
        """And back for its backward."""
        if self._plan.blocks[unit].activations is not Activations.OFFLOAD:
            return
        b, size = self._builder, self._profile.blocks[unit].activation_bytes
        fetch = b.task(Kind.FETCH_ACTIVATIONS, unit, H2D, self._profile.h2d_seconds(size), self._urgency(-1 - unit))
        b.read(fetch, Value.ACTIVATIONS, unit, HOST_MEMORY)
        b.make(fetch, Value.ACTIVATIONS, unit, size, use=Kind.BACKWARD)
        b.free(fetch, Value.ACTIVATIONS, unit, HOST_MEMORY)
        b.beside(fetch, TaskId(Kind.BACKWARD, unit), self._plan.blocks[unit].backward_prefetch_distance)

    # --- updates

    def gpu_update(self, unit: int) -> None:
        """Where the GPU updates; and the updated parameters to the host, if they leave."""
        plan = self._plan.blocks[unit]
        if plan.optimizer is not Processor.GPU:
            return
        b, times = self._builder, self._profile.blocks[unit]
        update = b.task(Kind.GPU_UPDATE, unit, GPU, times.gpu_update_seconds)
        self._takes_gradients(update)
        b.write(update, Value.PARAMETERS, unit)
        b.workspace(update, times.gpu_update_workspace_bytes)
        if plan.leaves and not (plan.keep_after_backward and plan.write_back_after_forward):
            # The host's copy is stale until they are written back.
            seconds = self._profile.d2h_seconds(self.parameter_bytes(unit))
            back = b.task(Kind.WRITE_BACK_BACKWARD, unit, D2H, seconds, self._urgency(unit))
            b.read(back, Value.PARAMETERS, unit)
            b.write(back, Value.PARAMETERS, unit, HOST_MEMORY)

    def _takes_gradients(self, task: TaskId) -> None:
        """``task`` is the last to read the unit's gradients on the GPU."""
        b = self._builder
        b.read(task, Value.GRADIENTS, task.unit)
        if self._plan.gradients_replace_parameters:
            b.read(task, Value.PARAMETERS, task.unit)
        else:
            b.free(task, Value.GRADIENTS, task.unit)

    def update_on_cpu(self, unit: int) -> None:
        """Copy the gradient and update; a delayed update takes the gradient that is there from the iteration before."""
        steps = [self.offload_gradients, self.cpu_update]
        for step in reversed(steps) if self._plan.delayed else steps:
            step(unit)

    def offload_gradients(self, unit: int) -> None:
        """To the host, where the CPU updates."""
        plan, b = self._plan, self._builder
        if plan.blocks[unit].optimizer is not Processor.CPU:
            return
        seconds = self._profile.d2h_seconds(
            self._profile.blocks[unit].parameters * plan.gradient_bytes, pinned=plan.gradients_pinned
        )
        copy = b.task(Kind.OFFLOAD_GRADIENTS, unit, D2H, seconds, self._urgency(unit))
        self._takes_gradients(copy)
        b.write(copy, Value.GRADIENTS, unit, HOST_MEMORY)

    def cpu_update(self, unit: int) -> None:
        """Where the CPU updates."""
        plan, b = self._plan, self._builder
        if plan.blocks[unit].optimizer is not Processor.CPU:
            return
        seconds = self._profile.cpu_update_seconds(
            unit, plan.update_bytes, plan.elementwise_bytes, beside_gpu=plan.updates_beside_gpu
        )
        update = b.task(Kind.CPU_UPDATE, unit, CPU, seconds, self._urgency(unit))
        b.read(update, Value.GRADIENTS, unit, HOST_MEMORY)
        b.write(update, Value.PARAMETERS, unit, HOST_MEMORY)

    def refresh_all(self) -> None:
        """Updated parameters to the copies that stay on the GPU; others come with their next fetch."""
        b, plan = self._builder, self._plan
        units = plan.refreshed
        for unit in units:
            self._refresh(unit)
        if plan.refresh_through_buffer and units:
            size = sum(self._profile.blocks[unit].parameters for unit in units) * plan.refresh_bytes
            b.allocate(TaskId(Kind.REFRESH, units[0]), Value.PARAMETERS, None, size, use=Kind.REFRESH)
            last = TaskId(Kind.REFRESH, units[-1])
            b.free(last, Value.PARAMETERS, None, use=Kind.REFRESH)
            for unit in units[:-1]:
                b.after(last, TaskId(Kind.REFRESH, unit))

    def _refresh(self, unit: int) -> None:
        b, plan = self._builder, self._plan
        seconds = self._profile.h2d_seconds(
            self._profile.blocks[unit].parameters * plan.refresh_bytes, pinned=plan.refresh_pinned
        )
        refresh = b.task(Kind.REFRESH, unit, H2D, seconds, self._urgency(unit))
        b.read(refresh, Value.PARAMETERS, unit, HOST_MEMORY)
        b.write(refresh, Value.PARAMETERS, unit)


def _use(plan: BlockPlan, fetch: Kind) -> Kind | None:
    """What fetched parameters are there for, if they are fetched twice."""
    if plan.keep_after_forward or plan.keep_after_backward:
        return None
    return Kind.FORWARD if fetch is Kind.PREFETCH_FORWARD else Kind.BACKWARD
