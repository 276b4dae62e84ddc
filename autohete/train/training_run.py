"""A training in progress: what a Trainer's calls do, in its worker's thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autohete.errors import InputError, NonFiniteLossError, check_fields
from autohete.execution.trace import Clock, Trace
from autohete.runtime.batch import Batch
from autohete.runtime.device import AllocatorMemory
from autohete.runtime.ledger import Counting, Ledger
from autohete.runtime.progress import listed
from autohete.runtime.session import Session
from autohete.runtime.settings import Execution
from autohete.schedule import CPU, GPU, Kind, TaskId
from autohete.train.caller_optimizer import CallerOptimizer
from autohete.train.loss_scale import LossScale
from autohete.train.options import Mode, TrainingOptions
from autohete.train.preparation import Buckets, Prepared
from autohete.train.refinement import Refining
from autohete.train.saved import OTHER_RANKS, check_delayed, check_state, load_states, load_values, set_random_states, state_of
from autohete.train.training_ranks import TrainingRanks, check_alike, digest

#: Number of iterations whose times are kept.
_HISTORY = 64


@dataclass(frozen=True, slots=True)
class PredictionComparison:
    """Prediction and measurement, over the iterations so far.

    Args:
        clock: clock of the measured seconds.
        predicted_seconds, measured_seconds: time of one steady iteration.
        predicted_peak_bytes, measured_peak_bytes: peak of the device; ``…_host_bytes``: of the model states on the host.
    """

    clock: Clock
    predicted_seconds: float
    measured_seconds: float
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_host_bytes: int
    measured_host_bytes: int

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(slots=True)
class Position:
    """Where a training is, before and after its model is taken over.

    Args:
        first_step: number of steps before this run.
        skipped_before: number of skipped steps among them.
        skipped: skipped iterations of this run, and the reason for each.
    """

    first_step: int = 0
    skipped_before: int = 0
    skipped: dict[int, str] = field(default_factory=dict)

    @property
    def skipped_steps(self) -> int:
        """Number of skipped steps so far."""
        return self.skipped_before + len(self.skipped)

    def move(self, state: Mapping[str, Any], admitted: int) -> None:
        """Move to that of a saved state: this run has admitted ``admitted`` iterations."""
        self.skipped_before = state["skipped_steps"] - len(self.skipped)
        self.first_step = state["step"] - admitted


class TrainingRun:
    """A model that has been taken over for training.

    Args:
        options: how to train.
        prepared: the model, its plan and its schedule.
        position: where the training is; kept up to date.
        optimizer: the caller's, in whose place it updates.
        scale: of the loss.
        ranks: this process as one of several; None: it trains alone.
        refining: whether another plan follows, by what has been measured; None: the plan stays.
        buckets: the plan for each length of batches; None: there is one for all.

    Attributes:
        session: executes the schedule, until it is closed.
    """

    def __init__(
        self,
        options: TrainingOptions,
        prepared: Prepared,
        position: Position,
        optimizer: CallerOptimizer,
        scale: LossScale,
        ranks: TrainingRanks | None = None,
        refining: Refining | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        self._options, self._prepared, self._position, self._optimizer = options, prepared, position, optimizer
        self._scale, self._ranks, self._refining, self._buckets = scale, ranks, refining, buckets
        execution = Execution(
            accelerator=options.accelerator,
            paced=options.mode is Mode.PACED,
            counting=Counting.SCHEDULED,
            threads={CPU: torch.get_num_threads()} if options.on_gpu else {GPU: prepared.threads},
            history=_HISTORY,
            folder=options.drive,
        )
        collectives = None if ranks is None else ranks.collectives
        self.session = Session(prepared.partition, prepared.prediction.schedule, options.recipe, execution, collectives)
        position.skipped = self.session.training.passes.skipped
        #: Of all batches.
        self._form = prepared.form
        self._loss = options.recipe.loss_call

    def begin(self) -> None:
        """Take over the states of the caller's optimizer."""
        if found := self._optimizer.initial():
            self.load_optimizer(found, list(found), by_masters=False)
        self._optimizer.forget()
        self.session.training.states.handed_to = self._optimizer.take
        if isinstance(self.session.device, AllocatorMemory):  # do not count what measuring took
            self.session.device.reset_peak()

    def ended(self) -> None:
        """Count the steps of this run as those before another one."""
        self._position.first_step += self.session.lanes.admitted

    @property
    def prepared(self) -> Prepared:
        """The model, and the plan by which it is trained now."""
        return self._prepared

    @property
    def executed(self) -> int:
        """Number of steps that have begun under the present plan."""
        return self.session.lanes.executed

    @property
    def excess_bytes(self) -> int:
        """Device memory that was needed beyond the prediction because sizes in the schedule are wrong."""
        device = self.session.device
        if self.session.counting is Counting.SCHEDULED or not isinstance(device, Ledger):
            return 0
        return max(0, device.peak_bytes - self._prepared.prediction.gpu.peak_bytes)

    def follow(self, prepared: Prepared) -> None:
        """Train by another plan from the next step on, after waiting for all updates; see :meth:`Session.follow`.

        Raises:
            InputError: it computes other bits than the present one; nothing has been changed.
            DeviceOutOfMemoryError: there is no room for the states; the model has been given back.
        """
        if prepared.threads != self._prepared.threads:
            raise InputError(
                f"a plan whose passes use {prepared.threads} threads cannot follow one with {self._prepared.threads}: the "
                "number changes the bits; plan for the same number"
            )
        self.session.follow(prepared.prediction.schedule)
        self._prepared = prepared

    def step(self, batch: object) -> float:
        """Train on a batch and return the loss; see :meth:`autohete.Trainer.step`."""
        options, prepared, position = self._options, self._prepared, self._position
        checked, equal = Batch.of(batch, prepared.partition.model, self._loss), not self._loss.adds_up
        self._form.check(checked)
        other = None if self._buckets is None else self._buckets.next(prepared, checked)
        if self._refining is not None:
            other = self._refining.next(self)
        if other is not None:
            self.follow(other)
        training, lanes, updates = self.session.training, self.session.lanes, self._optimizer.updates(self._scale.now())
        with training.guard.resumed():
            if self._ranks is not None:
                checked = self._agreed(self._ranks, checked)
            iteration = self.session.admit(checked.split(options.micro_batches, equal=equal), updates)
            training.states.updates_at.pop(iteration - _HISTORY, None)
        lanes.wait(TaskId(Kind.LOSS, prepared.partition.last, options.micro_batches - 1), iteration)
        loss = training.passes.losses.pop(iteration)
        if not math.isfinite(loss) and not options.recipe.skip_nonfinite:
            lanes.drain()
            step, where = position.first_step + iteration, position.skipped[iteration]
            if self._ranks is not None:
                self._ranks.fail(f"step {step}: the loss is {loss}; not finite first: {where}")
            raise NonFiniteLossError(
                f"step {step}: the loss is {loss}; not finite first: {where}. {self.changed_by(iteration)}; lower "
                "the learning rate, or skip such steps (on_nonfinite=NonFinite.SKIP)",
                step,
            )
        for task in self._tasks_of_the_model():
            lanes.wait(task, iteration)
        if self._scale.is_on:  # whether gradients are finite is known once their norm is
            lanes.wait(TaskId(Kind.CLIP, 0), iteration)
            self._scale.note(finite=iteration not in position.skipped)
        return loss

    def _agreed(self, ranks: TrainingRanks, batch: Batch) -> Batch:
        """Check that all ranks are about to make the same step; return the batch with the number of items of all ranks."""
        states = self.session.training.states
        assert states.ranks is not None
        facts = {
            "settings": [f"{name} {value}" for group in self._optimizer.settings() for name, value in group.items()],
            "scale": self._scale.now(),
            "changes": states.ranks.changes(),
            "items": batch.items,
        }
        found = ranks.exchange(f"step {self._position.first_step + self.session.lanes.admitted}", facts)
        check_alike(found, "the optimizer's settings", "settings")
        check_alike(found, "the scales of the loss", "scale")
        check_alike(found, "changes of parameters", "changes")
        return replace(batch, items=sum(one["items"] for one in found))

    def changed_by(self, iteration: int) -> str:
        """Describe what a step with a non-finite loss or gradient has changed nevertheless, once it has ended."""
        training, skipped = self.session.training, self._position.skipped
        updated = set(self.session.lanes.progress.updated(iteration))
        # A delayed update takes the gradients of the step before; after a skipped step there are none.
        stale = set(filter(training.states.delays, updated))
        by_this = updated - stale if iteration not in skipped else set()
        by_last = updated & stale if iteration and iteration - 1 not in skipped else set()
        if by_this:
            return f"This step has updated {listed(by_this)}: load a saved state to continue from a complete step"
        unchanged = "No parameter has been changed by this step"
        return f"{unchanged} ({listed(by_last)}: by the gradients of the step before, as planned)" if by_last else unchanged

    def evaluate(self, batch: object) -> float:
        """Return the loss of a batch without training, after waiting for all updates."""
        self.session.drain()
        return self.session.training.evaluation.loss(Batch.of(batch, self._prepared.partition.model, self._loss))

    def observe_gradients(self, see: Callable[[Tensor, int, Tensor], None]) -> None:
        """Let ``see`` have each gradient as a backward finds it: the parameter, the micro-batch and the gradient."""
        self.session.drain()
        self.session.training.passes.observe = see

    def gradient_norm(self) -> float | None:
        """Return the global norm of the last step's gradients once it is known; None: nothing computes it."""
        lanes = self.session.lanes
        if self._options.recipe.clip_norm is None or not lanes.admitted:
            return None
        lanes.wait(TaskId(Kind.CLIP, 0), lanes.admitted - 1)
        return self.session.training.states.clipping.total

    def parameters(self) -> list[Tensor]:
        """Return copies of all trained parameters, after waiting for all updates."""
        self.session.drain()
        return self.session.training.parameters()

    def trace(self) -> Trace:
        """Return the times of all tasks in the last iterations, after waiting for all updates."""
        self.session.drain()
        return self.session.lanes.trace()

    def state_dict(self) -> dict[str, Any]:
        """Return all state that later steps depend on, after waiting for all updates."""
        self.session.drain()
        training, position = self.session.training, self._position
        with training.guard.resumed(), training.guard.inside():
            step = position.first_step + self.session.lanes.admitted
            model, device = self._prepared.partition.model, self._options.torch_device
            state = state_of(model, training.states, self._optimizer, step, position.skipped_steps, device)
        if self._ranks is not None:
            first, *others = self._ranks.of_all("the state of the training", state["random"])
            state["random"] = first | {OTHER_RANKS: others}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict`."""
        model, training = self._prepared.partition.model, self.session.training
        check_state(state, model, self._optimizer, training.states)
        self.session.drain()
        if self._ranks is not None:
            parameters = {name: digest(value) for name, value in state["parameters"].items()}
            of_optimizer = {
                f"{part} of {name}": digest(value) for name, of in state["optimizer"].items() for part, value in of.items()
            }
            self._ranks.compare("the state to load", parameters | of_optimizer | {"step": str(state["step"])})
        with training.guard.resumed(), training.guard.inside():
            load_values(state, model, training.states)
            load_states(state, model, training.states)
        set_random_states(state, self._options.torch_device, 0 if self._ranks is None else self._ranks.rank)
        self._optimizer.use_settings(state["groups"])
        self._position.move(state, self.session.lanes.admitted)

    def read_optimizer(self) -> dict[int, dict[str, Any]]:
        """Return copies of the optimizer's states by the parameter's id, after waiting for all updates."""
        self.session.drain()
        training = self.session.training
        with training.guard.resumed(), training.guard.inside():
            return {
                id(parameter): training.states.saved_states(i, place)
                for i, unit in enumerate(training.states.units)
                for place, parameter in enumerate(unit.parameters)
            }

    def check_optimizer(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that :meth:`load_optimizer` can load states."""
        check_delayed({"optimizer": found}, self._prepared.partition.model, self.session.training.states)

    def load_optimizer(self, found: Mapping[str, Mapping[str, Any]], names: Sequence[str], *, by_masters: bool = True) -> None:
        """Replace an optimizer's states of the parameters ``names``, after waiting for all updates; see :func:`load_states`."""
        self.check_optimizer(found)
        self.session.drain()
        training = self.session.training
        with training.guard.resumed(), training.guard.inside(), torch.no_grad():
            state = {"optimizer": {name: found.get(name, {}) for name in names}}
            load_states(state, self._prepared.partition.model, training.states, by_masters=by_masters)

    def comparison(self) -> PredictionComparison:
        """Compare the prediction with the measurement, after waiting for all updates."""
        prediction, trace = self._prepared.prediction, self.trace()
        device, host = self.session.device, self.session.host
        assert device is not None
        assert host is not None
        return PredictionComparison(
            clock=trace.clock,
            predicted_seconds=prediction.iteration_seconds,
            measured_seconds=trace.steady().period_seconds,
            predicted_peak_bytes=prediction.gpu.peak_bytes,
            measured_peak_bytes=device.peak_bytes,
            predicted_host_bytes=prediction.host.peak_bytes,
            measured_host_bytes=host.peak_bytes,
        )

    def _tasks_of_the_model(self) -> Iterator[TaskId]:
        """Return the tasks after the loss that run code of the model, last first."""
        in_backward = self._prepared.partition.effects.python_in_backward
        kinds = {Kind.RECOMPUTE, Kind.BACKWARD} if in_backward else {Kind.RECOMPUTE}
        return (task.id for task in reversed(self._prepared.prediction.schedule.tasks) if task.id.kind in kinds)
