"""The README and docs/ are right: commands and examples run, links lead somewhere, numbers are those written."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import pytest

from autohete.answer.certainty import MODEL_ERROR, MODEL_FACTOR
from autohete.cli.app import app
from autohete.policies import POLICIES, parse_policy
from autohete.schedule.ids import KIND_MEANING
from experiments import fidelity, published

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
RESULTS = ROOT / "docs" / "results.md"
TASKS = ROOT / "docs" / "reference" / "tasks.md"
TUTORIALS = ROOT / "docs" / "tutorials"
HOW_TO = ROOT / "docs" / "how-to"
BENCHMARKS = ROOT / "benchmarks" / "README.md"
NEGATIVE = ROOT / "docs" / "explanation" / "negative_results.md"
MODEL = ROOT / "docs" / "explanation" / "model.md"
PUBLISHED = ROOT / "paper_figs" / "published.csv"

#: What a reader follows step by step: everything in their code blocks is looked at.
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
#: Of these, the ones that are run as a whole: files that they show, commands and what these print, in one folder.
WHOLE = [*(TUTORIALS / f"{page}.md" for page in ("first_answer", "own_hardware", "write_a_policy")), HOW_TO / "calibrate.md"]
#: These name files and targets, too.
DOCUMENTS = [*PAGES, BENCHMARKS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

#: What each Python example prints, as a regular expression, in the order of the pages.
PRINTS = {
    README: [r"zero_offload +ok .* s  .* GiB  .*\nautohete +ok .* s  .* GiB  .*\n"],
    HOW_TO / "from_python.md": [
        r"<Simulation of qwen3-0.6b on rtx4090-workstation: zero_offload: verdict ok, .*>\nresident 2\n"
    ],
    HOW_TO / "trainer.md": [r"loss \d\.\d\d, device peak \d+\.\d MiB\n"],
    HOW_TO / "long_trainings.md": [r""],
    HOW_TO / "optimizers.md": [r"loss \d\.\d\d, then \d\.\d\d\n"],
}
#: What the Python files of the pages that are run as a whole print.
FILES_PRINT = {
    "g10.py": r"",
    "record.py": r"",
    "show.py": r"task +after\n(?: A[OF].*\n){8}",
    "train.py": r"plan \S+ \S+ \S+ of 6, loss \d\.\d\d\n",
}


def name(page: Path) -> str:
    """A page as it is called in the repository."""
    return page.relative_to(ROOT).as_posix()


def text(page: Path) -> str:
    """A page without its line ends, in which a sentence is found however it wraps."""
    return " ".join(page.read_text().split())


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of ``page`` in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def scenarios() -> list[str]:
    """Each shell block of the pages with an ``autohete`` command, once."""
    found = [
        block
        for page in PAGES
        if page not in WHOLE
        for block in blocks(page, "sh")
        if re.search(r"^autohete ", block, re.MULTILINE)
    ]
    return list(dict.fromkeys(found))


def table(page: Path, head: str) -> list[list[str]]:
    """The cells of the one table whose head begins with the cell ``head``."""
    (found,) = re.findall(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]


def written(file: str) -> list[dict[str, str]]:
    """The rows of a committed file."""
    return list(csv.DictReader((ROOT / "paper_figs" / file).read_text().splitlines()))


def run(*command: str, cwd: Path, path: str = str(ROOT)) -> str:
    """The output of a command that must succeed without a warning."""
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "100", "KINETO_LOG_LEVEL": "6"}  # PyTorch's profiler logs less
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=300)
    assert done.returncode == 0, (command, done.stderr)
    assert done.stderr == "", command
    return done.stdout


# --- what can be run ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block", scenarios(), ids=lambda block: block.splitlines()[0])
def test_every_command_works(block: str, tmp_path: Path) -> None:
    """The command lines of a block run as they stand, one after another, and each writes the files that it names."""
    there: set[str] = set()
    for command in block.splitlines():
        words = shlex.split(command)
        assert words[0] == "autohete", command
        assert run(sys.executable, "-m", *words, cwd=tmp_path)
        there |= {word for word in words if re.fullmatch(r"\w+\.(csv|html|json|png)", word)}
        there |= {words[words.index("--write") + 1]} if "--write" in words else set()
        assert {path.name for path in tmp_path.iterdir()} == there, command


@pytest.mark.slow
@pytest.mark.parametrize("page", WHOLE, ids=name)
def test_the_tutorial_works(page: Path, tmp_path: Path) -> None:
    """Its files are written and run, its commands run one after another in one folder, and print what is shown after them."""
    printed = ""
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        first = code.splitlines()[0]
        if language == "sh":
            printed = ""
            for command in code.splitlines():
                words = shlex.split(command)
                here = [words.pop(0).removeprefix("PYTHONPATH=")] if words[0].startswith("PYTHONPATH=") else []
                printed += run(sys.executable, "-m", *words, cwd=tmp_path, path=os.pathsep.join([*here, str(ROOT)]))
                assert not here or "g10:G10" in printed
        elif language == "text":
            assert code in printed
        else:
            assert re.fullmatch(r"# [\w-]+\.(py|toml)", first)
            (tmp_path / first.removeprefix("# ")).write_text(code)
        if first.startswith("# test_"):
            assert "1 passed" in run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", first[2:], cwd=tmp_path)
        elif language == "python":
            printed = run(sys.executable, first[2:], cwd=tmp_path, path=os.pathsep.join([".", str(ROOT)]))
            assert re.fullmatch(FILES_PRINT[first[2:]], printed), first


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in WHOLE and blocks(page, "python")], ids=name)
def test_every_python_example_works(page: Path, tmp_path: Path) -> None:
    """The Python of a page runs as it stands and prints what it promises."""
    for code, printed in zip(blocks(page, "python"), PRINTS[page], strict=True):
        assert re.fullmatch(printed, run(sys.executable, "-c", code, cwd=tmp_path))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_command_hides_in_another_block(page: Path) -> None:
    """Code is in blocks that the tests look at: shell with autohete and make only, Python, what a program prints, hardware."""
    fences = re.findall(r"^ *(?:```|~~~)(.*)$", page.read_text(), re.MULTILINE)
    directives = {"{eval-rst}"} if page.parent.name == "api" else set()
    assert set(fences[::2]) <= {"sh", "python", "text", "toml"} | directives  # test_hardware_bases.py, test_sweep.py: toml
    assert set(fences[1::2]) <= {""}
    assert all(
        re.match(r"(PYTHONPATH=\. )?(autohete|make) ", line) for block in blocks(page, "sh") for line in block.splitlines()
    )
    assert not re.search(r"^\W*(autohete|make|python) \S", "".join(blocks(page, "text")), re.MULTILINE)


def test_every_command_is_shown() -> None:
    """The pages show each command of the program at work, and name no other."""
    known = {command for command in app if not command.startswith("-")}
    shown = [line.split() for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    assert {words[1] for words in shown if words[0] == "autohete"} == known
    assert {word for page in DOCUMENTS for word in re.findall(r"`autohete (\w+)", page.read_text())} <= known


# --- what is named ------------------------------------------------------------------------------------------------


def test_the_make_targets_exist() -> None:
    """No document names a make target that the Makefile does not have; the README has the two commands."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {page: set(re.findall(r"\bmake ([\w-]+)", page.read_text())) - {"in", "a"} for page in DOCUMENTS}
    assert set().union(*named.values()) <= targets
    assert {"figure", "test"} <= named[README]


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_the_links_lead_somewhere(page: Path) -> None:
    """Every picture, file and heading that a document links to is in the repository."""
    for link in re.findall(r"\]\((.*?)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, link


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_the_files_exist(page: Path) -> None:
    """Every file or folder of the repository that a document names in code is there."""
    folders = "autohete|benchmarks|docs|examples|experiments|paper_figs|tests"
    named = re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./*-]*|test_\w+\.py)", page.read_text())
    for path in set(named) - set(re.findall(r"^# (test_\w+\.py)$", page.read_text(), re.MULTILINE)):  # what a page writes
        assert list(ROOT.glob(f"tests/*/{path}" if path.startswith("test_") else path.rstrip("/."))), path


def test_every_page_is_listed() -> None:
    """The README links to the index; this lists every page and notebook once, and the index of the API those of the API."""
    listed = []
    for page in (INDEX, ROOT / "docs" / "reference" / "api.md"):
        found = re.findall(r"^- \[.*?\]\((.*?\.(?:md|py))\)", page.read_text(), re.MULTILINE)
        listed += [(page.parent / path).resolve() for path in found]
    notebooks = (ROOT / "docs" / "notebooks").glob("*.py")
    assert sorted(listed) == sorted({*DOCUMENTS, *notebooks} - {INDEX})
    assert "](docs/index.md)" in README.read_text()


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_every_policy_named_with_flags_can_be_read(page: Path) -> None:
    """Each policy with flags in a document, such as ``stronghold:window=8``, is one that the command line takes."""
    for policy in re.findall(rf"\b(?:{'|'.join(POLICIES)}):[\w=.,]*\w", page.read_text()):
        parse_policy(policy)


def test_the_reference_has_every_kind_of_task() -> None:
    """The page explains each mnemonic in the words of the program, in its order."""
    assert table(TASKS, "Mnemonic") == [[f"`{kind}`", meaning] for kind, meaning in KIND_MEANING.items()]


def test_the_readme_is_short() -> None:
    """The README has at most 120 lines of at most 128 characters."""
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 128] == []


