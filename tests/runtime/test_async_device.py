"""A device that runs ahead of which work is done late: training has the same bits, and each wait is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ahead import Launch, Recorded, Recording, Synchronized, Wait, Waited, drawn, train_ahead, waits_for_data
from support.following import follow
from support.measured import is_within
from support.reference import batches, lanes_alive, model_for
from support.small import CLIP_NORM, POLICIES, SMALL, STEPS, plainly, profile_of
from torch.cuda import _sanitizer

from autohete import Trainer
from autohete.errors import AutoHeteError, InputError
from autohete.execution.trace import check_trace
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.plan import Plan, Processor, Route, SavedRoute, UnitPlan
from autohete.policies import parse_policy
from autohete.runtime.ahead import ahead_of
from autohete.runtime.async_device import AsyncDevice
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.ledger import Room
from autohete.runtime.settings import Execution
from autohete.schedule import D2H, Schedule, Task, parse_schedule, validate
from autohete.simulate import judge_for
from autohete.testing.strategies import plans, with_shared_updates
from autohete.train.options import TrainingOptions
from autohete.workload import Precision, Workload

#: All policies, and variants of some.
EVERY_POLICY = [
    *POLICIES,
    "patrickstar:chunk_size=1",
    "stronghold:window=1,checkpointing=full",
    "fsdp2_offload",
    "zero3_offload:pin_memory=off",
    "l2l:paper,host_stash",
    "l2l:paper,update_on=gpu",
    "zero_infinity",
    "mlp_offload:cached=2",
    "twin_flow:ratio=40",
    "deep_optimizer_states",
    "offload_activations",
    "te_offload:layers=1",
    "te_offload:layers=2",
    "streamed_states",
    "rotor",
    "capuchin",
    "zero_offload:delayed_update",
]
SEEDS = 200
#: The version of PyTorch whose sanitizer is used by its private names.
OF_SANITIZER = torch.__version__.startswith("2.13.")
#: Their lanes are fifo, so tasks are issued ahead in all of them.
ISSUED_AHEAD = [
    "zero_offload",
    "stronghold:window=1,checkpointing=full",
    "zero3_offload",
    "zero_infinity",
    "autohete:priority=off",
]


def planned(workload: Workload, policy: str) -> tuple[Plan, Schedule]:
    profile = profile_of(workload)
    plan = parse_policy(policy).plan(profile, judge_for(profile))
    return plan, lower(profile, plan)


def expected(workload: Workload, plan: Plan) -> Any:
    late = frozenset(i for i, unit in enumerate(plan.units) if unit.update.on is Processor.CPU)
    return plainly(workload, late if plan.delayed else frozenset())


def test_training_behind_the_issuing_threads_is_exact() -> None:
    """Where streams lag behind by drawn times, training has the bits of plain PyTorch, and its trace keeps all edges."""
    plan, schedule = planned(SMALL, "autohete:priority=off")
    outcome, trace = train_ahead(SMALL, STEPS, schedule, drawn(0, 0.002))
    assert outcome == expected(SMALL, plan)
    assert check_trace(trace) == []
    assert lanes_alive() == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_every_policy_is_exact_behind_the_issuing_threads(policy: str) -> None:
    """Whatever the seed of the delays, every policy trains to the bits of plain PyTorch; together they take all seeds."""
    first = EVERY_POLICY.index(policy)
    for seed in range(first, SEEDS, len(EVERY_POLICY)):
        workload = replace(SMALL, precision=Precision.BF16 if seed % 2 else Precision.FP32)
        plan, schedule = planned(workload, policy)
        outcome, trace = train_ahead(workload, STEPS, schedule, drawn(seed, 0.003))
        assert outcome == expected(workload, plan), seed
        assert [fault for fault in check_trace(trace) if "more urgent" not in fault] == []


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_every_plan_is_exact_behind_the_issuing_threads(data: st.DataObject) -> None:
    """Whatever a plan moves, recomputes, cuts and updates where: plain PyTorch's bits."""
    workload = replace(
        SMALL,
        transformer_blocks=data.draw(st.sampled_from([1, 2, 3])),
        precision=data.draw(st.sampled_from([Precision.FP32, Precision.BF16])),
        tied_embeddings=data.draw(st.booleans()),
        micro_batches=data.draw(st.sampled_from([1, 1, 2, 3])),
        clip_norm=data.draw(st.sampled_from([None, CLIP_NORM])),
    )
    profile = profile_of(workload)
    plan = data.draw(plans(profile))
    if data.draw(st.booleans()):
        plan = data.draw(with_shared_updates(profile, plan))
    seed = data.draw(st.integers(0, 2**16))
    outcome, trace = train_ahead(workload, STEPS, validate(lower(profile, plan)), drawn(seed, 0.001))
    assert outcome == expected(workload, plan)
    assert [fault for fault in check_trace(trace) if "more urgent" not in fault] == []


