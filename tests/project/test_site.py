"""The documentation site: it is built without a warning, and has the whole API, all commands, figures and notebooks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import autohete
from autohete.cli.app import app
from autohete.policies import POLICIES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.py"))
#: The modules that the pages of the API describe.
API = [
    module
    for page in sorted((DOCS / "reference" / "api").glob("*.md"))
    for module in re.findall(r"^\.\. automodule:: (\S+)$", page.read_text(), re.MULTILINE)
]


def public(module: str) -> list[str]:
    """What a module offers: what it exports, or the classes and functions that it defines."""
    found = import_module(module)
    exported = getattr(found, "__all__", None)
    return exported or [
        name for name, value in vars(found).items() if name[0] != "_" and getattr(value, "__module__", "") == module
    ]


def imported(code: str) -> Iterator[str]:
    """The modules of this package from which ``code`` imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("autohete."):
            names = {f"{node.module}.{alias.name}" for alias in node.names} & set(API)  # from autohete.testing import checks
            yield from names or {node.module}


@pytest.mark.slow
def test_the_site_has_the_whole_api_and_all_commands(tmp_path: Path) -> None:
    """It is built with warnings as errors; every public symbol, command and option is on it, and all cells were run."""
    inventory = pytest.importorskip("sphinx.util.inventory", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "sphinx", "-c", "docs", "--fail-on-warning", "--quiet", ".", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")

    kinds = inventory.InventoryFile.loads((tmp_path / "objects.inv").read_bytes(), uri="").data
    described = {name for kind, names in kinds.items() if kind.startswith("py:") for name in names}
    assert [f"{module}.{name}" for module in API for name in public(module) if f"{module}.{name}" not in described] == []

    commands = (tmp_path / "docs" / "reference" / "commands.html").read_text()
    for name in (name for name in app if not name.startswith("-")):
        assert f'id="autohete-{name}"' in commands
        parameters = app[name].assemble_argument_collection(parse_docstring=False) if app[name].default_command else []
        assert [each.name for each in parameters if each.name.startswith("--") and each.name not in commands] == []
    for notebook in NOTEBOOKS:
        page = (tmp_path / "docs" / "notebooks" / f"{notebook.stem}.html").read_text()
        assert 'class="cell-output"' in page
        assert 'src="data:image/png' in page


def test_the_api_has_every_module_that_is_imported() -> None:
    """Modules that export names, and those from which examples, pages and notebooks import, are described."""
    folder = Path(autohete.__file__).parent
    exporting = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in folder.rglob("*.py")
        if re.search(r"^__all__ = ", path.read_text(), re.MULTILINE)
    }
    pages = [path.read_text() for path in (ROOT / "README.md", *DOCS.rglob("*.md"))]
    shown = [code for page in pages for code in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)]
    shown += [path.read_text() for path in (*NOTEBOOKS, *(ROOT / "examples").glob("*.py"))]
    needed = exporting | {module for code in shown for module in imported(code)}
    assert needed - {"autohete"} <= set(API)


def test_the_api_names_what_the_package_offers() -> None:
    """The page of the API has a row for each name of ``import autohete``, which leads to the page that describes it."""
    rows = re.findall(r"^\| (`.*) \| \[.*\]\((.*)\) \|$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    homes = {name: DOCS / "reference" / page for names, page in rows for name in re.findall(r"`(\w+)`", names)}
    assert homes.keys() == set(autohete.__all__) - {"__version__"}
    for name, page in homes.items():
        modules = re.findall(r"automodule:: (\S+)", page.read_text())
        assert any(getattr(import_module(module), name, None) is getattr(autohete, name) for module in modules), name


def test_the_gallery_has_every_figure_with_its_question() -> None:
    """Each picture in paper_figs is shown once, and each script's question and command are those of its docstring."""
    text = (DOCS / "gallery.md").read_text()
    pictures = re.findall(r"\]\(\.\./paper_figs/(\w+\.png)\)", text)
    assert sorted(pictures) == sorted(path.name for path in (ROOT / "paper_figs").glob("*.png"))
    scripts = re.findall(r"^`python experiments/(\w+)\.py`", text, re.MULTILINE)
    questions = re.findall(r"^## (.*)\n\n!\[.*?\]\(\.\./paper_figs/(\w+)\.png\)", text, re.MULTILINE)
    assert [figure for _, figure in questions if figure != "timeline"] == scripts
    for question, figure in questions:
        if figure in scripts:
            docstring = ast.get_docstring(ast.parse((ROOT / "experiments" / f"{figure}.py").read_text())) or ""
            assert docstring.splitlines()[0] == question
            assert f"``python experiments/{figure}.py" in docstring


def test_every_system_is_in_the_survey_with_its_file() -> None:
    """The table of systems has each policy once, as a link to its file, and gives a reason for each system without one."""
    modelled, missing = (DOCS / "systems.md").read_text().split("## Not modelled")
    linked = re.findall(r"^\| \[`(\w+)`\]\(\.\./autohete/policies/(\w+)\.py\) \|", modelled, re.MULTILINE)
    assert sorted(linked) == [(name, name) for name in sorted(POLICIES)]
    rows = [line.strip("| ").split(" | ") for line in missing.splitlines() if line.startswith("| ")][1:]
    assert rows
    assert all(len(row) == 5 and row[-1] for row in rows)


@pytest.mark.parametrize("name", POLICIES)
def test_a_page_of_a_system_has_its_parts(name: str) -> None:
    """It begins with the docstring of its file and its row of the survey, and has a timeline, every flag with a meaning, and
    its published rows.
    """
    systems = pytest.importorskip("docs.building.systems", reason="the extra docs is not installed")
    page = systems.page(name)
    assert page.startswith(f"# `{name}`\n\n")
    (row,) = re.findall(r"^\| Published \| What moves \| What decides \|\n.*\n\| (.*) \|$", page, re.MULTILINE)
    assert all(row.split(" | "))
    assert page.count("data:image/png") == 1
    table = page.partition("## Flags")[2].partition("## Published rows")[0]
    flags = re.findall(r"^\| `(\w+)` \| `\S+` \| (.*) \|$", table, re.MULTILINE)
    assert [flag for flag, _ in flags] == list(POLICIES[name].__dataclass_fields__)
    assert all(meaning for _, meaning in flags)
    assert page.partition("## Published rows")[2].strip()


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("arXiv 2503.01890", "https://arxiv.org/abs/2503.01890"),
        ("hal-02352969", "https://hal.science/hal-02352969"),
        ("github DataStates/DeepSpeed, its engine, at\nd18d6f81", "https://github.com/DataStates/DeepSpeed/tree/d18d6f81"),
        ("Based on\nDeepSpeed 0.19.6\nat edaa7221.", "https://github.com/deepspeedai/DeepSpeed/tree/edaa7221"),
        ("torch 2.13.0:", "https://github.com/pytorch/pytorch/tree/v2.13.0"),
        ("as in\npytorch/torchtitan at 018740b7", "https://github.com/pytorch/torchtitan/tree/018740b7"),
        ("DeepSpeed 0.19.6, stage 3", ""),
    ],
)
def test_sources_of_a_system_are_links(text: str, link: str) -> None:
    """Papers by number, and repositories at a commit or release, lead there."""
    systems = pytest.importorskip("docs.building.systems", reason="the extra docs is not installed")
    assert re.findall(r"\]\((.*?)\)", systems._linked(text)) == ([link] if link else [])
