"""``autohete plan`` with frameworks: what is written, what is recommended, and what a configuration means."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.answers import QUICK, WORKLOAD, answer, profile_at, site
from support.command import SMALL, autohete, refused

from autohete.answer import Sampling, find_answer
from autohete.answer.answer_document import answer_json
from autohete.answer.policies import Judged
from autohete.cli.frameworks import RunOptions
from autohete.cli.from_config import advise
from autohete.cli.question import DEFAULT_HARDWARE, Question, Shape
from autohete.errors import InputError
from autohete.frameworks.advice import AdvisedSpeed
from autohete.frameworks.deepspeed_reading import read_deepspeed
from autohete.hardware import load_hardware
from autohete.report.answer_text import answer_text
from autohete.workload import Kernels
from autohete.workload.training import Adapters

#: A GPU in which DeepSpeed's policies fit, and a resident one does not.
ROOM = "2600MiB"
OFFLOAD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
}


@pytest.mark.slow
def test_files_of_a_policy_are_written(tmp_path: Path) -> None:
    """They appear in a new folder, for a framework that runs the policy, and the command that starts it is printed."""
    done = autohete("plan", *SMALL, "--policy", "zero_offload", "--write", "run/here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Written to run/here for deepspeed 0.19.8, which runs zero_offload" in done.stdout
    assert "torchrun --nproc-per-node 1 train.py" in done.stdout
    config = json.loads((tmp_path / "run" / "here" / "ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert json.loads((tmp_path / "run" / "here" / "model" / "config.json").read_text())["n_embd"] == 256
    other = autohete("plan", *SMALL, "--policy", "zero_offload", "--runnable=trainer", "--write", "own", "--json", cwd=tmp_path)
    assert json.loads(other.stdout)["written"]["framework"] == "trainer"
    assert not (tmp_path / "own" / "ds_config.json").exists()


@pytest.mark.slow
def test_written_files_have_the_seconds_of_the_kernels_that_they_run(tmp_path: Path) -> None:
    """Whatever kernels were asked for; the plan is made for these, and what does not fit with them is not written."""

    def simulated(*options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(autohete("simulate", *SMALL, *options, "--json").stdout)
        return found

    ways = {"fused": ("zero_offload", "deepspeed", "eager_flash"), "eager_flash": ("resident", "megatron", "fused")}
    for asked, (policy, framework, runs) in ways.items():
        given = ["--policy", policy, "--kernels", asked]
        done = autohete("plan", *SMALL, *given, "--runnable", framework, "--write", framework, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        document, then = json.loads(done.stdout), simulated("--policy", policy, "--kernels", runs)
        assert document["iteration_seconds"] == simulated(*given)["iteration_seconds"] != then["iteration_seconds"]
        assert (document["written"]["kernels"], document["written"]["iteration_seconds"]) == (runs, then["iteration_seconds"])
    script = (tmp_path / "deepspeed" / "train.py").read_text()
    seconds = simulated("--policy", "zero_offload", "--kernels", "eager_flash")["iteration_seconds"]
    assert f"SIMULATED_SECONDS = {seconds:.4g}\n" in script
    keeping = ["--policy", "zero_offload:checkpointing=none"]
    reserved, peak = load_hardware(DEFAULT_HARDWARE).gpu.reserved_bytes, simulated(*keeping)["gpu_peak_bytes"]
    short = [*keeping, "--kernels", "fused", "--gpu-memory", f"{peak + reserved}B", "--write", str(tmp_path / "none")]
    assert "deepspeed runs eager_flash kernels, with which it does not fit: needs" in refused("plan", *SMALL, *short)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_written_files_have_the_seconds_of_the_adapters_that_they_train(tmp_path: Path) -> None:
    """Scripts hold them in the type of the model; PEFT's default, fp32 under autocast, is that of a question. Others are not
    written, but in LLaMA-Factory.
    """
    asked = [
        "--model",
        "llama-3.2-1b",
        "--policy",
        "resident:deepspeed,zero_stage=2",
        "--lora",
        "8",
        "--kernels",
        "eager_flash",
    ]
    done = autohete("plan", *asked, "--runnable", "deepspeed", "--write", "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    plain = json.loads(autohete("simulate", *asked, "--adapters", "plain", "--json").stdout)["iteration_seconds"]
    assert document["written"]["iteration_seconds"] == plain < document["iteration_seconds"]
    script = (tmp_path / "run" / "train.py").read_text()
    assert "autocast_adapter_dtype=False" in script
    cast = ["--adapters", "cast", "--runnable=deepspeed", "--write", str(tmp_path / "none")]
    assert "deepspeed is written here with adapters plain: plan with these" in refused("plan", *asked, *cast)


def test_a_framework_brings_its_adapters() -> None:
    """To a question that is limited to it, unless it is given how they are held."""
    shape = Shape(hidden_size=256, transformer_blocks=4, heads=4, precision="bf16", lora=8)

    def brought(shape: Shape, *names: str) -> Adapters | None:
        return RunOptions(runnable=names).as_it_runs(Question(shape=shape)).shape.adapters

    assert brought(shape, "deepspeed") is brought(shape, "fsdp2,trainer") is Adapters.PLAIN
    assert brought(shape, "llamafactory") is brought(shape, "llamafactory,deepspeed") is None
    assert brought(replace(shape, precision="fp32"), "deepspeed") is None
    assert brought(replace(shape, adapters=Adapters.CAST), "deepspeed") is Adapters.CAST


@pytest.mark.slow
def test_a_framework_brings_its_kernels() -> None:
    """To a question that is limited to it, unless kernels are given or those of several frameworks differ."""
    shape = Shape(hidden_size=256, transformer_blocks=4, heads=4)
    kernels = {
        (names, given): RunOptions(runnable=names).as_it_runs(Question(shape=replace(shape, kernels=given))).shape.kernels
        for names in (None, (), ("deepspeed",), ("fsdp2,deepspeed",), ("megatron",), ("megatron,trainer",))
        for given in (None, Kernels.LEAN)
    }
    brought = {names: found for (names, given), found in kernels.items() if given is None}
    assert {found for (_, given), found in kernels.items() if given is not None} == {Kernels.LEAN}
    assert brought.pop(("megatron",)) is Kernels.FUSED
    assert {names for names, found in brought.items() if found is Kernels.EAGER_FLASH} == {("deepspeed",), ("fsdp2,deepspeed",)}
    said = " ".join(answer_text(answer(ROOM, (*QUICK, "zero3_offload"))).split())
    assert re.search(r"times are of fused kernels, but deepspeed, [a-z0-9_, ]+ run eager_flash ones", said)


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    """Nothing is computed or written where files could be replaced, or where a file stands."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "train.py").write_text("mine")
    policy = ["plan", *SMALL, "--policy", "zero_offload", "--write"]
    assert "not empty" in refused(*policy, str(tmp_path / "full"))
    assert "is a file" in refused(*policy, str(tmp_path / "full" / "train.py"))
    assert (tmp_path / "full" / "train.py").read_text() == "mine"


