"""Memory budgets: every byte is counted, a budget that is used up says who has it, and the simulator knows beforehand."""

from __future__ import annotations

import gc
import platform
import random
import subprocess
import sys
import threading
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from support.measured import MEDIUM, SETTLED, predicted, profile_for
from support.reference import batches, model_for, train_by_schedule
from torch import Tensor

from autohete.analysis.occupancy import occupancy
from autohete.analysis.worst_case import worst_case
from autohete.errors import DeviceOutOfMemoryError, InfeasibleError, InputError, ScheduleError
from autohete.lowering import lower
from autohete.runtime import ledger
from autohete.runtime.batch import Batch
from autohete.runtime.device import AllocatorMemory, EmulatedDevice
from autohete.runtime.ledger import Counting, Ledger, accounting
from autohete.runtime.partition import partition
from autohete.runtime.settings import Execution, Recipe
from autohete.runtime.takeover import Ledgers, Takeover
from autohete.runtime.torch_executor import TorchExecutor
from autohete.runtime.units import Memories
from autohete.schedule import D2H, GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY, Kind, Schedule, parse_schedule
from autohete.sim import SimExecutor
from autohete.simulate import Simulation
from autohete.testing.strategies import plans
from autohete.train.as_executed import as_executed
from autohete.train.machine import matrix_sizes
from autohete.workload import Precision, Workload

#: Device memory is counted as the schedule says.
SCHEDULED = Execution(counting=Counting.SCHEDULED)


def executed(workload: Workload, simulation: Simulation, iterations: int = 4) -> TorchExecutor:
    """The executor after a run within the schedule's own budgets."""
    executor = TorchExecutor(model_for(workload), iter(batches(workload, iterations)))
    executor.run(simulation.schedule, iterations)
    return executor


def with_capacity(simulation: Simulation, memory: str, size: int) -> Simulation:
    """The same with another capacity of one memory."""
    memories = tuple(replace(m, capacity_bytes=size) if m.name == memory else m for m in simulation.schedule.memories)
    return replace(simulation, schedule=replace(simulation.schedule, memories=memories))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.data())
def test_the_ledger_counts_what_lives(sizes: list[int], data: st.DataObject) -> None:
    """Used bytes are those of the storages that live, whatever dies in which order; the peak is their maximum."""
    ledger, alive, used, peak = Ledger("gpu"), list[torch.Tensor](), 0, 0
    for size in sizes:
        tensor = torch.empty(size, dtype=torch.uint8)
        ledger.claim(tensor, "states")
        alive.append(tensor)
        used += size
        peak = max(peak, used)
        del tensor
        if data.draw(st.booleans()):
            gone = alive.pop(data.draw(st.integers(0, len(alive) - 1)))
            used -= len(gone)
            del gone
        assert ledger.used_bytes == used
    assert ledger.peak_bytes == peak


def test_operations_are_counted_with_their_workspace() -> None:
    """A sum of products allocates two results, of which one stays; a view allocates nothing."""
    ledger = Ledger("gpu")
    a = torch.ones(100)
    with accounting(ledger, "F1@0", "activations"):
        kept = (a * 2)[10:] + 1
        view = kept[5:]
    assert ledger.peak_bytes == 4 * (100 + 90)
    assert ledger.holders() == {"activations": 4 * 90}
    del kept
    assert ledger.used_bytes == 4 * 90, "the view keeps the storage alive"
    del view
    assert ledger.used_bytes == 0