# --- numbers ------------------------------------------------------------------------------------------------------


#: The committed file is made by ``make published``; the tests of what it says of each group need one that has groups.
with_groups = pytest.mark.skipif("group" not in written("published.csv")[0], reason="run `make published`")


def known_rows() -> list[dict[str, str]]:
    """The rows of known sources, kept back or not."""
    return [row for row in written("published.csv") if row.get("group") not in (published.NEW, published.BLIND)]


def unseen_iterations() -> published.Score | None:
    """The score of iterations that nobody had looked at, as they were predicted before; None if there are none."""
    if "group" not in written("published.csv")[0]:
        return None
    rows = [c for c in published.read(PUBLISHED) if c.group in (published.NEW, published.BLIND) and c.phase == "iteration"]
    scores = published.scores([replace(c, predicted=c.predicted if c.first is None else c.first) for c in rows])
    return scores[0] if scores else None


def fidelity_errors(clock: str, policies: Sequence[str] = fidelity.POLICIES) -> list[float]:
    """Errors of the iteration times by one clock, in percent."""
    rows = [row for row in written("fidelity.csv") if row["clock"] == clock and row["policy"] in policies]
    return [abs(float(row["error_percent"])) for row in rows]


def late_plans() -> tuple[int, int]:
    """How many plans fit, and how many of these do not when copies are late."""
    rows = written("safety.csv")
    return len(rows), sum(int(row["waits"]) > 0 for row in rows)


