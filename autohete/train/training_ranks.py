"""This process as one of several ranks that train one model, through ``torch.distributed``."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autohete.errors import InputError, RankError
from autohete.hardware import Hardware, Interconnect
from autohete.runtime.collectives import CALLERS, Collectives
from autohete.runtime.control_channel import ControlChannel, Facts, first_difference
from autohete.runtime.partition import Partition
from autohete.schedule import Schedule

#: How long a rank waits for one that lives, as in torch.distributed.
_PATIENCE_SECONDS = 1800.0
#: How long a rank that ends with an error waits for the others to give the model back together.
_LEAVING_SECONDS = 3.0
#: Bytes of the gathers that are measured.
_MEASURED_BYTES = (2**14, 2**23)
_REPEATS = 5

T = TypeVar("T")


def group_of(given: object) -> dist.ProcessGroup | None:
    """The group of processes that are to train one model; None: this process trains alone.

    Args:
        given: a process group; None: the default group, if there is one.

    Raises:
        InputError: it is no process group, or there is none although this process is one of several.
    """
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise InputError(f"process_group is of type {type(given).__name__}: give a group of torch.distributed, or leave it out")
    group = given
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        rank, processes = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if processes.strip() not in ("", "1"):
            raise InputError(
                f"this process is rank {rank} of {processes}, but they are not connected: call "
                "torch.distributed.init_process_group() first, so that they train one model"
            )
        return None
    return group if dist.get_world_size(group) > 1 else None


class TrainingRanks:
    """The ranks of a training, of which this process is one. All of them make the same calls in the same order.

    Args:
        group: the processes.
        device: of the passes.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._groups: list[dist.ProcessGroup] = []
        self._collectives: Collectives | None = None

    @property
    def collectives(self) -> Collectives:
        """The collectives of this rank, once it is connected."""
        assert self._collectives is not None, "connected"
        return self._collectives

    def connect(self) -> None:
        """Connect with the others."""
        if self._collectives is None:
            backends = ["gloo"] if self._device.type == "cpu" else ["gloo", "nccl"]
            members = dist.get_process_group_ranks(self._group)
            self._groups = [dist.new_group(members, backend=one, use_local_synchronization=True) for one in backends]
            channel = ControlChannel.connect(self._groups[0], _PATIENCE_SECONDS)
            self._collectives = Collectives(channel, self._groups[-1], self._device)

    def close(self) -> None:
        """Leave the others. Later calls do nothing.

        The groups end with the default group: the next one would get the name of one that was destroyed, and with it stale
        addresses from the store.
        """
        if self._collectives is not None:
            self._collectives.channel.close()

    def leave(self, reason: str) -> RankError | None:
        """Wait until all ranks have come to the end of the training.

        Args:
            reason: the error with which this rank ends it, which does not wait long; empty: there is none.

        Returns:
            The error of another rank, if this one has none.

        Raises:
            RankError: a rank has failed, or goes on.
        """
        if reason and self.collectives.channel.has_failed:  # the caller has that error
            return None
        label, patience = "the end of the training", _LEAVING_SECONDS if reason else None
        found = self.collectives.exchange(label, {"reason": reason}, stream=CALLERS, timeout_seconds=patience)
        failed = next((rank for rank, one in enumerate(found) if one["reason"]), None)
        if reason or failed is None:
            return None
        return RankError(f"rank {failed} has failed: {found[failed]['reason']}")

    def fail(self, reason: str) -> None:
        """Report to the others that this rank cannot go on."""
        if self._collectives is not None:
            self._collectives.channel.fail(reason)

    def exchange(self, label: str, facts: Mapping[str, Any] | None = None) -> Facts:
        """Wait for all ranks, and return the facts of all."""
        return self.collectives.exchange(label, facts, stream=CALLERS)

    def compare(self, label: str, values: Mapping[str, str]) -> None:
        """Check that all ranks have the same values.

        Raises:
            InputError: names the first rank and the first value that differ from those of rank 0.
        """
        found = [one["values"] for one in self.exchange(label, {"values": dict(values)})]
        for rank, theirs in enumerate(found):
            for name in sorted({*theirs, *found[0]}):
                one, first = theirs.get(name, "missing"), found[0].get(name, "missing")
                if one != first:
                    raise InputError(
                        f"{label}: {name} of rank {rank} is {one}, but of rank 0 {first}: all ranks must train the same model "
                        "in the same way; seed them alike before they make it, or load the same state"
                    )

    def from_first(self, label: str, make: Callable[[], T]) -> T:
        """Return the result of ``make()`` of rank 0.

        Raises:
            RankError: it has failed on rank 0; there, its own error.
        """
        content: list[Any] = [None]
        if self.rank == 0:
            try:
                content = [make()]
            except BaseException as error:
                self.fail(f"{label}: {type(error).__name__}: {error}")
                raise
        self.exchange(label)
        dist.broadcast_object_list(content, group=self._groups[0], group_src=0)
        found: T = content[0]
        return found

    def of_all(self, label: str, value: T) -> list[T]:
        """Return the values of all ranks."""
        self.exchange(label)
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._groups[0])
        return found

    def shared(self, hardware: Hardware) -> Hardware:
        """The part of this rank of ``hardware``, which was measured on all ranks at once, or is not one that is emulated."""
        if hardware.gpus == self.count:
            return hardware
        if hardware.shared_cores is None:
            return hardware.shared_by(self.count)
        host = hardware.host.shared_by(self.count)
        return replace(hardware, gpus=self.count, host=host, interconnect=self._measured_interconnect())

    def check_schedule(self, schedule: Schedule) -> None:
        """Check that all ranks have the same schedule."""
        self.compare("the schedule", {"digest": hashlib.sha256(str(schedule).encode()).hexdigest()})

    def check_model(self, partition: Partition, optimizer: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that all ranks begin with the same values, and that no forward changes buffers.

        Args:
            partition: the model.
            optimizer: the states of its optimizer, by the parameter's name.

        Raises:
            InputError: names the rank and the parameter.
        """
        if changing := sorted(partition.effects.changing):
            raise InputError(
                f"a forward changes {changing[0]}, which several ranks would change apart: use modules without running "
                "statistics, or train in one process"
            )
        model: nn.Module = partition.model
        tensors = (*model.named_parameters(), *model.named_buffers())
        found = {name: f"{tuple(tensor.shape)} of {tensor.dtype} {digest(tensor)}" for name, tensor in tensors}
        found |= {f"{name} (trained)": "yes" for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, states in optimizer.items():
            found |= {f"{part} of {name}": digest(value) for part, value in states.items()}
        self.compare("the model", found)

    def _measured_interconnect(self) -> Interconnect:
        """A line through the times of gathers."""
        times = []
        for size in _MEASURED_BYTES:
            part = torch.zeros(size // self.count, dtype=torch.uint8, device="cpu")
            shares = self.collectives.shares(len(part) * self.count)
            whole, found = torch.empty(len(part) * self.count, dtype=torch.uint8, device="cpu"), []
            for _ in range(_REPEATS):
                self.exchange("measuring the interconnect")
                begin = time.perf_counter()
                self.exchange("measuring a gather")
                self.collectives.gather(part, shares, whole)
                found.append(time.perf_counter() - begin)
            times.append(median(found))
        steps, sent = self.count - 1, [size * (self.count - 1) / self.count for size in _MEASURED_BYTES]
        per_byte = max(times[1] - times[0], 1e-9) / (sent[1] - sent[0])
        latency = max(times[0] - per_byte * sent[0], 1e-6) / steps
        return Interconnect(self.count, 1 / per_byte, latency)


def digest(value: object) -> str:
    """A digest of a tensor's bits, or the text of anything else."""
    if not isinstance(value, Tensor):
        return repr(value)
    flat = value.detach().to("cpu").contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()[:16]


def check_alike(found: Facts, what: str, key: str) -> None:
    """Check a fact of all ranks.

    Raises:
        RankError: names the first rank where it differs.
    """
    rank = first_difference(found, key)
    if rank is not None:
        raise RankError(
            f"{what} of rank {rank} differ from those of rank 0: {_shorter(found[rank][key], found[0][key])}; all ranks must "
            "make the same changes between steps"
        )


def _shorter(one: Any, other: Any) -> str:
    """Two different values; of lists, the first entries that differ."""
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        pairs = (f"{a!r}, not {b!r}" for a, b in zip(one, other, strict=False) if a != b)
        return next(pairs, f"{len(one)} of them, not {len(other)}")
    return f"{one!r}, not {other!r}"