def test_backward_is_counted_too() -> None:
    """A budget is held inside of backward, where C++ calls the operations."""
    weight = torch.ones(64, 64, requires_grad=True)
    loss = (torch.ones(64, 64) @ weight).sum()
    with pytest.raises(DeviceOutOfMemoryError, match="B1@0"), accounting(Ledger("gpu", 64 * 64 * 4), "B1@0", "workspace"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_a_full_memory_says_who_has_it() -> None:
    """The error names the task, what it asked for, what is free, and the largest holders first."""
    ledger = Ledger("gpu", 1000)
    states, activations = torch.empty(600, dtype=torch.uint8), torch.empty(300, dtype=torch.uint8)
    ledger.claim(states, "optimizer_states")
    ledger.claim(activations, "activations")
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        ledger.claim(torch.empty(101, dtype=torch.uint8), "gradients", "B3@1")
    assert str(caught.value).startswith(
        "B3@1: gpu memory is full: 101 B more (gradients) are needed, 100 of 1000 B are free; largest: optimizer states 600 B, "
        "activations 300 B"
    )
    assert (caught.value.task, caught.value.size_bytes, caught.value.capacity_bytes) == ("B3@1", 101, 1000)
    assert list(caught.value.holders) == ["optimizer_states", "activations"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", SETTLED)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_the_predicted_peaks_are_the_measured_ones(policy: str, precision: Precision) -> None:
    """Device and host peaks agree to the byte, workspaces included, and the run needs every byte of the prediction."""
    workload = replace(MEDIUM, precision=precision)
    simulation = predicted(workload, policy)
    executor = executed(workload, simulation)
    assert executor.result.device is not None
    assert executor.result.host is not None
    assert executor.result.device.peak_bytes == simulation.gpu.peak_bytes
    assert executor.result.host.peak_bytes == simulation.host.peak_bytes


@pytest.mark.parametrize(
    "policy", ["zero_offload:paper,tile_overlap", "stronghold:window=2", "autohete", "autohete:priority=off"]
)
def test_peaks_that_depend_on_time_are_near(policy: str) -> None:
    """Where it depends on time whether a copy has freed its source, the peaks are within 3 %."""
    simulation = predicted(MEDIUM, policy)
    executor = executed(MEDIUM, simulation)
    assert executor.result.device is not None
    assert executor.result.device.peak_bytes == pytest.approx(simulation.gpu.peak_bytes, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [GPU_MEMORY, HOST_MEMORY])
@pytest.mark.parametrize("policy", ["resident", "zero_offload", "stronghold:window=1"])
def test_one_byte_less_fails(policy: str, memory: str) -> None:
    """The predicted peak is enough; with a byte less the schedule is refused, and a run stops and leaves no thread behind."""
    simulation = predicted(MEDIUM, policy)
    peak = (simulation.gpu if memory == GPU_MEMORY else simulation.host).peak_bytes
    if not peak:
        pytest.skip("this policy keeps nothing there")
    executed(MEDIUM, with_capacity(simulation, memory, peak))
    less = with_capacity(simulation, memory, peak - 1)
    with pytest.raises(InfeasibleError, match=f"needs {peak} B .* of {memory} memory .*, there are {peak - 1} B") as caught:
        executed(MEDIUM, less)
    assert (caught.value.constraint, caught.value.needed_bytes) == (memory, peak)
    with pytest.raises(DeviceOutOfMemoryError, match=f"{memory} memory is full"):
        train_by_schedule(MEDIUM, 4, less.schedule)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("autohete-")]


def test_a_schedule_that_may_need_more_is_refused() -> None:
    """Though its trace fits, a schedule whose late copies do not is refused; a memory without limit, too."""
    simulation = predicted(MEDIUM, "zero_offload:paper,tile_overlap")
    at_once = tuple(task._replace(duration_ns=0) if task.lane == D2H else task for task in simulation.schedule.tasks)
    trace = SimExecutor().run(replace(simulation.schedule, tasks=at_once), 4)
    tight = with_capacity(simulation, GPU_MEMORY, occupancy(trace, GPU_MEMORY).peak_bytes)
    worst = worst_case(tight.schedule, GPU_MEMORY).peak_bytes
    assert worst is not None
    assert worst > occupancy(trace, GPU_MEMORY).peak_bytes
    with pytest.raises(InfeasibleError, match="if copies are late the schedule needs") as caught:
        executed(MEDIUM, tight)
    assert caught.value.needed_bytes == worst
    executed(MEDIUM, with_capacity(simulation, GPU_MEMORY, worst))
    lagging = "task F0 gpu 1 allocates=other.0:gpu:1\ntask AO0 d2h 1 after=F0 frees=other.0:gpu\n"
    text = f"autohete-schedule 2\nlane gpu fifo\nlane d2h fifo\nmemory gpu 9\nmemory host 9\n{lagging}"
    executor = TorchExecutor(model_for(MEDIUM), iter(batches(MEDIUM, 1)))
    with pytest.raises(ScheduleError, match="AO0 frees gpu memory, but no later allocation waits for it"):
        executor.run(parse_schedule(text), 1)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.sampled_from([*SETTLED, "autohete", "autohete:priority=off"]), st.floats(0.1, 1.0))
