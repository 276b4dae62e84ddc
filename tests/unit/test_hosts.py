"""Hosts that differ: files that leave things out of a base, one pool of memory, memory domains, and rates above the DRAM's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.hardware_files import own, write

from autohete.answer.purchases import single_purchases
from autohete.answer.site import Site
from autohete.cli.hardware import check
from autohete.errors import InputError, OnePoolError
from autohete.execution.sharing import FULL_RATE, Sharing
from autohete.hardware import Hardware, left_out, load_hardware, preset_names, read_hardware
from autohete.hardware.document import combine, read_chain
from autohete.hardware.template import new_hardware_text
from autohete.lowering import lower
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.profile import Profile, analytic_profile
from autohete.profile.profile_file import read_profile, write_profile
from autohete.schedule import CPU, D2H, GPU, H2D
from autohete.simulate import judge_for, simulate_policy
from autohete.simulate.summary import answer_or_refusal as answer
from autohete.workload import Workload
from autohete.workload.config import read_model

POOL = "gb10-dgx-spark"
SMALL = Workload("small", 256, 4, 4, sequence_length=128, batch_size=2)
MODEL = read_model("llama-3.1-8b")


def on(hardware: str | Hardware, workload: Workload = SMALL) -> Profile:
    """The profile of a small model."""
    return analytic_profile(workload, load_hardware(hardware) if isinstance(hardware, str) else hardware)


# --- what a file leaves out of its base


def test_a_file_leaves_tables_and_figures_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `without` lists is gone, all else is the base's; the commands say so, and a file on top inherits it."""
    without = write(tmp_path / "a.toml", 'without = ["places.nvme", "cpu.launch"]')
    found, plain = load_hardware(without), load_hardware("rtx4090-workstation")
    assert plain.places
    assert (found.places, found.cpu.launch_seconds) == ((), 0.0)
    assert (found.gpu, found.h2d, found.host) == (plain.gpu, plain.h2d, plain.host)
    check(str(without))
    assert "a.toml: ok, " in (line := capsys.readouterr().out)
    assert "; without places.nvme, cpu.launch of rtx4090-workstation" in line
    above = write(tmp_path / "b.toml", "", "a.toml")
    assert load_hardware(above) == found
    assert left_out(above) == left_out(without) == ["without places.nvme, cpu.launch of rtx4090-workstation"]


def test_a_table_left_out_can_be_given_anew(tmp_path: Path) -> None:
    """What the file gives itself does not mix with what it left out: a link's rates follow no bandwidth that is gone."""
    link = own("links.h2d.bandwidth", "50GB/s") + own("links.h2d.duplex_bandwidth", "40GB/s") + own("links.h2d.latency", "1us")
    found = load_hardware(write(tmp_path / "a.toml", f'without = ["links.h2d"]\n{link}')).h2d
    assert (found.bandwidth, found.duplex_bandwidth, found.pageable_bandwidth) == (50e9, 40e9, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('without = ["places.nvm"]', r"a.toml': without: unknown key of its base 'places.nvm'.*did you mean 'places.nvme'"),
        ('without = ["gpu.memory.range"]', "without: unknown key of its base 'gpu.memory.range'"),
        ('without = "nvme"', r"without is 'nvme': give a list of keys, such as \[\"interconnect\", \"places.nvme\"\]"),
        ("without = [3]", r"without is \[3\]: give a list of keys"),
        ('without = ["gpu.memory"]', r"a.toml': gpu.memory: missing: give it a table"),
        ('without = ["links"]', r"a.toml': links: missing: give it a table"),
    ],
)
def test_only_what_is_there_can_be_left_out(text: str, message: str, tmp_path: Path) -> None:
    """A key that the base lacks, a part of a figure, and what no hardware can do without are errors in words."""
    with pytest.raises(InputError, match=message):
        load_hardware(write(tmp_path / "a.toml", text))


