"""What a training does for each kind of task, on real tensors.

Model states of a block live where the schedule has put them: 16-bit or fp32 parameters in one flat buffer on the device
(none while they are offloaded), their copy on the host, master weights and moments with the optimizer that updates them.
What is released is poisoned: parameters that a wrong schedule would still read are NaN, so the loss tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autohete.errors import ScheduleError
from autohete.runtime.model import Stack
from autohete.schedule import KIND_MEANING, Kind, Schedule, Task

#: Loss of logits against targets, a scalar tensor.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Adam:
    """AdamW's settings, for PyTorch's fused kernel."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def over(self, parameters: list[nn.Parameter]) -> torch.optim.AdamW:
        """An optimizer over ``parameters``, each updated by itself: the same kernels as in ordinary training."""
        settings = {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        return torch.optim.AdamW(parameters, fused=True, **settings)  # type: ignore[arg-type]


@dataclass(slots=True)
class Batch:
    """Token ids and targets, each (batch, sequence), and the loss once it is known."""

    ids: Tensor
    targets: Tensor
    loss: Tensor | None = None


@dataclass(slots=True)
class _Block:
    """One block's tensors. A flat buffer holds its parameters one after another."""

    module: nn.Module
    parameters: list[nn.Parameter]
    shapes: list[torch.Size]
    device: Tensor | None = None
    host: Tensor | None = None
    gradients: Tensor | None = None
    host_gradients: Tensor | None = None
    masters: list[nn.Parameter] = field(default_factory=list)
    optimizer: torch.optim.AdamW | None = None
    checkpoint: tuple[Tensor, Tensor] | None = None
    graph: tuple[Tensor, Tensor] | None = None
    saved: list[Tensor | None] = field(default_factory=list)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' places in ``flat``."""
        places = torch.split(flat, [shape.numel() for shape in self.shapes])
        return [place.view(shape) for place, shape in zip(places, self.shapes, strict=True)]

    def bind(self) -> None:
        """Let the module compute with what is on the device; with NaN if nothing is."""
        if self.device is not None:
            for parameter, view in zip(self.parameters, self.views(self.device), strict=True):
                parameter.data = view
        else:
            for parameter, shape in zip(self.parameters, self.shapes, strict=True):
                parameter.data = torch.full((), torch.nan, dtype=parameter.dtype).expand(shape)


class Training:
    """Actions on the model states of ``stack`` as ``schedule`` needs them.

    Args:
        stack: the model's blocks; their parameters are taken over.
        schedule: tells by its tasks where each block's states live.
        loss: of logits and targets.
        adam: the optimizer's settings.
    """

    def __init__(self, stack: Stack, schedule: Schedule, loss: Loss, adam: Adam | None = None) -> None:
        self.stack, self.loss, self.adam = stack, loss, adam or Adam()
        self.tasks = {task.id for task in schedule.tasks}
        self.batches: dict[int, Batch] = {}
        self._hidden: Tensor | None = None
        self._gradient: Tensor | None = None
        self._tied_gradient: Tensor | None = None
        kinds: dict[int, set[Kind]] = {i: set() for i in range(len(stack.modules))}
        for task in self.tasks:
            if task.block not in kinds:
                raise ScheduleError(f"{task} is of block {task.block}, but the model has {len(kinds)} blocks")
            kinds[task.block].add(task.kind)
        self._kinds = kinds
        first = {free.name for task in schedule.tasks for free in task.frees if free.back}
        owners = {b.name: task.id.block for task in schedule.tasks for b in task.allocates if b.name in first}
        resident = {int(b.name.rpartition(".")[2]) for b in schedule.resident if b.name.startswith("resident_parameters.")}
        self._blocks = [
            self._take_over(
                module, kinds[i], on_device=i in resident | set(owners.values()) or Kind.PREFETCH_FORWARD not in kinds[i]
            )
            for i, module in enumerate(stack.modules)
        ]
        self._actions: dict[Kind, Callable[[int, int], None]] = {
            Kind.FORWARD: self.forward,
            Kind.LOSS: self.compute_loss,
            Kind.RECOMPUTE: self.recompute,
            Kind.BACKWARD: self.backward,
            Kind.GPU_UPDATE: self.gpu_update,
            Kind.PREFETCH_FORWARD: self.prefetch,
            Kind.PREFETCH_BACKWARD: self.prefetch,
            Kind.REFRESH: self.refresh,
            Kind.FETCH_ACTIVATIONS: self.fetch_activations,
            Kind.OFFLOAD_ACTIVATIONS: self.offload_activations,
            Kind.WRITE_BACK_FORWARD: self.write_back,
            Kind.WRITE_BACK_BACKWARD: self.write_back,
            Kind.OFFLOAD_GRADIENTS: self.offload_gradients,
            Kind.CPU_UPDATE: self.cpu_update,
        }

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of task that can be done."""
        return frozenset(self._actions)

    def perform(self, task: Task, iteration: int) -> None:
        """Do ``task``; what it frees is gone afterwards."""
        action = self._actions.get(task.id.kind)
        if action is None:
            raise ScheduleError(f"the runtime has no action for {KIND_MEANING[task.id.kind]}")
        action(task.id.block, iteration)
        for free in task.frees:
            if free.name.startswith("parameters"):
                self._release(int(free.name.rpartition(".")[2]))

    def parameters(self) -> list[Tensor]:
        """The current value of every parameter in block order, wherever it is: its master weight where there is one.

        Call it when every update has ended.
        """
        found: list[Tensor] = []
        for i, block in enumerate(self._blocks):
            if block.parameters[0].dtype is torch.float32:
                # The side that updates is right; what it updates on the device may have been written back and released.
                flat = block.host if Kind.CPU_UPDATE in self._kinds[i] or block.device is None else block.device
                assert flat is not None
                found += [view.clone() for view in block.views(flat)]
            else:
                found += [master.detach().clone() for master in block.masters]
        return found

    # --- states

    def _take_over(self, module: nn.Module, kinds: set[Kind], *, on_device: bool) -> _Block:
        parameters = [p for p in module.parameters() if p.requires_grad]
        block = _Block(module, parameters, [p.shape for p in parameters])
        dtype = parameters[0].dtype
        flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        on_cpu = Kind.CPU_UPDATE in kinds
        if on_cpu or kinds & {Kind.PREFETCH_FORWARD, Kind.PREFETCH_BACKWARD}:
            block.host = flat.clone()
        if on_device:
            block.device = flat.clone()
        # In fp32 the parameters are their own master weights, on whichever side they are updated.
        if dtype is torch.float32:
            master = block.host if on_cpu else block.device
            block.masters = [] if master is None else [nn.Parameter(view) for view in block.views(master)]
            if master is None:  # updated on the GPU, but not there now: masters are made when they arrive
                assert block.host is not None
                block.masters = [nn.Parameter(view) for view in block.views(block.host)]
        else:
            block.masters = [nn.Parameter(view.float()) for view in block.views(flat)]
        if on_cpu:
            block.host_gradients = torch.empty_like(flat)
        block.optimizer = self.adam.over(block.masters)
        block.bind()
        return block

    def _release(self, i: int) -> None:
        block = self._blocks[i]
        if block.device is not None:
            block.device.fill_(torch.nan)
            block.device = None
            block.bind()

    # --- passes of the GPU

    def forward(self, i: int, iteration: int) -> None:
        """Compute the block; keep its graph, or only its input and the random state if it will be recomputed."""
        block = self._blocks[i]
        x = self.batches[iteration].ids if i == 0 else self._hidden
        assert x is not None
        if Kind.RECOMPUTE in self._kinds[i]:
            block.checkpoint = (x, torch.get_rng_state())
            with torch.no_grad():
                self._hidden = self._compute(i, x)
        else:
            self._hidden = self._compute_with_graph(i, x)

    def recompute(self, i: int, iteration: int) -> None:
        """Forward again from the checkpoint, with the random state that it had."""
        checkpoint = self._blocks[i].checkpoint
        assert checkpoint is not None
        x, state = checkpoint
        now = torch.get_rng_state()
        torch.set_rng_state(state)
        self._compute_with_graph(i, x)
        torch.set_rng_state(now)
        self._blocks[i].checkpoint = None

    def _compute(self, i: int, x: Tensor) -> Tensor:
        module = self._blocks[i].module
        result: Tensor = module(x, self.stack.tied) if i == self.stack.last and self.stack.tied is not None else module(x)
        return result

    def _compute_with_graph(self, i: int, x: Tensor) -> Tensor:
        leaf = x if i == 0 else x.detach().requires_grad_()
        with torch.enable_grad(), self._saving(i):
            y = self._compute(i, leaf)
        self._blocks[i].graph = (leaf, y)
        return y.detach()

    @contextmanager
    def _saving(self, i: int) -> Iterator[None]:
        """Keep what backward needs where it can be moved, and parameters by name: they may be elsewhere by then."""
        block = self._blocks[i]
        assert block.device is not None, "forward without parameters"
        parameters = block.device.untyped_storage().data_ptr()
        block.saved = []

        def pack(tensor: Tensor) -> object:
            if tensor.untyped_storage().data_ptr() == parameters:
                return (tensor.size(), tensor.stride(), tensor.storage_offset())
            block.saved.append(tensor)
            return len(block.saved) - 1

        def unpack(handle: object) -> Tensor:
            if isinstance(handle, tuple):
                assert block.device is not None, "backward without parameters"
                return block.device.as_strided(*handle)
            assert isinstance(handle, int)
            saved = block.saved[handle]
            assert saved is not None, "backward without activations"
            return saved

        with saved_tensors_hooks(pack, unpack):
            yield

    def compute_loss(self, i: int, iteration: int) -> None:
        """Loss of the iteration and the gradient of its logits."""
        batch = self.batches[iteration]
        assert self._hidden is not None
        logits = self._hidden.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.loss(logits, batch.targets)
        (self._gradient,) = torch.autograd.grad(loss, logits)
        batch.loss = loss.detach()
        self._hidden = None

    def backward(self, i: int, iteration: int) -> None:
        """Gradients of the block's parameters, and of its input for the block below."""
        block = self._blocks[i]
        assert block.graph is not None
        x, y = block.graph
        tied = self.stack.tied if i == self.stack.last else None
        wanted = [*([x] if i else []), *block.parameters, *([tied] if tied is not None else [])]
        found = list(torch.autograd.grad(y, wanted, self._gradient))
        self._gradient = found.pop(0) if i else None
        if tied is not None:
            self._tied_gradient = found.pop()
        if i == 0 and self.stack.tied is not None:
            place = next(k for k, p in enumerate(block.parameters) if p is self.stack.tied)
            assert self._tied_gradient is not None
            found[place] = self._tied_gradient + found[place]
            self._tied_gradient = None
        block.gradients = torch.cat([gradient.reshape(-1) for gradient in found])
        block.graph, block.saved = None, []

    # --- updates

    def gpu_update(self, i: int, iteration: int) -> None:
        """AdamW on the device's states."""
        block = self._blocks[i]
        assert block.gradients is not None
        assert block.device is not None
        if block.parameters[0].dtype is torch.float32:
            for master, view in zip(block.masters, block.views(block.device), strict=True):
                master.data = view
        self._step(block, block.gradients)
        if block.parameters[0].dtype is not torch.float32:
            self._narrow(block, block.device)
        block.gradients = None

    def cpu_update(self, i: int, iteration: int) -> None:
        """AdamW on the host's states, and the new parameters into the host's copy."""
        block = self._blocks[i]
        assert block.host_gradients is not None
        assert block.host is not None
        self._step(block, block.host_gradients)
        if block.parameters[0].dtype is not torch.float32:
            self._narrow(block, block.host)

    def _step(self, block: _Block, gradients: Tensor) -> None:
        assert block.optimizer is not None
        for master, gradient in zip(block.masters, block.views(gradients), strict=True):
            master.grad = gradient.float()  # the same tensor in fp32
        block.optimizer.step()
        for master in block.masters:
            master.grad = None

    def _narrow(self, block: _Block, flat: Tensor) -> None:
        for view, master in zip(block.views(flat), block.masters, strict=True):
            view.copy_(master.detach())

    # --- copies

    def prefetch(self, i: int, iteration: int) -> None:
        """Parameters from the host into a new place on the device."""
        block = self._blocks[i]
        assert block.host is not None
        block.device = torch.empty_like(block.host).copy_(block.host)
        block.bind()

    def refresh(self, i: int, iteration: int) -> None:
        """Updated parameters into the place that they have on the device."""
        block = self._blocks[i]
        assert block.host is not None
        assert block.device is not None
        block.device.copy_(block.host)

    def write_back(self, i: int, iteration: int) -> None:
        """Parameters from the device into the host's copy."""
        block = self._blocks[i]
        assert block.host is not None
        assert block.device is not None
        block.host.copy_(block.device)

    def offload_gradients(self, i: int, iteration: int) -> None:
        """Gradients to the host."""
        block = self._blocks[i]
        assert block.gradients is not None
        assert block.host_gradients is not None
        block.host_gradients.copy_(block.gradients)
        block.gradients = None

    def offload_activations(self, i: int, iteration: int) -> None:
        """What backward needs, to the host."""
        block = self._blocks[i]
        block.saved = [None if tensor is None else tensor.clone() for tensor in block.saved]

    def fetch_activations(self, i: int, iteration: int) -> None:
        """What backward needs, back to the device."""
        block = self._blocks[i]
        block.saved = [None if tensor is None else tensor.clone() for tensor in block.saved]
