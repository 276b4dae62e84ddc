"""``autohete calibrate``: figures of known traces are found, and a simulated run recorded is predicted again."""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.command import autohete, refused
from support.kineto import DEVICE, KNOWN, STEPS, KinetoTrace, as_kineto, known_trace, launched_trace

from autohete.cli.schemas import document_schema
from autohete.hardware import load_hardware
from autohete.hardware.schema import read_hardware
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.simulate import simulate_policy
from autohete.workload import Workload

NODE = "a100-40gb-epyc7713"


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A trace with known rates."""
    gpu = load_hardware(NODE).gpu
    return known_trace(gpu.peak_16bit_flops, gpu.memory_bandwidth).write(tmp_path / "known.json", **DEVICE)


def found(*arguments: str) -> dict[str, Any]:
    """What ``autohete calibrate --json`` prints."""
    done = autohete("calibrate", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    jsonschema.Draft202012Validator(document_schema("calibration")).validate(answer)
    return answer


def test_the_rates_of_a_known_trace_are_found(known: Path) -> None:
    """Each figure with the value that its events have, and no spread."""
    figures = {one["key"]: one for one in found(str(known), "--hardware", NODE, "--gpus", "2")["figures"]}
    for key, value in KNOWN.items():
        assert figures[key]["value"] == pytest.approx(value, rel=1e-4), key
        assert figures[key]["low"] == pytest.approx(figures[key]["high"], rel=1e-3), key


def test_the_parts_of_a_known_trace_are_found(known: Path) -> None:
    """Passes by who launched them, and the waits of the GPU by what it waited for."""
    answer = found(str(known), "--hardware", NODE)
    parts = {one["part"]: one["measured"] for one in answer["parts"]}
    assert answer["steps"] == STEPS
    assert answer["measured_seconds"] == pytest.approx(0.02)
    assert parts["forward"] == pytest.approx(4e-3)
    assert parts["backward"] == pytest.approx(6e-3)
    assert parts["update on the GPU"] == pytest.approx(1.01e-3)
    assert parts["GPU waits for copies to it"] == pytest.approx(2e-3)
    bus = 4 * (1 << 20) / KNOWN["interconnect.bandwidth"]
    assert parts["GPU waits for other GPUs"] == pytest.approx(bus, rel=1e-3)
    idle = [seconds for part, seconds in parts.items() if part.startswith("GPU waits")]
    assert sum(idle) + parts["forward"] + parts["backward"] + parts["update on the GPU"] == pytest.approx(0.02)


def test_the_hardware_file_has_what_was_measured(known: Path, tmp_path: Path) -> None:
    """It is valid, keeps what was not measured, and names the trace as the source."""
    file = tmp_path / "mine.toml"
    assert autohete("calibrate", str(known), "--hardware", NODE, "--hardware-out", str(file)).returncode == 0
    hardware, base = load_hardware(file), load_hardware(NODE)
    assert hardware.h2d.bandwidth == pytest.approx(KNOWN["links.h2d.bandwidth"], rel=1e-4)
    assert hardware.cpu == base.cpu
    assert "known.json" in read_hardware(file).gpu.gemm_efficiency.source


def test_figures_that_are_given_stay(known: Path, tmp_path: Path) -> None:
    """Also where the trace shows others; they are in the file, whatever the names of files."""
    trace, file = tmp_path / "a trace (1).json", tmp_path / "my node.toml"
    known.rename(trace)
    given = ["--gpu-memory", "16GiB", "--set", "cpu.cores=8", "--set", "host.pinned_rounding=none"]
    assert autohete("calibrate", str(trace), "--hardware", NODE, *given, "--hardware-out", str(file)).returncode == 0
    hardware = load_hardware(file)
    assert (hardware.gpu.memory_bytes, hardware.cpu.cores, hardware.host.rounds_pinned) == (16 << 30, 8, False)
    assert hardware.h2d.bandwidth == pytest.approx(KNOWN["links.h2d.bandwidth"], rel=1e-4)
    assert hardware.name == "my-node"


def test_a_recorded_simulation_is_predicted_again(tmp_path: Path) -> None:
    """A run on another hardware than is known: with what its recording shows, the prediction is that of the other hardware."""
    workload = Workload("small", 1024, 6, 8, sequence_length=512, batch_size=4)
    changes = {"links.h2d.bandwidth": "9GB/s", "links.d2h.bandwidth": "7GB/s", "gpu.gemm_efficiency": "0.3"}
    changes |= {"cpu.update_bandwidth": "30GB/s", "links.h2d.latency": "3us"}
    policy = parse_policy("zero_offload")
    true = simulate_policy(analytic_profile(workload, load_hardware(NODE, changes)), policy)
    trace = as_kineto(true)
    for number in range(6):  # copies whose time is the latency
        at = number * 10.0
        trace.gpu("Memcpy HtoD (Pinned -> Device)", at, at + 3, 0.001, stream=99, bytes=4)
    path, profile = trace.write(tmp_path / "run.json"), tmp_path / "profile.json"
    model = ["--hidden", "1024", "--blocks", "6", "--heads", "8", "--sequence-length", "512", "--batch-size", "4"]
    answer = found(str(path), "--hardware", NODE, *model, "--policy", "zero_offload", "--profile-out", str(profile))
    assert answer["predicted_seconds"] < 0.8 * true.iteration_seconds
    assert answer["measured_seconds"] == pytest.approx(true.iteration_seconds, rel=0.02)
    assert answer["calibrated_seconds"] == pytest.approx(true.iteration_seconds, rel=0.02)
    values = {one["key"]: one["value"] for one in answer["figures"]}
    assert values["links.h2d.bandwidth"] == pytest.approx(9e9, rel=0.01)
    assert values["links.d2h.bandwidth"] == pytest.approx(7e9, rel=0.01)
    assert values["cpu.update_bandwidth"] == pytest.approx(30e9, rel=0.02)
    assert len(answer["explanations"]) == 3
    again = autohete("simulate", "--profile", str(profile), "--policy", "zero_offload", "--json")
    assert json.loads(again.stdout)["iteration_seconds"] == pytest.approx(true.iteration_seconds, rel=0.02)


def test_the_updates_of_several_ranks_are_calibrated_together(tmp_path: Path) -> None:
    """On two GPUs the rate of updates is that of both processes, and is found."""
    workload = Workload("small", 1024, 6, 8, sequence_length=512, batch_size=4)
    slow = load_hardware(NODE, {"cpu.ranks_update_bandwidth": "40GB/s"}).shared_by(2)
    true = simulate_policy(analytic_profile(workload, slow), parse_policy("zero_offload"))
    path = as_kineto(true).write(tmp_path / "run.json", distributedInfo={"world_size": 2})
    model = ["--hidden", "1024", "--blocks", "6", "--heads", "8", "--sequence-length", "512", "--batch-size", "4"]
    answer = found(str(path), "--hardware", NODE, *model, "--gpus", "2", "--policy", "zero_offload")
    values = {one["key"]: one["value"] for one in answer["figures"]}
    assert values["cpu.ranks_update_bandwidth"] == pytest.approx(40e9, rel=0.02)
    assert not any("processes trained together" in remark for remark in answer["remarks"])


def test_the_explanations_name_the_rates_that_differ(tmp_path: Path) -> None:
    """Each wait by the lane that it is for, the largest first; the text has them below the table."""
    workload = Workload("small", 1024, 6, 8, sequence_length=512, batch_size=4)
    slow = load_hardware(NODE, {"links.d2h.bandwidth": "2GB/s", "cpu.update_bandwidth": "50GB/s"})
    true = simulate_policy(analytic_profile(workload, slow), parse_policy("zero_offload"))
    path = as_kineto(true).write(tmp_path / "run.json")
    model = ["--hidden", "1024", "--blocks", "6", "--heads", "8", "--sequence-length", "512", "--batch-size", "4"]
    text = autohete("calibrate", str(path), "--hardware", NODE, *model, "--policy", "zero_offload").stdout
    assert re.search(r"^GPU waits for copies to the host +20.\d+ ms +2\d\d ms ", text, re.MULTILINE)
    assert re.search(
        r"1. GPU waits for copies to the host: 2\d\d ms longer .*links.d2h.bandwidth is 2 GB/s instead of 25.5", text
    )
    assert re.search(r"2. GPU waits for the optimizer: .*cpu.update_bandwidth is 50 GB/s instead of 69", text)
    assert re.search(r"^links.d2h.bandwidth +25.5 GB/s +2 GB/s", text, re.MULTILINE)


def test_a_pass_that_waits_for_launches_is_explained_by_them(tmp_path: Path) -> None:
    """The time of a launch is found, and a pass has the time of its launches, not of its kernels."""
    path = launched_trace(40, 50).write(tmp_path / "x.json")
    answer = found(str(path), "--hidden", "64", "--blocks", "2", "--heads", "2", "--batch-size", "1", "--vocabulary", "100")
    parts = {one["part"]: one for one in answer["parts"]}
    assert {one["key"]: one["value"] for one in answer["figures"]}["cpu.launch"] == pytest.approx(40e-6, rel=1e-3)
    assert parts["forward"]["measured"] == pytest.approx(50 * 40e-6, rel=0.03)
    assert parts["forward"]["calibrated"] == pytest.approx(50 * 40e-6, rel=0.03)
    said = [line for line in answer["explanations"] if line.startswith(("forward", "backward"))]
    assert len(said) == 2
    assert all(
        re.search(r"the GPU waits for the host.s launches, (39|40)\.\d+ us for each of 50 kernels", line) for line in said
    )


def test_another_batch_than_named_is_recognised(known: Path) -> None:
    """By the FLOPs of the products that the trace has."""
    model = ["--hidden", "64", "--blocks", "2", "--heads", "2", "--batch-size", "1", "--vocabulary", "100"]
    (line,) = (one for one in found(str(known), "--hardware", NODE, *model)["explanations"] if one.startswith("forward"))
    assert "Its products have 0.275 TFLOP" in line
    assert "compare batch, length" in line


def test_micro_batches_are_no_steps(tmp_path: Path) -> None:
    """Where only some steps update, the remark says what to mark."""
    trace = known_trace(3e14, 1.5e12)
    updates = [event for event in trace.events if event["name"].startswith("Optimizer.step")]
    trace.events = [event for event in trace.events if event not in updates[::2]]
    remarks = found(str(trace.write(tmp_path / "x.json")))["remarks"]
    assert any("3 of 6 steps update: the others may be micro-batches" in remark for remark in remarks)


def test_a_compressed_trace_is_the_same(known: Path, tmp_path: Path) -> None:
    """Also one that is a list of events, and whatever its name."""
    packed, events = tmp_path / "packed", tmp_path / "events.txt"
    packed.write_bytes(gzip.compress(known.read_bytes()))
    events.write_text(json.dumps(json.loads(known.read_text())["traceEvents"]))
    answers = [found(str(path), "--hardware", NODE) for path in (known, packed, events)]
    assert answers[0]["parts"] == answers[1]["parts"] == answers[2]["parts"]


def test_an_export_of_nsys_is_the_same(known: Path, tmp_path: Path) -> None:
    """The same events in the tables of an export give the same parts and rates."""
    export = tmp_path / "report.sqlite"
    as_export(json.loads(known.read_text())["traceEvents"], export)
    kineto, nsys = (found(str(path), "--hardware", NODE, "--step-name", "ProfilerStep#") for path in (known, export))
    for one, other in zip(kineto["parts"], nsys["parts"], strict=True):
        assert one["part"] == other["part"]
        assert one["measured"] == pytest.approx(other["measured"], rel=1e-5)
    known_figures = {one["key"]: one["value"] for one in kineto["figures"]}
    figures = {one["key"]: one["value"] for one in nsys["figures"]}
    for key in ("links.h2d.bandwidth", "links.h2d.pageable_bandwidth", "gpu.gemm_efficiency", "gpu.kernel_overhead"):
        assert figures[key] == pytest.approx(known_figures[key], rel=1e-3), key


def as_export(events: list[dict[str, Any]], path: Path) -> None:
    """Write events as Nsight Systems exports them, in nanoseconds."""
    with sqlite3.connect(path) as database:
        database.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER, name TEXT, label TEXT);
            INSERT INTO ENUM_CUDA_MEM_KIND VALUES (0, 'MEMORY_KIND_PAGEABLE', 'Pageable'), (1, 'MEMORY_KIND_PINNED', 'Pinned');
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, correlationId INT, globalTid INT, nameId INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
                (start INT, end INT, correlationId INT, streamId INT, deviceId INT, demangledName INT, shortName INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY
                (start INT, end INT, correlationId INT, streamId INT, deviceId INT, bytes INT, copyKind INT, srcKind INT,
                 dstKind INT);
            CREATE TABLE NVTX_EVENTS (start INT, end INT, text TEXT, textId INT, globalTid INT);
            """
        )
        for number, event in enumerate(events):
            name, args = event["name"], event["args"]
            times = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            database.execute("INSERT INTO StringIds VALUES (?, ?)", (number, name))
            row: tuple[object, ...]
            if event["cat"] == "cuda_runtime":
                table, row = "RUNTIME", (*times, args["correlation"], event["tid"], number)
            elif event["cat"] == "kernel":
                table, row = "KERNEL", (*times, args["correlation"], args["stream"], 0, number, number)
            elif event["cat"] == "gpu_memcpy":
                memory = 0 if "Pageable" in name else 1
                kind, kinds = (1, (memory, 2)) if "HtoD" in name else (2, (2, memory))
                table, row = "MEMCPY", (*times, args["correlation"], args["stream"], 0, args["bytes"], kind, *kinds)
            else:
                shapes = f", seq = 1, sizes = {args['Input Dims']}" if "Input Dims" in args else ""
                database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, NULL, ?)", (*times, name + shapes, event["tid"]))
                continue
            marks = ", ".join("?" * len(row))
            database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} VALUES ({marks})", row)