@pytest.mark.slow
def test_a_file_is_used_again_only_when_the_copy_from_it_is_done() -> None:
    """Values of one size go by different ways, so that one is written to a file while the copy from another's is late."""
    workload = replace(SMALL, transformer_blocks=1)
    ways = (SavedRoute("norm1", Route("nvme")), SavedRoute("norm2", Route("peer")))
    plan = Plan("by hand", (UnitPlan(), UnitPlan(saved=ways), UnitPlan()))
    schedule = lower(profile_of(workload), plan)
    late = {D2H: 0.05, "peer_read": 0.2}
    outcome, _ = train_ahead(workload, STEPS, schedule, lambda task, iteration: late.get(task.lane, 0.0))
    assert outcome == plainly(workload)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ISSUED_AHEAD)
def test_each_wait_of_a_stream_is_needed(policy: str) -> None:
    """If one wait that carries data is left out and what it waits for is late, the bits are others or the training fails, and
    PyTorch's sanitizer finds the race in what was issued.
    """
    _, schedule = planned(SMALL, policy)
    waits = waits_for_data(schedule)
    assert len(waits) >= 4
    assert [wait for wait in waits if not any(both_notice(schedule, wait, late) for late in (0.2, 2.0, 10.0))] == []


def both_notice(schedule: Schedule, wait: Wait, late_seconds: float) -> bool:
    """Whether the bits and the sanitizer both show that ``wait`` is left out. A busy machine may issue the waiting task only
    after a short pause is over, when nothing is wrong any more: try again with a longer one.
    """
    recording = Recording()
    return notices(schedule, wait, recording, late_seconds) and (not OF_SANITIZER or races(recording) != [])


def notices(schedule: Schedule, wait: Wait, recording: Recording, late_seconds: float) -> bool:
    """Whether training without ``wait``, with its predecessor late in the middle iteration, is not exact."""
    late = schedule.tasks[wait[0]].id

    def pause(task: Task, iteration: int) -> float:
        return late_seconds if (task.id, iteration) == (late, 1) else 0.0

    try:
        outcome, _ = train_ahead(SMALL, STEPS, schedule, pause, without=wait, recording=recording)
    except (AutoHeteError, KeyError):  # a loss that was not computed is missing
        return True
    return outcome != plainly(SMALL)


@pytest.mark.slow
@pytest.mark.skipif(not OF_SANITIZER, reason="uses private names of that version")
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_pytorchs_sanitizer_finds_no_race(policy: str) -> None:
    """What is issued has no race, by PyTorch's own check."""
    _, schedule = planned(SMALL, policy)
    recording = Recording()
    train_ahead(SMALL, STEPS, schedule, lambda task, iteration: 0.01 if iteration == 1 else 0.0, recording=recording)
    assert races(recording) == []


class _Summary(list[Any]):
    @classmethod
    def extract(cls, *_: object, **__: object) -> _Summary:
        return cls()


#: They take most of the time, and are only told.
_NO_TRACEBACKS = SimpleNamespace(StackSummary=_Summary, walk_stack=lambda frame: None)


@pytest.fixture(autouse=True)
def _no_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sanitizer, "traceback", _NO_TRACEBACKS)


