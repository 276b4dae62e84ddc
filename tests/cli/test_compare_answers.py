"""Two saved answers of ``autohete plan`` side by side."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from support.answers import LARGE, TIGHT, TINY, WORKLOAD, answer, saved
from support.command import SMALL, autohete, refused

from autohete.answer.answer_document import answer_json
from autohete.answer.certainty import MODEL_ERROR
from autohete.answer.saved_answer import read_answer
from autohete.answer.two_answers import Joined, TwoAnswers, compare_answers
from autohete.execution.trace import Clock
from autohete.report.two_answers_page import two_answers_page
from autohete.report.two_answers_text import print_two_answers, verdict_text
from autohete.workload import Kernels

POLICIES = ("resident", "zero_offload", "stronghold:window=2")
LEAN = replace(WORKLOAD, kernels=Kernels.LEAN)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Answers with much and little GPU memory, with other kernels, and where nothing fits."""
    folder = tmp_path_factory.mktemp("answers")
    found = {
        "large": answer(LARGE, POLICIES, draws=2),
        "tight": answer(TIGHT, POLICIES, draws=2),
        "lean": answer(LARGE, POLICIES, LEAN, draws=2),
        "short": answer(TINY, POLICIES),
    }
    return {name: saved(folder / f"{name}.json", one) for name, one in found.items()}