def test_a_lowered_budget_trains_or_raises_in_time(policy: str, share: float) -> None:
    """Were a schedule's sizes wrong, a run would end, or raise and give the model back: as it had become, no half a tensor."""
    simulation = predicted(MEDIUM, policy)
    capacity = max(1, int(share * simulation.gpu.peak_bytes))
    model = model_for(MEDIUM)
    executor = TorchExecutor(model, iter(batches(MEDIUM, 3)))
    try:
        with patch("autohete.runtime.torch_executor._check_fits"):
            executor.run(with_capacity(simulation, GPU_MEMORY, capacity).schedule, 3)
        assert executor.result.device is not None
        assert executor.result.device.peak_bytes <= capacity
    except DeviceOutOfMemoryError as error:
        event(f"full at {error.task[:1]}")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert torch.isfinite(model(batches(MEDIUM, 1)[0][0])).all()


def scheduled(workload: Workload, simulation: Simulation, iterations: int = 4) -> TorchExecutor:
    """The executor after a run that was counted by the schedule's sizes."""
    data = iter(batches(workload, iterations))
    executor = TorchExecutor(model_for(workload), data, None, SCHEDULED)
    executor.run(simulation.schedule, iterations)
    return executor


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*SETTLED, "zero_offload:paper,tile_overlap", "autohete"])
@pytest.mark.parametrize("tied", [True, False])
def test_counting_by_the_schedule_agrees(policy: str, tied: bool) -> None:
    """Counted by the schedule's sizes the first iterations have no byte more, and then no operation is looked at."""
    workload = replace(MEDIUM, tied_embeddings=tied)
    simulation, looked = predicted(workload, policy), set[str]()

    class Looking(ledger.Accounting):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            looked.add(self._task.partition("@")[2])
            return super().__torch_dispatch__(func, types, args, kwargs)

    with patch.object(ledger, "Accounting", Looking):
        executor = scheduled(workload, simulation)
    assert executor.result.counting is Counting.SCHEDULED
    assert looked - {""} == {str(iteration) for iteration in range(ledger.CHECKED_ITERATIONS)}  # and before the first
    assert executor.result.device is not None
    if policy in SETTLED:
        assert executor.result.device.peak_bytes == simulation.gpu.peak_bytes
    assert executor.result.device.used_bytes == 0, "a closed training holds nothing"


@pytest.mark.parametrize(
    "policy", ["stronghold:window=2", "zero_offload:paper,tile_overlap", "autohete", "autohete:priority=off"]
)
def test_the_counted_peak_is_that_of_the_trace(policy: str) -> None:
    """Counted by the schedule's sizes, the peak is the one that the order of the trace gives, to the byte."""
    simulation = predicted(MEDIUM, policy)
    executor = TorchExecutor(model_for(MEDIUM), iter(batches(MEDIUM, 6)), None, SCHEDULED)
    trace = executor.run(simulation.schedule, 6)
    assert executor.result.counting is Counting.SCHEDULED
    assert executor.result.device is not None
    assert executor.result.device.peak_bytes == occupancy(trace, GPU_MEMORY).peak_bytes


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data())
def test_the_counted_peak_of_any_plan_is_that_of_its_trace(data: st.DataObject) -> None:
    """Whatever a plan moves and recomputes, and whenever its lanes happen to run."""
    profile = profile_for(MEDIUM)
    plan = as_executed(data.draw(plans(profile)), profile)
    schedule = lower(profile, plan)
    assume(all(worst_case(schedule, memory.name).peak_bytes is not None for memory in schedule.memories))
    executor = TorchExecutor(model_for(MEDIUM), iter(batches(MEDIUM, 3)), None, SCHEDULED)
    trace = executor.run(schedule, 3)
    assert executor.result.counting is Counting.SCHEDULED
    assert executor.result.device is not None
    assert executor.result.device.peak_bytes == occupancy(trace, GPU_MEMORY).peak_bytes


