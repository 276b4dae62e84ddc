"""Which saved tensors a unit can make again without its products with weights, and by which operations.

The rule of selective activation checkpointing in PyTorch (``torch.utils.checkpoint``,
``create_selective_checkpoint_contexts`` with a policy that saves results of products and attention): what is elementwise is
computed again. If attention has scores in memory, their product is as well (Korthikanti et al. 2022, section 5).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autohete.tracing.on_cuda import is_attention
from autohete.tracing.recording import Recording


def groups_of(
    kept: Sequence[int], recording: Recording, constants: Collection[int], inside: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """The operations that make again each kept storage that can be, by the storage. Those that share operations are made
    together and have equal operations.

    Args:
        kept: storages that the unit keeps for backward.
        recording: of its forward.
        constants: storages that depend on parameters alone.
        inside: the operations of the unit.
    """
    search = _Slices(kept, recording, constants, inside)
    for number in sorted(kept, key=lambda number: recording.storages.made_by[number] or 0):
        search.take(number)
    return search.groups()


class _Slices:
    def __init__(self, kept: Sequence[int], recording: Recording, constants: Collection[int], inside: Collection[int]) -> None:
        self._kept, self._recording, self._constants, self._inside = set(kept), recording, constants, inside
        self._writers: dict[int, list[int]] = {}
        for call in inside:
            for number in recording.calls[call].written:
                self._writers.setdefault(number, []).append(call)
        self._slices: dict[int, frozenset[int]] = {}

    def take(self, number: int) -> None:
        """Find the operations that make a storage again, if none of them is a product with weights."""
        found, pending, seen = set[int](), [number], set[int]()
        while pending:
            one = pending.pop()
            if one in seen or self._stays(one, number):
                continue
            seen.add(one)
            for call in self._writers.get(one, ()):
                if not self._is_repeated(call):
                    return
                if call not in found:
                    found.add(call)
                    pending += self._recording.calls[call].read
        if found:
            self._slices[number] = frozenset(found)

    def _stays(self, one: int, asked: int) -> bool:
        """Whether a storage is there when ``asked`` is made again: one that is kept, or that the unit does not make."""
        if one == asked:
            return False
        return one in self._constants or one not in self._writers or (one in self._kept and one not in self._slices)

    def _is_repeated(self, call: int) -> bool:
        """Whether an operation may be repeated: all but products with weights, and products that are smaller than what they
        multiply, as attention's result is and its scores are not.
        """
        recorded, sizes = self._recording.calls[call], self._recording.storages.sizes
        if is_attention(recorded.kernel) or (recorded.fused_flops and not recorded.products):
            return False
        if not recorded.products:
            return True
        operands = [number for number in recorded.read if number not in self._constants]
        weights = len(operands) < len(recorded.read)
        return not weights and sum(sizes[n] for n in recorded.written) > sum(sizes[n] for n in operands)

    def groups(self) -> dict[int, tuple[int, ...]]:
        """Merge what shares operations."""
        groups: list[tuple[set[int], set[int]]] = []
        for number, calls in self._slices.items():
            members, merged = {number}, set(calls)
            apart = []
            for others, their in groups:
                if their & merged:
                    members |= others
                    merged |= their
                else:
                    apart.append((others, their))
            groups = [*apart, (members, merged)]
        return {number: tuple(sorted(calls)) for members, calls in groups for number in members}
