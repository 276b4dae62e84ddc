"""One node's capacities and rates, in plain SI numbers, as the model uses them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from autohete.documents import as_json
from autohete.errors import InputError
from autohete.hardware.parallelism import ALONE, Parallelism
from autohete.quantities import format_bytes, rounded_when_pinned
from autohete.tabular import facts_html

#: Rates that differ by less are equal: measured ones are written with six digits.
_ROUNDING = 1 + 1e-5
#: The form of the name of a place, and names that other memories have: ``rank3`` is that of a rank, as others see it.
_PLACE_NAME = re.compile(r"(?!rank\d+$)[a-z][a-z0-9_]{0,30}")
_TAKEN_NAMES = ("gpu", "host", "pinned")
#: How GPUs are joined that have nothing better.
OVER_PCIE = "over PCIe without peer-to-peer"


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
        kernel_overhead_seconds: time from the start of a short kernel to that of the next in a full stream, without its work.
        gemm_efficiency_32bit: share of the 32-bit peak that a large matrix product reaches; None: same as in 16 bit.
        peak_8bit_flops: dense peak of 8-bit floating point; None: it has none, or it is not known.
        multiprocessors: number of them, for the efficiency of small matrix products; None: as efficient as large ones.
        compute_capability: of CUDA, such as 8.9, which decides what attention runs and how fast; None: as an A100.
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
    peak_8bit_flops: float | None = None
    compute_capability: float | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between host and GPU.

    Args:
        bandwidth: bytes/s for pinned memory while the other direction is idle.
        duplex_bandwidth: bytes/s per direction while both are in use.
        latency_seconds: fixed cost of one copy.
        pageable_bandwidth: bytes/s for pageable memory; None: same as for pinned memory.
        all_gpus_bandwidth: bytes/s of each GPU while all GPUs of the node copy in this direction; None: same as alone.
        all_gpus_duplex_bandwidth: the same while all copy in both directions; None: same as alone.
        far: the memory belongs to another domain of the node.
    """

    bandwidth: float
    duplex_bandwidth: float
    latency_seconds: float
    pageable_bandwidth: float | None = None
    all_gpus_bandwidth: float | None = None
    all_gpus_duplex_bandwidth: float | None = None
    far: bool = False

    def within(self, limit: float) -> Link:
        """Return the link of a host whose memory is read and written at ``limit`` bytes/s."""
        if self.bandwidth <= limit:
            return self
        pageable = None if self.pageable_bandwidth is None else min(limit, self.pageable_bandwidth)
        return replace(self, bandwidth=limit, duplex_bandwidth=min(limit, self.duplex_bandwidth), pageable_bandwidth=pageable)

    def shared_by(self, here: int, gpus: int) -> Link:
        """Return the link of each of ``here`` GPUs that copy at the same time, in a node of ``gpus``.

        The rate of all GPUs together is the limit of shared parts such as PCIe switches and sockets. Fewer GPUs share it
        equally, and none is faster than alone.
        """

        def share(alone: float, all_gpus: float | None) -> float:
            return alone if all_gpus is None else min(alone, all_gpus * gpus / here)

        bandwidth = share(self.bandwidth, self.all_gpus_bandwidth)
        return replace(
            self,
            bandwidth=bandwidth,
            duplex_bandwidth=min(bandwidth, share(self.duplex_bandwidth, self.all_gpus_duplex_bandwidth)),
            pageable_bandwidth=None if self.pageable_bandwidth is None else min(bandwidth, self.pageable_bandwidth),
        )


