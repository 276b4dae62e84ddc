"""Batches as users give them, checked before training: token ids and targets, or a model's arguments by name.

An argument is a tensor, or a tree of tensors: lists, tuples, dicts, and what is registered with ``torch.utils._pytree``.
"""

from __future__ import annotations

import inspect
import itertools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_map_only

from autohete.errors import InputError, unknown_name

if TYPE_CHECKING:
    from autohete.runtime.loss_call import LossCall

#: Inputs of a model's forward: its arguments by name, or its first argument, such as token ids (batch, sequence).
Inputs = Any
#: Function of logits, targets and perhaps more that returns the loss, a scalar tensor; see ``loss_call.LossCall``.
Loss = Callable[..., Tensor]

_FORMS = (
    "give (ids, targets), each (batch, sequence), or a dict with the arguments of the model's forward by name and targets "
    "(or labels, which are shifted)"
)
#: Target value that the loss ignores, as in ``torch.nn.functional.cross_entropy``.
_IGNORED = -100
_PLAIN = (bool, int, float, str, type(None))
#: The argument of a loss that is the number of targets, as in Hugging Face's models.
ITEMS = "num_items_in_batch"
#: Arguments of Hugging Face models that block-by-block training does not support, and why.
_ASKING = {
    "use_cache": "keys and values are only cached for generation",
    "output_router_logits": "the auxiliary loss of routers is part of the model's own loss, which is not computed",
    "output_attentions": "attention weights stay in the blocks",
    "output_hidden_states": "hidden states stay between the blocks",
    ITEMS: "it scales the model's own loss, which is not computed: give loss=mean_token_loss, or take it in a loss of your own",
}


