"""SlideFormer: what its window, its buffers on the host and its one stream for copies mean, on a model to follow on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.paper import PLENTY, profile_with

from autohete.errors import InputError
from autohete.execution.trace import Span
from autohete.hardware import load_hardware
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.quantities import rounded_when_pinned
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, Kind, Value
from autohete.simulate import Simulation, judge_for, simulate_plan
from autohete.workload import Precision, named_workload

NODE = load_hardware("a100-40gb-epyc7713")
#: Units of the model on paper, lowest first.
LAST = 4


def simulated(policy: str) -> Simulation:
    profile = profile_with(PLENTY, 1)
    return simulate_plan(profile, parse_policy(policy).plan(profile, judge_for(profile)))


def spans(found: Simulation, *kinds: Kind) -> list[Span]:
    """Spans of tasks of the second iteration, in the order in which they start."""
    chosen = (span for span in found.trace.spans() if span.iteration == 1 and span.task.kind in kinds)
    return sorted(chosen, key=lambda span: span.start_ns)


@pytest.mark.parametrize(("policy", "buffers"), [("slideformer", 1), ("slideformer:double_buffer", 2)])
def test_gradients_wait_for_a_buffer_on_the_host(policy: str, buffers: int) -> None:
    """As many gradients as there are buffers are between the start of their copy and the end of their update."""
    found = simulated(policy)
    ends = {span.task.unit: span.end_ns for span in spans(found, Kind.CPU_UPDATE)}
    copies = spans(found, Kind.OFFLOAD_GRADIENTS)
    assert [copy.task.unit for copy in copies] == [*range(LAST, -1, -1)]
    held = [sum(1 for other in copies[: i + 1] if ends[other.task.unit] > copy.start_ns) for i, copy in enumerate(copies)]
    assert max(held) == buffers


@pytest.mark.parametrize(("policy", "overlaps"), [("slideformer", False), ("slideformer:double_buffer", True)])
def test_only_a_second_stream_copies_both_ways_at_once(policy: str, overlaps: bool) -> None:
    """Parameters for backward and gradients take turns on one stream, each unit's gradients after the parameters below it."""
    both = spans(simulated(policy), Kind.PREFETCH_BACKWARD, Kind.OFFLOAD_GRADIENTS)
    order = [f"{span.task.kind}{span.task.unit}" for span in both]
    if not overlaps:
        assert order == ["PB3", "G4", "PB2", "G3", "PB1", "G2", "PB0", "G1", "G0"]
        assert all(one.end_ns <= other.start_ns for one, other in zip(both, both[1:], strict=False))
    assert (order.index("PB1") < order.index("G3")) is overlaps


def test_what_is_used_next_stays() -> None:
    """The head's parameters come once an iteration, and the last block's input never leaves the GPU."""
    found = simulated("slideformer")
    assert [span.task.unit for span in spans(found, Kind.PREFETCH_FORWARD)] == [*range(LAST + 1)]
    assert LAST not in [span.task.unit for span in spans(found, Kind.PREFETCH_BACKWARD)]
    assert [span.task.unit for span in spans(found, Kind.OFFLOAD_ACTIVATIONS)] == [1, 2]
    assert [span.task.unit for span in spans(found, Kind.FETCH_ACTIVATIONS)] == [2, 1]


@pytest.mark.parametrize(("flag", "units", "arrays"), [("", 2, 2), (":double_buffer", 3, 3)])
def test_memory_is_as_the_code_allocates_it(flag: str, units: int, arrays: int) -> None:
    """On the GPU cache units of 4 bytes a parameter of the largest unit; on the host 12 bytes a parameter, a 16-bit buffer for
    casts and one or two for gradients.
    """
    workload = replace(named_workload("gpt-4b", precision=Precision.FP16), tied_embeddings=False)
    profile = analytic_profile(workload, NODE)
    found = simulate_plan(profile, parse_policy(f"slideformer{flag}").plan(profile, judge_for(profile)))
    largest = max(unit.parameters for unit in profile.units)
    resident = {(one.id.value, one.id.memory): 0 for one in found.schedule.resident}
    for one in found.schedule.resident:
        resident[one.id.value, one.id.memory] += one.size_bytes
    assert {key: size for key, size in resident.items() if size} == {
        (Value.PARAMETER_SLOTS, GPU_MEMORY): 4 * largest * units,
        (Value.OPTIMIZER_STATES, HOST_MEMORY): 12 * workload.parameters,
        (Value.POLICY_BUFFERS, HOST_MEMORY): arrays * rounded_when_pinned(2 * largest),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_norm": 1.0}, "slideformer cannot clip gradients: .*norm"),
        ({"micro_batches": 2}, "slideformer cannot accumulate gradients: .*one micro-batch"),
        ({"gpus": 2}, "slideformer plans for one GPU, not for 2"),
    ],
)
def test_what_the_code_does_not_do_is_refused(change: dict[str, float], message: str) -> None:
    """Clipping, accumulation and several GPUs are refused with the reason."""
    options = {"micro_batches": 1, **change}
    profile = profile_with(PLENTY, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        parse_policy("slideformer").plan(profile, judge_for(profile))
