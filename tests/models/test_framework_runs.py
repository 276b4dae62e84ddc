"""The written scripts run as they stand: two steps of a tiny model on the CPU, with the tools' own code."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.decided import TINY, decided, files_of

from autohete.frameworks.deepspeed import CONFIG, RELEASE_OF_ZENFLOW
from autohete.workload import Precision, Workload
from autohete.workload.training import Lora, Training

ROOT = Path(__file__).parents[2]
SMALL = replace(TINY, precision=Precision.FP32, clip_norm=0.5, tied_embeddings=False)
CAST = replace(SMALL, autocast=Precision.BF16)
ADAPTED = replace(SMALL, training=Training(Lora(4)))
#: Saves weights of the first script's model, and runs each of some scripts as ``python train.py --steps 2 --model weights``.
RUNNER = """
import pathlib, runpy, sys, transformers
weights, *scripts = sys.argv[1:]
config = transformers.AutoConfig.from_pretrained(pathlib.Path(scripts[0]).parent / "model")
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0  # frameworks draw different random numbers
transformers.AutoModelForCausalLM.from_config(config).save_pretrained(weights)
for script in scripts:
    sys.argv = [script, "--steps", "2", "--model", weights]
    print("script", script)
    runpy.run_path(script, run_name="__main__")
"""
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "DS_ACCELERATOR": "cpu",
}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install -e '.[frameworks]'"
)
BUILT = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
needs_cpu_adam = pytest.mark.skipif(
    not any(BUILT.rglob("cpu_adam.so")),
    reason="DeepSpeed's CPU Adam is not built; this builds it in some minutes: "
    'python -c "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"',
)


def losses(folder: Path, scripts: dict[str, tuple[str, str, Workload]]) -> dict[str, list[float]]:
    """The losses that scripts print, by name: written for a framework, a policy and a workload, and run in one process."""
    for name, (framework, policy, workload) in scripts.items():
        for file, text in files_of(framework, decided(policy, workload)).items():
            (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / file).write_text(text)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        RUNNER,
        str(folder / "weights"),
        *(str(folder / name / "train.py") for name in scripts),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = re.split(r"^script .*$", done.stdout, flags=re.MULTILINE)[1:]
    found = (re.findall(r"^step \d: loss ([\d.]+), ", part, re.MULTILINE) for part in parts)
    return {name: list(map(float, each)) for name, each in zip(scripts, found, strict=True)}


@pytest.mark.slow
def test_scripts_of_all_frameworks_train_alike(tmp_path: Path) -> None:
    """From the same weights and batches, FSDP2 with offloading and the Trainer have the losses of the plain loop; also under
    autocast, whose losses are others.
    """
    found = losses(
        tmp_path,
        {
            "torch": ("torch", "resident:checkpointing=none", SMALL),
            "fsdp2": ("fsdp2", "fsdp2_offload:checkpointing=full", SMALL),
            "trainer": ("trainer", "zero_offload:checkpointing=full", SMALL),
            "torch, autocast": ("torch", "resident:checkpointing=none", CAST),
            "trainer, autocast": ("trainer", "zero_offload:checkpointing=full", CAST),
        }
        | ({"adapters": ("trainer", "resident", ADAPTED)} if importlib.util.find_spec("peft") else {}),
    )
    assert len(found["torch"]) == 2
    assert found["torch"][0] == pytest.approx(math.log(SMALL.vocabulary_size), abs=0.2)
    cast = [found.pop(name) for name in ("torch, autocast", "trainer, autocast")]
    assert cast[0] == pytest.approx(cast[1], abs=2e-6)
    assert cast[0] != found["torch"]
    assert cast[0] == pytest.approx(found["torch"], abs=2e-2)
    for name, each in found.items():
        assert each[0] == pytest.approx(found["torch"][0], abs=2e-6), name
        assert name == "adapters" or each == pytest.approx(found["torch"], abs=2e-6), name


@pytest.mark.slow
@needs_deepspeed
@needs_cpu_adam
@pytest.mark.parametrize(
    "policy", ["zero_offload:checkpointing=full", "zero3_offload:checkpointing=none", "twin_flow:ratio=50"]
)
def test_deepspeed_trains_with_the_written_file(policy: str, tmp_path: Path) -> None:
    """DeepSpeed runs its optimizer offload as written, with the losses of the plain loop."""
    found = losses(
        tmp_path, {"torch": ("torch", "resident:checkpointing=none", SMALL), "deepspeed": ("deepspeed", policy, SMALL)}
    )
    assert found["deepspeed"] == pytest.approx(found["torch"], abs=2e-5)


@pytest.mark.slow
@needs_deepspeed
@needs_cpu_adam
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is not None and importlib.metadata.version("deepspeed") != RELEASE_OF_ZENFLOW,
    reason=f"ZenFlow is written for DeepSpeed {RELEASE_OF_ZENFLOW}",
)
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_zenflow_trains_with_the_written_file(overlap: str, tmp_path: Path) -> None:
    """It begins with the weights that it is given, and updates a tenth of their columns before the second micro-batch."""
    policy = f"zenflow:checkpointing=full,overlap_step={overlap}"
    found = losses(
        tmp_path, {"torch": ("torch", "resident:checkpointing=none", SMALL), "zenflow": ("deepspeed", policy, SMALL)}
    )
    assert found["zenflow"] == pytest.approx(found["torch"], abs=5e-4)
    assert found["zenflow"][0] != pytest.approx(found["torch"][0], abs=2e-6)


PARSE = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
for path in sys.argv[1:]:
    config = DeepSpeedConfig(path)
    zero = config.zero_config
    places = [part and part.device for part in (zero.offload_optimizer, zero.offload_param)]
    sizes = [config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps, config.gradient_clipping]
    print(json.dumps([int(zero.stage), *(getattr(place, "value", place) for place in places), *sizes]))
"""


@pytest.mark.slow
@needs_deepspeed
def test_deepspeed_reads_every_file(tmp_path: Path) -> None:
    """Its own parser takes each policy's file, with the stage, the places and the batch that were meant."""
    meant: dict[str, list[object]] = {
        "zero_offload": [2, "cpu", None],
        "zero3_offload": [3, "cpu", "cpu"],
        "zero3_offload:offload_param=off": [3, "cpu", None],
        "zenflow": [2, "cpu", None],
        "twin_flow:ratio=30": [3, "cpu", None],
        "zero_infinity:offload_param,pipeline": [3, "nvme", "cpu"],
        "resident:zero_stage=1,deepspeed": [1, None, None],
    }
    paths = [tmp_path / f"{number}.json" for number in range(len(meant))]
    for path, policy in zip(paths, meant, strict=True):
        path.write_text(files_of("deepspeed", decided(policy, SMALL))[CONFIG])
    command = [sys.executable, "-W", "ignore", "-c", PARSE, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[1,", "[2,", "[3,"))]
    assert read == [[*places, 2, 2, 0.5] for places in meant.values()]
