"""How GPUs are joined: the default over PCIe, overrides of it, and collectives through host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.hardware_files import NODE

from autohete.errors import InputError
from autohete.hardware import load_hardware, preset_names, uncertain_figures
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.simulate import simulate_policy
from autohete.workload import Workload

SMALL = Workload(
    "small", hidden_size=1024, transformer_blocks=4, heads=8, vocabulary_size=8000, sequence_length=512, batch_size=4
)
GB = 1e9


def test_the_default_is_a_share_of_the_slower_direction() -> None:
    """Without a table it is 0.7 of a link in duplex, within a range, and follows the links as they are set."""
    plain = load_hardware(NODE)
    assert plain.interconnect is not None
    assert plain.interconnect.assumed
    assert plain.interconnect.through_host
    assert plain.interconnect.bandwidth == pytest.approx(0.7 * min(plain.h2d.duplex_bandwidth, plain.d2h.duplex_bandwidth))
    halved = load_hardware(NODE, {"links.h2d.bandwidth": "12.75GB/s"}).interconnect
    assert halved is not None
    assert halved.bandwidth == pytest.approx(0.7 * 11 * GB)
    (range_,) = (figure for figure in uncertain_figures(NODE) if figure.key == "interconnect.bandwidth")
    assert [range_.low, range_.high] == pytest.approx([0.35 * 22 * GB, 0.82 * 22 * GB])


@pytest.mark.parametrize("name", ["gh200", "gb10-dgx-spark", "mi300a"])
def test_what_is_not_on_pcie_has_no_default(name: str) -> None:
    """Unified memory, and links faster than any PCIe slot, are not joined over PCIe."""
    assert load_hardware(name).interconnect is None
    with pytest.raises(InputError, match=r"table \[interconnect\]"):
        load_hardware(name).shared_by(2)


def test_an_override_replaces_one_figure_of_the_default() -> None:
    """Any figure of the table can be set on hardware without it; a bandwidth that is given is no assumption."""
    node = load_hardware(NODE, {"interconnect.bandwidth": "7GB/s", "interconnect.path": "direct"})
    assert node.interconnect is not None
    default = load_hardware(NODE).interconnect
    assert default is not None
    assert node.interconnect == replace(default, bandwidth=7 * GB, through_host=False, assumed=False)
    assert not any("assumption" in note for note in node.shared_by(2).remarks)
    with_network = load_hardware(NODE, {"interconnect.network_bandwidth": "1GB/s"})
    assert with_network.shared_by(16).gpus == 16
    with pytest.raises(InputError, match=r"interconnect\.bandwith.*did you mean 'interconnect\.bandwidth'"):
        load_hardware(NODE, {"interconnect.bandwith": "7GB/s"})
    with pytest.raises(InputError, match="path"):
        load_hardware(NODE, {"interconnect.path": "nvlink"})


def test_an_assumption_is_named_for_several_gpus_only() -> None:
    """The note has the number of GPUs and the rate that is used, which DRAM may limit."""
    node = load_hardware(NODE, {"host.memory_bandwidth": "400GB/s"})
    assert node.remarks == ()
    (note,) = node.shared_by(2).remarks
    assert note.startswith("2 GPUs over PCIe without peer-to-peer: 15.4 GB/s, an assumption")
    slow = load_hardware(NODE).shared_by(2)
    assert slow.interconnect is not None
    rate = slow.host.usable_bandwidth / 2
    assert slow.interconnect.bandwidth == rate
    assert f"{rate / GB:.3g} GB/s, not 15.4, because DRAM writes and reads each byte, an assumption" in slow.notes[0]


@pytest.mark.parametrize("name", [name for name in preset_names() if load_hardware(name).interconnect is not None])
def test_dram_limits_only_what_goes_through_it(name: str) -> None:
    """No GPU sends more through host memory than half of its part of DRAM; what is direct keeps its rate."""
    node = load_hardware(name)
    assert node.interconnect is not None
    for gpus in range(2, node.interconnect.gpus + 1):
        shared = node.shared_by(gpus)
        assert shared.interconnect is not None
        limit = shared.host.usable_bandwidth / 2 if node.interconnect.through_host else float("inf")
        assert shared.interconnect.bandwidth == min(node.interconnect.bandwidth, limit)


def test_eight_rtx_5090_are_limited_by_dram() -> None:
    """The preset has what nccl-tests reach on four GPUs; for eight, DRAM alone gives the 28 GB/s that were measured there."""
    four, eight = (load_hardware("rtx5090-8gpu").shared_by(gpus).interconnect for gpus in (4, 8))
    assert four is not None
    assert eight is not None
    assert four.bandwidth == 35 * GB
    assert eight.bandwidth == pytest.approx(28 * GB, rel=0.01)


def test_collectives_through_host_memory_and_copies_slow_each_other() -> None:
    """At the same bus bandwidth, a plan with copies takes longer if collectives use the link; one without copies does not."""
    seconds = {}
    for path in ("direct", "host"):
        node = load_hardware(NODE, {"interconnect.path": path, "interconnect.bandwidth": "8GB/s"}).shared_by(2)
        for name in ("resident:zero_stage=3", "zero3_offload"):
            seconds[path, name] = simulate_policy(analytic_profile(SMALL, node), parse_policy(name)).iteration_seconds
    assert seconds["host", "resident:zero_stage=3"] == seconds["direct", "resident:zero_stage=3"]
    assert seconds["host", "zero3_offload"] > 1.01 * seconds["direct", "zero3_offload"]
