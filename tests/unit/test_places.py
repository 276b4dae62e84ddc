"""Places: memories besides the GPU's and the host's, which a hardware file lists."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohete.cli.axes import check_keys
from autohete.errors import InfeasibleError, InputError
from autohete.execution.sharing import FULL_RATE, Sharing
from autohete.hardware import Hardware, Place, load_hardware
from autohete.lowering import lower
from autohete.plan import Activations, Format, Plan, Processor, Route, SavedRoute, UnitPlan, Update
from autohete.plan.policy import Verdict
from autohete.planner.optimistic import OptimisticJudge
from autohete.planner.rows import Model
from autohete.planner.unit_costs import Costs
from autohete.policies import parse_policy
from autohete.policies.joint import every_choice
from autohete.profile import Profile, analytic_profile
from autohete.schedule import Kind, TaskId
from autohete.simulate import judge_for, simulate_plan, simulate_policy
from autohete.workload import Precision, Units, Workload

SMALL = Workload("small", 512, 4, 8, vocabulary_size=1000, sequence_length=256, batch_size=4, tied_embeddings=False)
NODE = load_hardware("h100-pcie5")
DRIVES = Place("drives", 10**12, 3e9, 2e9, 1e-5)
PEER = Place("peer", 10**12, 50e9, 40e9, 1e-5, both_bandwidth=60e9, beside="gpu")
BOTH = replace(NODE, places=(DRIVES, PEER))


def profile_on(hardware: Hardware, workload: Workload = SMALL) -> Profile:
    """The profile of the small model."""
    return analytic_profile(workload, hardware)


def plan_of(inner: UnitPlan) -> Plan:
    """A plan whose transformer blocks are alike."""
    outer = UnitPlan(update=inner.update)
    return Plan("by hand", (outer, *[inner] * SMALL.transformer_blocks, outer), update_bytes=28)


def place_text(name: str, beside: str, rate: str) -> str:
    """The table of a place in a hardware file."""
    figures = {"capacity": "1TB", "read_bandwidth": rate, "write_bandwidth": rate, "latency": "10us"}
    tables = [f'[places.{name}]\nmodel = "a test\'s"\nbeside = "{beside}"']
    tables += [f'[places.{name}.{key}]\nvalue = "{value}"\nsource = "a test"\ndate = "2026"' for key, value in figures.items()]
    return "\n".join(tables) + "\n"


def file_with(path: Path, *tables: str) -> Path:
    """A hardware file that adds tables to a preset."""
    path.write_text('base = "h100-pcie5"\nname = "more"\ntitle = "with more places"\n' + "".join(tables))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("beside", "rate"), [("host", "40GB/s"), ("gpu", "200GB/s")])
def test_a_place_of_a_hardware_file_is_planned_into(beside: str, rate: str, tmp_path: Path) -> None:
    """A table in the file suffices for the planner to let values rest there, where GPU and host are too small or slower."""
    path = file_with(tmp_path / "more.toml", place_text("attic", beside, rate))
    small = {"gpu.memory": "1180MiB", "gpu.reserved_memory": "1GiB", "host.memory": "48MiB"}
    profile = profile_on(load_hardware(path, small))
    found = simulate_policy(profile, parse_policy("joint"))
    homes = {home for unit in found.plan.units for home in unit.homes}
    assert found.verdict is Verdict.OK
    assert "attic" in homes
    used = next(one for one in found.memories if one.memory == "attic")
    assert 0 < used.peak_bytes <= used.capacity_bytes == 10**12
    lanes = {lane.name: lane.ends for lane in found.schedule.lanes}
    assert (lanes["attic_read"], lanes["attic_write"]) == (("attic", beside), (beside, "attic"))
    with pytest.raises(InfeasibleError):
        simulate_policy(profile_on(load_hardware("h100-pcie5", small)), parse_policy("joint"))


def test_values_take_one_hop_or_two() -> None:
    """What rests beside the GPU is copied once in each direction, what rests behind the host twice."""
    everything = UnitPlan(parameters=Route("peer"), kept=Route("peer"), states=Route("peer"))
    one = lower(profile_on(BOTH), plan_of(everything))
    behind = replace(everything, parameters=Route("drives"), kept=Route("drives"), states=Route("drives"))
    two = lower(profile_on(BOTH), plan_of(behind))
    assert {task.lane for task in one.tasks} == {"gpu", "peer_read", "peer_write"}
    assert {task.lane for task in two.tasks} == {"gpu", "h2d", "d2h", "drives_read", "drives_write"}
    for lane, of_place, of_link in (("read", "drives_read", "h2d"), ("write", "drives_write", "d2h")):
        assert len(one.tasks_of(f"peer_{lane}")) == len(two.tasks_of(of_place)) == len(two.tasks_of(of_link))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_activations_leave_a_place_behind_the_host_a_pass_before_they_are_fetched(ahead: int) -> None:
    """A read begins one pass earlier than the fetch that follows it may, unless the fetch is synchronous."""
    schedule = lower(profile_on(BOTH), plan_of(UnitPlan(kept=Route("drives", ahead=ahead))))
    waits = {task.id: {edge.task for edge in task.after} for task in schedule.tasks}
    backwards = [task.id for task in schedule.tasks if task.id.kind is Kind.BACKWARD]
    user = next(i for i, task in enumerate(backwards) if task.unit == 1)
    (read,) = waits[TaskId(Kind.READ_ACTIVATIONS, 1)] & set(backwards)
    assert read == backwards[user - 1 - ahead - bool(ahead)]


def test_a_place_reads_and_writes_in_turns_or_at_once() -> None:
    """Without a rate for both together each direction takes its turn; with one they share it."""
    schedule = lower(profile_on(BOTH), plan_of(UnitPlan(states=Route("drives"), kept=Route("peer"))))
    rates = Sharing(schedule).rates(["drives_read", "drives_write", "peer_read", "peer_write"])
    assert rates["drives_read"] + rates["drives_write"] == pytest.approx(FULL_RATE, rel=1e-6)
    together = (50e9 * rates["peer_read"] + 40e9 * rates["peer_write"]) / FULL_RATE
    assert together == pytest.approx(60e9, rel=1e-6)


def test_a_place_that_is_too_small_is_a_verdict() -> None:
    """Its contents are counted over time like those of any memory."""
    plan = plan_of(UnitPlan(kept=Route("drives"), parameters=Route("drives")))
    peak = next(one for one in simulate_plan(profile_on(BOTH), plan).memories if one.memory == "drives").peak_bytes
    for size, verdict in ((peak, Verdict.OK), (peak - 1, Verdict.short_of("drives"))):
        small = replace(BOTH, places=(replace(DRIVES, capacity_bytes=size), PEER))
        assert simulate_plan(profile_on(small), plan).verdict is verdict


@pytest.mark.parametrize(
    ("unit", "precision", "message"),
    [
        (
            UnitPlan(update=Update(Processor.CPU), states=Route("peer")),
            Precision.BF16,
            "only the GPU reaches",
        ),
        (UnitPlan(update=Update(Processor.CPU), parameters=Route("drives")), Precision.FP32, "their own master weights"),
    ],
)
def test_what_the_processor_does_not_reach_is_refused(unit: UnitPlan, precision: Precision, message: str) -> None:
    """The error names the unit, the place, the reason and the cure."""
    with pytest.raises(InputError, match=f"unit 1 .*{message}"):
        lower(profile_on(BOTH, replace(SMALL, precision=precision)), plan_of(unit))


COMPUTING = replace(NODE, places=(replace(DRIVES, update_bandwidth=8e9), PEER))
IN_DRIVES = UnitPlan(update=Update(Processor.PLACE), gradients=Route("drives", carried=Format(4)), states=Route("drives"))


def test_a_place_above_the_dram_is_as_fast_as_the_dram() -> None:
    """Beside the host, a place copies through DRAM: a faster one changes nothing and is said, unlike one beside the GPU."""
    dram = NODE.dram_bandwidth

    def times(beside: str) -> list[float]:
        places = [Place("cxl", 10**12, dram * faster, dram * faster, 1e-3, beside=beside) for faster in (1, 1000)]
        unit = UnitPlan(update=Update(Processor.GPU), states=Route("cxl"))
        return [simulate_plan(profile_on(replace(NODE, places=(one,))), plan_of(unit)).iteration_seconds for one in places]

    alone, faster = times("host")
    assert alone == faster
    assert times("gpu")[1] < times("gpu")[0]
    fast = replace(NODE, places=(Place("cxl", 10**12, dram * 2, dram, 1e-3),))
    (remark,) = fast.remarks
    assert remark.startswith(f"copies (reads of cxl {dram * 2e-9:.3g} GB/s) exceed")


def test_an_update_in_a_place_crosses_no_link() -> None:
    """Of 12 bytes of states and 4 of gradients per parameter only the gradients go there, and parameters come back."""
    profile = profile_on(COMPUTING)
    plan = Plan("by hand", (IN_DRIVES, *[replace(IN_DRIVES, parameters=Route("host"))] * SMALL.transformer_blocks, IN_DRIVES))
    schedule = lower(profile, plan)
    seconds = {lane.name: sum(task.duration_ns for task in schedule.tasks if task.lane == lane.name) for lane in schedule.lanes}
    count, units = sum(unit.parameters for unit in profile.units), len(profile.units)
    expected = {"drives_write": 4 * count / 2e9, "drives_read": 2 * count / 3e9, "drives_update": (2 * 12 + 4) * count / 8e9}
    for lane, found in expected.items():
        assert seconds[lane] * 1e-9 == pytest.approx(found + units * DRIVES.latency_seconds, rel=1e-6)
    assert seconds["cpu"] == 0


def test_a_place_that_does_not_compute_updates_nothing() -> None:
    """The error names the figure that it lacks."""
    with pytest.raises(InfeasibleError, match=r"drives, which does not compute on .*give the figure places.drives.update_band"):
        lower(profile_on(BOTH), Plan("by hand", (IN_DRIVES,) * (SMALL.transformer_blocks + 2)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradients": Route()}, "a place updates with states and gradients that rest in it"),
        ({"parameters": Route("drives")}, "a place updates with states and gradients that rest in it"),
        ({"states": Route("peer")}, "let the states rest in drives"),
    ],
)
def test_a_place_updates_with_what_rests_in_it(given: dict[str, Any], message: str) -> None:
    """States and gradients are there, and parameters are not."""
    with pytest.raises(InputError, match=message):
        replace(IN_DRIVES, **given)


def test_a_figure_that_a_place_lacks_can_be_set() -> None:
    """As the error of a place that does not compute says, also in a sweep; a place that is not there has none."""
    figure = "places.nvme.update_bandwidth"
    places = load_hardware("rtx4090-workstation", {figure: "6GB/s", "places.nvme.both_bandwidth": "8GB/s"}).places
    assert [(one.name, one.update_bandwidth, one.both_bandwidth) for one in places] == [("nvme", 6e9, 8e9)]
    check_keys([figure], ["rtx4090-workstation"])
    with pytest.raises(InputError, match="unknown hardware figure"):
        load_hardware("h100-8gpu", {figure: "6GB/s"})
    with pytest.raises(InputError, match="unknown key of --over"):
        check_keys([figure], ["h100-8gpu"])


def test_smart_infinity_is_faster_the_faster_its_drives_update() -> None:
    """It takes less time than ZeRO-Infinity on drives whose processors are as fast as their links, and less on faster ones."""
    times = []
    for rate in (8e9, 16e9):
        profile = profile_on(replace(NODE, places=(replace(DRIVES, name="nvme", update_bandwidth=rate),)))
        policies = "zero_infinity:checkpointing=none,offload_param", "smart_infinity:checkpointing=none"
        before, after = (simulate_policy(profile, parse_policy(policy)).iteration_seconds for policy in policies)
        assert after < before
        times.append(after)
    assert times[1] < times[0]


def test_ratel_updates_during_backward() -> None:
    """The first update on the CPU ends before the last backward begins, and parameters are read once in each direction."""
    profile = profile_on(replace(NODE, places=(replace(DRIVES, name="nvme"),)))
    found = simulate_policy(profile, parse_policy("ratel"))
    spans = {(span.task, span.iteration): span for span in found.trace.spans()}
    last = len(profile.units) - 1
    at = found.steady.first
    assert spans[TaskId(Kind.CPU_UPDATE, last), at].end_ns < spans[TaskId(Kind.BACKWARD, 0), at].start_ns
    reads = [task.id.kind for task in found.schedule.tasks if task.lane == "nvme_read"]
    assert {kind: reads.count(kind) for kind in set(reads)} == dict.fromkeys(
        (Kind.READ_STATES, Kind.READ_FORWARD, Kind.READ_BACKWARD), last + 1
    )


def test_ratel_keeps_results_in_its_order_of_kinds() -> None:
    """All blocks keep results of a kind before any keeps one of the next, until the copies fill a share of forward's time."""
    workload = replace(SMALL, units=Units.SUBLAYER)
    profile = profile_on(replace(NODE, places=(replace(DRIVES, name="nvme"),)), workload)
    kinds = "mlp_2", "attention_2", "attention_1", "mlp_1"
    inner = profile.units[1:-1]
    order = [(kind, i) for kind in kinds for i, unit in enumerate(inner) for one in unit.results if one.name == kind]
    assert len(order) == 4 * SMALL.transformer_blocks
    counts = []
    for share in (0, 100, 300, 1000, 10**6):
        plan = parse_policy(f"ratel:swap_percent={share}").plan(profile, judge_for(profile))
        kept = {(one.name, i) for i, unit in enumerate(plan.units[1:-1]) for one in unit.results}
        assert kept == set(order[: len(kept)])
        counts.append(len(kept))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(order))