# --- what is refused, and what is remarked ---------------------------------------------------------------------------


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    """With what it is instead, and what to give."""
    file = tmp_path / "x.json"
    kernel = KinetoTrace()
    kernel.gpu("k", 0, 1, 0)
    whole = json.dumps(kernel.document())
    bad = json.loads(whole)
    bad["traceEvents"][1]["ts"] = [1]
    for content, said in (
        ("words", "is no trace"),
        ("{}", "has no events"),
        ('{"traceEvents": []}', "has no events"),
        ('{"traceEvents": [1]}', "an event is an object"),
        (whole[:-30], "ends in the middle, after"),
        (whole[:20], "ends in the middle"),
        ("[" * 100_000, "nests too deep"),
        (whole.replace('"ph"', "'ph'", 1), "it is not JSON (Expecting property name"),
        (whole.replace('"schemaVersion": 1', f'"x": {"9" * 9999}'), "damaged"),
        (json.dumps(bad), "ts is [1]"),
        (whole.replace("1000000000.0", "1e400"), "a number of at least 0 belongs there"),
        (whole.replace('"device": 0', '"device": {}'), "device is {}"),
        (whole.replace('"cat": "kernel"', '"cat": "other"'), "cpu as device"),
    ):
        file.write_text(content)
        assert said in refused("calibrate", str(file)), content[:40]
    file.write_bytes(gzip.compress(whole.encode())[:-20])
    assert "ends in the middle of its compressed data" in refused("calibrate", str(file))
    file.write_bytes(b"SQLite format 3\0" + b"x" * 200)
    assert "export" in refused("calibrate", str(file))
    with sqlite3.connect(tmp_path / "other.sqlite") as database:
        database.execute("CREATE TABLE other (a)")
    assert "none of the tables of nsys" in refused("calibrate", str(tmp_path / "other.sqlite"))


