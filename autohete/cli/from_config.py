"""``autohete plan --from``: what a DeepSpeed configuration will do, and what to change in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autohete.errors import InputError

if TYPE_CHECKING:
    from autohete.answer import Answer, Candidate
    from autohete.cli.question import Question
    from autohete.frameworks.advice import Advice, AdvisedSpeed
    from autohete.frameworks.changes import KeyChange
    from autohete.frameworks.deepspeed_reading import ReadConfig

#: Bytes; such files have one or two thousand.
_LARGEST_FILE = 1_000_000
#: Options that the file's keys stand for.
_OPTIONS = {
    "batch_size": "--batch-size",
    "micro_batches": "--micro-batches",
    "clip_norm": "--clip-norm",
    "precision": "--precision",
}


def read_configuration(given: str, question: Question) -> tuple[ReadConfig, Question]:
    """Read ``FILE[:flag,flag=value]``; return what it means, and the question with what it sets.

    Raises:
        InputError: the file cannot be read or used, or contradicts an option.
    """
    from autohete.frameworks.deepspeed_reading import read_deepspeed
    from autohete.policies import parse_policy

    if question.profile is not None:
        raise InputError("a measured profile has a batch of its own: leave out --profile, or --from")
    path, _, flags = (given, "", "") if os.path.exists(given) else given.rpartition(":")
    path, flags = (path, flags) if path else (given, "")
    try:
        read = read_deepspeed(_text(path), gpus=question.ranks(), hidden_size=question.of_workload().hidden_size, flags=flags)
        parse_policy(read.policy)
    except InputError as error:
        raise InputError(f"--from {path}: {error}") from error
    return read, replace(question, shape=_with(question, read.training, path))


def _text(path: str) -> str:
    try:
        if not os.path.isfile(path):
            raise InputError("is no file: give a DeepSpeed configuration, such as ds_config.json")
        if Path(path).stat().st_size > _LARGEST_FILE:
            raise InputError(f"has more than {_LARGEST_FILE:,} bytes: give a DeepSpeed configuration")
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}") from error


def _with(question: Question, training: Mapping[str, Any], path: str) -> Any:
    """The question's shape with what the file sets."""
    for name, value in training.items():
        given = getattr(question.shape, name)
        if given is not None and given != value:
            raise InputError(f"{_OPTIONS[name]} is {given}, but {path} sets {value}: leave out the option, or change the file")
    return replace(question.shape, **training)


def advise(file: str, read: ReadConfig, answer: Answer) -> Advice:
    """Simulate the configuration, and compare it with the plans of the answer, in frameworks whose kernels it is of."""
    from autohete.answer.policies import Judged
    from autohete.frameworks import FRAMEWORKS, kernels_of
    from autohete.frameworks.advice import Advice

    now = Judged(answer.profile, (read.policy,))()
    advice = Advice(
        file,
        now.name,
        read.notes,
        _speed(now) if now.fits else None,
        now.summary.explanation,
    )
    deepspeed = _faster(answer, now, ("deepspeed",))
    changes = () if deepspeed is None else _changes(read, answer, now, deepspeed)
    if deepspeed is not None and changes:  # a share that is rounded in a file can be slower than the plan, with the same keys
        advice = replace(advice, better=deepspeed.name, then=_speed(deepspeed), changes=changes)
    workload = answer.profile.workload
    alike = tuple(each.name for each in FRAMEWORKS if kernels_of(each, workload) is workload.kernels)
    any_ = _faster(answer, deepspeed or now, alike)
    if any_ is None:
        return advice
    runs_in = tuple(name for name in any_.runs_in if name in alike)
    return replace(advice, fastest=any_.name, at_best=_speed(any_), runs_in=runs_in)


def _speed(of: Candidate) -> AdvisedSpeed:
    from autohete.frameworks.advice import AdvisedSpeed

    return AdvisedSpeed(of.seconds, 1 / of.seconds_per_token)


def _faster(answer: Answer, than: Candidate, frameworks: tuple[str, ...]) -> Candidate | None:
    """The fastest candidate that one of the frameworks can run, if it is faster by more than noise."""
    from autohete.answer import NOISE

    able = [each for each in answer.candidates if each.fits and {*frameworks} & {*each.runs_in}]
    best = min(able, key=lambda each: each.seconds_per_token, default=None)
    return best if best is not None and best.seconds_per_token < than.seconds_per_token * (1 - NOISE) else None


def _changes(read: ReadConfig, answer: Answer, now: Candidate, then: Candidate) -> tuple[KeyChange, ...]:
    from autohete.cli.frameworks import decided_in
    from autohete.frameworks.changes import KeyChange, key_changes
    from autohete.frameworks.deepspeed import DeepSpeedFiles
    from autohete.frameworks.deepspeed_reading import DECIDED

    decided = decided_in(answer, then)
    zero = "zero_optimization"
    before = read.config.get(zero) or {}
    written = DeepSpeedFiles().config(decided)[zero]
    kept = {key: value for key, value in before.items() if key not in DECIDED and f"stage3_{key}" not in written}
    changes = key_changes({zero: before}, {zero: kept | written})
    recomputed = now.plan is not None and bool(now.plan.checkpointed_units)
    if recomputed == decided.recomputes:
        return changes
    return (*changes, KeyChange("gradient_checkpointing, in the script", recomputed, decided.recomputes))
