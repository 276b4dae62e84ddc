"""One block as a training holds it: its parameters, their states on both sides, and what lives between its passes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from autohete.quantities import rounded_when_pinned
from autohete.runtime.ledger import CudaMemory, DeviceCount, Ledger, Reservation
from autohete.runtime.model_state import RandomState
from autohete.runtime.optimizer import AdamStates, parts_of
from autohete.runtime.partition import BlockCall
from autohete.schedule import GPU_MEMORY, HOST_MEMORY


class Current(threading.local):
    """What the calling lane is doing.

    Attributes:
        task: the instance's name, such as ``F3@1``; empty before the first.
        iteration, micro_batch: which it is of.
        alive: what must live until the work of the task is done.
    """

    def __init__(self) -> None:
        self.task, self.iteration, self.micro_batch = "", 0, 0
        self.alive: list[object] = []


class Memories:
    """Where tensors live, and who counts them.

    Args:
        torch_device: where the passes compute; the CPU stands for the device where there is no other.
        count, host: count the bytes on the device and on the host; None: they are not counted.
        cuda: a GPU's own account, which says what was full.

    Attributes:
        current: names the task that a tensor is made for.
        pinned: counts what of the host's is pinned, likewise.
    """

    def __init__(
        self,
        torch_device: torch.device,
        count: DeviceCount | None,
        host: Ledger | None,
        cuda: CudaMemory,
        pinned: Ledger | None = None,
    ) -> None:
        self.torch_device, self.count, self.host, self.cuda, self.pinned = torch_device, count, host, cuda, pinned
        self.current = Current()

    @property
    def device(self) -> Ledger | None:
        """Where storages on the device are entered; None: they are not counted one by one."""
        return None if self.count is None else self.count.storages

    @property
    def pins(self) -> bool:
        """Whether host tensors are in pinned memory."""
        return self.torch_device.type == "cuda"

    def claim(self, tensor: Tensor, group: str) -> Tensor:
        """Count ``tensor`` as the device's."""
        ledger = self.device
        if ledger is not None:
            ledger.claim(tensor, group, self.current.task)
        return tensor

    def claim_host(self, tensor: Tensor, group: str) -> Tensor:
        """Count ``tensor`` as the host's: where it is pinned, what PyTorch has pinned for it."""
        size = rounded_when_pinned(tensor.untyped_storage().nbytes()) if tensor.is_pinned() else None
        if self.host is not None:
            self.host.claim(tensor, group, self.current.task, size)
        if self.pinned is not None and size is not None:
            self.pinned.claim(tensor, group, self.current.task, size)
        return tensor

    def reserve(self, size_bytes: int, group: str) -> Reservation | None:
        """Count so many bytes of the device, as long as the result lives."""
        ledger = self.device
        return None if ledger is None else ledger.reserve(size_bytes, group, self.current.task)

    def forget(self, tensor: Tensor) -> None:
        """Count ``tensor`` no longer: it is in what has been reserved."""
        ledger = self.device
        if ledger is not None:
            ledger.forget(tensor)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count ``tensors`` no longer: room for them is set aside as long as the training lasts."""
        if self.device is not None:
            for tensor in tensors:
                self.forget(tensor)

    def on_device(self, elements: int, dtype: torch.dtype, group: str) -> Tensor:
        """A new flat tensor on the device."""
        return self.claim(torch.empty(elements, dtype=dtype, device=self.torch_device), group)

    def on_host(self, elements: int, dtype: torch.dtype, group: str) -> Tensor:
        """A new flat tensor of zeros on the host, pinned where that makes copies faster."""
        return self.claim_host(torch.zeros(elements, dtype=dtype, device="cpu", pin_memory=self.pins), group)

    def settle(self) -> None:
        """Wait for what the calling thread has started on the device: the lanes' streams know nothing of it."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)