def races(recording: Recording) -> list[object]:
    """What PyTorch's sanitizer says about a recording.

    It knows memory by an address. So all bytes are cut into pieces that are used as a whole.
    """
    cuts: set[int] = set()
    for one in recording.issued:
        if isinstance(one, Launch):
            cuts.update(place for part in (*one.reads, *one.writes) for place in part)
    places = sorted(cuts)
    number = {place: i for i, place in enumerate(places)}
    streams = {name: i + 1 for i, name in enumerate(sorted({s.stream for s in recording.issued if isinstance(s, Recorded)}))}

    def pieces(parts: list[tuple[int, int]]) -> set[int]:
        return {piece for begin, end in parts for piece in range(number[begin], number[end])}

    handler, found = _sanitizer.EventHandler(), list[object]()
    for stream in streams.values():
        handler._handle_stream_creation(stream)
    for one in recording.issued:
        match one:
            case Launch():
                writes = pieces(one.writes)
                reads = pieces(one.reads) - writes
                names = {piece: [one.name] for piece in reads | writes}
                found += handler._handle_kernel_launch(streams[one.stream], reads, writes, set(), one.name, names)
            case Recorded():
                handler._handle_event_creation(one.event)
                handler._handle_event_record(one.event, streams[one.stream])
            case Waited():
                handler._handle_event_wait(one.event, streams[one.stream])
            case Synchronized():
                handler._handle_event_synchronization(one.event)
    return found


def test_what_decides_or_needs_room_waits_until_tasks_are_done() -> None:
    """Passes and copies to the host are issued ahead; not fetches, updates by results, or tasks of other lanes."""
    schedule = parse_schedule(
        "autohete-schedule 2\nlane gpu fifo\nlane h2d fifo\nlane d2h fifo\nlane cpu fifo\n"
        "task PF0 h2d 1 after=F0@-1\ntask F0 gpu 1 after=PF0\ntask G0 d2h 1 after=F0\ntask U0 cpu 1 after=G0\n"
        "task H0 h2d 1 after=U0\ntask W0 gpu 1 after=F0\ntask F1 gpu 1 after=H0,W0\n"
    )
    names, ahead = [str(task.id) for task in schedule.tasks], ahead_of(schedule)
    edges = {(names[before], names[after]) for before, after, _ in ahead.edges}
    assert edges == {("PF0", "F0"), ("F0", "G0"), ("H0", "F1"), ("W0", "F1")}
    assert {schedule.lanes[lane].name for lane in ahead.lanes} == {"gpu", "h2d", "d2h"}


def test_what_reads_results_comes_after_all_of_its_lane() -> None:
    """An update is issued once all tasks before it in its lane are done, with what they had to check. Each task ends once."""
    schedule = parse_schedule(
        "autohete-schedule 2\nlane gpu fifo\nlane cpu fifo\ntask B1 gpu 1\ntask B0 gpu 1\ntask W1 gpu 1 after=B1\n"
        "task U0 cpu 1 after=B0\n"
    )
    device, happened = AsyncDevice(), list[str]()

    def action(task: Task, iteration: int) -> Callable[[], None]:
        happened.append(f"{task.id}")
        device.delay(0.02)
        return partial(happened.append, f"{task.id} done")

    with LaneThreads(schedule, action, Execution(device)) as lanes:
        lanes.admit()
    assert happened.index("B0") < happened.index("B1 done"), "issued ahead"
    assert happened.index("B0 done") < happened.index("W1")
    assert sorted(happened) == sorted(f"{task.id}{end}" for task in schedule.tasks for end in ("", " done"))


def test_priorities_are_settled_when_tasks_are_done() -> None:
    """A lane that chooses by priority issues nothing ahead, so that it chooses among those that could begin."""
    schedule = parse_schedule(
        "autohete-schedule 2\nlane gpu fifo\nlane d2h priority\ntask F0 gpu 1\ntask G0 d2h 1 after=F0\ntask F1 gpu 1 after=G0\n"
    )
    assert ahead_of(schedule).edges == {(1, 2, 0)}


def test_a_device_that_runs_ahead_is_not_paced() -> None:
    """Its tasks take as long as they take."""
    with pytest.raises(InputError, match="a device that runs ahead cannot be paced"):
        Execution(AsyncDevice(), paced=True)


def test_issuing_ahead_takes_no_more_memory() -> None:
    """A task is not issued before there is room for it, whatever the others have still to free."""
    schedule = parse_schedule(
        "autohete-schedule 2\nmemory gpu 100\nlane gpu fifo\n"
        "task F0 gpu 1 allocates=activations.0:gpu:60 frees=activations.0:gpu\n"
        "task F1 gpu 1 allocates=activations.1:gpu:60 frees=activations.1:gpu\n"
    )
    room, device, most = Room(schedule, None), AsyncDevice(), [0]

    def action(task: Task, iteration: int) -> None:
        device.delay(0.01)
        most.append(room._memories[0]._ledger.used_bytes)

    with LaneThreads(schedule, action, Execution(device), booking=room) as lanes:
        for _ in range(3):
            lanes.admit()
    assert max(most) == 60
    assert check_trace(lanes.trace()) == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stronghold:window=1", "zero_offload"])
