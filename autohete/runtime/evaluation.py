"""Evaluation of a model between training steps, in the memory that the training states leave free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from autohete.errors import DeviceOutOfMemoryError
from autohete.runtime.batch import Batch, Inputs
from autohete.runtime.guard import Guard
from autohete.runtime.model_state import Snapshot, unchanged_random_state
from autohete.runtime.passes import Passes
from autohete.runtime.units import Memories


class Evaluation:
    """Evaluates a model that is being trained. All updates must have ended.

    Args:
        passes: bring the blocks to the device, one at a time.
        guard: gives the evaluation access to the parameters.
        memories: the memories that tensors live in; an evaluation's allocations are counted storage by storage.
    """

    def __init__(self, passes: Passes, guard: Guard, memories: Memories) -> None:
        self._passes, self._guard, self._memories = passes, guard, memories

    @contextmanager
    def logits(self) -> Iterator[Callable[[Inputs], Tensor]]:
        """Yield a function from token ids (or the model's arguments) to logits, with dropout off.

        Module modes, buffers, random states and the state of the loss function's modules are restored on exit.
        """
        partition, count = self._passes.partition, self._memories.count
        with self._guard.inside():
            before = Snapshot(partition.model.named_modules(), partition.effects.changing)
            of_loss = self._passes.loss.state(partition.model)
        self._memories.current.task = "evaluation"
        try:
            with (
                unchanged_random_state(self._memories.torch_device),
                nullcontext() if count is None else count.exactly("evaluation"),
            ):
                partition.model.eval()
                yield self._logits
        finally:
            with self._guard.inside():
                before.restore()
                of_loss.restore()

    def _logits(self, inputs: Inputs) -> Tensor:
        with self._guard.resumed(), self._guard.inside():
            return self._passes.evaluate(inputs)

    def loss(self, batch: Batch) -> float:
        """Return the loss of one batch.

        Raises:
            DeviceOutOfMemoryError: the batch needs more than the free device memory; nothing has changed.
        """
        try:
            with self.logits() as logits, torch.no_grad():
                return float(self._passes.loss(logits(batch.inputs), batch, self._memories.torch_device).item())
        except (DeviceOutOfMemoryError, torch.OutOfMemoryError) as caught:
            allocator = self._memories.allocator
            error = allocator.refusal("evaluation", caught) if isinstance(caught, torch.OutOfMemoryError) else caught
            size = " x ".join(map(str, batch.targets.shape))
            raise DeviceOutOfMemoryError(
                f"a batch of {size} tokens is too large to evaluate next to the training states: "
                f"{str(error).rpartition('. Give')[0]}. Evaluate smaller batches; training can continue",
                error.task,
                error.size_bytes,
                error.capacity_bytes,
                error.holders,
            ) from caught