def test_without_a_base_nothing_can_be_left_out(tmp_path: Path) -> None:
    """The error names what to do."""
    path = tmp_path / "a.toml"
    path.write_text('without = ["nvme"]')
    with pytest.raises(InputError, match=r"without leaves nvme out of a base, but the file has none: remove it, or name a"):
        load_hardware(path)


# --- one pool of memory


def test_unified_hardware_runs_what_copies_nothing() -> None:
    """Plans that stay on the GPU need no link and no host; the pool is gpu.memory less what the system keeps."""
    hardware = load_hardware(POOL)
    assert hardware.unified
    assert hardware.host.memory_bytes == 0
    for policy in ("resident:checkpointing=none", "resident:checkpointing=full", "rotor", "joint"):
        found = simulate_policy(on(hardware), parse_policy(policy))
        assert [lane.name for lane in found.schedule.lanes] == [GPU]
        assert (found.verdict, found.host.peak_bytes) == (Verdict.OK, 0)
        assert found.gpu.capacity_bytes == hardware.gpu.memory_bytes - hardware.gpu.reserved_bytes


def test_joint_recomputes_as_little_as_it_must_on_one_pool() -> None:
    """Where a model fits with a part of its activations only, the joint planner beats full recomputation."""
    workload = Workload("mid", 1024, 8, 8, sequence_length=1024, batch_size=8)
    profile = on(POOL, workload)
    full = simulate_policy(profile, parse_policy("resident:checkpointing=full"))
    keeps = simulate_policy(profile, parse_policy("resident:checkpointing=none"))
    assert full.gpu.peak_bytes < keeps.gpu.peak_bytes
    room = (full.gpu.peak_bytes + keeps.gpu.peak_bytes) // 2 + profile.hardware.gpu.reserved_bytes
    between = on(load_hardware(POOL, {"gpu.memory": f"{room}B"}), workload)
    joint = simulate_policy(between, parse_policy("joint"))
    assert joint.verdict is Verdict.OK
    assert keeps.iteration_seconds < joint.iteration_seconds < full.iteration_seconds


@pytest.mark.parametrize("policy", ["zero_offload", "patrickstar", "offload_activations", "stronghold:window=2", "l2l"])
def test_policies_that_copy_are_refused_by_name_on_one_pool(policy: str) -> None:
    """The error names policy, hardware and cure; a comparison has a row with the reason."""
    with pytest.raises(OnePoolError, match=rf"^{policy}: needs lane .*, but {POOL} is unified: .*; choose resident, with or"):
        simulate_policy(on(POOL), parse_policy(policy))
    summary, simulation = answer(on(POOL), parse_policy(policy))
    assert (summary.verdict, summary.iteration_seconds, simulation) == (Verdict.INVALID, None, None)
    assert "choose resident" in summary.explanation
    assert policy not in summary.explanation  # the row is named already


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unified = true", r'links: unified .*: write without = \["links", "host"\]; host: unified hardware has one pool'),
        (
            'unified = true\nwithout = ["links"]',
            r'host: unified hardware has one pool of memory, .*: write without = \["host"\]',
        ),
        ("unified = 1", "unified: Input should be a valid boolean"),
    ],
)
def test_unified_hardware_has_no_links_and_no_host(text: str, message: str, tmp_path: Path) -> None:
    """A file that has them says how to leave them out; with that it loads."""
    with pytest.raises(InputError, match=message):
        load_hardware(write(tmp_path / "a.toml", text))
    assert load_hardware(write(tmp_path / "b.toml", 'unified = true\nwithout = ["links", "host"]')).unified


def test_a_host_of_unified_hardware_cannot_be_set() -> None:
    """The cure is to set the pool."""
    with pytest.raises(
        InputError, match=r"host.memory cannot be set: the hardware is unified, with one pool .*: set gpu.memory"
    ):
        load_hardware(POOL, {"host.memory": "64GiB"})


# --- near and far memory, domains, shared uplinks


