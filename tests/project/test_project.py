"""The files around the code agree with each other: version, change log, hooks, hosted CI."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from pathlib import Path

import autohete

ROOT = Path(__file__).parents[2]


def test_the_version_is_said_in_one_place() -> None:
    """The package says its version; pyproject.toml reads it there."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in document["project"]["dynamic"]
    assert document["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "autohete.__version__"}


def test_the_change_log_begins_with_this_version() -> None:
    """The newest entry of the change log is that of the package's version."""
    newest = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == autohete.__version__


def test_errors_outside_of_the_command_line_name_no_options() -> None:
    """Errors that the library raises speak of parameters and fields; only ``cli/`` speaks of options."""
    package = ROOT / "autohete"
    raised = [
        (path.relative_to(ROOT).as_posix(), text.value)
        for path in sorted(package.rglob("*.py"))
        if not path.is_relative_to(package / "cli")
        for statement in ast.walk(ast.parse(path.read_text()))
        if isinstance(statement, ast.Raise)
        for text in ast.walk(statement)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    ]
    assert len(raised) > 300
    assert [(path, text) for path, text in raised if re.search(r"(?<![\w-])--\w", text)] == []


def test_the_hooks_run_what_make_lint_runs() -> None:
    """The commands of the pre-commit hooks are those of ``make lint``, in its order."""
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"^ +entry: (.*)$", hooks, re.MULTILINE) == commands


def test_the_hosted_ci_runs_the_local_one() -> None:
    """The workflow's one command is ``.ci/run``, which can be executed, on the oldest Python that the package takes."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    uses = re.findall(r"uses: (.*)$", workflow, re.MULTILINE)
    assert uses
    assert [each for each in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each)] == []  # a tag can be moved
    assert re.findall(r"^ +- run: (.*)$", workflow, re.MULTILINE) == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert f'python-version: "{oldest}"' in workflow