def executor_costs(what: str) -> list[float]:
    """The row ``what`` of the benchmark's table of CPU time, without its goal."""
    (line,) = (line for line in BENCHMARKS.read_text().splitlines() if line.startswith(f"| {what}"))
    return [float(number) for number in re.findall(r"\+([\d.]+) %", line)]


def test_the_headline_results_are_those_written() -> None:
    """Each number in the README's table of results is that of a committed file."""
    ratios = written("fig_throughput_ratios.csv")
    average = {(row["over"], row["version"]): f"{float(row['average']):.2f}" for row in ratios}
    paper = {row["over"]: f"{float(row['paper']):.2f}" for row in ratios}
    versions = ["0.4.3", "0.8.3", "2026"]
    rows, unseen = known_rows(), unseen_iterations()
    timed = [row for row in rows if row["phase"] == "iteration" and not row["calibrates"]]
    iterations = [abs(float(row["difference_percent"])) for row in timed]
    verdicts = [row["measured"] == row["predicted"] for row in rows if row["unit"] == "fits"]
    paced, native = fidelity_errors("emulated"), fidelity_errors("measured-cpu")
    plans, late = late_plans()
    gains = [float(row["gain"]) for row in written("joint.csv")]
    costs = executor_costs("executor |")
    checked = json.loads((BENCHMARKS.parent / "gpu_check.json").read_text())
    on_gpu = [run for run in checked["fidelity"]["found"] if not run["failure"]]
    simulated = "Simulator against runtime,"
    expected = [
        (
            f"Average speed-up over ZeRO-Offload, DeepSpeed {' / '.join(versions)}",
            f"{' / '.join(average['zero_offload', version] for version in versions)} (paper: {paper['zero_offload']})",
        ),
        ("Average speed-up over PatrickStar", f"{average['patrickstar', '']} (paper: {paper['patrickstar']})"),
        ("Average speed-up over StrongHold", f"{average['stronghold', '']} (paper: {paper['stronghold']})"),
        (
            "Average gain from priority scheduling",
            f"{average['autohete:priority=off', '']} (paper: {paper['autohete:priority=off']}; not reproduced)",
        ),
        (
            "Gain of deciding unit by unit (`joint`) over AutoHete",
            f"{100 * median(gains):.0f} % faster in the median, at most {100 * max(gains):.0f} %",
        ),
        (
            f"Iteration times measured by others, {len(iterations)} rows",
            f"off by {mean(iterations):.1f} % on average, {max(iterations):.1f} % at worst",
        ),
        *(
            (
                f"Iteration times that nobody had looked at, {score.count} rows",
                f"off by {100 * score.mean_error:.1f} % on average",
            )
            for score in [unseen]
            if score
        ),
        ("Do runs of others fit?", f"{sum(verdicts)} of {len(verdicts)} verdicts right"),
        (
            f"{simulated} paced, {len(paced)} settings",
            f"off by {mean(paced):.2f} % on average, {max(paced):.1f} % at worst",
        ),
        (
            f"{simulated} native, {len(native)} settings",
            f"off by {mean(native):.1f} % on average, {max(native):.0f} % at worst (goal: 8 %)",
        ),
        ("Plans that need extra waits to fit under any timing", f"{late} of {plans}, at no cost in simulated time"),
        (
            f"Runtime on one H100, {len(on_gpu)} runs",
            f"training exact; peaks off by {mean(abs(run['peak_error_percent']) for run in on_gpu):.1f} % on average, "
            f"times by {mean(abs(run['error_percent']) for run in on_gpu):.0f} % (goal: 10 %)",
        ),
        ("CPU time of the executor over a plain PyTorch loop", f"{min(costs)} to {max(costs)} % more (goal: 3 %)"),
    ]
    assert all(row["identical_updates_alike"] for row in checked["exactness"]["found"] if not row["failure"])
    shown = table(README, "Question")
    assert [(question, result) for question, result, _ in shown] == expected
    assert all(re.fullmatch(r"`make [\w-]+`", command) for _, _, command in shown)


