"""The largest batch, sequence or model that fits."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command import autohete, refused

from autohete.answer.members import largest_member, members
from autohete.errors import InfeasibleError, InputError
from autohete.hardware import load_hardware, parse_parallel
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.simulate import simulate, simulate_policy
from autohete.simulate.largest import GrowingFigure, largest
from autohete.workload import Workload
from autohete.workload.config import read_model

WIDE = os.environ.get("AUTOHETE_HYPOTHESIS") == "wide"
SMALL = Workload(
    "small", hidden_size=256, transformer_blocks=4, heads=4, vocabulary_size=1000, sequence_length=128, batch_size=1
)


@pytest.mark.slow
@given(
    st.sampled_from(GrowingFigure),
    st.sampled_from(["resident", "zero_offload", "stronghold:window=1"]),
    st.integers(30, 400),
)
@settings(max_examples=400 if WIDE else 40)
def test_it_fits_and_one_more_does_not(figure: GrowingFigure, policy: str, mebibytes: int) -> None:
    """Whatever grows, under any policy, in any memory."""
    hardware = load_hardware("a100-40gb-epyc7713", {"gpu.memory": f"{1024 + mebibytes}MiB"})
    system = parse_policy(policy)

    def fits(value: int) -> bool:
        grown = replace(SMALL, **{figure: value})  # type: ignore[arg-type]
        try:
            return simulate_policy(analytic_profile(grown, hardware), system).verdict is Verdict.OK
        except InfeasibleError:
            return False

    found = largest(SMALL, hardware, system, figure)
    assert not found.value or fits(found.value)
    assert found.workload == replace(SMALL, **{figure: max(found.value, 1)})  # type: ignore[arg-type]
    if found.limit.endswith("out-of-memory"):
        assert not fits(found.value + 1)
    else:
        assert "is at most" in found.limit


def test_learned_positions_limit_a_sequence() -> None:
    """GPT-2 has 1,024 of them, however much memory there is."""
    found = largest(
        replace(read_model("gpt2"), batch_size=1), load_hardware("h200-pcie5"), parse_policy("resident"), GrowingFigure.SEQUENCE
    )
    assert found.value == 1024
    assert "1024 learned positions" in found.limit


def test_a_task_that_would_last_years_limits_a_sequence() -> None:
    """In a memory that holds anything, the largest is the last that can be simulated, and the limit says so."""
    endless = load_hardware("a100-40gb-epyc7713", {"gpu.memory": "1000PB", "gpu.gemm_efficiency": "1e-8"})
    found = largest(SMALL, endless, parse_policy("resident"), GrowingFigure.SEQUENCE)
    assert found.value > 1
    assert "would last" in found.limit


@pytest.mark.parametrize(
    ("parallel", "figure", "step"),
    [("cp=2", "sequence_length", 4), ("tp=4", "sequence_length", 4), ("pp=4", "transformer_blocks", 1)],
)
def test_what_gpus_divide_grows_as_they_can(parallel: str, figure: GrowingFigure, step: int) -> None:
    """A sequence by as many tokens as are needed for equal parts, and a pipeline from a block for each stage on."""
    node = load_hardware("h100-8gpu", {"gpu.memory": "1100MiB"}).shared_by(*parse_parallel(parallel, None))
    policy = parse_policy("pipeline" if "pp" in parallel else "resident")
    figure = GrowingFigure(figure)
    found = largest(SMALL, node, policy, figure)
    assert found.value >= 4
    assert found.value % step == 0
    assert simulate(found.workload, node, policy).verdict is Verdict.OK
    more = replace(SMALL, **{figure: found.value + step})  # type: ignore[arg-type]
    assert simulate(more, node, policy).verdict is not Verdict.OK


def test_members_that_gpus_cannot_divide_are_left_out() -> None:
    """The largest of the others is named, and why larger ones do not train; if none can be divided, that is the answer."""
    hardware = load_hardware("h100-8gpu")
    found = largest_member(members("gpt2"), hardware.shared_by(*parse_parallel("tp=4", None)), ["resident"])
    assert found.workload is not None
    assert found.workload.name == "gpt2-large"
    assert [(model.name, reason.partition(":")[0]) for model, reason in found.too_large] == [
        ("gpt2-xl", "25 heads cannot be divided among 4 GPUs")
    ]
    with pytest.raises(InputError, match="has no experts"):
        largest_member(members("gpt2"), hardware.shared_by(*parse_parallel("ep=2", None)), ["resident"])
    asked = ["largest", "--family", "gpt2", "--hardware", "h100-8gpu", "--parallel", "tp=4", "--policy", "resident"]
    assert "is the largest that trains on 4 GPUs of h100-8gpu (tp=4): resident, " in autohete(*asked).stdout


def test_the_command_says_what_is_largest() -> None:
    """In words and in JSON; a measured profile is of one size."""
    asked = ["plan", "--workload", "gpt-2b", "--blocks", "2", "--policy", "resident", "--gpu-memory", "8GiB", "--max"]
    found = json.loads(autohete(*asked, "batch", "--json").stdout)
    assert found["verdict"] == "ok"
    (grown,) = found["largest"]
    assert found["assumptions"]["batch_size"] == grown["value"] > 1
    assert (
        f"largest batch size that fits: {grown['value']}; one more does not: gpu-out-of-memory"
        in autohete(*asked, "batch").stdout
    )
    tiny = autohete(*asked[:-3], "--gpu-memory", "1100MiB", "--max", "batch")
    assert "not even batch size 1 fits" in tiny.stdout
    assert "leave out --profile or --max" in refused("plan", "--profile", "any.json", "--max", "batch")
