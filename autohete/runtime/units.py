"""A block during training: its parameters, their states on both sides, and what lives between its passes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from autohete.quantities import rounded_when_pinned
from autohete.runtime.device import AllocatorMemory, Device
from autohete.runtime.forward_pass import BackwardGraph, BlockCall, Handed
from autohete.runtime.ledger import DeviceCount, Ledger, Reservation
from autohete.runtime.model_state import RandomState
from autohete.runtime.optimizer import ElementRange, Layout, UnitStates, WholeStates, parts_of
from autohete.runtime.recorder import AsRead, Recorded, Remaking, Saved
from autohete.runtime.state_files import Stored
from autohete.schedule import GPU_MEMORY, HOST_MEMORY

#: Tensors begin at multiples of this many bytes where PyTorch allocates them.
ALIGNED_BYTES = 64
#: Stands for any place that is neither the device nor the host.
FAR = "far"


class Current(threading.local):
    """The task that the calling lane is running.

    Attributes:
        task: name of the instance, such as ``F3@1``; empty before the first.
        iteration, micro_batch, part: those of the task.
        alive: what must live until the work of the task is done.
        later: what to do then, on a device that runs ahead.
    """

    def __init__(self) -> None:
        self.task, self.iteration, self.micro_batch, self.part = "", 0, 0, 0
        self.alive: list[object] = []
        self.later: list[Callable[[], None]] = []


class Memories:
    """Where tensors live, and which ledgers count them.

    Args:
        accelerator: device of the passes.
        count, host: count the bytes on the device and on the host. None: not counted.
        allocator: a GPU's own accounting, which reports what was full.
        pinned: counts the pinned part of the host memory. None: not counted.

    Attributes:
        current: names the task for which a tensor is allocated.
    """

    def __init__(
        self,
        accelerator: Device,
        count: DeviceCount | None,
        host: Ledger | None,
        allocator: AllocatorMemory,
        pinned: Ledger | None = None,
    ) -> None:
        self.accelerator, self.count, self.host, self.allocator, self.pinned = accelerator, count, host, allocator, pinned
        self.current = Current()

    @property
    def device(self) -> Ledger | None:
        """The ledger of storages on the device. None: they are not counted individually."""
        return None if self.count is None else self.count.storages

    @property
    def torch_device(self) -> torch.device:
        """PyTorch's name of the device of the passes."""
        return self.accelerator.torch_device

    def claim(self, tensor: Tensor, group: str) -> Tensor:
        """Count ``tensor`` as device memory."""
        ledger = self.device
        if ledger is not None:
            ledger.claim(tensor, group, self.current.task)
        return tensor

    def claim_host(self, tensor: Tensor, group: str) -> Tensor:
        """Count ``tensor`` as host memory. If it is pinned, count the size that PyTorch has pinned for it."""
        size = rounded_when_pinned(tensor.untyped_storage().nbytes()) if tensor.is_pinned() else None
        if self.host is not None:
            self.host.claim(tensor, group, self.current.task, size)
        if self.pinned is not None and size is not None:
            self.pinned.claim(tensor, group, self.current.task, size)
        return tensor

    def reserve(self, size_bytes: int, group: str) -> Reservation | None:
        """Count ``size_bytes`` of device memory as long as the result lives."""
        ledger = self.device
        return None if ledger is None else ledger.reserve(size_bytes, group, self.current.task)

    def forget(self, tensor: Tensor) -> None:
        """Stop counting ``tensor``: it is part of a reservation."""
        ledger = self.device
        if ledger is not None:
            ledger.forget(tensor)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting ``tensors``: memory for them is set aside for the whole training."""
        if self.device is not None:
            for tensor in tensors:
                self.forget(tensor)

    def on_device(self, elements: int, dtype: torch.dtype, group: str) -> Tensor:
        """Allocate a flat tensor on the device."""
        return self.claim(self.accelerator.empty(elements, dtype), group)

    def on_host(self, elements: int, dtype: torch.dtype, group: str) -> Tensor:
        """Allocate a flat tensor on the host, without values, pinned if that makes copies faster."""
        return self.claim_host(self.accelerator.on_host(elements, dtype), group)

    def once_done(self, act: Callable[[], None]) -> None:
        """Call ``act`` once the device has done what the current task has issued so far, at the latest when the task is done.

        If the device does not run ahead, that is now.
        """
        if self.accelerator.runs_ahead:
            self.current.later.append(act)
        else:
            act()

    def settle(self) -> None:
        """Wait for the work that the calling thread has started on the device. The lanes' streams do not track it."""
        self.accelerator.settle()
        later, self.current.alive, self.current.later = self.current.later, [], []
        for act in later:
            act()


