"""The loops that people have train within a budget, to the bit: transformers' Trainer and Lightning, as in ``examples/``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import LambdaCallback
from support.modules import VOCABULARY
from support.reference import lanes_alive, model_for
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.runtime.losses import next_token_loss
from autohete.workload import Precision, Workload
from examples.lightning_module import BudgetModule
from examples.transformers_trainer import BudgetTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning's use of torch
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*`torch.jit.script_method` is deprecated:DeprecationWarning"),  # torch's own, compiling
]
#: With a hardware the machine is not measured.
BUDGET: dict[str, Any] = {"gpu_memory": "95%", "hardware": load_hardware("v100-32gb-dgx2")}
SHAPE = Workload("loop", 32, 3, 4, vocabulary_size=VOCABULARY, sequence_length=16, batch_size=4, precision=Precision.FP32)
#: The configs' own are outside of this vocabulary.
NO_SPECIAL_TOKENS: dict[str, Any] = dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"])
#: What the loops log about training; the rest are times.
_LOGGED = {"loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step", "train_loss"}


def gpt2() -> Any:
    """GPT-2 with dropout and tied embeddings."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **NO_SPECIAL_TOKENS))


def gpt2_bf16() -> Any:
    """GPT-2 in 16 bits."""
    return gpt2().to(torch.bfloat16)


def llama() -> Any:
    """LLaMA, whose loss counts its items in another way."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **NO_SPECIAL_TOKENS))


class Own(nn.Module):
    """A model of one's own, whose loss does not take the number of items."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_for(SHAPE)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(input_ids)
        loss = None
        if labels is not None:
            loss = next_token_loss(logits, nn.functional.pad(labels, (0, 1), value=-100)[..., 1:])
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def sequences(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Random ids, and labels some of which are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (count, 8), generator=generator)
    ignored = torch.rand(ids.shape, generator=generator) < 0.2
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, ids.masked_fill(ignored, -100), strict=True)]


