"""Executes a schedule for real: trains on given batches, and records the times of all tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import Tensor, nn

from autohete.analysis.worst_case import worst_case
from autohete.errors import InfeasibleError, InputError, ScheduleError, check_whole
from autohete.execution.trace import Trace
from autohete.quantities import format_bytes
from autohete.runtime.batch import Batch, Loss
from autohete.runtime.claims import Claim
from autohete.runtime.ledger import Counting, CudaMemory, Ledger
from autohete.runtime.observe import observed
from autohete.runtime.optimizer import Adam
from autohete.runtime.partition import partition
from autohete.runtime.session import Execution, Session
from autohete.schedule import Schedule, validate


class TorchExecutor:
    """The runtime behind :class:`autohete.execution.Executor`: real tensors, autograd and threads, on the CPU.

    Args:
        model: has its blocks in an ``nn.ModuleList``, and the trained parameters after each run.
        batches: token ids and targets, each (batch, sequence), one pair per micro-batch; or the arguments of the model's
            forward by name, with ``targets`` or ``labels``.
        loss: function of logits and targets.
        adam: optimizer settings.
        clip_norm: the maximum global norm of the gradients, for schedules that clip them.
        blocks: name of the block list, if it is ambiguous.
        paced: make every task last as long as in the schedule (clock ``emulated``); otherwise as fast as the CPU allows.
        budget: enforce the memories' capacities; otherwise they are ignored.
        counting: how device memory is counted.

    After :meth:`run`, ``losses`` has the loss of each iteration, and ``parameters`` every trained parameter in block order
    (fp32 master weights if the model is in 16 bit). ``device`` and ``host`` have the peaks, if budgets were enforced. ``late``
    names the paced tasks whose work ended after their deadline, with the delay in nanoseconds.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterator[object],
        loss: Loss,
        adam: Adam | None = None,
        *,
        blocks: str | None = None,
        clip_norm: float | None = None,
        paced: bool = False,
        budget: bool = True,
        counting: Counting = Counting.EXACT,
    ) -> None:
        self._execution = Execution(paced=paced, budget=budget, counting=counting, clip_norm=clip_norm)
        self._partition = partition(model, blocks)
        self._batches, self._loss, self._adam = batches, loss, adam
        #: How device memory is counted; after a run, how it was counted in fact.
        self.counting = counting
        self.losses: list[float] = []
        self.parameters: list[Tensor] = []
        self.device: Ledger | CudaMemory | None = None
        self.host: Ledger | None = None
        self.late: dict[str, int] = {}

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
        batches = [Batch.of(batch, model) for batch in given]
        self._partition, form = observed(self._partition, batches[0], self._loss)
        for batch in batches[1:]:
            form.check(batch)
        if self._execution.budget:
            _check_fits(validate(schedule))
        with Session(self._partition, schedule, self._loss, self._adam, self._execution) as session:
            self.device, self.host = session.device, session.host
            for iteration in range(iterations):
                session.admit(batches[iteration * micro_batches : (iteration + 1) * micro_batches])
            session.drain()
            losses = session.training.passes.losses
            self.losses = [losses[iteration] for iteration in range(iterations)]
            self.parameters, self.late = session.training.parameters(), session.lanes.late
            self.counting, self.device = session.counting, session.device
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
