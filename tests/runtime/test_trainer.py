"""The Trainer: measures, plans, trains within a budget, exactly, and gives everything back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.measured import MEDIUM, profile_for
from support.reference import Outcome, batches, model_for, train_plainly
from torch import Tensor, nn

from autohete import Trainer
from autohete.errors import InfeasibleError, InputError, NonFiniteLossError
from autohete.execution.trace import Clock, check_trace
from autohete.hardware import load_hardware
from autohete.profile.profile_file import read_profile, write_profile
from autohete.runtime.ledger import Counting
from autohete.runtime.losses import next_token_loss
from autohete.runtime.update_rules import default_optimizer
from autohete.sim import SimExecutor
from autohete.train.gpt import GPT, GPTAttention, GPTMlp
from autohete.train.machine import versions
from autohete.train.measured import measured_machine, measured_profile
from autohete.train.trainer import Mode, NonFinite
from autohete.workload import BlockRole, Precision, Units

pytestmark = pytest.mark.slow

STEPS = 3


@cache
def plain(precision: Precision) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters of plain training."""
    outcome = train_plainly(replace(MEDIUM, precision=precision), STEPS)
    return outcome.losses, outcome.parameters


def trained(policy: str, gpu_memory: str, precision: Precision) -> tuple[list[float], list[Tensor], Trainer]:
    """Losses and parameters of the same training by the Trainer."""
    workload = replace(MEDIUM, precision=precision)
    trainer = Trainer(model_for(workload), policy=policy, gpu_memory=gpu_memory, profile=profile_for(workload))
    with trainer:
        torch.manual_seed(2)
        losses = [trainer.step(batch) for batch in batches(workload, STEPS)]
        return losses, trainer.parameters(), trainer


@settings(max_examples=25)
@given(
    st.sampled_from(["autohete", "autohete:priority=off", "stronghold", "zero_offload", "resident:checkpointing=full"]),
    st.integers(15, 120),
    st.sampled_from([Precision.FP32, Precision.BF16]),
)
def test_any_budget_trains_to_the_bit(policy: str, percent: int, precision: Precision) -> None:
    """Whatever the policy and the budget: it says that it does not fit, or trains exactly like plain PyTorch."""
    try:
        losses, parameters, trainer = trained(policy, f"{percent}%", precision)
    except InfeasibleError as error:
        event(f"does not fit, binding: {error.constraint}")
        return
    expected_losses, expected = plain(precision)
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    assert trainer.prediction is not None
    assert trainer.prediction.gpu.fits


def test_a_quarter_of_the_memory_is_enough() -> None:
    """A training that needs four times the budget when everything is resident runs within it, to the bit."""
    workload = replace(MEDIUM, transformer_blocks=12)
    with Trainer(model_for(workload), gpu_memory="25%", hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
        trainer.prepare(batches(workload, 1)[0])
        torch.manual_seed(2)
        losses = [trainer.step(batch) for batch in batches(workload, STEPS)]
        found = trainer.comparison()
    assert found.measured_peak_bytes <= trainer.resident_bytes / 4
    assert losses == train_plainly(workload, STEPS).losses
    assert abs(found.predicted_peak_bytes / found.measured_peak_bytes - 1) < 0.03


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_block_that_both_sides_update_is_given_back(precision: Precision) -> None:
    """Sub-groups that end within a block train to the bit, and the model has the trained values of both sides."""
    workload = replace(MEDIUM, precision=precision)
    model = model_for(workload)
    policy = "twin_flow:ratio=50,sub_group_size=1000,bucket_size=1"
    with Trainer(model, policy=policy, gpu_memory="1GiB", profile=profile_for(workload)) as trainer:
        prediction = trainer.prepare(batches(workload, 1)[0])
        assert any(unit.update.share for unit in prediction.plan.units)
        torch.manual_seed(2)
        losses = [trainer.step(batch) for batch in batches(workload, STEPS)]
        peak = trainer.comparison().measured_peak_bytes
    expected_losses, expected = plain(precision)
    assert losses == expected_losses
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(model.parameters(), expected, strict=True))
    assert peak <= prediction.gpu.peak_bytes