def parts_in(parts: Iterable[ElementRange], gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Flat views of a part of each gradient."""
    return [None if held is None else part.of(held) for part, held in zip(parts, gradients, strict=True)]


@dataclass(slots=True)
class MovingStates:
    """Optimizer states that move together.

    Attributes:
        optimizer: the states.
        begin: index in the unit of their first element.
        resting: their tensors where they rest, and those of each hop, while copies of them are elsewhere.
        stored: their tensors in a file, if they rest there; then the optimizer has none while they do.
    """

    optimizer: UnitStates | WholeStates
    begin: int
    resting: list[list[Tensor]] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)


@dataclass(slots=True)
class Sums:
    """Gradients of a unit, summed over micro-batches.

    Attributes:
        gradients: one per parameter, None if it has none yet.
        reserved: counts them if they are where autograd has allocated them.
        places: memory for them if they have been fetched.
    """

    gradients: list[Tensor | None]
    reserved: Reservation | None = None
    places: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class StoredUnit:
    """What of a unit rests in a file besides optimizer states.

    Attributes:
        parameters: flat, all trained parameters.
        frozen: bytes of the frozen parameters that move with them.
        gradients: flat, while they wait for an update.
    """

    parameters: Stored | None = None
    frozen: Stored | None = None
    gradients: Stored | None = None


@dataclass(slots=True)
class UnitSide:
    """A block's states on the device or on the host.

    Attributes:
        parameters: flat, all trained parameters of the block one after another; ``views`` are the parameters in it. On the host
            those of ``UnitTensors.on_host``.
        frozen: bytes of the frozen parameters that move with them, in memory behind them on the device.
        shard: flat, the parameters of ``UnitTensors.shard`` where all of them are gathered for each use.
        gradients: one per parameter, None if it has none; empty while the schedule gives them no memory.
        leaving: by micro-batch, gradients from the end of its backward until they are copied to the host, and what counts them.
        unreduced: by micro-batch, gradients from the end of its backward until they are reduced to a shard, and what counts
            them.
        reduced: flat, the part of each gradient that is in ``UnitTensors.shard``, summed over the ranks: by micro-batch, or in
            entry 0 the sums over all of them.
        iteration: the iteration of the gradients.
        places: destinations to which gradients, or their copied parts, are copied; empty if they stay in the tensors that
            autograd has allocated.
        room: the memory of the places on the host, flat.
        reserved: counts the gradients that stay there, as long as it lives.
        sums: gradients of the previous micro-batches, while those of another are computed.
        arrived: by micro-batch, gradients on the host that have not been added yet.
        states: moments, step counts, master weights, in the parts in which they move.
    """

    parameters: Tensor | None = None
    frozen: Tensor | None = None
    shard: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    leaving: dict[int, tuple[list[Tensor | None], Reservation | None]] = field(default_factory=dict)
    unreduced: dict[int, tuple[list[Tensor | None], Reservation | None]] = field(default_factory=dict)
    reduced: dict[int, list[Tensor | None]] = field(default_factory=dict)
    iteration: int = -1
    places: list[Tensor] = field(default_factory=list)
    room: Tensor | None = None
    reserved: Reservation | None = None
    sums: Sums | None = None
    arrived: dict[int, list[Tensor | None]] = field(default_factory=dict)
    states: list[MovingStates] = field(default_factory=list)


class FrozenPlaces(NamedTuple):
    """Where the frozen parameters of a unit are, in bytes that follow the trained ones.

    Args:
        ranges: bytes of each.
        likes: each of them, with type and shape but without values.
        size_bytes: of all, with the gaps between them.
    """

    ranges: tuple[slice, ...]
    likes: tuple[Tensor, ...]
    size_bytes: int

    @classmethod
    def behind(cls, trained_bytes: int, frozen: Sequence[Tensor]) -> FrozenPlaces:
        """Those of ``frozen``, each at a multiple of 64 bytes of the unit's memory, as if allocated by itself."""
        end, ranges = trained_bytes, []
        for tensor in frozen:
            begin = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES
            end = begin + tensor.numel() * tensor.element_size()
            ranges.append(slice(begin - trained_bytes, end - trained_bytes))
        if frozen:
            end = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES
        likes = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in frozen)
        return cls(tuple(ranges), likes, end - trained_bytes)

    def views(self, data: Tensor) -> list[Tensor]:
        """The parameters in ``data``, bytes on the device."""
        return [data[place].view(like.dtype).view(like.shape) for place, like in zip(self.ranges, self.likes, strict=True)]

    def value(self, data: Tensor, index: int) -> Tensor:
        """A parameter in ``data``, bytes in any memory, copied to new host memory."""
        found = torch.empty(self.likes[index].shape, dtype=self.likes[index].dtype, device="cpu")
        bytes_of(found).copy_(data[self.ranges[index]])
        return found

    def assign(self, data: Tensor, index: int, value: Tensor) -> None:
        """Set the values of a parameter in ``data``."""
        data[self.ranges[index]].copy_(bytes_of(value.contiguous()))


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return tensor.reshape(-1).view(torch.uint8)


