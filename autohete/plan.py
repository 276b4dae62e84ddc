"""What was decided: a policy's answer, as data. ``lowering.py`` alone turns it into tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from autohete.errors import InputError, check_fields


class Activations(StrEnum):
    """What becomes of a block's activations between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


class Placement(StrEnum):
    """Where a block's parameters are while the GPU does not compute with them."""

    RESIDENT = "resident"
    OFFLOADED = "offloaded"


class Processor(StrEnum):
    """Who updates a block's parameters and holds their optimizer states."""

    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The decisions for one block.

    Args:
        activations: keep, recompute or offload.
        parameters: resident, or offloaded and fetched for use.
        optimizer: GPU or CPU.
        keep_after_forward: offloaded parameters stay on the GPU from forward to backward.
        keep_after_backward: they stay from backward to the next forward.
        write_back_after_forward: copied to the host after forward though unchanged (systems that *move* instead of copy).
        forward_prefetch_distance: the prefetch for forward may run beside this many GPU passes before the block's own;
            0 makes it synchronous.
        backward_prefetch_distance: likewise for backward.
    """

    activations: Activations = Activations.KEEP
    parameters: Placement = Placement.RESIDENT
    optimizer: Processor = Processor.GPU
    keep_after_forward: bool = False
    keep_after_backward: bool = False
    write_back_after_forward: bool = False
    forward_prefetch_distance: int = 1
    backward_prefetch_distance: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.forward_prefetch_distance, self.backward_prefetch_distance) < 0:
            raise InputError("a prefetch distance cannot be negative: 0 means synchronous, 1 one pass ahead")
        offloaded = self.parameters is Placement.OFFLOADED
        if not offloaded and (self.keep_after_forward or self.keep_after_backward or self.write_back_after_forward):
            raise InputError("only offloaded parameters are kept or written back: resident ones never leave the GPU")
        if self.keep_after_forward and self.write_back_after_forward:
            raise InputError("parameters that stay on the GPU after forward are not written back then")

    @property
    def leaves(self) -> bool:
        """Whether the block's parameters are ever away from the GPU."""
        return self.parameters is Placement.OFFLOADED and not (self.keep_after_forward and self.keep_after_backward)


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """A plan in three counts and a total; as text ``24c 10p 26o of 26``."""

    checkpointed_blocks: int
    offloaded_parameter_blocks: int
    offloaded_optimizer_blocks: int
    blocks: int

    def __str__(self) -> str:
        return (
            f"{self.checkpointed_blocks}c {self.offloaded_parameter_blocks}p {self.offloaded_optimizer_blocks}o "
            f"of {self.blocks}"
        )


