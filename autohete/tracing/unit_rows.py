"""Turns a recording into the units of a table, for one batch."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autohete.errors import InputError
from autohete.tracing.again import groups_of
from autohete.tracing.recording import RecordedCall, Recording


@dataclass(frozen=True, slots=True)
class Cut:
    """A recording, cut at its blocks.

    Args:
        recording: what ran.
        starts: the first forward operation of each unit but the first, and of the loss.
        prediction: the storage that the loss receives.
    """

    recording: Recording
    starts: tuple[int, ...]
    prediction: int

    @property
    def loss(self) -> int:
        """The number of units, which stands for the loss where a unit is asked for."""
        return len(self.starts)

    def unit_of(self, call: int) -> int:
        """The unit that runs a forward operation."""
        return bisect_right(self.starts, call)

    def calls(self) -> tuple[list[list[int]], list[list[int]]]:
        """The operations of each unit and of the loss, forward and backward, by index."""
        forward, backward = ([list[int]() for _ in range(self.loss + 1)] for _ in range(2))
        for i, call in enumerate(self.recording.calls):
            (backward if call.backward else forward)[self.unit_of(call.origin)].append(i)
        return forward, backward


def cut_at_blocks(recording: Recording, prediction: int, blocks: Sequence[nn.Module]) -> Cut:
    """Cut at the blocks, in the order of their calls. Code between two blocks belongs to the first of them.

    Raises:
        InputError: no block is called, or one is called twice.
    """
    calls = Counter(place for place, _ in recording.entered)
    if not calls:
        raise InputError("a forward calls none of the blocks: name those that it calls")
    if again := [place for place, count in calls.items() if count > 1]:
        kind = type(blocks[again[0]]).__name__
        raise InputError(
            f"a forward calls block {again[0]} ({kind}) {calls[again[0]]} times: units that share parameters cannot be planned "
            "apart; name blocks that are called once"
        )
    writers = [i for i, call in enumerate(recording.calls) if not call.backward and prediction in call.written]
    head = recording.ended
    loss = max(head, writers[-1] + 1 if writers else head)
    return Cut(recording, (*(start for _, start in recording.entered), head, loss), prediction)


class UnitRows:
    """The rows of each unit of a cut recording.

    Args:
        cut: the recording.
        model: what ran, after its backward.
    """

    def __init__(self, cut: Cut, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.cut, self.storages = cut, cut.recording.storages
        self.blocks = [blocks[place] for place, _ in cut.recording.entered]
        self.count = cut.loss
        self._forward, self._backward = cut.calls()
        self._used = self._uses()
        self._names = {module: name for name, module in model.named_modules()}
        self._owned = self._owners(model)
        self._from_parameters = self._constants()
        #: What each unit, and the loss, receives from the one before it, and no later one uses; and what later ones do.
        self._handed: list[set[int]] = [set() for _ in range(self.count + 1)]
        self._beside: list[set[int]] = [set() for _ in range(self.count + 1)]
        self._sort()

    # --- who uses what --------------------------------------------------------------------------------------------

    def _uses(self) -> dict[int, set[int]]:
        """The units that read or save each storage in forward."""
        used: dict[int, set[int]] = {}
        for unit, calls in enumerate(self._forward):
            for call in calls:
                for number in self.cut.recording.calls[call].read:
                    used.setdefault(number, set()).add(unit)
        for number, call in self.cut.recording.saved.items():
            used.setdefault(number, set()).add(self.cut.unit_of(call))
        return used

    def maker(self, number: int) -> int | None:
        """The unit that makes a storage in forward; None: it was there before."""
        made = self.storages.made_by[number]
        return None if made is None else self.cut.unit_of(made)

    def _owners(self, model: nn.Module) -> dict[int, list[tuple[str, nn.Parameter]]]:
        """The parameters of each unit: those that it alone uses. Those of several are of the first unit, which stays there;
        those that none uses are of their block, or of the last unit.
        """
        inside = {id(parameter): unit for unit, block in enumerate(self.blocks, 1) for parameter in block.parameters()}
        owned: dict[int, list[tuple[str, nn.Parameter]]] = {unit: [] for unit in range(self.count)}
        for name, parameter in model.named_parameters():
            users, last = sorted(self._used.get(self.storages.of(parameter), set())), self.count - 1
            unit = 0 if len(users) > 1 else min(users[0], last) if users else inside.get(id(parameter), last)
            prefix = self._name(unit)
            owned[unit].append((name.removeprefix(prefix + ".") if prefix else name, parameter))
        return owned

    def _name(self, unit: int) -> str:
        """The name of a block's module; empty for what is before and after."""
        return self._names[self.blocks[unit - 1]] if 0 < unit < self.count - 1 else ""

    @property
    def tied(self) -> bool:
        """Whether a parameter of the first unit is used by a later one as well."""
        return any(max(self._used.get(self.storages.of(one), {0})) > 0 for _, one in self._owned[0])

    def _constants(self) -> set[int]:
        """Storages that depend on parameters alone, such as weights that were cast, and these themselves."""
        found = set(self.storages.parameters)
        for call in self.cut.recording.calls:
            if not call.backward and call.read and found.issuperset(call.read):
                found.update(call.written)
        return found

    # --- sizes ----------------------------------------------------------------------------------------------------

    def _sort(self) -> None:
        for number, users in self._used.items():
            maker, last = self.maker(number), max(users)
            if maker is not None and last == maker + 1:
                self._handed[last].add(number)
            elif maker is not None and last > maker and number not in self._from_parameters:
                self._beside[maker].add(number)

    @property
    def beside_bytes(self) -> int:
        """What more than the next unit uses."""
        return self._size(number for some in self._beside for number in some)

    @property
    def beside_gradient_bytes(self) -> list[int]:
        """What is alive of gradients before the backward of each unit, besides those of parameters and of the unit's result."""
        calls, storages = self.cut.recording.calls, self.storages
        ours = {storages.of(one.grad) for some in self._owned.values() for _, one in some if one.grad is not None}
        made = [
            (number, maker)
            for number, maker in enumerate(storages.made_by)
            if maker is not None and calls[maker].backward and number not in ours
        ]
        found, shared = [], self._shared_bytes()
        for unit in range(self.count - 1):
            first = self._backward[unit][0] if self._backward[unit] else len(calls)
            alive = (number for number, maker in made if maker < first < storages.ended.get(number, 0) < len(calls))
            found.append(self._size(alive) - self._size(self._handed[unit + 1]) - shared)
        return found

    def _given_bytes(self) -> int:
        """What the caller gives, such as token ids."""
        return self._size(self.storages.given)

    def _kept(self, unit: int) -> list[int]:
        """What the unit saves for backward besides what it receives and hands on, in the order of saving."""
        apart = self._handed[unit + 1] | self._beside[unit] | {self.cut.prediction}
        saved = ((n, self.cut.unit_of(call)) for n, call in self.cut.recording.saved.items())
        return [n for n, by in saved if by == unit and self.maker(n) == unit and n not in apart]

    def _alive(self, calls: Sequence[int], apart: Mapping[int, int], less: int) -> list[int]:
        """Bytes alive after each of some operations, above those at their start, without some.

        Args:
            calls: the operations.
            apart: storages that count as something else, by the operation that makes them: their bytes.
            less: bytes that count as something else throughout.
        """
        recorded, found = self.cut.recording.calls, []
        for call in calls:
            less += apart.get(call, 0)
            found.append(recorded[call].after_bytes - recorded[calls[0]].before_bytes - less)
        return found

    def _size(self, numbers: Iterable[int]) -> int:
        return sum(self.storages.sizes[number] for number in numbers)

    def _workspaces(self, unit: int, kept: Sequence[int]) -> tuple[list[int], list[int]]:
        """Temporaries after each operation of both passes: without what forward keeps and hands on, and without the gradients
        that backward makes.
        """
        out = self._handed[unit + 1] if unit + 1 < self.count else {self.cut.prediction}
        forward = self._alive(self._forward[unit], {}, self._size({*kept, *out, *self._beside[unit]}))
        gradients: dict[int, int] = {}
        for gradient in (one.grad for _, one in self._owned[unit] if one.grad is not None):
            maker = self.storages.made_by[self.storages.of(gradient)]
            if maker is not None:
                gradients[maker] = gradients.get(maker, 0) + gradient.nbytes
        less = self._size(self._handed[unit])
        if unit == self.count - 1:  # the first part of the gradient of what it shares with the first unit
            less += self._shared_bytes()
        return forward, self._alive(self._backward[unit], gradients, less)

    def _shared_bytes(self) -> int:
        """Parameters of the first unit that the last one uses, too: their gradients begin with its backward."""
        last = self.count - 1
        return sum(one.nbytes for _, one in self._owned[0] if last in self._used.get(self.storages.of(one), ()))

    # --- rows -----------------------------------------------------------------------------------------------------

    def unit(self, unit: int) -> dict[str, Any]:
        """One unit, as the JSON object of a :class:`~autohete.workload.table.TracedUnit`."""
        kept, prefix = self._kept(unit), self._name(unit)
        forward, row_of = self._rows(self._forward[unit], prefix)
        backward, _ = self._rows(self._backward[unit], prefix)
        workspaces = self._workspaces(unit, kept)
        kinds = ("embedding" if not unit else "head") if unit in (0, self.count - 1) else type(self.blocks[unit - 1]).__name__
        return {
            "kind": kinds,
            "parameters": [self._parameter(name, one) for name, one in self._owned[unit]],
            "forward": forward,
            "backward": backward,
            "saved": self._saved(unit, kept, row_of),
            "input_bytes": self._size(self._handed[unit]) if unit else self._given_bytes(),
            "unsaved_input_bytes": self._size(self._handed[unit].difference(self.cut.recording.saved)),
            "forward_workspace_bytes": workspaces[0],
            "backward_workspace_bytes": workspaces[1],
        }

    def _parameter(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        frozen = {"frozen": True} if parameter.grad is None else {}
        return {"name": name, "shape": list(parameter.shape), **frozen}

    def loss(self) -> dict[str, Any]:
        """The loss, as the JSON object of a :class:`~autohete.workload.table.TracedLoss`."""
        calls = [*self._forward[self.count], *self._backward[self.count]]
        size = self.storages.sizes[self.cut.prediction]
        rows, _ = self._rows(calls, "")
        return {"kernels": rows, "prediction_bytes": size, "workspace_bytes": self._alive(calls, {}, size)}

    def _rows(self, calls: Sequence[int], prefix: str) -> tuple[list[dict[str, Any]], dict[int, int]]:
        """The rows of some operations, without those that do nothing, and the row of each operation."""
        recorded = self.cut.recording.calls
        kept = [call for call in calls if recorded[call].launches or recorded[call].products]
        return [_row(recorded[call], prefix) for call in kept], {call: row for row, call in enumerate(kept)}

    def _saved(self, unit: int, kept: Sequence[int], row_of: dict[int, int]) -> list[dict[str, Any]]:
        """What is kept, tensor by tensor, and how it is made again; what is made together comes together."""
        calls, found, prefix = self.cut.recording.calls, [], self._name(unit)
        groups = groups_of(kept, self.cut.recording, self._from_parameters, self._forward[unit])
        for number in kept:
            maker = self.storages.made_by[number]
            assert maker is not None, "what is kept was made"
            name = f"{_within(calls[maker].module, prefix)}.{calls[maker].kernel}".strip(".")
            made = groups.get(number)
            again = None if made is None else sorted(row_of[call] for call in made if call in row_of)
            found.append({"name": name, "bytes": self.storages.sizes[number], "again": again})
        order = {str(one["again"]): place for place, one in reversed(list(enumerate(found)))}
        return sorted(found, key=lambda one: order[str(one["again"])] if one["again"] else -1)


def _within(module: str, prefix: str) -> str:
    """The name of a module within its unit."""
    return module.removeprefix(prefix).removeprefix(".") if prefix else module


def _row(call: RecordedCall, prefix: str) -> dict[str, Any]:
    """The JSON object of a :class:`~autohete.workload.table.TracedKernel`, without what is as by default."""
    row = {
        "launches": call.launches if call.launches != 1 else None,
        "accesses": call.accesses,
        "bytes": call.size_bytes,
        "products": [list(sizes) for sizes in call.products],
        "flops": call.flops,
        "fused_flops": call.fused_flops,
        "attention": None if call.attention is None else list(call.attention),
        "masked": call.masked,
    }
    given = {name: value for name, value in row.items() if value or (name == "launches" and value is not None)}
    return {"kernel": call.kernel, "module": _within(call.module, prefix), **given}
