"""Cuts a model at its blocks: who owns which parameters.

The runtime drives a model block by block, but the code before the first block and after the last one is the model's own: see
:mod:`autohete.runtime.forward_pass`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks

from autohete.errors import InputError
from autohete.runtime.blocks import blocks_of
from autohete.runtime.forward_pass import stopping
from autohete.runtime.model_state import NO_EFFECTS, Effects, buffers_of
from autohete.runtime.precision import DTYPES
from autohete.runtime.units import FrozenPlaces

_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


@dataclass(frozen=True, slots=True)
class Partition:
    """A model as blocks: the part before the first block, the blocks, and the part after the last one.

    Args:
        model: the whole model.
        modules: the transformer blocks.
        owned: trained parameters of each block, embedding first, head last; each parameter only once, so a matrix that
            the head shares with the embedding belongs to the embedding.
        frozen: frozen parameters of each block that only it uses: they move with it.
        effects: side effects of a forward pass, as observed by :func:`autohete.runtime.probe.by_use`.
    """

    model: nn.Module
    modules: tuple[nn.Module, ...]
    owned: tuple[tuple[nn.Parameter, ...], ...]
    frozen: tuple[tuple[nn.Parameter, ...], ...]
    effects: Effects = NO_EFFECTS

    @property
    def last(self) -> int:
        """Index of the head."""
        return len(self.modules) + 1

    @property
    def order(self) -> list[tuple[int, int]]:
        """Block and place of each trained parameter, in the model's order."""
        places = {id(parameter): (i, place) for i, owned in enumerate(self.owned) for place, parameter in enumerate(owned)}
        return [places[id(parameter)] for parameter in self.model.parameters() if id(parameter) in places]

    @property
    def lasting(self) -> list[Tensor]:
        """Buffers and other frozen parameters, which are neither trained nor moved: they stay on the device throughout."""
        moving = {id(parameter) for some in (*self.owned, *self.frozen) for parameter in some}
        frozen = [parameter for parameter in self.model.parameters() if id(parameter) not in moving]
        scales = (scale for p in self.model.parameters() if is_quantised(p) for scale in _scales(vars(p)))
        return [*self.model.buffers(), *frozen, *{id(scale): scale for scale in scales}.values()]

    def frozen_bytes(self, i: int) -> int:
        """Bytes that the frozen parameters of block ``i`` add to its trained ones."""
        return FrozenPlaces.behind(sum(parameter.nbytes for parameter in self.owned[i]), self.frozen[i]).size_bytes

    @property
    def lasting_bytes(self) -> int:
        """Bytes on the device throughout: :attr:`lasting`, copies of buffers that blocks change, tensors kept by attributes."""
        inside = [place for i in range(1, self.last) for place in buffers_of(self.named_modules(i))]
        copied: list[Tensor] = [place.value for place in inside if place.name in self.effects.changing]
        return self.effects.kept_bytes + sum(tensor.numel() * tensor.element_size() for tensor in (*self.lasting, *copied))

    def named_modules(self, i: int) -> list[tuple[str, nn.Module]]:
        """Return the modules of block ``i`` with their names; 0 and :attr:`last` are the model without its blocks."""
        if 0 < i < self.last:
            inside = set(self.modules[i - 1].modules())
        else:
            inside = {*self.model.modules()}.difference(*(module.modules() for module in self.modules))
        return [(name, module) for name, module in self.model.named_modules() if module in inside]

    @contextmanager
    def intercepted(self) -> Iterator[list[Callable[..., Any]]]:
        """Make the blocks stop a :class:`ForwardPass`; yield their original forwards.

        Inside, a Hugging Face model does not cache keys and values (these are for generation), does not collect intermediate
        results of its blocks, and does not recompute blocks itself: the schedule decides what is kept.
        """
        configs: dict[int, Any] = {id(one): one for one in (vars(module).get("config") for module in self.model.modules())}
        with ExitStack() as undo:
            for config in configs.values():  # an encoder and a decoder have their own
                for flag in ("use_cache", "output_hidden_states", "output_router_logits"):
                    if getattr(config, flag, False):
                        undo.callback(setattr, config, flag, getattr(config, flag))
                        setattr(config, flag, False)
            for module in self.model.modules():
                if vars(module).get("gradient_checkpointing") is True:
                    undo.callback(setattr, module, "gradient_checkpointing", True)
                    vars(module)["gradient_checkpointing"] = False
            yield undo.enter_context(stopping(self.modules))

    def ordered(self, order: Sequence[int]) -> Partition:
        """Return this partition with its blocks in another order."""
        owned = (self.owned[0], *(self.owned[1 + place] for place in order), self.owned[-1])
        return replace(self, modules=tuple(self.modules[place] for place in order), owned=owned)

    def using(self, used: Mapping[int, Mapping[int, int]], effects: Effects, places: Mapping[int, Set[int]]) -> Partition:
        """Return this partition with parameters outside of the blocks assigned by use in a forward pass, not by declaration.

        Those that are used in several places belong to the embedding, whose parameters stay on the device until its backward.

        Args:
            used: how often the model's own code uses each parameter, by its id and the unit before: 0 for the first block's
                input, the last block for the logits.
            effects: side effects of the forward pass.
            places: of the uses of each frozen parameter, by the address of its memory; see :class:`Probe`.

        Raises:
            InputError: a parameter of a block is used outside of it; or the order in which the gradients of a parameter's uses
                are added would be another than in a backward through the whole model.
        """
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        everywhere = frozenset[int]().union(*used.values())
        for parameter in (parameter for owned in self.owned[1:-1] for parameter in owned):
            if id(parameter) in everywhere:
                raise InputError(
                    f"{names[id(parameter)]} is also used outside of its block: only embedding and head can share parameters"
                )
        owned = [list(one) for one in self.owned]
        owned[0], owned[-1] = [], []
        for place in (0, -1):
            for parameter in self.owned[place]:
                units = [unit for unit in used if used[unit].get(id(parameter))]
                if any(used[unit][id(parameter)] > 1 for unit in units if unit < max(units)):
                    raise InputError(
                        f"{names[id(parameter)]} is used several times before a block, and again after it. PyTorch adds the "
                        "gradients of all uses one by one; block by block they would be added in another order: name all lists "
                        "of blocks, such as those of an encoder and of a decoder, or give the uses parameters of their own"
                    )
                unit = place if not units else 0 if len(units) > 1 else -1 if units[0] == self.last - 1 else units[0]
                owned[unit].append(parameter)
        return replace(self, owned=tuple(map(_round_first, owned)), effects=effects, frozen=self._moving(places))

    def _moving(self, used: Mapping[int, Set[int]]) -> tuple[tuple[nn.Parameter, ...], ...]:
        """The frozen parameters that exactly one block uses, by block. Those of a block that nothing has used yet, such as an
        expert without tokens, are taken as its own.
        """
        inside = {id(p): frozenset({place}) for place, block in enumerate(self.modules, 1) for p in block.parameters()}
        found: list[list[nn.Parameter]] = [[] for _ in self.owned]
        at = Counter(parameter.untyped_storage().data_ptr() for parameter in self.model.parameters())
        for parameter in self.model.parameters():
            address = parameter.untyped_storage().data_ptr()
            places = used.get(address) or inside.get(id(parameter), frozenset())
            whole = parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes
            ordinary = (type(parameter) is nn.Parameter or is_quantised(parameter)) and parameter.layout is torch.strided
            if not parameter.requires_grad and ordinary and whole and at[address] == 1 and len(places) == 1:
                (place,) = places
                if place >= 0:
                    found[place].append(parameter)
        return tuple(map(tuple, found))


