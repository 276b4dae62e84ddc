"""Notebooks that are kept as scripts in percent format: executed, and shown as a page with what each cell gives."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import re
import warnings
from typing import Any

from matplotlib import pyplot
from matplotlib.figure import Figure
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx


def cells(text: str) -> list[tuple[bool, str]]:
    """The cells of a script: whether each is code, and its code or its Markdown."""
    found = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        mark, _, body = part.partition("\n")
        code = "[markdown]" not in mark
        found.append((code, body.strip("\n") if code else re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip()))
    return found


def run(code: str, names: dict[str, Any]) -> tuple[str, object]:
    """What a cell prints, and the value of its last line if that is an expression; None otherwise."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(tree, "<cell>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if isinstance(last, ast.Expr) else None
    return printed.getvalue(), value


def as_picture(figure: Figure, alternative: str) -> str:
    """An element of HTML with the figure in it."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    pyplot.close(figure)
    return f'<img alt="{alternative}" src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">'


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, Figure):
        return as_picture(value, "figure")
    html = getattr(value, "_repr_html_", None)
    if html is None:
        return f"```text\n{value!r}\n```"
    lines = (line.strip() for line in re.sub(r"<style.*?</style>", "", html(), flags=re.DOTALL).splitlines())
    return "\n".join(['<div class="cell-output">', *filter(None, lines), "</div>"])  # an empty line would end the HTML


def as_markdown(text: str) -> str:
    """The page of a script, for which its cells are executed in order."""
    names: dict[str, Any] = {"__name__": "__main__"}
    parts = []
    for code, body in cells(text):
        if not code:
            parts.append(body)
            continue
        printed, value = run(body, names)
        parts += [f"```python\n{body}\n```", f"```text\n{printed.rstrip()}\n```" if printed else "", _shown(value)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _execute(app: Sphinx, page: str, source: list[str]) -> None:
    if page.startswith("docs/notebooks/"):
        source[0] = as_markdown(source[0])


class CodeParser(MystParser):
    """Parses the page that an extension has made of a ``.py`` file."""

    supported = ("code",)


def setup(app: Sphinx) -> dict[str, bool]:
    """Take ``.py`` files for pages, and execute those that are notebooks."""
    app.add_source_suffix(".py", "code")
    app.add_source_parser(CodeParser)
    app.connect("source-read", _execute)
    return {"parallel_read_safe": True}