def test_the_counted_peak_is_that_of_the_trace_whatever_the_clock() -> None:
    """The trace has the order in which the tasks began and ended, even if the clock ticks only every 10 ms and falls behind."""
    jumps = random.Random(0)
    simulation = predicted(MEDIUM, "autohete:priority=off")
    executor = TorchExecutor(model_for(MEDIUM), iter(batches(MEDIUM, 3)), None, SCHEDULED)
    with patch("autohete.runtime.history.time") as clock:
        clock.perf_counter_ns = lambda: time.perf_counter_ns() // 10**7 * 10**7 - jumps.randrange(3) * 10**7
        trace = executor.run(simulation.schedule, 3)
    assert executor.result.device is not None
    assert executor.result.device.peak_bytes == occupancy(trace, GPU_MEMORY).peak_bytes
    assert (trace.end_ns > trace.start_ns).all()
    assert len(np.unique([trace.start_ns, trace.end_ns])) == 2 * trace.start_ns.size


def test_a_task_that_begins_while_both_counts_are_read_is_no_excess() -> None:
    """The schedule's count is read first; what another lane allocates before the storages are read is not more than it says."""
    schedule = predicted(MEDIUM, "resident").schedule
    begins = next(task for task in schedule.tasks if any(buffer.memory == GPU_MEMORY for buffer in task.allocates))
    device = Ledger(GPU_MEMORY)
    count = ledger.DeviceCount(device, schedule, Counting.SCHEDULED)
    readings = 0

    class Torn(Ledger):
        """Whenever it is read, except for the sixth time, another lane has just begun a task that is over right after."""

        @property
        def used_bytes(self) -> int:
            nonlocal readings
            readings += 1
            if readings == 6:
                return super().used_bytes
            count.begin(begins, readings)
            tensor = torch.empty(device.used_bytes, dtype=torch.uint8)
            self.enter(tensor, "all that it may")
            found = super().used_bytes
            count.close()
            return found

    count.storages = Torn(GPU_MEMORY)
    count.compare("F0@0")
    assert (readings, count.excess) == (6, None)


def test_a_storage_may_die_while_its_group_is_forgotten() -> None:
    """It is then subtracted once."""
    device = Ledger(GPU_MEMORY)
    kept, other = device.reserve(8, "kept"), device.reserve(16, "other")
    died = device._entries[id(kept)]
    device.forget_group("kept", ())
    device._dead.append(died)  # reported between the group's last reading and its end
    assert device.used_bytes == 16
    del other
    assert device.used_bytes == 0


def test_sizes_that_are_too_small_are_found() -> None:
    """If a pass takes more than the schedule says, every storage is counted from then on, and that is told."""
    simulation = predicted(MEDIUM, "resident")
    tasks = tuple(
        task._replace(
            allocates=tuple(
                b._replace(size_bytes=b.size_bytes - 4096) if str(b.id) == "activations.2:gpu" else b for b in task.allocates
            ),
        )
        for task in simulation.schedule.tasks
    )
    executor = scheduled(MEDIUM, replace(simulation, schedule=replace(simulation.schedule, tasks=tasks)))
    assert executor.result.counting is Counting.EXACT
    assert executor.result.device is not None
    assert executor.result.device.peak_bytes == simulation.gpu.peak_bytes


@pytest.mark.parametrize("policy", ["resident", "zero_offload", "stronghold:window=1"])
def test_one_byte_less_fails_before_the_task_acts(policy: str) -> None:
    """By the schedule's sizes, too, the predicted peak is enough; with a byte less its task is refused."""
    simulation = predicted(MEDIUM, policy)
    peak = simulation.gpu.peak_bytes
    scheduled(MEDIUM, with_capacity(simulation, GPU_MEMORY, peak))
    with (
        patch("autohete.runtime.torch_executor._check_fits"),  # which refuses it before it runs
        pytest.raises(DeviceOutOfMemoryError, match="gpu memory is full") as caught,
    ):
        scheduled(MEDIUM, with_capacity(simulation, GPU_MEMORY, peak - 1))
    assert caught.value.task.partition("@")[0] in {str(task.id) for task in simulation.schedule.tasks}


