"""Trains a model within a memory budget: measure, plan, take over the model, step, and compare with the prediction."""

from __future__ import annotations

import atexit
import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Never, Self

import torch
from torch import Tensor, nn

from autohete.errors import AutoHeteError, InputError, check_member
from autohete.execution.trace import Trace
from autohete.hardware import Hardware
from autohete.plan.policy import Policy
from autohete.printable import shown
from autohete.profile import Profile
from autohete.runtime.autocast import Autocast
from autohete.runtime.batch import Loss
from autohete.runtime.claims import Claim
from autohete.runtime.gradient_norm import NO_CLIPPING
from autohete.runtime.ledger import Counting
from autohete.runtime.losses import next_token_loss
from autohete.runtime.partition import partition
from autohete.simulate import Simulation
from autohete.train.arguments import check_blocks, check_model, check_modes, device_of, policy_of, recipe_of
from autohete.train.buckets import check_buckets
from autohete.train.caller_optimizer import CallerOptimizer
from autohete.train.checkpoints import Checkpoint, CheckpointWriter, read_checkpoint
from autohete.train.held import Held
from autohete.train.loss_scale import LossScale
from autohete.train.options import MemoryLimits, Mode, NonFinite, TrainingOptions
from autohete.train.preparation import Preparation, Prepared
from autohete.train.refinement import Refinement, Refining
from autohete.train.saved import check_state, load_values, set_random_states
from autohete.train.training_ranks import TrainingRanks, group_of
from autohete.train.training_run import Position, PredictionComparison, TrainingRun

