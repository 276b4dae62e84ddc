"""The command line as a person uses it: answers, refusals in one line, nothing half-written."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command import ENVIRONMENT, SMALL, autohete, in_a_process, refused

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
    "proven_within",
    "plan",
}


def test_pinned_memory_is_limited() -> None:
    """``--pinned-memory`` limits a part of the host's memory, and the verdict names it; without it there is no such limit."""
    asked = ["simulate", *SMALL, "--policy", "streamed_states", "--json"]
    free, limited = (json.loads(autohete(*asked, *more).stdout) for more in ([], ["--pinned-memory", "1MiB"]))
    assert (free["pinned_capacity_bytes"], free["pinned_peak_bytes"]) == (None, None)
    assert (limited["verdict"], limited["pinned_capacity_bytes"]) == ("pinned-out-of-memory", 2**20)
    assert 2**20 < limited["pinned_peak_bytes"] <= limited["host_peak_bytes"] == free["host_peak_bytes"]
    twice = refused("simulate", *SMALL, "--pinned-memory", "1GiB", "--set", "host.pinned_memory=2GiB")
    assert "host.pinned_memory is set twice" in twice


def test_clipping_is_an_assumption_and_takes_time() -> None:
    """``--clip-norm`` is in the answer, which is slower for it; what is no norm is refused."""
    runs = [["simulate", *SMALL, "--policy", "resident", "--json", *more] for more in ([], ["--clip-norm", "1.0"])]
    plain, clipped = (json.loads(autohete(*run).stdout) for run in runs)
    assert (plain["assumptions"]["clip_norm"], clipped["assumptions"]["clip_norm"]) == (None, 1.0)
    assert clipped["iteration_seconds"] > plain["iteration_seconds"]
    assert "clip_norm is -1.0: give a finite number above 0" in refused("simulate", *SMALL, "--clip-norm", "-1.0")


@pytest.mark.slow
def test_the_default_comparison_leaves_out_what_cannot_accumulate() -> None:
    """With several micro-batches all that is compared answers; PatrickStar by name is refused with a way out."""
    answers = json.loads(autohete("simulate", *SMALL, "--micro-batches", "2", "--json").stdout)
    assert [answer["policy"] for answer in answers] == ["resident", "zero_offload", "stronghold", "autohete"]
    assert "patrickstar cannot accumulate" in refused("simulate", *SMALL, "--micro-batches", "2", "--policy", "patrickstar")


def test_the_default_comparison_updates_as_the_optimizer_does() -> None:
    """With an optimizer that updates within backward, so does the ordinary training that is compared: all answers are valid."""
    answers = json.loads(autohete("simulate", *SMALL, "--optimizer", "lomo", "--json").stdout)
    assert [(answer["policy"], answer["verdict"]) for answer in answers] == [("resident:in_backward", "ok"), ("autohete", "ok")]


def test_a_model_is_asked_for_by_name_or_by_its_file(tmp_path: Path) -> None:
    """A bundled name and its own config.json give one answer; figures of the batch can be changed, those of blocks cannot."""
    file = Path(__file__).parents[2] / "autohete" / "workload" / "models" / "llama-3.2-1b.json"
    small = ["--batch-size", "1", "--sequence-length", "4096", "--policy", "zero_offload", "--json"]
    named, read = (json.loads(autohete("simulate", "--model", model, *small).stdout) for model in ("llama-3.2-1b", str(file)))
    assert named == read
    assert named["assumptions"]["blocks"] == ["16 x (32/8 heads x 64, gated MLP 8192)"]
    chunked = json.loads(autohete("simulate", "--model", "llama-3.2-1b", *small, "--chunked-loss").stdout)
    assert chunked["gpu_peak_bytes"] < named["gpu_peak_bytes"]
    assert "--hidden would change what the blocks of --model" in refused("simulate", "--model", "gpt2", "--hidden", "64")
    assert "give one" in refused("simulate", "--model", "gpt2", "--workload", "gpt-2b")
    assert "did you mean 'llama-3.2-1b'" in refused("simulate", "--model", "llama-3.2-1")
    assert "cannot be read" in refused("simulate", "--model", str(tmp_path / "none.json"))