@dataclass(frozen=True, slots=True)
class Host:
    """Host memory. If the node has several memory domains (sockets), this is the one that the GPU uses.

    Args:
        memory_bytes: its capacity.
        memory_bandwidth: datasheet, bytes/s.
        usable_share: share of it that CPU and DMA together reach.
        pinned_bytes: limit of page-locked memory; None: all of its capacity.
        memory_domains: number of equal domains of the node, each with its own DRAM; its GPUs are spread over them.
        rounds_pinned: pinned arrays take a power of two, as with PyTorch's ``CachingHostAllocator``; otherwise what they hold.
    """

    memory_bytes: int
    memory_bandwidth: float
    usable_share: float
    pinned_bytes: int | None = None
    memory_domains: int = 1
    rounds_pinned: bool = True

    def pinned(self, size_bytes: int) -> int:
        """Return what an array of ``size_bytes`` that is pinned by itself takes."""
        return rounded_when_pinned(size_bytes) if self.rounds_pinned else size_bytes

    @property
    def usable_bandwidth(self) -> float:
        """Bandwidth of CPU work and copies together, bytes/s."""
        return self.memory_bandwidth * self.usable_share

    def shared_by(self, gpus: int) -> Host:
        """Return the part of each of ``gpus`` GPUs of the node, which are spread over its memory domains."""
        of_domain = -(-gpus // self.memory_domains)
        return replace(
            self,
            memory_bytes=self.memory_bytes // of_domain,
            memory_bandwidth=self.memory_bandwidth / of_domain,
            pinned_bytes=None if self.pinned_bytes is None else self.pinned_bytes // of_domain,
        )


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPUs of the host.

    Args:
        cores: physical cores.
        update_bandwidth: DRAM traffic (bytes/s) that one process reaches with the Adam kernel on all cores.
        elementwise_bandwidth: DRAM traffic of PyTorch's elementwise kernels (unscaling, casts); None: same as Adam.
        concurrent_share: share of these rates that the CPU reaches while the GPU computes.
        launch_seconds: time of one small operation of a framework on one core, such as adding two tensors whose gradient is
            recorded, with the launch of its kernel. No pass is faster than the operations that the host does for it.
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


def node_text(name: str, gpus: int, parallelism: str = "") -> str:
    """Return a hardware's name, with the number of GPUs if there are several, and how they divide a batch."""
    return name if gpus == 1 else f"{gpus} GPUs of {name}" + (f" ({parallelism})" if parallelism else "")


def check_place_name(name: str) -> None:
    """Check the name of a place.

    Raises:
        InputError: names the form, and the names that are taken.
    """
    if name in _TAKEN_NAMES or not _PLACE_NAME.fullmatch(name):
        raise InputError(
            f"{name!r} cannot name a place: give up to 31 lower-case letters, digits and underscores, beginning with a letter, "
            f"but not {', '.join(_TAKEN_NAMES)}, or rank and a number"
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Memory besides the GPU's and the host's in which values can rest: drives, CXL memory, the memory of another GPU.

    Args:
        name: such as ``nvme``; also the name of its memory in schedules.
        capacity_bytes: its capacity.
        read_bandwidth, write_bandwidth: bytes/s of large sequential copies from it and to it.
        latency_seconds: fixed cost of one copy.
        both_bandwidth: bytes/s of reads and writes together while both run; None: it reads and writes in turns.
        beside: the memory with which it exchanges data, ``host`` or ``gpu``. What rests beside the host reaches the GPU through
            pinned host memory; what rests beside the GPU, such as on drives with direct access, does not cross the host.
        update_bandwidth: bytes/s that an update within it reads and writes, if it has a processor for that, such as drives
            with an FPGA have. They cross no link. None: it does not compute.
    """

    name: str
    capacity_bytes: int
    read_bandwidth: float
    write_bandwidth: float
    latency_seconds: float
    both_bandwidth: float | None = None
    beside: str = "host"
    update_bandwidth: float | None = None

    def __post_init__(self) -> None:
        check_place_name(self.name)
        if self.beside not in ("host", "gpu"):
            raise InputError(f"{self.name}: beside is {self.beside!r}: give 'host' or 'gpu'")

    def within(self, limit: float) -> Place:
        """Return the place of a host whose memory is read and written at ``limit`` bytes/s."""
        if self.beside == "gpu" or max(self.read_bandwidth, self.write_bandwidth) <= limit:
            return self
        return replace(self, read_bandwidth=min(limit, self.read_bandwidth), write_bandwidth=min(limit, self.write_bandwidth))

    def shared_by(self, gpus: int) -> Place:
        """Return the part of each of ``gpus`` GPUs of the node. Each has its own place beside it."""
        if self.beside == "gpu":
            return self
        return replace(
            self,
            capacity_bytes=self.capacity_bytes // gpus,
            read_bandwidth=self.read_bandwidth / gpus,
            write_bandwidth=self.write_bandwidth / gpus,
            both_bandwidth=None if self.both_bandwidth is None else self.both_bandwidth / gpus,
            update_bandwidth=None if self.update_bandwidth is None else self.update_bandwidth / gpus,
        )


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The interconnect between GPUs.

    Args:
        gpus: number of GPUs in one node.
        bandwidth: bytes/s that each GPU of a ring within the node sends: the "bus bandwidth" of nccl-tests.
        latency_seconds: fixed cost of one step of the ring.
        network_bandwidth: bytes/s that a node sends to the next; None if there is only one node.
        network_latency_seconds: fixed cost of one step from node to node.
        concurrent_share: share of its speed that the GPU keeps while it takes part in a collective. NCCL's kernels occupy
            multiprocessors and memory bandwidth; copy engines would not.
        through_host: GPUs of a node do not copy to each other: the sender writes to host memory, and the receiver reads it, so
            that collectives share links and DRAM with copies.
        assumed: the bandwidth is the default over PCIe, not a figure of the hardware.
    """

    gpus: int
    bandwidth: float
    latency_seconds: float
    network_bandwidth: float | None = None
    network_latency_seconds: float = 0.0
    concurrent_share: float = 1.0
    through_host: bool = False
    assumed: bool = False

    def within(self, host: Host) -> Interconnect:
        """Return the interconnect if each GPU has the part ``host`` of the host.

        What goes through host memory is written and read there, by each GPU as much as it sends.
        """
        limit = host.usable_bandwidth / 2
        return replace(self, bandwidth=limit) if self.through_host and self.bandwidth > limit else self

    def of_groups(self, size: int) -> Interconnect:
        """Return the interconnect as each GPU of a group of ``size`` has it for what it exchanges with other groups: as many
        rings as a group has GPUs share the network.
        """
        network = None if self.network_bandwidth is None else self.network_bandwidth / size
        return self if size == 1 else replace(self, gpus=max(self.gpus // size, 1), network_bandwidth=network)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU and its host, in SI units. Created by :func:`load_hardware`.

    ``shared_cores`` is None for a real GPU. If the CPU stands in for the device, it is the number of lanes that the cores can
    run at full speed at once; with hyper-threading this is less than the number of cores. ``notes`` name the figures that were
    changed, and why. ``places`` are its other memories, such as drives. ``gpus`` is the number of GPUs that train together, or
    of groups of GPUs that divide the tensors of each batch (``parallelism``); if there are several, links, host, CPU, places
    and network are one GPU's share (:meth:`shared_by`).

    ``unified`` hardware has one pool of memory for CPU and GPU, ``gpu.memory``. Nothing is copied: host memory has no capacity,
    and ``h2d`` and ``d2h`` have the rate of the pool, so that a cost model can use them.
    """

    name: str
    gpu: Gpu
    h2d: Link
    d2h: Link
    host: Host
    cpu: Cpu
    shared_cores: float | None = None
    notes: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    interconnect: Interconnect | None = None
    gpus: int = 1
    unified: bool = False
    parallelism: Parallelism = ALONE

    def __repr__(self) -> str:
        return f"<Hardware {self.name}: {', '.join(f'{value} {name}' for name, value in self._memories().items())}>"

    def _repr_html_(self) -> str:
        return facts_html(self.name, self._memories())

    def _memories(self) -> dict[str, str]:
        """The GPUs and all memories, in words."""
        sizes = {"GPU": self.gpu.memory_bytes, "host": self.host.memory_bytes}
        sizes |= {place.name: place.capacity_bytes for place in self.places}
        texts = {f"{name} memory": format_bytes(size) for name, size in sizes.items() if size}
        return {"GPUs": str(self.all_gpus)} | texts if self.all_gpus > 1 else texts

    def to_dict(self) -> dict[str, Any]:
        """Return all figures in SI units, as :func:`json.dumps` takes them."""
        return dict(as_json(self))

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and those rates of links and updates that host memory limits."""
        return (*self.notes, *([] if self.unified else _beyond_dram(self)))

    @property
    def dram_bandwidth(self) -> float:
        """What copies and the CPU's work take of host memory together, bytes/s."""
        return max(self.host.usable_bandwidth, self.cpu.update_bandwidth)

    @property
    def h2d_copies(self) -> Link:
        """``h2d`` as copies have it: a link is no faster than the memory that it reads."""
        return self.h2d.within(self.dram_bandwidth)

    @property
    def d2h_copies(self) -> Link:
        """``d2h`` as copies have it: a link is no faster than the memory that it writes."""
        return self.d2h.within(self.dram_bandwidth)

    @property
    def gpu_capacity_bytes(self) -> int:
        """GPU memory available to tensors."""
        return self.gpu.memory_bytes - self.gpu.reserved_bytes

    @property
    def title(self) -> str:
        """Its name, with the number of GPUs if there are several, and how they divide a batch."""
        return node_text(self.name, self.all_gpus, str(self.parallelism))

    @property
    def all_gpus(self) -> int:
        """Number of all GPUs that train together."""
        return self.gpus * self.parallelism.tensor

    @property
    def batches(self) -> int:
        """Number of batches that train at a time if each GPU, or each group that divides one, has its own."""
        return self.gpus // self.parallelism.context

    @property
    def gpus_of_node(self) -> int:
        """Number of those in ``gpus`` that share one host."""
        return min(self.gpus, self.interconnect.gpus) if self.interconnect else 1

    @property
    def all_gpus_of_node(self) -> int:
        """Number of all GPUs that share one host."""
        return self.gpus_of_node * self.parallelism.tensor

    @property
    def kept_beside_collectives(self) -> float:
        """Share of its speed that the GPU keeps while it takes part in a collective."""
        return 1.0 if self.gpus == 1 or self.interconnect is None else self.interconnect.concurrent_share

    @property
    def collectives_through_host(self) -> float:
        """Bytes/s that a collective writes to host memory and reads there; 0 if it does not use it."""
        join = self.interconnect
        if self.gpus == 1 or join is None or not join.through_host:
            return 0.0
        network = join.network_bandwidth if self.gpus > join.gpus else None
        return 2 * min(join.bandwidth, network or join.bandwidth)

    @property
    def cpu_lost_beside_gpu(self) -> float:
        """The least CPU time, in seconds, that each second of undisturbed GPU work takes from the CPU's work."""
        kept = self.kept_beside_collectives
        return 0.0 if self.shared_cores is not None else max(0.0, kept - self.cpu.concurrent_share) / kept

    @property
    def beside_gpu(self) -> tuple[str, ...]:
        """The names of the places that exchange data with the GPU; the others do with the host."""
        return tuple(place.name for place in self.places if place.beside == "gpu")

    def place(self, name: str) -> Place | None:
        """Return the place of that name; None if there is none. What is beside the host is no faster than host memory."""
        return next((place.within(self.dram_bandwidth) for place in self.places if place.name == name), None)

    def part_of(self, count: int) -> int:
        """Return the number of elements per GPU when all GPUs share ``count`` elements."""
        return -(-count // self.gpus)

    def shared_by(self, gpus: int, parallelism: Parallelism = ALONE) -> Hardware:
        """Return one GPU's share when ``gpus`` GPUs do the same work: its own links, and an equal part of the host.

        Args:
            gpus: all that train together.
            parallelism: how they divide each batch. Those that divide its tensors are neighbours in a node.

        Raises:
            InputError: the hardware does not have that many GPUs, or does not describe their interconnect.
        """
        if gpus < 1:
            raise InputError(f"gpus is {gpus}: give at least 1")
        if self.all_gpus != 1:
            whole = f"{self.name} is one GPU's share of {self.all_gpus} already"
            raise InputError(f"{whole}: share the whole node by {gpus} instead")
        ranks, tensor = parallelism.ranks(gpus), parallelism.tensor
        if gpus == 1:
            return self
        if self.shared_cores is not None:
            raise InputError(f"{self.name} is emulated on a CPU, which stands in for one GPU: give gpus=1, not {gpus}")
        join = self.interconnect
        if join is None:
            raise InputError(
                f"{self.name} does not describe how its GPUs are connected, and its links are not PCIe: for {gpus} of them "
                "give hardware with a table [interconnect]"
            )
        here = min(gpus, join.gpus)
        if gpus % here:
            raise InputError(f"{gpus} GPUs do not fill nodes of {join.gpus}: give up to {join.gpus}, or a multiple of it")
        if gpus > here and join.network_bandwidth is None:
            raise InputError(
                f"{self.name} does not describe how its nodes are connected: give up to {join.gpus} GPUs, or hardware with "
                "interconnect.network_bandwidth"
            )
        if here % tensor:
            raise InputError(
                f"{tensor} GPUs that divide tensors share a node, but {self.name} has {here} in each: give a divisor of {here}"
            )
        cpu = self.cpu
        together, elementwise = cpu.ranks_update_bandwidth, None
        if together is None:
            together, elementwise = cpu.update_bandwidth, cpu.elementwise_bandwidth
        notes, dram = list(self.notes), self.host.memory_bandwidth * self.host.memory_domains
        together = within_dram("ranks_update_bandwidth", together, dram, "host.memory_bandwidth", notes)
        host = self.host.shared_by(here)
        shared = join.within(host)
        return replace(
            self,
            notes=(*notes, *_join_notes(join, shared, gpus)),
            interconnect=shared.of_groups(tensor),
            h2d=self.h2d.shared_by(here, join.gpus),
            d2h=self.d2h.shared_by(here, join.gpus),
            host=host,
            cpu=replace(
                cpu,
                cores=max(cpu.cores // here, 1),
                update_bandwidth=together / here,
                elementwise_bandwidth=None if elementwise is None else elementwise / here,
            ),
            places=tuple(place.shared_by(here) for place in self.places),
            gpus=ranks,
            parallelism=parallelism,
        )


def within_dram(name: str, rate: float, dram: float, figure: str, notes: list[str]) -> float:
    """Return the rate of a CPU kernel, limited to the DRAM's, which is ``figure``; add a note if the limit applies."""
    if rate <= dram * (1 + 1e-9):
        return rate
    notes.append(f"cpu.{name} {rate / 1e9:g} GB/s is more than the DRAM allows; using {dram / 1e9:g} GB/s, which is {figure}")
    return dram


def _join_notes(join: Interconnect, shared: Interconnect, gpus: int) -> list[str]:
    """Describe an interconnect that is assumed, or slower than its figure."""
    rate, dram = f"{shared.bandwidth / 1e9:.3g} GB/s", ""
    if shared.bandwidth < join.bandwidth:
        dram = f", not {join.bandwidth / 1e9:.3g}, because DRAM writes and reads each byte"
    if join.assumed:
        return [f"{gpus} GPUs {OVER_PCIE}: {rate}{dram}, an assumption (interconnect.bandwidth); each has the link of one"]
    return [f"{gpus} GPUs through host memory: {rate}{dram}"] if dram else []


def _beyond_dram(hardware: Hardware) -> list[str]:
    """Describe the rates that exceed what the DRAM gives, which the simulation shares among copies and updates."""
    h2d, d2h, update = hardware.h2d, hardware.d2h, hardware.cpu.update_bandwidth
    usable = hardware.host.usable_bandwidth
    allowed = f"the {usable / 1e9:.3g} GB/s of DRAM (host.memory_bandwidth x host.usable_share"
    allowed += f", the part of one of {hardware.all_gpus_of_node} GPUs)" if hardware.all_gpus_of_node > 1 else ")"
    remarks = []
    if update > usable * _ROUNDING:
        remarks.append(f"updates by a process per GPU, {update / 1e9:.3g} GB/s, exceed {allowed}, so DRAM counts as that fast")
    limit = hardware.dram_bandwidth
    rates = {"h2d": h2d.bandwidth, "d2h": d2h.bandwidth, "both at once": h2d.duplex_bandwidth + d2h.duplex_bandwidth}
    for place in hardware.places:
        if place.beside == "host":
            rates |= {f"reads of {place.name}": place.read_bandwidth, f"writes of {place.name}": place.write_bandwidth}
    above = [f"{name} {rate / 1e9:.3g}" for name, rate in rates.items() if rate > limit * _ROUNDING]
    if above:
        remarks.append(f"copies ({', '.join(above)} GB/s) exceed {allowed}: all together run at {limit / 1e9:.3g} GB/s at most")
    return remarks