def training_of(simulation: Simulation, ledger: Ledger, counting: Counting, *, poison: bool = False) -> Takeover:
    """The reference model's training, nothing done yet."""
    return Takeover(
        partition(model_for(MEDIUM)),
        simulation.schedule,
        Recipe(),
        Ledgers(device=ledger, counting=counting),
        poison=poison,
    )


def run(training: Takeover, schedule: Schedule, first: int, steps: int) -> None:
    """Some iterations, one task after another."""
    for iteration, pair in enumerate(batches(MEDIUM, first + steps)[first:], first):
        training.passes.give(iteration, Batch(*pair))
        for task in schedule.tasks:
            training.actions.perform(task, iteration)


@pytest.mark.slow
@pytest.mark.parametrize("counting", list(Counting))
@pytest.mark.parametrize("policy", ["resident", "stronghold:window=1", "patrickstar:chunk_size=1"])
def test_evaluation_is_within_the_budget(policy: str, counting: Counting) -> None:
    """A batch too large to evaluate is refused with what to do; one that fits is counted; neither changes the training."""
    simulation = predicted(MEDIUM, policy)
    parameters = []
    for evaluates in (False, True):
        ledger = Ledger(GPU_MEMORY, simulation.gpu.peak_bytes)
        training = training_of(simulation, ledger, counting)
        try:
            torch.manual_seed(2)
            run(training, simulation.schedule, 0, 3)
            if evaluates:
                before, values = ledger.used_bytes, training.parameters()
                ids, targets = batches(MEDIUM, 1)[0]
                expected = training.evaluation.loss(Batch(ids, targets))
                assert ledger.used_bytes == before
                many = ids.repeat(512, 1)
                with pytest.raises(DeviceOutOfMemoryError, match="Evaluate smaller batches; training can continue") as caught:
                    training.evaluation.loss(Batch(many, many))
                assert str(caught.value).startswith(f"a batch of {512 * len(ids)} x {ids.shape[1]} tokens is too large")
                del caught
                gc.collect()
                assert ledger.used_bytes == before
                assert all(torch.equal(a, b) for a, b in zip(training.parameters(), values, strict=True))
                assert training.evaluation.loss(Batch(ids, targets)) == expected
                ledger.reset_peak()
                training.evaluation.loss(Batch(ids, targets))
                assert ledger.peak_bytes > before
            run(training, simulation.schedule, 3, 2)
            parameters.append(training.parameters())
        finally:
            training.close()
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


def test_gradients_stay_where_autograd_makes_them() -> None:
    """A block keeps the tensors that backward has made; of a tensor that is a part of a larger one, it keeps that part."""
    simulation = predicted(MEDIUM, "resident")
    training = training_of(simulation, Ledger(GPU_MEMORY), Counting.EXACT)
    try:
        states = training.states
        states.make_gradients(2)
        shape = states.units[2].layout.shapes[0]
        whole, part = torch.ones(shape), torch.ones(2, *shape)[1]
        states.take_gradient(2, 0, whole)
        assert states.units[2].device.gradients[0] is whole
        states.take_gradient(2, 0, part)
        assert torch.equal(whole, torch.full(shape, 2.0)), "another gradient of the same matrix is added"
        states.make_gradients(2)
        states.take_gradient(2, 0, part)
        kept = states.units[2].device.gradients[0]
        assert kept is not None
        assert kept.untyped_storage().nbytes() == part.nbytes
        with pytest.raises(InputError, match="needs dense gradients"):
            states.take_gradient(2, 1, torch.eye(4).to_sparse())
    finally:
        training.close()


