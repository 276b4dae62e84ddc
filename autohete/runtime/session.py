"""A training session: a model that has been taken over, and lanes that execute a schedule on it, iteration by iteration."""

from __future__ import annotations

from contextlib import ExitStack

from autohete.runtime.batch import Batch
from autohete.runtime.closing import Closing
from autohete.runtime.collectives import Collectives
from autohete.runtime.device import AllocatorMemory
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.ledger import Counting, Ledger, Room
from autohete.runtime.partition import Partition
from autohete.runtime.settings import Execution, Recipe
from autohete.runtime.takeover import Ledgers, Takeover
from autohete.runtime.update_rules import UpdateSettings
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY, Schedule


class Session(Closing):
    """Executes ``schedule`` on the model, iteration by iteration, until :meth:`close`.

    Args:
        partition: the model, cut into blocks.
        schedule: a valid schedule.
        recipe: what a step computes.
        execution: how the schedule is executed.
        collectives: if this process is one of several ranks.

    Attributes:
        training: the model that has been taken over.
        lanes: the threads, which record what has ended and when.
    """

    def __init__(
        self,
        partition: Partition,
        schedule: Schedule,
        recipe: Recipe,
        execution: Execution,
        collectives: Collectives | None = None,
    ) -> None:
        self._ledgers = _ledgers(schedule, execution)
        with ExitStack() as undo:
            self.training = Takeover(partition, schedule, recipe, self._ledgers, collectives=collectives)
            undo.callback(self.training.close)
            self.lanes = LaneThreads(
                schedule,
                self.training.actions.act,
                execution,
                booking=Room(schedule, self.training.count) if execution.accelerator.runs_ahead else self.training.count,
                failed=None if collectives is None else collectives.fail,
            )
            undo.callback(self.lanes.close)
            self.training.guard.wait = self.lanes.drain
            self._undo = undo.pop_all()

    @property
    def device(self) -> Ledger | AllocatorMemory | None:
        """The ledger of the device's memory; another one if the schedule's sizes were found wrong. None: it is not counted."""
        return self._ledgers.device if self.training.count is None else self.training.count.ledger

    @property
    def host(self) -> Ledger | None:
        """The ledger of the host's memory; None: it is not counted."""
        return self._ledgers.host

    @property
    def counting(self) -> Counting:
        """How device memory is counted: by the schedule's sizes, unless the first iterations have shown them to be wrong."""
        return Counting.EXACT if self.training.count is None else self.training.count.counting

    def admit(self, batches: list[Batch], updates: UpdateSettings | None = None) -> int:
        """Admit the next iteration, with a batch for each micro-batch, and return its number.

        Args:
            batches: the batches to train on.
            updates: what the updates of the iteration compute, whenever they run; None: as the session started.

        Raises:
            TaskError: a task has failed.
        """
        iteration = self.lanes.admitted
        if updates is not None:
            self.training.states.updates_at[iteration] = updates
        self.training.passes.give(iteration, *batches)
        return self.lanes.admit()

    def drain(self) -> None:
        """Wait until all admitted iterations have ended.

        Raises:
            TaskError: a task has failed; raised once all running tasks have ended.
        """
        self.lanes.drain()

    def close(self) -> None:
        """End the lanes once all admitted iterations have ended, and give the trained parameters back to the model.

        Raises:
            TaskError: a task has failed, and this is the first call.
        """
        self._undo.close()


def _ledgers(schedule: Schedule, execution: Execution) -> Ledgers:
    """Return ledgers with the capacities of the schedule's memories, if budgets are enforced."""
    accelerator = execution.accelerator
    if not execution.budget:
        return Ledgers(accelerator, counting=execution.counting)
    capacities = {memory.name: memory.capacity_bytes for memory in schedule.memories}
    return Ledgers(
        accelerator,
        accelerator.memory(capacities[GPU_MEMORY]),
        Ledger(HOST_MEMORY, capacities[HOST_MEMORY]),
        Ledger(PINNED_MEMORY, capacities.get(PINNED_MEMORY)),
        execution.counting,
    )
