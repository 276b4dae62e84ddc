"""The experiments run, and write what they promise."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from autohete.analysis.worst_case import worst_case
from autohete.answer.certainty import MODEL_ERROR, deviation_of
from autohete.errors import InputError
from autohete.lowering import lower
from autohete.report.style import luminance
from autohete.schedule import GPU_MEMORY, Kind
from autohete.workload import WORKLOADS
from experiments import comparison, fig_throughput, intervals, looks, published, published_blind, safety
from experiments.published import Check

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run an experiment from another folder, as a person might."""
    command = [sys.executable, str(ROOT / "experiments" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, timeout=300)


@pytest.mark.slow
def test_a_model_of_the_throughput_figure_is_as_committed() -> None:
    """What paper_figs has of a model is what the code says now, to the last digit. ``.ci/run`` compares all of it."""
    model = "gpt-4b"
    rows = {(model, policy): comparison.Job(model, policy).run() for policy in comparison.POLICIES}
    header, *found = fig_throughput.throughput_csv(rows).splitlines()
    committed = (ROOT / "paper_figs" / "fig_throughput.csv").read_text().splitlines()
    assert [line for line in committed if line.startswith(f"1,{model},")] == found
    assert committed[0] == header


def test_the_throughput_figure_is_whole() -> None:
    """The committed figure has a row for each model and policy, and the comparison with the paper."""
    out = ROOT / "paper_figs"
    rows = list(csv.DictReader((out / "fig_throughput.csv").read_text().splitlines()))
    assert ",".join(rows[0]) == (
        "gpus,model,parameters,policy,verdict,iteration_seconds,samples_per_second,tflops_per_gpu,"
        "gpu_peak_bytes,host_peak_bytes,plan,clock,kernels"
    )
    assert len(rows) == len(WORKLOADS) * len(comparison.POLICIES)
    for row in rows:
        fits = row["verdict"] == "ok"
        assert bool(row["samples_per_second"]) == fits
        if fits:
            assert float(row["samples_per_second"]) * float(row["iteration_seconds"]) == pytest.approx(8, rel=1e-4)
    for version in comparison.ZERO_OFFLOAD:
        limit = [
            row["verdict"]
            for row in rows
            if row["policy"] == version and row["model"] in (comparison.ZERO_OFFLOAD_LIMIT, "gpt-15b")
        ]
        assert limit == ["ok", "gpu-out-of-memory"]
    ratios = list(csv.DictReader((out / "fig_throughput_ratios.csv").read_text().splitlines()))
    assert [":deepspeed=".join(filter(None, (row["over"], row["version"]))) for row in ratios] == list(comparison.PUBLISHED)
    for row in ratios:
        assert float(row["low"]) <= float(row["figures_low"]) <= float(row["figures_high"]) <= float(row["high"])
        within = float(row["low"]) <= float(row["paper"]) <= float(row["high"])
        assert row["inside"] == ("yes" if within else "no")


def test_the_comparison_with_the_paper_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The speed-ups of the committed file, with their intervals, are printed and written as they are."""
    written = (ROOT / "paper_figs" / "fig_throughput_ratios.csv").read_text()
    intervals_of = {(i.what, i.policy): i for i in intervals.read(fig_throughput.INTERVALS) if not i.model}
    ratios = [
        fig_throughput.Ratio(
            comparison.SpeedUp(over, float(row["average"]), float(row["maximum"])),
            intervals_of["average", over],
            intervals_of["maximum", over],
        )
        for over, row in zip(comparison.PUBLISHED, csv.DictReader(written.splitlines()), strict=True)
    ]
    assert fig_throughput.ratios_csv(ratios) == written
    fig_throughput.print_ratios(ratios)
    printed = capsys.readouterr().out
    assert all(over in printed for over in comparison.PUBLISHED)


def test_a_quantile_of_weighted_draws() -> None:
    """Draws without weight count for nothing, and the ends are those of the others."""
    values, weights = np.arange(200.0), np.repeat([0.0, 1.0], 100)
    low, high = intervals.quantiles(values, weights)
    assert (low, high) == pytest.approx((104, 194), abs=1)


def test_the_prior_has_its_medians_and_ends() -> None:
    """The middle of the unit cube is the node as it is, and its corners are the ends of the published ranges."""
    known = intervals.prior()
    middle, lowest, highest = (known.at(np.full((1, len(known.figures)), x))[0] for x in (0.5, 0.0, 1.0))
    for i, figure in enumerate(known.figures):
        assert np.exp([lowest[i], middle[i], highest[i]]) == pytest.approx([figure.low, figure.value, figure.high])


def test_the_response_surface_returns_what_it_was_fitted_to() -> None:
    """A smooth function of some figures is found again from few points, and noise shows as error."""
    rng = np.random.default_rng(3)
    points = rng.uniform(-1, 1, (60, 8))
    smooth = 2 + 0.3 * points[:, 0] - 0.1 * points[:, 1] ** 2
    surface = intervals.fit(points, np.column_stack([smooth, smooth + rng.normal(0, 0.2, 60)]))
    assert np.abs(surface(points)[:, 0] - smooth).max() < 0.02
    assert surface.error[0] < 0.02
    assert 0.15 < surface.error[1] < 0.35


def test_intervals_of_other_inputs_are_refused(tmp_path: Path) -> None:
    """Intervals that were made with other figures or rows are one line that says how to make them anew."""
    written = (ROOT / "paper_figs" / "fig_throughput_intervals.csv").read_text()
    other = tmp_path / "intervals.csv"
    other.write_text(written.replace(intervals.digest(), "0123456789abcdef"))
    with pytest.raises(InputError, match="make intervals"):
        intervals.read(other)
    with pytest.raises(InputError, match="make intervals"):
        intervals.read(tmp_path / "none.csv")


@pytest.mark.slow
def test_intervals_of_a_known_dependence() -> None:
    """Where rates are powers of one figure, the intervals of rates and ratios are those that its range gives."""
    known, rng = intervals.prior(), np.random.default_rng(5)
    points = intervals.hypercube(known, 80, seed=2)
    column = [figure.key for figure in known.figures].index("gpu.gemm_efficiency")
    power = {policy: 1.0 if policy == comparison.AUTOHETE else 0.5 for policy in comparison.POLICIES}
    rates = np.column_stack([np.exp(points[:, column] * power[p]) for _ in comparison.MODELS for p in comparison.POLICIES])
    rates *= np.exp(rng.normal(0, 1e-4, rates.shape))
    flat = intervals.Evidence((), sigma=0.2, iteration_sigma=0.1)
    found, effective = intervals.intervals(known, points, rates, np.zeros((80, 1)), flat, seed=3)
    assert effective == 20_000  # no weight differs
    low, high = (known.at(np.full((1, len(known.figures)), x))[0, column] for x in (0.05, 0.95))
    for interval in found:
        share = power[interval.policy] if interval.model else 1 - power[interval.policy]
        assert np.log([interval.figures_low, interval.figures_high]) == pytest.approx([low * share, high * share], abs=0.01)
        width = 0.1 * (1 if interval.model else np.sqrt(2)) * 1.645
        if interval.model or interval.policy != comparison.NO_PRIORITY:
            assert np.log(interval.high / interval.low) == pytest.approx(np.hypot(2 * width, (high - low) * share), rel=0.1)
        else:
            assert (interval.low, interval.high) == (interval.figures_low, interval.figures_high)


ASYNCHRONOUSLY, ON_GPU = "gradients flushed asynchronously", "every second sub-group updated on the GPU"
LLAMA, NVME = "LLaMA-7B on 8 A800, DeepSpeed with and without offload", "MLP-Offload, optimizer states on NVMe"
STAGE_3 = "ZeRO-3 with NVMe"
#: LLMQ's runs that are predicted not to fit: in fp8 it keeps some saved tensors in 8 bit; on the 5060 Ti its gradients rest on
#: the host.
TOO_LARGE = {
    "one RTX 4090": ("3B in fp8, states on the host, 128 x 4",),
    "one RTX 5060 Ti": ("7B, all on the host, 16 x 32",),
    "one RTX PRO 6000": ("7B in fp8, 64 x 8", "14B in fp8, states on the host, 64 x 8"),
    "four RTX PRO 6000": ("7B in fp8, 8 x 16",),
    "eight RTX PRO 6000": ("7B in fp8, 4 x 16",),
}
BOUND, IN_FOUR = "ZeRO-Offload with bound cores, two A100-40GB", "ZenFlow, an update of the CPU in four steps"
#: What is off by more than a quarter, or on the other side of a limit; docs/results.md says why.
DISAGREE = {
    ("Deep Optimizer States", f"four GPUs, 13B, 40 x 5120: {ASYNCHRONOUSLY}", "backward"),
    ("Deep Optimizer States", f"four GPUs, {ASYNCHRONOUSLY}", "backward"),
    ("Deep Optimizer States", f"four GPUs, {ON_GPU}", "backward"),
    ("AutoHete, memory limits", "ZeRO-Offload, gpt-4b, batch 8, 16GiB", "fits"),
    ("LitGPT, LoRA on one A100-40GB", "7B, batch 4", "fits"),  # its blocks keep more than those of transformers
    ("Deep Optimizer States", "gradients flushed asynchronously", "backward"),
    ("DeepSpeed tutorial, 10B", "ZeRO-Offload", "forward"),
    ("RoundPipe, baselines on 8 A800", "FSDP, qwen3-32b, 1 x 2", "iteration"),
    ("RoundPipe, layers", "gpt-oss-20b", "block_backward"),
    ("PatrickStar, 20B", "PatrickStar", "gradient_copies"),
    (LLAMA, "ZeRO-2, optimizer on the CPU, 8 x 1", "iteration"),
    *((LLAMA, f"ZeRO-3, {row}", "iteration") for row in ("none recomputed, 4 x 2", "optimizer on the CPU, 4 x 2")),
    *((LLAMA, "ZeRO-3, optimizer and parameters on the CPU, 2 x 4", figure) for figure in ("iteration", "gpu_peak")),
    *((LLAMA, "ZeRO-3, 2 x 8", figure) for figure in ("iteration", "gpu_peak")),
    *((NVME, f"{STAGE_3}, {size}", "backward") for size in ("40B", "52B", "70B")),
    *((NVME, f"MLP-Offload, {size}", "backward") for size in ("70B", "100B")),
    *((NVME, "MLP-Offload, 52B", figure) for figure in ("step", "iteration")),
    *((BOUND, row, "iteration") for row in ("bound", "1.5B, ZeRO-Offload", IN_FOUR, f"1.5B, {IN_FOUR}")),
    ("RoundPipe, baselines on 8 A800", "FSDP, qwen3-32b, one sequence", "longest_sequence"),
    *((f"LLMQ, {where}", row, "fits") for where, rows in TOO_LARGE.items() for row in rows),
}


@pytest.mark.slow
def test_published_measurements_are_met_but_for_those_explained() -> None:
    """Each phase that others measured is met within a quarter and each limit, but for a few.

    The goal of 25 % at worst is missed: a 7B model whose settings are not all published is predicted 20 to 57 % too fast.
    """
    checks = published.checks([source for source in published.sources() if source.group == published.KNOWN])
    assert {(c.source, c.row, c.phase) for c in checks if not c.is_close} == DISAGREE
    scores = {score.what: score for score in published.scores(checks)}
    assert scores["iterations"].mean_error <= 0.10
    assert scores["iterations"].worst_error <= 0.58
    assert scores["phases"].mean_error <= 0.15
    assert scores["GPU peaks"].mean_error <= 0.11
    assert scores["longest sequences"].mean_error <= 0.09
    exact = {c.row for c in checks if c.phase == published.LONGEST and c.predicted == c.measured}
    systems = {"ZeRO-2, qwen3-1.7b", "ZeRO-2, llama-3.1-8b", "ZeRO-3 with offload, gpt-oss-20b"}
    assert exact == {f"{system}, one sequence" for system in systems}


SOURCE = """title = "a source"
source = "nowhere"
date = "2026-11"
hardware = "a100-40gb-epyc7713"

[workload]
hidden_size = 256
transformer_blocks = 2
heads = 4
vocabulary_size = 1024
sequence_length = 1024
batch_size = 2
precision = "fp16"

[[row]]  # fits
name = "small"
policy = "resident"
asks = ["iteration", "gpu_peak", "host_peak", "longest_sequence"]

[[row]]
name = "large"
policy = "zero_offload"
asks = ["fits", "block_forward"]
changes = { hidden_size = 12288, transformer_blocks = 60, heads = 96 }

[[row]]
name = "without a plan"
policy = "autohete"
asks = ["iteration"]
gpu_budget = "10MiB"

[[row]]
name = "wrong"
policy = "unknown"
asks = ["iteration"]
"""
NUMBERS = """[[row]]
name = "small"
measured = { iteration = [0.01, 0.02], gpu_peak = 0.5, host_peak = 0.5, longest_sequence = 8192 }

[[row]]
name = "large"
measured = { fits = false, block_forward = 0.1 }

[[row]]
name = "without a plan"
measured = { iteration = 0.1 }
"""


@pytest.fixture
def blind(tmp_path: Path) -> Path:
    """A folder with a source that has no measurements, and beside it one with these."""
    for folder, text in (("blind", SOURCE), ("numbers", NUMBERS)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "source.toml").write_text(text)
    return tmp_path / "blind"


@pytest.mark.slow
def test_blind_rows_are_predicted_before_they_are_measured(blind: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Predictions are added to the file, then measurements, and nothing else changes; then all are scored."""
    path, numbers = blind / "source.toml", blind.parent / "numbers"
    published_blind.main(folder=blind, numbers=numbers)  # nothing is predicted yet
    assert path.read_text() == SOURCE
    assert "not predicted: small: iteration" in capsys.readouterr().out
    published_blind.main(folder=blind)
    assert "not predicted: wrong: unknown policy" in capsys.readouterr().out
    predicted = path.read_text()
    assert [line for line in predicted.splitlines() if not line.startswith("predicted")] == SOURCE.splitlines()
    source = published.read_source(path)
    assert [row.predicted.get("fits") for row in source.rows] == [True, False, False, None]
    assert {source.group_of(row) for row in source.rows} == {published.BLIND}
    (blind / "known.toml").write_text(f'group = "kept back"\n{predicted}')
    known = published.read_source(blind / "known.toml")
    assert {known.group_of(row) for row in known.rows} == {published.KEPT_BACK}
    (blind / "known.toml").unlink()
    assert source.rows[0].predicted["iteration"] == pytest.approx(source.simulate(source.rows[0]).iteration_seconds, rel=1e-5)
    assert published.checks([source]) == []
    published_blind.main(folder=blind)
    assert path.read_text() == predicted
    for _ in range(2):  # once more changes nothing
        published_blind.main(folder=blind, numbers=numbers)
        assert [line for line in path.read_text().splitlines() if not line.startswith("measured")] == predicted.splitlines()
    found = {(c.row, c.phase): c for c in published.checks([published.read_source(path)])}
    assert {row for (row, _), c in found.items() if c.is_verdict} == {"small", "large", "without a plan"}
    assert found.keys() - {key for key, c in found.items() if c.is_verdict} == {
        *(("small", phase) for phase in ("iteration", "gpu_peak", "host_peak", "longest_sequence")),
        ("large", "block_forward"),
    }
    assert [key for key, c in found.items() if c.is_verdict and not c.is_close] == [("without a plan", "fits")]
    for c in found.values():
        assert c.first == pytest.approx(c.predicted, rel=1e-5)
    assert "1 wrong" in capsys.readouterr().out


def test_a_blind_row_is_not_measured_first_or_twice(blind: Path) -> None:
    """Measurements before a prediction, other measurements than before, and rows of one name are refused."""
    path, numbers = blind / "source.toml", blind.parent / "numbers" / "source.toml"
    path.write_text(SOURCE.replace('name = "small"', 'name = "small"\nmeasured = { iteration = 1 }'))
    with pytest.raises(InputError, match="'small' has measurements and no prediction"):
        published_blind.predict(path)
    path.write_text(SOURCE.replace('name = "small"', 'name = "small"\nmeasured = { fits = true }\npredicted = { fits = true }'))
    numbers.write_text('[[row]]\nname = "small"\nmeasured = { fits = false }\n')
    with pytest.raises(InputError, match="'small' has other measurements"):
        published_blind.reveal(path, numbers)
    path.write_text(SOURCE.replace("large", "small"))
    with pytest.raises(InputError, match="4 rows with 3 names"):
        published_blind.predict(path)


def test_what_was_measured_of_a_part_is_no_verdict() -> None:
    """A run that was measured fits; the time of a block, or another length, says nothing of the row's run."""
    (source,) = (source for source in published.sources() if source.title == "RoundPipe, baselines on 8 A800")
    row = source.rows[0]
    verdicts = [
        [c.measured for c in published.checks([source.model_copy(update={"rows": (with_,)})]) if c.is_verdict]
        for with_ in (row.model_copy(update={"measured": {phase: 1.0}}) for phase in ("iteration", "gpu_peak", "block_forward"))
    ]
    assert verdicts == [[1], [1], []]


def check(group: str, measured: float, predicted: float = 1.0, phase: str = "iteration", first: float | None = None) -> Check:
    """A row of a source that has the name of its group."""
    return Check(f"source of {group}", group, "row", phase, measured, predicted, "", "", first)


def test_the_interval_of_the_model_holds_nine_of_ten_errors_of_its_size() -> None:
    """Where errors are as large as the model's mean error, and their logarithms normal, 90 % of the times are inside."""
    errors = np.random.default_rng(2).normal(0, deviation_of(MODEL_ERROR), 20_000)
    (score,) = published.scores([check(published.BLIND, float(np.exp(error))) for error in errors])
    assert score.inside == pytest.approx(0.9, abs=0.01)
    inside = [check(published.KEPT_BACK, 1.0, 1.0 if right else 9.0, first=9.0 if right else 1.0).is_inside for right in (0, 1)]
    assert inside == [True, False]  # what was predicted first counts


def test_groups_are_scored_apart(tmp_path: Path) -> None:
    """Each group has its own errors, from the file as from the simulation; a page gets the tables in the place of its own."""
    rows = [
        check(published.KNOWN, 2.0, 1.0),
        check(published.KEPT_BACK, 1.0, 1.1, first=1.5),
        check(published.BLIND, 1.0, 1.2, first=1.2),
        check(published.BLIND, 1.0, 0.8, first=0.8),
        check(published.BLIND, 1.0, 1.0, first=1.0),
        replace(check(published.BLIND, 1.0, 1.4), source="another source"),
        check(published.BLIND, 1.0, 0.0, "fits"),
        replace(check(published.BLIND, 1.0, 9.0), calibrates="gpu.memory_bandwidth"),
    ]
    (tmp_path / "published.csv").write_text(published.as_csv(rows))
    assert published.read(tmp_path / "published.csv") == rows
    assert [line[:7] for line in published.group_lines(rows)] == [
        ["known", "iterations", "1", "50.0 %", "50.0 %", "50.0 %", "-50.0 %"],
        ["kept back", "iterations", "1", "10.0 %", "10.0 %", "10.0 %", "+10.0 %"],
        ["blind", "iterations", "4", "20.0 %", "26.7 %", "20.0 %", "+10.0 %"],
        ["blind", "verdicts", "1", "1 wrong", "-", "-", "-"],
    ]
    page = tmp_path / "page.md"
    page.write_text(
        "above\n\n| Group | x |\n|---|---|\n| old | 1 |\n\nand\n\n| Blind source |\n|---|\n\n"
        "between\n\n| Wrong verdict |\n|---|\n\nbelow\n"
    )
    published.write_docs(rows, page)
    groups, blind, wrong = published.tables(rows)
    assert page.read_text() == f"above\n\n{groups}\nand\n\n{blind}\nbetween\n\n{wrong}\nbelow\n"
    page.write_text("nothing")
    with pytest.raises(InputError, match="0 tables that begin with"):
        published.write_docs(rows, page)


def test_a_blind_source_is_scored_as_first_predicted_and_now() -> None:
    """Its line has the mean errors of iterations and of GPU memory, and how many verdicts were and are wrong."""
    checks = [
        check(published.BLIND, 2.0, 3.0, first=1.0),
        check(published.BLIND, 2.0, 1.5, first=1.0),
        check(published.BLIND, 4.0, 3.0, "gpu_peak", first=4.0),
        check(published.BLIND, 1.0, 1.0, "fits", first=0.0),
    ]
    source = published.read_source(published.FOLDER / "blind" / "nanogpt-a100.toml")
    (line,) = published.blind_lines([replace(c, source=source.title) for c in checks])
    assert line == [source.title, "1", "50.0 %", "37.5 %", "+12.5 %", "0.0 %", "25.0 %", "-25.0 %", "1", "0"]


def test_no_text_of_the_published_figure_lies_on_another() -> None:
    """Names, headings and numbers keep apart, and an error beyond the axis is written at its end."""
    names = [check(group, 1.0, 1 + i / 10) for group in published.GROUPS for i in range(3)]
    rows = [replace(c, source=f"a source with a long name, which ran on eight GPUs, {i}") for i, c in enumerate(names)]
    figure = published.draw([*rows, check(published.BLIND, 1.0), check(published.BLIND, 1.0, 4.4, "longest_sequence")])
    figure.draw_without_rendering()
    (axes,) = figure.axes
    texts = [text for text in [*axes.get_yticklabels(), *axes.texts, axes.xaxis.label] if text.get_text()]
    assert "+340 %" in [text.get_text() for text in texts]
    boxes = [text.get_window_extent() for text in texts]
    for i, box in enumerate(boxes):
        assert not box.count_overlaps([other.shrunk(0.98, 0.9) for other in boxes[:i]])
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width + 2  # pixels, of 1,400


def test_phases_are_the_work_of_their_tasks() -> None:
    """Where nothing overlaps, each phase takes what its tasks take, and the step what CPU and upload take."""
    tutorial = next(source for source in published.sources() if source.title.startswith("DeepSpeed tutorial"))
    blocking = tutorial.rows[0].model_copy(update={"policy": "zero_offload:checkpointing=full,deepspeed=2026"})
    found = tutorial.simulate(blocking)
    seconds = {kind: sum(task.duration_ns for task in found.schedule.tasks if task.id.kind is kind) * 1e-9 for kind in Kind}
    seen = published.phases(found)
    assert seen["forward"] == pytest.approx(seconds[Kind.FORWARD] + seconds[Kind.LOSS], rel=1e-3)
    backward = seconds[Kind.BACKWARD] + seconds[Kind.RECOMPUTE] + seconds[Kind.OFFLOAD_GRADIENTS]
    assert seen["backward"] == pytest.approx(backward, rel=1e-3)
    assert seen["step"] == pytest.approx(seconds[Kind.CPU_UPDATE] + seconds[Kind.REFRESH], rel=1e-3)
    assert seen["unscale"] == pytest.approx(found.profile.workload.parameters * 8 / 72.6e9)


@pytest.mark.slow
@pytest.mark.parametrize("script", [fig_throughput, published, intervals], ids=lambda module: module.__name__)
def test_an_unwritable_folder_is_refused_before_the_work(script: ModuleType, tmp_path: Path) -> None:
    """An output folder that cannot be made is refused at once."""
    (tmp_path / "file").write_text("")
    begin = time.process_time()
    with pytest.raises(InputError, match="cannot be created"):
        script.main(out=tmp_path / "file" / "below")
    assert time.process_time() - begin < 1


@pytest.mark.slow
def test_a_refusal_of_an_experiment_is_one_line(tmp_path: Path) -> None:
    """What an experiment cannot do is one line and exit code 2."""
    (tmp_path / "file").write_text("")
    done = run("fig_throughput.py", "--out", str(tmp_path / "file" / "below"), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot be created" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_fidelity_compares_every_setting_it_is_asked_for(tmp_path: Path) -> None:
    """The comparison of simulator and runtime writes a row per setting, with equal memory and times of one order."""
    done = run("fidelity.py", "--out", str(tmp_path), "--paced", "1", "--native", "1", "--more", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "fidelity.csv").read_text().splitlines()))
    assert [row["clock"] for row in rows] == ["emulated", "measured-cpu", "measured-cpu"]
    for row in rows:
        assert int(row["predicted_peak_bytes"]) == pytest.approx(int(row["measured_peak_bytes"]), rel=0.03)
        # A shared machine may stall; that the order and the waits are right shows within far less.
        assert float(row["measured_seconds"]) == pytest.approx(float(row["predicted_seconds"]), rel=0.5)
    assert {path.name for path in tmp_path.iterdir()} == {"fidelity.csv", "fidelity_lanes.csv", "fidelity.png", "fidelity.pdf"}