def test_what_the_device_still_uses_is_kept_until_its_work_is_done() -> None:
    """On a device that runs ahead, released parameters live until the task that releases them is done, not only issued."""
    simulation = predicted(MEDIUM, "stronghold:window=1")
    training = training_of(simulation, Ledger(GPU_MEMORY), Counting.EXACT, poison=True)
    kept: list[weakref.ref[object]] = []
    states, released = training.states, 0
    release = states.release

    def noting(block: int) -> None:
        flat = states.units[block].device.parameters
        if flat is not None:
            kept.append(weakref.ref(flat.untyped_storage()))
        release(block)

    batch = Batch(*batches(MEDIUM, 1)[0])
    with patch.object(EmulatedDevice, "runs_ahead", True), patch.object(states, "release", noting):
        training.passes.give(0, batch)
        for task in simulation.schedule.tasks:
            finish = training.actions.act(task, 0)
            assert finish is not None
            assert all(reference() is not None for reference in kept)
            slots = 0 if states._slots is None else len(states._slots)
            finish()
            if states._slots is None:
                assert all(reference() is None for reference in kept)
            else:
                assert len(states._slots) == slots + len(kept)
            released += len(kept)
            kept.clear()
        assert released
        waited = Mock()
        with (
            patch.object(EmulatedDevice, "finish", waited),
            patch.object(training.actions, "_actions", dict.fromkeys(Kind, lambda block: 1 / 0)),
            pytest.raises(ZeroDivisionError),
        ):
            training.actions.perform(simulation.schedule.tasks[0], 1)
        waited.assert_called_once()  # an action that fails waits, too
    training.close()


def test_a_gpus_budget_is_held_by_its_allocator() -> None:
    """PyTorch is limited to the budget and some fragments while training, and what it refuses is our error with both counts."""
    simulation = predicted(MEDIUM, "resident")
    gib = 2**30
    memory = AllocatorMemory(torch.device("cpu"), 4 * gib)
    cuda = {
        "memory_allocated": 3 * gib,
        "memory_reserved": 4 * gib,
        "empty_cache": None,
        "get_device_properties": SimpleNamespace(total_memory=16 * gib),
        "get_per_process_memory_fraction": 0.9,
    }
    with ExitStack() as patches:
        for name, value in cuda.items():
            patches.enter_context(patch.object(torch.cuda, name, return_value=value))
        limit = patches.enter_context(patch.object(torch.cuda, "set_per_process_memory_fraction"))
        model = model_for(MEDIUM)
        there = sum(parameter.nbytes for parameter in model.parameters())
        training = Takeover(partition(model), simulation.schedule, Recipe(), Ledgers(device=memory))
        share = limit.call_args.args[0]
        assert share * 16 * gib == pytest.approx(3 * gib - there + 1.08 * 4 * gib + (64 + 34) * 2**20)
        refused = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
        with (
            patch.object(training.actions, "_actions", dict.fromkeys(Kind, Mock(side_effect=refused))),
            pytest.raises(
                DeviceOutOfMemoryError,
                match=r"F0@0: gpu memory is full: 3\.0 GiB are allocated, 4\.0 GiB reserved, the budget is 4\.0 GiB",
            ) as caught,
        ):
            training.actions.perform(simulation.schedule.tasks[0], 0)
        assert caught.value.holders == {"allocated": 3 * gib, "reserved": 4 * gib}
        training.close()
        assert limit.call_args.args[0] == 0.9, "the limit that the user has set"


def test_pinned_memory_is_counted_as_pytorch_pins_it() -> None:
    """Where host memory is pinned, a tensor takes the next power of two, of its own limit, too."""
    ledger, pinned = Ledger(HOST_MEMORY), Ledger(PINNED_MEMORY, 4000)
    memories = Memories(EmulatedDevice(), None, ledger, AllocatorMemory(torch.device("cpu")), pinned)
    kept = [memories.on_host(300, torch.float32, "parameters")]
    assert ledger.used_bytes == 1200
    with patch.object(Tensor, "is_pinned", return_value=True):
        kept.append(memories.on_host(300, torch.float32, "parameters"))
        assert (ledger.used_bytes, pinned.used_bytes) == (1200 + 2048, 2048)
        with pytest.raises(DeviceOutOfMemoryError, match="pinned memory is full: 2048 B more"):
            memories.on_host(300, torch.float32, "parameters")
    kept.clear()
    assert (ledger.used_bytes, pinned.used_bytes) == (0, 0)


