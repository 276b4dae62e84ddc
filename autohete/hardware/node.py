"""One node's capacities and rates, in plain SI numbers, as the model uses them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autohete.errors import InputError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Args:
        memory_bytes: total memory as reported by CUDA.
        reserved_bytes: memory that tensors cannot use: context, library workspaces, allocator rounding.
        peak_16bit_flops, peak_32bit_flops: dense peak, FLOP/s.
        memory_bandwidth: bytes/s, from the datasheet.
        memory_efficiency: share of the memory bandwidth that elementwise kernels reach.
        gemm_efficiency: share of the 16-bit peak that a large matrix product reaches.
        kernel_overhead_seconds: time between two short kernels in a full stream.
        gemm_efficiency_32bit: share of the 32-bit peak that a large matrix product reaches; None: same as in 16 bit.
        multiprocessors: number of them, for the efficiency of small matrix products; None: as efficient as large ones.
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
        bandwidth: bytes/s for pinned memory while the other direction is idle.
        duplex_bandwidth: bytes/s per direction while both are in use.
        latency_seconds: fixed cost of one copy.
        pageable_bandwidth: bytes/s for pageable memory; None: same as for pinned memory.
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
        usable_share: share of it that CPU and DMA together reach.
        pinned_bytes: limit of page-locked memory; None: all of its capacity.
    """

    memory_bytes: int
    memory_bandwidth: float
    usable_share: float
    pinned_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPUs of the host.

    Args:
        cores: physical cores.
        update_bandwidth: DRAM traffic (bytes/s) that one process reaches with the Adam kernel on all cores.
        elementwise_bandwidth: DRAM traffic of PyTorch's elementwise kernels (unscaling, casts); None: same as Adam.
        concurrent_share: share of these rates that block-by-block updates reach while the GPU trains.
        launch_seconds: time for the host to launch one kernel; no pass is faster than the launches of its kernels.
        ranks_update_bandwidth: total DRAM traffic of updates with one process per GPU, each bound to its cores, including
            elementwise kernels; None: same as one process on all cores. Not limited by ``Host.usable_share``, which is
            observed with a single process.
    """

    cores: int
    update_bandwidth: float
    elementwise_bandwidth: float | None = None
    concurrent_share: float = 1.0
    launch_seconds: float = 0.0
    ranks_update_bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class Nvme:
    """All drives of the host, taken as one.

    Args:
        capacity_bytes: total capacity.
        read_bandwidth, write_bandwidth: bytes/s of large sequential accesses.
        latency_seconds: fixed cost of one access.
    """

    capacity_bytes: int
    read_bandwidth: float
    write_bandwidth: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The interconnect between GPUs.

    Args:
        gpus: number of GPUs in one node.
        bandwidth: bytes/s that each GPU of a ring within the node sends: the "bus bandwidth" of nccl-tests.
        latency_seconds: fixed cost of one step of the ring.
        network_bandwidth: bytes/s that a node sends to the next; None if there is only one node.
        network_latency_seconds: fixed cost of one step from node to node.
    """

    gpus: int
    bandwidth: float
    latency_seconds: float
    network_bandwidth: float | None = None
    network_latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU and its host, in SI units. Created by :func:`load_hardware`.

    ``shared_cores`` is None for a real GPU. If the CPU stands in for the device, it is the number of lanes that the cores can
    run at full speed at once; with hyper-threading this is less than the number of cores. ``notes`` name the figures that were
    changed, and why. ``nvme`` is None if there are no drives. ``gpus`` is the number of GPUs that train together; if there are
    several, host, CPU and NVMe are one GPU's share (:meth:`shared_by`).
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
        """GPU memory available to tensors."""
        return self.gpu.memory_bytes - self.gpu.reserved_bytes

    @property
    def gpus_of_node(self) -> int:
        """Number of the GPUs training together that share one host."""
        return min(self.gpus, self.interconnect.gpus) if self.interconnect else 1

    def part_of(self, count: int) -> int:
        """Return the number of elements per GPU when all GPUs share ``count`` elements."""
        return -(-count // self.gpus)

    def shared_by(self, gpus: int) -> Hardware:
        """Return one GPU's share when ``gpus`` GPUs do the same work: its own links, and an equal part of the host.

        Raises:
            InputError: the hardware does not have that many GPUs, or does not describe their interconnect.
        """
        if gpus < 1 or self.gpus != 1:
            raise InputError(f"{self.name} with {self.gpus} GPUs cannot be shared by {gpus}: share one by 1 or more")
        if gpus == 1:
            return self
        if self.shared_cores is not None:
            raise InputError(f"{self.name} is emulated on a CPU, which stands in for one GPU: leave out --gpus")
        join = self.interconnect
        if join is None:
            raise InputError(
                f"{self.name} does not describe how its GPUs are connected: for {gpus} of them give hardware with a table "
                "[interconnect]"
            )
        here = min(gpus, join.gpus)
        if gpus % here:
            raise InputError(f"{gpus} GPUs do not fill nodes of {join.gpus}: give up to {join.gpus}, or a multiple of it")
        if gpus > here and join.network_bandwidth is None:
            raise InputError(
                f"{self.name} does not describe how its nodes are connected: give up to {join.gpus} GPUs, or hardware with "
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
