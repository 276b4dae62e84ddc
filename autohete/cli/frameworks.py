"""Options about the frameworks that run a plan, and the files written for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from autohete.errors import AutoHeteError, InputError, check_fields
from autohete.quantities import format_seconds
from autohete.workload.traced import TracedWorkload

if TYPE_CHECKING:
    from autohete.answer import Answer, Candidate
    from autohete.cli.question import Question
    from autohete.frameworks import Decided, Framework


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is run, and by what.

    Parameters
    ----------
    from_:
        A DeepSpeed configuration that you run, such as ds_config.json: what it will do, and what to change in it. Its batch,
        clipping and precision are those of the question. Flags of the policy may follow: ds_config.json:checkpointing=full.
    runnable:
        Recommend only plans that one of these frameworks can run, such as deepspeed,fsdp2; without names, any that is known.
    write:
        Write the files with which a framework runs the best plan that it can run into this folder, which is new or empty.
    """

    from_: Annotated[str | None, Parameter(name="--from")] = None
    runnable: Annotated[tuple[str, ...] | None, Parameter(negative=(), consume_multiple=(0, 1), metavar="[NAME,NAME]")] = None
    write: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def frameworks(self) -> tuple[Framework, ...]:
        """Return the frameworks that may run the plan: those given, or all.

        Raises:
            InputError: an unknown name.
        """
        from autohete.frameworks import named_frameworks

        return named_frameworks([name.strip() for name in ",".join(self.runnable or ()).split(",") if name.strip()])

    def only(self) -> tuple[str, ...]:
        """Return the names of the frameworks to which recommendations are limited; none if they are not."""
        names = tuple(each.name for each in self.frameworks())
        return () if self.runnable is None else names

    def as_it_runs(self, question: Question) -> Question:
        """Return the question with the kernels and adapters of the frameworks to which it is limited, unless they differ or are
        given.
        """
        from autohete.frameworks import as_run

        names = {"deepspeed"} if self.runnable is None and self.from_ is not None else {*self.only()}
        frameworks = [each for each in self.frameworks() if each.name in names]
        if question.shape.kernels is not None or question.module or question.profile or not frameworks:
            return question
        workload = question.of_workload()
        if isinstance(workload, TracedWorkload):
            return question
        run = [as_run(each, workload) for each in frameworks]
        if len({each.kernels for each in run}) > 1:
            return question
        shape = replace(question.shape, kernels=run[0].kernels)
        adapters = {each.training.lora for each in run}
        lora = adapters.pop() if len(adapters) == 1 else None
        if lora is not None:
            shape = replace(shape, adapters=lora.adapters, prepared=lora.prepared)
        return replace(question, shape=shape)

    def check(self) -> None:
        """Check the options before anything is computed.

        Raises:
            InputError: a name or folder that cannot be used.
        """
        self.frameworks()
        if self.write is None:
            return
        if not self.write:
            raise InputError("--write is empty: give a folder, such as run")
        folder = Path(self.write)
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise InputError(f"--write {self.write!r} is a file: give a folder, new or empty")
        if os.path.isdir(folder) and any(folder.iterdir()):
            raise InputError(
                f"--write {self.write!r} is a folder that is not empty: give a new one, so that nothing is replaced"
            )
        there = next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))
        if not os.access(there, os.W_OK | os.X_OK):
            raise InputError(f"--write {self.write!r} cannot be written: folder {str(there)!r} is not writable")


@dataclass(frozen=True, slots=True)
class Written:
    """What has been written for a framework: the policy, its time with the kernels of that framework, the files, and the
    command that starts training.
    """

    framework: str
    version: str
    policy: str
    kernels: str
    iteration_seconds: float
    folder: str
    files: tuple[str, ...]
    command: str

    def __str__(self) -> str:
        runs = f"{self.framework} {self.version}, which runs {self.policy} with {self.kernels} kernels"
        seconds = f"{format_seconds(self.iteration_seconds)} per iteration"
        return f"Written to {self.folder} for {runs}: {seconds}. Files: {', '.join(self.files)}. Start there: {self.command}"


