"""What is packaged and released: the wheel in a clean environment, versions, and the files around the repository."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def script(name: str) -> ModuleType:
    """A program of the folder .ci, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str, cwd: Path) -> str:
    """The output of a command that must succeed, without this repository on the path."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={"PATH": ""}, check=False, timeout=120)
    assert done.returncode == 0, (command, done.stderr[-2000:])
    return done.stdout


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(tmp_path: Path) -> None:
    """The wheel has every file of the package; installed without this repository, it answers from another folder."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "autohete", source / "autohete", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path), ".", cwd=source)
    (wheel,) = tmp_path.glob("autohete-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    whole = (path for path in (ROOT / "autohete").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {path.relative_to(ROOT).as_posix() for path in whole}

    venv.create(tmp_path / "clean", with_pip=False)
    python = str(tmp_path / "clean" / "bin" / "python")
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    (packages,) = (tmp_path / "clean" / "lib").glob("python*/site-packages")
    # The dependencies of this environment; its own link to the repository is not followed from there.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert Path(run(python, "-c", "import autohete; print(autohete.__file__)", cwd=folder)).is_relative_to(packages)
    program = str(tmp_path / "clean" / "bin" / "autohete")
    shown = run(program, "simulate", "--model", "qwen3-0.6b", "--policy", "resident", "--gantt", "timeline.png", cwd=folder)
    assert "iteration" in shown
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_release_has_the_version_of_the_change_log(tmp_path: Path) -> None:
    """A dated entry names the version; an entry without a date, another version or another tag is refused."""
    release_version = script("release_version").release_version
    (tmp_path / "autohete").mkdir()

    def write(entry: str, package: str = "1.2.0", cited: str = "1.2.0") -> None:
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{entry}\n\n## [1.1.0] - 2026-01-01\n")
        (tmp_path / "autohete" / "__init__.py").write_text(f'__version__ = "{package}"\n')
        (tmp_path / "CITATION.cff").write_text(f"version: {cited}\n")

    write("1.2.0] - 2026-12-01")
    assert release_version("v1.2.0", tmp_path) == release_version(None, tmp_path) == "1.2.0"
    with pytest.raises(ValueError, match=r"the tag says 1\.3\.0, CHANGELOG\.md says 1\.2\.0"):
        release_version("v1.3.0", tmp_path)
    write("1.2.0] - Unreleased")
    with pytest.raises(ValueError, match="replace 'Unreleased' by the date"):
        release_version("v1.2.0", tmp_path)
    write("1.2.0] - 2026-12-01", package="1.2.1")
    with pytest.raises(ValueError, match=r"__init__\.py says 1\.2\.1"):
        release_version("v1.2.0", tmp_path)
    write("1.2.0] - 2026-12-01", cited="1.1.0")
    with pytest.raises(ValueError, match=r"CITATION\.cff says 1\.1\.0"):
        release_version("v1.2.0", tmp_path)


def test_the_hosted_ci_has_every_python_of_the_classifiers() -> None:
    """The versions that the package names are those that are tested, from the oldest that it takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "pythons.yml").read_text())
    assert workflow["jobs"]["quick"]["strategy"]["matrix"]["python"] == named
    assert named[0] == project["requires-python"].removeprefix(">=")


@pytest.mark.parametrize("path", [path for path in WORKFLOWS if path.name != "ci.yml"], ids=lambda path: path.name)
def test_actions_are_pinned_and_rights_are_least(path: Path) -> None:
    """Actions are named by commit with their version, workflows may read, and only the publishing job gets a token."""
    text = path.read_text()
    assert re.findall(r"uses: .*", text) == re.findall(r"uses: [\w./-]+@[0-9a-f]{40} # v[\d.]+", text)
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    rights = {name: job.get("permissions") for name, job in workflow["jobs"].items()}
    assert {name: each for name, each in rights.items() if each} in ({}, {"publish": {"id-token": "write"}})


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_an_issue_form_is_complete(path: Path) -> None:
    """A form has a name, a description and fields with different ids, of which at least one is required."""
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    fields = form["body"]
    assert {"name", "description", "labels", "body"} == form.keys()
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field["validations"]["required"] for field in fields)


def test_the_citation_is_valid() -> None:
    """CITATION.cff has what its format requires, and the version of the package."""
    from autohete import __version__

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert cited["authors"]
    assert {"message", "title", "license"} <= cited.keys()
    assert cited["version"] == __version__
