"""What ranks train in tests, and the same training in one process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autohete.errors import AutoHeteError
from autohete.hardware import Interconnect
from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.runtime.batch import Batch
from autohete.runtime.collectives import Collectives
from autohete.runtime.control_channel import ControlChannel
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.ledger import Ledger
from autohete.runtime.losses import mean_token_loss, next_token_loss
from autohete.runtime.partition import partition
from autohete.runtime.settings import Recipe
from autohete.runtime.takeover import Ledgers, Takeover
from autohete.runtime.update_rules import default_optimizer
from autohete.schedule import Schedule
from autohete.simulate import judge_for
from autohete.train.as_executed import as_executed
from autohete.train.gpt import BLOCKS, seeded_gpt
from autohete.train.options import NonFinite
from autohete.train.trainer import Trainer
from autohete.workload import Precision, Workload
from support.exploding import BAD_TOKEN, ExplodingGPT
from support.reference import Outcome, batches, model_for
from support.small import CLIP_NORM, SMALL, STEPS, profile_of

SHORT = replace(SMALL, transformer_blocks=2)
BAD_RANK, BAD_STEP = 1, 3


@dataclass(frozen=True, slots=True)
class Case:
    """A training of several ranks.

    Args:
        policy: of the plan.
        workload: of each rank.
        steps: number of steps.
        weighted: the loss is the mean over the tokens of all ranks, each of which has another number of them.
        scaled: by a GradScaler whose scale is too large at first: gradients of all ranks are infinite.
        explodes: on one rank, a gradient of the last micro-batch of one step is infinite.
    """

    policy: str
    workload: Workload = SHORT
    steps: int = STEPS
    weighted: bool = False
    scaled: bool = False
    explodes: bool = False

    def model(self) -> nn.Module:
        """If a block explodes it is the first one, when the backward of all others has ended."""
        return ExplodingGPT(self.workload, 1) if self.explodes else model_for(self.workload)

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", enabled=self.scaled, init_scale=2.0**19, growth_interval=2)

    def data(self, rank: int, ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
        """The micro-batches of each step of a rank."""
        found = batches_of(self.workload, self.steps, rank, ranks)
        for step, some in enumerate(found):
            for place, (ids, targets) in enumerate(some):
                ids[0, 0] = BAD_TOKEN + 1
                if self.weighted:
                    targets[:, : (rank + step + 2 * place) % 5] = -100
            if self.explodes and (rank, step) == (BAD_RANK, BAD_STEP):
                some[-1][0][0, 0] = BAD_TOKEN
        return found


@dataclass(frozen=True, slots=True)
class Trained:
    """What a rank has in the end.

    Args:
        outcome: losses and master weights.
        scales: of the loss, after each step.
        skipped: number of skipped steps.
    """

    outcome: Outcome
    scales: list[float]
    skipped: int


def schedule_for(workload: Workload, policy: str, ranks: int) -> Schedule:
    """The schedule of one of several GPUs."""
    node = profile_of(workload).hardware
    node = replace(node, interconnect=Interconnect(ranks, 1e9, 1e-5), places=()).shared_by(ranks)
    profile = analytic_profile(workload, node)
    plan = as_executed(parse_policy(policy).plan(profile, judge_for(profile)), profile)
    return lower(profile, plan)


def train_several(rank: int, ranks: int, cases: list[Case]) -> list[Outcome]:
    """Train one rank by the schedule of each case."""
    return [_train_rank(rank, ranks, case) for case in cases]


def _train_rank(rank: int, ranks: int, case: Case) -> Outcome:
    """Train one rank by the schedule of a policy, on its own batches."""
    workload = case.workload
    schedule = schedule_for(workload, case.policy, ranks)
    assert dist.group.WORLD is not None
    channel = ControlChannel.connect(dist.group.WORLD, 60.0)
    collectives = Collectives(channel, dist.new_group(), torch.device("cpu"))
    device, host = (Ledger(memory.name, memory.capacity_bytes) for memory in schedule.memories[:2])
    training = Takeover(
        partition(case.model(), BLOCKS),
        schedule,
        Recipe(clip_norm=workload.clip_norm),
        Ledgers(device=device, host=host),
        collectives=collectives,
        poison=True,
    )
    torch.manual_seed(2 + rank)
    own = case.data(rank, ranks)
    try:
        with LaneThreads(schedule, training.actions.perform, failed=collectives.fail) as lanes:
            for step, some in enumerate(own):
                training.passes.give(step, *(Batch(*pair) for pair in some))
                lanes.admit()
        losses = [training.passes.losses[step] for step in range(case.steps)]
        return Outcome(losses, training.parameters(), host.peak_bytes, host.used_bytes)
    finally:
        training.close()
        channel.close()


def train_cases(rank: int, ranks: int, cases: list[Case]) -> list[Trained]:
    """Train one rank by a Trainer in each case."""
    return [_train_case(rank, ranks, case) for case in cases]


def _train_case(rank: int, ranks: int, case: Case) -> Trained:
    workload, data, scaler = case.workload, case.data(rank, ranks), case.scaler()
    losses, scales = list[float](), list[float]()
    with Trainer(
        case.model(),
        policy=case.policy,
        profile=profile_of(replace(workload, micro_batches=1, clip_norm=None)),
        loss=mean_token_loss if case.weighted else next_token_loss,
        clip_norm=workload.clip_norm,
        micro_batches=workload.micro_batches,
        grad_scaler=scaler,
        on_nonfinite=NonFinite.SKIP,
    ) as trainer:
        trainer.prepare(joined(data[0]))
        torch.manual_seed(2 + rank)
        for some in data:
            losses.append(trainer.step(joined(some)))
            scales.append(scaler.get_scale())
        return Trained(Outcome(losses, trainer.parameters()), scales, trainer.skipped_steps)


def batches_of(workload: Workload, steps: int, rank: int, ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each step of a rank."""
    count = workload.micro_batches
    drawn = batches(workload, steps * ranks * count)
    return [drawn[(step * ranks + rank) * count :][:count] for step in range(steps)]