def partition(model: nn.Module, blocks: str | Sequence[str] | None = None) -> Partition:
    """Cut ``model`` at its blocks, in the order of their declaration.

    Modules declared before the first block are assigned to the embedding, others to the head;
    :func:`autohete.runtime.probe.by_use` corrects this, and the order, by observing a forward pass.

    Args:
        model: its forward takes token ids and returns logits (or an object with ``logits``).
        blocks: dotted name of a list of blocks or of a block, or several names, in which ``*`` stands for any part. None: the
            modules of all lists (``nn.ModuleList``; ``nn.Sequential`` if there is none) that are in no other and whose modules
            have one class; without such a list, the outermost modules whose class repeats.

    Raises:
        InputError: there is no such module; or blocks share parameters or mix types.
    """
    _check_wrapping(model)
    modules = blocks_of(model, blocks)
    inside = {id(module) for block in modules for module in block.modules()}
    before: list[nn.Parameter] = []
    after: list[nn.Parameter] = []
    passed = False
    for module in model.modules():
        passed = passed or module is modules[0]
        if id(module) not in inside:
            (after if passed else before).extend(module.parameters(recurse=False))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owner: dict[int, int] = {}
    owned: list[tuple[nn.Parameter, ...]] = []
    for i, parameters in enumerate((before, *(list(module.parameters()) for module in modules), after)):
        mine = []
        for parameter in filter(lambda parameter: parameter.requires_grad, parameters):
            other = owner.setdefault(id(parameter), i)
            if other == i:
                mine.append(parameter)
            elif (other, i) != (0, len(modules) + 1):
                raise InputError(
                    f"blocks {other} and {i} (0 is the part before the list) share {names[id(parameter)]}: only embedding "
                    "and head can share parameters; copy it, or put the blocks that share it into one"
                )
        owned.append(_round_first(dict.fromkeys(mine)))
    for i, own in enumerate(owned):
        for parameter in own:
            if type(parameter.data) is not Tensor or parameter.is_meta:
                what = "on the meta device" if parameter.is_meta else f"a {type(parameter.data).__name__}"
                raise InputError(
                    f"{names[id(parameter)]} is {what}: trained parameters must be ordinary tensors with values, such as after "
                    "model.to_empty(device='cpu') and initialization"
                )
        types = {parameter.dtype for parameter in own}
        if types.difference(DTYPES.values()):
            raise InputError(
                f"block {i} has parameters of {' and '.join(sorted(map(str, types)))}: convert them to "
                f"{', '.join(map(str, DTYPES.values()))}, such as by model.to(torch.bfloat16)"
            )
    return Partition(model, tuple(modules), tuple(owned), ((),) * len(owned))


