"""The schemas of ``autohete schema`` against the documents that are written, and against those of other forms."""

from __future__ import annotations

import hashlib
import json
import os
from copy import deepcopy
from pathlib import Path

import jsonschema
import pytest
import torch
from support.answers import LARGE, TINY, answer
from support.command import SMALL, autohete, refused

from autohete.answer.answer_document import answer_json
from autohete.cli.schemas import document_schema
from autohete.hardware import load_hardware, preset_names
from autohete.hardware.document import combine, read_chain
from autohete.profile import analytic_profile
from autohete.profile.profile_file import read_profile, write_profile
from autohete.simulate.largest import GrowingFigure
from autohete.train.checkpoints import Checkpoint
from autohete.workload import Workload

KINDS = ("plan", "simulation", "profile", "calibration", "trace", "training")
GOLDEN = Path(__file__).parents[1] / "golden" / "schemas.json"


def check(document: object, kind: str) -> None:
    """Validate a document, as JSON, against the schema that the command prints."""
    schema = json.loads(autohete("schema", kind).stdout)
    jsonschema.Draft202012Validator(schema).validate(json.loads(json.dumps(document)))


def faults(document: object, kind: str) -> bool:
    """Whether the schema refuses a document."""
    return not jsonschema.Draft202012Validator(document_schema(kind)).is_valid(json.loads(json.dumps(document)))


@pytest.mark.parametrize("kind", KINDS)
def test_each_schema_is_one(kind: str) -> None:
    """Of its dialect, with a version in its title, no part that nothing refers to, and a description of each document."""
    schema = document_schema(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["title"].rpartition(" ")[2].isdecimal()
    text = json.dumps(schema)
    assert [part for part in schema["$defs"] if f'"#/$defs/{part}"' not in text] == []


@pytest.mark.parametrize("gpu_memory", [LARGE, TINY])
def test_answers_follow_their_schema(gpu_memory: str) -> None:
    """Whether something fits or not; a key too many, or one that is missing, is refused."""
    document = answer_json(answer(gpu_memory, draws=2, sizes=(GrowingFigure.BATCH,)))
    check(document, "plan")
    for key in ("fits", "policies", "needs"):
        assert faults({name: value for name, value in document.items() if name != key}, "plan")
    assert faults(document | {"surprise": 1}, "plan")
    policies = deepcopy(document["policies"])
    policies[0]["iteration_seconds"] = "fast"
    assert faults(document | {"policies": policies}, "plan")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["autohete", "zero_offload:deepspeed=0.4.3", "capuchin"])
def test_what_the_commands_print_follows_their_schemas(policy: str) -> None:
    """One policy of ``plan``, also with the largest size; one and several of ``simulate``, also what does not fit."""
    asked = [*SMALL, "--policy", policy, "--json"]
    check(json.loads(autohete("plan", *asked).stdout), "plan")
    check(json.loads(autohete("plan", *asked, "--max", "blocks", "--gpu-memory", "1100MiB").stdout), "plan")
    check(json.loads(autohete("simulate", *asked).stdout), "simulation")
    check(json.loads(autohete("simulate", *asked, "--policy", "resident", "--gpu-memory", "1025MiB").stdout), "simulation")


def test_timelines_follow_their_schema(tmp_path: Path) -> None:
    """A simulated one, as it is written."""
    file = tmp_path / "trace.json"
    assert autohete("simulate", *SMALL, "--policy", "joint", "--trace", str(file)).returncode == 0
    document = json.loads(file.read_text())
    check(document, "trace")
    bare = deepcopy(document)
    next(event for event in bare["traceEvents"] if event["ph"] == "X")["args"].pop("ready_ns")
    assert faults(bare, "trace")


@pytest.mark.parametrize("name", preset_names())
def test_profiles_follow_their_schema(name: str, tmp_path: Path) -> None:
    """With the hardware of any preset; what is not written with its unit is refused."""

    profile = analytic_profile(Workload("x", 64, 2, 2), load_hardware(name))
    file = tmp_path / "profile.json"
    write_profile(file, profile, dict(combine(read_chain(name))), {"date": "2026-11-22"})
    document = json.loads(file.read_text())
    check(document, "profile")
    assert read_profile(file).units == profile.units
    document["hardware"]["gpu"]["memory"]["value"] = "40"
    assert faults(document, "profile")


def test_checkpoints_follow_their_schema(tmp_path: Path) -> None:
    """Tensors, numbers that JSON does not have, and trees of what can be saved."""
    state = {"step": 3, "weights": [torch.ones(2)], "rates": (1.5, float("inf"), None), 7: {"name": "x", "on": True}}
    target = Checkpoint(state).write(tmp_path, 3, keep=1)
    document = json.loads((target / "state.json").read_text())
    check(document, "training")
    assert faults(document | {"state": {"tensor": 1}}, "training")


def test_a_schema_changes_with_its_version() -> None:
    """Each schema is pinned under its title: one that changes is another version, if the one before has been released."""
    found = {}
    for kind in KINDS:
        schema = document_schema(kind)
        found[schema["title"]] = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()
    if os.environ.get("AUTOHETE_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(GOLDEN.read_text()), (
        "raise its version if it has been released; AUTOHETE_UPDATE_GOLDEN=1 pins it"
    )


def test_an_unknown_document_is_refused() -> None:
    """With the kinds that there are."""
    assert "plan" in refused("schema", "answer")
