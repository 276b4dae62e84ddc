"""MegaTrain (arXiv 2604.05091): the GPU has two blocks at a time, all else rests on the host.

Based on github DLYuanGod/MegaTrain at 919520f: ``infinity/model/cpu_master.py``, ``infinity/config/training.py``,
``examples/sft/train.py``; the text of the paper was not read.

- Each block has a flat pinned copy of its 16-bit parameters on the host. It is copied to one of two flat buffers on the GPU,
  and from there to one of two blocks that compute. A buffer is free once the block before the last has been copied from it
  (``_load_layer_to_buffer_async``, ``_unflatten_to_layer``). Embedding, last norm and head stay on the GPU.
- Forward keeps the input of every fourth block on the GPU (``checkpoint_interval``). Backward goes from group to group: a group
  is recomputed from its input, which keeps the inputs of its blocks; then its blocks are recomputed and trained, the last one
  first. Each of these passes fetches the block's parameters anew (``_forward_and_backward_single_gpu``).
- The gradients of a block are copied to one of 12 pinned slabs on a stream of their own; the block that computes next on the
  same place of the GPU waits for that. A thread adds them to the block's gradients in pageable memory (``_grad_worker``).
- When all are there, the CPU takes their norm and clips them, DeepSpeed's CPU Adam updates all, the pinned copies are made
  anew, and embedding, norm and head are copied to the GPU (``_sync_params_to_gpu``). Then the next iteration begins.

Nothing is decided, but for the interval, which the user gives.

Differences: the recomputation of a group leaves out its last block, which the code recomputes and fetches once more, to no use.
The host waits for the value of the loss before it issues what backward needs; here the first fetches come beside the head. Not
modelled: copies of parameters within the GPU; the first copy of gradients from their slab, which the CPU makes beside backward
(those of further micro-batches are added); several GPUs, whose processes share the host's copy. Its examples load the model in
bf16, and update parameters that are no masters: plan for a workload without masters to have that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Format, ParameterSlots, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, BlockingCopies, RefreshAfterUpdates, UpdatesAfterBackward
from autohete.policies import host_arrays, traffic
from autohete.policies.flags import combinations
from autohete.policies.several_gpus import check_one_gpu
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind

#: Blocks whose parameters are on the GPU: in the two buffers and the one that computes; the other one is empty then.
_PLACES, _EMPTY = 3, 1
#: ``num_grad_slabs``, and buffers for parameters that are not flat.
_SLABS, _BUFFERS = 12, 2
#: Passes that a fetch may overlap if there is a place, in forward and in backward.
_AHEAD, _AHEAD_IN_BACKWARD = 2, 4


@dataclass(frozen=True, slots=True)
class MegaTrain:
    """MegaTrain.

    Args:
        interval: number of blocks of a group, of which forward keeps the first one's input (``checkpoint_interval``).
    """

    interval: int = 4

    def __post_init__(self) -> None:
        check_fields(self)
        if self.interval < 1:
            raise InputError(f"megatrain:interval={self.interval} must be at least 1 block")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[MegaTrain]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, interval=(4, 1, 2, 8))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        check_one_gpu("megatrain", profile)
        element, masters, blocks = profile.element_bytes, profile.workload.has_masters, len(profile.units) - 2
        outer = UnitPlan(
            update=Update(Processor.CPU, norm_on=Processor.CPU),
            gradients=Route(HOST_MEMORY),
            refresh=Format(pinned=False),
        )
        route = Route(HOST_MEMORY, ahead=_AHEAD, ahead_in_backward=_AHEAD_IN_BACKWARD, comes_again=True)

        # Blocks below the first trained unit have no backward.
        starts = {*range(0, blocks, self.interval), profile.first_trained - 1, blocks}

        def inner(block: int) -> UnitPlan:
            kept = Activations.RECOMPUTE if block in starts else Activations.DROP
            again = () if block + 1 in starts else (Activations.RECOMPUTE,)
            return replace(outer, activations=kept, parameters=route, again=again, refresh=Format())

        sizes = [unit.trained_parameters for unit in profile.units]
        largest = max(sizes[1:-1])
        pinned = host_arrays.pinned(profile, [*[largest] * (_SLABS + _BUFFERS), sizes[0], sizes[-1]], element)
        rounding = host_arrays.pinned(profile, sizes[1:-1], element) - element * sum(sizes[1:-1])
        return Plan(
            policy="megatrain",
            units=(outer, *map(inner, range(blocks)), outer),
            rules=(
                BlockingCopies(Kind.OFFLOAD_GRADIENTS, overlapped=2),
                UpdatesAfterBackward(),
                RefreshAfterUpdates(),
                Barrier(),
            ),
            slots=ParameterSlots(_PLACES),
            update_bytes=traffic.upcast_kernel(profile),
            elementwise_bytes=traffic.CAST if traffic.is_mixed(profile) else 2 * element,
            footprint=Footprint(
                gpu_buffer_bytes=_EMPTY * max(profile.parameter_bytes(unit) for unit in range(1, blocks + 1)),
                host_optimizer_bytes=profile.optimizer_bytes + element + (0 if masters else element),
                host_pinned_buffer_bytes=pinned + rounding,
                host_parameter_bytes=element,
            ),
        )


SYSTEM = MegaTrain
