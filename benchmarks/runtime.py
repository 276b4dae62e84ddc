"""How much does the runtime cost, how well does it overlap, how fast is the CPU's optimizer step?

Command: ``make benchmark-runtime``. Prints tables; ``benchmarks/README.md`` has the results. Since machines are noisy, variants
that are compared run alternately in one process, and each figure is a median. One thread per lane, unless stated otherwise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python benchmarks/runtime.py` from anywhere

from autohete.analysis.bounds import period_bounds
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.report.tables import console, table
from autohete.runtime.batch import Batch
from autohete.runtime.ledger import Counting
from autohete.runtime.losses import next_token_loss
from autohete.runtime.optimizer import UnitStates
from autohete.runtime.partition import partition
from autohete.runtime.session import Session
from autohete.runtime.settings import Execution, Recipe
from autohete.runtime.torch_executor import TorchExecutor
from autohete.runtime.update_rules import UpdateSettings, default_optimizer
from autohete.schedule import GPU, Kind, TaskId
from autohete.simulate import judge_for, safety, simulate_plan
from autohete.train.as_executed import as_executed, everything_resident
from autohete.train.gpt import GPT, GPTBlock
from autohete.train.machine import forget_cache
from autohete.train.measured import measured_profile_on
from autohete.workload import Precision, Workload

#: Blocks take 20 ms forward and 30 ms backward here.
MODEL = Workload("medium", 256, 6, 4, vocabulary_size=512, sequence_length=128, batch_size=4, precision=Precision.FP32)
ROUNDS, STEPS = 15, 3


def batch(workload: Workload) -> tuple[Tensor, Tensor]:
    """Return random tokens, the same every time."""
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch_size, workload.sequence_length)
    ids = torch.randint(0, workload.vocabulary_size, shape, generator=generator)
    return ids, ids


def plain_loop(workload: Workload, ids: Tensor, targets: Tensor) -> Callable[[], None]:
    """Run some steps of ordinary training."""
    torch.manual_seed(0)
    model = GPT(workload)
    optimizer = default_optimizer(model.parameters())

    def run() -> None:
        for _ in range(STEPS):
            loss = next_token_loss(model(ids), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    return run


def executor_loop(
    undo: ExitStack, workload: Workload, ids: Tensor, targets: Tensor, counting: Counting | None, threads: int
) -> Callable[[], None]:
    """Run the same steps as a schedule in lane threads, with device memory counted in one way or not at all."""
    torch.manual_seed(0)
    model = GPT(workload)
    profile = measured_profile_on(load_hardware("a100-40gb-epyc7713"), model, (ids, targets))
    schedule = lower(profile, everything_resident(profile))
    counted = Counting.EXACT if counting is None else counting
    execution = Execution(budget=counting is not None, counting=counted, threads={GPU: threads}, history=8)
    session = undo.enter_context(Session(partition(model), schedule, Recipe(), execution))
    last = TaskId(Kind.GPU_UPDATE, 0)

    def run() -> None:
        for _ in range(STEPS):
            iteration = session.admit([Batch(ids, targets)])
        session.lanes.wait(last, iteration)

    return run


def against_a_plain_loop(hidden: int, blocks: int, threads: int) -> None:
    """Compare the executor under ``resident`` with ordinary PyTorch with the same number of threads."""
    workload = replace(MODEL, hidden_size=hidden, transformer_blocks=blocks)
    ids, targets = batch(workload)
    torch.set_num_threads(threads)
    with ExitStack() as undo:
        ways = {
            "plain PyTorch loop": plain_loop(workload, ids, targets),
            "executor": executor_loop(undo, workload, ids, targets, None, threads),
            "executor, memory counted by the schedule": executor_loop(
                undo, workload, ids, targets, Counting.SCHEDULED, threads
            ),
            "executor, every storage counted": executor_loop(undo, workload, ids, targets, Counting.EXACT, threads),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        work: dict[str, list[float]] = {name: [] for name in ways}  # of all threads: what other programs take does not count
        for number in range(ROUNDS + 1):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                begin, worked = time.perf_counter(), time.process_time()
                ways[name]()
                if number:
                    times[name].append((time.perf_counter() - begin) / STEPS)
                    work[name].append((time.process_time() - worked) / STEPS)
    goals = {"executor": "at most 3 %", "executor, memory counted by the schedule": "at most 8 %"}
    title = f"resident, native, {blocks} blocks of width {hidden}, {threads} threads"
    shown = table(title, ["", "median step", "slower: median", "CPU time", "more: median", "goal"])
    for name in ways:
        row = []
        for measured in (times, work):
            more = median(a / b - 1 for a, b in zip(measured[name], measured["plain PyTorch loop"], strict=True))
            row += [f"{1e3 * median(measured[name]):.1f} ms", f"{100 * more:+.1f} %"]
        shown.add_row(name, *row, goals.get(name, ""))
    console().print(shown)
    torch.set_num_threads(1)


def overlap() -> None:
    """Compare the measured period of paced ``autohete`` with the lower bound of its schedule."""
    small = replace(MODEL, hidden_size=64, sequence_length=16, batch_size=2)
    data = batch(small)
    slow = {"links.h2d.bandwidth": "6GB/s", "links.d2h.bandwidth": "6GB/s"}
    node = load_hardware("a100-40gb-epyc7713", slow)
    shown = table(
        "autohete, paced: period against the schedule's lower bound",
        ["memory and plan", "bound", "simulated", "measured", "above", "goal"],
    )
    profile = measured_profile_on(node, GPT(small), data)
    # Passes slowed down to where this CPU keeps up, copies and updates to where they matter.
    blocks = tuple(
        replace(b, forward_seconds=0.012, backward_seconds=0.024, gpu_update_seconds=0.002, cpu_update_seconds=0.03)
        for b in profile.units
    )
    bandwidth = profile.units[1].parameters * 4 / 0.012
    links = [replace(link, bandwidth=bandwidth, duplex_bandwidth=bandwidth) for link in (node.h2d, node.d2h)]
    profile = replace(profile, units=blocks, hardware=replace(node, h2d=links[0], d2h=links[1]))
    resident = simulate_plan(profile, everything_resident(profile)).gpu.peak_bytes
    for share in (1.2, 0.6, 0.4, 0.3):
        gpu = replace(profile.hardware.gpu, memory_bytes=round(share * resident) + profile.hardware.gpu.reserved_bytes)
        tight = replace(profile, hardware=replace(profile.hardware, gpu=gpu))
        plan = as_executed(parse_policy("autohete").plan(tight, judge_for(tight)), tight)
        predicted = safety(simulate_plan(tight, plan)).safe
        assert predicted is not None
        schedule = predicted.schedule
        bound = period_bounds(schedule).seconds
        executor = TorchExecutor(GPT(small), iter([data] * 8), None, Execution(paced=True))
        measured = executor.run(schedule, 8).steady().period_seconds
        shown.add_row(
            f"{share:.0%} of resident, {plan.counts}",
            f"{1e3 * bound:.1f} ms",
            f"{1e3 * predicted.iteration_seconds:.1f} ms",
            f"{1e3 * measured:.1f} ms",
            f"{100 * (measured / bound - 1):+.2f} %",
            "within 5 %",
        )
    console().print(shown)


def cpu_update() -> None:
    """Measure one optimizer step over a block's parameters, alternating between variants, against the memory bandwidth.

    Sizes are those of a transformer block. With powers of two only, the distances between the moments would cause cache
    conflicts, which alone make the step half as long again.
    """
    sizes = [parameter.numel() for parameter in GPTBlock(1536, 16, 0.0).parameters()]
    count = sum(sizes)
    ways: dict[str, tuple[Callable[[], object], int]] = {}
    full = torch.randn(count)
    states = UnitStates(UpdateSettings(), full, sizes)
    gradients = torch.randn(count)
    pieces = torch.split(gradients, sizes)
    ways["this runtime, fp32"] = (lambda: states.update(full, pieces, states.scratch()), 28)
    half, half_gradients = torch.randn(count).bfloat16(), torch.randn(count).bfloat16()
    half_states = UnitStates(UpdateSettings(), half, sizes)
    ways["this runtime, bf16 in and out"] = (
        lambda: half_states.update(half, torch.split(half_gradients, sizes), half_states.scratch()),
        28,
    )
    parameters = [nn.Parameter(piece.clone()) for piece in torch.split(full, sizes)]
    for parameter, gradient in zip(parameters, torch.split(gradients, sizes), strict=True):
        parameter.grad = gradient.clone()
    reference = default_optimizer(parameters)
    ways["torch.optim.AdamW(fused=True), fp32"] = (reference.step, 28)
    masters = [nn.Parameter(piece.clone()) for piece in torch.split(full, sizes)]
    cast = default_optimizer(masters)

    def with_separate_casts() -> None:
        for master, gradient in zip(masters, torch.split(half_gradients, sizes), strict=True):
            master.grad = gradient.float()
        cast.step()
        for master, parameter in zip(masters, torch.split(half, sizes), strict=True):
            parameter.copy_(master.detach())

    ways["torch.optim.AdamW, casts of whole tensors"] = (with_separate_casts, 28)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

        theirs = [nn.Parameter(piece.clone()) for piece in torch.split(full, sizes)]
        for parameter, gradient in zip(theirs, torch.split(gradients, sizes), strict=True):
            parameter.grad = gradient.clone()
        ways["DeepSpeedCPUAdam, fp32"] = (DeepSpeedCPUAdam(theirs, lr=1e-3, weight_decay=0.1).step, 28)
    except Exception as error:  # not installed, or its kernel cannot be compiled here
        console().print(f"DeepSpeedCPUAdam left out: {type(error).__name__}: {str(error)[:100]}", soft_wrap=True)
    source, target = torch.zeros(count), torch.zeros(count)
    ways["copy (memory bandwidth)"] = (lambda: target.copy_(source), 8)
    for threads in (1, torch.get_num_threads() if torch.get_num_threads() > 1 else 2):
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name, (run, _) in ways.items():
                forget_cache()
                begin = time.perf_counter()
                run()
                if number:
                    times[name].append(time.perf_counter() - begin)
        shown = table(f"optimizer step, {count / 1e6:.0f} M parameters, {threads} threads", ["", "median", "GB/s"])
        for name, (_, traffic) in ways.items():
            took = median(times[name])
            shown.add_row(name, f"{1e3 * took:.1f} ms", f"{count * traffic / took / 1e9:.1f}")
        console().print(shown)
    torch.set_num_threads(1)


def main() -> None:
    """Run all benchmarks, in about two minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for hidden, blocks in ((256, 6), (128, 8)):
        for count in sorted({1, threads}):
            against_a_plain_loop(hidden, blocks, count)
    overlap()
    torch.set_num_threads(threads)
    cpu_update()


if __name__ == "__main__":
    main()
