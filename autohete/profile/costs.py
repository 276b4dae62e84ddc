"""The seconds and bytes of every unit of one workload on one hardware, computed or measured."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autohete.documents import as_json
from autohete.errors import InputError, check_fields
from autohete.hardware import Hardware, Link
from autohete.hashing import Hashed, hashed_once
from autohete.printable import shown
from autohete.profile.divided import part_of_rank
from autohete.quantities import format_bytes, format_seconds
from autohete.tabular import frame, html_table
from autohete.workload import BlockRole, Workload
from autohete.workload.optimizers import Optimizer, moment_bytes

if TYPE_CHECKING:
    from pandas import DataFrame

#: A year and a half. Thousands of such tasks in sequence still fit 64-bit nanoseconds.
LONGEST_TASK_SECONDS = 5e7
#: Bytes/s at which one thread gets new pages of 4 KiB from Linux (0.9e9 to 4.0e9): the kernel finds, maps and clears each at
#: its first write, before the copy goes on. The first of three writes of 1 GiB takes 0.50 s longer than the others, 2.1e9
#: (besthub.dev, "Why Is the First memset So Slow"); 1.01 us a page on a desktop i7 of the 11th generation, 4.0e9
#: (ddumbying.vercel.app, pagefault-latency); 0.9e9 to 1.2e9 on a busy virtual machine with Linux 6.18, one write a page. As of
#: 2026-11. Glibc returns blocks of more than 32 MiB to Linux when they are freed, so their pages are new each time.
FIRST_TOUCH_BANDWIDTH = 2e9

#: Among the results of a block: those of every second product with weights, and that of fused attention.
ALTERNATE = "alternate"


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Tensors that a forward saves for backward besides its input, and that share a route.

    Args:
        name: what a plan calls them.
        size_bytes: their size.
        seconds: GPU time to make them again from the input and the others. None: only a recomputation of the whole unit does.
        launch_seconds: time in which the host launches the kernels that do it, which is the least it takes.
        selective: selective recomputation makes them again.
    """

    name: str
    size_bytes: int
    seconds: float | None = None
    launch_seconds: float = 0.0
    selective: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.name.isprintable():
            raise InputError(f"name is {shown(self.name)}: give printable text")
        if self.selective and self.seconds is None:
            raise InputError(f"selective recomputation makes {self.name!r} again, but seconds does not say how long it takes")


