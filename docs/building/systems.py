"""A page for each system: what it does and decides, one iteration, its flags, and its published rows beside their predictions.

The source of a page is the file of the policy; the example is its golden schedule.
"""

from __future__ import annotations

import csv
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from sphinx.application import Sphinx

from autohete.policies import POLICIES
from autohete.report.gantt import gantt_figure
from autohete.report.preset_tables import flag_text
from autohete.schedule.text import parse_schedule
from autohete.sim import SimExecutor
from docs.building.notebooks import as_picture
from experiments.published import VERDICT, sources

ROOT = Path(__file__).parents[2]
FOLDER, INDEX = "autohete/policies", "docs/systems"
#: The sources of the pages.
PAGES = [f"{FOLDER}/{name}.py" for name in sorted(POLICIES)]
#: Rows that a page shows one by one; of more it shows each source.
_MOST_ROWS = 40
_ITERATIONS, _SHOWN = 3, 1


def page(name: str) -> str:
    """The page of the system ``name`` as Markdown."""
    parts = [
        f"# `{name}`",
        _linked(_markdown(inspect.getdoc(inspect.getmodule(POLICIES[name])) or "")),
        f"This is `{FOLDER}/{name}.py`; [all systems](/{INDEX}.md).",
        *_survey(name),
        *_example(name),
        *_flags(name),
        *_rows(name),
    ]
    return "\n\n".join(parts) + "\n"


def _markdown(docstring: str) -> str:
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", docstring)


def _linked(text: str) -> str:
    """Papers, and repositories at their commit or release, as links."""
    text = re.sub(r"\barXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    text = re.sub(r"\bhal-(\d{8})", r"[hal-\1](https://hal.science/hal-\1)", text)
    at = re.compile(r"\bgithub ([\w.-]+/[\w.-]+)(,[^;:]{1,60}?|)\sat\s([0-9a-f]{7,40})\b")
    text = at.sub(r"[github \1](https://github.com/\1/tree/\3)\2 at \3", text)
    for words, repository in _KNOWN.items():
        at = re.compile(rf"(?<![\w/]){words}( \d[\d.]*\d|)\sat\s([0-9a-f]{{7,40}})\b")
        text = at.sub(rf"[{words}\1](https://github.com/{repository}/tree/\2) at \2", text)
    return re.sub(r"\btorch (\d+\.\d+\.\d+)\b", r"[torch \1](https://github.com/pytorch/pytorch/tree/v\1)", text)


#: Repositories as docstrings call them.
_KNOWN = {
    "ColossalAI": "hpcaitech/ColossalAI",
    "DeepSpeed": "deepspeedai/DeepSpeed",
    "pytorch/torchtitan": "pytorch/torchtitan",
}


def _survey(name: str) -> Iterator[str]:
    """The system's row in the table of all systems."""
    modelled = (ROOT / f"{INDEX}.md").read_text().partition("\n## Not modelled")[0]
    for row in re.findall(rf"^\| \[`{name}`\]\(.*?\) \| (.*) \|$", modelled, re.MULTILINE):
        yield _table(["Published", "What moves", "What decides"], [_linked(row).split(" | ")])


def _example(name: str) -> Iterator[str]:
    """A steady iteration of the example in which the system is pinned."""
    cases = {path.stem: path.read_text() for path in sorted((ROOT / "tests" / "golden").glob("*.txt"))}
    own = {case: text for case, text in cases.items() if re.search(rf"^# policy: {name}\b(?!_)", text, re.MULTILINE)}
    if not own:
        return
    case = name if name in own else next(iter(own))
    head = dict(re.findall(r"^# (.*?): (.*)$", own[case], re.MULTILINE))
    paper = re.findall(r"^# On paper: (.*(?:\n# .*)*)", own[case], re.MULTILINE)[0].replace("\n# ", " ")
    trace = SimExecutor().run(parse_schedule(own[case]), _ITERATIONS)
    yield "## One iteration"
    yield (
        f"Five units, of which the first is the embedding and the last the head, under `{head['policy']}` with "
        f"{int(head['gpu bytes']):,} bytes of GPU memory (`tests/golden/{case}.txt`). "
        "Bars have the number of their unit; pale ones belong to the iteration before or after. [Kinds of "
        "task](/docs/reference/tasks.md) has what each does."
    )
    yield as_picture(gantt_figure(trace, _SHOWN, _SHOWN, head["policy"]), f"One iteration of {name}")
    yield "On paper: " + re.sub(r"([*_<])", r"\\\1", paper)
    if len(own) > 1:
        yield "Other examples: " + ", ".join(f"`tests/golden/{each}.txt`" for each in own if each != case) + "."


def _flags(name: str) -> Iterator[str]:
    fields = dataclasses.fields(POLICIES[name])
    yield "## Flags"
    if not fields:
        yield "None."
        return
    described = _arguments(inspect.getdoc(POLICIES[name]) or "")
    yield _table(
        ["Flag", "Default", "Meaning"],
        [[f"`{field.name}`", f"`{flag_text(field.default)}`", described.get(field.name, "")] for field in fields],
    )


def _arguments(docstring: str) -> dict[str, str]:
    """What the section ``Args`` of a docstring says of each argument."""
    section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), _markdown(" ".join(text.split())))
    return found


def _rows(name: str) -> Iterator[str]:
    yield "## Published rows"
    policies = {(source.title, row.name): row.policy for source in sources() for row in source.rows}
    with (ROOT / "paper_figs" / "published.csv").open() as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if policies.get((row["source"], row["row"]), "").partition(":")[0] == name and not row["calibrates"]
        ]
    counted = [row for row in rows if row["phase"] != VERDICT]
    if not rows:
        yield "`experiments/published/` has none."
        return
    right = sum(row["measured"] == row["predicted"] for row in rows if row["phase"] == VERDICT)
    verdicts = f"{right} of {len(rows) - len(counted)} verdicts on whether a run fits are right."
    yield f"{verdicts} [Results](/docs/results.md) has all rows, and which of them the model was made with."
    if len(counted) <= _MOST_ROWS:
        shown = [
            [
                *(_cell(row[key]) for key in ("source", "row", "phase")),
                *(f"{float(row[key]):.4g}" for key in _NUMBERS),
                row["unit"],
            ]
            for row in counted
        ]
        yield _table(["Source", "Run", "What", "Measured", "Predicted", "Off by (%)", "Unit"], shown)
        return
    groups: dict[tuple[str, str], list[float]] = {}
    for row in counted:
        groups.setdefault((row["source"], row["phase"]), []).append(abs(float(row["difference_percent"])))
    yield _table(
        ["Source", "What", "Runs", "Off by (%), mean", "Largest"],
        [[_cell(s), what, str(len(off)), f"{mean(off):.1f}", f"{max(off):.1f}"] for (s, what), off in groups.items()],
    )


_NUMBERS = ("measured", "predicted", "difference_percent")


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _make(app: Sphinx, document: str, source: list[str]) -> None:
    folder, _, name = document.rpartition("/")
    if folder == FOLDER:
        source[0] = page(name)
    if document == INDEX:
        source[0] += "\n".join(
            ["\n```{toctree}", ":hidden:", "", *(f"/{FOLDER}/{each}" for each in sorted(POLICIES)), "```", ""]
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the pages of the systems, and list them below the index."""
    app.connect("source-read", _make)
    return {"parallel_read_safe": True}
