"""AutoHete from Python: names that are there at once, results that show themselves, and frames."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import jsonschema
import pandas
import pytest
from matplotlib.figure import Figure
from support.answers import LARGE, QUICK, TINY, WORKLOAD, answer
from support.command import autohete as command

import autohete
from autohete.answer import Sampling
from autohete.cli.schemas import document_schema
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.policies import parse_policy
from autohete.simulate import Simulation, simulate

NODE = "rtx4090-workstation"


def simulated() -> Simulation:
    """A small workload on the workstation."""
    return autohete.simulate_training(WORKLOAD, NODE, "zero_offload", overrides={"gpu.memory": "8GiB"})


def test_every_name_is_there_and_no_package_hides_one() -> None:
    """Each public name is what its module has, in every order of imports: none is that of a package or module."""
    for name in autohete.__all__:
        assert getattr(autohete, name) is not None
        assert not (Path(autohete.__file__).parent / name).exists()
        assert not (Path(autohete.__file__).parent / f"{name}.py").exists()
    assert {*autohete.__all__} <= {*dir(autohete)}
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        autohete.plans  # noqa: B018


@pytest.mark.slow
def test_names_are_loaded_when_they_are_used() -> None:
    """Neither torch nor SciPy is loaded by the package, and torch by nothing but the Trainer."""
    code = (
        "import sys, autohete\n"
        "print({'torch', 'scipy', 'numpy', 'pydantic'} & set(sys.modules))\n"
        "from autohete import plan_training, simulate_training, Workload, load_hardware, Answer\n"
        "print({'torch', 'pandas', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\nset()\n"


def test_a_simulation_by_names_is_that_of_the_objects() -> None:
    """Model, hardware and policy by name, and as objects; also of a workload of the paper."""
    alone = simulate(WORKLOAD, load_hardware(NODE, {"gpu.memory": "8GiB"}), parse_policy("zero_offload"))
    assert simulated().iteration_seconds == alone.iteration_seconds
    objects = autohete.simulate_training(WORKLOAD, load_hardware(NODE, {"gpu.memory": "8GiB"}), parse_policy("zero_offload"))
    assert objects.iteration_seconds == alone.iteration_seconds
    for name in ("openai-community/GPT2", "gpt-2b"):
        found = autohete.simulate_training(name, NODE, "resident", overrides={"gpu.memory": "80GiB"})
        assert found.profile.workload.name == name.rpartition("/")[2].lower()


@pytest.mark.slow
def test_an_answer_by_names_is_that_of_the_command() -> None:
    """The same document, but for what the command assumes and here is given, and for the names of its options."""
    asked = [
        "--hidden",
        "256",
        "--blocks",
        "2",
        "--heads",
        "4",
        "--vocabulary",
        "1000",
        "--hardware",
        NODE,
        "--draws",
        "2",
        "--batch-size",
        "8",
    ]
    printed = json.loads(command("plan", *asked, "--jobs", "1", "--json").stdout)
    workload = autohete.Workload("2x256", 256, 2, 4, vocabulary_size=1000)
    found = json.loads(json.dumps(autohete.plan_training(workload, NODE, sampling=Sampling(2)).to_dict()))
    for document in (printed, found):
        del document["given"], document["assumptions"]
        for gain in document["levers"]:
            del gain["change"]["name"]
    assert found == printed


def test_results_are_shown_in_a_line() -> None:
    """A simulation, an answer and all that they consist of have short reprs that name them, and tables for notebooks."""
    found, answered = simulated(), answer(LARGE)
    shown = (found, found.profile, found.profile.hardware, found.schedule, found.trace, answered, answer(TINY))
    for each in shown:
        assert repr(each).startswith(f"<{type(each).__name__}")
        assert len(repr(each)) < 300
        assert "\n" not in repr(each)
    for named in (found, found.profile, answered):
        assert WORKLOAD.name in repr(named)
        assert NODE in repr(named)
        assert named._repr_html_().startswith("<table>")
    assert "nothing fits" in repr(answer(TINY))
    odd = replace(found, profile=replace(found.profile, workload=replace(WORKLOAD, name="<b>x</b>")))
    assert "<b>" not in odd._repr_html_()


def test_results_have_the_documents_of_the_commands() -> None:
    """``to_dict`` follows the printed schemas, also for a policy that is not registered."""
    schema = jsonschema.Draft202012Validator(document_schema("plan"))
    found = simulated()
    own = replace(found, plan=replace(found.plan, policy="my own"))
    for result in (found, own, answer(LARGE), answer(TINY)):
        schema.validate(json.loads(json.dumps(result.to_dict())))
    assert found.to_dict()["iteration_seconds"] == found.iteration_seconds
    assert json.dumps(found.profile.to_dict())
    assert found.profile.hardware.to_dict()["gpu"]["memory_bytes"] == 8 * 2**30


def test_frames_have_a_row_for_each_part() -> None:
    """Spans of a trace, tasks of a schedule, units of a profile, policies of an answer."""
    found = simulated()
    spans, tasks = found.to_frame(), found.schedule.to_frame()
    assert isinstance(spans, pandas.DataFrame)
    assert len(spans) == found.trace.iterations * len(tasks)
    assert spans["end_seconds"].max() == pytest.approx(found.trace.makespan_seconds)
    assert tasks.groupby("lane")["duration_seconds"].sum()["gpu"] <= found.iteration_seconds * 1.001
    assert found.profile.to_frame()["parameters"].sum() == WORKLOAD.parameters
    policies = answer(LARGE).to_frame()
    assert set(policies["policy"]) == set(QUICK)
    with patch.dict(sys.modules, pandas=None), pytest.raises(InputError, match=r"pip install 'autohete\[frames\]'"):
        found.to_frame()


def test_results_are_drawn() -> None:
    """A simulation and the best plan of an answer; where nothing fits there is nothing to draw."""
    found = simulated()
    assert isinstance(found.gantt(), Figure)
    assert isinstance(answer(LARGE).gantt(iterations=1), Figure)
    with pytest.raises(InputError, match="nothing fits"):
        answer(TINY).gantt()
    with pytest.raises(InputError, match="iterations is 0"):
        found.gantt(0)