def test_a_recomputation_leaves_out_the_products_whose_results_it_takes() -> None:
    """It is shorter by their time, and the copies of the results are their size."""
    profile = profile_on(BOTH)
    results = SavedRoute("mlp_2", Route("host")), SavedRoute("attention_1")
    plans = [plan_of(UnitPlan(Activations.RECOMPUTE, results=kept)) for kept in ((), results)]
    before, after = ({task.id: task for task in lower(profile, plan).tasks} for plan in plans)
    again, unit = TaskId(Kind.RECOMPUTE, 1), profile.units[1]
    saved = unit.product_seconds(("mlp_2", "attention_1"))
    assert before[again].duration_ns - after[again].duration_ns == pytest.approx(saved * 1e9, abs=1)
    (size,) = (one.size_bytes for one in unit.results if one.name == "mlp_2")
    assert after[TaskId(Kind.FETCH_ACTIVATIONS, 1, again=1)].duration_ns == round(profile.h2d_seconds(size) * 1e9)
    with pytest.raises(InputError, match="the plan keeps the result 'none', which the profile does not name"):
        lower(profile, plan_of(UnitPlan(Activations.RECOMPUTE, results=(SavedRoute("none"),))))


@pytest.mark.parametrize("policy", ["zero_infinity", "mlp_offload", "ratel", "smart_infinity"])
def test_a_policy_uses_the_place_that_it_is_given(policy: str) -> None:
    """States rest in the place of that name; the host, which is none, is refused."""
    plan = simulate_policy(profile_on(COMPUTING), parse_policy(f"{policy}:place=drives")).plan
    assert {unit.states.home for unit in plan.units} <= {"drives", "gpu"}
    with pytest.raises(InputError, match=f"{policy}:place=host is no place besides the GPU and the host"):
        parse_policy(f"{policy}:place=host")


