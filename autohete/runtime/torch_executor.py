"""Executes a schedule for real: trains on given batches, and records the times of all tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from autohete.analysis.worst_case import worst_case
from autohete.errors import InfeasibleError, InputError, ScheduleError, check_fields, check_whole
from autohete.execution.trace import Trace
from autohete.quantities import format_bytes
from autohete.runtime.batch import Batch
from autohete.runtime.claims import Claim
from autohete.runtime.device import AllocatorMemory
from autohete.runtime.ledger import Counting, Ledger
from autohete.runtime.observe import observed
from autohete.runtime.partition import partition
from autohete.runtime.session import Session
from autohete.runtime.settings import Execution, Recipe
from autohete.schedule import Schedule, validate


@dataclass(slots=True)
class RunResult:
    """What a run has left so far, besides its trace.

    Args:
        losses: the loss of each iteration.
        parameters: every trained parameter in block order (fp32 master weights if the model is in 16 bit).
        device, host: peaks of the memories; None: budgets are not enforced.
        counting: how device memory was counted in fact.
        late: the paced tasks whose work ended after their deadline, with the delay in nanoseconds.
    """

    losses: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    device: Ledger | AllocatorMemory | None = None
    host: Ledger | None = None
    counting: Counting = Counting.EXACT
    late: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)


class TorchExecutor:
    """The runtime behind :class:`autohete.execution.Executor`: real tensors, autograd and threads, on the CPU.

    Args:
        model: has blocks, and the trained parameters after each run.
        batches: token ids and targets, each (batch, sequence), one pair per micro-batch; or the arguments of the model's
            forward by name, with ``targets`` or ``labels``.
        recipe: what an iteration computes.
        execution: how it is executed; the clock is ``emulated`` if it is paced.
        blocks: names of lists of blocks, or of the blocks themselves, in which ``*`` stands for any part; None: they are found.

    Attributes:
        result: what the last run has left.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterator[object],
        recipe: Recipe | None = None,
        execution: Execution | None = None,
        *,
        blocks: str | Sequence[str] | None = None,
    ) -> None:
        self._recipe, self._execution = recipe or Recipe(), execution or Execution()
        self._partition, self._batches = partition(model, blocks), batches
        self.result = RunResult(counting=self._execution.counting)

    def run(self, schedule: Schedule, iterations: int) -> Trace:
        """Train for ``iterations`` iterations of ``schedule``.

        Raises:
            TaskError: a task failed; names the task, with the original error as its cause. No thread is left behind.
            InfeasibleError: some order of the schedule's tasks needs more of a memory than there is.
            ScheduleError: a task may fall behind in freeing memory without limit.
            DeviceOutOfMemoryError: the states, or a task, need more of a memory than the schedule says.
            InputError: there are fewer batches than iterations, or the first batch shows that the model or the loss cannot
                be used for training.
        """
        check_whole("iterations", iterations, 1)
        claim = Claim(self._partition.model, "trained")
        try:
            return self._run(schedule, iterations)
        finally:
            claim.release()

    def _run(self, schedule: Schedule, iterations: int) -> Trace:
        micro_batches = schedule.micro_batches
        wanted = iterations * micro_batches
        model, given = self._partition.model, list(itertools.islice(self._batches, wanted))
        if len(given) < wanted:
            each = f" of {micro_batches} micro-batches" if micro_batches > 1 else ""
            raise InputError(f"{iterations} iterations{each} need {wanted} batches, but there are {len(given)}: give more data")
        loss = self._recipe.loss_call
        batches = [Batch.of(batch, model, loss) for batch in given]
        self._partition, form = observed(self._partition, batches[0], loss)
        for batch in batches[1:]:
            form.check(batch)
        if self._execution.budget:
            _check_fits(validate(schedule))
        with Session(self._partition, schedule, self._recipe, self._execution) as session:
            result = self.result = RunResult(device=session.device, host=session.host, counting=session.counting)
            for iteration in range(iterations):
                session.admit(batches[iteration * micro_batches : (iteration + 1) * micro_batches])
            session.drain()
            losses = session.training.passes.losses
            result.losses = [losses[iteration] for iteration in range(iterations)]
            result.parameters, result.late = session.training.parameters(), session.lanes.late
            result.counting, result.device = session.counting, session.device
        return session.lanes.trace()


def _check_fits(schedule: Schedule) -> None:
    for memory in schedule.memories:
        worst = worst_case(schedule, memory.name)
        if worst.peak_bytes is None:
            raise ScheduleError(
                f"{worst.task} frees {memory.name} memory, but no later allocation waits for it: usage may grow without limit"
            )
        if not worst.fits:
            holder, size = next(iter(worst.holders.items()))
            largest = f"{holder.replace('_', ' ')} {format_bytes(size)}"
            raise InfeasibleError(
                f"if copies are late the schedule needs {worst.peak_bytes} B ({format_bytes(worst.peak_bytes)}) of "
                f"{memory.name} memory at {worst.task}, there are {memory.capacity_bytes} B; largest: {largest}. Give it that "
                "much, or more waits: autohete.analysis.memory_waits.with_memory_waits",
                constraint=memory.name,
                capacity_bytes=memory.capacity_bytes,
                needed_bytes=worst.peak_bytes,
            )
