"""The roofline of a traced model: the rows of its table at the rates that price the bundled families."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from autohete.hardware import Gpu
from autohete.profile.costs import LossProfile, SavedTensors, UnitProfile, within
from autohete.profile.modules import SMALL_ELEMENTS
from autohete.profile.rates import CHUNKED_SHARE, Rates
from autohete.workload.optimizers import Optimizer
from autohete.workload.table import TracedKernel, TracedSaved, TracedUnit, largest
from autohete.workload.traced import TracedWorkload

#: Kernels of a unit with the number of times that each runs.
_Rows = Sequence[tuple[TracedKernel, int]]


class TracedRoofline(Rates):
    """Prices the units and the loss of a traced workload."""

    def __init__(self, workload: TracedWorkload, gpu: Gpu, launch_seconds: float) -> None:
        super().__init__(workload, gpu, launch_seconds)
        self.traced, self.batch = workload, workload.batch_size

    def unit(self, number: int) -> UnitProfile:
        """Times and sizes of a unit. What several units use rests on the GPU as activations of the first one."""
        w, batch = self.traced, self.batch
        unit = w.table.unit(number)
        parameters, frozen = w.unit_parameters(number), w.frozen_parameters(number)
        input_bytes = unit.input_bytes.at(batch)
        kept = max(sum(one.bytes.at(batch) for one in unit.saved) - unit.unsaved_input_bytes.at(batch), 0)
        saved = within(tuple(self._saved(unit)), kept) if w.is_inner(number) else ()
        shared = w.table.beside_bytes.at(batch) + largest(w.table.beside_gradient_bytes, batch)
        beside = 0 if number else shared
        update, states, temporaries = self._update(number, parameters - frozen)
        forward, backward = ([(row, row.count) for row in rows] for rows in (unit.forward, unit.backward))
        return UnitProfile(
            role=w.role(number),
            parameters=parameters,
            forward_seconds=self._seconds(forward),
            backward_seconds=self._seconds(backward, backward=True),
            gpu_update_seconds=update,
            gpu_update_workspace_bytes=temporaries,
            input_bytes=input_bytes + beside,
            activation_bytes=input_bytes + beside + kept,
            forward_workspace_bytes=largest(unit.forward_workspace_bytes, batch),
            backward_workspace_bytes=largest(unit.backward_workspace_bytes, batch),
            saved=saved,
            frozen_parameters=frozen,
            state_bytes=None if w.training.update_name == Optimizer.ADAMW else states,
            largest_parameter=max((one.count for one in unit.parameters if not one.frozen), default=None),
            forward_host_seconds=self._host_seconds(_launches(forward)),
            backward_host_seconds=self._host_seconds(_launches(backward), backward=True),
            modules=len({row.module for row in unit.forward}),
            tensors=len(unit.parameters),
            small_tensors=sum(one.count < SMALL_ELEMENTS for one in unit.parameters),
        )

    def loss(self) -> LossProfile:
        """Times and sizes of the loss. The caller holds the prediction until backward has ended."""
        loss = self.traced.table.loss
        seconds = self._seconds([(row, row.count) for row in loss.kernels])
        return LossProfile(
            seconds, loss.prediction_bytes.at(self.batch), largest(loss.workspace_bytes, self.batch), keeps_logits=True
        )

    def _seconds(self, rows: _Rows, *, backward: bool = False) -> float:
        """Time of a pass."""
        launches = _launches(rows)
        return self._pass_seconds(self._busy(rows), launches, self._host_seconds(launches, backward=backward))

    def _busy(self, rows: _Rows) -> float:
        """Time of the work in some rows: products at their rate, fused attention at its own, all else by memory and
        instructions together.
        """
        traffic = accesses = seconds = 0.0
        for row, count in rows:
            traffic += count * row.bytes.at(self.batch)
            accesses += count * row.accesses.at(self.batch)
            fused = row.fused_flops.at(self.batch)
            if row.attention is None:
                seconds += count * fused / (self.flops * CHUNKED_SHARE)
            else:
                query, value, keys = row.attention
                backward = "backward" in row.kernel
                seconds += count * self._attention_seconds(fused, (query, value), keys, backward=backward, masked=row.masked)
            for sizes in row.products:
                m, n, k, matrices = (size.at(self.batch) for size in sizes)
                # A size that grows with the batch counts rows; the others are how long rows are.
                width = math.gcd(*(size.fixed for size in sizes[:3] if not size.each))
                seconds += count * self._gemm_seconds(m, n, k, matrices, width=width)
        return seconds + max(traffic / self.bandwidth, accesses * self.kernels.instructions / self.lanes)

    def _saved(self, unit: TracedUnit) -> Iterator[SavedTensors]:
        """What the unit keeps besides its input; tensors that are made again together are one."""
        groups = [(again, list(some)) for again, some in groupby(unit.saved, key=lambda one: one.again)]
        # Where scores are in memory, what is published of a block is the core of attention alone.
        core = any(unit.forward[row].products for again, _ in groups for row, _ in again or ())
        names: dict[str, int] = {}
        for again, some in groups:
            if again is None:
                yield from (self._alone(one, names) for one in some)
                continue
            rows = [(unit.forward[row], count) for row, count in again]
            busy, launches = self._busy(rows), _launches(rows)
            size = sum(one.bytes.at(self.batch) for one in some)
            selective = not core or any(row.products for row, _ in rows)
            name = _named(some[-1].name, names)
            yield SavedTensors(name, size, busy + launches * self.overhead, self._host_seconds(launches), selective)

    def _alone(self, one: TracedSaved, names: dict[str, int]) -> SavedTensors:
        return SavedTensors(_named(one.name, names), one.bytes.at(self.batch))


def _launches(rows: _Rows) -> int:
    """Number of kernels launched."""
    return sum(count * row.launches for row, count in rows)


def _named(name: str, taken: dict[str, int]) -> str:
    """A name of its own, of letters that a plan's text takes."""
    name = "".join(letter if letter.isalnum() else "_" for letter in name)
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name}_{taken[name]}"
