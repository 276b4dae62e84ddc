"""One node's capacities and rates, in plain SI numbers: what the model computes with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autohete.errors import InputError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Args:
        memory_bytes: what CUDA reports as total.
        reserved_bytes: what no tensor can have: context, library workspaces, allocator rounding.
        peak_16bit_flops, peak_32bit_flops: dense peak, FLOP/s.
        memory_bandwidth: datasheet, bytes/s.
        memory_efficiency: share of it that elementwise kernels reach.
        gemm_efficiency: share of the 16-bit peak that a large matrix product reaches.
        kernel_overhead_seconds: time between two short kernels in a full stream.
        gemm_efficiency_32bit: share of the 32-bit peak that a large matrix product reaches; None: as in 16 bit.
        multiprocessors: their number, for the efficiency of small matrix products; None: these are as efficient as large ones.
    """

    memory_bytes: int
    reserved_bytes: int
    peak_16bit_flops: float
    peak_32bit_flops: float
    memory_bandwidth: float
    memory_efficiency: float
    gemm_efficiency: float
    kernel_overhead_seconds: float
    gemm_efficiency_32bit: float | None = None
    multiprocessors: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between host and GPU.

    Args:
        bandwidth: bytes/s of pinned memory while the other direction is silent.
        duplex_bandwidth: bytes/s while the other direction runs too.
        latency_seconds: fixed cost of one copy.
        pageable_bandwidth: bytes/s of pageable memory; None: as of pinned memory.
    """

    bandwidth: float
    duplex_bandwidth: float
    latency_seconds: float
    pageable_bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """Host memory.

    Args:
        memory_bytes: its capacity.
        memory_bandwidth: datasheet, bytes/s.
        usable_share: share of it that CPU and DMA reach together.
        pinned_bytes: what of its capacity may be page-locked; None: all.
    """

    memory_bytes: int
    memory_bandwidth: float
    usable_share: float
    pinned_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processors.

    Args:
        cores: physical cores.
        update_bandwidth: DRAM traffic (bytes/s) that the Adam kernel of one process over all cores reaches.
        elementwise_bandwidth: DRAM traffic of PyTorch's elementwise kernels (unscaling, casts); None: as of Adam.
        concurrent_share: share of these rates that updates reach block by block while the GPU trains.
        launch_seconds: time that the host needs to launch one kernel; no pass is faster than the launch of its kernels.
        ranks_update_bandwidth: DRAM traffic that the updates of one process per GPU, each bound to its cores, reach together,
            elementwise kernels included; None: what one process over all cores reaches. ``Host.usable_share``, which a single
            process shows, does not limit it.
    """

    cores: int
    update_bandwidth: float
    elementwise_bandwidth: float | None = None
    concurrent_share: float = 1.0
    launch_seconds: float = 0.0
    ranks_update_bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class Nvme:
    """Drives on the host, as one.

    Args:
        capacity_bytes: what they hold.
        read_bandwidth, write_bandwidth: bytes/s of large sequential accesses.
        latency_seconds: fixed cost of one access.
    """

    capacity_bytes: int
    read_bandwidth: float
    write_bandwidth: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What joins GPUs.

    Args:
        gpus: of one node.
        bandwidth: bytes/s that each GPU of a ring in the node passes on: the "bus bandwidth" of nccl-tests.
        latency_seconds: fixed cost of a step of the ring.
        network_bandwidth: bytes/s that a node sends to the next; None: there is only one node.
        network_latency_seconds: fixed cost of a step from node to node.
    """

    gpus: int
    bandwidth: float
    latency_seconds: float
    network_bandwidth: float | None = None
    network_latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU and the host behind it, in SI units. Made by :func:`load_hardware`.

    ``shared_cores`` is None for a real GPU. Where the CPU stands for the device, all lanes together get as much done as so many
    of them alone: less than the number of cores where two of these are threads of one. ``notes`` name the figures that were
    changed, and why. ``nvme`` is None where there are no drives to use. ``gpus`` train together; where they are several, host,
    CPU and NVMe are what one of them has of those (:meth:`shared_by`).
    """

    name: str
    gpu: Gpu
    h2d: Link
    d2h: Link
    host: Host
    cpu: Cpu
    shared_cores: float | None = None
    notes: tuple[str, ...] = ()
    nvme: Nvme | None = None
    interconnect: Interconnect | None = None
    gpus: int = 1

    @property
    def gpu_capacity_bytes(self) -> int:
        """GPU memory that tensors can have."""
        return self.gpu.memory_bytes - self.gpu.reserved_bytes

    @property
    def gpus_of_node(self) -> int:
        """How many of the GPUs that train together share a host."""
        return min(self.gpus, self.interconnect.gpus) if self.interconnect else 1

    def part_of(self, count: int) -> int:
        """Elements that each GPU has when all that train together share so many."""
        return -(-count // self.gpus)

    def shared_by(self, gpus: int) -> Hardware:
        """What one of ``gpus`` GPUs has of it while all do the same: its own links, and an equal part of its host.

        Raises:
            InputError: it has no such GPUs, or does not say what joins them.
        """
        if gpus < 1 or self.gpus != 1:
            raise InputError(f"{self.name} with {self.gpus} GPUs cannot be shared by {gpus}: share one by 1 or more")
        if gpus == 1:
            return self
        if self.shared_cores is not None:
            raise InputError(f"{self.name} is emulated on a CPU, which stands for one GPU: leave out --gpus")
        join = self.interconnect
        if join is None:
            raise InputError(
                f"{self.name} does not say what joins its GPUs: for {gpus} of them give hardware with a table [interconnect]"
            )
        here = min(gpus, join.gpus)
        if gpus % here:
            raise InputError(f"{gpus} GPUs do not fill nodes of {join.gpus}: give up to {join.gpus}, or a multiple of it")
        if gpus > here and join.network_bandwidth is None:
            raise InputError(
                f"{self.name} does not say what joins its nodes: give up to {join.gpus} GPUs, or hardware with "
                "interconnect.network_bandwidth"
            )
        cpu, host, nvme = self.cpu, self.host, self.nvme
        together, elementwise = cpu.ranks_update_bandwidth, None
        if together is None:
            together, elementwise = cpu.update_bandwidth, cpu.elementwise_bandwidth
        return replace(
            self,
            host=replace(
                host,
                memory_bytes=host.memory_bytes // here,
                memory_bandwidth=host.memory_bandwidth / here,
                pinned_bytes=None if host.pinned_bytes is None else host.pinned_bytes // here,
            ),
            cpu=replace(
                cpu,
                cores=max(cpu.cores // here, 1),
                update_bandwidth=together / here,
                elementwise_bandwidth=None if elementwise is None else elementwise / here,
            ),
            nvme=nvme
            and replace(
                nvme,
                capacity_bytes=nvme.capacity_bytes // here,
                read_bandwidth=nvme.read_bandwidth / here,
                write_bandwidth=nvme.write_bandwidth / here,
            ),
            gpus=gpus,
        )