def test_the_named_limit_of_pinned_memory_works() -> None:
    """A limit of pinned memory that is too small is named, with the smallest that works; with it, it trains."""
    profile = profile_for(MEDIUM)

    def one_step(pinned_memory: int) -> None:
        with Trainer(model_for(MEDIUM), policy="streamed_states", pinned_memory=pinned_memory, profile=profile) as trainer:
            trainer.step(batches(MEDIUM, 1)[0])

    with pytest.raises(InfeasibleError, match=r"The smallest pinned memory that works is \d+ B") as caught:
        one_step(1000)
    assert caught.value.constraint == "pinned"
    one_step(caught.value.needed_bytes)


class Alternating(nn.Module):
    """A model of one's own whose list has attention and MLP by turns, as its attribute says."""

    units = Units.SUBLAYER

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Embedding(MEDIUM.vocabulary_size, 32)
        self.layers = nn.ModuleList(part(32, 4, 0.2) for _ in range(3) for part in (GPTAttention, GPTMlp))
        self.outside = nn.Linear(32, MEDIUM.vocabulary_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inside(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.outside(x)
        return logits


def test_a_list_of_attention_and_mlp_by_turns_trains_to_the_bit() -> None:
    """Modules that differ are measured each and planned apart, within a budget, with the bits of plain PyTorch."""
    model, plain_model = Alternating(), Alternating()
    optimizer = default_optimizer(plain_model.parameters())
    hardware = load_hardware("a100-40gb-epyc7713")
    with Trainer(model, gpu_memory="60%", hardware=hardware, blocks="layers") as trainer:
        prediction = trainer.prepare(batches(MEDIUM, 1)[0])
        torch.manual_seed(2)
        losses = [trainer.step(batch) for batch in batches(MEDIUM, STEPS)]
        trained_parameters = trainer.parameters()
    assert prediction.profile.workload.transformer_blocks == 3
    attention, mlp = prediction.profile.units[1:3]
    assert (attention.role, mlp.role) == (BlockRole.ATTENTION, BlockRole.MLP)
    assert 1.5 < mlp.parameters / attention.parameters < 2.5
    torch.manual_seed(2)
    for loss, (ids, targets) in zip(losses, batches(MEDIUM, STEPS), strict=True):
        found = next_token_loss(plain_model(ids), targets)
        assert loss == found.item()
        optimizer.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(trained_parameters, plain_model.parameters(), strict=True))


def test_a_list_that_cannot_be_sublayers_is_refused() -> None:
    """A model that says that its list has sublayers must list two for each block."""
    model = Alternating()
    del model.layers[-1]
    with (
        pytest.raises(InputError, match="attention and MLP by turns, but lists 5 modules"),
        Trainer(model, hardware=load_hardware("a100-40gb-epyc7713"), blocks="layers") as trainer,
    ):
        trainer.prepare(batches(MEDIUM, 1)[0])


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_selective_recomputation_is_measured(precision: Precision) -> None:
    """It trains to the bit, and in exactly the memory that the measured profile says, which is less than that of all."""
    workload = replace(MEDIUM, precision=precision)
    policy, profile = "resident:checkpointing=selective", profile_for(workload)
    with Trainer(model_for(workload), policy=policy, gpu_memory="1GiB", profile=profile) as trainer:
        torch.manual_seed(2)
        losses = [trainer.step(batch) for batch in batches(workload, STEPS)]
        parameters, found = trainer.parameters(), trainer.comparison()
    expected_losses, expected = plain(precision)
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    assert found.measured_peak_bytes == found.predicted_peak_bytes < trainer.resident_bytes


class Overwriting(nn.Module):
    """A block that changes the result of its linear layer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        return x + hidden.relu_()


def test_a_block_that_cannot_select_is_refused() -> None:
    """Where a result that would be kept is changed in place, all else is measured, and a policy that selects is refused."""
    model = Alternating()
    model.layers = nn.ModuleList(Overwriting() for _ in range(4))
    model.units = Units.BLOCK
    batch, hardware = batches(MEDIUM, 1)[0], load_hardware("a100-40gb-epyc7713")
    with (
        pytest.raises(InputError, match=r"unit 1 \(transformer\) is to be recomputed selectively, but its profile"),
        Trainer(model, policy="resident:checkpointing=selective", hardware=hardware, blocks="layers") as trainer,
    ):
        trainer.prepare(batch)
    with Trainer(model, policy="resident:checkpointing=full", hardware=hardware, blocks="layers") as trainer:
        assert math.isfinite(trainer.step(batch))


def test_the_named_smallest_budget_works() -> None:
    """A budget that is too small names the smallest that works and the binding task; with it, it trains."""
    profile = profile_for(MEDIUM)

    def one_step(gpu_memory: int) -> None:
        with Trainer(model_for(MEDIUM), policy="stronghold:window=1", gpu_memory=gpu_memory, profile=profile) as trainer:
            trainer.step(batches(MEDIUM, 1)[0])

    with pytest.raises(InfeasibleError, match=r"at \w+@\d+ it needs .* The smallest gpu memory that works is \d+ B") as caught:
        one_step(100_000)
    one_step(caught.value.needed_bytes)


def with_lasting(frozen: int, table: int) -> GPT:
    """The reference model with its first ``frozen`` blocks frozen and a buffer of ``table`` elements."""
    model = model_for(MEDIUM)
    for block in model.blocks[:frozen]:
        block.requires_grad_(False)
    model.register_buffer("table", torch.zeros(table))
    return model


@settings(max_examples=12)
@given(
    st.sampled_from(["autohete", "autohete:priority=off", "stronghold", "patrickstar", "zero_offload:paper,tile_overlap"]),
    st.integers(0, 2),
    st.integers(0, 3000),
    st.integers(0, 10),
)
def test_the_named_budget_has_room_for_what_lasts(policy: str, frozen: int, table: int, percent: int) -> None:
    """Buffers and frozen blocks included, what is named as the smallest budget trains, and a byte less does not."""

    def capacity(gpu_memory: int | str) -> int:
        model = with_lasting(frozen, table)
        with Trainer(model, policy=policy, gpu_memory=gpu_memory, profile=profile_for(MEDIUM)) as trainer:
            trainer.step(batches(MEDIUM, 1)[0])
            assert trainer.prediction is not None
            return trainer.prediction.gpu.capacity_bytes

    lasting = 4 * table  # frozen parameters move with their blocks
    with pytest.raises(InfeasibleError, match=r"smallest gpu memory that works is \d+ B") as caught:
        capacity(f"{max(percent, 1)}%")
    assert ("of which buffers and frozen parameters take" in str(caught.value)) == bool(lasting)
    named = caught.value.needed_bytes
    assert capacity(named) == named - lasting
    with pytest.raises(InfeasibleError):
        capacity(named - 1)


def test_a_named_budget_works_after_another_measurement() -> None:
    """What is named as the smallest budget does not hang on how fast this machine was when it was measured."""

    def one_step(gpu_memory: int | str) -> None:
        with Trainer(with_lasting(1, 1000), gpu_memory=gpu_memory) as trainer:
            trainer.step(batches(MEDIUM, 1)[0])

    with pytest.raises(InfeasibleError) as caught:
        one_step("5%")
    for _ in range(2):
        one_step(caught.value.needed_bytes)


def test_the_model_is_given_back() -> None:
    """After the context the model has its trained parameters, computes by itself, and can be trained on in the ordinary way."""
    model = model_for(MEDIUM)
    ids, targets = batches(MEDIUM, 1)[0]
    with Trainer(model, policy="stronghold:window=1", profile=profile_for(MEDIUM)) as trainer:
        before = trainer.step((ids, targets))
        held_back = trainer.evaluate([(ids, targets)])
        parameters = trainer.parameters()
    model.eval()
    torch.set_num_threads(1)
    assert held_back == next_token_loss(model(ids), targets).item()
    assert held_back < before
    model.train()
    next_token_loss(model(ids), targets).backward()  # type: ignore[no-untyped-call]
    found = [p for module in (model.embedding, *model.blocks, model.head) for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, parameters, strict=True))
    assert all(p.grad is not None for p in found)


class _Broken(nn.Module):
    """A GPT whose logits are NaN for a batch that begins with token 7."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_for(MEDIUM)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids)
        return logits * (torch.nan if int(ids[0, 0]) == 7 else 1.0)


def _batches_with_a_bad_one() -> list[tuple[Tensor, Tensor]]:
    made = [(ids.clone(), targets) for ids, targets in batches(MEDIUM, 4)]
    for number, (ids, _) in enumerate(made):
        ids[0, 0] = 7 if number == 2 else 8
    return made


@pytest.mark.parametrize("policy", ["resident", "zero_offload", "stronghold:window=1", "autohete"])
def test_a_loss_that_is_not_finite_changes_nothing(policy: str) -> None:
    """It stops with the step's number, and no parameter of any block is other than after the step before."""
    found = []
    for steps in (2, 3):
        with Trainer(_Broken(), policy=policy, hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
            torch.manual_seed(2)
            data = _batches_with_a_bad_one()
            trainer.prepare(data[0])
            torch.manual_seed(2)
            for batch in data[:2]:
                trainer.step(batch)
            if steps == 3:
                with pytest.raises(NonFiniteLossError, match=r"^step 2: the loss is nan; not finite first: ") as caught:
                    trainer.step(data[2])
                assert caught.value.step == 2
            found.append(trainer.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_steps_that_are_not_finite_can_be_skipped() -> None:
    """A skipped step is counted and changes nothing; the training goes on."""
    with Trainer(
        _Broken(), policy="zero_offload", on_nonfinite=NonFinite.SKIP, hardware=load_hardware("a100-40gb-epyc7713")
    ) as trainer:
        losses = [trainer.step(batch) for batch in _batches_with_a_bad_one()]
        assert trainer.skipped_steps == 1
        assert all(torch.isfinite(parameter).all() for parameter in trainer.parameters())
    assert [loss == loss for loss in losses] == [True, True, False, True]


def test_resident_training_uses_the_callers_threads() -> None:
    """Where only the device works, its passes have as many threads as the caller, and the bits of plain PyTorch."""
    workload = replace(MEDIUM, hidden_size=128, sequence_length=64)
    found: dict[str, list[float]] = {}
    with unchanged_threads(2):
        for policy in ("resident", "zero_offload"):
            with Trainer(model_for(workload), policy=policy, hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
                trainer.prepare(batches(workload, 1)[0])
                torch.manual_seed(2)
                found[policy] = [trainer.step(batch) for batch in batches(workload, STEPS)]
                assert trainer.threads == (2 if policy == "resident" else 1)
                assert trainer.counting is Counting.SCHEDULED
        assert torch.get_num_threads() == 2
        assert found["resident"] == train_plainly(workload, STEPS, threads=2).losses
    assert found["zero_offload"] == train_plainly(workload, STEPS).losses


@contextmanager
def unchanged_threads(count: int) -> Iterator[None]:
    """So many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_the_step_returns_before_its_tail() -> None:
    """The loss is there while the backward pass of the same step has not ended."""
    with Trainer(model_for(MEDIUM), policy="resident", profile=profile_for(MEDIUM)) as trainer:
        data = batches(MEDIUM, 3)
        for batch in data:
            trainer.step(batch)
        assert not trainer._held.running().session.lanes.idle


def test_a_paced_device_keeps_its_pace() -> None:
    """Paced to a hardware, iterations last as long as simulated, in slowed-down seconds that are said to be so."""
    with Trainer(
        model_for(MEDIUM), policy="autohete", gpu_memory="50%", mode=Mode.PACED, hardware=load_hardware("v100-32gb-dgx2")
    ) as trainer:
        for batch in batches(MEDIUM, 6):
            trainer.step(batch)
        trace = trainer.trace()
    assert trainer.slowdown > 1
    assert trace.clock is Clock.EMULATED
    # All in all: where a busy machine was late in one iteration, the next ones are shorter by as much.
    assert trace.makespan_seconds >= 0.98 * SimExecutor().run(trace.schedule, trace.iterations).makespan_seconds
    assert [fault for fault in check_trace(trace) if "more urgent" not in fault] == []


def test_profiles_are_read_as_they_were_written(tmp_path: Path) -> None:
    """A profile file gives the same profile again, and has date, machine and versions."""
    machine = measured_machine(quick=True)
    found, document = measured_profile(machine, model_for(MEDIUM), batches(MEDIUM, 1)[0], name="medium")
    path = tmp_path / "profile.json"
    write_profile(path, found, document, versions())
    assert read_profile(path) == found
    assert json.loads(path.read_text())["measured"].keys() == versions().keys() == {"date", "machine", "versions"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "is no profile"),
        ('{"format": "autohete-profile 1"}', "Workload : Input should be"),
    ],
)
def test_damaged_profiles_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """What is no profile is refused with what is wrong."""
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_profile(path)


def test_bad_arguments_are_refused() -> None:
    """Devices, budgets and shapes that cannot be are refused with what is allowed."""
    model = model_for(MEDIUM)
    with pytest.raises(InputError, match="choose emulated or cuda"):
        Trainer(model, device="tpu")
    with pytest.raises(InputError, match="is not a share of memory"):
        Trainer(model, gpu_memory="-3%")
    with pytest.raises(InputError, match="has no unit"):
        Trainer(model, gpu_memory="100")
    with pytest.raises(InputError, match="positive number"):
        Trainer(model, gpu_memory=0)
    with pytest.raises(InputError, match="paced"):
        Trainer(model, mode=Mode.PACED)
    trainer = Trainer(model, policy="resident", profile=profile_for(MEDIUM))
    with pytest.raises(InputError, match="call step inside"):
        trainer.trace()
    with trainer:
        trainer.step(batches(MEDIUM, 1)[0])
        with pytest.raises(InputError, match="memory is planned for the first batch"):
            trainer.step((torch.zeros(99, 4, dtype=torch.long), torch.zeros(99, 4, dtype=torch.long)))


def test_learning_learns() -> None:
    """A repeated batch is learned: the loss falls by half in 30 steps under a tight budget."""
    torch.manual_seed(0)
    model = GPT(MEDIUM, dropout=0.0)
    batch = batches(MEDIUM, 1)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with Trainer(model, gpu_memory="40%", optimizer=optimizer, hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
        losses = [trainer.step(batch) for _ in range(30)]
    assert losses[-1] < losses[0] / 2


def of_one_step(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The batch whose equal parts are ``parts``."""
    return torch.cat([ids for ids, _ in parts]), torch.cat([targets for _, targets in parts])


@pytest.mark.parametrize("policy", ["resident", "zero_offload", "autohete"])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_the_trainer_accumulates_to_the_bit(policy: str, clip_norm: float | None) -> None:
    """A Trainer with ``micro_batches`` gives the losses and parameters of plain training that accumulates."""
    workload = replace(MEDIUM, micro_batches=3, clip_norm=clip_norm)
    parts = batches(MEDIUM, 4 * 3)
    with Trainer(
        model_for(MEDIUM),
        policy=policy,
        gpu_memory="60%" if policy == "autohete" else None,
        profile=profile_for(MEDIUM),
        clip_norm=clip_norm,
        micro_batches=3,
    ) as trainer:
        torch.manual_seed(2)
        losses = [trainer.step(of_one_step(parts[3 * step : 3 * step + 3])) for step in range(4)]
        found = Outcome(losses, trainer.parameters())
        assert trainer.prediction is not None
        assert trainer.prediction.profile.workload.micro_batches == 3
        # Evaluating takes what it is given, and a step still finds its micro-batches.
        assert math.isfinite(trainer.evaluate(parts[:2]))
    assert found == train_plainly(workload, 4)


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    """The first batch, or a later one, whose sequences the micro-batches cannot share; training can go on."""
    ids, targets = of_one_step(batches(MEDIUM, 2))
    with Trainer(model_for(MEDIUM), policy="resident", profile=profile_for(MEDIUM), micro_batches=2) as trainer:
        with pytest.raises(InputError, match=r"^the batch has 3 sequences, which cannot be split into 2 equal micro-batches"):
            trainer.step((ids[:3], targets[:3]))
        trainer.step((ids, targets))
        with pytest.raises(InputError, match=r"^the batch has 3 sequences, which cannot be split into 2 equal micro-batches"):
            trainer.step((ids[:3], targets[:3]))
        trainer.step((ids[:2], targets[:2]))
    with pytest.raises(InputError, match=r"micro_batches is 0: give at least 1"):
        Trainer(model_for(MEDIUM), micro_batches=0)


def test_a_policy_that_cannot_accumulate_says_so() -> None:
    """It is refused when it plans, with what to do, and the model is given back."""
    model = model_for(MEDIUM)
    trainer = Trainer(model, policy="zero_offload:delayed_update", profile=profile_for(MEDIUM), micro_batches=2)
    with trainer, pytest.raises(InputError, match="use one micro-batch"):
        trainer.step(of_one_step(batches(MEDIUM, 2)))
    assert model(batches(MEDIUM, 1)[0][0]).isfinite().all()


@pytest.mark.parametrize("policy", ["mlp_offload", "zero_infinity"])
def test_a_policy_that_needs_drives_is_refused_without_them(policy: str) -> None:
    """Drives have no budget to plan for again: a machine without them refuses at once, and names the table."""
    with (
        Trainer(model_for(MEDIUM), policy=policy, profile=profile_for(MEDIUM)) as trainer,
        pytest.raises(InfeasibleError, match=r"rest in nvme, but .* has no such place.*\[places.nvme\]") as refused,
    ):
        trainer.step(batches(MEDIUM, 1)[0])
    assert (refused.value.constraint, refused.value.capacity_bytes) == ("nvme", 0)
