"""Compares a training with the plain loop of PyTorch, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from autohete.errors import InputError, check_fields
from autohete.runtime.batch import Batch, Loss
from autohete.runtime.loss_call import LossCall
from autohete.runtime.losses import next_token_loss
from autohete.runtime.optimizer import MASTER, STEP
from autohete.runtime.update_rules import default_optimizer
from autohete.train.trainer import Trainer

#: Integer types by size, to compare bits.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor or number whose bits differ.

    Args:
        step: number of the step, from 0.
        what: ``loss``, ``gradient``, ``parameter``, ``buffer``, ``random state``, or the name of an optimizer state.
        name: of the parameter or buffer; empty for a loss and a random state.
        elements: number of elements that differ.
        of: number of elements in all.
        largest: largest absolute difference; NaN if an element is not finite.
        micro_batch: of a gradient.
    """

    step: int
    what: str
    name: str
    elements: int
    of: int
    largest: float
    micro_batch: int = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        of = f" of {self.name}" if self.name else ""
        part = f" (micro-batch {self.micro_batch})" if self.micro_batch else ""
        count = f"{self.elements:,} of {self.of:,} elements, " if self.of > 1 else ""
        return f"step {self.step}: {self.what}{of}{part} differs: {count}by at most {self.largest:.3g}"


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of :func:`verify`.

    Args:
        steps: number of steps that were compared; it ends with the first that differs.
        threads: number of CPU threads of both.
        compared: number of tensors and numbers that were compared, by what they are.
        differences: what differs in the last of these steps, in the order in which a step computes it. Empty: all bits are
            equal.
    """

    steps: int
    threads: int
    compared: Mapping[str, int]
    differences: tuple[Difference, ...]

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_equal(self) -> bool:
        """Whether all bits are equal."""
        return not self.differences


def verify(
    model: nn.Module,
    batches: Iterable[object],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss = next_token_loss,
    master_weights: bool = True,
    clip_norm: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    autocast: torch.dtype | None = None,
    micro_batches: int = 1,
    **options: Any,
) -> Verification:
    """Train a copy of ``model`` beside the plain loop of PyTorch on another copy, and compare all bits after each step.

    Compares losses, gradients of each micro-batch, parameters, buffers, states of the optimizer and the random generator. It
    takes the memory of both copies with their states. The arguments and the random generator are left as they were.

    Args:
        model: as in :class:`autohete.Trainer`.
        batches: one for each step; all of them are used, unless a step differs.
        optimizer, loss, master_weights, clip_norm, grad_scaler, autocast, micro_batches, options: keywords of
            :class:`autohete.Trainer`.

    Raises:
        InputError: there is no batch; an argument is invalid; the device is a GPU, or the training is meant to differ from the
            plain loop: with skipped steps, other than those of a ``grad_scaler``, or a policy that delays updates.
    """
    for name, least in (("device", "emulated"), ("on_nonfinite", "stop")):
        if options.get(name, least) != least:
            raise InputError(f"{name} is {options[name]}, which is not compared with plain PyTorch: leave it out")
    if optimizer is None:
        optimizer = default_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    trained, its_optimizer = _copied(model, optimizer)
    options |= {"loss": loss, "master_weights": master_weights, "clip_norm": clip_norm, "micro_batches": micro_batches}
    options["autocast"] = autocast
    its_scaler, scaler = copy.deepcopy(grad_scaler), copy.deepcopy(grad_scaler) or torch.amp.GradScaler("cpu", enabled=False)
    with _random_state_kept(), Trainer(trained, optimizer=its_optimizer, grad_scaler=its_scaler, **options) as trainer:
        call = LossCall(loss, autocast)
        plain = _PlainLoop(*_copied(model, optimizer), call, master_weights, clip_norm, scaler, micro_batches)
        compared: dict[str, int] = {}
        for step, batch in enumerate(batches):
            if not step:
                prediction = trainer.prepare(batch)
                if prediction.plan.delayed:
                    raise InputError(
                        f"{prediction.plan.policy} delays updates, which the plain loop does not: choose another policy"
                    )
                seen = _Gradients(trained, trainer)
            differences = _compared_step(step, batch, plain, trainer, seen, compared)
            if differences:
                return Verification(step + 1, trainer.threads, compared, tuple(differences))
        if not compared:
            raise InputError("there is no batch to verify with: give at least one")
        return Verification(step + 1, trainer.threads, compared, ())


def _copied(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy of both, with what PyTorch leaves out of an optimizer's: attributes that a class derived from its own has added.
    Methods that schedulers have replaced are not among them.
    """
    copied = copy.deepcopy((model, optimizer))
    others = vars(optimizer).keys() - vars(copied[1]).keys()
    vars(copied[1]).update({name: vars(optimizer)[name] for name in others if not callable(vars(optimizer)[name])})
    return copied