def test_far_memory_has_the_far_rate() -> None:
    """In memory of another domain each direction has its far rate, and the other rates keep their proportion to it."""
    near, far = load_hardware("gb200-near"), load_hardware("gb200-near", {"host.numa": "far"})
    for direction in ("h2d", "d2h"):
        before, after = getattr(near, direction), getattr(far, direction)
        assert (before.bandwidth, after.bandwidth) == (340e9, 117.5e9)
        assert after.duplex_bandwidth == pytest.approx(before.duplex_bandwidth * 117.5 / 340)
    assert far.host == near.host
    assert load_hardware("gb200-far", {"host.numa": "near"}).h2d == near.h2d
    policy = parse_policy("zero_offload")
    assert (
        simulate_policy(on("gb200-far", MODEL), policy).iteration_seconds
        > simulate_policy(on("gb200-near", MODEL), policy).iteration_seconds
    )


def test_a_place_is_near_or_far() -> None:
    """Another word is refused with the words that are allowed; far memory needs its rate."""
    with pytest.raises(InputError, match=r"host.numa: Input should be 'near' or 'far'"):
        load_hardware("gb200-near", {"host.numa": "nearby"})
    with pytest.raises(
        InputError, match=r'host.numa is "far", but there is no links.h2d.far_bandwidth: give it, or set host.numa'
    ):
        load_hardware("h100-pcie5", {"host.numa": "far"})