def joined(some: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Micro-batches as one batch."""
    return torch.cat([ids for ids, _ in some]), torch.cat([targets for _, targets in some])


def train_in_one(case: Case, ranks: int, *, at_once: bool) -> list[Trained]:
    """The training of all ranks in one process: plain PyTorch, which adds the gradients of the ranks in their order.

    Args:
        case: what is trained.
        ranks: number of ranks.
        at_once: add the ranks' gradients of each micro-batch, and then those of the micro-batches; otherwise the other way.
    """
    torch.set_num_threads(1)
    workload, model, scaler = case.workload, case.model(), case.scaler()
    parameters = [parameter for owned in partition(model).owned for parameter in owned]
    full = workload.precision is Precision.FP32
    masters = parameters if full else [nn.Parameter(p.detach().float()) for p in parameters]
    of_parameter = dict(zip(map(id, parameters), masters, strict=True))
    optimizer, count, skipped = default_optimizer(masters), workload.micro_batches, 0
    randoms = [torch.Generator().manual_seed(2 + rank).get_state() for rank in range(ranks)]
    losses, scales = [list[float]() for _ in range(ranks)], list[float]()
    own = [case.data(rank, ranks) for rank in range(ranks)]
    for step in range(case.steps):
        items = sum(int((targets != -100).sum()) for of_rank in own for _, targets in of_rank[step])
        found: dict[tuple[int, int], list[Tensor]] = {}
        for rank in range(ranks):
            torch.set_rng_state(randoms[rank])
            losses[rank].append(0.0)
            for micro_batch, (ids, targets) in enumerate(own[rank][step]):
                logits = model(ids)
                loss = mean_token_loss(logits, targets, items) if case.weighted else next_token_loss(logits, targets)
                losses[rank][-1] += loss.item() / (1 if case.weighted else count)
                share = loss if case.weighted else loss / (count * ranks)
                found[rank, micro_batch] = list(torch.autograd.grad(scaler.scale(share), parameters))
            randoms[rank] = torch.get_rng_state()
        if at_once:
            sums = [_added([found[rank, one] for rank in range(ranks)]) for one in range(count)]
        else:
            sums = [_added([found[rank, one] for one in range(count)]) for rank in range(ranks)]
        for master, gradient in zip(masters, _added(sums), strict=True):
            master.grad = gradient.float()
        finite = all(bool(master.grad.isfinite().all()) for master in masters if master.grad is not None)
        scaler.unscale_(optimizer)
        if workload.clip_norm is not None:
            nn.utils.clip_grad_norm_([of_parameter[id(p)] for p in model.parameters()], workload.clip_norm)
        if finite:
            optimizer.step()
        skipped += not finite
        scaler.update()
        if not full:
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.data.copy_(master.detach())
        scales.append(scaler.get_scale())
    values = [master.detach() for master in masters]
    return [Trained(Outcome(of_rank, values), scales, skipped) for of_rank in losses]


def _added(several: list[list[Tensor]]) -> list[Tensor]:
    total = several[0]
    for one in several[1:]:
        total = [a + b for a, b in zip(total, one, strict=True)]
    return total


def _parts(trainer: Trainer, model: nn.Module) -> dict[str, Any]:
    """What a training has, without what differs between ranks."""
    state = trainer.state_dict()
    return {name: value for name, value in state.items() if name != "random"} | {"adam": trainer.optimizer.state_dict()}


def trainer_rank(rank: int, ranks: int, policies: list[str], folder: str) -> list[dict[str, Any]]:
    """Train under several policies, and save under ``folder`` with the last of them."""
    found = []
    for policy in policies:
        model = seeded_gpt(SHORT, dropout=0.0, seed=0)
        with Trainer(model, blocks=BLOCKS, profile=profile_of(SHORT), policy=policy, clip_norm=CLIP_NORM) as trainer:
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


def attempts_of_rank(rank: int, ranks: int, policies: list[str]) -> list[dict[str, Tensor] | str]:
    """Train under each policy; return the weights, or the error."""
    found: list[dict[str, Tensor] | str] = []
    for policy in policies:
        model = seeded_gpt(SHORT, dropout=0.0, seed=0)
        try:
            with Trainer(model, blocks=BLOCKS, profile=profile_of(SHORT), policy=policy) as trainer:
                for some in batches_of(SHORT, 2, rank, ranks):
                    trainer.step(some[0])
        except AutoHeteError as error:
            found.append(str(error))
        else:
            found.append({name: value.detach().clone() for name, value in model.named_parameters()})
    return found


def trainer_in_one(ranks: int, clip_norm: float | None = CLIP_NORM) -> dict[str, Any]:
    """The same training in one process, with the ranks' batches as micro-batches."""
    model = seeded_gpt(SHORT, dropout=0.0, seed=0)
    own = [batches_of(SHORT, 2, rank, ranks) for rank in range(ranks)]
    with Trainer(
        model, blocks=BLOCKS, profile=profile_of(SHORT), policy="resident", clip_norm=clip_norm, micro_batches=ranks
    ) as trainer:
        for step in range(2):
            trainer.step(tuple(torch.cat([own[rank][step][0][i] for rank in range(ranks)]) for i in range(2)))
        state = _parts(trainer, model)
    after = {name: value.detach().clone() for name, value in model.named_parameters()}
    return {"state": state, "weights": after, "after": after}


def resumed_rank(rank: int, policy: str, folder: str) -> dict[str, Any]:
    """Load a checkpoint, prepare, and return the state."""
    model = seeded_gpt(SHORT, dropout=0.0, seed=5)
    with Trainer(model, blocks=BLOCKS, profile=profile_of(SHORT), policy=policy, clip_norm=CLIP_NORM) as trainer:
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
        with Trainer(model, blocks=BLOCKS, profile=profile_of(SHORT), policy=policy, loss=loss) as trainer:
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
    if what == "batch" and rank:
        given[0][0, 0] = SHORT.vocabulary_size
    try:
        with Trainer(model, blocks=BLOCKS, profile=profile_of(SHORT), policy=policy, optimizer=optimizer) as trainer:
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


def leaving_rank(rank: int, several: list[tuple[str, list[int]]]) -> list[tuple[str, bool]]:
    """Train a step under each policy. Some ranks then leave with an error of their own, and others make another step, or none
    if all make the same; return the error, and whether what is given back has all values.
    """
    found, data = list[tuple[str, bool]](), batches(SHORT, 2)
    for policy, leaving in several:
        model = seeded_gpt(SHORT, dropout=0.0, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        text = ""
        try:
            with Trainer(model, blocks=BLOCKS, profile=profile_of(SHORT), policy=policy, optimizer=optimizer) as trainer:
                trainer.step(data[0])
                if rank in leaving:
                    raise KeyError(f"no such luck on rank {rank}")
                if leaving:
                    trainer.step(data[1])
        except (AutoHeteError, KeyError) as error:
            text = f"{type(error).__name__}: {error}"
        tensors = (*model.parameters(), *(value for of in optimizer.state.values() for value in of.values()))
        found.append((text, all(bool(one.isfinite().all()) for one in tensors)))
    return found
