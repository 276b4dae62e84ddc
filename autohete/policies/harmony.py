"""Harmony: packs of layers go to the GPUs in turn, each for all micro-batches (Li et al., VLDB 2022, arXiv 2202.01306).

Based on github msr-fiddle/harmony at 5fd838f, ``harmony/3_scheduler`` and ``harmony/4_runtime``, its pipeline ("vPP").

- Tasks are packs of consecutive layers. Forward has packs of its own up to the highest pack of backward, which computes its
  forward as well. Task after task goes to the next GPU (``task_graph_composor.py``), which uploads the parameters of a pack
  once the pack before is done (``worker.py``, ``PrefetchPt``), and computes it for all micro-batches before the next one.
- Backward recomputes a pack from the pack's input, which rests on the host (``msg_stash_x.py``).
- Gradients are summed on the GPU and leave after the last micro-batch. A thread then updates the pack on the CPU, beside
  further packs, by a loop over tensors in fp32 (``UpdateInBkgd``). An iteration ends when all are updated.
- Before an upload, another thread copies the pack's parameters from those that all processes share to a pinned copy, which
  each process has of the whole model (``SyncPinModelInBkgd``).
- Packs are chosen by simulation (``searcher.py``). Those of backward come from filling packs from the last layer down to the
  capacity, from as few packs of even size as fit, and from as few of even time; those of forward from the same, or they are
  those of backward. So packs are as large as memory lets them be, although smaller ones may fill a pipeline sooner. A pack has
  the sum of what its layers take by themselves, and may take 10 of the 11 GiB of the authors' GPUs.
- With ``pack_size`` the user gives the layers of a pack, of which the lowest may have fewer (``manual_pack``).

Differences:

- There are at least as many tasks as GPUs. Harmony packs a model that fits on one GPU for that one, and advises against itself.
- If no candidate fits, the capacity falls by tenths, as a user would let it with ``memory_cap_scale``; without candidates each
  layer is a pack.
- The search tries sizes of micro-batches as well; here the workload has one, for forward and backward.
- What a pack leaves for the next goes from GPU to GPU, and on one GPU stays there; there Harmony takes it through the host.
- A GPU's next iteration waits for its own updates; Harmony's for those of all.
- Harmony trains in fp32. In 16 bits the pinned copies have 16 bits here, and the update casts gradients.
- Copies to the pinned memory are a part of the update, two for each parameter and iteration.
- Embedding and head are layers like others; a matrix that they share is uploaded and updated for each of them.
- Data parallelism ("vDP"), in which each GPU computes all packs for its samples, is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autohete.errors import InputError, check_fields
from autohete.plan import DealtStages, Footprint, Plan
from autohete.plan.policy import Judge, Judgement, Verdict, estimates
from autohete.plan.rules import Barrier
from autohete.policies import traffic
from autohete.policies.stages_in_turn import FP32_BYTES, bytes_of_units, check_dealt, dealt_units, seconds_of_units
from autohete.profile import Profile

#: Of the GPU's memory, what a pack may take: 10 of 11 GiB (``memory_cap`` in ``sched_args.py``); how often it falls by a tenth.
_CAPACITY, _FALLS = 10 / 11, 5
#: Sizes of packs that an answer tries besides those that are searched.
_SIZES = 1, 2, 4
#: DRAM traffic of the loop over tensors in ``AdamW`` of transformers, bytes a parameter: decay 12, ``mul_`` and ``add_`` of the
#: first moment 20, ``mul_`` and ``addcmul_`` of the second 20, ``sqrt`` and ``add_`` 16, ``addcdiv_`` 16.
_LOOP_BYTES = 84

#: The first layer of each pack, lowest first.
Packs = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Harmony:
    """Packs of layers dealt to the GPUs in turn.

    Args:
        pack_size: units of each pack. 0: packs are searched.
    """

    pack_size: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.pack_size < 0:
            raise InputError(f"harmony:pack_size={self.pack_size}: give the units of a pack, or 0 to search")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[Harmony]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from map(cls, (0, *(size for size in _SIZES if size <= len(profile.units) // 2)))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If nothing fits, returns the fastest candidate."""
        check_dealt("harmony", profile)
        if self.pack_size:
            return plan_of(profile, self._given(profile, self.pack_size))
        estimate = estimates(judge)
        found: dict[Plan, Judgement] = {}
        for fall in range(_FALLS + 1):
            capacity = profile.hardware.gpu_capacity_bytes * _CAPACITY * (1 - fall / 10)
            for dealt in candidates(profile, capacity):
                plan = plan_of(profile, dealt)
                if plan not in found:
                    found[plan] = estimate(plan)
            if any(one.verdict is Verdict.OK for one in found.values()):
                break
        if not found:  # a layer takes more than a GPU has
            return plan_of(profile, self._given(profile, 1))
        return min(found, key=lambda plan: (found[plan].verdict is not Verdict.OK, found[plan].seconds))

    def _given(self, profile: Profile, size: int) -> DealtStages:
        units, gpus = len(profile.units), profile.hardware.gpus
        packs = tuple(sorted(max(end - size, 0) for end in range(units, 0, -size)))
        if (dealt := _dealt(profile, packs, packs[:-1])) is None:
            raise InputError(
                f"harmony: packs of {size} of the model's {units} units are too few for {gpus} GPUs: give a smaller pack_size, "
                "or fewer GPUs"
            )
        return dealt