__all__ = ["Mode", "NonFinite", "PredictionComparison", "Trainer"]


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
        model: has blocks, in lists or of a class that repeats; forward maps its inputs to logits, and calls each block once.
        policy: name and flags, such as ``autohete`` or ``stronghold:window=2``, or your own policy object.
        gpu_memory: budget in bytes, or text: ``24MiB``, or ``25%`` of what fully resident training would need. None: the
            hardware's memory.
        host_memory: the same for the host, but not as a share.
        pinned_memory: limit of pinned host memory. The emulated device pins nothing, but plans keep to the limit.
        loss: function of logits and targets.
        optimizer: an AdamW, Adam, SGD, Adafactor or Muon of ``torch.optim``, an 8-bit optimizer of bitsandbytes, or one with a
            registered rule (:func:`~autohete.runtime.update_rules.register_rule`), over the model's trained parameters, with
            any number of groups; or a list of optimizers that have each parameter once. Its settings may change between steps,
            also by a scheduler of ``torch.optim.lr_scheduler``. Do not call its ``step``: the Trainer updates in its place, as
            it would. Its ``state_dict`` and ``load_state_dict`` work as usual; its states come from ``optimizer.state`` and go
            back there in the end, with the master weights as ``master``. None: AdamW with a learning rate of 1e-3, betas of 0.9
            and 0.95, a weight decay of 0.1 and the fused kernel.
        master_weights: whether 16-bit parameters have fp32 master weights and states. Otherwise they are updated as they are,
            with states of their type, as PyTorch's optimizers do; bf16 only, and not with SGD.
        blocks: names of lists of blocks, or of the blocks themselves, in which ``*`` stands for any part; None: they are found.
        device: ``emulated`` on the CPU, or ``cuda``.
        mode: speed of the emulated device; paced needs ``hardware``.
        hardware: the hardware to pace to. None: this machine, measured.
        profile: an earlier measurement (``autohete profile``) of this model and batch.
        drive: a folder on a drive, which is the place ``nvme``: it is measured, unless hardware or a profile is given, and
            what rests there, or in another place besides the device and the host, is in a file in it. The file has no name, and
            is gone when training ends. None: this machine has no such place; what a hardware's places have is in ``TMPDIR``.
        on_nonfinite: whether to stop, or to skip the step, when a loss is not finite.
        clip_norm: maximum global norm of the gradients; they are scaled down before the update, bit-identical to
            ``torch.nn.utils.clip_grad_norm_`` over all trained parameters (in 16 bit, over the fp32 master weights' gradients).
            None: no clipping.
        grad_scaler: scales the loss, against underflow of gradients in float16, and skips steps whose gradients are not finite,
            as in a loop that calls its ``scale``, ``step`` and ``update``. Do not call it in the loss. All updates wait for the
            whole backward pass, as with ``clip_norm``.
        autocast: type in which the model and the loss compute under ``torch.autocast``, as in a loop that has it around both,
            ``torch.bfloat16`` or ``torch.float16``. Parameters, gradients and states keep their types. It may be around the
            step, too. None: without, but the model may use it in its forward.
        micro_batches: number of equal parts in which each step's batch is computed; their gradients are accumulated before
            the update. The loss is the mean of the parts' losses.
        refine: whether the policy plans again once the first steps have measured how long tasks take. Another plan follows
            between two steps if it is predicted to be at least 3 % faster, and the first one again if it was not. That changes
            no bit. Plans of a paced device, of several ranks and of buckets stay.
        buckets: lengths of sequences, up to that of the first batch. Batches that are no longer than one of them train by a
            plan of its own, in which more units keep their activations. All other states are where they are for the longest.
        process_group: the processes that train the model together, each on its own batches; None: the default group of
            ``torch.distributed``, if there is one. All of them call the same methods in the same order. Budgets are those of
            each rank, losses those of its own batches; :mod:`autohete.runtime.collectives` states the arithmetic.

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
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        master_weights: bool = True,
        blocks: str | Sequence[str] | None = None,
        device: str = "emulated",
        mode: Mode = Mode.NATIVE,
        hardware: Hardware | None = None,
        profile: Profile | None = None,
        drive: str | Path | None = None,
        on_nonfinite: NonFinite = NonFinite.STOP,
        clip_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | None = None,
        micro_batches: int = 1,
        refine: bool = True,
        buckets: Sequence[int] = (),
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        group = group_of(process_group)
        if group is not None and mode is Mode.PACED:
            raise InputError("several ranks cannot be paced yet: leave mode out, or train in one process")
        check_model(model)
        check_blocks(blocks)
        check_member("on_nonfinite", on_nonfinite, NonFinite)
        self._optimizer = CallerOptimizer(optimizer, model, masters=master_weights)
        self._scale = LossScale(grad_scaler)
        self._options = TrainingOptions(
            policy=policy_of(policy),
            limits=MemoryLimits.of(gpu_memory, host_memory, pinned_memory),
            recipe=recipe_of(
                loss,
                self._optimizer.updates(),
                NO_CLIPPING if clip_norm is None and self._scale.is_on else clip_norm,
                autocast,
                skips=on_nonfinite is NonFinite.SKIP or self._scale.is_on,
            ),
            micro_batches=micro_batches,
            torch_device=device_of(device),
            mode=mode,
            hardware=hardware,
            profile=profile,
            refines=refine,
            drive=None if drive is None else str(drive),
        )
        self._options.accelerator.prepare()
        self._model, self._blocks = model, blocks
        partition(model, blocks)  # refuses what cannot be trained
        ranks = None if group is None else TrainingRanks(group, self._options.torch_device)
        self._preparation = Preparation(self._options, ranks)
        self._buckets = check_buckets(buckets)
        if self._buckets and profile is not None:
            raise InputError(
                "a profile is of batches of one length: leave it out, so that the batches of each bucket are measured"
            )
        if self._buckets and ranks is not None:
            raise InputError("several ranks train by one plan: leave buckets out, or train in one process")
        refines = refine and ranks is None and mode is Mode.NATIVE and not self._buckets
        self._refining = Refining(self._preparation.planned_again) if refines else None
        self._prepared: Prepared | None = None
        self._position = Position()
        self._entered = False
        self._held, self._writing = Held(), CheckpointWriter()
        self._held.ranks = ranks
        self._held.serving = self._optimizer.attach(_Served(self._held).running)
        #: A dropped trainer gives the model back, too.
        weakref.finalize(self, self._held.dropped).atexit = False  # at Python's exit, Held.at_exit runs earlier

    def __enter__(self) -> Self:
        if self._held.closed:
            raise InputError("the trainer is closed and has given its model back: create a new one to continue")
        if self._entered:
            raise InputError("the trainer is already in a with statement: leave that first, and create a new one")
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(error)

    def __reduce__(self) -> Never:
        raise InputError(
            "a Trainer has threads and cannot be copied or pickled: use Trainer.save, or copy Trainer.state_dict()"
        )

    @property
    def prediction(self) -> Simulation | None:
        """The plan, its schedule and its simulation; None: nothing has been planned."""
        return None if self._prepared is None else self._prepared.prediction

    @property
    def refinement(self) -> Refinement | None:
        """What the first steps have taught about the plan; None: there were too few, or the plan stays as it is."""
        return None if self._refining is None else self._refining.found

    @property
    def resident_bytes(self) -> int:
        """Device memory that fully resident training would need; 0: nothing has been planned."""
        return 0 if self._prepared is None else self._prepared.resident_bytes

    @property
    def slowdown(self) -> float:
        """Factor by which a paced device is slower than the hardware, so that the CPU can keep up."""
        return 1.0 if self._prepared is None else self._prepared.slowdown

    @property
    def threads(self) -> int:
        """Number of CPU threads in the emulated device's passes; training is bit-identical to plain PyTorch with that number.

        The caller's number (``torch.get_num_threads()``) if only the device works and blocks were measured so, else one.
        """
        return 1 if self._prepared is None else self._prepared.threads

    def prepare(self, batch: object) -> Simulation:
        """Measure, plan and take over the model for batches like ``batch``; return the prediction. The first step calls it.

        Args:
            batch: see :meth:`step`.

        Raises:
            InputError: the batch does not fit the model, or the model cannot be trained block by block.
            InfeasibleError: the plan, or every plan, needs more memory than there is; names the memory that is too small.
            InputError: the model is already being trained, or the trainer is closed.
        """
        self._held.check_caller()
        check_modes(Autocast.to(self._options.recipe.autocast, self._options.torch_device))
        return self._held.worker.do(partial(self._prepare, batch), stoppable=True)

    def _prepare(self, batch: object) -> Simulation:
        held = self._held
        if held.closed:
            raise InputError("the trainer is closed: create a new one to continue")
        if self._prepared is None:
            held.claim = Claim(self._model, "trained")
            atexit.register(held.at_exit)
            try:
                self._optimizer.check_trained(self._model)
                cut = partition(self._model, self._blocks)  # again: the caller may have changed the model
                prepared = self._preparation.prepare(cut, batch, self._optimizer.initial())
                buckets = self._preparation.prepare_shorter(prepared, batch, self._buckets) if self._buckets else None
                held.run = TrainingRun(
                    self._options,
                    prepared,
                    self._position,
                    self._optimizer,
                    self._scale,
                    held.ranks,
                    self._refining,
                    buckets,
                )
                held.run.begin()
            except BaseException as error:
                if held.ranks is not None:
                    held.ranks.fail(f"{type(error).__name__}: {error}")
                held.give_back()
                raise
            self._prepared = prepared
        return self._prepared.prediction

    def step(self, batch: object) -> float:
        """Train on a batch and return the loss.

        Returns once no more of the model's code will run for this step: until the next step, random numbers, modes and
        attributes belong to the caller. The rest of backward and the updates continue, and overlap the next step; switches of
        all of PyTorch, such as ``torch.backends.mkldnn.flags``, should stay until :meth:`parameters` or the end of training.

        Args:
            batch: a pair of token ids and targets, each (batch, sequence); or a mapping with the arguments of the model's
                forward by name and ``targets`` (aligned with the logits) or ``labels`` (Hugging Face's, shifted here unless the
                model is an encoder-decoder). Arguments may be trees of tensors.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; says whether this step has changed a parameter.
            NonFiniteGradientError: a gradient is NaN or infinite, of this step or, since backward overlaps, of the one before;
                says which blocks that step has updated.
            TaskError: a task failed, for example with :class:`~autohete.errors.DeviceOutOfMemoryError`.
            InputError: the batch differs from the first one in names, shapes or types, or has ids outside the vocabulary; or
                the caller changed something between steps that must not change. This call has changed nothing.
        """
        check_modes(Autocast.to(self._options.recipe.autocast, self._options.torch_device))
        if self._prepared is None:
            self.prepare(batch)
        self._finish_batch()
        loss = self._held.do(partial(self._step, batch=batch))
        self._optimizer.note_step()
        return loss

    def _step(self, run: TrainingRun, batch: object) -> float:
        try:
            return run.step(batch)
        finally:
            self._prepared = run.prepared

    def evaluate(self, batches: Iterable[object]) -> float:
        """Return the mean loss over ``batches`` (see :meth:`step`) without training, after waiting for all updates.

        Modes, buffers and random states of the model are restored.

        Raises:
            InputError: there is no batch, or no step has run yet.
            DeviceOutOfMemoryError: a batch needs more than the free device memory; the model is unchanged, training can go on.
        """
        self._held.do(lambda run: run.session.drain())
        losses = []
        for batch in batches:  # the caller's code, so it runs in the caller's thread
            self._finish_batch()
            losses.append(self._held.do(partial(TrainingRun.evaluate, batch=batch)))
        if not losses:
            raise InputError("there is no batch to evaluate: give a longer text or a larger validation share")
        return sum(losses) / len(losses)

    def parameters(self) -> list[Tensor]:
        """Return copies of all trained parameters (or their master weights) in block order, after waiting for all updates."""
        return self._held.do(TrainingRun.parameters)

    @property
    def optimizer(self) -> Any:
        """The optimizer in whose place the Trainer updates, or the list of them, as given. Settings of their groups take effect
        with the next step.
        """
        return self._optimizer.given

    def state_dict(self) -> dict[str, Any]:
        """Return all state that later steps depend on, after waiting for all updates; see :mod:`autohete.train.saved`.

        Copies of parameters and buffers, optimizer states, step counts, and the states of the random generators of PyTorch,
        Python and NumPy. ``torch.save`` can write them and ``torch.load(weights_only=True)`` can read them. Training resumes
        bit-identically, under any policy and budget. The caller keeps track of the position in the data.
        """
        return self._held.do(TrainingRun.state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of :meth:`state_dict`, before the first step or between steps.

        Also sets the settings of the optimizer's groups and the states of the random generators.

        Raises:
            InputError: the state belongs to another model or another optimizer; nothing has been changed.
        """
        self._held.check_caller()
        if self._prepared is not None:
            self._held.do(lambda run: run.load_state_dict(state))
        else:
            self._held.worker.do(partial(self._load_before, state))

    def _load_before(self, state: Mapping[str, Any]) -> None:
        """Load a state before the model is taken over: into the model, and into the caller's optimizer."""
        if self._held.closed:
            raise InputError("the trainer is closed: create a new one to continue")
        model = self._model
        check_state(state, model, self._optimizer, None)
        load_values(state, model, None)
        for name, parameter in model.named_parameters():
            if name in state["optimizer"]:
                self._optimizer.take(parameter, copy.deepcopy(dict(state["optimizer"][name])))
        set_random_states(state, self._options.torch_device, 0 if self._held.ranks is None else self._held.ranks.rank)
        self._optimizer.use_settings(state["groups"])
        self._position.move(state, 0)

    def save(self, folder: str | Path, *, keep: int = 3, extra: object = None, background: bool = False) -> None:
        """Write a checkpoint of :meth:`state_dict` below ``folder``, whole or not at all. Of several ranks the first writes.

        Args:
            folder: contains the checkpoints, each in a folder of its own, such as ``000007-step-00000020``.
            keep: number of checkpoints that stay; older ones are removed.
            extra: numbers, text and tensors in dictionaries and lists that :meth:`load` returns, such as a scheduler's
                ``state_dict()`` and the position in the data.
            background: return once the state is copied. What goes wrong is raised by the next :meth:`save` or :meth:`load`, or
                by :meth:`close`.

        Raises:
            InputError: it cannot be written, or no step has run yet; earlier checkpoints are as before.
        """
        _check_folder(folder)
        with self._writing.lock:
            state = self.state_dict()
            if self._held.ranks is not None and self._held.ranks.rank:
                return
            checkpoint = Checkpoint({"training": state, "extra": copy.deepcopy(extra) if background else extra})
            self._writing.run(lambda: checkpoint.write(folder, state["step"], keep), background=background)

    def load(self, folder: str | Path) -> Any:
        """Resume from the latest checkpoint below ``folder``, or from the checkpoint ``folder``, and return its ``extra``.

        Raises:
            InputError: there is none, it is damaged, or it does not fit the model; nothing has been changed.
        """
        _check_folder(folder)
        self._writing.wait()
        content: Any = read_checkpoint(folder)
        if not isinstance(content, dict) or content.keys() != {"training", "extra"}:
            raise InputError(f"{str(folder)!r} has a checkpoint of something else: give a folder that Trainer.save has written")
        self.load_state_dict(content["training"])
        return content["extra"]

    def trace(self) -> Trace:
        """Return the times of all tasks in the last iterations under the present plan, after waiting for all updates."""
        return self._held.do(TrainingRun.trace)

    def comparison(self) -> PredictionComparison:
        """Compare the prediction with the measurement under the present plan, after waiting for all updates."""
        return self._held.do(TrainingRun.comparison)

    @property
    def steps(self) -> int:
        """Number of steps that have begun so far, those before a state was loaded included."""
        run = self._held.run
        return self._position.first_step + (0 if run is None else run.session.lanes.admitted)

    @property
    def skipped_steps(self) -> int:
        """Number of steps so far that were skipped because their loss or a gradient was not finite."""
        return self._position.skipped_steps

    @property
    def gradient_norm(self) -> float | None:
        """Global norm of the last step's gradients before they were clipped, after waiting for its backward pass.

        It is what ``torch.nn.utils.clip_grad_norm_`` returns. None: there is neither a ``clip_norm`` nor a ``grad_scaler``, so
        nothing computes it, or no step has run yet.
        """
        return None if self._prepared is None else self._held.do(TrainingRun.gradient_norm)

    @property
    def device_bytes(self) -> int:
        """Bytes in use on the device now."""
        run = self._held.run
        device = None if run is None else run.session.device
        return 0 if device is None else device.used_bytes

    @property
    def counting(self) -> Counting:
        """How device memory is counted: by the schedule's sizes, unless the first steps have shown them to be wrong."""
        return self._held.running().session.counting

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Time that each lane has worked so far."""
        return {name: ns * 1e-9 for name, ns in self._held.running().session.busy_ns.items()}

    def close(self) -> None:
        """Wait for the work in progress, end the lanes, and give the parameters back to the model. Later calls do nothing.

        Raises:
            TaskError: a task failed and no call has raised the error yet.
            InputError: a checkpoint could not be written in the background.
        """
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """Close everything, whatever fails. What fails besides ``error``, which the caller sees, is a note on it."""
        seen = error
        try:
            self._held.close(error)
        except BaseException as failure:
            if error is not None and isinstance(failure, AutoHeteError):  # a task failed, and no call has raised the error yet
                error.add_note(str(failure))
            else:
                seen = failure
        try:
            self._writing.wait()
        except Exception as failure:
            if seen is None:
                raise
            seen.add_note(str(failure))
        if seen is not None and seen is not error:
            raise seen

    def _finish_batch(self) -> None:
        """Wait for the caller's work on the GPU, which may produce the batch."""
        self._options.accelerator.finish()


def _check_folder(given: object) -> None:
    """Check that ``given`` is a path; an empty text would be the working directory."""
    if not isinstance(given, (str, Path)) or given == "":
        raise InputError(f"folder is {shown(given)}: give the path of the folder of the checkpoints")


class _Served:
    """The training in progress, as the caller's optimizer uses it: in the trainer's thread."""

    def __init__(self, held: Held) -> None:
        self._held = held

    def running(self) -> Self | None:
        """This object if there is a training."""
        return self if self._held.run is not None else None

    def read_optimizer(self) -> dict[int, dict[str, Any]]:
        return self._held.do(TrainingRun.read_optimizer)

    def check_optimizer(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        self._held.do(lambda run: run.check_optimizer(found))

    def load_optimizer(self, found: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> None:
        self._held.do(lambda run: run.load_optimizer(found, names))
