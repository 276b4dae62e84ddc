"""The page of an answer: one file that loads nothing, complete without a script, and what the script adds in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.answers import LARGE, TIGHT, TINY, answer

from autohete.analysis.occupancy import occupancy
from autohete.answer import Answer
from autohete.report.answer_page import answer_page
from autohete.report.answer_text import sections
from autohete.schedule import Kind, Value, parse_instance

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
Element = dict[str, str | None]


class Parsed(HTMLParser):
    """The elements of a page by tag, and the text of all that has some."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: dict[str, list[Element]] = {}
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.setdefault(tag, []).append(dict(attrs))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)


@cache
def page(gpu_memory: str = TIGHT) -> str:
    """The page of the answer on a GPU of that size."""
    return answer_page(answer(gpu_memory))


def data_of(text: str) -> dict[str, Any]:
    """What the script is given."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    data: dict[str, Any] = json.loads(found)
    return data


def simulated(found: Answer) -> Any:
    """The simulation of what is recommended."""
    assert found.simulation is not None
    return found.simulation


@pytest.mark.parametrize("gpu_memory", [TIGHT, TINY])
def test_it_loads_nothing(gpu_memory: str) -> None:
    """No element names a file or an address, and the page forbids itself to load any."""
    parsed = Parsed(page(gpu_memory))
    for tag, elements in parsed.elements.items():
        assert not any({"src", "href", "srcset", "data", "action"} & element.keys() for element in elements), tag
    assert not {"link", "img", "iframe", "object", "form"} & parsed.elements.keys()
    assert re.findall(r"https?://", page(gpu_memory)) == []
    policy = next(meta["content"] for meta in parsed.elements["meta"] if meta.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none';")


@pytest.mark.parametrize("gpu_memory", [TIGHT, TINY])
def test_it_has_the_whole_text(gpu_memory: str) -> None:
    """Each part of the text, word by word."""
    parsed = Parsed(page(gpu_memory))
    for _, lines in sections(answer(gpu_memory)):
        assert "\n".join(lines) in parsed.texts["pre"]
    assert ("One iteration" in parsed.texts["h2"]) is (gpu_memory == TIGHT)


def test_names_are_escaped() -> None:
    """A model with a name of HTML is shown by that name, and ends neither an element nor the data."""
    evil = "</script><b>&amp;"
    found = answer()
    named = replace(found.profile, workload=replace(found.profile.workload, name=evil))
    text = answer_page(replace(found, profile=named))
    parsed = Parsed(text)
    assert "b" not in parsed.elements
    assert parsed.texts["h1"] == [f"{evil} on rtx4090-workstation"]


def test_every_task_of_the_iteration_is_drawn() -> None:
    """One bar for each task that runs in it, with its times, on the row of its lane, in the colour of its kind, and one for
    what the next iteration starts with."""
    found = simulated(answer())
    trace, first = found.trace, found.steady.first
    begin, end = trace.anchors()[first], trace.anchors()[first + 1]
    running = [span for span in trace.spans() if span.start_ns < end and span.end_ns > begin and span.start_ns < span.end_ns]
    gpu = found.schedule.lanes[0].name
    running += [span for span in trace.spans() if span.lane == gpu and span.start_ns == end < span.end_ns]
    data, parsed = data_of(page()), Parsed(page())
    tasks = [element for element in parsed.elements["rect"] if element.get("class") == "task"]
    lanes = [lane.name for lane in found.schedule.lanes]
    assert len(tasks) == len(data["bars"])
    shown = {}
    for element, (name, start, stop, _, _) in zip(tasks, data["bars"], strict=True):
        instance = parse_instance(name[name.rindex("(") + 1 : -1])
        shown[instance] = (start + begin, stop + begin)
        assert element["fill"] == f"url(#{instance[0].kind})"
        lane = next(span.lane for span in running if (span.task, span.iteration) == instance)
        assert lanes.index(lane) == (float(element["y"] or 0) - 20) / 42
    assert shown == {(span.task, span.iteration): (span.start_ns, span.end_ns) for span in running}


def test_waits_lead_back_in_time() -> None:
    """What a task waited for is another task that had ended, and it is what let it start unless the lane was idle before."""
    data = data_of(page())
    followed = 0
    for _, start, _, cause, _ in data["bars"]:
        if cause >= 0:
            assert data["bars"][cause][2] <= start
            followed += 1
    assert followed > len(data["bars"]) / 2


def test_the_chain_starts_at_the_next_iteration_and_reaches_the_cpu() -> None:
    """From the first GPU task of the next iteration it leads through the copies and updates of an offloaded optimizer."""
    found = answer(LARGE, ("zero_offload",))
    data = data_of(answer_page(found))
    bars, number, kinds = data["bars"], data["last"], []
    assert bars[number][1] == data["length"]
    while number >= 0:
        kinds.append(parse_instance(bars[number][0].rpartition("(")[2][:-1])[0].kind)
        number = bars[number][3]
    assert kinds[0] in (Kind.FORWARD, Kind.GATHER_FORWARD)
    assert {Kind.CPU_UPDATE, Kind.OFFLOAD_GRADIENTS, Kind.BACKWARD} <= set(kinds)


def rows_of(text: str) -> dict[str, tuple[str, float]]:
    """Of each row of bars its value in words and the filled share."""
    found = re.findall(r"<li><span>(.*?)</span> <span>(.*?)</span>.*?filled[^>]*width:([\d.]+)%", text)
    return {unescape(name): (unescape(value), float(share) / 100) for name, value, share in found}


def test_the_verdict_comes_first() -> None:
    """The card names the policy, its speed and whether to offload, or what would have to grow."""
    best, simulation = answer().best, simulated(answer())
    card = Parsed(page().partition("</section>")[0])
    facts = dict(zip(card.texts["dt"], card.texts["dd"], strict=True))
    assert card.texts["h2"] == ["Fits"]
    assert best is not None
    assert facts["best policy"] == best.name
    assert facts["tokens/s"] == f"{simulation.tokens_per_second:,.0f}"
    assert facts["offloading"] == "needed"
    short = Parsed(page(TINY).partition("</section>")[0])
    assert short.texts["h2"] == ["Does not fit under any policy"]
    assert any(answer(TINY).needs[0].policy in line for line in short.texts["p"])


def test_bars_are_as_long_as_their_figures() -> None:
    """Memory is drawn against the total, or what each policy needs against the largest; tokens/s against the fastest."""
    drawn = rows_of(page())
    for budget in answer().budgets:
        (row,) = [
            share for name, (_, share) in drawn.items() if name.startswith("GPU" if budget.memory == "gpu" else budget.memory)
        ]
        assert row == pytest.approx((budget.used_bytes or 0) / budget.total_bytes, abs=1e-4)
    found = answer()
    most = max(gain.tokens_per_second or 0 for gain in (*found.levers, *found.purchases))
    for gain in (*found.levers, *found.purchases):
        assert drawn[gain.change.name][1] == pytest.approx((gain.tokens_per_second or 0) / most, abs=1e-4)
    needed = rows_of(page(TINY).partition("Host memory")[0])
    peaks = {each.name: each.summary.gpu_peak_bytes for each in answer(TINY).candidates if each.summary.gpu_peak_bytes}
    assert {name: share for name, (_, share) in needed.items()} == pytest.approx(
        {name: peak / max(peaks.values()) for name, peak in peaks.items()}, abs=1e-4
    )


def test_levers_are_apart_by_mathematics() -> None:
    """What computes the same gradients is not in one list with what does not."""
    same, _, other = page().partition("Other mathematics")
    for gain in answer().levers:
        assert (gain.change.name in rows_of(same)) is gain.change.exact
        assert (gain.change.name in rows_of(other.partition("<h2>")[0])) is not gain.change.exact


def test_the_table_has_every_policy() -> None:
    """With the frameworks that run it, and with figures to sort by; figures that no policy has get no column."""
    parsed = Parsed(page())
    assert [row["class"] for row in parsed.elements["tr"] if "class" in row] == ["best"]
    names = [text.replace("\n", "") for text in re.findall(r'<th scope="row">(.*?)</th>', page())]
    assert [name.replace("<wbr>", "") for name in names] == [each.name for each in answer().candidates]
    for each in answer().candidates:
        assert ", ".join(each.runs_in) in parsed.texts["td"]
    assert "tokens/s" in parsed.texts["th"]
    assert "tokens/s" not in Parsed(page(TINY)).texts["th"]


def test_memory_is_stacked_up_to_its_occupancy() -> None:
    """The top of the stack, read off the polygons, is the occupancy of the GPU at every instant of the iteration."""
    found = simulated(answer())
    (drawn,) = re.findall(r'data-memory="gpu">(.*?)</g>', page(), re.DOTALL)
    points = [[tuple(map(float, xy.split(","))) for xy in one.split()] for one in re.findall(r'points="([^"]*)"', drawn)]
    whole = occupancy(found.trace, "gpu")
    begin, end = (int(found.trace.anchors()[found.steady.first + i]) for i in (0, 1))
    limit = max(whole.capacity_bytes, whole.peak_bytes)
    bottom = max(y for _, y in points[0])
    inside = (whole.times_ns > begin) & (whole.times_ns < end)
    levels = {int(size) for size in whole.bytes_used[inside]}
    drawn_levels = [(bottom - y) / 110 * limit for _, y in points[-1]]
    for level in levels:
        assert min(abs(level - one) for one in drawn_levels) <= 0.011 / 110 * limit
    assert max(drawn_levels) == pytest.approx(max(levels), abs=0.011 / 110 * limit)


def test_everything_that_can_be_in_memory_has_a_colour() -> None:
    """So has each kind of task a fill."""
    from autohete.report.answer_timeline import _FILLS, _pattern

    assert set(_FILLS) == set(Value)
    assert all(f'id="{kind}"' in _pattern(kind) for kind in Kind)


# --- in a browser -------------------------------------------------------------------------------------------------


def browsed(tmp_path: Path, script: str) -> Parsed:
    """The page after its own script and then ``script`` have run in Chromium."""
    assert CHROMIUM is not None
    file = tmp_path / "page.html"
    file.write_text(page().replace("</body>", f"<script>{script}</script></body>"))
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=2000", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return Parsed(done.stdout)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_script_works_in_a_browser(tmp_path: Path) -> None:
    """A click on a task lists what it waited for, the wheel zooms, the pointer shows times, and a button undoes all."""
    follow = 'document.getElementById("chain").click();'
    data = data_of(page())
    chain, number = [], data["last"]
    while number >= 0 and number not in chain:
        chain.append(number)
        number = data["bars"][number][3]
    followed = browsed(tmp_path, follow)
    assert len(chain) > 2
    lit = [int(rect["data-task"] or -1) for rect in followed.elements["rect"] if rect.get("class") == "task on"]
    assert sorted(lit) == sorted(chain)
    items = [text for text in followed.texts["li"] if ": " in text]
    assert [item.partition(":")[0] for item in items] == [data["bars"][one][0].partition(":")[0] for one in chain]
    assert len(followed.elements["line"]) == len(chain) - 1

    wheel = """
        const svg = document.getElementById("drawing"), box = svg.getBoundingClientRect();
        const at = {clientX: box.left + box.width / 2, clientY: box.top + 10, bubbles: true, cancelable: true};
        for (let i = 0; i < 8; i++) svg.dispatchEvent(new WheelEvent("wheel", {...at, deltaY: -1}));
        document.querySelector(".task").dispatchEvent(new PointerEvent("pointermove", at));
    """
    zoomed = browsed(tmp_path, wheel)
    before, after = _tasks(Parsed(page())), _tasks(zoomed)
    assert 0 < sum(rect["visibility"] == "visible" for rect in after) < len(before)
    moved = " ".join(group["transform"] or "" for group in zoomed.elements["g"] if "transform" in group)
    assert [float(scale) for scale in re.findall(r"scale\(([\d.]+) 1\)", moved)] == pytest.approx([0.8**-8] * 2)
    (tip,) = [text for text in zoomed.texts["div"] if " to " in text]
    assert tip.startswith(data["bars"][0][0])

    undone = browsed(tmp_path, f'{wheel}{follow}document.getElementById("reset").click();')
    places = [[(rect["x"], rect["width"]) for rect in rects] for rects in (before, _tasks(undone))]
    for (x, width), (old_x, old_width) in zip(*places, strict=True):
        assert float(x or 0) == pytest.approx(float(old_x or 0), abs=0.02)
        assert float(width or 0) == pytest.approx(float(old_width or 0), abs=0.02)
    assert not [rect for rect in _tasks(undone) if rect["class"] == "task on"]


def _tasks(parsed: Parsed) -> list[Element]:
    return [rect for rect in parsed.elements["rect"] if (rect.get("class") or "").startswith("task")]
