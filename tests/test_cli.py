"""The command line as a person uses it: answers, refusals in one line, nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ["--hidden", "256", "--blocks", "4", "--heads", "4", "--vocabulary", "1000", "--batch-size", "2"]
KEYS = {
    "verdict",
    "iteration_seconds",
    "samples_per_second",
    "tokens_per_second",
    "tflops_per_gpu",
    "gpu_peak_bytes",
    "host_peak_bytes",
    "lanes",
    "bound_seconds",
    "plan",
}


def autohete(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python -m autohete`` and capture what it says."""
    command = [sys.executable, "-W", "error", "-m", "autohete", *arguments]
    environment = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=120)


def refused(*arguments: str) -> str:
    """The one line of a refusal."""
    done = autohete(*arguments)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("autohete: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_json_answers_the_promised_keys() -> None:
    """One policy gives one object with all keys and a busy share per lane between 0 and 1."""
    done = autohete("simulate", *SMALL, "--policy", "autohete", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer.keys() >= KEYS
    assert answer["verdict"] == "ok"
    assert answer["clock"] == "simulated"
    assert answer["plan"].keys() == {
        "checkpointed_blocks",
        "offloaded_parameter_blocks",
        "offloaded_optimizer_blocks",
        "blocks",
    }
    assert set(answer["lanes"]) == {"gpu", "h2d", "d2h", "cpu"}
    assert all(0 <= share <= 1 for share in answer["lanes"].values())
    assert answer["bound_seconds"] <= answer["iteration_seconds"]
    assert answer["samples_per_second"] == pytest.approx(2 / answer["iteration_seconds"])
    assert answer["tokens_per_second"] == pytest.approx(2 * 1024 / answer["iteration_seconds"])


def test_several_policies_are_compared_in_order() -> None:
    """Repeating --policy gives a list in the order given, and a table with a row for each."""
    policies = ["stronghold:window=2", "zero_offload:paper", "autohete:priority=off"]
    flags = [word for policy in policies for word in ("--policy", policy)]
    answers = json.loads(autohete("simulate", *SMALL, *flags, "--json").stdout)
    assert [answer["policy"] for answer in answers] == policies
    shown = autohete("simulate", *SMALL, *flags)
    assert shown.returncode == 0
    assert all(policy in shown.stdout for policy in policies)


def test_out_of_memory_is_an_answer() -> None:
    """What does not fit is told with exit code 0, its verdict, what is short, and no throughput."""
    for policy, expected in (("zero_offload", "largest:"), ("autohete", "the smallest that works is")):
        done = autohete("simulate", "--workload", "gpt-4b", "--gpu-memory", "4GiB", "--policy", policy, "--json")
        answer = json.loads(done.stdout)
        assert done.returncode == 0
        assert answer["verdict"] == "gpu-out-of-memory"
        assert expected in answer["explanation"]
        assert answer["samples_per_second"] is None
        assert answer["gpu_peak_bytes"] > answer["gpu_capacity_bytes"]
    host = autohete("simulate", "--workload", "gpt-4b", "--host-memory", "8GB", "--policy", "zero_offload", "--json")
    assert json.loads(host.stdout)["verdict"] == "host-out-of-memory"
    table = autohete("simulate", "--workload", "gpt-4b", "--gpu-memory", "4GiB")
    assert table.returncode == 0
    assert "gpu-out-of-memory" in table.stdout


def test_options_change_a_named_workload() -> None:
    """A named workload's figures can be changed one by one, and hardware by key."""
    base = ["simulate", "--workload", "gpt-2b", "--policy", "resident", "--hardware", "h200-pcie5", "--json"]
    one, two = (json.loads(autohete(*base, "--batch-size", size).stdout) for size in ("1", "2"))
    assert two["iteration_seconds"] > one["iteration_seconds"]
    slow = json.loads(autohete(*base, "--batch-size", "1", "--set", "gpu.peak_16bit=100TFLOP/s").stdout)
    assert slow["iteration_seconds"] > one["iteration_seconds"]


def test_same_input_same_output() -> None:
    """Two runs print byte-identical JSON and write byte-identical timelines."""
    runs = [autohete("simulate", *SMALL, "--policy", "autohete", "--json", "--trace", "/dev/stderr") for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stderr == runs[1].stderr
    assert len(runs[0].stderr) > 1000


def test_timelines_are_written(tmp_path: Path) -> None:
    """--trace writes a document that Perfetto loads, --gantt a picture; nothing else stays behind."""
    trace, gantt = tmp_path / "trace.json", tmp_path / "gantt.png"
    done = autohete("simulate", *SMALL, "--policy", "stronghold", "--trace", str(trace), "--gantt", str(gantt))
    assert done.returncode == 0, done.stderr
    assert any(event.get("ph") == "X" for event in json.loads(trace.read_text())["traceEvents"])
    assert gantt.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gantt.png", "trace.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "gpt-3b"], "unknown workload 'gpt-3b'"),
        (["--workload", "gpt-2b", "--policy", "zero"], "unknown policy 'zero'"),
        (["--workload", "gpt-2b", "--policy", "zero_offload:fast"], "unknown flag of zero_offload 'fast'"),
        (["--workload", "gpt-2b", "--hardware", "a100"], "unknown hardware 'a100'"),
        (["--workload", "gpt-2b", "--hardware", "/none/such.toml"], "cannot be read"),
        (["--workload", "gpt-2b", "--set", "links.h2d.bandwidth"], "is not KEY=VALUE"),
        (["--workload", "gpt-2b", "--set", "links.h2d.bandwidth=50"], "has no unit"),
        (["--workload", "gpt-2b", "--gpu-memory", "16"], "has no unit"),
        (["--workload", "gpt-2b", "--gpu-memory=-16GiB"], "positive"),
        (["--workload", "gpt-2b", "--gpu-memory", "-16GiB"], "--gpu-memory requires an argument"),
        (["--hidden", "100", "--blocks", "2", "--heads", "3"], "not divisible by 3 heads"),
        (["--hidden", "128", "--heads", "4"], "missing.*--blocks"),
        ([], "--workload NAME"),
        (["--hidden", "-128", "--blocks", "2", "--heads", "4"], "hidden_size is -128"),
        (["--hidden", "x", "--blocks", "2", "--heads", "4"], "--hidden"),
        (["--workload", "gpt-2b", "--precision", "int8"], "precision"),
        (["--workload", "gpt-2b", "--frobnicate"], "frobnicate"),
        (["--workload", "gpt-2b", "--gantt", "x.png"], "show one policy, not 5"),
        (["--workload", "gpt-2b", "--policy", "resident", "--gantt", "x.bmp"], "png"),
        (["--workload", "gpt-2b", "--policy", "resident", "--trace", "t.json", "--gantt", "x.bmp"], "png"),
        (["--workload", "gpt-2b", "--policy", "resident", "--trace", "x.png", "--gantt", "x.png"], "the same file"),
        (["--workload", "gpt-2b", "--policy", "resident", "--trace", ""], "names no file"),
        (["--workload", "gpt-2b", "--set", "cpu.cores=2", "--set", "cpu.cores=3"], "set twice"),
        (["--workload", "gpt-2b", "--policy", "stronghold:window=" + "9" * 5000], "whole number"),
        (["--hidden", "1000000", "--blocks", "3", "--heads", "1000", "--batch-size", "1000000"], "would last"),
        (["--workload", "gpt-2b", "--policy", "resident", "--trace", "/none/such/x.json"], "cannot be written"),
        (["--workload", "gpt-2b", "--gpu-memory", "3GiB", "--policy", "autohete", "--trace", "x.json"], "no timeline"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    """Whatever cannot be taken is refused with exit code 2 and one line that says what was given and what is allowed."""
    import re

    assert re.search(message, refused("simulate", *arguments))


def test_a_refusal_leaves_an_existing_file_alone(tmp_path: Path) -> None:
    """An output that cannot be replaced stays as it was, and no part of a new one is left."""
    folder = tmp_path / "folder"
    (folder / "x.json").mkdir(parents=True)
    assert "cannot be written" in refused("simulate", *SMALL, "--policy", "resident", "--trace", str(folder / "x.json"))
    assert [path.name for path in folder.iterdir()] == ["x.json"]


def test_unknown_commands_are_refused() -> None:
    """A command that does not exist is refused in one line."""
    assert "simulte" in refused("simulte")


SHAPED = [*SMALL, "--precision", "fp16", "--set", "gpu.memory_efficiency=0.7", "--host-memory", "64GiB"]


def test_a_plan_answers_the_same_question_as_a_simulation() -> None:
    """``plan --json`` is the object of ``simulate --json`` and the decisions of all blocks; it takes the same options."""
    question = ["--policy", "autohete", "--json", "--gpu-memory", "1640MB", *SHAPED]
    simulated, planned = (json.loads(autohete(command, *question).stdout) for command in ("simulate", "plan"))
    decisions = planned.pop("decisions")
    assert planned == simulated
    assert planned["verdict"] == "ok"
    assert [run["first_block"] for run in decisions] == [0, *(run["last_block"] + 1 for run in decisions[:-1])]
    assert decisions[-1]["last_block"] + 1 == planned["plan"]["blocks"] == 6
    sizes = [run["last_block"] + 1 - run["first_block"] for run in decisions]
    for count, field, value in (
        ("checkpointed_blocks", "activations", "recompute"),
        ("offloaded_parameter_blocks", "parameters", "offloaded"),
        ("offloaded_optimizer_blocks", "optimizer", "cpu"),
    ):
        counted = sum(size for run, size in zip(decisions, sizes, strict=True) if run[field] == value)
        assert counted == planned["plan"][count], field


def test_both_commands_have_the_options_of_a_question() -> None:
    """Every option that describes a training is an option of ``simulate`` and of ``plan``, with the same words."""
    helps = [autohete(command, "--help").stdout for command in ("simulate", "plan")]
    for option in ("workload", "hidden", "blocks", "heads", "vocabulary", "sequence-length", "batch-size", "precision"):
        assert all(f"--{option} " in shown for shown in helps), option
    for option in ("tied-embeddings", "fused-attention", "profile", "hardware", "set", "gpu-memory", "host-memory"):
        assert all(f"--{option} " in shown for shown in helps), option
    assert all("such as 16GiB; short for --set gpu.memory=16GiB" in shown for shown in helps)


@pytest.mark.parametrize(("policy", "message"), [("autohete", "the smallest that works is"), ("zero_offload", "largest:")])
def test_a_plan_that_does_not_fit_is_an_answer(policy: str, message: str, tmp_path: Path) -> None:
    """Where nothing fits ``plan`` says so with exit code 0, as ``simulate`` does; without a plan there is no schedule."""
    tight = ["plan", "--workload", "gpt-4b", "--gpu-memory", "4GiB", "--policy", policy]
    done = autohete(*tight)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{policy}: gpu-out-of-memory: " in done.stdout
    assert message in done.stdout
    answer = json.loads(autohete(*tight, "--json").stdout)
    assert answer["verdict"] == "gpu-out-of-memory"
    assert bool(answer["decisions"]) == (answer["plan"] is not None) == (policy == "zero_offload")
    if answer["plan"] is None:
        assert "there is no schedule to write" in refused(*tight, "--schedule", str(tmp_path / "x.txt"))
        assert list(tmp_path.iterdir()) == []


def test_presets_list_everything_that_can_be_named() -> None:
    """``presets`` names every workload, hardware and policy."""
    from autohete.hardware import preset_names
    from autohete.policies import POLICIES
    from autohete.workload import WORKLOADS

    shown = autohete("presets").stdout
    assert all(name in shown for name in [*WORKLOADS, *preset_names(), *POLICIES])


def test_help_needs_no_heavy_import() -> None:
    """``--help`` loads neither SciPy nor matplotlib, SimPy or torch."""
    code = (
        "import sys, contextlib\n"
        "from autohete.cli import main\n"
        "sys.argv = ['autohete', 'simulate', '--help']\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print(sorted(m for m in ('scipy', 'matplotlib', 'simpy', 'torch') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--gpu-memory" in done.stdout


def test_a_full_disk_is_an_error_in_one_line() -> None:
    """Output that cannot be written is told in one line."""
    command = f"{sys.executable} -m autohete presets > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("autohete: the output cannot be written: No space left")
    assert done.stderr.count("\n") == 1


def test_a_closed_pipe_is_no_error() -> None:
    """``| head`` ends the program quietly."""
    command = f"{sys.executable} -m autohete presets | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
