"""Says which modules of the package a run of tests leaves alone: ``pytest -m "not slow" -p support.touched``.

A module counts as touched if one of its functions has run in this process or in one of pytest-xdist's; being imported is not
enough. A module without functions has nothing to run. The run fails if a module is left alone.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import pytest

import autohete

PACKAGE = Path(autohete.__file__).parent
_seen: set[CodeType] = set()
_elsewhere: set[str] = set()


def _on_call(frame: FrameType, event: str, argument: object) -> None:
    _seen.add(frame.f_code)


def _touched() -> set[str]:
    """Files of the functions that have run; what runs in order to import a module is no function."""
    return {code.co_filename for code in _seen if code.co_flags & inspect.CO_OPTIMIZED} | _elsewhere


def _with_functions() -> set[str]:
    """Files that have a function; what a protocol declares is never run."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not _is_declared(node):
                found.add(str(path))
    return found


def _is_declared(node: ast.FunctionDef) -> bool:
    """Whether the function is a docstring, dots or neither: a protocol's."""
    return all(isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in node.body)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Watch every call from here on, in all threads: what collecting ran is no test of it."""
    threading.settrace(_on_call)
    sys.settrace(_on_call)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take over what a process of pytest-xdist has seen."""
    _elsewhere.update(getattr(node, "workeroutput", {}).get("touched", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop, and hand over what has been seen or say what has not."""
    sys.settrace(None)
    threading.settrace(None)
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["touched"] = sorted(_touched())
    elif left := sorted(str(Path(file).relative_to(PACKAGE)) for file in _with_functions() - _touched()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.stash[_LEFT] = left


_LEFT = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the modules."""
    left = config.stash.get(_LEFT, [])
    terminalreporter.write_line(f"{len(_with_functions())} modules with functions, {len(left)} left alone: {', '.join(left)}")
