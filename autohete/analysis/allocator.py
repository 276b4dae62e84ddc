"""What PyTorch's caching allocator takes from the GPU ("reserved") for what a schedule allocates.

The rules are those of ``DeviceCachingAllocator`` in PyTorch (001074d2, ``c10/cuda/CUDACachingAllocator.cpp``: ``round_size``,
``get_allocation_size``, ``get_free_block``, ``should_split``, ``free_block``, ``release_cached_blocks``). Sizes are rounded to
512 bytes. Up to 1 MiB they share segments of 2 MiB, below 10 MiB segments of 20 MiB; larger ones take segments of their own, in
steps of 2 MiB. The smallest free block of the same stream that is large enough is used, and split if 512 bytes (in the large
pool more than 1 MiB) are left over. A free block is merged with free neighbours. Segments are given back only when the GPU is
full: then all that are wholly free.

With ``expandable_segments`` (``try_allocate_expandable_block``, ``map_block``, ``release_expandable_segment``) each stream has
one segment for small and one for large blocks. What no free block holds is put at its end, which grows by 2 or 20 MiB, and any
rest of 512 bytes is split off. Where the GPU is full, whole steps that are free are given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autohete.analysis.occupancy import changes, lives
from autohete.execution.trace import Trace
from autohete.schedule import Buffer, Kind, Value

_MIB = 1 << 20
#: Sizes are multiples of this.
_SMALLEST = 512
#: The largest allocation of the small pool, and the segments of that.
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
#: From here on an allocation has a segment of its own, in steps of ``_STEP``; those between share segments.
_LARGE, _SHARED_SEGMENT, _STEP = 10 * _MIB, 20 * _MIB, 2 * _MIB


class Tensors(Protocol):
    """Splits buffers into tensors."""

    @property
    def made_last(self) -> Collection[Value]:
        """Results that take the memory of their task's temporaries, whose tensors therefore include them."""

    def __call__(self, buffer: Buffer) -> Sequence[int]:
        """Return the bytes of the tensors of ``buffer``, which add up to its size."""

    def made_later(self, buffer: Buffer) -> int:
        """Return how many of the tensors, the last ones, are made later: of a resident buffer when the first update begins, of
        the loss's temporaries once the logits are free.
        """


class Whole:
    """Takes each buffer for one tensor."""

    made_last: Collection[Value] = ()

    def made_later(self, buffer: Buffer) -> int:
        """Return 0: all is made at once."""
        return 0

    def __call__(self, buffer: Buffer) -> Sequence[int]:
        """Return its size."""
        return (buffer.size_bytes,)


WHOLE = Whole()


