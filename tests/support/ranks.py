"""Training on several ranks, each a process with Gloo, and the same training in one process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autohete.errors import AutoHeteError
from autohete.hardware import Interconnect, load_hardware
from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.runtime.batch import Batch
from autohete.runtime.collectives import Collectives
from autohete.runtime.control_channel import ControlChannel
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.ledger import Ledger
from autohete.runtime.losses import next_token_loss
from autohete.runtime.partition import partition
from autohete.runtime.settings import Recipe
from autohete.runtime.takeover import Ledgers, Takeover
from autohete.runtime.update_rules import default_optimizer
from autohete.schedule import Schedule
from autohete.simulate import judge_for
from autohete.train.as_executed import as_executed
from autohete.train.gpt import BLOCKS, seeded_gpt
from autohete.train.trainer import Trainer
from autohete.workload import Precision, Workload
from support.reference import Outcome, batches, model_for
from support.small import CLIP_NORM, SMALL, profile_of

NODE = load_hardware("a100-40gb-epyc7713")
#: No test waits longer for its ranks.
LIMIT_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank has ended: the result of its function, or the text of its error; its process's exit code."""

    result: Any
    error: str
    code: int | None


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any, limit_seconds: float = LIMIT_SECONDS) -> list[Ended]:
    """Call ``function(rank, *args)`` in a process for each rank, with a default group of Gloo.

    Args:
        function: importable.
        ranks: number of ranks.
        args: can be pickled.
        limit_seconds: all of them have ended by then, or the test fails.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(function, rank, ranks, port, ends[rank][1], args), daemon=True)
        for rank in range(ranks)
    ]
    try:
        for process, (_, there) in zip(processes, ends, strict=True):
            process.start()
            there.close()
        found = [_received(here, limit_seconds) for here, _ in ends]
        for process in processes:
            process.join(limit_seconds)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert None not in codes, f"ranks have not ended: exit codes {codes}, {found}"
    return [Ended(*one, code) for one, code in zip(found, codes, strict=True)]


def results(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """The results of all ranks, none of which has failed."""
    ended = on_ranks(function, ranks, *args)
    assert not any(one.error for one in ended), "\n".join(one.error for one in ended)
    return [one.result for one in ended]


def _received(here: Connection, limit_seconds: float) -> tuple[Any, str]:
    if not here.poll(limit_seconds):
        return None, "time limit"
    try:
        found: tuple[Any, str] = pickle.loads(here.recv_bytes())
    except EOFError:
        return None, "killed"
    return found


def _rank(function: Callable[..., Any], rank: int, ranks: int, port: int, end: Connection, args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        found = function(rank, *args), ""
    except BaseException as error:
        trace = "" if isinstance(error, AutoHeteError) else traceback.format_exc()
        found = None, f"{type(error).__name__}: {error}{trace}"
    end.send_bytes(pickle.dumps(found))  # not through shared memory, which ends with this process
    end.close()
    dist.destroy_process_group()


def schedule_for(workload: Workload, policy: str, ranks: int) -> Schedule:
    """The schedule of one of several GPUs."""
    node = profile_of(workload).hardware
    node = replace(node, interconnect=Interconnect(ranks, 1e9, 1e-5), places=()).shared_by(ranks)
    profile = analytic_profile(workload, node)
    plan = as_executed(parse_policy(policy).plan(profile, judge_for(profile)), profile)
    return lower(profile, plan)


def train_several(rank: int, ranks: int, steps: int, several: list[tuple[Workload, str]]) -> list[Outcome]:
    """Train one rank by the schedules of several policies, each with its workload."""
    return [train_rank(rank, workload, steps, policy, ranks) for workload, policy in several]


def train_rank(rank: int, workload: Workload, steps: int, policy: str, ranks: int) -> Outcome:
    """Train one rank by the schedule of a policy, on its own batches."""
    schedule = schedule_for(workload, policy, ranks)
    assert dist.group.WORLD is not None
    channel = ControlChannel.connect(dist.group.WORLD, 60.0)
    collectives = Collectives(channel, dist.new_group(), torch.device("cpu"))
    device, host = (Ledger(memory.name, memory.capacity_bytes) for memory in schedule.memories[:2])
    training = Takeover(
        partition(model_for(workload), BLOCKS),
        schedule,
        Recipe(clip_norm=workload.clip_norm),
        Ledgers(device=device, host=host),
        collectives=collectives,
        poison=True,
    )
    torch.manual_seed(2 + rank)
    own = batches_of(workload, steps, rank, ranks)
    try:
        with LaneThreads(schedule, training.actions.perform, failed=collectives.fail) as lanes:
            for step, some in enumerate(own):
                training.passes.give(step, *(Batch(*pair) for pair in some))
                lanes.admit()
        losses = [training.passes.losses[step] for step in range(steps)]
        return Outcome(losses, training.parameters(), host.peak_bytes, host.used_bytes)
    finally:
        training.close()
        channel.close()


def batches_of(workload: Workload, steps: int, rank: int, ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each step of a rank."""
    count = workload.micro_batches
    drawn = batches(workload, steps * ranks * count)
    return [drawn[(step * ranks + rank) * count :][:count] for step in range(steps)]