@dataclass(frozen=True, slots=True)
class Batch:
    """The training data of one iteration.

    Args:
        inputs: the arguments of the model's forward by name, or its first one, such as token ids (batch, sequence).
        targets: what the loss compares the logits with; (batch, sequence) for a language model, aligned with the logits.
        labels: the labels that the targets were derived from, if targets were not given.
        for_loss: what else the loss takes, by name.
        items: number of targets that are not ignored, in the whole batch that this one is a part of.
    """

    inputs: Inputs
    targets: Tensor
    labels: Tensor | None = None
    for_loss: Mapping[str, Any] = field(default_factory=dict)
    items: int = 0

    @classmethod
    def of(cls, given: object, model: nn.Module, loss: LossCall | None = None) -> Batch:
        """Convert a user's batch for ``model``, and check it.

        Args:
            given: a pair of token ids and targets; or a mapping of the forward's arguments, with ``targets`` or Hugging Face's
                ``labels``. Labels of a causal language model equal the token ids and are shifted here. If the loss takes
                ``num_items_in_batch``, the mapping may have its value; otherwise targets are counted.
            model: the model whose forward takes the inputs.
            loss: takes what the mapping has by the names of its arguments, as the model does; None: next-token loss.

        Raises:
            InputError: the batch does not fit the model; says what is wrong.
        """
        if isinstance(given, Batch):
            return given
        labels, for_loss, items, given = None, dict[str, Any](), None, _by_field(given)
        if isinstance(given, Mapping):
            if loss is not None and loss.adds_up and ITEMS in given:
                given = dict(given)
                items = _count(given.pop(ITEMS))
            taken, names = argument_names(model) or set(), () if loss is None else loss.names
            for_loss = {name: given[name] for name in names if name in given}
            inputs, targets, labels = _split({k: v for k, v in given.items() if k not in for_loss or k in taken}, model)
        elif isinstance(given, (tuple, list)):
            if len(given) != 2:
                raise InputError(f"the batch is a {type(given).__name__} of {len(given)}: {_FORMS}")
            inputs, targets = given
        else:
            raise InputError(f"the batch is {_said(given)}: {_FORMS}")
        batch = cls(inputs, targets, labels, for_loss)
        batch._check(model, per_position=loss is None or loss.per_position)
        if loss is None or not loss.adds_up:
            return batch
        return replace(batch, items=_items(batch.targets) if items is None else items)

    def described(self) -> str:
        """The shapes of the inputs and of the targets."""
        shapes = {name: tuple(value.shape) for name, value in named(self.inputs).items() if isinstance(value, Tensor)}
        return f"{shapes}, targets {tuple(self.targets.shape)}"

    @property
    def length(self) -> int:
        """Length of the sequences."""
        return leading(self.inputs).shape[1]

    def shorter(self, length: int) -> Batch:
        """The beginning of each sequence, in all tensors that have an entry for each position."""

        def begin(value: Any, sequences: bool = True) -> Any:
            if not isinstance(value, Tensor):
                return value
            cut = [size == self.length and (dim > 0 or not sequences) for dim, size in enumerate(value.shape)]
            return value[tuple(slice(length) if one else slice(None) for one in cut)]

        cut = tree_map(lambda value: begin(value, not _is_flat(value)), _as_dict(self.inputs))
        for_loss = {name: begin(value) for name, value in self.for_loss.items()}
        return Batch(cut, begin(self.targets), None, for_loss, self.items)

    def split(self, micro_batches: int, *, equal: bool = True) -> list[Batch]:
        """Split into ``micro_batches`` batches, the largest first, with equal numbers of sequences if ``equal``.

        Raises:
            InputError: the number of sequences is not a multiple of ``micro_batches``, or less.
        """
        sequences = len(leading(self.inputs))
        if micro_batches == 1:
            return [self]
        size, rest = divmod(sequences, micro_batches)
        if not size or (rest and equal):
            cure = (
                f"a multiple of {micro_batches}, or a loss that takes num_items_in_batch, such as mean_token_loss"
                if size
                else f"at least {micro_batches}"
            )
            raise InputError(
                f"the batch has {sequences} sequences, which cannot be split into {micro_batches} {'equal ' * bool(size)}"
                f"micro-batches: give {cure}"
            )
        begins = [part * size + min(part, rest) for part in range(micro_batches + 1)]
        return [self.part(slice(first, end)) for first, end in itertools.pairwise(begins)]

    def part(self, sequences: slice) -> Batch:
        """The part with some of the sequences; the number of items stays that of the whole."""
        count = len(leading(self.inputs))
        for_loss = {name: _cut(value, count, sequences) for name, value in self.for_loss.items()}
        return Batch(_sequences(self.inputs, sequences), self.targets[sequences], None, for_loss, self.items)

    def with_labels(self, model: nn.Module) -> Inputs:
        """Return the inputs, with the labels if there are any and the model accepts them, so that it computes its own loss."""
        names = argument_names(model, labels=True)
        if self.labels is None or not isinstance(self.inputs, Mapping) or (names is not None and "labels" not in names):
            return self.inputs
        return {**self.inputs, "labels": self.labels}

    def of_loss(self, device: torch.device) -> tuple[Tensor, Mapping[str, Any]]:
        """Copies on ``device`` of the targets, and of what else the loss takes."""
        targets = self.targets.to(device, non_blocking=True, copy=True)
        return targets, cast("Mapping[str, Any]", on_device(self.for_loss, device, copy=True))

    @property
    def tensors(self) -> dict[str, Any]:
        """Everything by name."""
        return {**named(self.inputs), **named({"targets": self.targets, **self.for_loss})}

    def _check(self, model: nn.Module, *, per_position: bool) -> None:
        inputs = self.inputs if isinstance(self.inputs, Mapping) else {"ids": self.inputs}
        for name, value in {**inputs, "targets": self.targets, **self.for_loss}.items():
            tensors = [one for one in ([value] if name == "targets" else tree_leaves(value)) if isinstance(one, Tensor)]
            if not tensors and (name in ("ids", "targets") or not isinstance(value, _PLAIN)):
                hint = "; with a tokenizer, use return_tensors='pt'" if isinstance(value, list) else ""
                raise InputError(f"{name} is {_said(value)}: give a tensor, such as torch.as_tensor({name}){hint}")
        for name, value in self.tensors.items():
            if not isinstance(value, (Tensor, *_PLAIN)):
                raise InputError(
                    f"{name} is {_said(value)}: give a tensor, or register the class with torch.utils._pytree if it has tensors"
                )
            if isinstance(value, Tensor) and (value.is_meta or value.layout is not torch.strided):
                layout = str(value.layout).removeprefix("torch.")
                fault = "has no values: give an ordinary tensor"
                if not value.is_meta:
                    fault = f"is {layout}: give an ordinary tensor, such as {name}.to_dense()"
                raise InputError(f"{name} {_said(value)} {fault}")
            if isinstance(value, Tensor) and not value.numel():
                raise InputError(f"{name} {_said(value)} is empty: a batch has at least one sequence of one token")
        ids, positions = leading(self.inputs), with_targets(self.inputs)
        if ids.dim() < 2:
            raise InputError(f"the ids are {_said(ids)}: give (batch, sequence), such as ids.unsqueeze(0) for one sequence")
        if not per_position and (not self.targets.dim() or len(self.targets) != len(ids)):
            raise InputError(
                f"the targets are {_said(self.targets)}, the inputs {_said(ids)}: their first dimension must be the sequences"
            )
        if per_position and self.targets.shape != positions.shape[:2]:
            raise InputError(
                f"the targets are {_said(self.targets)}, the inputs {_said(positions)}: give one target per position, "
                f"{tuple(positions.shape[:2])}, and {_IGNORED} where there is none"
            )
        if isinstance(self.inputs, Mapping):
            _check_arguments(self.inputs, model)


