"""Ratel (LoHan, Liao et al., ICDE 2025, arXiv 2403.06504): model states on drives, and updates by the CPU during backward.

Based on github RC4ML/LoHan at feb88fe: ``main.py``, ``ratel_init.py``, ``ratel_optimizer.py``, ``checkpoint.py``, ``utils.py``.

- Parameters are files. In forward up to three groups of matrices, those of one block, are read to pinned buffers and copied to
  the GPU ahead of their use (``FIFO_buffer_gpu_length``). In backward they are read when the recomputation needs them, by a
  host thread that runs ahead of the GPU. Each is read once in either direction.
- Only the inputs of recomputed blocks are kept, in pinned host memory; each is copied there during the next forward, and back
  while the block above is recomputed and trained (``save_on_cpu``). It recomputes the two sublayers of a block by themselves:
  plan for ``units=sublayer`` to have that here.
- A gradient is cast to fp32 on the GPU, and copied to pinned memory as soon as it is there ("active gradient offload"). When
  the gradients of a sub-group have been made, its states are read, another process updates it with DeepSpeed's CPU Adam, and
  while it does so, parameters and states of the sub-group before are written (``single_step``, ``is_nvme_rearrange``).
- With ``swap_percent``, forward also keeps results of products in pinned host memory, which the recomputation takes: in a fixed
  order of kinds, the second of the MLP, that of attention's output, the first of attention, the first of the MLP, each of all
  blocks, until the copies of these and of the inputs would take that share of forward's time (``get_act_swap_list``). It is off
  in ``main.py`` and ``run.sh``, which name 20 and 30 %.
- The main process waits for each of its reads and writes, so the drives serve one at a time.

A sub-group, 700,000,000 parameters or more, is a unit here. Not modelled: the norm of each gradient, taken on the GPU in fp64
and never used; parameters of up to 20,000,000 elements that stay on the GPU; writes that do not wait for the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Format, Plan, Processor, Route, SavedRoute, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier
from autohete.policies import host_arrays, traffic
from autohete.policies.flags import check_place, combinations, place_names
from autohete.policies.several_gpus import check_one_gpu
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY

#: ``sub_group_size``, in elements.
_SUB_GROUP = 700_000_000
#: Bytes for each element of the largest gradient: a copy, one in fp32 and one in fp64 (``partition_grads``).
_GRADIENT_COPIES = 2 + 4 + 8
#: Passes of a block in backward.
_PASSES = 2
#: Rates at which inputs and results are taken to be copied, bytes/s.
_INPUTS, _RESULTS = 18 * 2**30, 20 * 2**30
#: The order of the kinds of results.
_KINDS = "mlp_2", "attention_2", "attention_1", "mlp_1"


@dataclass(frozen=True, slots=True)
class Ratel:
    """Ratel. Needs hardware with a table ``[places.nvme]``, or with that of another place.

    Args:
        place: the place of the hardware where parameters and optimizer states rest.
        swap_percent: share of forward's time for copies of what it keeps. 0: only inputs are kept.
    """

    place: str = "nvme"
    swap_percent: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.swap_percent < 0:
            raise InputError(f"ratel:swap_percent={self.swap_percent}: give 0 or more percent of forward's time")
        check_place("ratel", self.place)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[Ratel]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        swap_percent = (0, 20, 30) if all(unit.results for unit in profile.units[1:-1]) else (0,)
        yield from combinations(cls, place=place_names(profile), swap_percent=swap_percent)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        check_one_gpu("ratel", profile)
        # Without masters, the CPU updates the parameters themselves, which it has to reach.
        home = self.place if profile.workload.has_masters else HOST_MEMORY
        outer = UnitPlan(
            parameters=Route(home, ahead_in_backward=_PASSES),
            update=Update(Processor.CPU),
            gradients=Route(carried=Format(4)),
            states=Route(self.place),
        )
        inner = replace(outer, activations=Activations.RECOMPUTE, kept=Route(HOST_MEMORY, ahead=_PASSES))
        first = replace(outer, parameters=Route()) if profile.workload.tied_embeddings else outer
        largest = max(unit.added_elements for unit in profile.units[1:-1])
        return Plan(
            policy="ratel",
            units=(first, *(replace(inner, results=kept) for kept in self._results(profile)), outer),
            rules=(Barrier(),),
            update_bytes=traffic.ADAM_KERNEL,
            elementwise_bytes=traffic.CAST if traffic.is_mixed(profile) else 0,
            footprint=Footprint(
                gpu_buffer_bytes=_GRADIENT_COPIES * largest,
                host_pinned_buffer_bytes=4 * max(host_arrays.sub_groups(profile, _SUB_GROUP)),
                host_parameter_bytes=profile.element_bytes,
            ),
        )

    def _results(self, profile: Profile) -> list[tuple[SavedRoute, ...]]:
        """What each unit keeps of the results of its products."""
        units = profile.units[1:-1]
        there = [{one.name: one.size_bytes for one in unit.results} for unit in units]
        kept: list[tuple[SavedRoute, ...]] = [()] * len(units)
        enough = sum(unit.forward_seconds for unit in units) * self.swap_percent / 100
        copied = 2 * units[0].input_bytes * profile.workload.transformer_blocks / _INPUTS  # those of both sublayers
        for kind in _KINDS:
            for i, sizes in enumerate(there):
                if copied < enough and kind in sizes:
                    kept[i] = (*kept[i], SavedRoute(kind, Route(HOST_MEMORY, ahead=_PASSES)))
                    copied += sizes[kind] / _RESULTS
        return kept


SYSTEM = Ratel