@pytest.mark.slow
def test_memory_is_the_same_after_many_steps() -> None:
    """What lives on the device after 3 and after 30 iterations is the same: nothing leaks."""
    used = []
    for iterations in (3, 30):
        executor = executed(MEDIUM, predicted(MEDIUM, "stronghold:window=1"), iterations)
        assert executor.result.device is not None
        used.append((executor.result.device.peak_bytes, executor.result.device.used_bytes))
    assert used[0] == used[1]
    assert used[0][1] == 0, "a closed training holds nothing"


@pytest.mark.parametrize(
    ("transformer_blocks", "message"),
    [(2, "F4 is of block 4, but the model has 4 blocks"), (6, "no forward of block 6, but the model has 8 blocks")],
)
def test_a_schedule_for_another_model_is_refused(transformer_blocks: int, message: str) -> None:
    """A schedule with more or fewer blocks than the model is refused before anything is taken over."""
    simulation = predicted(MEDIUM, "resident")
    workload = replace(MEDIUM, transformer_blocks=transformer_blocks)
    other = model_for(workload)
    with pytest.raises(ScheduleError, match=message):
        TorchExecutor(other, iter(batches(MEDIUM, 1))).run(simulation.schedule, 1)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model_for(workload).parameters(), strict=True))


#: Prints the bytes by which this process grew for a tensor of 16 MiB that a thread made and freed.
_MADE_AND_FREED = """
import mmap, threading, torch
from autohete.runtime.ledger import keep_freed_memory

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE

torch.set_num_threads(1)
torch.ones(2**10)
keep_freed_memory()
before = resident_bytes()
thread = threading.Thread(target=lambda: torch.ones(2**22))
thread.start()
thread.join()
print(resident_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only GNU's malloc is told to keep memory")
def test_freed_memory_is_kept() -> None:
    """What a tensor freed in a thread stays with the process, for the next tensor."""
    kept = int(subprocess.run([sys.executable, "-c", _MADE_AND_FREED], check=True, capture_output=True).stdout)
    assert kept >= 15 * 2**20  # without, the tensor's pages go back to the system at once


#: Prints how many separate memories of malloc there are before and after a step of a Trainer, and after measuring.
_ARENAS = """
import ctypes, sys, tempfile
import torch
from autohete import Trainer
from autohete.hardware import load_hardware
from autohete.train.gpt import GPT
from autohete.train.measured import measured_profile_on
from autohete.workload import Precision, Workload

def arenas():
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile("r") as file:
        stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        return file.read().count("<heap nr=")

torch.set_num_threads(1)
found = [arenas()]
shape = Workload("small", 16, 1, 2, vocabulary_size=16, sequence_length=4, batch_size=2, precision=Precision.FP32)
model, ids = GPT(shape), torch.zeros(2, 4, dtype=torch.int64)
hardware = load_hardware("v100-32gb-dgx2")
if sys.argv[1] == "measured":
    measured_profile_on(hardware, model, (ids, ids))
else:
    with Trainer(model, policy="zero_offload", hardware=hardware) as trainer:
        trainer.step((ids, ids))
print(*found, arenas())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only GNU's malloc is told to keep memory")
@pytest.mark.parametrize("way", ["trained", "measured"])
def test_no_thread_gets_memory_that_is_given_back(way: str) -> None:
    """Training and measuring use the memory of the main thread only: that of others goes back to the system page by page."""
    done = subprocess.run([sys.executable, "-c", _ARENAS, way], check=True, capture_output=True, text=True)
    before, after = done.stdout.split()
    assert before == after


def test_a_gpu_is_measured_with_products_that_fill_it() -> None:
    """The products that are measured grow with the memory there is; on the CPU that stands for a GPU there is the small one."""
    assert matrix_sizes(torch.device("cpu"), torch.float32) == [256]
    for gib, expected in ((0.1, [1024]), (1, [1024, 2048]), (80, [1024, 2048, 4096, 8192])):
        with patch.object(torch.cuda, "mem_get_info", return_value=(int(gib * 2**30), 2**40)):
            assert matrix_sizes(torch.device("cuda"), torch.float32) == expected
