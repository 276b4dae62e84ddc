"""Faults on one of several ranks: each rank trains until a task of one of them fails, checks what is left, and goes on."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autohete.errors import AutoHeteError
from autohete.schedule import Kind, Schedule
from autohete.train.trainer import Trainer
from autohete.workload import Precision, Workload
from support.faults import Fault, State, Undisturbed, same_block, state_of
from support.rank_trainings import SHORT, batches_of, joined
from support.reference import model_for
from support.said import said
from support.small import CLIP_NORM, STEPS, profile_of

RANKS = 2
#: An error has to reach all ranks within 2 s on an idle machine; tests run on busy ones.
PATIENCE_SECONDS = 30.0
#: Between them they have tasks of every kind that several ranks can execute.
MIXES: dict[str, tuple[str, Workload]] = {
    "resident": ("resident:checkpointing=full", replace(SHORT, clip_norm=CLIP_NORM)),
    "stage 1": ("resident:zero_stage=1", replace(SHORT, micro_batches=2, clip_norm=CLIP_NORM)),
    "offload": ("zero_offload", replace(SHORT, micro_batches=2, precision=Precision.BF16)),
    "two sides": ("twin_flow:ratio=50", SHORT),
    "stage 3": ("zero3_offload", replace(SHORT, clip_norm=CLIP_NORM)),
    "fsdp2": ("fsdp2_offload", SHORT),
}


def kinds_of(schedule: Schedule) -> list[Kind]:
    """The kinds of task in a schedule."""
    found = {task.id.kind for task in schedule.tasks}
    return [kind for kind in Kind if kind in found]


def faults_of(schedule: Schedule, turn: int, wide: bool) -> Iterator[tuple[int, str, str]]:
    """Rank, instance and way of the faults to try: of each kind one in turn, or if ``wide`` its first, a middle and its last
    task on each rank in every way.
    """
    for number, kind in enumerate(kinds_of(schedule), turn):
        every = [task.id.at(step) for step in range(STEPS) for task in schedule.tasks if task.id.kind is kind]
        places = [every[0], every[len(every) // 2], every[-1]]
        cases = list(itertools.product(range(RANKS), places, ("before", "after")))
        yield from ((r, instance, way) for r, instance, way in (cases if wide else [cases[5 * number % len(cases)]]))


def faulty_rank(rank: int, name: str, wide: bool, folder: str) -> list[str]:
    """Try the faults of a mix, one after another; return the kinds of task that the mix has.

    Raises:
        AssertionError: what is left after one of them is not as promised.
    """
    policy, workload = MIXES[name]
    data = [joined(some) for some in batches_of(workload, STEPS, rank, RANKS)]
    losses, states = list[float](), list[State]()
    for steps in range(STEPS + 1):
        model, optimizer = _new(workload)
        with _trainer(model, optimizer, policy, workload) as trainer:
            schedule = trainer.prepare(data[0]).schedule
            torch.manual_seed(2 + rank)
            losses = [trainer.step(batch) for batch in data[:steps]]
            if steps == 1:
                trainer.save(folder)
        states.append(state_of(model, optimizer))
    plain, wrong = Undisturbed(schedule, losses, states), list[str]()
    for one in faults_of(schedule, list(MIXES).index(name), wide):
        problems = _problems(rank, one, policy, workload, data, plain, folder)
        wrong += [f"{name}, rank {one[0]}, {one[2]} {one[1]}, seen on rank {rank}: {what}" for what in problems]
    assert not wrong, "\n".join(wrong)
    return [str(kind) for kind in kinds_of(schedule)]


def _new(workload: Workload) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_for(workload)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _trainer(model: nn.Module, optimizer: torch.optim.Optimizer, policy: str, workload: Workload) -> Trainer:
    """A trainer that need not measure."""
    return Trainer(
        model,
        policy=policy,
        optimizer=optimizer,
        profile=profile_of(replace(workload, micro_batches=1, clip_norm=None)),
        micro_batches=workload.micro_batches,
        clip_norm=workload.clip_norm,
    )


def _problems(
    rank: int,
    planted: tuple[int, str, str],
    policy: str,
    workload: Workload,
    data: list[tuple[Tensor, Tensor]],
    plain: Undisturbed,
    folder: str,
) -> Iterator[str]:
    """Train until a task fails, train on from the last checkpoint, and say what is not as promised."""
    which, instance, way = planted
    model, optimizer = _new(workload)
    threads, fault, text = set(threading.enumerate()), Fault(instance, way), ""
    try:
        with (
            fault.planted(None) if rank == which else nullcontext(),
            _trainer(model, optimizer, policy, workload) as trainer,
        ):
            trainer.prepare(data[0])
            torch.manual_seed(2 + rank)
            for batch in data:
                trainer.step(batch)
    except AutoHeteError as error:
        text = "\n".join((str(error), *getattr(error, "__notes__", ())))
    ended = time.perf_counter()
    times: list[float] = [0.0] * RANKS
    dist.all_gather_object(times, fault.at)
    if not max(times) > 0:
        yield "the task has not run"
    if ended - max(times) > PATIENCE_SECONDS:
        yield f"the error came after {ended - max(times):.1f} s"
    here, there = rf"{re.escape(instance)} failed: PlantedError", rf"(.* failed: RankError: )?rank {which} has failed: "
    if not re.match(f"{here if rank == which else there + re.escape(instance) + ': PlantedError'}: no such luck", text):
        yield f"the error is {text!r}"
    if text.partition("\n")[0].count("no such luck") != 1:
        yield f"the error repeats itself: {text}"
    yield from _left(state_of(model, optimizer), text, plain)
    yield from (f"{type(p)} is left" for p in model.parameters() if type(p) is not nn.Parameter or p.grad is not None)
    while left := set(threading.enumerate()) - threads:  # those of the connections end once both ends are closed
        if time.perf_counter() - ended > PATIENCE_SECONDS:
            yield f"{left} are left"
            break
        time.sleep(0.001)

    model, optimizer = _new(workload)
    with _trainer(model, optimizer, policy, workload) as trainer:
        trainer.load(folder)
        losses = [trainer.step(batch) for batch in data[1:]]
    if losses != plain.losses[1:] or not all(map(same_block, state_of(model, optimizer), plain.states[STEPS])):
        yield "it does not resume"


def _left(found: State, text: str, plain: Undisturbed) -> Iterator[str]:
    """What is not as the error says: each block has the bits of a step, but for what another rank had, which is NaN if that
    is what the error says.
    """
    described, *lost = re.split(r"\. (Parameters and optimizer|Optimizer) states of other ranks are NaN", text)
    try:
        expected = said(described, len(found))
    except AssertionError:
        yield f"the error does not say which step the parameters are from: {text}"
        return
    for block, steps in expected.items():
        for place, ((values, states), (others, more)) in enumerate(zip(found[block], plain.states[steps][block], strict=True)):
            for name, one in {"values": values, **states}.items():
                there = {"values": others, **more}[name]
                gone = one.isnan() & there.isfinite()
                may_go = bool(lost) and (name != "values" or "Parameters" in lost[0])
                if not torch.equal(one[~gone], there[~gone]) or (gone.any() and not may_go):
                    yield f"{name} of parameter {place} of block {block}: {int(gone.sum())} are NaN: {text}"