def is_quantised(parameter: Tensor) -> bool:
    """Whether ``parameter`` has values of 4 bits, as of bitsandbytes."""
    return type(parameter).__name__ == "Params4bit" and getattr(parameter, "quant_state", None) is not None


def _scales(attributes: Mapping[str, Any], depth: int = 4) -> Iterator[Tensor]:
    """The tensors among some attributes, and those of objects there: the scales of quantised values."""
    for value in attributes.values():
        if isinstance(value, Tensor):
            yield value
        elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
            yield from _scales(vars(value), depth - 1)


@contextmanager
def packed_for_training(model: nn.Module) -> Iterator[None]:
    """Let linear layers of bitsandbytes not repack 4-bit weights in evaluation, as they do on CPUs with AVX512-BF16: what is
    packed so cannot be trained.
    """
    flag = "support_avx512bf16_for_cpu"
    before = [(vars(module), vars(module)[flag]) for module in model.modules() if flag in vars(module)]
    for attributes, _ in before:
        attributes[flag] = False
    try:
        yield
    finally:
        for attributes, value in before:
            attributes[flag] = value


def _round_first(parameters: Iterable[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """Order the parameters of a block, which will be one after another in memory.

    Those of odd sizes, such as a bias over 50,257 tokens, come last, so that all others start at a multiple of 64 bytes, as if
    they were allocated one by one; of these, wide types come first, so that each starts at a multiple of its element. Where a
    tensor starts can decide which kernel is chosen, its speed, and the last bit of its sums.
    """
    return tuple(sorted(parameters, key=lambda parameter: (parameter.nbytes % 64 != 0, -parameter.dtype.itemsize)))


def _check_wrapping(model: nn.Module) -> None:
    """Check that all modules can be stopped at a block.

    Raises:
        InputError: names the module, and what to give instead.
    """
    for name, module in model.named_modules():
        kind, where = type(module).__name__, name or "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(f"{where} is a {kind}, which cannot stop at its blocks: give the original module")
        if kind in _WRAPPERS:
            raise InputError(f"{where} is wrapped in {kind}, which makes its own copies or shards: give its .module")
        if is_compiled(module):
            raise InputError(
                f"{where} is compiled, and compiled code cannot stop at the blocks, nor can its memory be counted: give the "
                "original module (_orig_mod)"
            )
        if compiled := next(_compiled_functions(module), ""):
            raise InputError(
                f"{where} calls {compiled}, which is compiled, and would run uncompiled here, so its results would differ: "
                "use the original function"
            )


def is_compiled(function: object) -> bool:
    """Whether ``torch.compile`` has made a function or module."""
    if isinstance(function, nn.Module):
        return "_orig_mod" in function._modules or function._compiled_call_impl is not None
    # Other objects, such as ``torch.ops``, may have any attribute.
    return isinstance(function, (FunctionType, MethodType)) and hasattr(function, "_torchdynamo_orig_callable")


def _compiled_functions(module: nn.Module) -> Iterator[str]:
    """The names of compiled functions that a module has as attributes, or that its forward names."""
    yield from (name for name, value in vars(module).items() if is_compiled(value))
    forward = module.forward
    if is_compiled(forward):
        yield "forward"
    function = inspect.unwrap(forward)
    code = getattr(function, "__code__", None)
    if code is not None:
        known: Mapping[str, object] = function.__globals__
        yield from (name for name in code.co_names if is_compiled(known.get(name)))


def check_hooks(model: nn.Module, modules: tuple[nn.Module, ...]) -> None:
    """Check that there are no backward hooks around blocks; hooks of blocks and inside of them run with the block's backward.

    Raises:
        InputError: names the module.
    """
    inside = {part for block in modules for part in block.modules()}
    for name, module in model.named_modules():
        if (module._backward_hooks or module._backward_pre_hooks) and module not in inside:
            raise InputError(
                f"{name or 'the model'} has a backward hook, which needs gradients across blocks: register it on a "
                "block, or on a module inside a block"
            )
    if _global_backward_hooks or _global_backward_pre_hooks:
        raise InputError("there are backward hooks for all modules (register_module_full_backward_hook): remove them")


def check_dense(model: nn.Module) -> None:
    """Check that no table has sparse gradients.

    Raises:
        InputError: names the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise InputError(f"the gradients of {name} are sparse, which a Trainer cannot update with: give it sparse=False")