def test_the_figures_of_the_comparison_are_those_written() -> None:
    """Each number of the table of speed-ups is that of the committed file."""
    rows = written("fig_throughput_ratios.csv")
    for (_, *cells), row in zip(table(RESULTS, "AutoHete over"), rows, strict=True):
        expected = []
        for number, prefix in (("average", ""), ("maximum", "maximum_")):
            ratio, paper = float(row[number]), float(row[f"{prefix}paper"])
            expected += [
                f"{ratio:.2f} ({100 * (ratio / paper - 1):+.0f} %)",
                f"{float(row[f'{prefix}low']):.2f} to {float(row[f'{prefix}high']):.2f}",
                f"{paper:.2f}",
            ]
        assert cells == expected


def test_only_deepspeed_0_4_3_is_said_to_lie_inside_the_intervals() -> None:
    """Of ZeRO-Offload's versions, 0.4.3 alone has both published ratios inside the intervals of the node's figures."""
    rows = [row for row in written("fig_throughput_ratios.csv") if row["over"] == "zero_offload"]

    def inside(row: dict[str, str], of: str) -> bool:
        low, paper, high = (float(row[f"{of}{end}"]) for end in ("figures_low", "paper", "figures_high"))
        return low <= paper <= high

    assert [row["version"] for row in rows if inside(row, "") and inside(row, "maximum_")] == ["0.4.3"]
    assert "With DeepSpeed 0.4.3, whose gradient copies overlap backward, both published ratios lie inside" in text(RESULTS)