class _PlainLoop:
    """Plain PyTorch: a forward, a backward and a step of the optimizer, with fp32 master weights of 16-bit parameters.

    Attributes:
        gradients: of the last step, by micro-batch and the parameter's name; none of a skipped step, which computes only some.
        skipped: the scaler has skipped the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossCall,
        masters: bool,
        clip_norm: float | None,
        scaler: torch.amp.GradScaler,
        micro_batches: int,
    ) -> None:
        self.model, self._optimizer, self._loss = model, optimizer, loss
        self._clip_norm, self._scaler, self._micro_batches = clip_norm, scaler, micro_batches
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        #: What the optimizer updates, by the parameter's name.
        self._masters = {name: p if p.dtype is torch.float32 or not masters else self._master(p) for name, p in self._trained()}
        self.gradients: dict[tuple[int, str], Tensor] = {}
        self.skipped = False
        for module in model.modules():
            config: Any = vars(module).get("config")
            if hasattr(config, "use_cache"):  # nothing is cached in training
                config.use_cache = False

    def step(self, batch: object) -> float:
        """Train on a batch and return the loss."""
        loss, self.gradients = 0.0, {}
        checked, equal = Batch.of(batch, self.model, self._loss), not self._loss.adds_up
        parts = self._micro_batches if equal else 1
        for number, part in enumerate(checked.split(self._micro_batches, equal=equal)):
            with torch.autocast("cpu", self._loss.autocast, enabled=self._loss.autocast is not None):
                found: Any = self.model(**part.inputs) if isinstance(part.inputs, Mapping) else self.model(part.inputs)
            logits: Any = getattr(found, "logits", found[0] if isinstance(found, tuple) else found)
            value = self._loss(logits, part, torch.device("cpu"))
            loss += value.item() / parts
            share = self._scaler.scale(value if parts == 1 else value / parts)
            gradients = torch.autograd.grad(share, list(self._parameters.values()), allow_unused=True)
            for name, gradient in zip(self._parameters, gradients, strict=True):
                if gradient is not None:
                    self.gradients[number, name] = gradient
        self._update()
        if self.skipped:
            self.gradients.clear()
        return loss

    def _update(self) -> None:
        for name, master in self._masters.items():
            found = [gradient for (_, other), gradient in self.gradients.items() if other == name]
            master.grad = reduce(torch.add, found).to(master.dtype, copy=True) if found else None  # clipping writes to it
        if self._clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._masters.values(), self._clip_norm)
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self.skipped = self._scaler.get_scale() < before
        for name, parameter in self._trained():
            if self._masters[name] is not parameter:
                parameter.data.copy_(self._masters[name].detach())
            self._masters[name].grad = None

    def states(self) -> Iterator[tuple[str, str, Tensor | float | None]]:
        """What later steps depend on: what it is, the name of its parameter or buffer, and its values."""
        for name, parameter in self.model.named_parameters():
            yield "parameter", name, parameter.detach()
        for name, buffer in self.model.named_buffers():
            yield "buffer", name, buffer
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                yield MASTER, name, master.detach()
        yield from _optimizer_states(self._optimizer, {id(master): name for name, master in self._masters.items()})

    def _trained(self) -> Iterable[tuple[str, Tensor]]:
        return self._parameters.items()

    def _master(self, parameter: Tensor) -> Tensor:
        """An fp32 copy of a parameter, in its place in the optimizer."""
        states = self._optimizer.state.pop(parameter, {})
        master = nn.Parameter(states.pop(MASTER, parameter.detach()).float().clone())
        for group in self._optimizer.param_groups:
            group["params"] = [master if other is parameter else other for other in group["params"]]
        if states:
            self._optimizer.state[master] = states
        return master


def _optimizer_states(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, str, Tensor | float | None]]:
    """What a saved state of ``optimizer`` has of each parameter, whose name is given by its id."""
    order = [names.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]
    for index, states in optimizer.state_dict()["state"].items():
        if not float(states.get(STEP, 1)):
            continue  # made by a step that was skipped; a Trainer has none before the first update
        for what, value in _flat(states):
            yield what, order[index], float(value) if what == STEP else value


def _flat(states: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """States by name, out of the inner mapping in which bitsandbytes puts those that are not to be cast."""
    for what, value in states.items():
        yield from _flat(value) if isinstance(value, Mapping) else [(what, value)]


class _Gradients:
    """The gradients that a Trainer finds, as its lanes do.

    Attributes:
        found: by micro-batch and the parameter's name, in the order in which backward has completed them.
    """

    def __init__(self, model: nn.Module, trainer: Trainer) -> None:
        self.model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.found: dict[tuple[int, str], Tensor] = {}
        trainer._held.do(lambda run: run.observe_gradients(self._see))

    def _see(self, parameter: Tensor, micro_batch: int, gradient: Tensor) -> None:
        # By NumPy, whose memory is not counted as the device's.
        bits = gradient.view(_BITS[gradient.element_size()]).numpy().copy()
        key = micro_batch, self._names[id(parameter)]
        seen = torch.from_numpy(bits).view(gradient.dtype)
        # A matrix that two blocks share gets its gradient in two parts; it is complete with the second.
        self.found[key] = seen if key not in self.found else self.found.pop(key) + seen


def _compared_step(
    step: int, batch: object, plain: _PlainLoop, trainer: Trainer, seen: _Gradients, compared: dict[str, int]
) -> list[Difference]:
    """Make a step in both ways, and return what differs."""
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(trainer.threads)
    try:
        expected = plain.step(batch)
    finally:
        torch.set_num_threads(threads)
    random = torch.get_rng_state()
    torch.set_rng_state(before)
    seen.found.clear()
    loss, found = trainer.step(batch), _by_what(trainer.state_dict())
    names = {id(parameter): name for name, parameter in seen.model.named_parameters()}
    found |= {(what, name): value for what, name, value in _optimizer_states(trainer.optimizer, names)}
    if plain.skipped:
        seen.found.clear()
    pairs: list[tuple[str, str, int, Any, Any]] = [("loss", "", 0, loss, expected)]
    order = [*seen.found, *(key for key in plain.gradients if key not in seen.found)]
    pairs += [("gradient", key[1], key[0], seen.found.get(key), plain.gradients.get(key)) for key in order]
    pairs += [(what, name, 0, found.get((what, name)), value) for what, name, value in plain.states()]
    pairs.append(("random state", "", 0, torch.get_rng_state(), random))
    differences = []
    for what, name, micro_batch, ours, theirs in pairs:
        compared[what] = compared.get(what, 0) + 1
        difference = _difference(ours, theirs)
        if difference is not None:
            differences.append(Difference(step, what, name, *difference, micro_batch))
    return differences


def _by_what(state: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """The parameters, buffers and master weights of a saved state."""
    masters = {name: states[MASTER] for name, states in state["optimizer"].items() if MASTER in states}
    kinds = {"parameter": state["parameters"], "buffer": state["buffers"], MASTER: masters}
    return {(what, name): value for what, values in kinds.items() for name, value in values.items()}


def _difference(ours: Any, theirs: Any) -> tuple[int, int, float] | None:
    """Number of elements that differ, number of all, and the largest difference; None if all bits are equal."""
    ours, theirs = (_as_tensor(value) for value in (ours, theirs))
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        count = max(0 if value is None else value.numel() for value in (ours, theirs))
        return count, count, float("nan")
    bits = _BITS[ours.element_size()]
    different = int((ours.contiguous().view(bits) != theirs.contiguous().view(bits)).sum())
    return (different, ours.numel(), float((ours.double() - theirs.double()).abs().max())) if different else None


def _as_tensor(value: Any) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return None if value is None else value.detach().reshape(-1)
    return torch.tensor([float(value)], dtype=torch.float64)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)
