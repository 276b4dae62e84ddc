"""Names of tasks and buffers: kinds of task, values in memories, and the ids built from them.

Ids are named tuples, because they are created, hashed and compared by the thousand. A frozen dataclass is three times slower to
create and ten times slower to look up in a dictionary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from autohete.errors import ScheduleError, check_fields, check_member

#: Names of the lanes of one GPU and its host.
GPU, H2D, D2H, CPU = "gpu", "h2d", "d2h", "cpu"
#: Names of their memories.
GPU_MEMORY, HOST_MEMORY = "gpu", "host"
#: The page-locked part of the host's memory, if it has a separate limit.
PINNED_MEMORY = "pinned"
#: Name of the lane for collectives of several GPUs.
COLLECTIVE = "collective"
#: Name of the lane on which a rank sends to other ranks.
SEND = "send"
#: Names of the resources that each GPU has for itself: the link whose two directions share a rate, its multiprocessors, and
#: what its work takes from the CPU's work beside it.
LINK, MULTIPROCESSORS, CPU_BESIDE_GPU = "link", "multiprocessors", "cpu_beside_gpu"


#: The home of values that rest in the memory of another rank.
_RANK_HOME = re.compile(r"rank(\d{1,6})")


def rank_home(rank: int) -> str:
    """The home of values that other ranks of a pipeline let rest in the memory of ``rank``."""
    return f"rank{rank}"


def lending_rank(home: str) -> int | None:
    """The rank in whose memory values of other ranks rest that have this home; None: it is no rank."""
    match = _RANK_HOME.fullmatch(home)
    return int(match[1]) if match else None


def is_gpu(memory: str) -> bool:
    """Whether ``memory`` is that of a GPU, of any rank."""
    return memory.partition(".")[0] == GPU_MEMORY


class Kind(StrEnum):
    """The kind of a task. The value is its mnemonic in task ids."""

    FORWARD = "F"
    LOSS = "L"
    RECOMPUTE = "R"
    BACKWARD = "B"
    GPU_UPDATE = "W"
    PREFETCH_FORWARD = "PF"
    PREFETCH_BACKWARD = "PB"
    REFRESH = "H"
    FETCH_ACTIVATIONS = "AF"
    OFFLOAD_ACTIVATIONS = "AO"
    WRITE_BACK_FORWARD = "WF"
    WRITE_BACK_BACKWARD = "WB"
    OFFLOAD_GRADIENTS = "G"
    FETCH_GRADIENTS = "GF"
    CPU_UPDATE = "U"
    FETCH_STATES = "SF"
    WRITE_BACK_STATES = "SB"
    ACCUMULATE = "A"
    READ_STATES = "NR"
    WRITE_STATES = "NW"
    WRITE_GRADIENTS = "NG"
    READ_ACTIVATIONS = "AR"
    WRITE_ACTIVATIONS = "AW"
    READ_FORWARD = "PRF"
    READ_BACKWARD = "PRB"
    WRITE_PARAMETERS = "PW"
    GATHER_FORWARD = "CF"
    GATHER_BACKWARD = "CB"
    REDUCE_GRADIENTS = "CR"
    GATHER_UPDATED = "CU"
    GRADIENT_NORM = "N"
    CLIP = "C"
    SEND_INPUT = "XF"
    SEND_INPUT_GRADIENT = "XB"
    SUM_TIED_GRADIENTS = "XT"
    SUM_NORMS = "XN"
    PLACE_UPDATE = "NU"
    READ_UPDATED = "PRU"

    __hash__ = str.__hash__  # Enum's own __hash__ is a Python call, for every id that lowering looks up


#: The kinds in words.
KIND_MEANING: dict[Kind, str] = {
    Kind.FORWARD: "forward",
    Kind.LOSS: "loss",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.GPU_UPDATE: "GPU update",
    Kind.PREFETCH_FORWARD: "prefetch of parameters for forward",
    Kind.PREFETCH_BACKWARD: "prefetch of parameters for backward",
    Kind.REFRESH: "refresh of updated parameters",
    Kind.FETCH_ACTIVATIONS: "fetch of activations",
    Kind.OFFLOAD_ACTIVATIONS: "offload of activations",
    Kind.WRITE_BACK_FORWARD: "write-back of parameters after forward",
    Kind.WRITE_BACK_BACKWARD: "write-back of parameters after their update",
    Kind.OFFLOAD_GRADIENTS: "offload of gradients",
    Kind.FETCH_GRADIENTS: "fetch of summed gradients",
    Kind.CPU_UPDATE: "CPU update",
    Kind.FETCH_STATES: "fetch of optimizer states",
    Kind.WRITE_BACK_STATES: "write-back of optimizer states",
    Kind.ACCUMULATE: "accumulation of gradients on the host",
    Kind.READ_STATES: "read of optimizer states from their place",
    Kind.WRITE_STATES: "write of optimizer states to their place",
    Kind.WRITE_GRADIENTS: "write of gradients to their place",
    Kind.READ_ACTIVATIONS: "read of activations from their place",
    Kind.WRITE_ACTIVATIONS: "write of activations to their place",
    Kind.READ_FORWARD: "read of parameters from their place for forward",
    Kind.READ_BACKWARD: "read of parameters from their place for backward",
    Kind.WRITE_PARAMETERS: "write of updated parameters to their place",
    Kind.GATHER_FORWARD: "all-gather of parameters for forward",
    Kind.GATHER_BACKWARD: "all-gather of parameters for backward",
    Kind.REDUCE_GRADIENTS: "reduction of gradients over the GPUs",
    Kind.GATHER_UPDATED: "all-gather of updated parameters",
    Kind.GRADIENT_NORM: "norm of gradients",
    Kind.CLIP: "clip coefficient",
    Kind.SEND_INPUT: "transfer of an input to the next rank",
    Kind.SEND_INPUT_GRADIENT: "transfer of an input's gradient to the rank before",
    Kind.SUM_TIED_GRADIENTS: "sum of a tied matrix's gradients over the ranks of embedding and head",
    Kind.SUM_NORMS: "sum of the norms of gradients over ranks",
    Kind.PLACE_UPDATE: "update in a place",
    Kind.READ_UPDATED: "read of parameters that their place has updated",
}
#: The transfers between ranks that compute different units. Each is one task of all ranks that take part.
TRANSFERS = (Kind.SEND_INPUT, Kind.SEND_INPUT_GRADIENT, Kind.SUM_TIED_GRADIENTS, Kind.SUM_NORMS)
#: The kinds of an update in a place, such as in a drive that computes.
IN_PLACES = (Kind.PLACE_UPDATE, Kind.READ_UPDATED)
#: The kinds that all GPUs run together.
COLLECTIVES = (Kind.GATHER_FORWARD, Kind.GATHER_BACKWARD, Kind.REDUCE_GRADIENTS, Kind.GATHER_UPDATED)
_MNEMONICS = frozenset(kind.value for kind in Kind)
#: Their order, which settles ties.
KIND_ORDER: dict[Kind, int] = {kind: order for order, kind in enumerate(Kind)}


class _TaskId(NamedTuple):
    kind: Kind
    unit: int
    micro_batch: int = 0
    rank: int = 0
    again: int = 0


class TaskId(_TaskId):
    """A task within an iteration: ``F3`` is forward of unit 3, ``F3m1`` of its second micro-batch, ``F3r2`` on the third GPU.

    Args:
        kind: the kind of task.
        unit: index of the part of the model.
        micro_batch, rank: index of the micro-batch and of the GPU, from 0.
        again: index among several recomputations of a unit, or among the parts of its update, from 0: ``R3a1`` is the second.
    """

    __slots__ = ()

    def __new__(cls, kind: Kind, unit: int, micro_batch: int = 0, rank: int = 0, again: int = 0) -> TaskId:
        if type(kind) is not Kind:  # a lowering makes thousands of ids: call the check only on a failure
            check_member("kind", kind, Kind)
        return tuple.__new__(cls, (kind, unit, micro_batch, rank, again))

    def __str__(self) -> str:
        micro_batch = f"m{self.micro_batch}" if self.micro_batch else ""
        rank = f"r{self.rank}" if self.rank else ""
        again = f"a{self.again}" if self.again else ""
        return f"{self.kind}{self.unit}{micro_batch}{rank}{again}"

    def at(self, iteration: int) -> str:
        """The id of one instance: ``F3@1``."""
        return f"{self}@{iteration}"


_TASK = re.compile(r"([A-Z]+)(\d+)(?:m(\d+))?(?:r(\d+))?(?:a(\d+))?")


def parse_task_id(text: str) -> TaskId:
    """Inverse of ``str(TaskId)``."""
    match = _TASK.fullmatch(text)
    if match is None or match[1] not in _MNEMONICS:
        raise ScheduleError(f"{text!r} is not a task id: write a kind ({' '.join(Kind)}) and a unit, such as F3")
    return TaskId(Kind(match[1]), int(match[2]), int(match[3] or 0), int(match[4] or 0), int(match[5] or 0))


def parse_instance(text: str) -> tuple[TaskId, int]:
    """Inverse of :meth:`TaskId.at`: ``F3@1`` is forward of unit 3 in iteration 1."""
    task, at, iteration = text.partition("@")
    if not at or not iteration.isdecimal() or _TASK.fullmatch(task) is None:
        raise ScheduleError(f"{text!r} is not a task of an iteration: write it such as F3@1")
    return parse_task_id(task), int(iteration)


class Value(StrEnum):
    """A kind of data that occupies memory."""

    PARAMETERS = "parameters"
    PARAMETER_SHARD = "parameter_shard"
    GRADIENTS = "gradients"
    GRADIENT_SHARD = "gradient_shard"
    ARRIVED_GRADIENTS = "arrived_gradients"
    OPTIMIZER_STATES = "optimizer_states"
    PINNED_STATES = "pinned_states"
    ACTIVATIONS = "activations"
    INPUT = "input"
    INPUT_GRADIENT = "input_gradient"
    LOGITS = "logits"
    LOGITS_GRADIENT = "logits_gradient"
    WORKSPACE = "workspace"
    PARAMETER_SLOTS = "parameter_slots"
    POLICY_BUFFERS = "policy_buffers"
    GRADIENT_NORM = "gradient_norm"
    CLIP_COEFFICIENT = "clip_coefficient"
    OTHER = "other"

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class Copy:
    """A kind of copy. Its lane tells both ends.

    Args:
        value: what it carries.
        near: the end that is nearer to the GPU: the GPU's memory, or the host's on the way from or to a place behind it.
        arrives: whether the value comes to that end; otherwise it leaves it.
    """

    value: Value
    near: str
    arrives: bool

    def __post_init__(self) -> None:
        check_fields(self)


#: The copies, by kind of task.
COPIES = {
    Kind.PREFETCH_FORWARD: Copy(Value.PARAMETERS, GPU_MEMORY, arrives=True),
    Kind.PREFETCH_BACKWARD: Copy(Value.PARAMETERS, GPU_MEMORY, arrives=True),
    Kind.REFRESH: Copy(Value.PARAMETERS, GPU_MEMORY, arrives=True),
    Kind.WRITE_BACK_FORWARD: Copy(Value.PARAMETERS, GPU_MEMORY, arrives=False),
    Kind.WRITE_BACK_BACKWARD: Copy(Value.PARAMETERS, GPU_MEMORY, arrives=False),
    Kind.READ_FORWARD: Copy(Value.PARAMETERS, HOST_MEMORY, arrives=True),
    Kind.READ_BACKWARD: Copy(Value.PARAMETERS, HOST_MEMORY, arrives=True),
    Kind.WRITE_PARAMETERS: Copy(Value.PARAMETERS, HOST_MEMORY, arrives=False),
    Kind.READ_UPDATED: Copy(Value.PARAMETERS, HOST_MEMORY, arrives=True),
    Kind.OFFLOAD_GRADIENTS: Copy(Value.GRADIENTS, GPU_MEMORY, arrives=False),
    Kind.FETCH_GRADIENTS: Copy(Value.GRADIENTS, GPU_MEMORY, arrives=True),
    Kind.WRITE_GRADIENTS: Copy(Value.GRADIENTS, HOST_MEMORY, arrives=False),
    Kind.OFFLOAD_ACTIVATIONS: Copy(Value.ACTIVATIONS, GPU_MEMORY, arrives=False),
    Kind.FETCH_ACTIVATIONS: Copy(Value.ACTIVATIONS, GPU_MEMORY, arrives=True),
    Kind.READ_ACTIVATIONS: Copy(Value.ACTIVATIONS, HOST_MEMORY, arrives=True),
    Kind.WRITE_ACTIVATIONS: Copy(Value.ACTIVATIONS, HOST_MEMORY, arrives=False),
    Kind.FETCH_STATES: Copy(Value.OPTIMIZER_STATES, GPU_MEMORY, arrives=True),
    Kind.WRITE_BACK_STATES: Copy(Value.OPTIMIZER_STATES, GPU_MEMORY, arrives=False),
    Kind.READ_STATES: Copy(Value.OPTIMIZER_STATES, HOST_MEMORY, arrives=True),
    Kind.WRITE_STATES: Copy(Value.OPTIMIZER_STATES, HOST_MEMORY, arrives=False),
}


class _BufferId(NamedTuple):
    value: Value
    memory: str
    unit: int | None = None
    use: Kind | None = None
    micro_batch: int = 0
    again: int = 0
    rank: int = 0


class BufferId(_BufferId):
    """A value in a memory: ``activations.3:gpu`` are those of unit 3.

    Args:
        value: the value.
        memory: its memory.
        unit: index of the unit. None: the whole model.
        use: the kind of task that uses it, if a value exists more than once in an iteration: ``parameters_B.3``.
        micro_batch: index of the micro-batch.
        again: index of the recomputation that uses it, or of the part of the value.
        rank: index of the GPU, or of its process on the host: ``activations.3r2:gpu.2``.
    """

    __slots__ = ()

    def __new__(
        cls,
        value: Value,
        memory: str,
        unit: int | None = None,
        use: Kind | None = None,
        micro_batch: int = 0,
        again: int = 0,
        rank: int = 0,
    ) -> BufferId:
        if type(value) is not Value:
            check_member("value", value, Value)
        if type(use) is not Kind and use is not None:
            check_member("use", use, Kind)
        return tuple.__new__(cls, (value, memory, unit, use, micro_batch, again, rank))

    @property
    def group(self) -> str:
        """The part of the id without the unit: ``parameters_B``."""
        return str(self.value) if self.use is None else f"{self.value}_{self.use}"

    def __str__(self) -> str:
        unit = "" if self.unit is None else f".{self.unit}"
        micro_batch = f"m{self.micro_batch}" if self.micro_batch else ""
        again = f"a{self.again}" if self.again else ""
        rank = f"r{self.rank}" if self.rank else ""
        return f"{self.group}{unit}{micro_batch}{rank}{again}:{self.memory}"


_BUFFER = re.compile(r"([a-z_]+?)(?:_([A-Z]+))?(?:\.(\d+))?(?:m(\d+))?(?:r(\d+))?(?:a(\d+))?:([^:]+)")


def parse_buffer_id(text: str) -> BufferId:
    """Inverse of ``str(BufferId)``."""
    match = _BUFFER.fullmatch(text)
    if match is None or match[1] not in _VALUES or (match[2] or Kind.FORWARD) not in _MNEMONICS:
        raise ScheduleError(
            f"{text!r} is not a buffer: write a value ({' '.join(Value)}), a unit and a memory, such as activations.3:gpu"
        )
    unit = None if match[3] is None else int(match[3])
    use = Kind(match[2]) if match[2] else None
    return BufferId(Value(match[1]), match[7], unit, use, int(match[4] or 0), int(match[6] or 0), int(match[5] or 0))


_VALUES = frozenset(value.value for value in Value)
