"""The figures of the evaluation: each script runs on a small grid, and the committed files are what the code says now."""

from __future__ import annotations

import csv
import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import mean, median
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cyclopts import App, CycloptsError
from matplotlib.text import Text

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.plan.policy import Verdict
from autohete.policies import POLICIES, STALE
from autohete.report.gantt import stacked_figure
from autohete.report.style import luminance
from autohete.report.tables import table
from autohete.workload import Workload
from experiments import (
    fig_ablation,
    fig_batch_size,
    fig_checkpoint_granularity,
    fig_hypothetical,
    fig_max_model,
    fig_memory_budget,
    fig_sequence_length,
    fig_survey,
    fig_systems,
    fig_throughput_multi_gpu,
    fig_timeline,
    gpu_check,
    looks,
    setting,
    shared,
)
from experiments.best_flags import BestFlags

ROOT = Path(__file__).parents[2]
WRITTEN = ROOT / "paper_figs"

#: A small part of each script's grid, and the columns that distinguish its rows.
SMALL: list[tuple[ModuleType, dict[str, object], tuple[str, ...]]] = [
    (fig_throughput_multi_gpu, {"models": ("gpt-6b",), "batches": (2,), "samples": 1}, fig_throughput_multi_gpu.NAMES),
    (fig_ablation, {"models": ("gpt-4b",)}, fig_ablation.NAMES),
    (fig_batch_size, {"models": ("gpt-4b",), "batches": (32,)}, fig_batch_size.NAMES),
    (fig_memory_budget, {"models": ("gpt-4b",), "budgets": (8, 12)}, fig_memory_budget.NAMES),
    (fig_sequence_length, {"lengths": (2048,)}, fig_sequence_length.NAMES),
    (
        fig_checkpoint_granularity,
        {"models": ("gpt-4b",), "segments": (5,), "budgets": (72, 96)},
        fig_checkpoint_granularity.NAMES,
    ),
    (fig_hypothetical, {"links": (25,), "cpus": (69,)}, fig_hypothetical.NAMES),
    (fig_systems, {"machines": ("rtx4090-workstation",), "models": ("llama-3.2-3b",)}, fig_systems.NAMES),
    (fig_survey, {"sizes": (48,), "systems": ("l2l", "zero_offload")}, fig_survey.NAMES),
]
FIGURES = sorted(path.stem for path in (ROOT / "experiments").glob("fig_*.py"))
IDS = [module.__name__.rpartition(".")[2] for module, *_ in SMALL]


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize(("module", "part", "names"), SMALL, ids=IDS)
def test_a_part_of_the_figure_is_as_committed(
    module: ModuleType, part: dict[str, object], names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script writes PNG, PDF and CSV, prints at most 80 columns, and its rows are rows of the committed file."""
    name = module.__name__.rpartition(".")[2]
    module.main(out=tmp_path, jobs=1, **part)
    assert {path.name for path in tmp_path.iterdir()} >= {f"{name}.{suffix}" for suffix in ("png", "pdf", "csv")}
    printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("written")]
    assert printed
    assert max(map(len, printed)) <= 80
    found, committed = rows(tmp_path / f"{name}.csv"), rows(WRITTEN / f"{name}.csv")
    assert tuple(found[0]) == (*names, *shared.RESULTS)
    for row in found:
        assert row in committed
        assert bool(row["iteration_seconds"]) == (row["verdict"] == "ok")


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_a_table_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables of experiments leave columns out where the terminal is narrow, and are 80 columns wide at most."""
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = table("speed of many policies on a machine", ["", *map("policy {}".format, range(9))], left=1)
    shown.add_row("llama-3.1-8b on rtx4090-workstation", *(f"{n * 1e6:,.0f}" for n in range(9)))
    shared.print_table(shown)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= min(columns, 80)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the checks")
def test_what_gpu_check_says_is_wrapped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines fit the terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    gpu_check.main()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > 1
    assert max(map(len, printed)) <= 40


@pytest.mark.slow
def test_the_largest_model_is_as_committed(tmp_path: Path) -> None:
    """A search for the largest model finds what the committed file says, and one more block does not fit."""
    fig_max_model.main(out=tmp_path, jobs=1, gpu=(16,), host=(64,))
    found, committed = rows(tmp_path / "fig_max_model.csv"), rows(WRITTEN / "fig_max_model.csv")
    assert len(found) == 2 * len(fig_max_model.POLICIES)
    for row in found:
        assert row in committed
        assert row["limit"].endswith("out-of-memory")


@pytest.mark.slow
def test_the_timeline_is_as_committed(tmp_path: Path) -> None:
    """The work of all lanes is as committed, the picture has the same bytes twice, and idle and busy time fill an iteration."""
    pictures = []
    for _ in range(2):
        fig_timeline.main(out=tmp_path)
        pictures.append([(tmp_path / f"fig_timeline.{suffix}").read_bytes() for suffix in ("png", "pdf")])
    assert pictures[0] == pictures[1]
    found = rows(tmp_path / "fig_timeline.csv")
    assert found == rows(WRITTEN / "fig_timeline.csv")
    for policy in fig_timeline.POLICIES:
        of = [row for row in found if row["policy"] == policy]
        spent = sum(float(row["seconds"]) for row in of if row["what"] == "idle" or row["name"] == "gpu")
        assert spent == pytest.approx(float(of[0]["iteration_seconds"]), rel=1e-3)


def test_no_runs_make_no_figure() -> None:
    """A figure of no runs is refused."""
    with pytest.raises(InputError, match="0 runs to draw"):
        stacked_figure([], 0, "nothing")


@pytest.mark.parametrize("script", FIGURES)
def test_every_figure_is_committed(script: str) -> None:
    """Each script has its files in paper_figs, simulated ones say so in every row, and it says what would refute it."""
    assert all((WRITTEN / f"{script}.{suffix}").is_file() for suffix in ("png", "pdf", "csv"))
    assert {row["clock"] for row in rows(WRITTEN / f"{script}.csv")} == {"simulated"}
    source = (ROOT / "experiments" / f"{script}.py").read_text()
    assert "What would refute it" in source
    assert f"python experiments/{script}.py" in source


def test_systems_differ_in_more_than_colour() -> None:
    """Lines have different markers; systems that look alike in grey have another marker, for readers without colour."""
    drawn = list(looks.LOOKS.values())
    for i, one in enumerate(drawn):
        for other in drawn[i + 1 :]:
            if abs(luminance(one.colour) - luminance(other.colour)) < 0.1 and one.colour != other.colour:
                assert one.marker != other.marker


#: Compares with the paper's numbers, which are of its models and its node.
OF_THE_PAPER = "fig_throughput"


@pytest.mark.parametrize("script", FIGURES)
def test_every_script_takes_the_same_options(script: str) -> None:
    """Each script has --out and --jobs, and but for the comparison with the paper --model, --hardware and --set."""
    program = App(default_command=importlib.import_module(f"experiments.{script}").main, result_action="return_value")
    options = ["--out", "x", "--jobs", "1"]
    others = ["--model", "qwen3-0.6b", "--hardware", "h100-pcie5", "--set", "gpu.memory=1GiB"]
    program.parse_args(options, exit_on_error=False, print_error=False)
    if script == OF_THE_PAPER:
        with pytest.raises(CycloptsError):
            program.parse_args([*options, *others], exit_on_error=False, print_error=False)
    else:
        _, bound, _ = program.parse_args([*options, *others], exit_on_error=False, print_error=False)
        assert {"h100-pcie5", "gpu.memory=1GiB"} <= set(re.findall(r"[\w.=-]+", str(bound.arguments)))


OTHER = setting.Where(hardware="rtx4090-workstation", set_=("links.d2h.bandwidth=5GB/s",))


@pytest.mark.parametrize(
    "cells",
    [
        fig_ablation.grid(["qwen3-0.6b"], {1: 8}, OTHER),
        fig_batch_size.grid(["qwen3-0.6b"], [1], OTHER),
        fig_checkpoint_granularity.grid("qwen3-0.6b", [2], [24], OTHER),
        fig_hypothetical.grid("qwen3-0.6b", [25], [69], OTHER),
        fig_memory_budget.grid(["qwen3-0.6b"], [8], OTHER),
        fig_sequence_length.grid("qwen3-0.6b", [2048], OTHER),
        fig_survey.grid("qwen3-0.6b", {"resident": 2.0}, [8], OTHER),
        fig_systems.grid([OTHER.hardware], ["qwen3-0.6b"], ["resident"], OTHER.moved),
        fig_throughput_multi_gpu.grid(["qwen3-0.6b"], [2], ["resident"], OTHER.moved, OTHER.hardware),
    ],
)
def test_a_figure_of_another_model_on_another_machine(cells: shared.Grid) -> None:
    """Cells are of the model and the machine that were given, with what was set unless the figure varies it."""
    for cell in cells.values():
        assert cell.workload.parameters == setting.model_of("qwen3-0.6b").parameters
        assert cell.node.gpu == replace(load_hardware(OTHER.hardware).gpu, memory_bytes=cell.node.gpu.memory_bytes)
        assert cell.node.d2h.bandwidth == pytest.approx(5e9) or dict(cell.moved)["links.d2h.bandwidth"] != "5GB/s"


def test_readings_widen_an_interval() -> None:
    """A reading counts if it trains the same models; for AutoHete without priority only the same implementation does."""
    script = fig_throughput_multi_gpu
    cells = script.grid(["gpt-2b", "gpt-4b"], [2], (*script.POLICIES, *chain(*script.READINGS.values())))
    rates = {"autohete": 200.0, "autohete:fp32_upload": 220.0, "autohete:priority=off": 160.0, fig_ablation.SAME_PLAN: 100.0}
    rates |= {"zero_offload:deepspeed=0.4.3": 125.0, "zero_offload:checkpointing=full": 1.0}
    fewer = "zero_offload:checkpointing=full", "autohete:replicated"

    def rate(model: object, policy: object) -> float | None:
        return None if policy in fewer and model == "gpt-4b" else rates.get(str(policy), 100.0)

    summaries: Any = {cell: SimpleNamespace(tokens_per_second=rate(*key[2:])) for key, cell in cells.items()}
    (row,) = (row for row in script.ratios([2], cells, summaries, {(): cells}) if row.over == "zero_offload")
    assert row.nominal == script.Ratio(2, 2.0, 2.0)
    assert row.interval("average") == pytest.approx((200 / 125, 220 / 100))
    assert script.factors(2, "autohete:priority=off", cells, summaries, "maximum") == pytest.approx((1, 1.6))


def test_what_is_set_twice_is_refused() -> None:
    """One figure cannot have two values."""
    with pytest.raises(InputError, match="set twice"):
        assert setting.Where(set_=("gpu.memory=1GiB", "gpu.memory=2GiB")).moved


@pytest.mark.parametrize("command", [["-m", "experiments.fig_timeline"], [str(ROOT / "experiments" / "fig_timeline.py")]])
def test_a_figure_runs_as_script_and_as_module(command: list[str], tmp_path: Path) -> None:
    """Both find the packages, and name themselves in a refusal of one line."""
    (tmp_path / "file").write_text("")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    folder = ROOT if command[0] == "-m" else tmp_path
    done = subprocess.run(
        [sys.executable, *command, "--out", str(tmp_path / "file" / "below")],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("fig_timeline: ")
    assert done.stderr.count("\n") == 1


def test_every_system_has_one_look() -> None:
    """Each policy has a look, versions of a system have its colour, and no two systems have the same colour and marker."""
    for policy in POLICIES:
        assert looks.look(f"{policy}:some=flag").colour == looks.LOOKS[policy].colour
    for name, one in looks.LOOKS.items():
        assert one.colour == looks.LOOKS[name.partition(":")[0]].colour
    seen = {name: (one.colour, one.marker) for name, one in looks.LOOKS.items() if ":" not in name}
    assert len(set(seen.values())) == len(seen)


def test_tokens_that_a_length_does_not_divide() -> None:
    """A length that does not divide the tokens of an iteration is refused with the lengths."""
    with pytest.raises(InputError, match="1000"):
        fig_sequence_length.grid("gpt-6b", [1000])


# --- the page of results


def said() -> str:
    """The page of results on one line."""
    return " ".join((ROOT / "docs" / "results.md").read_text().split())


def value(row: dict[str, str], column: str) -> float:
    """A number of a row; NaN if it does not train."""
    return float(row[column] or "nan")


def pick(script: str, column: str, **where: str) -> float:
    """The number in a column of the one row that has these values."""
    (row,) = (row for row in rows(WRITTEN / f"{script}.csv") if where.items() <= row.items())
    return value(row, column)


def test_the_page_says_how_busy_the_gpu_is() -> None:
    """The busy shares of the four systems are those of the file."""
    found = rows(WRITTEN / "fig_timeline.csv")
    busy = [100 * value(row, "seconds") / value(row, "iteration_seconds") for row in found if row["name"] == "gpu"]
    zero, patrickstar, stronghold, autohete = (f"{share:.0f} %" for share in busy)
    assert f"{zero} of the time under ZeRO-Offload, {patrickstar} under PatrickStar, {stronghold} under StrongHold" in said()
    assert f"and {autohete} under AutoHete" in said()


def test_the_page_says_which_models_are_the_largest() -> None:
    """The largest models are those of the file, and the host is what limits them with a larger GPU."""

    def billions(policy: str, gib: str) -> str:
        return f"{pick('fig_max_model', 'parameters', memory='gpu', gib=gib, policy=policy) / 1e9:.1f}B"

    small = {policy: billions(policy, "16") for policy in fig_max_model.POLICIES}
    assert f"ZeRO-Offload trains {small['zero_offload']} parameters, StrongHold {small['stronghold']}" in said()
    assert f"AutoHete {small['autohete']} and PatrickStar {small['patrickstar']}." in said()
    limited = ("stronghold", "autohete", "patrickstar")
    stronghold, autohete, patrickstar = (billions(policy, "40") for policy in limited)
    assert f"the last three to {stronghold}, {autohete} and {patrickstar}" in said()
    found = [row for row in rows(WRITTEN / "fig_max_model.csv") if (row["memory"], row["gib"]) == ("gpu", "40")]
    assert {row["limit"] for row in found if row["policy"] in limited} == {"host-out-of-memory"}


def test_the_page_says_what_memory_and_batch_do() -> None:
    """Shares and ratios by memory and by batch are those of the files."""
    script, model = "fig_memory_budget", "gpt-4b"
    tight, ample = (pick(script, "tflops_per_gpu", model=model, gpu_memory_gib=gib, policy="autohete") for gib in ("10", "40"))
    assert f"at {100 * tight / ample:.0f} % of its throughput with 40 GiB" in said()
    smallest = [row for row in rows(WRITTEN / f"{script}.csv") if row["gpu_memory_gib"] == "8" and row["verdict"] == "ok"]
    assert {(row["model"], row["policy"]) for row in smallest} == {("gpt-4b", "joint"), ("gpt-6b", "joint")}
    zero = [row for row in rows(WRITTEN / f"{script}.csv") if row["policy"] == "zero_offload" and row["verdict"] == "ok"]
    least = {name: min(int(r["gpu_memory_gib"]) for r in zero if r["model"] == name) for name in ("gpt-4b", "gpt-6b")}
    assert f"{least['gpt-4b']} GiB for 4.4B and {least['gpt-6b']} GiB for 6.3B" in said()
    ratios = [
        pick("fig_batch_size", "tokens_per_second", model=model, batch_size=batch, policy="autohete")
        / pick("fig_batch_size", "tokens_per_second", model=model, batch_size=batch, policy="zero_offload")
        for batch in ("1", "32")
    ]
    assert f"{ratios[0]:.1f} times as fast as ZeRO-Offload at a batch of 1, and {ratios[1]:.1f} times as fast at 32" in said()


def test_the_page_says_what_lengths_and_recomputation_do() -> None:
    """Rates by length and costs of recomputation are those of the files."""

    def work(policy: str, length: str) -> str:
        return f"{pick('fig_sequence_length', 'tflops_per_gpu', sequence_length=length, policy=policy):.0f}"

    assert f"AutoHete reaches {work('autohete', '512')} TFLOP/s with sequences of 512 tokens and" in said()
    assert f"and {work('autohete', '32768')} with one of 32,768" in said()
    assert f"which the longer passes hide, and reaches {work('joint', '32768')}. ZeRO-Offload goes from" in said()
    assert f"ZeRO-Offload goes from {work('zero_offload', '512')} to {work('zero_offload', '32768')}." in said()

    def plan(checkpointing: str) -> tuple[float, float]:
        where = {"model": "gpt-2b", "policy": f"resident:checkpointing={checkpointing}"}
        script = "fig_checkpoint_granularity"
        return pick(script, "iteration_seconds", **where), pick(script, "gpu_peak_bytes", **where) / 2**30

    (none, most), (full, least), (selective, some) = map(plan, ("none", "full", "selective"))
    assert f"takes {100 * (full / none - 1):.0f} % more time and needs {least:.0f} GiB instead of {most:.0f} GiB" in said()
    assert f"{100 * (selective / none - 1):.0f} % more time, {some:.0f} GiB." in said()


def test_the_page_says_which_system_is_the_fastest() -> None:
    """Where each system is the fastest, and by how much, is what the files say."""

    def ranked(script: str, *keys: str) -> list[list[tuple[float, str]]]:
        points: dict[tuple[str, ...], list[tuple[float, str]]] = {}
        for row in rows(WRITTEN / f"{script}.csv"):
            points.setdefault(tuple(row[key] for key in keys), []).append((float(row["tokens_per_second"] or 0), row["policy"]))
        return [sorted(point, reverse=True) for point in points.values()]

    built = ranked("fig_hypothetical", *fig_hypothetical.NAMES)
    wins = [point[0][1] for point in built]
    assert f"at {wins.count('autohete')} of {len(wins)} pairs" in said()
    streamed = [point for point in built if point[0][1] == "streamed_states:weights"]
    assert len(streamed) + wins.count("autohete") == len(wins)
    assert f"At the other {len(streamed)}," in said()
    assert f"by up to {100 * (max(point[0][0] / point[1][0] for point in streamed) - 1):.0f} %" in said()


def test_the_page_says_what_joint_gains_over_all_systems() -> None:
    """Its gains over the fastest other system, and the smallest GPUs, are those of the files."""
    found = rows(WRITTEN / "fig_systems_gains.csv")
    gains = [value(row, "gain_percent") for row in found]
    assert min(gains) >= 0
    assert f"`joint` is the fastest in {len(gains)} of {len(gains)} cases" in said()
    assert f"by {median(gains):.0f} % at the median" in said()
    by_other: dict[str, list[float]] = {}
    for gain, row in zip(gains, found, strict=True):
        by_other.setdefault(row["fastest_other"].partition(":")[0], []).append(gain)
    second, third = by_other.pop("autohete"), by_other.pop("dataflow")
    assert f"AutoHete in {len(second)} cases, which `joint` exceeds by {min(second):.0f} to {max(second):.0f} %" in said()
    assert f"`dataflow` in {len(third)}, by {min(third):.0f} to {max(third):.0f} %" in said()
    assert by_other == {"ratel": [max(gains)]}
    (other,) = (row for row in found if row["fastest_other"].startswith("ratel"))
    assert (other["model"], other["hardware"]) == ("qwen3-14b", "rtx4090-workstation")
    assert f"takes {1 + value(other, 'gain_percent') / 100:.1f} times as long" in said()
    sizes: dict[str, dict[str, set[float]]] = {}
    on_h100: list[float] = []  # where less of the memory is CUDA's
    dealt: dict[str, list[float]] = {"harmony": [], "roundpipe": [], "mobius": []}
    for row in rows(WRITTEN / "fig_systems_memory.csv"):
        if row["gpu_memory_gib"]:
            if row["gpus"] == "4" and row["system"] in dealt:
                dealt[row["system"]].append(value(row, "gpu_memory_gib"))
            elif row["hardware"].startswith("h100") and row["system"] == "joint":
                on_h100.append(value(row, "gpu_memory_gib"))
            else:
                sizes.setdefault(row["model"], {}).setdefault(row["system"], set()).add(value(row, "gpu_memory_gib"))
    least = [of["joint"] for of in sizes.values()]
    assert all(len(size) == 1 for size in least)  # the same on each other machine
    smallest = [f"{size:.1f}" for (size,) in least]
    assert f"on GPUs of {smallest[0]}, {smallest[1]} and {smallest[2]} GiB" in said()
    (less,) = {f"{size - own:.1f}" for (size,), own in zip(least, on_h100, strict=True)}
    assert f"and of {less} GiB less with an H100" in said()
    assert all(own <= min(size) for own, of in zip(on_h100, sizes.values(), strict=True) for size in of.values())
    harmony, roundpipe, mobius = (" and ".join(f"{gib:.1f}" for gib in sizes[:2]) for sizes in dealt.values())
    assert (
        f"Harmony trains the first two models on GPUs of {harmony} GiB, RoundPipe on {roundpipe}, Mobius on {mobius}." in said()
    )


def test_the_page_says_how_all_systems_compare_by_memory() -> None:
    """Smallest GPUs and gains of ``joint`` by GPU memory are those of the file."""
    found = [row for row in rows(WRITTEN / "fig_survey.csv") if row["verdict"] == "ok"]
    least = {row["system"]: value(row, "gpu_memory_gib") for row in reversed(found)}  # each begins with its smallest
    first, second, *_ = sorted(least, key=lambda system: least[system])
    assert first == "joint"
    assert f"`joint` trains on {least[first]:.1f} GiB, the next system on {least[second]:.1f}." in said()

    def fastest(gib: float, *, own: bool) -> tuple[float, str]:
        compared = [row for row in found if row["system"] not in STALE and (row["system"] == "joint") is own]
        fitting = (row for row in compared if value(row, "gpu_memory_gib") <= gib)
        return max((value(row, "tokens_per_second"), row["system"]) for row in fitting)

    sizes = [float(size) for size in fig_survey.SIZES if size >= 12]
    gains = {size: 100 * (fastest(size, own=True)[0] / fastest(size, own=False)[0] - 1) for size in sizes}
    small, large = ([gain for size, gain in gains.items() if (size <= 48) is few] for few in (True, False))
    assert min(large) >= 0
    assert f"From 12 to 48 GiB `joint` is {min(small):.0f} to {max(small):.0f} % faster" in said()
    assert f"from 64 GiB at most {max(large):.0f} %" in said()
    second_of = {size: fastest(size, own=False)[1] for size in sizes if size >= 16}
    assert {size for size, system in second_of.items() if system == "dataflow"} == {size for size in sizes if 16 <= size <= 40}
    assert {size for size, system in second_of.items() if system == "autohete"} == {size for size in sizes if size >= 48}
    assert "`dataflow` is the fastest of the others from 16 GiB to 40, AutoHete from 48 to 192." in said()
    on_gpu = ("resident", "capuchin", "rotor", "te_offload", "offload_activations", "sqrt_checkpoint", "pipeline", "block_swap")
    assert f"on the GPU begin at {min(least[system] for system in on_gpu):.0f} GiB" in said()


def test_no_name_of_the_survey_lies_on_another() -> None:
    """Names of as many systems as there may be keep apart where their lines begin close together, and stay in the figure."""
    systems = [*looks.LOOKS][:34]
    drawn = {name: [(20 + 0.5 * (i % 6), 1 + 0.02 * (i // 6)), (64.0, 0.5)] for i, name in enumerate(systems)}
    figure = fig_survey.draw(drawn, ["l2l"], "a title")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    names = [Text.get_window_extent(text) for text in axes.texts]  # without the strokes that lead to them
    assert len(names) == len(systems)
    inside = axes.get_window_extent().padded(1)
    assert all(inside.contains(*box.min) and inside.contains(*box.max) for box in names)
    assert not any(box.count_overlaps([other.shrunk(0.98, 0.9) for other in names[:i]]) for i, box in enumerate(names))


def test_a_curve_never_rises_and_the_front_is_below_all() -> None:
    """A system takes at most the time that it takes with less memory, and no system is below the front."""
    drawn = {"joint": [(8.0, 3.0), (16.0, 1.0)], "l2l": [(4.0, 5.0), (16.0, 2.0)]}
    assert fig_survey.front(drawn) == [(4.0, 5.0), (8.0, 3.0), (16.0, 1.0)]
    cells = fig_survey.grid("qwen3-0.6b", {"l2l": 4.0, "joint": None}, [2, 8, 16], OTHER)
    assert [gib for _, gib in cells] == [4.0, 8, 16]
    both = fig_survey.grid("qwen3-0.6b", {"l2l": 4.0, "joint": 2.0}, [8], OTHER)
    assert [gib for name, gib in both if name == "joint"] == [2.0, 4.0, 8]  # also where the other line begins
    times = dict(zip(cells.values(), (0.002, 0.003, 0.001), strict=True))
    answers: Any = {cell: SimpleNamespace(fits=True, seconds_per_token=seconds) for cell, seconds in times.items()}
    assert fig_survey.curves(cells, answers) == {"l2l": [(4.0, 2.0), (8, 2.0), (16, 1.0)]}


def test_stages_share_the_batches_of_all_gpus() -> None:
    """A pipeline trains as many sequences in an iteration as GPUs with a batch each, in micro-batches of any size."""
    small = Workload("small", 256, 4, 4, vocabulary_size=512, sequence_length=128, batch_size=4, tied_embeddings=False)
    nodes = [fig_systems.node_of(text) for text in ("rtx4090-2gpu:2", "rtx4090-2gpu")]
    assert nodes == [("rtx4090-2gpu", 2), ("rtx4090-2gpu", 1)]
    for policy, most in (("pipeline", 8), ("resident", 4)):
        found = BestFlags(small, policy, nodes[0][0], gpus=nodes[0][1]).fastest()
        told = found.summary.assumptions
        assert found.fits
        assert int(str(told["batch_size"])) * int(str(told["micro_batches"])) == most


def test_gains_are_over_the_fastest_that_trains_synchronously() -> None:
    """A system with delayed updates is drawn with a star, and does not count; nor does one that does not fit."""
    cells = fig_systems.grid(["rtx4090-workstation"], ["qwen3-0.6b"], ["joint", "l2l", "rotor", "resident"])
    rates = {"joint": (300.0, False), "l2l": (200.0, False), "rotor": (400.0, True), "resident": (None, False)}
    found: Any = {}
    for cell in cells.values():
        rate, delayed = rates[cell.policy]
        summary = SimpleNamespace(tokens_per_second=rate, verdict=Verdict.OK if rate else Verdict.GPU_OUT_OF_MEMORY)
        plan = SimpleNamespace(delayed=delayed)
        found[cell] = SimpleNamespace(name=cell.policy, fits=rate is not None, summary=summary, plan=plan), None
    (column,) = dict.fromkeys(key[:-1] for key in cells)
    all_found = fig_systems.Results((column,), tuple(rates), cells, found)
    assert fig_systems.gains(all_found) == {column: pytest.approx(0.5)}
    assert [fig_systems.rate_text(all_found, column, system) for system in rates] == ["300", "200", "400*", "gpu"]


@pytest.mark.slow
@pytest.mark.parametrize("system", ["zero_offload", "stronghold", "streamed_states", "autohete"])
def test_the_smallest_gpu_is_the_smallest(system: str) -> None:
    """The system trains on it; with a tenth of a GiB less, no flags of its users that do not search do."""
    cell = BestFlags(setting.model_of("qwen3-0.6b"), system, "rtx4090-workstation")
    found = cell.least()
    assert found is not None
    gib = found.gpu_bytes / 2**30
    enough, less = (replace(cell, moved=(("gpu.memory", f"{size:.1f}GiB"),)) for size in (gib, gib - 0.1))
    assert enough.fastest().fits
    assert system == "autohete" or not less.fastest().fits


def test_the_page_says_what_four_gpus_do() -> None:
    """Speed-ups on four GPUs are those of the file, with their intervals."""
    script = "fig_throughput_multi_gpu_ratios"
    names = ("zero_offload", "patrickstar", "stronghold")

    def ratio(over: str, batch: str, column: str) -> str:
        return f"{pick(script, column, over=over, batch_per_gpu=batch):.2f}"

    for over in names:
        low, high = ratio(over, "2", "average_low"), ratio(over, "2", "average_high")
        assert f"{low} to {high})" in said()
        assert f"{ratio(over, '2', 'average')} times as fast as" in said()
    largest, with_8 = ([ratio(over, *where) for over in names] for where in (("2", "maximum"), ("8", "average")))
    assert f"at most {largest[0]}, {largest[1]} and {largest[2]}." in said()
    assert f"the averages are {with_8[0]}, {with_8[1]} and {with_8[2]}." in said()
    replicated = {"over": "stronghold:replicated", "batch_per_gpu": "2"}
    assert pick(script, "models", **replicated) == 3
    assert f"AutoHete is {pick(script, 'average', **replicated):.1f} times as fast" in said()
    found = [row for row in rows(WRITTEN / "fig_throughput_multi_gpu.csv") if row["batch_per_gpu"] == "2"]
    rates = {(row["model"], row["policy"]): value(row, "tokens_per_second") for row in found}
    best = max(rate / rates[model, "autohete"] for (model, policy), rate in rates.items() if policy.startswith("resident"))
    assert f"at least {100 * (1 - best):.0f} % slower than AutoHete" in said()


def test_the_page_says_what_each_technique_adds() -> None:
    """Losses without each technique are those of the file."""
    rates: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows(WRITTEN / "fig_ablation.csv"):
        rates.setdefault((row["gpus"], row["policy"]), {})[row["model"]] = value(row, "tokens_per_second")

    def lost(flag: str, gpus: str = "1") -> list[float]:
        full, less = rates[gpus, "autohete"], rates[gpus, f"autohete:{flag}=off"]
        return [100 * (1 - less[model] / full[model]) for model in full if less[model] == less[model]]

    assert len(rates["1", "autohete"]) == 6
    offload = lost("parameter_offload")
    assert len(offload) == 4
    assert f"loses {mean(lost('gpu_updates')):.0f} % on average if the CPU updates everything" in said()
    assert f"{mean(lost('across_iterations')):.0f} % without overlap of iterations, {mean(offload):.1f} % without" in said()
    assert f"{mean(lost('priority')):.1f} % without priority, {mean(lost('some_checkpointed')):.1f} % if all" in said()
    assert max(lost("prefetch_tuning") + lost("prefetch_tuning", "4")) < 0.2
    priority = lost("priority", "4")
    assert f"cost {mean(lost('gpu_updates', '4')):.0f} %, and priority adds {mean(priority):.1f} %" in said()
    assert min(priority) > -0.1