def test_what_no_framework_runs_is_not_written(tmp_path: Path) -> None:
    """The refusal has the reason of each framework that was asked, and no folder appears."""
    said = refused("plan", *SMALL, "--policy", "patrickstar", "--runnable=deepspeed,fsdp2", "--write", str(tmp_path / "run"))
    assert "deepspeed places and orders work in its own way" in said
    assert "fsdp2 places" in said
    said = refused("plan", *SMALL, "--gpu-memory", "1.01GiB", "--policy", "resident", "--write", str(tmp_path / "run"))
    assert "does not fit" in said
    assert not (tmp_path / "run").exists()
    assert "unknown framework" in refused("plan", *SMALL, "--runnable=deepsped")


@pytest.mark.slow
def test_a_framework_limits_the_recommendation() -> None:
    """Only its plans are candidates, the best of them is recommended, and the text says so; without it nothing is left out."""
    every = answer(ROOM, (*QUICK, "zero3_offload"))
    where = site(gpu_memory=ROOM)
    only = find_answer(
        profile_at(where, less=0),
        where,
        policies=(*QUICK, "zero3_offload"),
        sampling=Sampling(0),
        runnable=("deepspeed",),
    )
    names = [each.name for each in every.candidates if each.fits and "deepspeed" in each.runs_in]
    assert [each.name for each in only.candidates if each.fits] == names
    assert len(names) == 2
    assert "runs in" in answer_text(every)
    assert [each["runs_in"] for each in answer_json(only)["policies"] if each["policy"] == "zero_offload"] == [
        ["deepspeed", "trainer"]
    ]
    with pytest.raises(InputError, match="torchtune can run no plan"):
        find_answer(profile_at(where, less=0), where, policies=QUICK, sampling=Sampling(0), runnable=("torchtune",))


def test_advice_compares_with_what_runs() -> None:
    """The configuration's time is that of its policy; a plan that is faster comes with the keys that make it so."""
    kept = {"stage3_gather_16bit_weights_on_model_save": True}
    config = OFFLOAD | {"zero_optimization": OFFLOAD["zero_optimization"] | kept}
    read = read_deepspeed(json.dumps(config), gpus=1, hidden_size=WORKLOAD.hidden_size)
    found = answer(ROOM, (*QUICK, "zero3_offload"))
    advice = advise("ds.json", read, found)
    now = Judged(found.profile, (read.policy,))()
    assert advice.now is not None
    assert advice.then is not None
    assert advice.now.iteration_seconds == now.seconds
    best = min((each for each in found.candidates if "deepspeed" in each.runs_in and each.fits), key=lambda each: each.seconds)
    assert (advice.better, advice.then.iteration_seconds) == (best.name, best.seconds)
    changed = {change.key: change.after for change in advice.changes}
    assert changed["zero_optimization.offload_optimizer.pin_memory"] is True
    assert not {"zero_optimization.overlap_comm", *(f"zero_optimization.{key}" for key in kept)} & {*changed}
    assert f"{now.seconds / best.seconds:.2f}x as fast" in str(advice)
    slower = replace(
        advice, now=AdvisedSpeed(now.seconds / 4, advice.then.tokens_per_second / 2)
    )  # of a fourth of the batch, say
    assert "2.00x as fast" in str(slower)
    assert advice.at_best is None or advice.at_best.tokens_per_second > advice.then.tokens_per_second


@pytest.mark.slow
def test_a_configuration_is_a_question(tmp_path: Path) -> None:
    """Its batch and precision are taken; an option that contradicts it, or a file that is none, is refused with its name."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(OFFLOAD))
    shape = SMALL[: SMALL.index("--batch-size")]
    quick = ["--draws", "0", "--jobs", "1", "--runnable=deepspeed"]
    done = autohete("plan", *shape, *quick, "--from", str(path), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["configuration"]["policy"] == "zero_offload:bucket_size=500,deepspeed=2026,pin_memory=off"
    assert found["best"]["assumptions"]["batch_size"] == 4
    assert "batch-size is 2, but" in refused("plan", *SMALL, "--from", str(path))
    assert "--policy, or --from" in refused("plan", *shape, "--policy", "resident", "--from", str(path))
    assert "is no file" in refused("plan", *shape, "--from", str(tmp_path / "absent.json"))
    assert "unknown flag" in refused("plan", *shape, "--from", f"{path}:nonsense=3")