_SIZES = (
    "gradient_bytes",
    "update_bytes",
    "elementwise_bytes",
    "refresh_bytes",
    "host_optimizer_bytes",
    "host_parameter_bytes",
    "gpu_buffer_bytes",
    "host_buffer_bytes",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One policy's decisions for one workload.

    Args:
        policy: name and flags, as given.
        blocks: one entry per block, embedding first, head last. Embedding and head have resident parameters.
        gradient_bytes: bytes per element in which gradients cross to the host.
        blocking_gradients: the GPU waits for each gradient copy (it runs on the compute stream).
        gradients_replace_parameters: a finished gradient takes the place of the block's 16-bit parameters on the GPU.
        gradient_slots: gradients of at most so many blocks wait on the GPU for their copy; None: no limit.
        update_bytes: DRAM traffic per parameter of the Adam kernel on the CPU.
        elementwise_bytes: DRAM traffic per parameter of the elementwise kernels of a CPU update: unscaling, casts.
        gradients_pinned, refresh_pinned: gradients land in, and updated parameters come from, pinned host memory; pageable
            memory is slower.
        update_after_backward: CPU updates start when every gradient is on the host (clipping, overflow check).
        window: blocks share a sliding window of so many places: forward of block ``i + window`` waits for the write-back of
            block ``i``, backward of block ``i - window`` for its CPU update.
        gpu_update_after_backward: GPU updates run after the last backward instead of after each block's.
        serial_updates: after backward, gradient copy, update and refresh of one block end before the next block's begin;
            gradients of blocks that do not stay on the GPU have left it during backward.
        refresh_bytes: bytes per parameter in which updated parameters cross to the GPU.
        fetch_bytes: bytes per parameter in which offloaded parameters that the CPU updates do; None, and of others: as the GPU
            computes with them.
        refresh_after_updates: refreshes start when every CPU update is done.
        refresh_through_buffer: refreshed parameters of all blocks meet in a GPU buffer before they are cast.
        barrier: the next forward waits for every update and refresh.
        delayed: a CPU update takes the gradients of the iteration before (stale; changes the mathematics).
        priority: copies and CPU updates take the most urgent ready block first instead of the first come.
        gpu_buffer_bytes: GPU memory the policy holds all the time (buckets, caches).
        parameter_slots: fetched parameters live in so many preallocated slots of the largest offloaded block;
            None: each is allocated when its prefetch starts.
        gradients_in_slots: a slot has room for the gradient, too; with ``parameter_slots`` only.
        host_optimizer_bytes: pageable host bytes per parameter updated on the CPU (states, gradient, staging).
        host_pinned_bytes: pinned arrays for what the CPU updates, bytes per parameter of each. PyTorch rounds a pinned
            allocation up to a power of two: one for each block, or with ``host_pinned_together`` one for all blocks.
        host_parameter_bytes: host bytes per offloaded parameter.
        one_host_copy: what the CPU updates is the host's copy of offloaded parameters itself: none of their own is counted.
        host_buffer_bytes: other host memory.
        memory_waits: the plan fits only with more waits, at a cost in time; :func:`autohete.simulate.simulate_plan` adds them.
        bound_seconds: no plan that the policy could have chosen has a shorter iteration, as its planner proved; None: it does
            not search. Says how good the plan is, not what it is: plans are equal without it.
    """

    policy: str
    blocks: tuple[BlockPlan, ...]
    gradient_bytes: int
    update_bytes: float
    refresh_bytes: int
    host_optimizer_bytes: int
    host_parameter_bytes: int
    elementwise_bytes: float = 0
    fetch_bytes: int | None = None
    gradients_pinned: bool = True
    refresh_pinned: bool = True
    blocking_gradients: bool = False
    gradients_replace_parameters: bool = False
    gradient_slots: int | None = None
    update_after_backward: bool = False
    window: int | None = None
    gpu_update_after_backward: bool = False
    serial_updates: bool = False
    refresh_after_updates: bool = False
    refresh_through_buffer: bool = False
    barrier: bool = False
    delayed: bool = False
    priority: bool = False
    gpu_buffer_bytes: int = 0
    parameter_slots: int | None = None
    gradients_in_slots: bool = False
    host_pinned_bytes: tuple[int, ...] = ()
    host_pinned_together: bool = False
    one_host_copy: bool = False
    host_buffer_bytes: int = 0
    memory_waits: bool = False
    bound_seconds: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.blocks) < 3:
            raise InputError(f"a plan needs embedding, transformer blocks and head: got {len(self.blocks)} blocks")
        for block in (self.blocks[0], self.blocks[-1]):
            if block.parameters is Placement.OFFLOADED or block.activations is not Activations.KEEP:
                raise InputError("embedding and head keep parameters and activations on the GPU: plan them so")
        if self.priority and (self.update_after_backward or self.serial_updates or self.refresh_after_updates):
            raise InputError("priority orders what is ready; a plan whose updates all wait for each other has no such choice")
        one_by_one = self.gradient_slots is not None or self.window is not None
        if self.serial_updates and (one_by_one or self.update_after_backward or self.refresh_after_updates):
            raise InputError(
                "serial_updates fixes the order of all updates: it excludes gradient_slots, window, update_after_backward "
                "and refresh_after_updates"
            )
        if self.update_after_backward and self.window is not None:
            raise InputError("a window needs updates during backward: it excludes update_after_backward")
        if self.delayed and (self.serial_updates or self.window is not None or self.offloaded_parameter_blocks):
            raise InputError(
                "a delayed update writes the host's parameters during the next iteration: it excludes serial and windowed "
                "updates and offloaded parameters"
            )
        for name in ("gradient_slots", "window", "parameter_slots"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}: give at least 1, or None for no limit")
        if self.gradients_in_slots and self.parameter_slots is None:
            raise InputError("gradients_in_slots needs parameter_slots: give their number")
        if any(not (math.isfinite(size) and size >= 0) for size in self.host_pinned_bytes):
            raise InputError(f"host_pinned_bytes is {self.host_pinned_bytes}: give finite numbers of bytes, 0 or more")
        for name in _SIZES:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is {value}: it must be a finite number of bytes, 0 or more")

    @property
    def updates_beside_gpu(self) -> bool:
        """Whether the CPU updates block by block while the GPU trains, instead of all at once while it waits."""
        return self.delayed or not (self.update_after_backward or self.serial_updates)

    @property
    def updated_on_cpu(self) -> tuple[int, ...]:
        """The blocks that the CPU updates, in the order in which backward reaches them."""
        return tuple(i for i in range(len(self.blocks) - 1, -1, -1) if self.blocks[i].optimizer is Processor.CPU)

    @property
    def refreshed(self) -> tuple[int, ...]:
        """Those of them whose updated parameters go to a copy that stays on the GPU; others come with their next fetch."""
        return tuple(i for i in self.updated_on_cpu if not self.blocks[i].leaves or self.blocks[i].keep_after_backward)

    def copied_after_backward(self, block: int) -> bool:
        """Whether the gradient's copy is a part of a serial update instead of following its backward."""
        return self.serial_updates and (not self.blocks[block].leaves or self.blocks[block].keep_after_backward)

    @property
    def checkpointed_blocks(self) -> int:
        """Blocks that recompute their activations."""
        return sum(block.activations is Activations.RECOMPUTE for block in self.blocks)

    @property
    def offloaded_parameter_blocks(self) -> int:
        """Blocks whose parameters are offloaded."""
        return sum(block.parameters is Placement.OFFLOADED for block in self.blocks)

    @property
    def offloaded_optimizer_blocks(self) -> int:
        """Blocks that the CPU updates."""
        return sum(block.optimizer is Processor.CPU for block in self.blocks)

    @property
    def counts(self) -> PlanCounts:
        """The three counts, for tables and files."""
        return PlanCounts(
            self.checkpointed_blocks, self.offloaded_parameter_blocks, self.offloaded_optimizer_blocks, len(self.blocks)
        )
