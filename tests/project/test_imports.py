"""Imports run one way, and heavy packages are loaded only by what needs them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import autohete

SOURCE = Path(autohete.__file__).parent

_VALUES = {"errors", "quantities", "hashing", "files", "collector", "documents", "tabular", "printable"}
_SCHEDULE = _VALUES | {"schedule"}
_TRACE = _SCHEDULE | {"execution"}
_MODEL = _VALUES | {"workload", "hardware", "profile"}
_PLAN = _SCHEDULE | _MODEL | {"plan"}
_LOWERING = _PLAN | {"execution", "analysis", "lowering"}
_SIMULATED = _LOWERING | {"planner", "policies", "sim", "simulate"}
#: What each package may import, besides itself. A module that may import other things than its package has a line of its own,
#: in which its package has to be named.
ALLOWED: dict[str, set[str]] = {
    "printable": set(),
    "errors": {"printable"},
    "quantities": {"errors", "printable"},
    "hashing": set(),
    "documents": set(),
    "tabular": {"errors"},
    "collector": set(),
    "files": {"errors", "printable"},
    # What is trained and where, and how long it takes.
    "workload": _VALUES,
    "hardware": _VALUES,
    "profile": _VALUES | {"workload", "hardware"},
    # What executors read and what they write.
    "schedule": _VALUES,
    "execution": _SCHEDULE,
    "analysis": _TRACE,
    "analysis.ranks": _TRACE | {"hardware", "analysis"},
    # From a profile to a schedule.
    "plan": _SCHEDULE,
    "plan.policy": _PLAN,
    "lowering": _PLAN | {"execution", "analysis"},
    "planner": _LOWERING,
    "policies": _LOWERING | {"planner"},
    # The executors.
    "sim": _TRACE,
    "runtime": _TRACE | {"analysis", "workload"},
    # The pipeline, and what people meet.
    "simulate": _LOWERING | {"policies", "sim"},
    "simulate.simulation": _SIMULATED | {"report.gantt"},  # which imports nothing of the pipeline
    "calibrate": _SIMULATED | {"answer.site"},
    "frameworks": _SIMULATED | {"__version__"},
    "answer": _SIMULATED | {"frameworks"},
    "report": _SIMULATED | {"answer", "calibrate", "frameworks"},
    "train": _SIMULATED | {"runtime"},
    "tracing": _VALUES | {"workload", "runtime"},
    "cli": _SIMULATED | {"answer", "calibrate", "frameworks", "train", "report", "tracing"},
    "cli.interrupt": set(),
    "cli.text_model": _SIMULATED | {"runtime", "train", "report", "cli"},
    "__main__": {"cli"},
    # Names for users, each loaded on its first use.
    "interface": _SIMULATED | {"answer"},
    "__init__": _SIMULATED | {"answer", "interface", "train"},
    "testing": _LOWERING | {"policies"},
    "testing.checks": _LOWERING | {"testing"},
    "testing.list_scheduler": _TRACE,
}
#: Packages that only some folders may import.
ONLY_IN = {
    "torch": {"runtime", "train", "tracing"},
    "greenlet": {"runtime"},
    "simpy": {"sim"},
    "hypothesis": {"testing"},
    "matplotlib": {"report"},
    "cyclopts": {"cli"},
    "examples": set(),
    "experiments": set(),
    "tests": set(),
}


def _imports(path: Path) -> Iterator[str]:
    """Dotted names of everything that a source file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_the_device_names_cudas_functions() -> None:
    """What a GPU needs is behind one interface: no other module calls ``torch.cuda``."""
    naming = [path for path in _sources() if "torch.cuda" in (SOURCE / path).read_text(encoding="utf-8")]
    assert naming == ["runtime/device.py"]


def _sources() -> list[str]:
    return sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


def test_imports_run_one_way() -> None:
    """Each module imports only what stands before it in the pipeline; torch, simpy and hypothesis stay in their folders."""
    upward = []
    for source in _sources():
        parts = Path(source).with_suffix("").parts
        folder = parts[0]
        allowed = ALLOWED.get(".".join(parts)) or ALLOWED[folder] | {folder}
        for name in _imports(SOURCE / source):
            package, *inside = name.split(".")
            ours = package == "autohete" and bool(inside)
            strays = package in ONLY_IN and folder not in ONLY_IN[package]
            if strays or (ours and inside[0] not in allowed and ".".join(inside[:2]) not in allowed):
                upward.append(f"{source} imports {name}")
    assert upward == []


@pytest.mark.slow
def test_every_module_and_class_has_a_name_of_its_own() -> None:
    """No two modules, and no two classes, of the package have the same name."""
    files: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    for source in _sources():
        files[Path(source).name] += 1
        tree = ast.parse((SOURCE / source).read_text(encoding="utf-8"))
        classes.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    del files["__init__.py"]
    assert [name for names in (files, classes) for name, count in names.items() if count > 1] == []


def python(code: str, hash_seed: str = "0") -> str:
    """What ``code`` prints in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "PYTHONHASHSEED": hash_seed}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_simulation_does_not_load_torch() -> None:
    """Importing the package, the simulator, the pipeline and the policies loads no torch."""
    loaded = python("import sys, autohete, autohete.sim, autohete.simulate, autohete.policies; print('torch' in sys.modules)")
    assert loaded == "False\n"


def test_importing_the_package_loads_nothing_heavy() -> None:
    """``import autohete`` alone loads neither numpy nor scipy nor simpy."""
    assert python("import sys, autohete; print({'numpy', 'scipy', 'simpy', 'torch'} & set(sys.modules))") == "set()\n"