def test_json_answers_the_promised_keys() -> None:
    """One policy gives one object with all keys and a busy share per lane between 0 and 1."""
    done = autohete("simulate", *SMALL, "--policy", "autohete", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer.keys() >= KEYS
    assert answer["verdict"] == "ok"
    assert answer["clock"] == "simulated"
    assert answer["plan"].keys() == {
        "checkpointed_units",
        "offloaded_parameter_units",
        "offloaded_optimizer_units",
        "units",
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


@pytest.mark.slow
def test_attention_and_mlp_are_planned_apart() -> None:
    """With --units sublayer a plan decides for two units in each block, and tables say so."""
    options = ["--workload", "gpt-4b", "--units", "sublayer", "--policy", "autohete"]
    answer = json.loads(autohete("simulate", *options, "--json").stdout)
    assert answer["assumptions"]["units"] == "sublayer"
    assert answer["plan"]["units"] == 2 * 21 + 2
    shown = autohete("simulate", *options).stdout
    assert "units sublayer" in shown.splitlines()[0]
    assert "of 44 units (embedding, sublayers, head)" in shown
    planned = autohete("plan", *options).stdout
    assert re.search(r"^[\d to]+, attention ", planned, re.MULTILINE)
    assert re.search(r"^[\d to]+, mlp ", planned, re.MULTILINE)


@pytest.mark.slow
def test_same_input_same_output() -> None:
    """Two processes print byte-identical JSON and write byte-identical timelines."""
    runs = [in_a_process("simulate", *SMALL, "--policy", "autohete", "--json", "--trace", "/dev/stderr") for _ in range(2)]
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


def test_several_gpus() -> None:
    """--gpus compares policies that share a model, and its table says whose numbers it shows."""
    done = autohete("simulate", *SMALL, "--gpus", "4")
    assert done.returncode == 0, done.stderr
    assert "on 4 GPUs of a100-40gb-epyc7713" in done.stdout
    assert "samples/s and tokens/s are those of all" in " ".join(done.stdout.split())
    assert "resident:zero_stage=3" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "gpt-3b"], "unknown workload 'gpt-3b'"),
        (["--workload", "gpt-2b", "--policy", "zero"], "unknown policy 'zero'"),
        (["--workload", "gpt-2b", "--policy", "zero_offload:fast"], "unknown flag of zero_offload 'fast'"),
        (
            ["--workload", "gpt-2b", "--hardware", "a100"],
            "a part of 2: give one of a100-40gb-epyc7543p .*7713 ",
        ),
        (["--workload", "gpt-2b", "--hardware", "/none/such.toml"], "cannot be read"),
        (["--workload", "gpt-2b", "--set", "links.h2d.bandwidth"], "is not KEY=VALUE"),
        (["--workload", "gpt-2b", "--set", "links.h2d.bandwidth=50"], "has no unit"),
        (["--workload", "gpt-2b", "--gpu-memory", "16"], "has no unit"),
        (["--workload", "gpt-2b", "--gpus", "0"], "gpus is 0: give at least 1"),
        (["--workload", "gpt-2b", "--gpus", "6"], "do not fill nodes of 4"),
        (["--workload", "gpt-2b", "--gpus", "2", "--hardware", "gh200"], "links are not PCIe.*table \\[interconnect\\]"),
        (["--workload", "gpt-2b", "--gpus", "2", "--policy", "l2l"], "l2l plans for one GPU"),
        (["--workload", "gpt-2b", "--gpu-memory=-16GiB"], "positive"),
        (["--workload", "gpt-2b", "--gpu-memory", "-16GiB"], "--gpu-memory requires an argument"),
        (["--hidden", "100", "--blocks", "2", "--heads", "3"], "not divisible by 3 heads"),
        (["--hidden", "128", "--heads", "4"], "no workload.*--blocks"),
        ([], "--workload NAME"),
        (["--hidden", "-128", "--blocks", "2", "--heads", "4"], "hidden_size is -128"),
        (["--hidden", "x", "--blocks", "2", "--heads", "4"], "--hidden"),
        (["--workload", "gpt-2b", "--precision", "int8"], "precision"),
        (["--workload", "gpt-2b", "--frobnicate"], "frobnicate"),
        (["--workload", "gpt-2b", "--gantt", "x.png"], "show one policy, not 5"),
        (["--workload", "gpt-2b", "--policy", "resident", "--gantt", "x.bmp"], "png"),
        (["--workload", "gpt-2b", "--policy", "resident", "--trace", "t.json", "--gantt", "x.bmp"], "png"),
        (["--workload", "gpt-2b", "--policy", "resident", "--trace", "x.png", "--gantt", "x.png"], "the same file"),
        (["--workload", "gpt-2b", "--policy", "resident", "--trace", ""], "is empty"),
        (["--workload", "gpt-2b", "--set", "cpu.cores=2", "--set", "cpu.cores=3"], "set twice"),
        (["--workload", "gpt-2b", "--policy", "stronghold:window=" + "9" * 5000], "whole number"),
        (["--hidden", "1000000", "--blocks", "3", "--heads", "1000", "--batch-size", "1000000"], "would last"),
        ([*SMALL, "--policy", "rotor", "--set", "gpu.gemm_efficiency=1e-300"], "a rate too low; a task may last"),
        (["--workload", "gpt-2b", "--policy", "resident", "--trace", "/none/such/x.json"], "cannot be written"),
        (["--workload", "gpt-2b", "--gpu-memory", "3GiB", "--policy", "autohete", "--trace", "x.json"], "no timeline"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    """Whatever cannot be taken is refused with exit code 2 and one line that says what was given and what is allowed."""
    assert re.search(message, refused("simulate", *arguments))


def test_a_refusal_leaves_an_existing_file_alone(tmp_path: Path) -> None:
    """An output that cannot be replaced stays as it was, and no part of a new one is left."""
    folder = tmp_path / "folder"
    (folder / "x.json").mkdir(parents=True)
    assert "cannot be written" in refused("simulate", *SMALL, "--policy", "resident", "--trace", str(folder / "x.json"))
    assert [path.name for path in folder.iterdir()] == ["x.json"]


def test_attention_is_named_and_moves_the_time(tmp_path: Path) -> None:
    """``--attention`` is shown and slower or faster; its figure of the hardware before says what to give instead."""
    shape = ("--workload", "gpt-2b", "--sequence-length", "4096", "--batch-size", "1")
    question = ("simulate", *shape, "--policy", "resident", "--hardware", "h100-pcie5")
    slow, fast = (autohete(*question, "--attention", one, "--json") for one in ("triton", "cudnn"))
    assert json.loads(slow.stdout)["iteration_seconds"] > json.loads(fast.stdout)["iteration_seconds"]
    assert ", kernels fused, attention fa2" in autohete(*question, "--attention", "fa2").stdout
    assert "have scores in memory" in refused(*question, "--attention", "fa2", "--kernels", "eager")
    cure = "give gpu.compute_capability, such as 9.0"
    assert cure in refused(*question, "--set", "gpu.attention_share=0.5")
    path = tmp_path / "old.toml"
    figure = '[gpu.attention_share]\nvalue = 0.5\nsource = "a test"\ndate = "2026"\n'
    path.write_text('base = "h100-pcie5"\nname = "old"\ntitle = "Old"\n' + figure)
    assert cure in refused("hardware", "check", str(path))


def test_unknown_commands_are_refused() -> None:
    """A command that does not exist is refused in one line."""
    assert "simulte" in refused("simulte")


@pytest.mark.slow
def test_a_process_refuses_in_the_same_words() -> None:
    """The program of a process of its own answers, refuses and ends as the command line does within this one."""
    for arguments in (
        ["simulate"],
        ["presets", "gpt-10b"],
        ["simulate", *SMALL, "--policy", "resident"],
        ["train", "--steps=0"],
    ):
        apart, here = in_a_process(*arguments), autohete(*arguments)
        assert (apart.returncode, apart.stdout, apart.stderr) == (here.returncode, here.stdout, here.stderr)


SHAPED = [*SMALL, "--precision", "fp16", "--set", "gpu.memory_efficiency=0.7", "--host-memory", "64GiB"]


def test_a_plan_answers_the_same_question_as_a_simulation() -> None:
    """``plan --json`` is the object of ``simulate --json`` and the decisions of all blocks; it takes the same options."""
    question = ["--policy", "autohete", "--json", "--gpu-memory", "1640MB", *SHAPED]
    simulated, planned = (json.loads(autohete(command, *question).stdout) for command in ("simulate", "plan"))
    decisions, rules = planned.pop("decisions"), planned.pop("rules")
    assert (simulated.pop("format"), planned.pop("format"), planned.pop("largest"), planned.pop("written")) == (
        "autohete-simulation 1",
        "autohete-plan 1",
        [],
        None,
    )
    assert planned == simulated
    assert rules == ["Slots(kind=G, count=2)", "ByPriority()"]
    assert planned["verdict"] == "ok"
    assert [run["first_block"] for run in decisions] == [0, *(run["last_block"] + 1 for run in decisions[:-1])]
    assert decisions[-1]["last_block"] + 1 == planned["plan"]["units"] == 6
    sizes = [run["last_block"] + 1 - run["first_block"] for run in decisions]
    decided = [(run["activations"], run["parameters"]["home"], run["update"]["on"]) for run in decisions]
    for place, value, count in (
        (0, "recompute", "checkpointed_units"),
        (1, "host", "offloaded_parameter_units"),
        (2, "cpu", "offloaded_optimizer_units"),
    ):
        counted = sum(size for run, size in zip(decided, sizes, strict=True) if run[place] == value)
        assert counted == planned["plan"][count], count


@pytest.mark.parametrize("option", ["--tokens=1B", "--fast", "--timeout=9", "--price=link=9", "--html=page.html"])
def test_one_policy_refuses_options_of_the_whole_answer(option: str) -> None:
    """What --policy would ignore is refused, so that nobody looks for it in the answer."""
    name = option.partition("=")[0]
    refusal = refused("plan", *SMALL, "--policy", "resident", option)
    assert f"{name} belongs to the whole answer: leave out --policy, or {name}" in refusal


def test_both_commands_have_the_options_of_a_question() -> None:
    """Every option that describes a training is an option of ``simulate`` and of ``plan``, with the same words."""
    helps = [autohete(command, "--help").stdout for command in ("simulate", "plan")]
    for option in ("workload", "hidden", "blocks", "heads", "vocabulary", "sequence-length", "batch-size", "precision"):
        assert all(f"--{option} " in shown for shown in helps), option
    for option in ("tied-embeddings", "kernels", "attention", "profile", "hardware", "set", "gpu-memory", "host-memory"):
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


def test_a_hardware_file_is_begun_filled_in_checked_and_used(tmp_path: Path) -> None:
    """``hardware new`` writes what ``check`` accepts; with a figure filled in, it is shown and simulated."""
    begun = autohete("hardware", "new", "my.toml", "--base", "rtx4090-workstation", cwd=tmp_path)
    assert (begun.returncode, begun.stderr, begun.stdout.count("\n")) == (0, "", 1)
    path = tmp_path / "my.toml"
    checked = autohete("hardware", "check", str(path))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout == f"{path}: ok, 30 figures, 30 of them from rtx4090-workstation\n"
    template = path.read_text()
    opened = re.sub(r"#(\[gpu.memory\])\n#(.*)\n#(.*)\n#(.*)\n", r"\1\n\2\n\3\n\4\n", template)
    path.write_text(opened)
    faults = refused("hardware", "check", str(path))
    assert "gpu.memory.source: empty: name the origin" in faults
    assert "gpu.memory.date: empty: give the date" in faults
    filled = opened.replace('source = ""\ndate = ""', 'source = "nvidia-smi"\ndate = "2026-11"', 1)
    path.write_text(filled.replace('value = "23.65GiB"', 'value = "47.5GiB"', 1))
    assert autohete("hardware", "check", str(path)).stdout == f"{path}: ok, 30 figures, 29 of them from rtx4090-workstation\n"
    shown = autohete("hardware", "show", str(path)).stdout
    assert re.search(r"^memory +47.5 GiB +- +2026-11 +my.toml *$", shown, re.MULTILINE)
    assert "memory: nvidia-smi\n" in shown
    answer = json.loads(autohete("simulate", *SMALL, "--hardware", str(path), "--policy", "resident", "--json").stdout)
    assert answer["hardware"] == "my"


def test_a_hardware_file_is_not_overwritten(tmp_path: Path) -> None:
    """A file that exists stays; nothing is written for a base that does not exist or a name that could not be read again."""
    path = tmp_path / "my.toml"
    path.write_text("mine")
    assert "exists: give another name" in refused("hardware", "new", str(path), "--base", "rtx4090-workstation")
    assert path.read_text() == "mine"
    assert "did you mean 'rtx4090-workstation'" in refused("hardware", "new", f"{tmp_path}/b.toml", "--base", "rtx4090-work")
    assert "such as b.toml" in refused("hardware", "new", "b", "--base", "rtx4090-workstation")
    assert list(tmp_path.iterdir()) == [path]


def test_a_preset_is_described() -> None:
    """A hardware preset, a model and a workload are shown with their figures; what is none of these is refused."""
    shown = autohete("presets", "rtx4090-workstation").stdout
    assert shown == autohete("hardware", "show", "rtx4090-workstation").stdout
    assert re.search(r"^bandwidth +25.5 GB/s +23.9 to 26.4 GB/s +2024-01$", shown, re.MULTILINE)
    assert "  bandwidth: measured with nvbandwidth on a server with 8 RTX 4090" in shown
    model = autohete("presets", "llama-3.1-8b").stdout
    assert "8.03B parameters" in model
    assert re.search(r"^block: 32/8 heads .* 32 +218,112,000 +86.9 %$", model, re.MULTILINE)
    assert "source: huggingface.co/meta-llama/Llama-3.1-8B" in model
    assert "10.33B parameters" in autohete("presets", "gpt-10b").stdout
    assert "did you mean 'llama-3.1-8b'" in refused("presets", "llama-3-8b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "option"),
    [(["simulate"], "--gpu-memory"), (["presets"], "NAME"), (["largest"], "--family"), (["hardware", "new"], "--base")],
)
def test_help_needs_no_heavy_import(command: list[str], option: str) -> None:
    """``--help`` loads neither SciPy nor matplotlib, SimPy or torch."""
    code = (
        "import sys, contextlib\n"
        "from autohete.cli.app import main\n"
        f"sys.argv = {['autohete', *command, '--help']!r}\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print(sorted(m for m in ('scipy', 'matplotlib', 'simpy', 'torch') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
    assert option in done.stdout


@pytest.mark.slow
def test_a_full_disk_is_an_error_in_one_line() -> None:
    """Output that cannot be written is told in one line."""
    command = f"{sys.executable} -m autohete presets > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("autohete: the output cannot be written: No space left")
    assert done.stderr.count("\n") == 1


#: Commands that write a line at a time, all at once at the end, and by way of cyclopts.
WRITERS = [
    ["presets"],
    ["simulate", *SMALL, "--json"],
    ["plan", *SMALL, "--policy", "autohete"],
    ["--help"],
    ["simulate", "--help"],
]


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("reader", ["head -1", "true"])
@pytest.mark.parametrize("arguments", WRITERS, ids=" ".join)
def test_a_closed_pipe_is_no_error(arguments: list[str], reader: str, unbuffered: str) -> None:
    """A reader that has had enough ends the program quietly with exit code 0, whenever it closes the pipe."""
    command = f"{sys.executable} -m autohete {' '.join(arguments)} | {reader}; exit ${{PIPESTATUS[0]}}"
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_is_no_error_of_an_experiment() -> None:
    """Whatever runs by ``run_app`` ends quietly at a closed pipe, also one that closes before the last flush."""
    code = (
        "from cyclopts import App\n"
        "from autohete.cli.app import run_app\n"
        "def command() -> None: print('x')\n"
        "run_app(App(name='x', default_command=command))"
    )
    command = f'{sys.executable} -c "{code}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_refusal_nobody_reads_is_still_one() -> None:
    """A refusal has exit code 2 where its line cannot be written."""
    command = f"{sys.executable} -m autohete simulate 2>/dev/full"
    assert subprocess.run(["bash", "-c", command], check=False, timeout=60, env=ENVIRONMENT).returncode == 2


# --- interrupts ---------------------------------------------------------------------------------------------------


def interrupted_at(module: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run the script or module ``command`` and interrupt it when it begins to import ``module``."""
    code = (
        "import os, runpy, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"sys.argv = {list(command)!r}\n"
        "if sys.argv[0].endswith('.py'):\n"
        "    sys.path.insert(0, os.path.dirname(sys.argv[0]))  # as python does for a script\n"
        "run = runpy.run_path if sys.argv[0].endswith('.py') else runpy.run_module\n"
        "run(sys.argv[0], run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env=ENVIRONMENT
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["cyclopts", "autohete.cli.app", "rich.console", "numpy", "scipy.sparse", "autohete.policies"]
)
def test_an_interrupt_while_importing_is_one_line(module: str) -> None:
    """An interrupt during any import, before and after the command has begun, is one line and exit code 130."""
    done = interrupted_at(module, "autohete", "simulate", *SMALL)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "autohete: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("fig_throughput", "joblib"),
        ("fig_throughput", "scipy.optimize"),
        ("published", "cyclopts"),
        ("published", "scipy.optimize"),
        ("fidelity", "torch"),
        ("gpu_check", "torch"),
    ],
)
def test_an_interrupt_of_an_experiment_is_one_line(name: str, module: str, tmp_path: Path) -> None:
    """Experiments, too, end with one line and exit code 130, also while they import."""
    script = str(Path(__file__).parents[2] / "experiments" / f"{name}.py")
    done = interrupted_at(module, script, "--out", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{name}: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 0.05, 0.1, 0.2, 0.5, 1, 1.5])
@pytest.mark.parametrize("command", [["simulate", "--workload", "gpt-10b"], ["--help"]], ids=" ".join)
def test_an_interrupt_at_any_time_is_at_most_one_line(command: list[str], delay: float) -> None:
    """Whenever the interrupt comes, the program ends with exit code 130 and one line, or it had finished."""
    code = (
        "import sys\n"
        "from autohete.__main__ import catch_interrupts, main\n"
        "catch_interrupts('autohete')\n"
        "print('started', flush=True)\n"
        f"sys.argv = {['autohete', *command]!r}\n"
        "main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"  # what comes before is the interpreter's own start
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    # A signal that comes while the interpreter shuts down ends it as it is, which a shell calls 130.
    assert (process.returncode, said) in ((130, "autohete: interrupted\n"), (0, ""), (-signal.SIGINT, ""))


def test_interrupted_work_is_cleaned_up() -> None:
    """An interrupt during work runs its clean-up and the exit functions; what stood in the way of either says nothing."""
    code = (
        "import atexit, os, signal\n"
        "from cyclopts import App\n"
        "from autohete.cli.app import run_app\n"
        "atexit.register(os.write, 1, b'exit functions')\n"
        "def command() -> None:\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); signal.pause()\n"
        "    except KeyboardInterrupt: raise RuntimeError('lost in translation')\n"
        "    finally: os.write(1, b'clean-up, ')\n"
        "run_app(App(name='x', default_command=command))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "clean-up, exit functions", "x: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        "for _ in in_processes(partial, [(abs,), (sleep, 0), (sleep, 0)], 2): kill(getpid(), SIGINT)",
        "for _ in in_processes(sleep, [(0,), (600,)], 2): kill(getpid(), SIGINT)",
        "Stages(2, None)('x', [partial(kill, getpid(), SIGINT), partial(sleep, 600)])",
        "Stages(2, 600)('x', [partial(kill, getpid(), SIGINT), partial(sleep, 600)])",
    ],
    ids=["idle", "at work", "waiting", "until a deadline"],
)
def test_an_interrupt_ends_processes(work: str) -> None:
    """An interrupt ends processes at once, whether the program waits for their results or has some at hand."""
    code = (
        "from functools import partial\n"
        "from os import getpid, kill\n"
        "from signal import SIGINT\n"
        "from time import sleep\n"
        "from cyclopts import App\n"
        "from autohete.cli.app import run_app\n"
        "from autohete.cli.interrupt import in_processes\n"
        "from autohete.cli.parallel import Stages\n"
        f"def command() -> None:\n    {work}\n"
        "run_app(App(name='x', default_command=command))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=60
    )  # also waits for the processes that have its pipes
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "x: interrupted\n")


def test_an_interrupt_after_the_work_changes_nothing() -> None:
    """Once a command has ended, an interrupt is ignored, as what is left is the end of the interpreter."""
    code = (
        "import os, signal\n"
        "from cyclopts import App\n"
        "from autohete.cli.app import run_app\n"
        "run_app(App(name='x', default_command=lambda: None))\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('the end')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


@pytest.mark.parametrize("wait", ["class X:\n    def __del__(self): hit()\nX()", "hit(); hit()"])
def test_an_interrupt_that_cannot_be_passed_on_ends_at_once(wait: str) -> None:
    """An interrupt in a finalizer, where Python drops exceptions, and a second one both end the program with one line."""
    code = (
        "import os, signal\n"
        "from autohete.cli.interrupt import interruptible\n"
        "def hit():\n    try: os.kill(os.getpid(), signal.SIGINT); signal.pause()\n"
        f"    except KeyboardInterrupt:\n        if {wait == 'hit(); hit()'}: return\n        raise\n"
        "with interruptible('x'):\n" + "\n".join(f"    {line}" for line in wait.splitlines()) + "\n"
        "    print('went on', flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "x: interrupted\n")


@pytest.mark.slow
def test_an_ignored_interrupt_stays_ignored() -> None:
    """A job in the background, which ignores interrupts, is not interrupted."""
    command = f"trap '' INT; {sys.executable} -m autohete presets & sleep 0.3; kill -INT $!; wait $!"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "policies" in done.stdout


# --- width --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_terminal_of_80_columns_gets_tables_of_80(command: str) -> None:
    """On a terminal no line is wider than it."""
    ours, theirs = pty.openpty()
    environment = ENVIRONMENT | {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}
    arguments = [sys.executable, "-m", "autohete", command, *SMALL, "--policy", "zero_offload:paper,tile_overlap"]
    with subprocess.Popen(arguments, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            while piece := os.read(ours, 4096):
                said += piece
    os.close(ours)
    assert process.returncode == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", said.decode()).splitlines()
    assert 70 < max(map(len, lines)) <= 80


@pytest.mark.slow
def test_the_same_shape_has_one_answer() -> None:
    """A preset and its shape by numbers are the same question, and the answer says what was assumed."""
    shape = ("--hidden", "5120", "--blocks", "32", "--heads", "40")
    answers = [
        autohete("simulate", *question, "--policy", "autohete", "--json") for question in (("--workload", "gpt-10b"), shape)
    ]
    named, numbers = (json.loads(done.stdout) for done in answers)
    for answer in (named, numbers):
        del answer["workload"], answer["assumptions"]["name"]
    assert named == numbers
    assumed = {"kernels": "fused", "precision": "bf16", "batch_size": 8, "sequence_length": 1024, "optimizer": "adamw"}
    assert assumed.items() <= named["assumptions"].items()
    assert named["assumptions"]["policy"]["priority"] is True
    table = autohete("simulate", *shape, "--policy", "autohete").stdout
    assert (
        "assumed: hidden 5120, 32 x (40 heads x 128, MLP 20480); vocabulary 50257 (tied), bf16, kernels fused, AdamW" in table
    )


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_figure_that_is_not_taken_as_given_is_named(command: str) -> None:
    """A CPU rate above what the DRAM allows is said below the answer."""
    done = autohete(command, "--workload", "gpt-4b", "--policy", "zero_offload", "--set", "cpu.update_bandwidth=150GB/s")
    assert "note: cpu.update_bandwidth 150 GB/s is more than the DRAM allows; using 94.208 GB/s," in done.stdout