@dataclass(slots=True)
class Side:
    """A block's states on the device or on the host.

    Attributes:
        parameters: flat, all parameters of the block one after another; ``views`` are the parameters in it. On the host those
            from ``Block.cut`` on.
        gradients: of each parameter, None for one that has none; empty while the schedule gives them no room.
        iteration: whose gradients they are.
        places: where gradients, or the parts of them that come, are copied to; empty where they stay in the tensors that
            autograd has made.
        reserved: counts the gradients that stay there, as long as it lives.
        sums: gradients of the micro-batches before, and what counts them, while those of another are found.
        arrived: by micro-batch, gradients on the host that have not been added yet.
        written: places of gradients in a file, where they wait on a drive, and which of them wait there.
        optimizer: moments, step counts, master weights.
        resting: the optimizer's tensors where they rest, and those of each hop, while copies of them are elsewhere.
    """

    parameters: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    iteration: int = -1
    places: list[Tensor] = field(default_factory=list)
    reserved: Reservation | None = None
    sums: tuple[list[Tensor | None], Reservation | None] | None = None
    arrived: dict[int, list[Tensor | None]] = field(default_factory=dict)
    written: list[Tensor] = field(default_factory=list)
    unread: list[bool] = field(default_factory=list)
    optimizer: AdamStates | None = None
    resting: list[list[Tensor]] = field(default_factory=list)


@dataclass(slots=True)
class MovedStorage:
    """Where a saved tensor lay in a storage that has moved, by the storage's old address."""

    key: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Saved:
    """A tensor that a graph keeps for backward: on the device, or where it lies in a storage that has moved.

    Only the graph keeps it alive: what no backward can reach any more is free at once, as in plain PyTorch.
    """

    value: Tensor | MovedStorage


@dataclass(slots=True)
class Block:
    """One block: its parameters, their states on both sides, and what lives between its passes."""

    parameters: tuple[nn.Parameter, ...]
    #: Where it computes.
    torch_device: torch.device
    #: So many of its elements, the first, are updated on the device while the host has and updates the rest; 0: one side
    #: updates all.
    cut: int = 0
    #: Of each parameter, and its elements; of all.
    shapes: list[torch.Size] = field(init=False)
    sizes: list[int] = field(init=False)
    elements: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    device: Side = field(default_factory=Side)
    host: Side = field(default_factory=Side)
    #: Its call, if it will be recomputed, and the random state that it drew from; None if it drew nothing.
    checkpoint: tuple[BlockCall, RandomState | None] | None = None
    #: How often it has been.
    recomputed: int = 0
    #: Within it a recomputation takes what a selective forward has kept instead of computing it.
    replay: AbstractContextManager[Any] | None = None
    #: The input in it, while that is not on the device.
    input: Saved | None = None
    #: Where backward begins, and where the gradient of the input arrives.
    root: GradientEdge | None = None
    arrived: list[Tensor] = field(default_factory=list)
    saved: list[weakref.ref[Saved]] = field(default_factory=list)
    moved: dict[int, Tensor] = field(default_factory=dict)
    #: What the parameters are while they are not on the device: NaN. On a GPU a new one would be work that nobody waits for.
    absent: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.elements = sum(self.sizes)
        self.dtype = self.parameters[0].dtype if self.parameters else torch.float32
        nan = torch.full((), torch.nan, dtype=self.dtype, device=self.torch_device)
        self.absent = [nan.expand(shape) for shape in self.shapes]

    def side(self, memory: str) -> Side:
        """Its states in ``memory``."""
        return {GPU_MEMORY: self.device, HOST_MEMORY: self.host}[memory]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' places in ``flat``."""
        return [place.view(shape) for place, shape in zip(torch.split(flat, self.sizes), self.shapes, strict=True)]

    def overlap(self, flat: Tensor, begin: int, place: int) -> tuple[Tensor, slice]:
        """What ``flat``, which has the block's elements from ``begin`` on, has of a parameter, and which of its elements."""
        before = sum(self.sizes[:place]) - begin
        (part,) = parts_of([self.sizes[place]], -before, len(flat) - before)
        at = before + part.first
        return flat[at : at + part.elements], slice(part.first, part.last)

    def bind(self) -> None:
        """Let the module compute with what is on the device; with NaN if nothing is."""
        flat = self.device.parameters
        self.device.views = [] if flat is None else self.views(flat)
        for parameter, tensor in zip(self.parameters, self.device.views or self.absent, strict=True):
            parameter.data = tensor

    def still_saved(self) -> list[Saved]:
        """What graphs of the block keep now, where it can move."""
        return [saved for saved in (reference() for reference in self.saved) if saved is not None]

    def forget_passes(self) -> None:
        """Let go of what lives between the passes."""
        self.checkpoint, self.input, self.root, self.saved, self.moved = None, None, None, [], {}
        self.recomputed, self.replay = 0, None
