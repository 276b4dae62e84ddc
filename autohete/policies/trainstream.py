"""TrainStream: the CPU updates during backward, and the weights of blocks that do not fit come from the host for each pass.

Based on the package trainstream 0.4.1 on PyPI (``wrap`` in ``wrapper.py``), with ``optimizer_mode="cpu"``:

- A gradient is copied to pinned memory as soon as autograd has made it, and freed. Host threads update it at once with a fused
  AdamW (``OffloadAdamW`` in ``optimizer.py``, "eager"); the fp32 masters, and with 16-bit weights a rounded copy of them, are
  pinned, and so are the moments if all this takes at most 40 % of the host's memory (``_decide_pinning``). Updated weights of
  what stays on the GPU are copied there; the module that needs them waits. The host sums several micro-batches in fp32.
- What is not in a block stays on the GPU. ``param_offload="auto"`` keeps as many blocks there as fit beside it, the window of
  transfers in flight, 1 GiB or 10 % of the memory, workspace, three blocks in use, and a reserve for activations, within 90 %
  of the memory; others are spread evenly (``initial_paged`` in ``planner.py``). Then the peak of a step decides whether blocks
  come or go, for at most 8 steps or until two steps change nothing (``refine``).
- A paged block's weights come when the paged block before it begins, forward or backward; the last one stays for backward
  (``paging.py``).
- If blocks are paged, so is what all blocks but the last save: it comes back one block ahead, and forward waits when more than
  the window is in flight (``ActivationOffloader`` in ``hooks.py``). Once no block is paged and it would fit, it stays.
- If everything would fit with gradients and moments, within 85 % of the memory, ordinary training with a fused AdamW on the
  GPU takes over after two steps (``_fits_resident``).

Differences: what TrainStream measures is simulated here. Without paged blocks, activations stay here; there a share of them is
paged that would take at most 15 % of a measured step. Clipped updates run in the order of forward there, of backward here. A
copy of a gradient waits there for room in a pinned pool, a quarter of all gradients, and the tensors of a block leave one by
one. Not modelled: moments in bf16 if fp32 does not fit; quantised frozen weights; a host that waits for an update before it
launches what the GPU could do meanwhile. Here a run that does not fit gets a verdict where ``wrap`` refuses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autohete.errors import check_fields
from autohete.plan import Footprint, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge, Verdict
from autohete.plan.rules import Slots, UpdatesAfterBackward
from autohete.policies import traffic
from autohete.policies.several_gpus import check_one_gpu
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind

#: Share of the memory that is left free, the largest window of transfers in flight, and the least workspace (``wrapper.py``).
_HEADROOM, _WINDOW_BYTES, _WORKSPACE_BYTES = 0.1, 2**30, 96 * 2**20
#: Steps whose peaks change which blocks are paged, and how many in a row without a change end that.
_STEPS, _STABLE = 8, 2
#: Share of the host's memory that is pinned at most.
_PINNED = 0.4


@dataclass(frozen=True, slots=True)
class TrainStream:
    """TrainStream.

    Args:
        paged: blocks whose weights are paged, at even intervals (``param_offload`` as a share). None: as few as fit.
        resident: ordinary training takes over if it fits (``offload="auto"``).
    """

    paged: int | None = None
    resident: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        check_one_gpu("trainstream", profile)
        profile.check_cpu_updates()
        paging = BlockPaging.of(profile)
        if self.paged is not None:
            return _plan(profile, paging, spread(min(self.paged, len(paging.blocks)), paging.blocks))
        plan = self._refined(profile, paging, judge)
        resident = Plan("trainstream", (UnitPlan(),) * len(profile.units))
        pages = any(unit.parameters.leaves for unit in plan.units)
        if self.resident and not pages and judge(resident).verdict is Verdict.OK:
            trained = sum(profile.units[unit].trained_parameters for unit in range(len(profile.units)))
            moved = 3 * trained * profile.element_bytes  # gradients and both moments
            if judge(plan).gpu_peak_bytes + moved <= 0.85 * paging.usable_bytes:
                return resident
        return plan

    def _refined(self, profile: Profile, paging: BlockPaging, judge: Judge) -> Plan:
        """The plan after the steps in which blocks come and go."""
        paged, stable = paging.first_paged(), 0
        started = bool(paged)
        plan = _plan(profile, paging, paged)
        for _ in range(_STEPS if started else 0):
            moved = paging.refined(judge(plan).gpu_peak_bytes, paged)
            stable = stable + 1 if moved == paged else 0
            if moved != paged:
                paged = moved
                plan = _plan(profile, paging, paged, pages_activations=True)
            if stable == _STABLE:
                break
        if started and not paged:
            staying = _plan(profile, paging, paged)
            if judge(staying).gpu_peak_bytes <= paging.target_bytes:
                return staying
        return plan


@dataclass(frozen=True, slots=True)
class BlockPaging:
    """What the memory planner knows.

    Args:
        blocks: units of the stack of blocks.
        block_bytes: weights of each.
        fixed_bytes: what stays on the GPU in any case.
        window_bytes: what may be in flight.
        usable_bytes: memory of the GPU.
    """

    blocks: tuple[int, ...]
    block_bytes: tuple[int, ...]
    fixed_bytes: int
    window_bytes: int
    usable_bytes: int

    @classmethod
    def of(cls, profile: Profile) -> BlockPaging:
        """What it knows of ``profile``."""
        blocks = tuple(range(1, len(profile.units) - 1))
        usable = profile.hardware.gpu_capacity_bytes
        window = min(_WINDOW_BYTES, usable // 10)
        outer = profile.parameter_bytes(0) + profile.parameter_bytes(len(profile.units) - 1)
        fixed = outer + window + max(_WORKSPACE_BYTES, usable // 50)
        return cls(blocks, tuple(map(profile.parameter_bytes, blocks)), fixed, window, usable)

    @property
    def target_bytes(self) -> int:
        """The memory that is to be used."""
        return int(self.usable_bytes * (1 - _HEADROOM))

    def first_paged(self) -> tuple[int, ...]:
        """The blocks that are paged before a step has been measured."""
        reserve = max(2 * self.window_bytes, int(0.15 * self.target_bytes))
        if self.fixed_bytes + sum(self.block_bytes) + reserve <= self.target_bytes:
            return ()
        room = self.target_bytes - self.fixed_bytes - 3 * max(self.block_bytes) - reserve
        kept, taken = 0, 0
        for size in sorted(self.block_bytes):
            if taken + size > room:
                break
            kept, taken = kept + 1, taken + size
        return spread(len(self.blocks) - min(kept, len(self.blocks) - 1), self.blocks)

    def refined(self, peak_bytes: int, paged: tuple[int, ...]) -> tuple[int, ...]:
        """The blocks that are paged after a step with this peak."""
        largest, target = max(self.block_bytes), self.target_bytes
        staying = tuple(block for block in self.blocks if block not in paged)
        if staying and peak_bytes > target + 0.05 * self.usable_bytes:
            more = min(len(staying), max(1, math.ceil((peak_bytes - target) / largest)))
            return tuple(sorted({*paged, *spread(more, staying)}))
        if paged and peak_bytes + 1.5 * largest < target:
            fewer = min(len(paged), (target - peak_bytes) // largest - 1)
            return spread(len(paged) - fewer, paged) if fewer >= 1 else paged
        return paged


def spread(count: int, items: tuple[int, ...]) -> tuple[int, ...]:
    """``count`` of ``items`` at even intervals."""
    if count >= len(items):
        return items
    return tuple(sorted({items[min(len(items) - 1, int((one + 0.5) * len(items) / count))] for one in range(count)}))


def _plan(profile: Profile, paging: BlockPaging, paged: tuple[int, ...], *, pages_activations: bool = False) -> Plan:
    element, several = profile.element_bytes, profile.workload.micro_batches > 1
    mixed, clips = traffic.is_mixed(profile), profile.workload.clips
    outer = UnitPlan(update=Update(Processor.CPU), gradients=Route(HOST_MEMORY) if several else Route())
    units, last = [outer] * len(profile.units), len(profile.units) - 1
    above = dict(zip(paged, paged[1:], strict=False))
    below = dict(zip(paged[1:], paged, strict=False))
    for block in paged:
        units[block] = replace(
            outer,
            parameters=Route(
                HOST_MEMORY,
                ahead=block - below.get(block, 1),
                ahead_in_backward=above.get(block, block) - block,
                stays_after_forward=block == paged[-1],
            ),
        )
    largest = 0
    if paged or pages_activations:
        for block in range(max(1, profile.first_trained), last - 1):
            units[block] = replace(units[block], kept=Route(HOST_MEMORY))
            largest = max(largest, profile.units[block].activation_bytes)
    summed = clips or several
    masters = (4, element) if mixed else (4,)
    trained = sum(unit.trained_parameters for unit in profile.units)
    gradients = trained * element
    held = (sum(masters) + 8) * trained
    pinned = held <= _PINNED * profile.hardware.host.memory_bytes
    return Plan(
        policy="trainstream",
        units=tuple(units),
        rules=(
            *([Slots(Kind.OFFLOAD_ACTIVATIONS, 1 + paging.window_bytes // largest)] if largest else []),
            *([UpdatesAfterBackward()] if clips else []),
        ),
        update_bytes=traffic.ADAM_KERNEL + (element if mixed else 0),
        footprint=Footprint(
            host_optimizer_bytes=sum(masters) + 8 + 4 * summed if pinned else 8 + 4 * summed,
            host_pinned_bytes=() if pinned else masters,
            rounds_pinned=False,
            pins_optimizer=pinned,
            host_pinned_buffer_bytes=min(max(2**30, gradients // 4), gradients),
            host_parameter_bytes=element,
            one_host_copy=True,
        ),
    )


SYSTEM = TrainStream
