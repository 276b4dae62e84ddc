"""TrainStream's memory planner, by hand; and what its plans copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.paper import PLENTY, profile_with

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.plan import Plan, Processor
from autohete.policies import parse_policy
from autohete.policies.trainstream import BlockPaging, spread
from autohete.profile import Profile, analytic_profile
from autohete.simulate import judge_for, simulate_plan
from autohete.workload import Workload

GIB = 2**30


def planned(profile: Profile, policy: str = "trainstream") -> Plan:
    return parse_policy(policy).plan(profile, judge_for(profile))


def paged_by(plan: Plan) -> list[int]:
    """The units whose parameters leave."""
    return [unit for unit, one in enumerate(plan.units) if one.parameters.leaves]


@pytest.mark.parametrize(
    ("count", "chosen"), [(0, ()), (1, (4,)), (2, (2, 6)), (3, (1, 4, 6)), (7, (0, 1, 2, 4, 5, 6, 7)), (9, tuple(range(8)))]
)
def test_blocks_are_spread_evenly(count: int, chosen: tuple[int, ...]) -> None:
    """Of eight blocks, those at (j + 1/2) * 8 / count, rounded down."""
    assert spread(count, tuple(range(8))) == chosen


def paging(usable_gib: float, blocks: int = 40, block_mib: int = 400) -> BlockPaging:
    """Blocks beside 1 GiB that stays, with a window of 1 GiB."""
    return BlockPaging(tuple(range(1, blocks + 1)), (block_mib * 2**20,) * blocks, 2 * GIB, GIB, int(usable_gib * GIB))


def test_blocks_that_fit_beside_the_reserve_stay() -> None:
    """Of 22 GiB, 19.8 are used: less 2 that stay, a reserve of 15 %, 2.97, and three blocks in use, 1.17, there are 13.66 GiB,
    room for 34 of 40 blocks. On 24 GiB all fit.
    """
    assert len(paging(22).first_paged()) == 6
    assert paging(24).first_paged() == ()


def test_a_low_peak_lets_blocks_return_and_a_high_one_sends_more_away() -> None:
    """21.6 GiB are to be used. At 18 GiB there is room for 3.6 / 0.39 = 9 blocks, of which all but one return. At 23 GiB, more
    than 5 % of 24 above, 4 blocks leave. In between nothing changes.
    """
    planner = paging(24)
    paged = tuple(range(1, 21))
    assert len(planner.refined(18 * GIB, paged)) == 12
    assert len(planner.refined(23 * GIB, paged)) == 24
    assert planner.refined(int(21.5 * GIB), paged) == paged


def test_what_fits_trains_as_usual() -> None:
    """With memory for gradients and states, a fused AdamW on the GPU takes over, unless that is off."""
    profile = profile_with(PLENTY, 1)
    assert all(unit.update.on is Processor.GPU for unit in planned(profile).units)
    assert all(unit.update.on is Processor.CPU for unit in planned(profile, "trainstream:resident=off").units)


def test_fetches_begin_with_the_paged_block_before() -> None:
    """Of blocks 1 to 3, 1 and 3 are paged: block 3 comes while 1 and 2 compute, and block 1 while backward computes 3 and 2.
    Block 3 stays for backward. The last block's activations stay.
    """
    units = planned(profile_with(PLENTY, 1), "trainstream:paged=2").units
    assert paged_by(Plan("x", units)) == [1, 3]
    assert (units[3].parameters.ahead, units[3].parameters.stays_after_forward) == (2, True)
    assert (units[1].parameters.ahead, units[1].parameters.ahead_of_backward) == (0, 2)
    assert [unit.kept.leaves for unit in units] == [False, True, True, False, False]


def test_a_model_that_does_not_fit_is_paged_until_its_peak_does() -> None:
    """2.7 billion parameters, 5 GiB in 16 bit, on a GPU of 5 GiB: the peak is at most 95 % of the memory, and blocks stay."""
    workload = Workload("large", 2560, 32, 32, batch_size=1, sequence_length=512, tied_embeddings=False)
    profile = analytic_profile(workload, load_hardware("rtx4090-workstation", {"gpu.memory": "5GiB"}))
    plan = planned(profile)
    found = simulate_plan(profile, plan)
    assert 0 < len(paged_by(plan)) < 32
    assert found.gpu.fits
    assert found.gpu.peak_bytes <= 0.95 * profile.hardware.gpu_capacity_bytes


def test_host_arrays_are_pinned_up_to_two_fifths_of_the_host() -> None:
    """16 parameters in fp32: masters and both moments, 12 bytes each, and the staging of all gradients, 64."""
    profile = profile_with(PLENTY, 1)
    assert planned(profile, "trainstream:resident=off").footprint.pins_optimizer
    little = replace(profile, hardware=replace(profile.hardware, host=replace(profile.hardware.host, memory_bytes=400)))
    footprint = planned(little, "trainstream:resident=off").footprint
    assert not footprint.pins_optimizer
    assert (footprint.host_pinned_bytes, footprint.host_optimizer_bytes) == ((4,), 8)
    assert footprint.host_pinned_buffer_bytes == 64


def test_several_gpus_are_refused() -> None:
    """Data parallelism on several GPUs is untested there."""
    profile = profile_with(PLENTY, 1, 2)
    with pytest.raises(InputError, match="trainstream plans for one GPU, not for 2"):
        planned(profile)