class _BeforeUpdates(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """What changes the settings of the update."""


class _OwnLoss(BudgetTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Another loss."""


def looped(
    kind: Any,
    model: Any,
    folder: Path,
    *,
    resume: str | None = None,
    until: int = 0,
    metrics: Any = None,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> Any:
    """A transformers Trainer of some kind that has trained."""
    torch.set_num_threads(1)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 5,
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "report_to": [],
    }
    args = transformers.TrainingArguments(str(folder), **(arguments | options))
    more: dict[str, Any] = {"budget": BUDGET} if issubclass(kind, BudgetTrainer) else {}
    more |= {"train_dataset": sequences(48, 1), "eval_dataset": sequences(8, 2), "compute_metrics": metrics}
    trainer = kind(model, args, callbacks=[_Stop(until), *callbacks], **more)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class _Stop(transformers.TrainerCallback):
    """Ends training after some steps."""

    def __init__(self, until: int) -> None:
        self.until = until

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.until


def logged(trainer: Any) -> list[dict[str, float]]:
    """What a transformers Trainer has logged."""
    return [{name: entry[name] for name in _LOGGED & set(entry)} for entry in trainer.state.log_history]


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (gpt2, {}),
        (gpt2_bf16, {}),
        (llama, {"max_grad_norm": 0.05, "lr_scheduler_type": "linear", "weight_decay": 0.1}),
        (gpt2, {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 3, "eval_strategy": "steps", "eval_steps": 2}),
        (llama, {"gradient_accumulation_steps": 2, "neftune_noise_alpha": 1.0}),
        (llama, {"activation_checkpointing": True}),
        (llama, {"bf16": True, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}),
        (Own, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "eval_strategy": "epoch", "num_train_epochs": 1}),
    ],
)
def test_the_loop_of_transformers_trains_to_the_bit(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Weights and all that is logged (losses, norms, rates, evaluations) are bit-identical to the loop without AutoHete."""
    plain = looped(transformers.Trainer, make(), tmp_path / "plain", **options)
    budgeted = looped(BudgetTrainer, make(), tmp_path / "budgeted", **options)
    assert same(plain.model, budgeted.model)
    assert logged(plain) == logged(budgeted)
    assert len(logged(budgeted)) > 5
    assert not lanes_alive()


def test_the_loop_may_begin_again_with_ones_own_optimizer(tmp_path: Path) -> None:
    """An optimizer and a scheduler of one's own are used, a second training goes on, and the optimizer works afterwards."""
    found = []
    for kind in (transformers.Trainer, BudgetTrainer):
        torch.set_num_threads(1)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        shared: dict[str, Any] = {"max_steps": 3, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": []}
        args = transformers.TrainingArguments(str(tmp_path), dataloader_pin_memory=False, **shared)
        more: dict[str, Any] = {"budget": BUDGET} if kind is BudgetTrainer else {}
        trainer = kind(model, args, train_dataset=sequences(48, 1), optimizers=(optimizer, schedule), **more)
        for _ in range(2):
            trainer.train()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found.append((model, logged(trainer)))
    (plain, expected), (budgeted, log) = found
    assert same(plain, budgeted)
    assert log == expected


def test_evaluations_choose_the_same_model(tmp_path: Path) -> None:
    """With metrics of the logits, and the best model loaded in the end, evaluations and the model they choose are equal."""
    found = []
    for kind in (transformers.Trainer, BudgetTrainer):
        every: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "right"}
        trainer = looped(kind, gpt2(), tmp_path / kind.__name__, metrics=_right, max_steps=6, **every, **best)
        found.append((trainer.model, [entry["eval_right"] for entry in trainer.state.log_history if "eval_right" in entry]))
    (plain, expected), (budgeted, rights) = found
    assert rights == expected
    assert len(rights) == 3
    assert same(plain, budgeted)


def _right(prediction: Any) -> dict[str, float]:
    """Share of tokens whose most likely successor is right."""
    ids = prediction.label_ids[:, 1:]
    return {"right": float((prediction.predictions[:, :-1].argmax(-1) == ids).mean())}


def test_without_clipping_no_norm_is_logged(tmp_path: Path) -> None:
    """Without ``max_grad_norm`` nothing waits for the norm, so the loop logs none; the rest is as usual."""
    plain = looped(transformers.Trainer, llama(), tmp_path / "plain", max_grad_norm=0.0)
    budgeted = looped(BudgetTrainer, llama(), tmp_path / "budgeted", max_grad_norm=0.0)
    without = [{name: value for name, value in entry.items() if name != "grad_norm"} for entry in logged(plain)]
    assert same(plain.model, budgeted.model)
    assert logged(budgeted) == without != logged(plain)


@pytest.mark.parametrize("make", [gpt2, gpt2_bf16])
@pytest.mark.parametrize(
    ("first", "second"),
    [(BudgetTrainer, BudgetTrainer), (transformers.Trainer, BudgetTrainer), (BudgetTrainer, transformers.Trainer)],
)
def test_checkpoints_of_transformers_resume_to_the_bit(first: Any, second: Any, make: Any, tmp_path: Path) -> None:
    """Either loop writes a checkpoint from which either resumes, and what it wrote loads as a model."""
    saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    whole = looped(transformers.Trainer, make(), tmp_path / "whole", **saved)
    looped(first, make(), tmp_path / "cut", until=4, **saved)
    resumed = looped(second, make(), tmp_path / "cut", resume=str(tmp_path / "cut" / "checkpoint-4"), **saved)
    assert same(whole.model, resumed.model)
    assert logged(whole)[:-1] == logged(resumed)[:-1]  # the last is the mean loss of the steps that each made
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "checkpoint-6")
    assert same(loaded, whole.model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torch_compile": True}, "is compiled"),
        (
            {"label_smoothing_factor": 0.1},
            "label_smoothing_factor, compute_loss_func and another compute_loss would be ignored",
        ),
        ({"optim": "adafactor"}, "the optimizer is transformers.optimization.Adafactor"),
        ({"callbacks": [_BeforeUpdates()]}, "on_pre_optimizer_step of a callback"),
        ({"kind": _OwnLoss}, "another compute_loss would be ignored"),
    ],
)
def test_what_transformers_does_otherwise_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Arguments and methods that would be ignored, or that would change the bits, are refused before the first step."""
    with pytest.raises(InputError, match=message):
        looped(options.pop("kind", BudgetTrainer), llama(), tmp_path, **options)
    assert not lanes_alive()


# --- Lightning


class _Configured(lightning.LightningModule):
    """What people write in their module besides its steps."""

    model: nn.Module

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Plain(_Configured):
    """A plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_for(SHAPE)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = next_token_loss(self.model(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", next_token_loss(self.model(batch[0]), batch[1]))


class Budgeted(_Configured, BudgetModule):
    """The same within a budget."""

    def __init__(self) -> None:
        super().__init__(model_for(SHAPE), **BUDGET)


def windows(count: int, seed: int) -> DataLoader[Any]:
    """Batches of random ids and targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (2, count, 16), generator=generator)
    return DataLoader(TensorDataset(*ids), batch_size=4)


def fitted(module: Any, folder: Path, *, resume: str | None = None, **options: Any) -> list[Any]:
    """Fit a module; return what Lightning knew after each batch."""
    torch.set_num_threads(1)
    lightning.seed_everything(3, verbose=False)
    found: list[Any] = []

    def note(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        metrics = {name: float(value) for name, value in trainer.logged_metrics.items()}
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        found.append((trainer.global_step, float(outputs["loss"]), rate, metrics))

    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "callbacks": [LambdaCallback(on_train_batch_end=note)],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(default_root_dir=folder, **(defaults | options))
    trainer.fit(module, windows(24, 1), windows(8, 2), ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 0.05}, {"precision": "bf16-true"}, {"precision": "bf16-mixed"}, {"max_steps": 5}],
)
def test_the_loop_of_lightning_trains_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    """Weights, losses, steps, rates and logged metrics are bit-identical to the loop without AutoHete."""
    plain, budgeted = Plain(), Budgeted()
    expected = fitted(plain, tmp_path / "plain", **options)
    assert fitted(budgeted, tmp_path / "budgeted", **options) == expected
    assert same(plain, budgeted)
    assert all(type(parameter) is nn.Parameter for parameter in budgeted.parameters())
    assert not lanes_alive()


@pytest.mark.parametrize(("first", "second"), [(Budgeted, Budgeted), (Plain, Budgeted), (Budgeted, Plain)])
def test_checkpoints_of_lightning_resume_to_the_bit(first: Any, second: Any, tmp_path: Path) -> None:
    """Either loop writes a checkpoint from which either resumes."""
    resumed = []
    for one, other, name in ((Plain, Plain, "plain"), (first, second, "cut")):
        fitted(one(), tmp_path / name, max_epochs=1)
        module = other()
        noted = fitted(module, tmp_path / name, resume=str(tmp_path / name / "last.ckpt"))
        resumed.append((module, noted))
    (plain, expected), (module, noted) = resumed
    assert noted == expected
    assert same(plain, module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "give larger batches, and micro_batches=2"),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, "gradients are clipped by norm only"),
        (
            {"callbacks": [LambdaCallback(on_before_optimizer_step=lambda *args: None)]},
            "on_before_optimizer_step would not be called",
        ),
    ],
)
def test_what_lightning_does_otherwise_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Options that would be ignored are refused before the first step."""
    with pytest.raises(InputError, match=message):
        fitted(Budgeted(), tmp_path, **options)


def test_an_exception_gives_the_model_back(tmp_path: Path) -> None:
    """When a callback fails, the module has ordinary parameters again, and no thread is left."""

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    module = Budgeted()
    with pytest.raises(ZeroDivisionError):
        fitted(module, tmp_path, callbacks=[LambdaCallback(on_train_batch_end=fail)])
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert not lanes_alive()
