"""Batches as users give them, checked before training: token ids and targets, or a model's arguments by name."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from autohete.errors import InputError, unknown_name

#: Inputs of a model's forward: token ids (batch, sequence) as its first argument, or its arguments by name.
Inputs = Tensor | Mapping[str, Any]
#: Function of logits and targets that returns the loss, a scalar tensor.
Loss = Callable[[Tensor, Tensor], Tensor]

_FORMS = (
    "give (ids, targets), each (batch, sequence), or a dict with the arguments of the model's forward by name and targets "
    "(or labels, which are shifted)"
)
#: Target value that the loss ignores, as in ``torch.nn.functional.cross_entropy``.
_IGNORED = -100
#: Arguments of Hugging Face models that block-by-block training does not support, and why.
_ASKING = {
    "use_cache": "keys and values are only cached for generation",
    "output_router_logits": "the auxiliary loss of routers is part of the model's own loss, which is not computed",
    "output_attentions": "attention weights stay in the blocks",
    "output_hidden_states": "hidden states stay between the blocks",
    "num_items_in_batch": "it scales the model's own loss, which is not computed: divide in your own loss",
}


@dataclass(frozen=True, slots=True)
class Batch:
    """The training data of one iteration.

    Args:
        inputs: token ids (batch, sequence), or the arguments of the model's forward by name.
        targets: (batch, sequence), aligned with the logits.
        labels: the labels that the targets were derived from, if targets were not given.
    """

    inputs: Inputs
    targets: Tensor
    labels: Tensor | None = None

    @classmethod
    def of(cls, given: object, model: nn.Module) -> Batch:
        """Convert a user's batch for ``model``, and check it.

        Args:
            given: a pair of token ids and targets; or a mapping of the forward's arguments, with ``targets`` or Hugging Face's
                ``labels``. Labels of a causal language model equal the token ids and are shifted here.
            model: the model whose forward takes the inputs.

        Raises:
            InputError: the batch does not fit the model; says what is wrong.
        """
        if isinstance(given, Batch):
            return given
        labels = None
        if isinstance(given, Mapping):
            inputs, targets, labels = _split(given, model)
        elif isinstance(given, (tuple, list)):
            if len(given) != 2:
                raise InputError(f"the batch is a {type(given).__name__} of {len(given)}: {_FORMS}")
            inputs, targets = given
        else:
            raise InputError(f"the batch is {_said(given)}: {_FORMS}")
        batch = cls(inputs, targets, labels)
        batch._check(model)
        return batch

    @property
    def named(self) -> Mapping[str, Any]:
        """The inputs by name; unnamed inputs are called ``ids``."""
        return self.inputs if isinstance(self.inputs, Mapping) else {"ids": self.inputs}

    def split(self, micro_batches: int) -> list[Batch]:
        """Split into ``micro_batches`` batches with equal numbers of sequences.

        Raises:
            InputError: the number of sequences is not a multiple of ``micro_batches``.
        """
        sequences = len(leading(self.inputs))
        size, rest = divmod(sequences, micro_batches)
        if rest:
            raise InputError(
                f"the batch has {sequences} sequences, which cannot be split into {micro_batches} equal micro-batches: give a "
                f"multiple of {micro_batches}"
            )
        parts = [slice(first, first + size) for first in range(0, sequences, size)]
        return [Batch(_sequences(self.inputs, part), self.targets[part]) for part in parts]

    def with_labels(self, model: nn.Module) -> Inputs:
        """Return the inputs, with the labels if there are any and the model accepts them, so that it computes its own loss."""
        names = argument_names(model, labels=True)
        if self.labels is None or isinstance(self.inputs, Tensor) or (names is not None and "labels" not in names):
            return self.inputs
        return {**self.inputs, "labels": self.labels}

    def _check(self, model: nn.Module) -> None:
        for name, value in {**self.named, "targets": self.targets}.items():
            if isinstance(value, Tensor):
                if not value.numel():
                    raise InputError(f"{name} {_said(value)} is empty: a batch has at least one sequence of one token")
            elif name in ("ids", "targets") or not isinstance(value, (bool, int, float, str, type(None))):
                hint = "; with a tokenizer, use return_tensors='pt'" if isinstance(value, list) else ""
                raise InputError(f"{name} is {_said(value)}: give a tensor, such as torch.as_tensor({name}){hint}")
        ids = leading(self.inputs)
        if ids.dim() < 2:
            raise InputError(f"the ids are {_said(ids)}: give (batch, sequence), such as ids.unsqueeze(0) for one sequence")
        if self.targets.shape != ids.shape[:2]:
            raise InputError(
                f"the targets are {_said(self.targets)}, the inputs {_said(ids)}: give one target per position, "
                f"{tuple(ids.shape[:2])}, and {_IGNORED} where there is none"
            )
        if isinstance(self.inputs, Mapping):
            _check_arguments(self.inputs, model)


def leading(inputs: Inputs) -> Tensor:
    """Return the tensor of ``inputs`` whose shape begins with (batch, sequence): the token ids, or their equivalent.

    Raises:
        InputError: there is no such tensor.
    """
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs.get("input_ids"), Tensor):
        return cast("Tensor", inputs["input_ids"])
    for value in inputs.values():
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value
    raise InputError(f"the batch has {', '.join(inputs) or 'no inputs'}, no token ids among them: {_FORMS}")


def first_sequence(inputs: Inputs) -> Inputs:
    """Return the part of ``inputs`` that belongs to the first sequence."""
    return _sequences(inputs, slice(1))


def _sequences(inputs: Inputs, part: slice) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs[part]
    sequences = len(leading(inputs))

    def cut(value: Any) -> Any:
        return value[part] if isinstance(value, Tensor) and value.dim() > 1 and len(value) == sequences else value

    return {name: cut(value) for name, value in inputs.items()}


def padded(inputs: Inputs) -> Inputs:
    """Return ``inputs`` with padding if they have a mask: without padding, models skip what they allocate for it."""
    if isinstance(inputs, Tensor):
        return inputs
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not bool((mask != 0).all()):
        return inputs
    mask = mask.clone()
    mask[:, -1] = 0
    return {**inputs, "attention_mask": mask}


def on_device(inputs: Inputs, device: torch.device, *, copy: bool = False) -> Inputs:
    """Move ``inputs`` to ``device``; with ``copy``, independent of what the caller does with its own."""
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=copy, copy=copy)
    return {
        name: value.to(device, non_blocking=copy, copy=copy) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


class Form:
    """The form that all batches of a training run share with the first one.

    Args:
        first: the first batch.
        rows: number of rows of the table that an input is looked up in, by the input's name.
        classes: number of classes of the targets; None: any that the loss accepts.
    """

    def __init__(self, first: Batch, rows: Mapping[str, int], classes: int | None) -> None:
        self._first, self._rows, self._classes = {**first.named, "targets": first.targets}, rows, classes
        self._shapes = {name: _said(value) for name, value in self._first.items()}
        self.check(first)

    def check(self, batch: Batch) -> None:
        """Reject a batch that would fail during training, or need different memory than the first batch.

        Raises:
            InputError: names, shapes or types differ from the first batch, or ids are outside the vocabulary.
        """
        found = {**batch.named, "targets": batch.targets}
        if found.keys() != self._first.keys():
            raise InputError(
                f"the batch has {', '.join(found)}; the first one had {', '.join(self._first)}: give the same in each step"
            )
        for name, value in found.items():
            first = self._first[name]
            if _said(value) != self._shapes[name] or (not isinstance(value, Tensor) and value != first):
                raise InputError(
                    f"the batch has {name} {_said(value)}, the first one had {self._shapes[name]}: memory is planned for one "
                    "shape; pad the sequences, and leave out a last batch that is smaller"
                )
        for name, rows in self._rows.items():
            check_range(name, found[name], rows)
        if self._classes is not None:
            check_classes(batch.targets, self._classes)


def check_classes(targets: Tensor, classes: int) -> None:
    """Check that targets are valid classes.

    Raises:
        InputError: targets are not whole numbers from 0 to ``classes - 1``; ignored positions do not count.
    """
    if targets.is_floating_point() or targets.dtype is torch.bool:
        raise InputError(f"the targets are {_said(targets)}: give whole numbers, the correct token of each position")
    check_range("targets", targets[targets != _IGNORED], classes)


def check_range(name: str, ids: Tensor, rows: int) -> None:
    """Check that ids are from 0 to ``rows - 1``; floating-point and empty tensors are not checked.

    Raises:
        InputError: states the name and the range of the ids.
    """
    if not ids.numel() or ids.is_floating_point():
        return
    lowest, highest = (int(value) for value in torch.aminmax(ids))
    if lowest < 0 or highest >= rows:
        raise InputError(
            f"{name} has values from {lowest} to {highest}, the model accepts 0 to {rows - 1}: use the model's tokenizer, "
            f"or a model that accepts {highest + 1} values"
        )


def _split(given: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], Any, Tensor | None]:
    """Return the model's arguments, the targets, and the labels that the targets were derived from.

    Raises:
        InputError: there are neither targets nor labels, or both.
    """
    inputs = dict(given)
    known = [name for name in ("targets", "labels") if inputs.get(name) is not None]
    if len(known) != 1:
        raise InputError(
            f"the batch has {', '.join(map(str, inputs)) or 'nothing'}: give targets (aligned with the logits) or labels "
            f"(shifted here), and {'not both' if known else 'one of them'}"
        )
    targets, labels = inputs.pop("targets", None), inputs.pop("labels", None)
    if targets is not None or not isinstance(labels, Tensor):
        return inputs, labels if targets is None else targets, None
    return inputs, _from_labels(labels, model), labels


def _from_labels(labels: Tensor, model: nn.Module) -> Tensor:
    """Derive targets from labels in the way of the model's own loss.

    Raises:
        InputError: the model's loss is not a token loss.
    """
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise InputError(
            "config.output_router_logits adds an auxiliary loss to the model's own, which is not computed: set it to False, or "
            "give targets and a loss"
        )
    kind = getattr(model, "loss_type", None) or "ForCausalLM"
    if kind == "ForMaskedLM":
        return labels
    if kind != "ForCausalLM":
        raise InputError(
            f"labels of {type(model).__name__} are for a loss of the type {kind}: give targets (batch, sequence), and a loss "
            "of logits and targets"
        )
    return functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


def _check_arguments(inputs: Mapping[str, Any], model: nn.Module) -> None:
    for name, why in _ASKING.items():
        if inputs.get(name) not in (None, False):
            raise InputError(f"{name}={inputs[name]} is not supported in training: {why}; leave it out")
    names = argument_names(model)
    for name in inputs:
        if not isinstance(name, str):
            raise InputError(f"the batch has the key {name!r}: {_FORMS}")
        if names is not None and name not in names:
            raise unknown_name(f"argument of the forward of {type(model).__name__}", name, names)


def argument_names(model: nn.Module, *, labels: bool = False) -> set[str] | None:
    """Return the argument names of the model's forward, with those of targets only if ``labels``; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        *_, anything = (parameter.name for parameter in parameters)
        more = _keys(inspect.unwrap(model.forward), anything)
        if more is None:
            return None
        names |= more
    return names if labels else names - {"targets", "labels"}


@lru_cache(maxsize=64)
def _keys(forward: Callable[..., Any], anything: str) -> frozenset[str] | None:
    """Return the names that the annotation of ``**anything`` allows; None if it allows all."""
    try:
        hint = typing.get_type_hints(forward).get(anything)
    except (NameError, TypeError):  # an annotation that only exists for type checkers
        return None
    kind = (typing.get_args(hint) or (hint,))[0]
    return frozenset(kind.__annotations__) if typing.is_typeddict(kind) else None


def _said(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype}"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else f"a {type(value).__name__}"