def changed(path: str, target: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """A copy of an answer with a change."""
    document = json.loads(Path(path).read_text())
    change(document)
    target.write_text(json.dumps(document))
    return str(target)


def compared(a: str, b: str) -> TwoAnswers:
    return compare_answers(read_answer(a), read_answer(b))


def row_of(two: TwoAnswers, name: str) -> Joined:
    """The row of a policy."""
    return next(row for row in two.policies if row.name == name)


def test_an_answer_does_not_differ_from_itself(files: dict[str, str]) -> None:
    """Nothing differs, every time is a tie, and the page says each figure once."""
    two = compared(files["large"], files["large"])
    assert two.differences == ()
    assert two.ratio is not None
    assert two.ratio.tie
    assert all(row.ratio is None or row.ratio.tie for row in (*two.policies, *two.levers, *two.purchases))
    assert two_answers_page(two, ("a", "b")).count("sequence length 512") == 1


def test_what_differs_in_the_question_is_named(files: dict[str, str]) -> None:
    """Kernels of the workload; memory of the hardware, with what is left to the system; nothing else."""
    (kernels,) = compared(files["large"], files["lean"]).differences
    assert (kernels.figure, kernels.a, kernels.b) == ("kernels", "fused", "lean")
    (memory,) = compared(files["large"], files["tight"]).differences
    assert (memory.figure, memory.a, memory.b) == ("hardware.gpu.memory_bytes", 8 * 2**30, 1700 * 2**20)


def test_policies_are_joined_with_both_times(files: dict[str, str]) -> None:
    """Without the flags, which each answer chooses, unless a system is there with several; ratios are of tokens/s."""
    two = compared(files["large"], files["lean"])
    assert {row.name for row in two.policies} == {"resident", "zero_offload", "stronghold"}
    for row, a, b in ((row_of(two, name.partition(":")[0]), *each) for name, each in times(files).items()):
        assert row.a is not None
        assert row.b is not None
        assert (row.a.iteration_seconds, row.b.iteration_seconds) == (a, b)
        assert row.ratio is not None
        assert row.ratio.time == pytest.approx(b / a)
    again = [answer(LARGE, (*POLICIES, "stronghold"), draws=2), answer(LARGE, POLICIES, draws=2)]
    both = [read_answer(saved(Path(files["large"]).with_name(f"{i}.json"), one)) for i, one in enumerate(again)]
    assert {row.name for row in compare_answers(both[0], both[1]).policies} == {*POLICIES, "stronghold"}


def times(files: dict[str, str]) -> dict[str, tuple[float, float]]:
    """Of each policy the seconds in both answers, from the files."""
    a, b = (json.loads(Path(files[name]).read_text())["policies"] for name in ("large", "lean"))
    seconds = {each["policy"]: each["iteration_seconds"] for each in b}
    return {each["policy"]: (each["iteration_seconds"], seconds[each["policy"]]) for each in a}


def test_one_machine_is_uncertain_once_and_two_are_twice(files: dict[str, str], tmp_path: Path) -> None:
    """On one machine only the model's error counts; of two machines both intervals do; without an interval nothing is said."""
    one = compared(files["large"], files["tight"])
    assert one.ratio is not None
    deviation = MODEL_ERROR * math.sqrt(math.pi / 2)
    assert one.ratio.certainty == pytest.approx(NormalDist(0, deviation).cdf(abs(math.log(one.ratio.time))))
    elsewhere = changed(files["tight"], tmp_path / "x.json", lambda document: document["hardware"].update(name="another"))
    ends = [(i.low_seconds, i.high_seconds) for i in (one.a.interval, one.b.interval) if i is not None]
    deviation = math.hypot(*(math.log(high / low) / (2 * NormalDist().inv_cdf(0.95)) for low, high in ends))
    two = compared(files["large"], elsewhere).ratio
    assert two is not None
    assert two.certainty == pytest.approx(NormalDist(0, deviation).cdf(abs(math.log(two.time))))
    bare = changed(files["tight"], tmp_path / "bare.json", lambda document: document.update(interval=None))
    unsure = compared(files["large"], bare)
    assert unsure.ratio is not None
    assert unsure.ratio.certainty is None
    assert any("no interval" in remark for remark in unsure.remarks)


def test_turned_round_it_is_the_inverse(files: dict[str, str]) -> None:
    """Ratios are inverted, certainties are not, and the order of the rows is the same."""
    there, back = compared(files["large"], files["tight"]), compared(files["tight"], files["large"])
    for row, other in zip(
        (*there.policies, *there.levers, *there.purchases), (*back.policies, *back.levers, *back.purchases), strict=True
    ):
        assert (row.name, row.a, row.b) == (other.name, other.b, other.a)
        assert (row.ratio is None) is (other.ratio is None)
        if row.ratio is not None and other.ratio is not None:
            assert row.ratio.time * other.ratio.time == pytest.approx(1)
            assert row.ratio.certainty == pytest.approx(other.ratio.certainty)


def test_what_is_uncertain_is_not_stated_as_a_fact(files: dict[str, str], tmp_path: Path) -> None:
    """A difference within the uncertainty ends with the advice to measure both."""

    def faster(share: float) -> str:
        def change(document: dict[str, Any]) -> None:
            document["policies"][0]["tokens_per_second"] *= share

        return verdict_text(compared(files["large"], changed(files["large"], tmp_path / f"{share}.json", change)))

    assert faster(1.001) == "B is as fast, within 1 %."
    assert faster(1.1).endswith("Measure both.")
    assert faster(3).startswith("B is 3.0x faster")
    assert "Measure" not in faster(3)


def test_times_of_different_clocks_have_no_ratio(files: dict[str, str], tmp_path: Path) -> None:
    """A simulated and a measured time are no statement about the two questions."""

    def change(document: dict[str, Any]) -> None:
        for each in document["policies"]:
            each["clock"] = Clock.MEASURED_CPU

    two = compared(files["large"], changed(files["large"], tmp_path / "measured.json", change))
    assert two.ratio is None
    assert all(row.ratio is None for row in (*two.policies, *two.levers))
    assert any("measured-cpu and simulated" in remark for remark in two.remarks)


def test_one_that_does_not_fit_says_so(files: dict[str, str]) -> None:
    """In words and on its card, with the least memory; no ratio is given."""
    done = autohete("compare", files["large"], files["short"])
    assert done.returncode == 0, done.stderr
    assert "B DOES NOT FIT under any policy." in done.stdout
    assert "Only A fits." in done.stdout
    assert "It would with a GPU with " in done.stdout
    page = two_answers_page(compared(files["large"], files["short"]), ("a", "b"))
    assert re.findall(r'<section class="card (\w+)"><h2>(.*?)</h2>', page) == [
        ("fits", "A fits"),
        ("short", "B does not fit under any policy"),
    ]
    assert "Neither fits." in autohete("compare", files["short"], files["short"]).stdout


def test_bars_of_a_memory_have_one_scale(files: dict[str, str]) -> None:
    """The larger of both totals is the full width of both bars."""
    page = two_answers_page(compared(files["large"], files["tight"]), ("a", "b"))
    (drawn,) = re.findall(r"<h3>GPU memory</h3>(.*?)</ul>", page)
    widths = [float(width) / 100 for width in re.findall(r'class="filled \w*" style="width:([\d.]+)%', drawn)]
    used = [answer(memory, POLICIES, draws=2).budgets[0].used_bytes or 0 for memory in (LARGE, TIGHT)]
    assert widths == pytest.approx([size / (8 * 2**30) for size in used], abs=1e-4)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_tables_fit_the_terminal(
    files: dict[str, str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line is longer or cut off, and columns that a narrow one leaves out are named."""
    monkeypatch.setenv("COLUMNS", str(width))
    print_two_answers(compared(files["large"], files["tight"]), ("a.json", "b.json"))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert ("not shown at this width: tokens/s A" in text) is (width < 160)


def test_the_command_compares_two_files(files: dict[str, str], tmp_path: Path) -> None:
    """As text, as one JSON object with finite numbers, and as a page that loads nothing and escapes names."""
    evil = changed(files["tight"], tmp_path / "evil.json", lambda document: document["workload"].update(name="<b>\x1b[1m"))
    page = tmp_path / "page.html"
    done = autohete("compare", files["large"], evil, "--html", str(page))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    text = page.read_text()
    assert "<b>" not in text
    assert "\x1b" not in text
    assert not re.search(r'https?://|<(link|img|iframe|form)\b| (src|href)="', text)
    found = json.loads(autohete("compare", files["large"], evil, "--json").stdout, parse_constant=pytest.fail)
    assert {each["figure"] for each in found["differences"]} == {"model", "hardware.gpu.memory_bytes"}
    assert found["policies"][0]["a"]["policy"] == answer(LARGE, POLICIES, draws=2).candidates[0].name


def test_files_that_are_no_two_answers_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    """In one line that names the file and says how to write an answer; no page is written."""
    trace, plan, page = (str(tmp_path / name) for name in ("trace.json", "plan.json", "page.html"))
    assert autohete("simulate", *SMALL, "--policy", "resident", "--trace", trace).returncode == 0
    assert autohete("plan", *SMALL, "--policy", "resident", "--json", plan).returncode == 0
    large = files["large"]
    assert "is no answer, but the other file is" in refused("compare", large, trace)
    assert "one policy only (autohete-plan): write one with autohete plan --json FILE, without --policy" in refused(
        "compare", plan, large
    )
    assert "--gantt draws timelines" in refused("compare", large, large, "--gantt", str(tmp_path / "x.png"))
    assert "--html is a page of two answers" in refused("compare", trace, trace, "--html", page)
    assert "this command reads it" in refused("compare", large, large, "--html", large)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "trace.json"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda document: document.pop("hardware"), "hardware: Field required"),
        (lambda document: document.update(format="autohete-answer 2"), "has the form 'autohete-answer 2', not"),
        (lambda document: document.update(policies=[]), "policies"),
        (lambda document: document["policies"][0].update(tokens_per_second=-1), "greater than 0"),
        (lambda document: document["policies"][0].update(tokens_per_second=math.nan), "NaN is not finite"),
        (lambda document: document["policies"][0].update(verdict="fine"), "'fine' is no verdict"),
        (lambda document: document["budgets"][0].update(total_bytes=0), "total_bytes"),
        (lambda document: document["interval"].update(low_seconds=0), "low_seconds"),
        (lambda document: document["budgets"][0].update(used_bytes=10**400), "too large"),
    ],
)
def test_a_damaged_answer_is_refused(
    files: dict[str, str], tmp_path: Path, change: Callable[[dict[str, Any]], object], fault: str
) -> None:
    """With its name, the fault and the cure."""
    bad = changed(files["large"], tmp_path / "bad.json", change)
    said = refused("compare", files["large"], bad)
    assert "bad.json" in said
    assert fault in said
    assert "autohete plan" in said


@pytest.mark.parametrize("depth", [400, 700, 950, 100_000])
def test_nesting_ends_in_a_comparison_or_in_one_line(files: dict[str, str], tmp_path: Path, depth: int) -> None:
    """Whatever depth the interpreter reads, and the program follows."""
    deep = tmp_path / "deep.json"
    nested = '{"x": ' * depth + "1" + "}" * depth
    deep.write_text(Path(files["large"]).read_text().replace('"workload": {', f'"workload": {{"x": {nested}, '))
    done = autohete("compare", files["large"], str(deep))
    assert done.returncode in (0, 2)
    assert done.stderr.count("\n") == done.returncode / 2


def test_documents_have_what_is_compared() -> None:
    """The workload is what was trained, and the hardware is one GPU's share, less what is left to the system."""
    found = answer(LARGE, POLICIES, draws=2)
    document = answer_json(found)
    assert document["workload"]["kernels"] == found.profile.workload.kernels
    assert document["hardware"] == found.profile.hardware.to_dict()
