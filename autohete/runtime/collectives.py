"""Collectives of several ranks through ``torch.distributed``: reductions and gathers of a unit's elements.

Sums are exact: each rank gets the others' values of its elements and adds them in the order of the ranks. (The order within an
all-reduce of Gloo or NCCL depends on the number of ranks and on the place of an element.) The results are those of one process
that computes the ranks' batches one after another and adds their gradients.

Tensors pass through staging of at most a few pieces, which is not counted as memory of the device; NCCL has such buffers, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autohete.errors import RankError
from autohete.runtime.control_channel import ControlChannel, Facts
from autohete.runtime.optimizer import ElementRange, parts_of

#: Streams of the control channel: of the lane with the collectives, and of the callers.
LANE, CALLERS = 0, 1
#: Elements of each rank per piece.
_PIECE = 256 * 1024
#: How long after the failure of a collective its reason may become known.
_REASON_SECONDS = 3.0


class Collectives:
    """The collectives of this rank. One thread at a time calls them, in the same order on all ranks.

    Args:
        channel: to the other ranks.
        group: moves the tensors; used for nothing else.
        device: of the staging: the CPU for Gloo, the GPU for NCCL.
    """

    def __init__(self, channel: ControlChannel, group: dist.ProcessGroup, device: torch.device) -> None:
        self.channel, self._group, self._device = channel, group, device

    @property
    def rank(self) -> int:
        """This rank."""
        return self.channel.rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.channel.ranks

    def shares(self, elements: int) -> list[range]:
        """The elements of each rank: equal parts, of which the last may be shorter."""
        size = -(-elements // self.ranks)
        return [range(min(r * size, elements), min((r + 1) * size, elements)) for r in range(self.ranks)]

    def parts(self, sizes: Sequence[int]) -> list[ElementRange]:
        """The part of each parameter of a unit that is this rank's."""
        mine = self.shares(sum(sizes))[self.rank]
        return parts_of(sizes, mine.start, mine.stop)

    def exchange(
        self,
        label: str,
        facts: Mapping[str, Any] | None = None,
        *,
        stream: int = LANE,
        timeout_seconds: float | None = None,
    ) -> Facts:
        """Wait for all ranks, and return the facts of all; see :meth:`ControlChannel.exchange`."""
        return self.channel.exchange(stream, label, facts or {}, timeout_seconds)

    def reduce(
        self,
        gradients: Sequence[Tensor | None],
        sizes: Sequence[int],
        owners: Sequence[Sequence[int]],
        targets: Sequence[Tensor | None] | None,
    ) -> None:
        """Add the gradients of all ranks, in the order of the ranks.

        Args:
            gradients: of the unit's parameters, contiguous; None: this rank has none. All have the same type.
            sizes: number of elements of each.
            owners: for each parameter, the ranks that have a gradient.
            targets: for each parameter with a gradient, flat, takes the sums of its elements that are this rank's. None: write
                those of all elements to ``gradients``, which are there for every parameter with a gradient.
        """
        shares = self.shares(sum(sizes))
        mine, firsts = shares[self.rank], [part.first for part in self.parts(sizes)]
        dtype = next(tensor.dtype for tensor in (*gradients, *(targets or ())) if tensor is not None)
        for offsets in _pieces(shares):
            sent = torch.empty(self.ranks, len(offsets), dtype=dtype, device=self._device)
            for rank, share in enumerate(shares):
                for place, part, at in _within(sizes, share, offsets):
                    gradient = gradients[place]
                    if gradient is not None:
                        sent[rank, at : at + part.elements].copy_(part.of(gradient))
            arrived = torch.empty_like(sent)
            self._move(dist.all_to_all_single, arrived, sent)
            summed = torch.empty(len(offsets), dtype=dtype, device=self._device)
            for place, part, at in _within(sizes, mine, offsets):
                if not owners[place]:
                    continue
                total, *others = (arrived[rank, at : at + part.elements] for rank in owners[place])
                for other in others:
                    total.add_(other)
                if targets is None:
                    summed[at : at + part.elements].copy_(total)
                    continue
                target = targets[place]
                assert target is not None, "memory for the sums"
                target[part.first - firsts[place] : part.last - firsts[place]].copy_(total)
            if targets is not None:
                continue
            self._move(dist.all_gather_single, sent, summed)
            for rank, share in enumerate(shares):
                for place, part, at in _within(sizes, share, offsets):
                    if owners[place]:
                        gradient = gradients[place]
                        assert gradient is not None, "memory for the sums"
                        part.of(gradient).copy_(sent[rank, at : at + part.elements])

    def gather(self, mine: Tensor, shares: Sequence[range], whole: Tensor) -> Tensor:
        """Fill ``whole``, flat, with the elements of all ranks, and return it.

        Args:
            mine: those of this rank, flat; may be a part of ``whole``.
            shares: the elements of each rank: all of ``whole``, in order.
            whole: of the type of ``mine``, on any device.
        """
        own = shares[self.rank]
        for offsets in _pieces(shares):
            sent = torch.empty(len(offsets), dtype=mine.dtype, device=self._device)
            here = mine[offsets.start : min(offsets.stop, len(own))]
            sent[: len(here)].copy_(here)
            arrived = torch.empty(self.ranks, len(offsets), dtype=mine.dtype, device=self._device)
            self._move(dist.all_gather_single, arrived, sent)
            for rank, share in enumerate(shares):
                there = whole[share.start + offsets.start : min(share.start + offsets.stop, share.stop)]
                there.copy_(arrived[rank, : len(there)])
        return whole

    def fail(self, what: str, error: BaseException) -> None:
        """Report the failure of this rank to the others."""
        self.channel.fail(f"{what}: {type(error).__name__}: {error}")

    def _move(self, collective: Any, target: Tensor, source: Tensor) -> None:
        """Move tensors, as bytes: all types then pass alike."""
        try:
            collective(target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8), group=self._group)
        except RuntimeError as error:  # a rank has ended meanwhile
            if not self.channel.failed_within(_REASON_SECONDS):
                raise RankError(f"a collective of ranks has failed: {error}") from error
            raise self.channel.error() from error


def _pieces(shares: Sequence[range]) -> Iterator[range]:
    """Ranges of at most a piece that cover the longest share, counted from its begin."""
    longest = max(map(len, shares))
    return (range(start, min(start + _PIECE, longest)) for start in range(0, longest, _PIECE))


def _within(sizes: Sequence[int], share: range, offsets: range) -> Iterator[tuple[int, ElementRange, int]]:
    """The parameters with elements in a piece of ``share``: their places, these elements, and where they begin in the piece."""
    begin, end = (min(share.start + offset, share.stop) for offset in (offsets.start, offsets.stop))
    at = 0
    for place, part in enumerate(parts_of(sizes, begin, end)):
        if part.elements:
            yield place, part, at
            at += part.elements