def train_in_one(workload: Workload, steps: int, ranks: int, *, at_once: bool) -> list[Outcome]:
    """The training of all ranks in one process: plain PyTorch, which adds the gradients of the ranks in their order.

    Args:
        workload: of each rank.
        steps: number of steps.
        ranks: number of ranks.
        at_once: add the ranks' gradients of each micro-batch, and then those of the micro-batches; otherwise the other way.
    """
    torch.set_num_threads(1)
    model = model_for(workload)
    parameters = list(model.parameters())
    full = workload.precision is Precision.FP32
    masters = parameters if full else [nn.Parameter(p.detach().float()) for p in parameters]
    optimizer, count = default_optimizer(masters), workload.micro_batches
    randoms = [torch.Generator().manual_seed(2 + rank).get_state() for rank in range(ranks)]
    losses: list[list[float]] = [[] for _ in range(ranks)]
    own = [batches_of(workload, steps, rank, ranks) for rank in range(ranks)]
    for step in range(steps):
        found: dict[tuple[int, int], list[Tensor]] = {}
        for rank in range(ranks):
            torch.set_rng_state(randoms[rank])
            losses[rank].append(0.0)
            for micro_batch, (ids, targets) in enumerate(own[rank][step]):
                loss = next_token_loss(model(ids), targets)
                losses[rank][-1] += loss.item() / count
                found[rank, micro_batch] = list(torch.autograd.grad(loss / (count * ranks), parameters))
            randoms[rank] = torch.get_rng_state()
        if at_once:
            sums = [_added([found[rank, one] for rank in range(ranks)]) for one in range(count)]
        else:
            sums = [_added([found[rank, one] for one in range(count)]) for rank in range(ranks)]
        for master, gradient in zip(masters, _added(sums), strict=True):
            master.grad = gradient.float()
        if workload.clip_norm is not None:
            nn.utils.clip_grad_norm_(masters, workload.clip_norm)
        optimizer.step()
        if not full:
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.data.copy_(master.detach())
    return [Outcome(of_rank, [master.detach() for master in masters]) for of_rank in losses]


def _added(several: list[list[Tensor]]) -> list[Tensor]:
    total = several[0]
    for one in several[1:]:
        total = [a + b for a, b in zip(total, one, strict=True)]
    return total


# --- with a Trainer

SHORT = replace(SMALL, transformer_blocks=2)


def _parts(trainer: Trainer, model: nn.Module) -> dict[str, Any]:
    """What a training has, without what differs between ranks."""
    state = trainer.state_dict()
    return {name: value for name, value in state.items() if name != "random"} | {"adam": trainer.optimizer.state_dict()}