def test_the_variant_of_autohete_is_the_one_written() -> None:
    """The ratios of the variant that uploads the fp32 master are those of the committed file."""
    rows = written("fig_throughput_variants.csv")
    average = {row["over"]: f"{float(row['average']):.2f}" for row in rows if row["autohete"] == "fp32_upload"}
    zero, patrickstar = average["zero_offload:deepspeed=0.4.3"], average["patrickstar"]
    said = text(RESULTS)
    assert f"it would be {average['autohete:priority=off']}, but the other ratios would be {zero} (DeepSpeed 0.4.3)," in said
    assert f"{patrickstar} (PatrickStar) and {average['stronghold']} (StrongHold)" in said


def test_what_the_published_ratios_would_need_is_what_is_written() -> None:
    """The bounds on the published ratios are those of the committed file."""
    _, before, now, _, gain = written("fig_throughput_bounds.csv")
    assert "DeepSpeed 0.8.3" in before["claim"]
    assert "DeepSpeed 2026" in now["claim"]
    assert "priority gain" in gain["claim"]
    (low, high), (now_low, now_high) = (
        (int(x) for x in re.findall(r"^(\d+) to (\d+) GB/s", row["needed"])[0]) for row in (before, now)
    )
    (process,), (dram,) = re.findall(r"^\d+", now["measured_elsewhere"]), re.findall(r"\d+", now["possible"])
    said = text(RESULTS)
    assert f"would require {low} to {high} GB/s of CPU Adam (0.8.3), or {now_low} to {now_high} GB/s (2026)" in said
    assert f"One process reached {process} GB/s elsewhere, and the DRAM peaks at {dram} GB/s" in said
    assert f"outside the schedule's lower bound vanished, the gain would be {gain['possible'].split()[0]}." in said


@with_groups
def test_the_scores_of_published_rows_are_those_written() -> None:
    """The tables of scores by group and of wrong verdicts are those of the committed file."""
    page = RESULTS.read_text()
    assert [
        table for table in published.tables(published.read(ROOT / "paper_figs" / "published.csv")) if table not in page
    ] == []


def test_the_error_of_the_model_is_the_one_written() -> None:
    """The pages on `plan` and on the model state the error that intervals have, and the factor of 90 % of the times."""
    stated = f"{100 * MODEL_ERROR:.0f} % on average for runs that nobody had looked at"
    assert stated in text(HOW_TO / "plan_and_buy.md")
    assert stated in text(MODEL)
    assert f"within a factor of {MODEL_FACTOR:.2f} of the prediction" in text(MODEL)


def test_the_error_of_the_model_is_the_one_measured() -> None:
    """The error that intervals have lies between those of rows and of sources that nobody had looked at, in whole percent."""
    score = unseen_iterations()
    if score is None:
        pytest.skip("no iteration that nobody had looked at is measured yet")
    low, *_, high = sorted((score.mean_error, score.by_source))
    assert round(low, 2) <= round(MODEL_ERROR, 2) <= round(high, 2)