def _absent(parameter: Tensor, device: torch.device) -> Tensor:
    """Stands in for a parameter that is not on the device: NaN, if its type has it."""
    value = torch.nan if parameter.is_floating_point() else 0
    return torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)


@dataclass(slots=True)
class UnitTensors:
    """One block: its parameters, their states on both sides, and what lives between its passes."""

    parameters: tuple[nn.Parameter, ...]
    #: Device of its passes.
    torch_device: torch.device
    #: Frozen parameters that move with them.
    frozen: tuple[nn.Parameter, ...] = ()
    #: The elements that this rank updates; its ZeRO stage.
    shard: range = field(init=False)
    stage: int = 0
    #: The first element of the shard that the host has and updates while the device updates those before; 0: one side updates
    #: all.
    cut: int = 0
    #: The trained parameters in flat memory; elements that each takes there; total number of these.
    layout: Layout = field(init=False)
    sizes: list[int] = field(init=False)
    elements: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    #: Where the frozen parameters are.
    places: FrozenPlaces = field(init=False)
    device: UnitSide = field(default_factory=UnitSide)
    host: UnitSide = field(default_factory=UnitSide)
    #: What rests in another place of the hardware, in a file, and its tensors while they are at hand.
    stored: StoredUnit = field(default_factory=StoredUnit)
    far: UnitSide = field(default_factory=UnitSide)
    #: Its call, if it will be recomputed, and the random state before it; the state is None if it drew nothing.
    checkpoint: tuple[BlockCall, RandomState | None] | None = None
    #: The tensors that the call was given besides.
    beside: list[AsRead] = field(default_factory=list)
    #: Number of recomputations so far.
    recomputed: int = 0
    #: What a forward with parts has saved, and what makes its released part again.
    named: Recorded | None = None
    remaking: Remaking | None = None
    #: The input: in the checkpoint while it is not on the device, or for what is made again.
    input: Saved | None = None
    #: The graphs for backward: the block's, and that of the model's own code after it (of embedding and head, the only one).
    graph: BackwardGraph | None = None
    after: BackwardGraph | None = None
    #: What the block was given, and what later units may take of its result, by place; where backward from that starts.
    given: Handed | None = None
    handed: dict[int, Handed] = field(default_factory=dict)
    edges: dict[int, GradientEdge] = field(default_factory=dict)
    #: The input of the block above, if the model's own code has made it.
    output: Tensor | None = None
    #: Functions of its graph that keep parameters, and the attributes in which they do.
    kept_by: list[tuple[object, str]] = field(default_factory=list)
    saved: list[weakref.ref[Saved]] = field(default_factory=list)
    #: By part of the activations: the storages that have moved, and the memory that has them.
    moved: dict[int, dict[int, Tensor | Stored]] = field(default_factory=dict)
    kept_in: dict[int, str] = field(default_factory=dict)
    #: Stand-ins for parameters that are not on the device: NaN. On a GPU, creating one is work that no task waits for.
    absent: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.parameters)
        self.sizes, self.dtype = self.layout.sizes, self.layout.dtype
        self.elements = sum(self.sizes)
        self.shard = range(self.elements)
        self.places = FrozenPlaces.behind(self.trained_bytes, self.frozen)
        self.absent = [_absent(parameter, self.torch_device) for parameter in (*self.parameters, *self.frozen)]

    @property
    def trained_bytes(self) -> int:
        """Size of the trained parameters."""
        return self.elements * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Size of all that moves with the parameters, themselves included."""
        return self.trained_bytes + self.places.size_bytes

    def side(self, memory: str) -> UnitSide:
        """The block's states in ``memory``; in any other place if it is neither the device's nor the host's."""
        return {GPU_MEMORY: self.device, HOST_MEMORY: self.host}.get(memory, self.far)

    @property
    def sides(self) -> tuple[UnitSide, ...]:
        """Its states on the device, on the host, and in another place."""
        return self.device, self.host, self.far

    @property
    def parts(self) -> list[ElementRange]:
        """The part of each parameter that is in the shard."""
        return parts_of(self.sizes, self.shard.start, self.shard.stop)

    @property
    def on_host(self) -> range:
        """The elements that are on the host if any are."""
        return range(self.cut or self.shard.start, self.shard.stop)

    def gradients_of(self, parts: Iterable[ElementRange], micro_batch: int = 0) -> list[Tensor | None]:
        """Flat views of the gradients on the device for a part of each parameter, within the shard."""
        if self.stage < 2:
            return parts_in(parts, self.device.gradients)
        return [
            None if held is None else held[part.first - whole.first : part.last - whole.first]
            for part, whole, held in zip(parts, self.parts, self.device.reduced[micro_batch], strict=True)
        ]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat``, one for each parameter."""
        return self.layout.views(flat)

    def overlap(self, flat: Tensor, begin: int, place: int) -> tuple[Tensor, slice]:
        """The part of a parameter in ``flat``, which starts at element ``begin`` of the block, and its elements as a slice. A
        unit with parameters of several types has no parts.
        """
        if self.layout.is_mixed:
            return self.views(flat)[place].view(-1), slice(None)
        before = sum(self.sizes[:place]) - begin
        (part,) = parts_of([self.sizes[place]], -before, len(flat) - before)
        at = before + part.first
        return flat[at : at + part.elements], slice(part.first, part.last)

    def put(self, storage: torch.UntypedStorage) -> None:
        """Let the parameters on the device be at the beginning of ``storage``."""
        flat = torch.empty(0, dtype=self.dtype, device=storage.device)
        self.device.parameters = flat.set_(storage, 0, (self.elements,), (1,))
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        self.device.frozen = data.set_(storage, self.trained_bytes, (self.places.size_bytes,), (1,))

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is in the memory of the parameters on the device."""
        assert self.device.parameters is not None, "a pass without parameters"
        begin = self.device.parameters.untyped_storage().data_ptr()
        return begin <= tensor.data_ptr() < begin + self.size_bytes

    def bind(self) -> None:
        """Let the module compute with the parameters on the device, or with NaN if there are none."""
        flat, data = self.device.parameters, self.device.frozen
        self.device.views = [] if flat is None else self.views(flat)
        there = self.device.views if data is None else [*self.device.views, *self.places.views(data)]
        for parameter, tensor in zip((*self.parameters, *self.frozen), there or self.absent, strict=True):
            parameter.data = tensor

    @property
    def graphs(self) -> list[BackwardGraph]:
        """Its graphs, in the order of backward."""
        if self.graph is not None:
            self.graph.made = [(edge, self.handed[place]) for place, edge in self.edges.items() if place in self.handed]
        return [graph for graph in (self.after, self.graph) if graph is not None]

    def forget_states(self) -> None:
        """Discard all states, wherever they are."""
        self.device, self.host, self.far, self.stored = UnitSide(), UnitSide(), UnitSide(), StoredUnit()

    def still_saved(self) -> list[Saved]:
        """What graphs of the block currently keep in movable form."""
        return [saved for saved in (reference() for reference in self.saved) if saved is not None]

    def forget_passes(self) -> None:
        """Discard what lives between the passes."""
        self.checkpoint, self.beside, self.input, self.saved, self.moved = None, [], None, [], {}
        self.graph, self.after, self.given, self.handed, self.edges, self.output = None, None, None, {}, {}, None
        self.kept_by = []
        self.recomputed, self.named, self.remaking, self.kept_in = 0, None, None, {}
