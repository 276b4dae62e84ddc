"""The published comparison: the experiments of arXiv 2503.01890 (AutoHete) on one A100-40GB, and their results. The paper does
not state absolute throughputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import mean

from autohete.hardware import load_hardware
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.simulate import Simulation
from autohete.simulate.summary import Summary, answer
from autohete.workload import WORKLOADS, Kernels, Precision

NODE = "a100-40gb-epyc7713"
#: Not stated in the paper: Hugging Face GPT-2 in fp16, what the system's likely ancestor trains (ColossalAI, auto_parallel).
MODELS = {name: replace(workload, precision=Precision.FP16, kernels=Kernels.EAGER) for name, workload in WORKLOADS.items()}
AUTOHETE, NO_PRIORITY = "autohete", "autohete:priority=off"
#: The version is not stated either: one of each era. 0.14.1 to 0.16.9 do not fit, see the table of bounds.
ZERO_OFFLOAD = ("zero_offload:deepspeed=0.4.3", "zero_offload:deepspeed=0.8.3", "zero_offload:deepspeed=2026")
POLICIES = (*ZERO_OFFLOAD, "patrickstar", "stronghold", NO_PRIORITY, AUTOHETE)


@dataclass(frozen=True, slots=True)
class Published:
    """A speed-up of AutoHete over another system on one GPU: average and maximum over the models that both train."""

    average: float
    maximum: float


#: Abstract and section 5; for priority, AutoHete with it over AutoHete without.
PUBLISHED = {
    **{policy: Published(1.85, 2.08) for policy in ZERO_OFFLOAD},
    "patrickstar": Published(1.63, 1.91),
    "stronghold": Published(1.32, 1.41),
    NO_PRIORITY: Published(1.16, 1.24),
}
#: The largest model that ZeRO-Offload trains.
ZERO_OFFLOAD_LIMIT = "gpt-12b"


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation: a model under a policy, with some hardware figures changed."""

    model: str
    policy: str
    moved: tuple[tuple[str, str], ...] = ()

    def run(self) -> Summary:
        """Simulate it; takes up to a second."""
        return self.answer()[0]

    def answer(self) -> tuple[Summary, Simulation | None]:
        """The same, with the simulation; None if no plan fits."""
        profile = analytic_profile(MODELS[self.model], load_hardware(NODE, dict(self.moved)))
        return answer(profile, parse_policy(self.policy))


def grid(moved: Mapping[str, str] | None = None) -> list[Job]:
    """Every model under every policy."""
    figures = tuple((moved or {}).items())
    return [Job(model, policy, figures) for model in MODELS for policy in POLICIES]


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """AutoHete's throughput over another's: average and maximum over the models that both train."""

    over: str
    average: float
    maximum: float


def speedup(over: str, rates: Mapping[tuple[str, str], float | None]) -> SpeedUp:
    """The speed-up over one policy, from the rate of each model and policy (None: does not fit)."""
    ratios = list(_ratios(rates, over, MODELS))
    return SpeedUp(over, mean(ratios), max(ratios))


def _ratios(rates: Mapping[tuple[str, str], float | None], over: str, models: Iterable[str]) -> Iterator[float]:
    for model in models:
        fast, slow = rates[model, AUTOHETE], rates[model, over]
        if fast is not None and slow is not None:
            yield fast / slow
