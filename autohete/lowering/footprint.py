"""What is permanently allocated (resident parameters and states, slots, buffers), and the bandwidth that lanes share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from autohete.hardware import Hardware, Place
from autohete.lowering.copies import lane_between
from autohete.lowering.shards import Shards
from autohete.plan import Footprint, Plan, Processor
from autohete.plan.moves import rests
from autohete.profile import Profile
from autohete.schedule import (
    COLLECTIVE,
    CPU,
    CPU_BESIDE_GPU,
    D2H,
    GPU,
    GPU_MEMORY,
    H2D,
    HOST_MEMORY,
    LINK,
    MULTIPROCESSORS,
    PINNED_MEMORY,
    Buffer,
    BufferId,
    Flow,
    Kind,
    Lane,
    SharedResource,
    Value,
)


def slot_bytes(profile: Profile, plan: Plan, shards: Shards) -> int:
    """Size of a slot: parameters of any unit that leaves the GPU, plus its gradients if slots hold them; 0 without slots."""
    if plan.slots is None:
        return 0
    gradients = profile.element_bytes if plan.slots.with_gradients else 0
    return max(
        (
            profile.parameter_bytes(i) + profile.gradient_elements(i) * gradients
            for i in range(len(profile.units))
            if shards.comes_and_goes(i)
        ),
        default=0,
    )


def pinned_memory(profile: Profile) -> str:
    """The memory of pinned buffers: a separate one only if pinned memory has its own limit."""
    return HOST_MEMORY if profile.hardware.host.pinned_bytes is None else PINNED_MEMORY


def passing_parameters(profile: Profile, unit: int, use: Kind, micro_batch: int = 0) -> BufferId:
    """The buffer on the host of parameters on the way between their place and the GPU."""
    return BufferId(Value.PARAMETERS, pinned_memory(profile), unit, use, micro_batch)


def pinned_arrays(profile: Profile, held: Footprint, count: int) -> int:
    """What the pinned arrays of a unit take of which the CPU updates ``count`` parameters."""
    sizes = (count * size for size in held.host_pinned_bytes)
    return sum(map(profile.hardware.host.pinned, sizes) if held.rounds_pinned else sizes)


def resident_buffers(profile: Profile, plan: Plan, shards: Shards) -> Iterator[Buffer]:
    """Buffers that live permanently: what rests of each unit, in every memory, and what belongs to no unit."""
    held, pinned = plan.footprint, pinned_memory(profile)
    arrays = 0
    for i, unit in enumerate(plan.units):
        for value, memory, size in rests(unit, shards.sizes(i), held, pinned):
            yield Buffer(BufferId(value, memory, i), size)
        if plan.sums_in_fp32 and not shards.is_frozen(i):
            yield Buffer(BufferId(Value.POLICY_BUFFERS, GPU_MEMORY, i), 4 * profile.units[i].trained_parameters)
        if unit.update.on is Processor.CPU:
            arrays += pinned_arrays(profile, held, shards.updated_on(i, Processor.CPU))
    slots = slot_bytes(profile, plan, shards) * (plan.slots.count if plan.slots else 0)
    on_host = Counter({pinned: held.host_pinned_buffer_bytes})
    on_host[HOST_MEMORY] += held.host_buffer_bytes
    for value, memory, size in (
        (Value.PARAMETER_SLOTS, GPU_MEMORY, slots),
        (Value.POLICY_BUFFERS, GPU_MEMORY, held.gpu_buffer_bytes),
        (Value.PINNED_STATES, pinned, arrays),
        *((Value.POLICY_BUFFERS, memory, size) for memory, size in on_host.items()),
    ):
        if size:
            yield Buffer(BufferId(value, memory), size)


def shared_bandwidth(
    hardware: Hardware, places: Sequence[Place], *, uses_cpu: bool
) -> tuple[tuple[Flow, ...], tuple[SharedResource, ...]]:
    """Flows and limits of shared bandwidth: the two directions of the link, places, and host DRAM for all of them and the CPU.

    Unified hardware has none of these. Of several GPUs, each computes more slowly while it takes part in a collective, whose
    kernels come first: a matrix product plans its tiles for all multiprocessors, and waits for those that are taken. While the
    GPU computes, the CPU works at ``cpu.concurrent_share`` of its rate, and the GPU at its own.

    Both directions together never exceed the sum of their duplex bandwidths; the weights divide it as measured. A copy, and an
    access of a place behind it, moves each byte through DRAM once. The CPU's demand is the traffic of its optimizer; its weight
    makes it and the copies slow down by the same factor when DRAM is saturated, as memory controllers serve requests
    proportionally. A place reads and writes in turns unless it has a rate for both together. Of drives, both ends of PCIe can
    send at once, but flash and its controller serve one or the other (mixed sequential accesses in AnandTech's tests of the
    Samsung SM951 and others; the steps of the logs of MLP-Offload take the sum of both).
    A collective through host memory writes what it sends and reads what it receives: it takes as much of the link and of DRAM.
    If the CPU stands in for the device, every lane is a thread on its cores as well.
    """
    if hardware.unified:
        return _beside_gpu(hardware, uses_cpu=False)
    h2d, d2h, update = hardware.h2d_copies, hardware.d2h_copies, hardware.cpu.update_bandwidth
    flows: tuple[Flow, ...] = (
        Flow(H2D, h2d.bandwidth, h2d.duplex_bandwidth),
        Flow(D2H, d2h.bandwidth, d2h.duplex_bandwidth),
        Flow(CPU, update, update),
    )
    of_places = {place.name: _lanes_of(place) for place in places}
    for place in places:
        rates = zip(of_places[place.name], (place.read_bandwidth, place.write_bandwidth), strict=True)
        flows = (*flows, *(Flow(lane, rate, rate) for lane, rate in rates))
    behind = [lane for place in places if place.beside == HOST_MEMORY for lane in of_places[place.name]]
    collective = [COLLECTIVE] if hardware.collectives_through_host else []
    link = max(h2d.duplex_bandwidth + d2h.duplex_bandwidth, h2d.bandwidth, d2h.bandwidth)
    resources: tuple[SharedResource, ...] = (
        SharedResource(LINK, link, (H2D, D2H, *collective)),
        SharedResource("host_memory", hardware.dram_bandwidth, (H2D, D2H, CPU, *behind, *collective)),
    )
    for place in places:
        both, lanes = place.both_bandwidth, of_places[place.name]
        resources = (*resources, SharedResource(place.name, both or 1.0, lanes, counts_lanes=both is None))
    if hardware.shared_cores is None:
        gpu, beside = _beside_gpu(hardware, uses_cpu)
        return (*gpu, *flows), (*resources, *beside)
    cores = SharedResource("cores", hardware.shared_cores, (GPU, H2D, D2H, CPU), counts_lanes=True)
    return (Flow(GPU, 1.0, 1.0), *flows), (*resources, cores)


def shared_interconnect(hardware: Hardware, lanes: Sequence[Lane]) -> tuple[list[Flow], list[SharedResource]]:
    """Flows and limits of ``lanes`` that copy from one GPU to another: what each GPU sends, and what it receives.

    Transfers from stage to stage are small beside what is swapped, and take nothing from it here.
    """
    if not lanes:
        return [], []
    assert hardware.interconnect is not None, "GPUs that lend memory are joined"
    rate = hardware.interconnect.bandwidth
    of_ends: defaultdict[str, list[str]] = defaultdict(list)
    for lane in lanes:
        of_ends[f"{lane.source}_sends"].append(lane.name)
        of_ends[f"{lane.target}_receives"].append(lane.name)
    shared = [SharedResource(name, rate, tuple(some)) for name, some in of_ends.items() if len(some) > 1]
    return [Flow(lane.name, rate, rate) for lane in lanes], shared


def _lanes_of(place: Place) -> tuple[str, str]:
    return lane_between(place.name, place.beside), lane_between(place.beside, place.name)


def _beside_gpu(hardware: Hardware, uses_cpu: bool) -> tuple[tuple[Flow, ...], tuple[SharedResource, ...]]:
    """What work beside the GPU's slows: a collective the GPU, and the GPU the CPU. Each leaves the other its concurrent share.

    Weights are inversely proportional to the shares, so that the one that is not slowed reaches its full speed when the other
    reaches its share.
    """
    kept, slowed = hardware.kept_beside_collectives, hardware.cpu.concurrent_share if uses_cpu else 1.0
    through = hardware.collectives_through_host
    if kept == slowed == 1 and not through:
        return (), ()
    weight = 1 / slowed if slowed < 1 else kept
    flows, resources = [Flow(GPU, 1.0, weight)], []
    if kept < 1 or through:
        rate = through or 1.0
        flows.append(Flow(COLLECTIVE, rate, rate * weight / kept))
    if kept < 1:
        resources.append(SharedResource(MULTIPROCESSORS, 1 + kept, (GPU, COLLECTIVE), counts_lanes=True))
    if slowed < 1:
        resources.append(SharedResource(CPU_BESIDE_GPU, 1 + slowed, (GPU, CPU), counts_lanes=True))
    return tuple(flows), tuple(resources)