def write_best(answer: Answer, running: RunOptions, question: Question) -> Written | None:
    """Write the files of the best plan that one of the frameworks can run; None if ``--write`` is not given.

    Raises:
        InputError: no framework can run a plan that fits.
    """
    if running.write is None:
        return None
    refusals = []
    for each in answer.candidates:
        able = [framework for framework in running.frameworks() if framework.name in each.runs_in]
        if each.fits and able:
            found = _first(able, decided_in(answer, each))
            if not isinstance(found, str):
                return _write(*found, running.write, question)
            refusals.append(found)
    names = " or ".join(each.name for each in running.frameworks())
    raise InputError("; ".join([f"there is nothing to write: no plan fits that {names} can run", *refusals]))


def decided_in(answer: Answer, candidate: Candidate) -> Decided:
    """Return the plan of a candidate that has one, with what it is for."""
    from autohete.frameworks import Decided
    from autohete.policies import parse_policy

    assert candidate.plan is not None
    peak = candidate.summary.gpu_peak_bytes or 0
    return Decided(answer.profile, parse_policy(candidate.name).system, candidate.plan, candidate.seconds, peak)


def write_plan(decided: Decided, running: RunOptions, question: Question) -> Written | None:
    """Write the files of one plan; None if ``--write`` is not given.

    Raises:
        InputError: no framework can run it; names the reason of each.
    """
    if running.write is None:
        return None
    found = _first(running.frameworks(), decided)
    if isinstance(found, str):
        raise InputError(f"there is nothing to write for {decided.plan.policy}: {found}")
    return _write(*found, running.write, question)


def _first(frameworks: Sequence[Framework], decided: Decided) -> tuple[Decided, Framework] | str:
    """The first framework that runs the policy, with its plan for the kernels that this framework runs; or why none does."""
    from autohete.frameworks import refusal

    reasons = []
    for framework in frameworks:
        reason = refusal(framework, decided)
        if not reason:
            try:
                planned = _as_written(decided, framework)
                reason = refusal(framework, planned)
            except AutoHeteError as error:
                reason = f"{framework.name} runs {framework.kernels} kernels, with which it does not fit: {error}"
        if not reason:
            return planned, framework
        reasons.append(reason)
    return "; ".join(reasons)


def _as_written(decided: Decided, framework: Framework) -> Decided:
    """The policy's plan for the kernels that the framework runs, and for adapters as it holds them.

    Raises:
        AutoHeteError: there is none that fits.
    """
    from autohete.frameworks import as_run
    from autohete.policies import parse_policy
    from autohete.profile import analytic_profile
    from autohete.simulate.summary import answer

    if isinstance(decided.workload, TracedWorkload):  # which has kernels of its own
        return decided
    workload = as_run(framework, decided.workload)
    if (workload.kernels, workload.adapters, workload.is_prepared) == (
        decided.workload.kernels,
        decided.workload.adapters,
        decided.workload.is_prepared,
    ):
        return decided
    profile = analytic_profile(workload, decided.hardware)
    summary, simulation = answer(profile, parse_policy(decided.plan.policy), only_numbers=True)
    if simulation is None or summary.explanation:
        raise InputError(summary.explanation)
    return replace(
        decided,
        profile=profile,
        plan=simulation.plan,
        seconds=simulation.iteration_seconds,
        gpu_peak_bytes=simulation.gpu.peak_bytes,
    )


def _write(decided: Decided, framework: Framework, folder: str, question: Question) -> Written:
    from autohete.files import make_folder, write_text
    from autohete.frameworks.model_files import model_files

    if question.profile is not None:
        raise InputError("a measured profile has no model to write: give --model, --workload or a shape instead of --profile")
    files = framework.files(decided, model_files(question.model, decided.workload))
    for name, text in files.items():
        path = Path(folder, name)
        make_folder(path.parent)
        write_text(path, text)
    return Written(
        framework.name,
        framework.version,
        decided.plan.policy,
        decided.workload.kernels,
        decided.seconds,
        folder,
        tuple(files),
        framework.command(decided),
    )