def test_policies_differ_in_grey() -> None:
    """Bars that stand side by side differ in lightness or hatch, for readers without colour."""
    drawn = [looks.look(policy) for policy in comparison.POLICIES]
    for one, other in zip(drawn, drawn[1:], strict=False):
        assert abs(luminance(one.colour) - luminance(other.colour)) > 0.1 or one.hatch != other.hatch


@pytest.mark.slow
def test_without_a_gpu_there_is_nothing_to_check(tmp_path: Path) -> None:
    """Where there is no GPU, its check says so in one line, succeeds and writes nothing."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("gpu_check.py", "--out", str(tmp_path / "folder"), cwd=tmp_path)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert "no GPU" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_waits_make_every_plan_of_the_figure_safe() -> None:
    """In the committed file each plan that fits is safe with its waits at a cost of at most 2 %, and a row is made anew."""
    rows = list(csv.DictReader((ROOT / "paper_figs" / "safety.csv").read_text().splitlines()))
    for row in rows:
        unsafe = int(row["gpu_worst_bytes"]) > int(row["gpu_capacity_bytes"])
        if int(row["waits"]) > 0 and not unsafe:  # then the plan itself has them, and would exceed the memory without
            _, simulation = comparison.Job(row["model"], row["policy"]).answer()
            assert simulation is not None
            assert simulation.plan.memory_waits
            schedule = lower(simulation.profile, replace(simulation.plan, memory_waits=False))
            assert not worst_case(schedule, GPU_MEMORY).fits
            continue
        assert (int(row["waits"]) > 0) == unsafe
        assert float(row["cost_percent"]) <= 2
    (row,) = (row for row in rows if (row["model"], row["policy"]) == ("gpt-6b", comparison.AUTOHETE))
    job = comparison.Job("gpt-6b", comparison.AUTOHETE)
    assert {name: str(value) for name, value in safety.row(job, job.run()).items()} == row
