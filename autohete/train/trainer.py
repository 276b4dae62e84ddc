"""Trains a model within a memory budget: measure, plan, take over the model, step, and compare with the prediction."""

from __future__ import annotations

import atexit
import copy
import json
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from autohete.errors import AutoHeteError, InputError, NonFiniteLossError, TaskError, check_fields, check_member, check_whole
from autohete.execution.trace import Clock, Trace
from autohete.hardware import Hardware, HardwareFile
from autohete.plan import Plan
from autohete.plan.policy import Judge, Policy
from autohete.policies import parse_policy
from autohete.profile import Profile, analytic_profile
from autohete.quantities import parse_quantity
from autohete.runtime.batch import Batch, Form, Loss
from autohete.runtime.claims import Claim
from autohete.runtime.ledger import Counting, CudaMemory, Ledger
from autohete.runtime.losses import next_token_loss
from autohete.runtime.observe import observed
from autohete.runtime.optimizer import Adam
from autohete.runtime.partition import partition
from autohete.runtime.progress import listed
from autohete.runtime.session import Session
from autohete.runtime.settings import Execution, Recipe
from autohete.runtime.takeover import Takeover, only_gpu_works
from autohete.schedule import CPU, GPU, Kind, Schedule, TaskId
from autohete.simulate import Simulation, simulate_plan, simulate_safely
from autohete.train.arguments import check_arguments, check_modes
from autohete.train.as_executed import as_executed, everything_resident
from autohete.train.machine import measure_machine, versions
from autohete.train.measure import measure, workload_of
from autohete.train.saved import check_delayed, check_state, load_states, load_values, set_random_states, state_of
from autohete.train.worker import PATIENCE_SECONDS, Ended, Worker, apart, stoppable
from autohete.workload import check_clip_norm

T = TypeVar("T")

#: Share of a GPU's free memory that is used by default; the rest is for the workspaces of libraries.
_CUDA_SHARE = 0.92
#: Number of iterations whose times are kept.
_HISTORY = 64
#: Minimum ratio of a task's paced duration to its actual work.
_PACE_MARGIN = 1.5


class Mode(StrEnum):
    """Speed of the emulated device: native, as this machine, or paced, as a given hardware, to scale."""

    NATIVE = "native"
    PACED = "paced"


class NonFinite(StrEnum):
    """What to do when a loss or a gradient is NaN or infinite."""

    STOP = "stop"
    SKIP = "skip"


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