def trainer_rank(rank: int, ranks: int, policies: list[str], folder: str) -> list[dict[str, Any]]:
    """Train under several policies, and save under ``folder`` with the last of them."""
    found = []
    for policy in policies:
        model = seeded_gpt(SHORT, dropout=0.0, seed=0)
        with Trainer(model, blocks=BLOCKS, hardware=NODE, policy=policy, clip_norm=CLIP_NORM) as trainer:
            for some in batches_of(SHORT, 2, rank, ranks):
                trainer.step(some[0])
            state = _parts(trainer, model)
            trainer.evaluate(batches(SHORT, 1))
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            if policy == policies[-1]:
                trainer.save(folder, extra={"rank": rank})
        after = {name: value.detach().clone() for name, value in model.named_parameters()}
        found.append({"state": state, "weights": weights, "after": after})
    return found


def trainer_in_one(ranks: int) -> dict[str, Any]:
    """The same training in one process, with the ranks' batches as micro-batches."""
    model = seeded_gpt(SHORT, dropout=0.0, seed=0)
    own = [batches_of(SHORT, 2, rank, ranks) for rank in range(ranks)]
    with Trainer(model, blocks=BLOCKS, hardware=NODE, policy="resident", clip_norm=CLIP_NORM, micro_batches=ranks) as trainer:
        for step in range(2):
            trainer.step(tuple(torch.cat([own[rank][step][0][i] for rank in range(ranks)]) for i in range(2)))
        state = _parts(trainer, model)
    after = {name: value.detach().clone() for name, value in model.named_parameters()}
    return {"state": state, "weights": after, "after": after}


def resumed_rank(rank: int, policy: str, folder: str) -> dict[str, Any]:
    """Load a checkpoint, prepare, and return the state."""
    model = seeded_gpt(SHORT, dropout=0.0, seed=5)
    with Trainer(model, blocks=BLOCKS, hardware=NODE, policy=policy, clip_norm=CLIP_NORM) as trainer:
        assert trainer.load(folder) == {"rank": 0}
        trainer.prepare(batches(SHORT, 1)[0])
        return _parts(trainer, model)


def ending_rank(rank: int, ranks: int, policy: str, how: str, which: int) -> tuple[float, str]:
    """Train until rank ``which`` ends in its third step. Return when this rank knows, and its error."""
    step = 0

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if rank == which and step == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("boom")
        return next_token_loss(logits, targets)

    model = seeded_gpt(SHORT, dropout=0.0, seed=0)
    begin = time.time()
    try:
        with Trainer(model, blocks=BLOCKS, hardware=NODE, policy=policy, loss=loss) as trainer:
            for number, some in enumerate(batches_of(SHORT, 100, rank, ranks)):
                step, begin = number, time.time()
                trainer.step(some[0])
    except AutoHeteError as error:
        return time.time() - begin, str(error)
    return time.time() - begin, "no error"


def differing_rank(rank: int, several: list[str]) -> list[str]:
    """Train with something that differs on rank 1, one after another; return the errors."""
    return [_differing(rank, what) for what in several]


def _differing(rank: int, what: str) -> str:
    model = seeded_gpt(SHORT, dropout=0.0, seed=rank if what == "seed" else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    policy = "resident:zero_stage=1" if what == "policy" and rank else "resident"
    given = batches(SHORT, 1)[0]
    try:
        with Trainer(model, blocks=BLOCKS, hardware=NODE, policy=policy, optimizer=optimizer) as trainer:
            trainer.step(given)
            if what == "lr" and rank:
                optimizer.param_groups[0]["lr"] = 0.5
            if what == "weights" and rank:
                with torch.no_grad():
                    next(model.parameters()).add_(1.0)
            if what == "calls" and rank:
                trainer.state_dict()
            trainer.step(given)
    except AutoHeteError as error:
        return f"{type(error).__name__}: {error}"
    return ""