def _by_field(given: Any) -> Any:
    """A batch with fields for targets or labels as a dict."""
    if hasattr(given, "_fields"):
        found = {name: getattr(given, name) for name in given._fields}
    elif is_dataclass(given) and not isinstance(given, (type, Batch)):
        found = {one.name: getattr(given, one.name) for one in fields(given)}
    else:
        return given
    return found if {"targets", "labels"} & found.keys() else given


def named(inputs: Inputs) -> dict[str, Any]:
    """What is in ``inputs`` that is no container, by name, such as ``images[0]``; inputs without names are called ``ids``."""
    if not isinstance(inputs, Mapping):
        inputs = {"ids": inputs}
    return {f"{name}{keystr(path)}": value for name, tree in inputs.items() for path, value in tree_flatten_with_path(tree)[0]}


def leading(inputs: Inputs) -> Tensor:
    """Return the tensor of ``inputs`` whose shape begins with (batch, sequence): the token ids, or their equivalent.

    Raises:
        InputError: there is no such tensor.
    """
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs, Mapping) and isinstance(inputs.get("input_ids"), Tensor):
        return cast("Tensor", inputs["input_ids"])
    leaves = named(inputs)
    for value in leaves.values():
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value
    raise InputError(f"the batch has {', '.join(leaves) or 'no inputs'}, no token ids among them: {_FORMS}")


def with_targets(inputs: Inputs) -> Tensor:
    """Return the tensor of ``inputs`` whose positions have targets: of an encoder-decoder model the decoder's."""
    for name in ("decoder_input_ids", "decoder_inputs_embeds"):
        if isinstance(inputs, Mapping) and isinstance(inputs.get(name), Tensor):
            return cast("Tensor", inputs[name])
    return leading(inputs)


def first_sequence(inputs: Inputs) -> Inputs:
    """Return the part of ``inputs`` that belongs to the first sequence."""
    return _sequences(inputs, slice(1))


def _sequences(inputs: Inputs, part: slice) -> Inputs:
    sequences = len(leading(inputs))
    return tree_map(lambda value: _cut(value, sequences, part) if not _is_flat(value) else value, _as_dict(inputs))


def _is_flat(value: Any) -> bool:
    """Whether it is a tensor of one dimension: positions, and not sequences."""
    return isinstance(value, Tensor) and value.dim() < 2


def _cut(value: Any, sequences: int, part: slice) -> Any:
    """A part of what has an entry for each of so many sequences; anything else as it is."""
    return value[part] if isinstance(value, Tensor) and value.dim() and len(value) == sequences else value


def _as_dict(inputs: Inputs) -> Inputs:
    """Arguments by name in a container that is a tree."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _items(targets: Tensor) -> int:
    """Number of targets that are not ignored."""
    if targets.is_floating_point():
        return targets.numel()
    return int((targets != _IGNORED).sum())


def _count(given: object) -> int | None:
    """The number of items that a batch gives; None: it leaves that open.

    Raises:
        InputError: it is not a positive whole number.
    """
    if given is None:
        return None
    value = given.item() if isinstance(given, Tensor) and given.numel() == 1 else given
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1 or value < 1:
        raise InputError(f"{ITEMS} is {_said(given)}: give a positive whole number, or leave it out to count the targets")
    return int(value)


def padded(inputs: Inputs) -> Inputs:
    """Return ``inputs`` with padding if they have masks: without padding, models skip what they allocate for it."""
    if not isinstance(inputs, Mapping):
        return inputs
    return {name: _padded(value) if str(name).endswith("attention_mask") else value for name, value in inputs.items()}


def _padded(mask: Any) -> Any:
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not bool((mask != 0).all()):
        return mask
    mask = mask.clone()
    mask[:, -1] = 0
    return mask


def on_device(inputs: Inputs, device: torch.device, *, copy: bool = False) -> Inputs:
    """Move ``inputs`` to ``device``; with ``copy``, independent of what the caller does with its own."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=copy, copy=copy), _as_dict(inputs))