class Trainer:
    """Trains ``model`` with a policy, within memory budgets.

    Use it as a context manager. On exit, also after an exception, it waits for the work in progress and gives the trained
    parameters back to the model. The first step measures the model's blocks (unless a profile is given), plans, and takes over
    the parameters. Methods may be called from several threads; calls are serialized. It cannot be used in a forked process.

    An interrupt (Ctrl-C) stops measuring and planning. A step in progress continues, and :meth:`close` completes it. A second
    interrupt during that wait returns as soon as the running tasks have ended; its note says which steps the parameters are
    from.

    Between steps the model can be used like any other: saved, copied, called, its weights changed. The first use waits for all
    updates and sees the current values; changes take effect in the next step. Values that are used stay in host memory, outside
    the budgets, until the next step. Unsupported uses (your own gradients, updates, hooks or conversions) are rejected;
    :mod:`autohete.runtime.guard` has the rules.

    Args:
        model: has its blocks in an ``nn.ModuleList``; forward maps token ids to logits; each block's parameters have one type.
        policy: name and flags, such as ``autohete`` or ``stronghold:window=2``, or your own policy object.
        gpu_memory: budget in bytes, or text: ``24MiB``, or ``25%`` of what fully resident training would need. None: the
            hardware's memory.
        host_memory: the same for the host, but not as a share.
        pinned_memory: limit of pinned host memory. The emulated device pins nothing, but plans keep to the limit.
        loss: function of logits and targets.
        adam: optimizer settings.
        blocks: name of the block list, if it is ambiguous.
        device: ``emulated`` on the CPU, or ``cuda``.
        mode: speed of the emulated device; paced needs ``hardware``.
        hardware: the hardware to pace to. None: this machine, measured.
        profile: an earlier measurement (``autohete profile``) of this model and batch.
        on_nonfinite: whether to stop, or to skip the step, when a loss is not finite.
        clip_norm: maximum global norm of the gradients; they are scaled down before the update, bit-identical to
            ``torch.nn.utils.clip_grad_norm_`` over all trained parameters (in 16 bit, over the fp32 master weights' gradients).
            None: no clipping.
        micro_batches: number of equal parts in which each step's batch is computed; their gradients are accumulated before
            the update. The loss is the mean of the parts' losses.

    Raises:
        InputError: the model cannot be cut into blocks, or an argument is invalid.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        policy: str | Policy = "autohete",
        gpu_memory: int | str | None = None,
        host_memory: int | str | None = None,
        pinned_memory: int | str | None = None,
        loss: Loss = next_token_loss,
        adam: Adam | None = None,
        blocks: str | None = None,
        device: str = "emulated",
        mode: Mode = Mode.NATIVE,
        hardware: Hardware | None = None,
        profile: Profile | None = None,
        on_nonfinite: NonFinite = NonFinite.STOP,
        clip_norm: float | None = None,
        micro_batches: int = 1,
    ) -> None:
        check_member("mode", mode, Mode)
        check_whole("micro_batches", micro_batches, 1)
        check_clip_norm(clip_norm)
        check_member("on_nonfinite", on_nonfinite, NonFinite)
        check_arguments(model, policy, loss, adam, blocks, device, hardware, profile)
        self._partition = partition(model, blocks)
        self._policy: Policy = parse_policy(policy) if isinstance(policy, str) else policy
        self._share = _share(gpu_memory)
        if self._share is None and isinstance(gpu_memory, float) and 0 < gpu_memory <= 1:
            raise InputError(f"gpu_memory is {gpu_memory!r}: write a share as text, such as '{gpu_memory:.0%}'")
        self._gpu_memory = None if self._share is not None else _bytes(gpu_memory)
        self._host_memory, self._pinned_memory = _bytes(host_memory), _bytes(pinned_memory)
        self._loss, self._adam, self._on_nonfinite = loss, adam or Adam(), on_nonfinite
        self._clip_norm, self._micro_batches = clip_norm, micro_batches
        self._device = _torch_device(device)
        self._mode, self._hardware, self._given_profile = mode, hardware, profile
        if mode is Mode.PACED and hardware is None:
            raise InputError("a paced device needs hardware to pace to: give one, such as load_hardware('v100-32gb-dgx2')")
        if mode is Mode.PACED and self._device.type == "cuda":
            raise InputError("a GPU cannot be paced: leave mode out, or choose the device 'emulated'")
        #: Factor by which a paced device is slower than the hardware, so that the CPU can keep up.
        self.slowdown = 1.0
        #: Number of CPU threads in the emulated device's passes; training is bit-identical to plain PyTorch with that number.
        #: The caller's number (``torch.get_num_threads()``) if only the device works and blocks were measured so, else one.
        self.threads = 1
        self.prediction: Simulation | None = None
        #: Device memory that fully resident training would need.
        self.resident_bytes = 0
        #: Skipped steps and the reason for each; the number of skipped steps in the loaded state.
        self._skipped: dict[int, str] = {}
        self._skipped_before = 0
        self._form: Form | None = None
        self._entered = self._closed = self._told = False
        self._held = _Held()
        #: A dropped trainer gives the model back, too.
        weakref.finalize(self, self._held.dropped).atexit = False  # at Python's exit, _Held.at_exit runs earlier
        #: Number of steps in the loaded state, and its optimizer state until it is taken over.
        self._first_step = 0
        self._loaded: dict[str, Any] | None = None
        #: Memory of the device and of the host.
        self._memories: tuple[Ledger | CudaMemory | None, Ledger | None] = (None, None)

    def __enter__(self) -> Self:
        if self._closed:
            raise InputError("the trainer is closed and has given its model back: create a new one to continue")
        if self._entered:
            raise InputError("the trainer is already in a with statement: leave that first, and create a new one")
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._close(interrupted=isinstance(error, KeyboardInterrupt))
        except AutoHeteError as failure:  # a task failed, and the caller has not seen the error yet
            if error is None:
                raise
            error.add_note(str(failure))

    def prepare(self, batch: object) -> Simulation:
        """Measure, plan and take over the model for batches like ``batch``; return the prediction. The first step calls it.

        Args:
            batch: see :meth:`step`.

        Raises:
            InputError: the batch does not fit the model, or the model cannot be trained block by block.
            InfeasibleError: the plan, or every plan, needs more memory than there is; names the memory that is too small.
            InputError: the model is already being trained, or the trainer is closed.
        """
        self._check_caller()
        check_modes()
        return self._held.worker.do(partial(self._prepared, batch), stoppable=True)

    def _prepared(self, batch: object) -> Simulation:
        if self._closed:
            raise InputError("the trainer is closed: create a new one to continue")
        if self.prediction is not None:
            return self.prediction
        before = self._partition, self.resident_bytes, self.slowdown, self.threads
        self._held.claim = Claim(self._partition.model, "trained")
        atexit.register(self._held.at_exit)
        try:
            self.prediction = self._prepare(batch)
        except BaseException:
            self._partition, self.resident_bytes, self.slowdown, self.threads = before
            self._form, self._memories = None, (None, None)
            self._held.give_back()
            raise
        return self.prediction

    def _prepare(self, batch: object) -> Simulation:
        first = Batch.of(batch, self._partition.model)
        with _threads(self._device, 1):
            self._partition, form = observed(self._partition, first, self._loss)
        part = first.split(self._micro_batches)[0]
        prediction = self._planned(part, 1)
        threads = torch.get_num_threads()
        if threads > 1 and self._may_use_threads and only_gpu_works(prediction.schedule):
            quicker = self._planned(part, threads)
            if only_gpu_works(quicker.schedule):
                prediction, self.threads = quicker, threads
        schedule = prediction.schedule
        if prediction.plan.delayed and self._clip_norm is not None:
            raise InputError(
                f"clip_norm is {self._clip_norm}, but {prediction.plan.policy} delays updates, and a saved state does not "
                "record the scale of waiting gradients: leave clip_norm out, or choose a policy that does not delay updates"
            )
        self._form = form
        on_cuda = self._device.type == "cuda"
        recipe = Recipe(self._loss, self._adam, self._clip_norm, self._on_nonfinite is NonFinite.SKIP)
        execution = Execution(
            torch_device=self._device,
            paced=self._mode is Mode.PACED,
            counting=Counting.SCHEDULED,
            threads={CPU: torch.get_num_threads()} if on_cuda else {GPU: self.threads},
            history=_HISTORY,
        )
        session = self._held.session = Session(self._partition, schedule, recipe, execution)
        self._memories = (session.device, session.host)
        self._skipped = session.training.passes.skipped
        if self._loaded is not None:
            self._go_on(session.training, self._loaded)
        if isinstance(session.device, CudaMemory):  # do not count what measuring took
            session.device.reset_peak()
        return prediction

    def _planned(self, batch: Batch, threads: int) -> Simulation:
        """Plan and simulate, on a profile whose passes use ``threads`` threads."""
        with _threads(self._device, threads):
            profile = self._profile(batch)
        # Measured times and sizes do not depend on these.
        profile = replace(
            profile, workload=replace(profile.workload, clip_norm=self._clip_norm, micro_batches=self._micro_batches)
        )
        self.resident_bytes = simulate_plan(profile, everything_resident(profile)).gpu.peak_bytes + self._lasting_bytes
        profile = self._with_budgets(profile)
        executed = partial(as_executed, pins=self._device.type == "cuda")
        return simulate_safely(profile, _Stoppable(self._policy), executed, self._lasting_bytes)

    @property
    def _may_use_threads(self) -> bool:
        """Whether passes may use all threads; not if their times were given."""
        return self._device.type == "cpu" and self._mode is Mode.NATIVE and self._given_profile is None

    def step(self, batch: object) -> float:
        """Train on a batch and return the loss.

        Returns once no more of the model's code will run for this step: until the next step, random numbers, modes and
        attributes belong to the caller. The rest of backward and the updates continue, and overlap the next step.

        Args:
            batch: a pair of token ids and targets, each (batch, sequence); or a mapping with the arguments of the model's
                forward by name and ``targets`` (aligned with the logits) or ``labels`` (Hugging Face's, shifted here).

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; says whether this step has changed a parameter.
            NonFiniteGradientError: a gradient is NaN or infinite, of this step or, since backward overlaps, of the one before;
                says which blocks that step has updated.
            TaskError: a task failed, for example with :class:`~autohete.errors.DeviceOutOfMemoryError`.
            InputError: the batch differs from the first one in names, shapes or types, or has ids outside the vocabulary; or
                the caller changed something between steps that must not change. This call has changed nothing.
        """
        check_modes()
        if self.prediction is None:
            self.prepare(batch)
        if self._device.type == "cuda":  # the work that produces the batch may not have finished
            torch.cuda.current_stream(self._device).synchronize()
        return self._do(partial(self._step, batch))

    def _step(self, batch: object) -> float:
        session, prediction = self._running(), self.prediction
        assert prediction is not None
        assert self._form is not None
        checked = Batch.of(batch, self._partition.model)
        self._form.check(checked)
        training = session.training
        with training.guard.resumed():
            iteration = session.admit(checked.split(self._micro_batches), self._adam)
            training.states.adam_at.pop(iteration - _HISTORY, None)
        lanes = session.lanes
        lanes.wait(TaskId(Kind.LOSS, len(prediction.plan.units) - 1, self._micro_batches - 1), iteration)
        loss = training.passes.losses.pop(iteration)
        if not math.isfinite(loss) and self._on_nonfinite is NonFinite.STOP:
            lanes.drain()
            step, where = self._first_step + iteration, self._skipped[iteration]
            raise NonFiniteLossError(
                f"step {step}: the loss is {loss}; not finite first: {where}. {self._changed_by(iteration)}; lower "
                "the learning rate, or skip such steps (on_nonfinite=NonFinite.SKIP)",
                step,
            )
        for task in self._running_the_model(prediction.schedule):
            lanes.wait(task, iteration)
        return loss

    def _changed_by(self, iteration: int) -> str:
        """Describe what a step with a non-finite loss or gradient has changed nevertheless, once it has ended."""
        training = self._running().training
        updated = set(self._running().lanes.progress.updated(iteration))
        # A delayed update takes the gradients of the step before; after a skipped step there are none.
        stale = set(filter(training.states.delays, updated))
        by_this = updated - stale if iteration not in training.passes.skipped else set()
        by_last = updated & stale if iteration and iteration - 1 not in training.passes.skipped else set()
        if by_this:
            return f"This step has updated {listed(by_this)}: load a saved state to continue from a complete step"
        said = "No parameter has been changed by this step"
        return f"{said} ({listed(by_last)}: by the gradients of the step before, as planned)" if by_last else said

    def evaluate(self, batches: Iterable[object]) -> float:
        """Return the mean loss over ``batches`` (see :meth:`step`) without training, after waiting for all updates.

        Modes, buffers and random states of the model are restored.

        Raises:
            InputError: there is no batch, or no step has run yet.
            DeviceOutOfMemoryError: a batch needs more than the free device memory; the model is unchanged, training can go on.
        """
        self._do(self._drained)
        losses = []
        for batch in batches:  # the caller's code, so it runs in the caller's thread
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            losses.append(self._do(partial(self._evaluated, batch)))
        if not losses:
            raise InputError("there is no batch to evaluate: give a longer text or a larger validation share")
        return sum(losses) / len(losses)

    def _evaluated(self, batch: object) -> float:
        return self._drained().training.evaluation.loss(Batch.of(batch, self._partition.model))

    def _drained(self) -> Session:
        session = self._running()
        session.drain()
        return session

    def parameters(self) -> list[Tensor]:
        """Return copies of all trained parameters (or their master weights) in block order, after waiting for all updates."""
        return self._do(lambda: self._drained().training.parameters())

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self._adam.lr

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate for the next step on, whenever its updates run.

        Raises:
            InputError: ``lr`` is not a finite number of at least 0.
        """
        self._adam = replace(self._adam, lr=lr)

    def state_dict(self) -> dict[str, Any]:
        """Return all state that later steps depend on, after waiting for all updates; see :mod:`autohete.train.saved`.

        Copies of parameters and buffers, optimizer states, step counts, and the states of the random generators of PyTorch,
        Python and NumPy. ``torch.save`` can write them and ``torch.load(weights_only=True)`` can read them. Training resumes
        bit-identically, under any policy and budget. The caller keeps track of the position in the data.
        """
        return self._do(self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        session = self._drained()
        training = session.training
        with training.guard.resumed(), training.guard.inside():
            step = self._first_step + session.lanes.admitted
            model, states = self._partition.model, training.states
            return state_of(model, states, self._adam, step, self.skipped_steps, self._device)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of :meth:`state_dict`, before the first step or between steps.

        Also sets the learning rate and the states of the random generators.

        Raises:
            InputError: the state belongs to another model or to other optimizer settings; nothing has been changed.
        """
        self._check_caller()
        if self.prediction is not None:
            self._do(partial(self._load_between_steps, state))
            return
        model = self._partition.model
        adam = check_state(state, model, self._adam, None)
        load_values(state, model, None)
        self._loaded = {"optimizer": copy.deepcopy(dict(state["optimizer"]))}
        self._set_loaded(state, adam, 0)

    def _load_between_steps(self, state: Mapping[str, Any]) -> None:
        model, session = self._partition.model, self._running()
        training = session.training
        adam = check_state(state, model, self._adam, training.states)
        session.drain()
        with training.guard.resumed(), training.guard.inside():
            load_values(state, model, training.states)
            load_states(state, model, training.states)
        self._set_loaded(state, adam, session.lanes.admitted)

    def _set_loaded(self, state: Mapping[str, Any], adam: Adam, admitted: int) -> None:
        set_random_states(state, self._device)
        self._adam, self._skipped_before = adam, state["skipped_steps"] - len(self._skipped)
        self._first_step = state["step"] - admitted

    def trace(self) -> Trace:
        """Return the times of all tasks in the last iterations, after waiting for all updates."""
        return self._do(lambda: self._drained().lanes.trace())

    def comparison(self) -> PredictionComparison:
        """Compare the prediction with the measurement, after waiting for all updates."""
        prediction, trace = self.prediction, self.trace()
        assert prediction is not None
        device, host = self._running().device, self._running().host
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

    @property
    def skipped_steps(self) -> int:
        """Number of steps so far that were skipped because their loss or a gradient was not finite."""
        return self._skipped_before + len(self._skipped)

    @property
    def device_bytes(self) -> int:
        """Bytes in use on the device now."""
        session = self._held.session
        device = self._memories[0] if session is None else session.device
        return 0 if device is None else device.used_bytes

    @property
    def counting(self) -> Counting:
        """How device memory is counted: by the schedule's sizes, unless the first steps have shown them to be wrong."""
        return self._running().counting

    def close(self) -> None:
        """Wait for the work in progress, end the lanes, and give the parameters back to the model. Later calls do nothing.

        Raises:
            TaskError: a task failed and no call has raised the error yet.
        """
        self._close(interrupted=False)

    def _close(self, interrupted: bool) -> None:
        """Do the work of :meth:`close`; ``interrupted`` callers have used up the first interrupt, the second does not wait."""
        self._check_caller()
        held, self._closed = self._held, True
        session = held.session
        held.worker.stop()
        try:
            if held.worker.thread.ident is not None:
                held.worker.do(held.give_back, *[lambda: None] * (not interrupted), held.abandon)
            held.worker.end()
        except Ended:
            pass  # already closed
        except TaskError:
            held.worker.end()
            if not self._told:
                raise
        except KeyboardInterrupt as error:
            held.worker.end(held.give_back)  # it may have come before the wait
            if session is not None:
                error.add_note(session.lanes.progress.state())
            raise

    def _do(self, job: Callable[[], T]) -> T:
        """Run ``job`` in the trainer's thread, and return its result."""
        self._check_caller()
        self._running()
        try:
            return self._held.worker.do(job)
        except TaskError:
            self._told = True
            raise

    def _check_caller(self) -> None:
        self._held.worker.check_process()
        if threading.current_thread() in self._held.threads:
            raise InputError(
                "the trainer is called from within its own step, such as by its loss or model, and would wait for itself: use "
                "it between steps"
            )

    def _running_the_model(self, schedule: Schedule) -> Iterator[TaskId]:
        """Return the tasks after the loss that run code of the model, last first."""
        kinds = {Kind.RECOMPUTE, Kind.BACKWARD} if self._partition.effects.python_in_backward else {Kind.RECOMPUTE}
        return (task.id for task in reversed(schedule.tasks) if task.id.kind in kinds)

    def _go_on(self, training: Takeover, loaded: dict[str, Any]) -> None:
        """Take over the state loaded before the first step."""
        model = self._partition.model
        check_delayed(loaded, model, training.states)
        with training.guard.resumed(), training.guard.inside(), torch.no_grad():
            load_states(loaded, model, training.states)
        self._loaded = None

    def _running(self) -> Session:
        if self._held.session is None:
            if self._closed:
                raise InputError("the trainer is closed: create a new one to continue")
            raise InputError("the trainer has not started: call step inside its with statement")
        return self._held.session

    def _profile(self, batch: Batch) -> Profile:
        profile = self._given_profile
        if profile is None:
            hardware = self._hardware = self._hardware or _hardware(
                measure_machine(self._device, self._gpu_memory or _all_bytes(self._device), quick=True)
            )
            workload = workload_of(self._partition, batch.inputs, type(self._partition.model).__name__)
            profile = measure(self._partition, workload, hardware, batch, self._loss, self._adam, self._device)
            if self._mode is Mode.PACED:
                profile, self.slowdown = _slowed(profile, analytic_profile(workload, hardware))
        return profile

    def _with_budgets(self, profile: Profile) -> Profile:
        gpu, host = profile.hardware.gpu, profile.hardware.host
        budget = self._gpu_memory if self._share is None else round(self._share * self.resident_bytes)
        if budget is not None:
            gpu = replace(gpu, memory_bytes=budget + gpu.reserved_bytes)
        # Memory of buffers and frozen parameters, which no task moves, is not available to tasks.
        gpu = replace(gpu, reserved_bytes=gpu.reserved_bytes + self._lasting_bytes)
        if self._host_memory is not None:
            host = replace(host, memory_bytes=self._host_memory)
        if self._pinned_memory is not None:
            host = replace(host, pinned_bytes=self._pinned_memory)
        return replace(profile, hardware=replace(profile.hardware, gpu=gpu, host=host))

    @property
    def _lasting_bytes(self) -> int:
        return self._partition.lasting_bytes

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Time that each lane has worked so far."""
        return {name: ns * 1e-9 for name, ns in self._running().lanes.busy_ns.items()}


class _Held:
    """The resources of a Trainer. It does not refer to the Trainer, so that it can release them if the Trainer is dropped."""

    def __init__(self) -> None:
        self.worker = Worker("autohete-trainer", "the trainer is closed: create a new one to continue")
        self.claim: Claim | None = None
        self.session: Session | None = None

    @property
    def threads(self) -> list[threading.Thread]:
        """The worker's thread and the lanes' threads."""
        session = self.session
        return [self.worker.thread, *(session.lanes.threads if session is not None else ())]

    def give_back(self) -> None:
        """End the lanes once all admitted iterations have ended, and give the model back."""
        try:
            with ExitStack() as undo:  # each one, even if another fails
                if self.claim is not None:
                    undo.callback(self.claim.release)
                if self.session is not None:
                    undo.callback(self.session.close)
        finally:
            self.claim = self.session = None
            atexit.unregister(self.at_exit)

    def abandon(self) -> None:
        """Stop waiting for tasks that have not started."""
        self.worker.stop()
        session = self.session
        if session is not None:
            session.lanes.abandon()

    def at_exit(self) -> None:
        """Give the model back when Python exits: a thread still inside PyTorch would abort the process."""
        if self.worker.forked:
            return
        self.worker.stop()
        try:
            self.worker.end(self.give_back, PATIENCE_SECONDS)
        except KeyboardInterrupt:
            self.abandon()
            self.worker.end(timeout=PATIENCE_SECONDS)

    def dropped(self) -> None:
        """Release the resources of a Trainer that was never closed. Can run in any thread, at any time."""
        if self.worker.forked or self.worker.thread.ident is None:
            return
        open_ = self.session is not None
        if threading.current_thread() in self.threads:  # it would wait for itself
            self.worker.end(self.give_back, timeout=0)
        else:
            self.at_exit()
        if open_:
            warnings.warn(
                "a Trainer was never closed: use it in a with statement, or call close()", ResourceWarning, stacklevel=2
            )


@dataclass(frozen=True, slots=True)
class _Stoppable:
    """A policy that can be stopped whenever it tries its next plan."""

    policy: Policy

    @property
    def name(self) -> str:
        return self.policy.name

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        return self.policy.plan(profile, stoppable(judge))


@apart
def measured_profile(
    model: nn.Module,
    batch: object,
    device: str = "emulated",
    gpu_memory: int | str | None = None,
    name: str = "model",
    *,
    blocks: str | None = None,
    quick: bool = False,
) -> tuple[Profile, dict[str, Any], dict[str, str]]:
    """Measure the machine, and the blocks of ``model`` for batches like ``batch``.

    Returns:
        The profile; its hardware as the document of a hardware file; date, machine and versions. These are the arguments of
        :func:`autohete.profile.profile_file.write_profile`.
    """
    where = _torch_device(device)
    with _threads(where, 1):
        document = measure_machine(where, _bytes(gpu_memory) or _all_bytes(where), quick=quick)
    profile = measured_profile_on(_hardware(document), model, batch, device, name, blocks=blocks)
    for direction, link in (("h2d", profile.hardware.h2d), ("d2h", profile.hardware.d2h)):
        latency = document["links"][direction]["latency"]
        latency.update(value=f"{link.latency_seconds!r} s", source=f"{latency['source']}; plus task handover")
    return profile, document, versions()


@apart
def measured_hardware(device: str = "emulated", gpu_memory: int | str | None = None) -> Hardware:
    """Measure this machine, in a few seconds."""
    where = _torch_device(device)
    with _threads(where, 1):
        return _hardware(measure_machine(where, _bytes(gpu_memory) or _all_bytes(where), quick=True))


@apart
def measured_profile_on(
    hardware: Hardware,
    model: nn.Module,
    batch: object,
    device: str = "emulated",
    name: str = "model",
    *,
    blocks: str | None = None,
) -> Profile:
    """Measure the blocks of ``model`` for batches like ``batch``; copies take as long as on ``hardware``."""
    where = _torch_device(device)
    cut, first = partition(model, blocks), Batch.of(batch, model)
    claim = Claim(model, "measured")
    try:
        with _threads(where, 1):
            cut, _ = observed(cut, first, next_token_loss)
            workload = workload_of(cut, first.inputs, name)
            return measure(cut, workload, hardware, first, next_token_loss, torch_device=where)
    finally:
        claim.release()


def _hardware(document: dict[str, Any]) -> Hardware:
    return HardwareFile.model_validate_json(json.dumps(document)).hardware()


def _slowed(measured: Profile, wanted: Profile) -> tuple[Profile, float]:
    """Combine the measured sizes with the wanted times, slowed down so that this machine can keep up; return the factor, too.

    The passes of the transformer blocks determine the factor. Tasks that are still too short (a norm, a loss over few tokens)
    last as long as this machine needs.
    """

    def kept_up(real: float) -> float:
        return _PACE_MARGIN * real

    factor = 1.0
    for real, ideal in zip(measured.units[1:-1], wanted.units[1:-1], strict=True):
        factor = max(factor, kept_up(real.forward_seconds) / ideal.forward_seconds)
        factor = max(factor, kept_up(real.backward_seconds) / ideal.backward_seconds)
    update_bandwidth = wanted.hardware.cpu.update_bandwidth
    blocks = tuple(
        replace(
            real,
            forward_seconds=max(ideal.forward_seconds * factor, kept_up(real.forward_seconds)),
            backward_seconds=max(ideal.backward_seconds * factor, kept_up(real.backward_seconds)),
            gpu_update_seconds=max(ideal.gpu_update_seconds * factor, kept_up(real.gpu_update_seconds)),
            cpu_update_seconds=max(real.parameters * 28 / update_bandwidth * factor, kept_up(real.cpu_update_seconds or 0.0)),
        )
        for real, ideal in zip(measured.units, wanted.units, strict=True)
    )
    hardware = wanted.hardware
    h2d, d2h = (
        replace(
            link,
            bandwidth=link.bandwidth / factor,
            duplex_bandwidth=link.duplex_bandwidth / factor,
            latency_seconds=link.latency_seconds * factor,
        )
        for link in (hardware.h2d, hardware.d2h)
    )
    host = replace(hardware.host, memory_bandwidth=hardware.host.memory_bandwidth / factor)
    # Updates during training run at the bulk rate here: on the emulated machine they share its cores instead.
    cpu = replace(hardware.cpu, update_bandwidth=hardware.cpu.update_bandwidth / factor, concurrent_share=1.0)
    slowed = replace(hardware, h2d=h2d, d2h=d2h, host=host, cpu=cpu)
    loss = replace(measured.loss, seconds=max(wanted.loss.seconds * factor, kept_up(measured.loss.seconds)))
    return replace(measured, hardware=slowed, units=blocks, loss=loss), factor


def _bytes(given: int | str | None) -> int | None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, (int, str))):
        raise InputError(f"a memory of {given!r} is not a size: give a whole number of bytes, or text such as 24MiB")
    size = round(parse_quantity(given, "bytes")) if isinstance(given, str) else given
    if size is not None and size < 1:
        raise InputError(f"a memory of {size} bytes is too small: give a positive number, or text such as 24MiB")
    return size


def _share(given: int | str | None) -> float | None:
    """Return the share that text such as ``25%`` means; None for anything else."""
    if not isinstance(given, str) or not given.strip().endswith("%"):
        return None
    try:
        share = float(given.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 < share < 1e6:
        raise InputError(f"{given!r} is not a share of memory: write it such as 25%")
    return share


@contextmanager
def _threads(device: torch.device, count: int) -> Iterator[None]:
    """Run in as many CPU threads as the device's lane will have, if the CPU stands in for the device."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _torch_device(name: str) -> torch.device:
    if name == "emulated":
        return torch.device("cpu")
    if name == "cuda":
        if not torch.cuda.is_available():
            raise InputError("there is no GPU that PyTorch can use here: choose the device 'emulated'")
        return torch.device("cuda", torch.cuda.current_device())
    raise InputError(f"unknown device {name!r}: choose emulated or cuda")


def _all_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(_CUDA_SHARE * torch.cuda.mem_get_info(device)[0])
    return 2**40  # the emulated device has no memory of its own: without a budget it is unlimited