def test_rates_of_no_hardware_are_refused(tmp_path: Path) -> None:
    """Such as a link of 10^24 B/s, by the figure that would be."""
    trace = known_trace(3e14, 1.5e12)
    for event in trace.events:
        if "HtoD (Pinned" in event["name"] and event["dur"] > 100:
            event["args"]["bytes"] = 10**18
    said = refused("calibrate", str(trace.write(tmp_path / "x.json")))
    assert "times or sizes of no hardware (links.h2d.bandwidth" in said


def test_options_that_do_not_belong_are_refused(known: Path) -> None:
    """With the option that is missing."""
    assert "--policy needs the model" in refused("calibrate", str(known), "--policy", "resident")
    assert "--profile-out needs the model" in refused("calibrate", str(known), "--profile-out", "x.json")
    assert "--profile is what calibrate writes" in refused("calibrate", str(known), "--profile", "x.json")
    said = refused("calibrate", str(known), "--step-name", "none")
    assert "ProfilerStep#" in said


def test_steps_are_found_by_other_names(tmp_path: Path) -> None:
    """By the optimizer's steps if the profiler marks none, by a given name, or all is one step."""
    trace = known_trace(3e14, 1.5e12)
    for event in trace.events:
        event["name"] = event["name"].replace("ProfilerStep#", "my step ")
    path = trace.write(tmp_path / "named.json")
    assert found(str(path), "--step-name", "my step")["steps"] == STEPS
    by_optimizer = found(str(path))
    assert by_optimizer["steps"] == STEPS - 1  # the last has no next one
    assert "from one Optimizer.step#AdamW.step to the next" in by_optimizer["remarks"][0]
    updates = [event for event in trace.events if "step" in event["name"]]
    trace.events += [event | {"ts": event["ts"] + 510, "dur": 10} for event in updates]  # a second optimizer of the same class
    two = found(str(trace.write(tmp_path / "two.json")))
    assert [two[key] for key in ("steps", "measured_seconds")] == [by_optimizer[key] for key in ("steps", "measured_seconds")]
    rest = [event for event in trace.events if "step" not in event["name"]]
    trace.events = [*rest, updates[0]]
    assert "no steps are marked" in found(str(trace.write(tmp_path / "one.json")))["remarks"][0]
    trace.events = rest
    whole = found(str(trace.write(tmp_path / "none.json")))
    assert whole["steps"] == 1
    assert "no steps are marked" in whole["remarks"][0]


