"""Block swap, ``--blocks_to_swap`` of musubi-tuner: blocks of a diffusion transformer take turns on the GPU.

Based on github kohya-ss/musubi-tuner at 30c658c4, ``src/musubi_tuner/modules/custom_offloading_utils.py``:

- Of a list of L blocks, the GPU holds L - N at any time (``ModelOffloader``). Forward begins with the last N on the host. After
  the forward of block i < N, block i goes to the host, and block L - N + i takes its memory. Backward undoes this: after that
  of block L - 1 - p, block L - p goes and block N - p comes (``create_backward_hook``).
- One thread and one stream make the copies of a list, and a block's copy home precedes that of the one that comes
  (``swap_weight_devices_cuda``), although frozen weights have not changed. Without ``--use_pinned_memory_for_block_swap``
  weights rest in pageable memory and go through two pinned buffers of one block; here as other pageable copies do.
- ``--block_swap_h2d_only`` (``LoRAStreamOffloader``), for a frozen base and with checkpointing: N blocks at even intervals rest
  on the host and stream through a ring of two blocks on the GPU. Nothing is copied home. The last two stay for backward, and
  the first two from there to the next forward.
- Two lists of different blocks, such as those of FLUX and HunyuanVideo, share N: the first swaps N // 2 of its blocks and the
  second 2 (N - N // 2) + 1 (``enable_block_swap``). At least two blocks of a list stay. Others, such as U-Nets, swap nothing.

Only weights of linear layers move there; here whole blocks do. Adapters stay on the GPU there and are updated after backward;
here those of a block that moves go with it, and the GPU updates them before. Full training updates in backward
(``--fused_backward_pass``). With gradient accumulation, only the last micro-batch copies blocks home after backward. Host
memory is counted as if the blocks of both ends had a place there all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from autohete.errors import InputError, check_fields
from autohete.lowering import never_fits
from autohete.plan import Activations, Footprint, Format, Plan, Route, UnitPlan
from autohete.plan.policy import Judge, Verdict
from autohete.plan.rules import Exchanges
from autohete.policies.checkpointing import Checkpointing, with_checkpointing
from autohete.policies.flags import combinations
from autohete.policies.several_gpus import check_one_gpu
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY

#: Blocks of a list that stay, and the ring of ``h2d_only`` (``--block_swap_ring_size``).
_LEAST, _RING = 2, 2


@dataclass(frozen=True, slots=True)
class BlockSwap:
    """Swapping of blocks.

    Args:
        blocks: N; at most so many that two blocks of each list stay. None: the fewest with which the model fits.
        checkpointing: full, none, or the better of both.
        pin_memory: weights on the host are pinned.
        h2d_only: stream frozen blocks to the GPU without copying them home.
    """

    blocks: int | None = None
    checkpointing: Checkpointing = Checkpointing.BEST
    pin_memory: bool = False
    h2d_only: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.checkpointing in (Checkpointing.SELECTIVE, Checkpointing.ALTERNATE):
            raise InputError(f"block_swap:checkpointing={self.checkpointing} is not in musubi-tuner: give full, none or best")
        if self.h2d_only and self.checkpointing is Checkpointing.NONE:
            raise InputError(
                "block_swap:h2d_only needs checkpointing, as its weights are overwritten: give full, or leave one out"
            )

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[BlockSwap]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        streams = (False, True) if _is_frozen(profile, range(1, len(profile.units) - 1)) else (False,)
        yield from combinations(cls, pin_memory=(False, True), h2d_only=streams)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        check_one_gpu("block_swap", profile)
        lists = block_lists(profile)

        def plan_for(activations: Activations) -> Plan:
            blocks = self._fewest(profile, lists, activations, judge) if self.blocks is None else self.blocks
            if blocks and profile.workload.clips:
                raise InputError(
                    "block_swap cannot clip gradients: a block leaves once it has been updated, and clipped updates wait for "
                    "the last backward. Leave clip_norm out, or choose another policy"
                )
            return self._plan(profile, lists, min(blocks, most_blocks(lists)), activations)

        return with_checkpointing(Checkpointing.FULL if self.h2d_only else self.checkpointing, plan_for, profile, judge)

    def blocks_of(self, profile: Profile, plan: Plan) -> int:
        """The smallest N of which ``plan`` is this system's plan."""
        lists, activations = block_lists(profile), plan.units[1].activations
        plans = (self._plan(profile, lists, blocks, activations) for blocks in range(most_blocks(lists) + 1))
        return next(blocks for blocks, one in enumerate(plans) if one.units == plan.units)

    def _fewest(self, profile: Profile, lists: Sequence[range], activations: Activations, judge: Judge) -> int:
        """The smallest number with which the model fits; if it does not, the largest."""
        low, high = 0, most_blocks(lists)
        if profile.workload.clips:  # then none can be swapped
            high = min(high, 1)
        while low < high:
            middle = (low + high) // 2
            plan = self._plan(profile, lists, middle, activations)
            if never_fits(profile, plan) or judge(plan).verdict is not Verdict.OK:
                low = middle + 1
            else:
                high = middle
        return low

    def _plan(self, profile: Profile, lists: Sequence[range], blocks: int, activations: Activations) -> Plan:
        units = [UnitPlan(), *[UnitPlan(activations)] * (len(profile.units) - 2), UnitPlan()]
        passes = 1 if activations is Activations.KEEP else 2
        swapped = [(one, count) for one, count in zip(lists, shares(lists, blocks), strict=True) if count]
        for one, count in swapped:
            routes = self._streamed(one, count, passes) if self.h2d_only else self._exchanged(one, count, passes)
            for unit, route in routes:
                units[unit] = UnitPlan(activations, route)
        largest = max((profile.parameter_bytes(one.start) for one, _ in swapped), default=0)
        buffers = (0 if self.pin_memory else 2) if self.h2d_only else (1 if self.pin_memory else 2)
        return Plan(
            policy="block_swap",
            units=tuple(units),
            rules=() if self.h2d_only else tuple(Exchanges(one.start, one[-1]) for one, _ in swapped),
            footprint=Footprint(
                host_pinned_buffer_bytes=buffers * largest,
                host_parameter_bytes=profile.element_bytes,
            ),
        )

    def _exchanged(self, one: range, count: int, passes: int) -> Iterator[tuple[int, Route]]:
        """Routes of the first ``count`` blocks of a list and of the last, which take turns."""
        staying = len(one) - count
        for place, unit in enumerate(one):
            if place < count or place >= staying:
                yield (
                    unit,
                    Route(
                        HOST_MEMORY,
                        ahead=staying - 1,
                        ahead_in_backward=(staying - 2) * passes,
                        carried=Format(pinned=self.pin_memory),
                        stays_after_forward=place >= count,
                        stays_after_backward=place < staying,
                        moves=True,
                    ),
                )

    def _streamed(self, one: range, count: int, passes: int) -> Iterator[tuple[int, Route]]:
        """Routes of ``count`` blocks at even intervals, of which a ring holds some."""
        units = [one[(2 * rank + 1) * len(one) // (2 * count)] for rank in range(count)]
        for rank, unit in enumerate(units if count > _RING else ()):
            first, last = rank < _RING, rank >= count - _RING
            ahead = 1 if first else unit - units[rank - _RING] - 1
            back = 1 if last else (units[rank + _RING] - unit - 1) * passes
            pinned = Format(pinned=self.pin_memory)
            yield (
                unit,
                Route(
                    HOST_MEMORY,
                    ahead=ahead,
                    ahead_in_backward=back,
                    carried=pinned,
                    stays_after_forward=last,
                    stays_after_backward=first,
                ),
            )


def block_lists(profile: Profile) -> list[range]:
    """The lists of blocks that can be swapped: consecutive units of one size, enough of them that some can leave; none if there
    are more than two lists, whose shares no code defines. Blocks that backward does not reach, which it would bring back, stay.
    """
    inner = range(max(1, profile.first_trained), len(profile.units) - 1)
    runs = [list(units) for _, units in groupby(inner, key=lambda unit: profile.units[unit].parameters)]
    lists = [range(units[0], units[-1] + 1) for units in runs if len(units) > _LEAST]
    return lists if len(lists) <= 2 else []


def shares(lists: Sequence[range], blocks: int) -> list[int]:
    """How many blocks of each list are swapped if the user gives ``blocks``."""
    if len(lists) == 1 or not blocks:
        return [blocks] * len(lists)
    return [blocks // 2, 2 * (blocks - blocks // 2) + 1]


def most_blocks(lists: Sequence[range]) -> int:
    """The largest number that a user can give."""

    def fits(blocks: int) -> bool:
        return all(count <= len(one) - _LEAST for one, count in zip(lists, shares(lists, blocks), strict=True))

    return max((blocks for blocks in range(sum(map(len, lists))) if fits(blocks)), default=0)


def _is_frozen(profile: Profile, units: range) -> bool:
    return all(profile.units[unit].trained_parameters < profile.units[unit].parameters for unit in units)


SYSTEM = BlockSwap
