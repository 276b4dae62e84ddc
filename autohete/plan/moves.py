"""What a unit's decisions mean for its values: where they rest between uses.

This is the only place that reads it off a plan. A schedule lists what rests where, unit by unit and in every memory, so an
executor knows where everything is before the first task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from autohete.plan import Footprint, Processor, UnitPlan
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, NVME_MEMORY, Value


class Resting(NamedTuple):
    """A value of a unit between its uses.

    Args:
        value: what rests.
        memory: where.
        size_bytes: its size; 0 for what takes no memory of its own, such as states of an optimizer that has none.
    """

    value: Value
    memory: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """The sizes of a unit's values, as far as they concern one GPU and its process on the host.

    Args:
        element_bytes: of a parameter or gradient where the GPU computes with it.
        parameters: the value that the GPU keeps: all parameters, or its part of them.
        kept: trained parameters that the GPU holds between uses.
        frozen_bytes: size of the frozen ones that it holds.
        gpu_updated, cpu_updated: parameters that each processor updates.
        gpu_state_bytes, cpu_state_bytes: size of their optimizer states.
        saved_bytes: by how much the states on the CPU are smaller than those of AdamW.
    """

    element_bytes: int
    parameters: Value
    kept: int
    frozen_bytes: int
    gpu_updated: int
    cpu_updated: int
    gpu_state_bytes: int
    cpu_state_bytes: int
    saved_bytes: int


def rests(unit: UnitPlan, sizes: UnitSizes, held: Footprint, pinned: str, *, trained: bool) -> Iterator[Resting]:
    """Yield what rests in every memory between uses.

    Args:
        unit: the decisions.
        sizes: the sizes of its values.
        held: what the system holds for what the CPU updates.
        pinned: the memory of pinned buffers.
        trained: whether the unit has anything to update.
    """
    on_cpu = unit.update_on is Processor.CPU
    if not unit.parameters.leaves:
        yield Resting(sizes.parameters, GPU_MEMORY, sizes.kept * sizes.element_bytes + sizes.frozen_bytes)
    else:
        copy = 0 if held.one_host_copy and on_cpu else sizes.kept * held.host_parameter_bytes
        yield Resting(Value.PARAMETERS, pinned if unit.parameters.fetched.pinned else HOST_MEMORY, copy + sizes.frozen_bytes)
    if not trained:
        return
    if on_cpu:
        elsewhere = sizes.cpu_state_bytes if unit.reads_states else 0
        states = max(sizes.cpu_updated * held.host_optimizer_bytes - sizes.saved_bytes - elsewhere, 0)
        if states or not unit.reads_states:
            yield Resting(Value.OPTIMIZER_STATES, pinned if Value.OPTIMIZER_STATES in held.pinned else HOST_MEMORY, states)
    if not unit.fetches_states and (not on_cpu or sizes.gpu_updated):
        yield Resting(Value.OPTIMIZER_STATES, GPU_MEMORY, sizes.gpu_state_bytes)
    elif unit.fetches_states and not unit.reads_states:
        yield Resting(Value.OPTIMIZER_STATES, pinned, sizes.gpu_state_bytes)
    if unit.reads_states:
        yield Resting(Value.OPTIMIZER_STATES, NVME_MEMORY, sizes.cpu_state_bytes if on_cpu else sizes.gpu_state_bytes)
    if unit.gradients_on_nvme:
        yield Resting(Value.GRADIENTS, NVME_MEMORY, unit.gradients.bytes_of(sizes.cpu_updated, sizes.element_bytes))
