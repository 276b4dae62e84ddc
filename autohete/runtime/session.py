"""A training session: a model that has been taken over, and lanes that execute a schedule on it, iteration by iteration."""

from __future__ import annotations

from collections import Counter
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
    """Executes ``schedule`` on the model, iteration by iteration, until :meth:`close` or another schedule follows.

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
        self._execution, self._collectives = execution, collectives
        self._ledgers = _ledgers(schedule, execution)
        #: Time that the lanes of earlier schedules have worked (ns), by name.
        self._earlier_ns = Counter[str]()
        self.training = Takeover(partition, schedule, recipe, self._ledgers, collectives=collectives)
        with ExitStack() as undo:
            undo.callback(self.training.close)
            self.lanes = self._lanes(schedule)
            undo.pop_all()

    def _lanes(self, schedule: Schedule, first: int = 0) -> LaneThreads:
        execution, training, collectives = self._execution, self.training, self._collectives
        lanes = LaneThreads(
            schedule,
            training.actions.act,
            execution,
            booking=Room(schedule, training.count) if execution.accelerator.runs_ahead else training.count,
            failed=None if collectives is None else collectives.fail,
            first=first,
        )
        training.guard.wait = lanes.drain
        if training.states.ranks is not None:
            lanes.progress.lost = training.states.ranks.lost
        return lanes

    def follow(self, schedule: Schedule) -> None:
        """Execute another schedule from the next iteration on, after waiting for the admitted ones; see
        :meth:`Takeover.follow`.

        Raises:
            TaskError: a task has failed.
            InputError: it cannot follow the present one; nothing has been changed.
            DeviceOutOfMemoryError: there is no room for the states. The model has been given back, and the session
                is closed.
        """
        lanes = self.lanes
        lanes.drain()
        try:
            self.training.follow(schedule, lanes.admitted)
        except BaseException:
            if self.training.gave_back:
                self.close()
            raise
        lanes.close()
        self._earlier_ns.update(lanes.busy_ns)
        self.lanes = self._lanes(schedule, lanes.admitted)

    @property
    def busy_ns(self) -> dict[str, int]:
        """Time that each lane has worked (ns), by name."""
        return {**self._earlier_ns, **{name: self._earlier_ns[name] + ns for name, ns in self.lanes.busy_ns.items()}}

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
        with ExitStack() as undo:  # each one, even if another fails
            undo.callback(self.training.close)
            undo.callback(self.lanes.close)


def _ledgers(schedule: Schedule, execution: Execution) -> Ledgers:
    """Return ledgers with the capacities of the schedule's memories, if budgets are enforced."""
    accelerator = execution.accelerator
    if not execution.budget:
        return Ledgers(accelerator, counting=execution.counting, folder=execution.folder)
    capacities = {memory.name: memory.capacity_bytes for memory in schedule.memories}
    return Ledgers(
        accelerator,
        accelerator.memory(capacities[GPU_MEMORY]),
        Ledger(HOST_MEMORY, capacities[HOST_MEMORY]),
        Ledger(PINNED_MEMORY, capacities.get(PINNED_MEMORY)),
        execution.counting,
        execution.folder,
    )