class Form:
    """The form that all batches of a training run share with the first one, which is the largest.

    Args:
        first: the first batch.
        rows: number of rows of the table that an input is looked up in, by the input's name.
        classes: number of classes of the targets; None: any that the loss accepts.
    """

    def __init__(self, first: Batch, rows: Mapping[str, int], classes: int | None) -> None:
        self._first, self._rows, self._classes = first.tensors, rows, classes
        self._shapes = {name: _said(value) for name, value in self._first.items()}
        self._largest = _sizes(first)
        self.check(first)

    def check(self, batch: Batch) -> None:
        """Reject a batch that would fail during training, or need more memory than the first. It may have fewer sequences, and
        shorter ones.

        Raises:
            InputError: names, shapes or types differ from the first batch, or ids are outside the vocabulary.
        """
        found, shape = batch.tensors, _sizes(batch)
        if found.keys() != self._first.keys():
            raise InputError(
                f"the batch has {', '.join(found)}; the first one had {', '.join(self._first)}: give the same in each step"
            )
        for name, value in found.items():
            first = self._first[name]
            if not self._is_like(first, value, shape):
                cure = "others may have fewer or shorter sequences: call prepare with one of the largest shape"
                if value is None or first is None:
                    cure = "others have to give the same tensors: for a mask that is missing, give one that hides nothing"
                raise InputError(
                    f"the batch has {name} {_said(value)}, the first one had {self._shapes[name]}: memory is planned for the "
                    f"first batch, and {cure}"
                )
        for name, rows in self._rows.items():
            check_range(name, found[name], rows)
        if self._classes is not None:
            check_classes(batch.targets, self._classes)

    def of(self, first: Batch) -> Form:
        """The form of batches like ``first`` of the same model."""
        return Form(first, self._rows, self._classes)

    def admits(self, batch: Batch) -> bool:
        """Whether a batch of another form with the same names has this one, too."""
        shape = _sizes(batch)
        return all(self._is_like(self._first[name], value, shape) for name, value in batch.tensors.items())

    def _is_like(self, first: Any, value: Any, shape: Sequence[int]) -> bool:
        """Whether ``value`` can take the place of ``first`` in a batch of ``shape``."""
        if not isinstance(first, Tensor) or not isinstance(value, Tensor):
            return _said(value) == _said(first) and (isinstance(value, Tensor) or value == first)
        if (value.dim(), value.dtype) != (first.dim(), first.dtype):
            return False
        less = {(most, size) for most, size in zip(self._largest, shape, strict=True) if size <= most}
        if first.dim() and first.shape[0] in self._largest and (first.shape[0], value.shape[0]) not in less:
            return False
        return all(a == b or (a, b) in less for a, b in zip(first.shape, value.shape, strict=True))


def _sizes(batch: Batch) -> tuple[int, ...]:
    """Numbers of sequences and of positions, of encoder and decoder."""
    return (*leading(batch.inputs).shape[:2], *with_targets(batch.inputs).shape[:2])


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
            f"{name} has values from {lowest} to {highest}, the model accepts 0 to {rows - 1}: use the model's tokenizer"
            + (f", or a model that accepts {highest + 1} values" if highest >= rows else "")
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
    if _is_encoder_decoder(model) and {"decoder_input_ids", "decoder_inputs_embeds"}.isdisjoint(inputs):
        shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shifted is None:
            raise InputError(
                f"the batch has labels, but {type(model).__name__} has no prepare_decoder_input_ids_from_labels: give "
                "decoder_input_ids, too"
            )
        inputs["decoder_input_ids"] = shifted(labels=labels)
    return inputs, _from_labels(labels, model), labels


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


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
    if kind == "ForMaskedLM" or _is_encoder_decoder(model):
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
    return repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