@hashed_once
@dataclass(frozen=True, slots=True)
class UnitProfile(Hashed):
    """One unit, such as a transformer block: times in seconds on an undisturbed engine, sizes in bytes.

    Args:
        role: kind of unit.
        parameters: number of parameters it owns.
        forward_seconds, backward_seconds: GPU time of one pass.
        gpu_update_seconds: optimizer step of this block on the GPU.
        input_bytes: its input, which is all that stays when the block is checkpointed. The input's gradient has the same size.
        activation_bytes: activations that forward keeps for backward, including its input.
        forward_workspace_bytes, backward_workspace_bytes: temporaries of the pass, without what it receives, keeps and
            passes on.
        gpu_update_workspace_bytes: the same for the optimizer step on the GPU.
        measured_checkpointed_workspace_bytes: the same for a forward that keeps only the input, if measured.
        cpu_update_seconds: optimizer step on the CPU, if measured. None: derived from the plan's bytes per parameter.
        saved: what ``activation_bytes`` has besides the input, tensor by tensor. What is not listed shares the input's route.
        measured_selective_workspace_bytes: temporaries of a forward whose selected tensors are made again, and of the pass that
            does so, without its output, if measured.
        frozen_parameters: those of ``parameters`` that are not trained: they have no gradients, states or updates.
        frozen_bytes: size of these, if they are not in the format the GPU computes with (quantised).
        state_bytes: size of its optimizer states, with master weights. None: those of AdamW.
        largest_parameter: number of elements of its largest trained parameter. None: not known, taken as all of them.
        forward_host_seconds, backward_host_seconds: time that the host needs for a pass, of which it runs ahead of the GPU.
        modules: number of its modules that are called, each of which a system may hook.
        tensors: number of its parameter tensors, for each of which the hooks do more.
        small_tensors: those of them with fewer than 100,000 elements, which DeepSpeed's stage 3 does not release.
        is_whole: its update needs whole parameters, whatever the optimizer; otherwise the optimizer says so.
        shorter_recompute_seconds: GPU time of a recomputation that makes no output. None: it is a whole forward.
        routed_parameters: those of ``parameters`` that are of experts which are divided among GPUs (``Parallelism.expert``).
        cast_bytes: size of the 16-bit copies of its weights that a forward makes under autocast, which count among what it
            keeps. Autocast's cache holds them until the loss has been computed, whatever the unit keeps.
        results: what its products with weights give, each with the GPU time of its product. A plan may keep them for a
            recomputation, which then leaves these products out. Empty: not known.
    """

    role: BlockRole
    parameters: int
    forward_seconds: float
    backward_seconds: float
    gpu_update_seconds: float
    input_bytes: int
    activation_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    gpu_update_workspace_bytes: int = 0
    cpu_update_seconds: float | None = None
    measured_checkpointed_workspace_bytes: int | None = None
    saved: tuple[SavedTensors, ...] = ()
    measured_selective_workspace_bytes: tuple[int, int] | None = None
    frozen_parameters: int = 0
    frozen_bytes: int | None = None
    state_bytes: int | None = None
    shorter_recompute_seconds: float | None = None
    largest_parameter: int | None = None
    is_whole: bool = False
    forward_host_seconds: float = 0.0
    backward_host_seconds: float = 0.0
    modules: int = 0
    tensors: int = 0
    small_tensors: int = 0
    routed_parameters: int = 0
    cast_bytes: int = 0
    results: tuple[SavedTensors, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for task in ("forward", "backward", "gpu_update"):  # policies plan with these in whole nanoseconds
            if not (seconds := getattr(self, f"{task}_seconds")) < LONGEST_TASK_SECONDS:
                raise InputError(
                    f"{task.replace('_', ' ')} of a unit ({self.role}) would last {seconds:.3g} s: the workload is too large "
                    f"for this hardware, or a rate too low; a task may last {LONGEST_TASK_SECONDS:.0e} s"
                )
        if self.shorter_recompute_seconds is not None and self.shorter_recompute_seconds > self.forward_seconds:
            raise InputError(
                f"a recomputation takes {self.shorter_recompute_seconds} s, longer than a forward ({self.forward_seconds} s): "
                "give at most as much, or leave it out"
            )
        if not 0 <= self.cast_bytes <= self.kept_bytes:
            raise InputError(
                f"cast_bytes is {self.cast_bytes}, but a forward keeps only {self.kept_bytes} bytes besides its input, which "
                "include the copies of weights: give at most as many"
            )
        if not 0 <= self.small_tensors <= self.tensors:
            raise InputError(f"{self.small_tensors} of {self.tensors} tensors are small: give 0 up to all of them")
        if not 0 <= self.frozen_parameters <= self.parameters:
            raise InputError(f"{self.frozen_parameters} of {self.parameters} parameters are frozen: give 0 up to all of them")
        if sum(one.size_bytes for one in self.saved) > self.kept_bytes:
            raise InputError(
                f"the saved tensors have {sum(one.size_bytes for one in self.saved)} bytes together, but a forward keeps "
                f"{self.kept_bytes} besides its input: leave those out that it does not keep"
            )
        if len({one.name for one in self.saved}) < len(self.saved):
            raise InputError(f"saved tensors are called {[one.name for one in self.saved]}: give each a name of its own")

    @property
    def recompute_seconds(self) -> float:
        """GPU time of a recomputation whose output is not needed."""
        return self.forward_seconds if self.shorter_recompute_seconds is None else self.shorter_recompute_seconds

    @property
    def trained_parameters(self) -> int:
        """Parameters that are trained."""
        return self.parameters - self.frozen_parameters

    @property
    def added_elements(self) -> int:
        """Elements of the gradients that exist at a time while a backward adds each to its sum: those of one parameter."""
        whole = self.trained_parameters
        return whole if self.largest_parameter is None else min(self.largest_parameter, whole)

    @property
    def is_frozen(self) -> bool:
        """Whether none of its parameters is trained, though it has some."""
        return self.frozen_parameters == self.parameters > 0

    @property
    def kept_bytes(self) -> int:
        """Activations that forward keeps for backward, without its input."""
        return self.activation_bytes - self.input_bytes

    @property
    def checkpointed_workspace_bytes(self) -> int:
        """Temporaries of a forward that keeps only its input: at most what another forward would keep."""
        if self.measured_checkpointed_workspace_bytes is None:
            return self.forward_workspace_bytes + self.kept_bytes
        return self.measured_checkpointed_workspace_bytes

    @property
    def selected(self) -> tuple[str, ...]:
        """Names of the saved tensors that selective recomputation makes again."""
        return tuple([one.name for one in self.saved if one.selective])

    def bytes_of(self, names: Collection[str]) -> int:
        """Size of the saved tensors of these names."""
        return sum([one.size_bytes for one in self.saved if one.name in names])

    def again_seconds(self, names: Collection[str]) -> float:
        """GPU time to make the saved tensors of these names again."""
        made = [one for one in self.saved if one.name in names]
        return max(sum([one.seconds or 0.0 for one in made]), sum([one.launch_seconds for one in made]))

    def product_seconds(self, results: Collection[str]) -> float:
        """GPU time of the products whose results have these names."""
        return sum([one.seconds or 0.0 for one in self.results if one.name in results])

    def workspace_bytes_without(self, names: Collection[str]) -> tuple[int, int]:
        """Temporaries of a forward that does not keep the saved tensors of these names, and of the pass that makes them again:
        if not measured, at most as much as if everything is kept.
        """
        if self.measured_selective_workspace_bytes is not None and set(names) == set(self.selected):
            return self.measured_selective_workspace_bytes
        return self.forward_workspace_bytes + self.bytes_of(names), self.forward_workspace_bytes


def within(saved: tuple[SavedTensors, ...], kept: int) -> tuple[SavedTensors, ...]:
    """Reduce ``saved`` to what a forward keeps besides its input.

    A unit whose backward does not need its input, such as a frozen linear layer and its activation, keeps the input as soon as
    something is made again from it. So making it again frees that much less.
    """
    more, found = sum(one.size_bytes for one in saved) - kept, {}
    for one in sorted(saved, key=lambda one: (not one.selective, one.seconds is None)):
        less = min(max(more, 0), one.size_bytes)
        more -= less
        found[one.name] = replace(one, size_bytes=one.size_bytes - less)
    return tuple(found[one.name] for one in saved)


@dataclass(frozen=True, slots=True)
class LossProfile:
    """Cross-entropy between the head's forward and backward.

    Args:
        seconds: GPU time, including its own backward.
        logits_bytes: size of the logits, and of their gradient without ``wider_bytes``.
        workspace_bytes: temporaries of the loss.
        keeps_logits: the logits stay until backward has ended.
        in_place: the gradient is written in the place of the logits.
        wider_bytes: what the logits take more than their gradient, where the model returns them in fp32.
    """

    seconds: float
    logits_bytes: int
    workspace_bytes: int
    keeps_logits: bool = False
    in_place: bool = False
    wider_bytes: int = 0

    @property
    def passed_bytes(self) -> int:
        """Bytes of the gradient of the logits."""
        return self.logits_bytes - self.wider_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient of the logits, unless it is in their place."""
        return 0 if self.in_place else self.passed_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the loss: logits, their gradient and temporaries."""
        return self.logits_bytes + self.gradient_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class Profile:
    """Times and sizes of ``workload`` on ``hardware``.

    Copies and CPU updates are not per block: their time is ``latency + bytes / bandwidth`` of the hardware,
    because the bytes depend on the plan.
    """

    workload: Workload
    hardware: Hardware
    units: tuple[UnitProfile, ...]
    loss: LossProfile

    def __repr__(self) -> str:
        return f"<Profile: {len(self.units)} units of {self.workload.name} on {self.hardware.name}>"

    def _repr_html_(self) -> str:
        alike: dict[tuple[str, ...], int] = {}
        for unit in self.units:
            times = (format_seconds(unit.forward_seconds), format_seconds(unit.backward_seconds))
            row = (str(unit.role), f"{unit.parameters:,}", *times, format_bytes(unit.activation_bytes))
            alike[row] = alike.get(row, 0) + 1
        names = ("unit", "parameters", "forward", "backward", "activations")
        rows = ({**dict(zip(names, row, strict=True)), "count": count} for row, count in alike.items())
        return html_table(f"{self.workload.name} on {self.hardware.name}", rows)

    def to_dict(self) -> dict[str, Any]:
        """Return workload, hardware and units in SI units, as :func:`json.dumps` takes them."""
        return dict(as_json(self))

    def to_frame(self) -> DataFrame:
        """Return a frame of pandas with a row for each unit: times in seconds, sizes in bytes.

        Raises:
            InputError: pandas is not installed.
        """
        return frame(as_json(unit) for unit in self.units)

    @property
    def element_bytes(self) -> int:
        """Bytes per element of a parameter or gradient in the format the GPU computes with."""
        return self.workload.precision.element_bytes

    @property
    def of_rank(self) -> Workload:
        """What one GPU computes of the workload, whose units these are: all of it, or a part."""
        return part_of_rank(self.workload, self.hardware.parallelism)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of AdamW's states per parameter: two fp32 moments, and in mixed precision the master weight. Footprints of
        published systems give the bytes of AdamW; see :meth:`saved_bytes`.
        """
        return 12 if self.workload.precision.is_mixed else 8

    def state_bytes(self, unit: int, count: int | None = None) -> int:
        """Size of the optimizer states of ``count`` trained parameters of ``block``, with their masters. None: of all."""
        trained, known = self.units[unit].trained_parameters, self.units[unit].state_bytes
        count = trained if count is None else count
        if known is None:
            return count * self.optimizer_bytes
        return -(-count * known // trained) if trained else 0

    def saved_bytes(self, unit: int, count: int | None = None) -> int:
        """Bytes by which these states are smaller than AdamW's."""
        count = self.units[unit].trained_parameters if count is None else count
        return count * self.optimizer_bytes - self.state_bytes(unit, count)

    @property
    def cpu_updates(self) -> bool:
        """Whether the CPU can update: it has a kernel of the optimizer, or its updates have been measured."""
        return self._measured_on_cpu or self.workload.training.has_cpu_kernel

    def check_cpu_updates(self) -> None:
        """Check that the CPU can update.

        Raises:
            OptimizerError: it cannot.
        """
        if not self._measured_on_cpu:
            self.workload.training.check_cpu_kernel()

    @property
    def _measured_on_cpu(self) -> bool:
        return all(unit.is_frozen or unit.cpu_update_seconds is not None for unit in self.units)

    def updates_any_share(self, unit: int) -> bool:
        """Whether a part of a unit can be updated by itself."""
        return self.workload.training.updates_any_share and not self.units[unit].is_whole

    def parameter_bytes(self, unit: int) -> int:
        """Size of all parameters of ``block`` where the GPU computes with them."""
        return self.units[unit].trained_parameters * self.element_bytes + self.frozen_bytes(unit)

    def gradient_elements(self, unit: int) -> int:
        """Number of elements of the gradients that a backward of ``unit`` computes."""
        costs = self.units[unit]
        return costs.parameters if self._has_flat_gradient(unit) else costs.trained_parameters

    def added_elements(self, unit: int) -> int:
        """Elements of the gradients that exist at a time while a backward adds each to its sum: those of one tensor."""
        return self.gradient_elements(unit) if self._has_flat_gradient(unit) else self.units[unit].added_elements

    def _has_flat_gradient(self, unit: int) -> bool:
        lora = self.workload.training.lora
        return lora is not None and lora.base_gradients and not self.units[unit].is_frozen

    def frozen_bytes(self, unit: int) -> int:
        """Size of the frozen parameters of ``block``, in every memory."""
        costs = self.units[unit]
        return costs.frozen_parameters * self.element_bytes if costs.frozen_bytes is None else costs.frozen_bytes

    def with_micro_batches(self, count: int) -> Profile:
        """The same for an iteration of ``count`` micro-batches."""
        return replace(self, workload=replace(self.workload, micro_batches=count))

    @property
    def first_trained(self) -> int:
        """The first block that is not frozen. Blocks below it need no backward.

        Raises:
            InputError: all are frozen.
        """
        number = next((i for i, unit in enumerate(self.units) if not unit.is_frozen), None)
        if number is None:
            raise InputError("all parameters are frozen: there is nothing to train; let at least one block have trained ones")
        return number

    def h2d_seconds(self, size_bytes: float, *, pinned: bool = True) -> float:
        """Time to copy ``size_bytes`` to the GPU, alone on the link."""
        return _copy_seconds(self.hardware.h2d_copies, size_bytes, pinned)

    def d2h_seconds(self, size_bytes: float, *, pinned: bool = True, fresh: bool = False) -> float:
        """Time to copy ``size_bytes`` to the host, alone on the link; to ``fresh`` memory with its page faults."""
        seconds = _copy_seconds(self.hardware.d2h_copies, size_bytes, pinned)
        return seconds + size_bytes / FIRST_TOUCH_BANDWIDTH if fresh else seconds

    def place_seconds(self, name: str, size_bytes: float, *, write: bool) -> float:
        """Time to copy ``size_bytes`` from a place of the hardware, or to it, alone."""
        place = self.hardware.place(name)
        assert place is not None, "values rest in places that the hardware has"
        return place.latency_seconds + size_bytes / (place.write_bandwidth if write else place.read_bandwidth)

    def place_update_seconds(self, name: str, traffic_bytes: float) -> float:
        """Time of an update within a place of the hardware that reads and writes so many bytes there."""
        place = self.hardware.place(name)
        assert place is not None, "values rest in places that the hardware has"
        assert place.update_bandwidth is not None, "updates run in places that compute"
        return place.latency_seconds + traffic_bytes / place.update_bandwidth

    def part_of(self, unit: int) -> int:
        """Trained parameters of ``unit`` per GPU when all that have them share them equally."""
        costs, hardware = self.units[unit], self.hardware
        routed = costs.routed_parameters * hardware.parallelism.expert
        return hardware.part_of(costs.trained_parameters - costs.routed_parameters) + hardware.part_of(routed)

    def unit_collective_seconds(self, unit: int, size_bytes: float) -> float:
        """The same as :meth:`collective_seconds` for values of a unit, of which those of experts are exchanged apart, among the
        GPUs that have the same ones.
        """
        costs, expert = self.units[unit], self.hardware.parallelism.expert
        if not costs.routed_parameters:
            return self.collective_seconds(size_bytes)
        routed = size_bytes * costs.routed_parameters / costs.parameters
        return self.collective_seconds(size_bytes - routed) + self.collective_seconds(routed, self.hardware.gpus // expert)

    def collective_seconds(self, size_bytes: float, among: int | None = None) -> float:
        """Time of a ring all-gather to ``size_bytes`` on each GPU, or a reduce-scatter of that size; an all-reduce is both.

        Each of N GPUs passes on (N - 1) / N of the bytes in N - 1 steps. What leaves a node goes through the network (NCCL,
        ``src/graph/tuning.cc``, algorithm ring).

        Args:
            size_bytes: on each GPU.
            among: so many GPUs, spread over all nodes; None: all.
        """
        join, gpus = self.hardware.interconnect, among or self.hardware.gpus
        assert join is not None or gpus == 1, "several GPUs are joined"
        if join is None or gpus == 1:
            return 0.0
        nodes = self.hardware.gpus // self.hardware.gpus_of_node
        between, bandwidth = min(nodes, gpus) - 1, join.bandwidth
        if between and join.network_bandwidth is not None:
            bandwidth = min(bandwidth, join.network_bandwidth)
        steps = gpus - 1
        latency = (steps - between) * join.latency_seconds + between * join.network_latency_seconds
        return latency + size_bytes * steps / gpus / bandwidth

    def transfer_seconds(self, size_bytes: float, sender: int, receiver: int) -> float:
        """Time to send ``size_bytes`` from one GPU to another, by their ranks: through the network if they are on two nodes."""
        join = self.hardware.interconnect
        assert join is not None, "several GPUs are joined"
        if sender // join.gpus == receiver // join.gpus or join.network_bandwidth is None:
            return join.latency_seconds + size_bytes / join.bandwidth
        return join.network_latency_seconds + size_bytes / min(join.bandwidth, join.network_bandwidth)

    def cpu_update_seconds(self, unit: int, kernel_bytes: float, elementwise_bytes: float = 0.0) -> float:
        """Time of the optimizer step of ``unit`` on the CPU, as measured or from the DRAM traffic per parameter.

        Args:
            unit: counted from 0.
            kernel_bytes: traffic of the Adam kernel.
            elementwise_bytes: traffic of the elementwise kernels around it.
        """
        measured, cpu = self.units[unit].cpu_update_seconds, self.hardware.cpu
        if measured is not None:
            return measured
        optimizer = self.workload.training.optimizer
        if kernel_bytes:  # what a system's kernel reads and writes with AdamW's states
            kernel_bytes = max(kernel_bytes - 2 * (moment_bytes(Optimizer.ADAMW) - moment_bytes(optimizer)), 0.0)
        seconds = kernel_bytes / cpu.update_bandwidth + elementwise_bytes / (cpu.elementwise_bandwidth or cpu.update_bandwidth)
        return self.units[unit].trained_parameters * seconds

    def gpu_memory_seconds(self, traffic_bytes: float) -> float:
        """Time of a GPU kernel that is bound by ``traffic_bytes`` of memory traffic."""
        gpu = self.hardware.gpu
        return traffic_bytes / (gpu.memory_bandwidth * gpu.memory_efficiency) + gpu.kernel_overhead_seconds

    def elementwise_seconds(self, traffic_bytes: float) -> float:
        """Time of an elementwise CPU kernel with ``traffic_bytes`` of DRAM traffic."""
        cpu = self.hardware.cpu
        return traffic_bytes / (cpu.elementwise_bandwidth or cpu.update_bandwidth)


def _copy_seconds(link: Link, size_bytes: float, pinned: bool) -> float:
    bandwidth = link.bandwidth if pinned else link.pageable_bandwidth or link.bandwidth
    return link.latency_seconds + size_bytes / bandwidth