@pytest.mark.parametrize(("gpus", "of_domain"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_gpus_share_their_own_memory_domain(gpus: int, of_domain: int) -> None:
    """Two Grace of 480 GB and 512 GB/s: up to two GPUs have one each, more share one with GPUs of the same domain."""
    host = load_hardware("gb200-near", {"host.pinned_memory": "200GB"}).shared_by(gpus).host
    assert host.memory_bytes == 480 * 10**9 // of_domain
    assert host.pinned_bytes == 100 * 10**9 // of_domain
    assert host.memory_bandwidth == pytest.approx(512e9 / of_domain)


def test_one_domain_is_shared_by_all_gpus() -> None:
    """Without domains the DRAM is divided by the GPUs, as all presets of a single domain are."""
    whole, part = load_hardware("h100-pcie5"), load_hardware("h100-pcie5").shared_by(8)
    assert part.host.memory_bandwidth == whole.host.memory_bandwidth / 8
    assert (part.h2d, part.d2h) == (whole.h2d, whole.d2h)


def test_gpus_that_copy_at_once_share_what_they_reach_together() -> None:
    """Eight reach the measured rates, fewer share the same sum, and one is as fast as alone."""
    node = load_hardware("h800-8gpu")
    eight, six, one = (node.shared_by(gpus) for gpus in (8, 6, 1))
    assert (eight.h2d.bandwidth, eight.d2h.bandwidth) == (55.2e9, 44.9e9)
    assert (eight.h2d.duplex_bandwidth, eight.d2h.duplex_bandwidth) == (33.5e9, 22.3e9)
    assert six.h2d.duplex_bandwidth == pytest.approx(33.5e9 * 8 / 6)
    assert six.d2h.bandwidth == node.d2h.bandwidth
    assert (one.h2d, one.d2h) == (node.h2d, node.d2h)


# --- pinned arrays


@pytest.mark.parametrize("policy", ["autohete", "twin_flow", "zero_offload:deepspeed=2026"])
def test_exact_allocation_saves_what_rounding_takes(policy: str) -> None:
    """Without rounding a plan needs less of the host, never more, and no longer; other words are refused."""
    tight = Workload("tight", 1024, 4, 8, sequence_length=128, batch_size=1)
    words: tuple[dict[str, str], ...] = ({}, {"host.pinned_rounding": "power-of-two"}, {"host.pinned_rounding": "none"})
    nodes = [load_hardware("rtx4090-workstation", {"gpu.memory": "1.7GiB", **word}) for word in words]
    default, rounded, exact = (simulate_policy(on(node, tight), parse_policy(policy)) for node in nodes)
    assert nodes[0] == nodes[1]
    assert default.host.peak_bytes == rounded.host.peak_bytes > exact.host.peak_bytes > 0
    assert exact.iteration_seconds <= rounded.iteration_seconds
    with pytest.raises(InputError, match=r"host.pinned_rounding: Input should be 'power-of-two' or 'none'"):
        load_hardware("rtx4090-workstation", {"host.pinned_rounding": "two"})


# --- rates above the DRAM's


def lane_rates(hardware: Hardware, *lanes: str) -> dict[str, float]:
    """Bytes/s of lanes that work at the same time."""
    profile = on(hardware)
    schedule = lower(profile, parse_policy("zero_offload").plan(profile, judge_for(profile)))
    demand = {flow.lane: flow.demand for flow in schedule.flows}
    return {lane: demand[lane] * rate / FULL_RATE for lane, rate in Sharing(schedule).rates(lanes).items()}


def test_copies_and_updates_of_one_gpu_share_its_dram() -> None:
    """Where both want more than the DRAM gives, they together get what it gives; each alone is not slowed down."""
    hardware = load_hardware("rtx5090-desktop")
    dram = hardware.host.usable_bandwidth
    assert lane_rates(hardware, H2D)[H2D] == pytest.approx(hardware.h2d.bandwidth)
    assert lane_rates(hardware, CPU)[CPU] == pytest.approx(hardware.cpu.update_bandwidth)
    for lanes in ((H2D, D2H), (H2D, CPU), (H2D, D2H, CPU)):
        assert sum(lane_rates(hardware, *lanes).values()) == pytest.approx(dram, rel=1e-5)


def test_a_link_above_the_dram_is_said() -> None:
    """A copy runs at the DRAM's rate, and a remark says which rates exceed it; below it there is none."""
    slow = load_hardware("rtx4090-workstation", {"host.memory_bandwidth": "30GB/s"})
    dram = slow.host.usable_bandwidth
    assert lane_rates(slow, H2D)[H2D] == pytest.approx(dram, rel=1e-5)
    (remark,) = (text for text in slow.remarks if text.startswith("copies"))
    assert remark == (
        "copies (h2d 25.5, d2h 26.4, both at once 44.4 GB/s) exceed the 19.5 GB/s of DRAM (host.memory_bandwidth x "
        "host.usable_share): all together run at 19.5 GB/s at most"
    )
    assert load_hardware("rtx4090-workstation").remarks == ()
    assert answer(on(slow), parse_policy("resident"))[0].notes == slow.remarks


def test_a_link_above_the_dram_is_as_fast_as_the_dram() -> None:
    """Beyond the DRAM's rate, a faster link changes nothing; what a copy costs besides its bytes stays as it is."""
    dram = load_hardware("a100-40gb-epyc7713").dram_bandwidth
    times = {
        simulate_policy(on(faster), parse_policy("zero_offload")).iteration_seconds
        for times_as_fast in (1, 2, 1e5)
        for faster in [load_hardware("a100-40gb-epyc7713", {"links.h2d.bandwidth": f"{dram * times_as_fast:.0f}B/s"})]
    }
    assert len(times) == 1
    slow = on(load_hardware("a100-40gb-epyc7713", {"host.memory_bandwidth": "20GB/s"}))
    assert slow.d2h_seconds(10**9, pinned=False) == on("a100-40gb-epyc7713").d2h_seconds(10**9, pinned=False)


def test_the_part_of_one_gpu_is_said() -> None:
    """DRAM that suffices for one GPU may not for each of many; updates of bound ranks that exceed it count as given."""
    copies = load_hardware("h100-pcie5").shared_by(8).remarks
    assert [text.partition(":")[0] for text in copies] == [
        "copies (h2d 55.5, d2h 57.3, both at once 90.6 GB/s) exceed the 34.6 GB/s of DRAM (host.memory_bandwidth x "
        "host.usable_share, the part of one of 8 GPUs)"
    ]
    updates = load_hardware("a100-40gb-epyc7543p").shared_by(4).remarks[0]
    assert updates.startswith("updates by a process per GPU, 34.2 GB/s, exceed the 23.6 GB/s of DRAM")


def test_bound_processes_update_no_faster_than_the_dram() -> None:
    """The measured rate of several processes is of the node's own DRAM, and slower DRAM limits it."""
    node = load_hardware("a100-40gb-epyc7713", {"host.memory_bandwidth": "51.2GB/s"}).shared_by(2)
    assert node.cpu.update_bandwidth == pytest.approx(51.2e9 / 2)
    assert any("ranks_update_bandwidth 137 GB/s is more than the DRAM allows; using 51.2 GB/s" in note for note in node.notes)


def test_bound_processes_are_said() -> None:
    """Where several processes update on one CPU, the answer notes that they are assumed to be bound; elsewhere it does not."""
    node = load_hardware("a100-40gb-epyc7713")
    said = {
        (gpus, policy): any(
            "bound to its own cores" in note for note in answer(on(node.shared_by(gpus)), parse_policy(policy))[0].notes
        )
        for gpus in (1, 4)
        for policy in ("resident:zero_stage=3", "zero_offload")
    }
    assert [case for case, bound in said.items() if bound] == [(4, "zero_offload")]


def test_free_collectives_are_said() -> None:
    """Where the hardware does not say what collectives take from the GPU, an answer for several GPUs says what is assumed."""
    node = load_hardware("a100-40gb-epyc7543p")
    assert node.interconnect is not None
    silent = replace(node, interconnect=replace(node.interconnect, concurrent_share=1.0))
    said = [
        any(
            "do not slow down what the GPU computes" in note
            for note in answer(on(one), parse_policy("resident:zero_stage=3"))[0].notes
        )
        for one in (node.shared_by(2), silent.shared_by(2), silent)
    ]
    assert said == [False, True, False]


def test_a_duplex_rate_that_follows_is_said() -> None:
    """The note names both rates; a rate that is set itself has none."""
    moved = load_hardware("rtx4090-workstation", {"links.h2d.bandwidth": "51GB/s"})
    assert moved.notes == ("links.h2d.duplex_bandwidth follows links.h2d.bandwidth: 44 GB/s",)
    both = {"links.h2d.bandwidth": "51GB/s", "links.h2d.duplex_bandwidth": "22GB/s"}
    assert load_hardware("rtx4090-workstation", both).notes == ()


# --- presets


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("policy", ["resident", "zero_offload"])
def test_every_preset_answers(name: str, policy: str) -> None:
    """An 8B model is simulated on every preset, or the answer says in words why not."""
    summary, simulation = answer(on(name, MODEL), parse_policy(policy))
    assert (summary.verdict is Verdict.OK) is (summary.iteration_seconds is not None) is not bool(summary.explanation)
    assert (summary.verdict is Verdict.INVALID) is (simulation is None)


@pytest.mark.parametrize("name", preset_names())
def test_tensor_cores_compute_twice_as_fast_in_8_bit(name: str) -> None:
    """From one generation to the next both peaks change; a preset that takes one of them over from its base is wrong."""
    gpu = load_hardware(name).gpu
    assert gpu.peak_8bit_flops is None or gpu.peak_8bit_flops / gpu.peak_16bit_flops == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("name", preset_names())
def test_no_preset_reaches_more_than_its_peak(name: str) -> None:
    """Shares of a peak are at most 1 over their whole range."""
    gpu = read_hardware(name).gpu
    for figure in (gpu.gemm_efficiency, gpu.memory_efficiency):
        assert figure.range is not None
        assert figure.range[1] <= 1


@pytest.mark.parametrize(
    ("name", "total"), [("gb200-near", lambda host: 2 * host.memory_bytes), ("h100-8gpu", lambda host: 2 * host.memory_bytes)]
)
def test_domains_divide_what_the_file_gives_for_the_node(name: str, total: Callable[[object], int]) -> None:
    """A file gives the memory of the whole node; its domains have equal parts."""
    document = read_hardware(name)
    assert document.host is not None
    assert total(load_hardware(name).host) == round(document.host.memory.value)


# --- measured machines


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A profile as `autohete profile` writes it, with the figures of a preset for those measured."""
    tables = dict(combine(read_chain("rtx4090-workstation")))
    path = tmp_path / "machine.json"
    write_profile(path, on("rtx4090-workstation"), tables, {"date": "2026-11-22", "machine": "m", "versions": "v"})
    return path


def test_a_measured_machine_is_hardware(measured: Path, tmp_path: Path) -> None:
    """A profile's machine answers for other models, may be a base, and is the one that the profile itself has."""
    plain = load_hardware("rtx4090-workstation")
    assert load_hardware(measured) == read_profile(measured).hardware == plain
    above = write(tmp_path / "more.toml", own("host.memory", "64GiB"), "machine.json")
    assert load_hardware(above).host.memory_bytes == 64 * 2**30
    assert load_hardware(above).gpu == plain.gpu
    begun = tmp_path / "new.toml"
    begun.write_text(new_hardware_text(str(begun), str(measured)))
    assert load_hardware(begun).gpu == plain.gpu


def test_a_profile_without_hardware_is_refused(measured: Path, tmp_path: Path) -> None:
    """What is no JSON, or has no hardware or only a part of it, is an error that names the file."""
    path = tmp_path / "a.json"
    for text, message in (("{", "is not valid JSON"), ("[]", "has no table of hardware"), ('{"hardware": {}}', "gpu: missing")):
        path.write_text(text)
        with pytest.raises(InputError, match=rf"a.json' {message}|a.json': .*{message}"):
            load_hardware(path)
    document = json.loads(measured.read_text())
    del document["hardware"]["links"]
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"a.json': links: missing: give it"):
        load_hardware(path)
    with pytest.raises(
        InputError, match=r"a.json': .* has no links, .*: only unified hardware can do without; measure it again"
    ):
        read_profile(path)


# --- what could be bought


def test_purchases_fit_the_host() -> None:
    """On one pool there is no host to enlarge; with memory domains the change is that of the whole node."""
    assert [change.moved for change in single_purchases(Site(POOL, {}), None)] == [
        {"gpu.memory": f"{load_hardware(POOL).gpu.memory_bytes + 8 * 2**30}B"}
    ]
    twice = next(change for change in single_purchases(Site("gb200-near", {}), None) if "host.memory" in change.moved)
    assert load_hardware("gb200-near", twice.moved).host.memory_bytes == 2 * load_hardware("gb200-near").host.memory_bytes


def test_a_faster_way_to_far_memory_is_twice_as_fast() -> None:
    """Where the memory is far, the rate between the domains is what more of brings something; the near link is as it was."""
    far, near = (load_hardware("gb200-near", {"host.numa": numa}) for numa in ("far", "near"))
    link = next(
        change for change in single_purchases(Site("gb200-near", {"host.numa": "far"}), None) if "rate to" in change.name
    )
    faster = load_hardware("gb200-near", {"host.numa": "far", **link.moved})
    for direction in ("h2d", "d2h"):
        assert getattr(faster, direction).bandwidth == 2 * getattr(far, direction).bandwidth
        assert getattr(faster, direction).duplex_bandwidth > getattr(far, direction).duplex_bandwidth
    assert load_hardware("gb200-near", link.moved).h2d == near.h2d


def test_a_faster_link_is_faster_for_all_gpus() -> None:
    """The next generation doubles what eight GPUs get together, too, as far as the DRAM gives it."""
    site = Site("h100-8gpu", {"host.memory_bandwidth": "5000GB/s"}, gpus=8)
    link = next(change for change in single_purchases(site, None) if "next generation" in change.name)
    before, after = site.hardware().h2d, site.hardware(link.moved).h2d
    assert before.bandwidth < site.whole().h2d.bandwidth
    assert after.bandwidth == pytest.approx(2 * before.bandwidth)
    assert after.duplex_bandwidth == pytest.approx(2 * before.duplex_bandwidth)