def candidates(profile: Profile, capacity: float) -> Iterator[DealtStages]:
    """The stages of which Harmony takes the fastest.

    Args:
        profile: the layers.
        capacity: bytes that a pack may take.
    """
    layers, gpus = _Layers(profile, capacity), profile.hardware.gpus
    seen: set[DealtStages] = set()
    for backward in layers.packs(layers.backward, layers.backward_seconds, (gpus + 2) // 2):
        below = backward[-1]
        forward = [backward[:-1]] if layers.fit(backward[:-1], layers.forward[:below]) else []
        if below:
            forward += layers.packs(layers.forward[:below], layers.forward_seconds[:below], gpus - len(backward))
        for packs in forward:
            dealt = _dealt(profile, backward, packs)
            if dealt is not None and dealt not in seen:
                seen.add(dealt)
                yield dealt


class _Layers:
    """What each layer takes by itself, time and bytes, without its input; and the input, of which a pack has one."""

    def __init__(self, profile: Profile, capacity: float) -> None:
        units, (parameters, gradients) = profile.units, bytes_of_units(profile)
        self.forward_seconds, self.backward_seconds = seconds_of_units(profile)
        outputs = [*(unit.input_bytes for unit in units[1:]), profile.loss.logits_bytes]
        self.forward = [
            size + unit.checkpointed_workspace_bytes + output
            for size, unit, output in zip(parameters, units, outputs, strict=True)
        ]
        self.backward = [
            size + gradient + unit.kept_bytes + unit.backward_workspace_bytes + 2 * output
            for size, gradient, unit, output in zip(parameters, gradients, units, outputs, strict=True)
        ]
        self._inputs, self._capacity = [unit.input_bytes for unit in units], capacity

    def packs(self, sizes: Sequence[int], seconds: Sequence[float], least: int) -> Iterator[Packs]:
        """The packs of the layers with these sizes, by each method that finds some; at least so many, but of filled packs."""
        found = self._filled(sizes), self._even(sizes, sizes, least), self._even(seconds, sizes, least)
        yield from (packs for packs in found if packs is not None)

    def fit(self, packs: Packs, sizes: Sequence[int]) -> bool:
        """Whether packs of the layers with these sizes fit."""
        ends = (*packs[1:], len(sizes))
        return all(
            sum(sizes[start:end]) + self._inputs[start] < self._capacity for start, end in zip(packs, ends, strict=False)
        )

    def _filled(self, sizes: Sequence[int]) -> Packs | None:
        """Packs that are filled from the last layer down (``greedy_memory_packing``)."""
        starts, size = [len(sizes)], self._capacity
        for layer in reversed(range(len(sizes))):
            if size + sizes[layer] + self._inputs[layer] >= self._capacity:
                starts.append(layer)
                size = 0
            starts[-1] = layer
            size += sizes[layer]
        packs = tuple(reversed(starts[1:]))
        return packs if self.fit(packs, sizes) else None

    def _even(self, weights: Sequence[float], sizes: Sequence[int], least: int) -> Packs | None:
        """As few packs of even weight as fit (``balanced_memory_packing``, ``balanced_time_packing``)."""
        sums = np.cumsum(np.asarray(weights, float))
        needed = max(math.ceil(sum(sizes) / self._capacity), least, 1)
        for count in range(needed, len(sizes) + 1):
            starts = (0, *np.searchsorted(sums, sums[-1] / count * np.arange(1, count), side="left").tolist())
            if all(a < b for a, b in pairwise((*starts, len(sizes)))) and self.fit(starts, sizes):
                return starts
        return None


def _dealt(profile: Profile, backward: Packs, forward: Packs) -> DealtStages | None:
    """The stages of these packs, without those of backward that have nothing to train; None if there are fewer than GPUs."""
    first, gpus = profile.first_trained, profile.hardware.gpus
    ends = (*backward[1:], len(profile.units))
    trained = [max(start, first) for start, end in zip(backward, ends, strict=True) if end > first]
    if trained[-1] != backward[-1]:  # its forward is not among those of forward
        trained[-1] = backward[-1]
    if len(trained) + len(forward) < gpus:
        return None
    return DealtStages(gpus, forward, tuple(reversed(trained)))


def plan_of(profile: Profile, dealt: DealtStages) -> Plan:
    """The plan of these stages."""
    element = profile.element_bytes
    pinned = 2 * (4 + element)
    return Plan(
        policy="harmony",
        units=dealt_units(dealt, len(profile.units), ahead=0),
        rules=(Barrier(),),
        elementwise_bytes=_LOOP_BYTES + pinned + (traffic.CAST if traffic.is_mixed(profile) else 0),
        footprint=Footprint(host_parameter_bytes=element * profile.hardware.gpus, host_optimizer_bytes=FP32_BYTES),
        dealt=dealt,
    )


SYSTEM = Harmony