def test_steps_that_differ_are_remarked(tmp_path: Path) -> None:
    """With the times of the shortest and the longest."""
    trace = known_trace(3e14, 1.5e12)
    for event in trace.events:
        event["ts"] += 30_000 * (event["ts"] >= 1e9 + 100_000)
    answer = found(str(trace.write(tmp_path / "x.json")))
    assert any("steps differ: 0.02 to 0.05 s" in remark for remark in answer["remarks"])


@pytest.mark.slow
def test_a_training_on_the_cpu_is_read(tmp_path: Path) -> None:
    """What torch.profiler records of a training without a GPU, whose operators are then the work of the device."""
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, schedule

    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path / "cpu.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=3),
        record_shapes=True,
        on_trace_ready=lambda made: made.export_chrome_trace(str(path)),
    ) as recorder:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(512, 256)).square().mean().backward()
            optimizer.step()
            recorder.step()
    assert "give cpu as device" in refused("calibrate", str(path))
    answer = found(str(path), "--device", "cpu")
    parts = {one["part"]: one["measured"] for one in answer["parts"]}
    assert answer["steps"] == 3
    assert min(parts[part] for part in ("forward", "backward", "update on the GPU")) > 0
    passes = sum(parts[part] for part in ("forward", "backward", "update on the GPU"))
    assert passes > 0.5 * answer["measured_seconds"]