def test_the_rows_that_disagree_are_those_written() -> None:
    """The known rows listed as off by more than a quarter, and a wrong verdict, are those of the committed file."""
    rows = known_rows()
    apart = [float(row["difference_percent"]) for row in rows if row["unit"] == "s"]
    expected = sorted(f"{error:+.0f} %" for error in apart if abs(error) > 25)
    assert sorted(error for _, errors, _ in table(RESULTS, "Row") for error in errors.split(", ")) == expected
    wrong = {row["row"]: row["remark"].split() for row in rows if row["unit"] == "fits" and row["measured"] != row["predicted"]}
    _, needed, *_ = wrong["ZeRO-Offload, gpt-4b, batch 8, 16GiB"]
    assert f"measured to train 4B within 16 GiB; the prediction is that it needs {needed} GiB" in text(RESULTS)


def test_the_errors_of_the_simulator_are_those_written() -> None:
    """The table of simulator against runtime has the numbers of the committed file."""
    paced, native = fidelity_errors("emulated"), fidelity_errors("measured-cpu")
    more = fidelity_errors("measured-cpu", fidelity.MORE)
    head = f"{len(paced) + len(native) + len(more)} settings, drawn at random"
    assert [row[:3] for row in table(RESULTS, head)] == [
        [f"*paced*, {len(paced)}: do order and waiting agree?", f"{mean(paced):.2f} %", f"{max(paced):.1f} %"],
        [f"*native*, {len(native)}: is the model of time right?", f"{mean(native):.1f} %", f"{max(native):.0f} %"],
        [f"*native*, {len(more)} of other policies, some with a drive", f"{mean(more):.1f} %", f"{max(more):.0f} %"],
    ]


def test_the_cost_of_waits_is_the_one_written() -> None:
    """How many plans need waits for memory, and that these cost nothing, is what the committed file says."""
    plans, late = late_plans()
    assert f"Of the {plans} plans of the published comparison that fit, {late} would not fit if" in text(RESULTS)
    assert {float(row["cost_percent"]) for row in written("safety.csv")} == {0.0}


def test_the_cost_of_the_executor_is_the_one_measured() -> None:
    """The page of results has the executor's cost as the benchmark's tables do."""
    plain, counted = executor_costs("executor |"), executor_costs("executor, memory counted by the schedule's sizes")
    assert len(plain) == len(counted) == 4
    (line,) = (line for line in BENCHMARKS.read_text().splitlines() if line.startswith("| plain loop (CPU time of a step)"))
    steps = [int(number) / 1000 for number in re.findall(r"(\d+) ms", line)]
    said = text(RESULTS)
    assert f"takes {min(plain)} to {max(plain)} % more CPU time than an ordinary PyTorch loop (goal: 3 %)" in said
    assert f"it takes {min(counted)} to {max(counted)} % more (goal: 8 %)" in said
    assert f"takes {min(steps):.2f} to {max(steps):.2f} s (" in said


def test_the_quality_of_plans_is_the_one_measured() -> None:
    """The page of results has the planner's distance from the best known plans as the benchmark does."""
    ((fit, apart),) = re.findall(r"(\d+) fit; the plan was at most ([\d.]+) % slower", text(BENCHMARKS))
    assert f"In {fit} settings of 20 to 96 blocks" in text(RESULTS)
    assert f"found nothing more than {apart} % faster" in text(RESULTS)


def test_the_missed_goals_are_those_measured() -> None:
    """Each number that misses a goal is on the page that the row links to."""
    for goal, reached, where in table(NEGATIVE, "Goal"):
        (page,) = re.findall(r"\]\((.*?)#", where)
        numbers = re.findall(r"\d[\d.]*", reached)
        assert numbers, goal
        assert [number for number in numbers if number not in (NEGATIVE.parent / page).read_text()] == [], goal
