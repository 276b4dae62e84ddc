"""The tensors that the buffers of a schedule consist of, as a framework would allocate them.

A buffer is all that a task makes or needs of one value. PyTorch allocates it tensor by tensor, and its allocator treats a few
large tensors otherwise than many small ones. What is known of them: parameters and their gradients are matrices, and what is
left of a unit (norms and biases); so are master weights and each moment of the optimizer, of which PyTorch's optimizers make
the moments in their first step, where activations have been (``_init_group`` in ``torch/optim/adamw.py``); what a forward
keeps is listed by operation (``UnitProfile.saved``), in tensors of the feed-forward or the hidden width; temporaries of a pass
are as large as the unit's input, those of the loss have four bytes a logit, and foreach kernels have one for each parameter.
Buffers of a system itself are flat.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from autohete.profile import Profile
from autohete.schedule import Buffer, Kind, Value
from autohete.workload import PLAIN_LOSSES
from autohete.workload.model import Experts, Mlp
from autohete.workload.optimizers import state_tensors
from autohete.workload.traced import TracedWorkload

#: An operation keeps at most so many tensors of one width. Those of many experts are one, with more rows.
_ALIKE = 6
#: Sizes of states are counted in such parts of a byte, which is exact with a scale for each 256 elements.
_PARTS = 256


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """Splits the buffers of a schedule of ``profile``.

    Args:
        profile: of the schedule.
        first_step_makes_moments: moments are allocated in the first step, as PyTorch's optimizers do; DeepSpeed
            allocates them at initialization.
    """

    profile: Profile
    first_step_makes_moments: bool = False
    _known: dict[tuple[int, int], list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def made_last(self) -> Collection[Value]:
        """The gradient of the logits, which the loss makes once its temporaries are free."""
        return (Value.LOGITS_GRADIENT,)

    def __call__(self, buffer: Buffer) -> list[int]:
        """Return the bytes of the tensors of ``buffer``, which add up to its size; the loss's include its result."""
        value, unit, size = buffer.id.value, buffer.id.unit, buffer.size_bytes
        if unit is None or not size:
            return [size] * (size > 0)
        match value:
            case Value.PARAMETERS | Value.GRADIENTS:
                return _shared(size, self._counts(unit, trained=value is Value.GRADIENTS))
            case Value.OPTIMIZER_STATES:
                counts, (master, *moments) = self._counts(unit, trained=True), self._states
                masters = [count * master for count in counts] if master else []
                return _shared(size, [*masters, *(count * moment for count in counts for moment in moments)])
            case Value.ACTIVATIONS:
                return self._kept(unit, size)
            case Value.WORKSPACE if buffer.id.use is Kind.LOSS:
                return self._of_loss(size)
            case Value.WORKSPACE if buffer.id.use in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
                return self._kept(unit, size)
            case Value.WORKSPACE if buffer.id.use is Kind.GPU_UPDATE and self.profile.workload.foreach_bytes:
                own = self._counts(unit, trained=True)
                together = size > sum(own) * self.profile.workload.foreach_bytes
                units = range(len(self.profile.units)) if together else [unit]
                return _shared(size, [count for each in units for count in self._counts(each, trained=True)])
            case _:
                return [size]

    def made_later(self, buffer: Buffer) -> int:
        """Return how many of the tensors, the last ones, are made later: the moments in the first update, and of the loss's
        temporaries the last one, where its memory is that of logits that are dropped.
        """
        value, unit = buffer.id.value, buffer.id.unit
        if value is Value.WORKSPACE and buffer.id.use is Kind.LOSS:
            return int(self._dropped_bytes > 0 and len(self(buffer)) > 1)
        if value is not Value.OPTIMIZER_STATES or not self.first_step_makes_moments:
            return 0
        masters = len(self._counts(unit, trained=True)) if self._states[0] and unit is not None else 0
        return max(len(self(buffer)) - masters, 0)

    @property
    def _states(self) -> list[int]:
        """What master weights and each moment take, in proportion to the others. An optimizer with none of the size of the
        parameters has one tensor.
        """
        workload = self.profile.workload
        master, moments = state_tensors(workload.training.optimizer, mixed=workload.precision.is_mixed)
        return [round(one * _PARTS) for one in (master, *(moments or [1]))]

    def _counts(self, unit: int, *, trained: bool) -> list[int]:
        return [one.parameters for one in self.profile.of_rank.tensors(unit, trained=trained)]

    def _kept(self, unit: int, size: int) -> list[int]:
        """What a forward keeps, operation by operation, and what ``size`` has besides, or the same if it is less."""
        alike = id(self.profile.units[unit]), size
        if alike not in self._known:
            self._known[alike] = self._split(unit, size)
        return self._known[alike]

    def _split(self, unit: int, size: int) -> list[int]:
        costs, found = self.profile.units[unit], []
        saved = [one.size_bytes for one in costs.saved]
        if sum(saved) > size:
            saved = []
        for one in (*saved, size - sum(saved)):
            alike = (width for width in self._widths(unit) if width and one % width == 0 and one // width <= _ALIKE)
            found += _cut(one, next(alike, max(costs.input_bytes, -(-one // _ALIKE))))
        return found

    def _of_loss(self, size: int) -> list[int]:
        """Temporaries of the loss. They have the memory of the gradient before it is made, and that of logits that are dropped
        meanwhile, unless the blocks of these are too small.
        """
        return _cut(size + self.profile.loss.gradient_bytes + self._dropped_bytes, self._loss_tensor)

    @property
    def _loss_tensor(self) -> int:
        """Bytes of a tensor of the loss."""
        loss, element = self.profile.loss, self.profile.workload.compute_bytes
        return loss.passed_bytes // element * (element if self.profile.workload.loss in PLAIN_LOSSES else 4)

    @property
    def _dropped_bytes(self) -> int:
        """Logits that are dropped before the last temporary, which their blocks are too small for."""
        loss = self.profile.loss
        return 0 if loss.keeps_logits or loss.in_place or loss.logits_bytes >= self._loss_tensor else loss.logits_bytes

    def _widths(self, unit: int) -> list[int]:
        """Bytes of a tensor of the feed-forward width, in fp32 and as the GPU computes, and of the input."""
        w = self.profile.of_rank
        if isinstance(w, TracedWorkload) or not w.is_inner(unit):
            return []
        parts = [part.expert if isinstance(part, Experts) else part for part in w.components(unit)]
        wide = [w.tokens * part.width * w.compute_bytes for part in parts if isinstance(part, Mlp)]
        return [*wide, self.profile.units[unit].input_bytes]


def _cut(size: int, piece: int) -> list[int]:
    """Split into pieces of a size, and what is left."""
    if piece <= 0:
        return [size] * (size > 0)
    left = size % piece
    return [piece] * (size // piece) + [left] * (left > 0)


def _shared(size: int, counts: list[int]) -> list[int]:
    """Split in proportion to ``counts``."""
    whole, found, done, before = sum(counts), [], 0, 0
    for count in counts:
        done += count
        found.append(size * done // whole - before)
        before += found[-1]
    return [one for one in found if one] or [size]