@dataclass(slots=True, eq=False)
class Piece:
    """A piece of a segment.

    Args:
        pool: its stream, and whether it belongs to the small pool.
        address, size_bytes: where it is, and how large.
        free: whether it can be used.
        before, after: its neighbours in the segment.
    """

    pool: tuple[str, bool]
    address: int
    size_bytes: int
    free: bool = False
    before: Piece | None = None
    after: Piece | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The order in which free blocks are searched."""
        return self.size_bytes, self.address


class CachingAllocator:
    """PyTorch's allocator of a GPU with ``capacity_bytes`` for tensors; None: without limit.

    At the limit it gives back what is wholly free and tries again. Where PyTorch would then fail, it goes beyond the limit.
    ``expandable``: with ``expandable_segments``.
    """

    def __init__(self, capacity_bytes: int | None = None, *, expandable: bool = False) -> None:
        self._capacity, self._end, self._expandable = capacity_bytes, 0, expandable
        #: The last block of each expandable segment.
        self._last: dict[tuple[str, bool], Piece] = {}
        self._free: defaultdict[tuple[str, bool], list[tuple[tuple[int, int], Piece]]] = defaultdict(list)
        #: Bytes of all segments, now and at most, and the number of times that segments had to be given back.
        self.reserved_bytes = self.peak_bytes = self.retries = 0

    def allocate(self, size_bytes: int, stream: str = "") -> Piece:
        """Return a block of at least ``size_bytes`` for work on ``stream``."""
        size = max(-(-size_bytes // _SMALLEST), 1) * _SMALLEST
        pool = stream, size <= _SMALL
        free = self._free[pool]
        place = bisect_left(free, ((size, 0),))
        if self._expandable and place + 1 < len(free) and free[place][1].after is None:
            place += 1  # a block that can grow counts as larger than all others
        if place < len(free):
            block = free.pop(place)[1]
        else:
            block = self._expanded(size, pool) if self._expandable else self._segment(size, pool)
        block.free = False
        left = block.size_bytes - size
        if left >= _SMALLEST if pool[1] or self._expandable else left > _SMALL:
            rest = Piece(pool, block.address + size, left, True, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            else:
                self._last[pool] = rest
            block.after, block.size_bytes = rest, size
            insort(free, (rest.key, rest))
        return block

    def free(self, block: Piece) -> None:
        """Take back ``block``, and merge it with free neighbours."""
        free, block.free = self._free[block.pool], True
        for first, second in ((block.before, block), (block, block.after)):
            if first is None or second is None or not (first.free and second.free):
                continue
            other = first if second is block else second
            del free[bisect_left(free, (other.key,))]
            block.address, block.size_bytes = first.address, first.size_bytes + second.size_bytes
            block.before, block.after = first.before, second.after
            for side, one in (("after", block.before), ("before", block.after)):
                if one is not None:
                    setattr(one, side, block)
            if block.after is None:
                self._last[block.pool] = block
        insort(free, (block.key, block))

    def release(self) -> None:
        """Give back all segments that are wholly free (``empty_cache``), or whole steps of expandable ones."""
        for free in self._free.values():
            kept = []
            for key, block in free:
                alone = block.before is None and block.after is None
                if given := _whole_steps(block) if self._expandable else block.size_bytes * alone:
                    block.free, self.reserved_bytes = False, self.reserved_bytes - given
                else:
                    kept.append((key, block))
            free[:] = kept

    def _segment(self, size: int, pool: tuple[str, bool]) -> Piece:
        segment = _SMALL_SEGMENT if pool[1] else _SHARED_SEGMENT if size < _LARGE else -(-size // _STEP) * _STEP
        self._make_room(segment)
        self._take(segment)
        block = Piece(pool, self._end, segment)
        self._end += segment
        return block

    def _expanded(self, size: int, pool: tuple[str, bool]) -> Piece:
        """The end of an expandable segment, which grows by whole steps to hold ``size``."""
        self._make_room(self._growth(size, pool))
        growth, last = self._growth(size, pool), self._last.get(pool)  # what was free may have been given back
        self._take(growth)
        if last is not None and last.free:
            self._free[pool].remove((last.key, last))
            last.size_bytes += growth
            return last
        block = Piece(pool, 0 if last is None else last.address + last.size_bytes, growth, before=last)
        if last is not None:
            last.after = block
        self._last[pool] = block
        return block

    def _growth(self, size: int, pool: tuple[str, bool]) -> int:
        """Bytes by which an expandable segment grows for ``size``."""
        last = self._last.get(pool)
        return -(-(size - (last.size_bytes if last is not None and last.free else 0)) // _step(pool)) * _step(pool)

    def _make_room(self, size_bytes: int) -> None:
        if self._capacity is not None and self.reserved_bytes + size_bytes > self._capacity:
            self.retries += 1
            self.release()

    def _take(self, size_bytes: int) -> None:
        self.reserved_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)


def _step(pool: tuple[str, bool]) -> int:
    """Steps in which an expandable segment grows and shrinks."""
    return _SMALL_SEGMENT if pool[1] else _SHARED_SEGMENT


def _whole_steps(block: Piece) -> int:
    """Bytes of the steps that ``block`` has for itself."""
    step = _step(block.pool)
    return max((block.address + block.size_bytes) // step - -(-block.address // step), 0) * step


@dataclass(slots=True, eq=False)
class ReservedMemory:
    """What PyTorch's allocator reserves of a memory while ``trace`` runs; computed when it is first needed.

    Args:
        trace: an execution.
        memory: of a GPU.
        tensors: of its buffers.
        orders: returns orders of micro-batches that have other sizes, see :func:`reserve`; none if all are alike. What is
            reserved is the median over them.
        expandable: with ``expandable_segments``.
    """

    trace: Trace
    memory: str
    tensors: Tensors = WHOLE
    orders: Callable[[], Iterable[Sequence[Tensors]]] = tuple
    expandable: bool = False
    _known: CachingAllocator | None = field(default=None, init=False, repr=False)

    @property
    def peak_bytes(self) -> int:
        """The most that is reserved at a time."""
        return self._run().peak_bytes

    @property
    def retries(self) -> int:
        """How often the memory is full until segments are given back, which makes the host wait for the GPU."""
        return self._run().retries

    @property
    def expanded_bytes(self) -> int:
        """The most that is reserved at a time with ``expandable_segments``."""
        return replace(self, expandable=True).peak_bytes

    def _run(self) -> CachingAllocator:
        if self._known is None:
            orders = list(self.orders()) or [()]
            runs = [reserve(self.trace, self.memory, self.tensors, order, self.expandable) for order in orders]
            self._known = sorted(runs, key=lambda run: run.peak_bytes)[len(runs) // 2]
        return self._known


def reserve(
    trace: Trace, memory: str, tensors: Tensors = WHOLE, batches: Sequence[Tensors] = (), expandable: bool = False
) -> CachingAllocator:
    """Return the allocator after ``trace``: each task allocates on the stream of its lane when it starts, and what it frees is
    free when it ends. What is resident comes first; only what the first update makes comes when that begins.

    Args:
        trace: an execution.
        memory: of a GPU.
        tensors: of its buffers.
        batches: the tensors of one micro-batch after another, if these are not all alike. ``trace`` is repeated until each was
            computed, in the same order of allocations; the last one stands for all that follow.
        expandable: with ``expandable_segments``.
    """
    schedule, buffers = trace.schedule, lives(trace.schedule, memory)
    within = schedule.within(memory)
    capacity = next(one.capacity_bytes for one in schedule.memories if one.name == memory)
    allocator = CachingAllocator(capacity, expandable=expandable)
    first, of_update = schedule.lanes[0].name, list[int]()
    for resident in schedule.resident:
        if resident.memory in within:
            there = tensors(resident)
            later = len(there) - tensors.made_later(resident)
            of_update += there[later:]
            for size in there[:later]:
                allocator.allocate(size, first)
    updates = [
        [schedule.tasks[task].id.kind is Kind.GPU_UPDATE for task in ends] for ends in (buffers.frees, buffers.allocates)
    ]
    made = [one for task in schedule.tasks for one in task.allocates if one.memory in within]
    streams = [schedule.tasks[task].lane for task in buffers.allocates]
    micro_batches = 1 + max((task.id.micro_batch for task in schedule.tasks), default=0)
    each = batches or (tensors,)
    sizes: dict[tuple[Tensors, int], tuple[Sequence[int], int]] = {}
    made_last = [one.id.value in tensors.made_last for one in made]
    for begun in range(0, len(each), trace.iterations * micro_batches):
        iterations, held = [-back for back in buffers.backs], dict[int, list[Piece]]()
        waiting: list[tuple[int, str, Sequence[int]]] = []
        for instance, buffer, begins in _in_turn(trace, memory, made_last):
            if of_update and updates[begins][buffer]:
                for size in of_update:
                    allocator.allocate(size, first)
                of_update = []
            if not begins:
                for block in held.pop(instance):
                    allocator.free(block)
                if made[buffer].id.value is Value.LOGITS:
                    for one, stream, rest in waiting:
                        if one in held:
                            held[one] += [allocator.allocate(size, stream) for size in rest]
                    waiting.clear()
                continue
            iteration, iterations[buffer] = iterations[buffer], iterations[buffer] + 1
            batch = begun + iteration * micro_batches + made[buffer].id.micro_batch
            if batches and batch >= len(each) and begun + iteration > 0:
                break
            of_batch = each[min(max(batch, 0), len(each) - 1)]
            if (of_batch, buffer) not in sizes:
                sizes[of_batch, buffer] = of_batch(made[buffer]), of_batch.made_later(made[buffer])
            all_sizes, later = sizes[of_batch, buffer]
            at_once = len(all_sizes) - later
            held[instance] = [allocator.allocate(size, streams[buffer]) for size in all_sizes[:at_once]]
            if later:
                waiting.append((instance, streams[buffer], all_sizes[at_once:]))
        for blocks in held.values():
            for block in blocks:
                allocator.free(block)
    for size in of_update:  # of updates that neither take nor free anything
        allocator.allocate(size, first)
    return allocator


def _in_turn(trace: Trace, memory: str, made_last: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    """The changes of ``memory``, in which buffers that are ``made_last`` begin once all is freed that their task frees."""
    late, freed = list[tuple[int, int, bool]](), False
    for change in changes(trace, memory):
        _, buffer, begins = change
        if begins and made_last[buffer]:
            late.append(change)
            freed = False
            continue
        if made_last[buffer] or (begins and freed):
            yield from late
            late.clear()
        freed = not begins
        yield change
    yield from late