def test_a_trainer_is_exact_behind_the_issuing_threads(policy: str) -> None:
    """Steps, evaluation, saved states, other plans and what they give are as without running ahead, within the memory."""
    hardware = load_hardware("a100-40gb-epyc7713")

    def outcome() -> tuple[list[float], float, list[torch.Tensor]]:
        torch.manual_seed(2)
        with Trainer(model_for(SMALL), policy=policy, hardware=hardware) as trainer:
            losses = [trainer.step(batch) for batch in batches(SMALL, 2)]
            loss = trainer.evaluate(batches(SMALL, 1))
            trainer.load_state_dict(trainer.state_dict())
            losses += [trainer.step(batch) for batch in batches(SMALL, 2)]
            assert is_within(trainer)
            for other in ("resident:checkpointing=full", policy):
                follow(trainer, other)
                losses += [trainer.step(batch) for batch in batches(SMALL, 2)]
            return losses, loss, trainer.parameters()

    *here, parameters = outcome()
    with patch.object(TrainingOptions, "accelerator", AsyncDevice()):
        *there, behind = outcome()
    assert there == here
    assert all(map(torch.equal, behind, parameters))


# --- the device by itself


def test_an_operation_is_computed_when_its_stream_gets_there() -> None:
    """A call returns before its values are there; a read by the host waits for them."""
    device = AsyncDevice()
    with device.stream():
        device.delay(0.05)
        there = device.empty(4, torch.float32).fill_(1.0)
        early = memory_of(device, there).tolist()
        assert there.sum().item() == 4.0
        assert memory_of(device, there).tolist() == [1.0] * 4
    assert all(value != value for value in early), "memory that nothing has been written to is NaN"


def memory_of(device: AsyncDevice, tensor: torch.Tensor) -> torch.Tensor:
    """What is in the memory of a tensor now, whatever the stream has still to do."""
    size = tensor.numel() * tensor.element_size()
    copy = device.blocks[tensor.untyped_storage().data_ptr()].memory[:size].copy()
    return torch.frombuffer(copy, dtype=tensor.dtype)


def test_memory_goes_back_to_its_stream_when_nothing_refers_to_it() -> None:
    """Released memory is overwritten in the order of the stream, and given to its next tensor of that size."""
    device = AsyncDevice()
    with device.stream():
        first = device.empty(4, torch.float32).fill_(1.0)
        place, total = first.data_ptr(), first.sum()
        del first
        again = device.empty(4, torch.float32)
        assert again.data_ptr() == place
        assert total.item() == 4.0, "computed before"
        assert torch.isnan(again).all().item()
        assert device.empty(4, torch.float32).data_ptr() != place


def test_a_failed_operation_is_told_by_its_event() -> None:
    """As on a GPU, an operation that fails is not an error where it is called, but of whoever waits for it."""
    device = AsyncDevice()
    with device.stream():
        table, places = device.empty(8, torch.float32).view(2, 4).fill_(0.0), device.empty(1, torch.int64).fill_(2)
        rows = torch.nn.functional.embedding(places, table)
        assert rows.shape == (1, 4)
        with pytest.raises(RuntimeError, match="an operation on the device has failed: index out of range"):
            device.record().synchronize()


def test_events_order_streams() -> None:
    """The times at which streams reach events have the order of the waits."""
    device, events = AsyncDevice(), []
    with device.stream():
        for seconds in (0.02, 0.0, 0.01):
            device.delay(seconds)
            events.append(device.record())
        device.finish()
    times = [device.ended_ns(event) for event in events]
    assert all(before <= after for before, after in pairwise(times))
    assert times[2] - times[1] >= 9_000_000


def test_random_numbers_are_those_of_the_cpu() -> None:
    """Numbers are drawn when an operation is called, so that they are the same as without the device."""
    device = AsyncDevice()
    torch.manual_seed(0)
    drawn_at_once = [torch.empty(4).bernoulli_(0.5), torch.rand(3)]
    torch.manual_seed(0)
    with device.stream():
        device.delay(0.01)
        later = [device.empty(4, torch.float32).bernoulli_(0.5), torch.rand(3)]
        device.finish()
    assert all(map(torch.equal, later, drawn_at_once))