def test_the_optimist_knows_which_places_are_there() -> None:
    """A plan for a place that the hardware lacks is short of it before anything is simulated, whatever rests there."""
    for inner in (UnitPlan(kept=Route("drives")), UnitPlan(states=Route("drives"))):
        verdicts = [OptimisticJudge(profile_on(node), math.inf)(plan_of(inner)).verdict for node in (NODE, BOTH)]
        assert verdicts == ["drives-out-of-memory", "ok"]


def test_a_place_that_is_missing_is_named() -> None:
    """The error names the place, what the hardware has, and the table to write."""
    with pytest.raises(
        InfeasibleError, match=r"rest in cxl, but .*its places are drives, peer. Give it a table \[places.cxl\]"
    ):
        lower(profile_on(BOTH), plan_of(UnitPlan(states=Route("cxl"))))
    with pytest.raises(InputError, match="peer: beside is 'cpu': give 'host' or 'gpu'"):
        replace(PEER, beside="cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (place_text("gpu", "host", "1GB/s"), "places.gpu.*'gpu' cannot name a place: give up to 31 lower-case letters"),
        (place_text("Attic", "host", "1GB/s"), "places.Attic.*'Attic' cannot name a place: give up to 31 lower-case letters"),
        (place_text("attic", "disk", "1GB/s"), "places.attic.beside: Input should be 'host' or 'gpu'"),
        (place_text("attic", "host", "1GB/s").replace("latency", "latencies"), "did you mean 'places.attic.latency'"),
        ('[nvme]\nmodel = "x"\n', r"drives are a place: write \[places.nvme\]"),
    ],
)
def test_a_place_is_described_in_full(text: str, message: str, tmp_path: Path) -> None:
    """Names that are taken, unknown keys, and the table of earlier versions are errors that tell what to write."""
    with pytest.raises(InputError, match=message):
        load_hardware(file_with(tmp_path / "more.toml", text))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_rows_bound_plans_that_use_places(data: st.DataObject) -> None:
    """The planner's rows are lower bounds of the simulated time and memory, in every memory."""
    profile = profile_on(BOTH, replace(SMALL, transformer_blocks=2, micro_batches=data.draw(st.sampled_from([1, 2]))))
    choices = every_choice(profile)
    assignment = tuple(
        (data.draw(st.integers(0, len(a) - 1)), data.draw(st.integers(0, len(o) - 1)))
        for a, o in zip(choices.activations, choices.others, strict=True)
    )
    plan = replace(plan_of(UnitPlan()), units=choices.units(assignment))
    found, model = simulate_plan(profile, plan), Model(Costs(profile, plan), choices)
    assert found.iteration_seconds >= model.seconds.of(assignment).max() * (1 - 1e-9)
    peaks = {one.memory: one.peak_bytes for one in found.memories}
    assert peaks["gpu"] >= np.max(model.gpu_bytes.of(assignment)) * (1 - 1e-12)
    for place, rows in model.place_bytes.items():
        assert peaks.get(place, 0) >= rows.of(assignment)[0]
    assert peaks["host"] >= model.host_bytes.of(assignment)[0]
