"""``autohete sweep``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

import autohete
from autohete.cli import groups
from autohete.cli.axes import POLICY, Axis, Setting, all_axes, diagonal, parse_over, read_grid, settings
from autohete.cli.interrupt import in_processes
from autohete.cli.outputs import check_outputs
from autohete.cli.question import BLANK, DEFAULT_HARDWARE, Question, Whole
from autohete.cli.shifts import shifted, shifts
from autohete.errors import AutoHeteError, InputError
from autohete.files import only_writer

if TYPE_CHECKING:
    from autohete.hardware import Hardware
    from autohete.policies import NamedPolicy
    from autohete.profile import Profile
    from autohete.report.crossover import Scale
    from autohete.report.records import Row
    from autohete.workload import Workload

#: Options of a question that are about the hardware.
_WHERE = ("hardware", "set_", "gpu_memory", "host_memory", "pinned_memory", "gpus")
#: Keys whose values name files or code.
_NAMED = ("model", "hardware", "profile", POLICY)
#: How many settings are tried to find one that is valid before anything is written.
_TRIED = 100


def sweep(
    *,
    out: Annotated[str, Parameter(group=groups.OUTPUT)],
    question: Question = BLANK,
    policy: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False, group=groups.POLICY)] = (),
    over: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    grid: str | None = None,
    jobs: Whole | None = None,
    cluster: str | None = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
    sensitivity: Annotated[bool, Parameter(negative=())] = False,
    plot: groups.OutputFile = None,
) -> None:
    """Simulate many settings, in parallel: every combination of some values.

    Parameters
    ----------
    out:
        CSV file: one row per setting, as soon as it is answered. Columns: options, keys, and the numbers of
        `autohete simulate --json`; settings that are invalid or do not fit have the reason.
        A name that ends in .parquet gives that format.
    policy:
        NAME[:flag,flag=value]; repeat for several. Default: autohete.
    over:
        KEY=V1,V2,... or KEY=START..STOP:STEP, such as batch-size=1,2,4 or links.h2d.bandwidth=10GB/s..100GB/s:10GB/s. KEY is an
        option above without dashes, a hardware figure as in --set, or policy. Repeatable.
    grid:
        TOML file with a table [over]: lists of values for each KEY.
    jobs:
        Processes; default: one per core.
    cluster:
        Answer on the workers of this Dask scheduler, such as tcp://10.0.0.1:8786, which must have this version installed;
        local: start one here.
    resume:
        Continue the file: keep its rows and answer only the missing settings.
    sensitivity:
        Change one thing at a time: each hardware figure with a range to both ends, or each KEY of --over to its values
        (without values to the ends of its range, or by 10 % either way). The file has the effects on the iteration time,
        largest first.
    plot:
        Draw to this .png, .pdf or .svg file: each policy over the one key that has several values, with crossovers, or the
        fastest policy over two such keys; with --sensitivity the effects.
    """
    from autohete.report.crossover import scales
    from autohete.report.parquet import check_pyarrow, is_parquet, journal_of, parquet_writer, read_parquet
    from autohete.report.records import Tally, header_of, print_tally, read_rows, row_writer, sealed

    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs is {jobs}: give at least 1, or leave it out for one per core")
    read = partial(parse_over, bare=sensitivity)
    asked = [*(read_grid(grid) if grid is not None else []), *map(read, over)]
    outputs = {"--out": out} | ({"--plot": plot} if plot is not None else {})
    if sensitivity:
        if resume:
            raise InputError("--sensitivity answers few settings and writes its file at the end: leave out --resume")
        if is_parquet(out):
            raise InputError("--sensitivity writes CSV: give --out FILE.csv")
        _sensitivity(question, policy or ("autohete",), asked, outputs, jobs, cluster)
        return
    axes = all_axes(question, policy, asked)
    check_outputs(outputs)
    drawn = scales({axis.key: list(axis.values) for axis in axes}) if plot is not None else []
    keys = [axis.key for axis in axes]
    header = header_of(keys)
    parquet = is_parquet(out)
    if parquet:
        check_pyarrow()
    with only_writer(journal_of(out) if parquet else out):
        there, kept = ([], 0) if not resume else (read_parquet(out, header), 0) if parquet else read_rows(out, header)
        for path in () if resume else (out, journal_of(out)) if parquet else (out,):
            if os.path.isfile(path) and os.path.getsize(path):
                raise InputError(f"{path!r} exists: continue it with --resume, remove it, or give another --out")
        _check_valid(islice(diagonal(axes), _TRIED))
        missing = _missing(axes, there, out)
        tally = Tally()
        for row in there:
            tally.add(row)
        seen = list(there)
        begin = time.perf_counter()
        rows = _rows(missing, keys, jobs, cluster)  # connects to a cluster before there is a row
        writing = parquet_writer(out, header, keys) if parquet else row_writer(out, header, kept)
        with writing as write:
            for row in _with_progress(rows, len(missing)):
                write(sealed(row, _question_digest(*(row.get(key) for key in _NAMED))))
                tally.add(row)
                if drawn:
                    seen.append(row)
    varied = [axis.key for axis in axes if len(axis.values) > 1]
    print_tally(tally, varied, len(missing), time.perf_counter() - begin, out)
    if plot is not None:
        _plot([row for row in seen if all(row[axis.key] in axis.values for axis in axes)], drawn, axes, plot)


def _missing(axes: Sequence[Axis], there: Sequence[Row], path: str) -> list[Setting]:
    """Return the settings that have no row in the file ``path``.

    Raises:
        InputError: the row of a setting answers another question.
    """
    from autohete.report.records import question_of

    keys = [axis.key for axis in axes]
    done = {tuple(row[key] for key in keys): row for row in there}
    missing = []
    for setting in settings(axes):
        row = done.get(setting.texts)
        if row is None:
            missing.append(setting)
        elif question_of(row) != _question_digest(*(row.get(key) for key in _NAMED)):
            where = ", ".join(f"{axis.key}={row[axis.key]}" for axis in axes if len(axis.values) > 1 or axis.key in _NAMED)
            raise InputError(
                f"{path!r} cannot be continued: its row of {where} is of another version, or older than a change of "
                "the model, hardware, profile or policy that it names; choose another file"
            )
    return missing


@lru_cache(maxsize=1024)
def _question_digest(model: str | None, hardware: str | None, profile: str | None, policy: str) -> str:
    """Return a digest of what the names in a setting stand for, which are files and code that can change."""
    import inspect

    from autohete.hardware.document import combine, read_chain
    from autohete.profile.profile_file import read_profile
    from autohete.report.records import digest
    from autohete.workload.config import read_model

    return digest(
        autohete.__version__,
        "" if model is None else repr(read_model(model)),
        "" if profile is None else repr(read_profile(profile)),
        json.dumps(combine(read_chain(hardware or DEFAULT_HARDWARE))),
        inspect.getsource(sys.modules[type(_policy(policy).system).__module__]),
    )


def _plot(rows: Sequence[Row], drawn: Sequence[Scale], axes: Sequence[Axis], path: str) -> None:
    """Draw and print which policy is best where; the policies come in the order in which they were named."""
    from autohete.report.crossover import draw, print_best
    from autohete.report.style import save_figure

    policies = next(list(axis.values) for axis in axes if axis.key == POLICY)
    rows = sorted(rows, key=lambda row: policies.index(row[POLICY]))
    names = {row["workload"] for row in rows if row["workload"]}, {row["hardware"] for row in rows if row["hardware"]}
    title = " on ".join(name for each in names if len(each) == 1 for name in each)
    save_figure(draw(rows, drawn, f"{title}, simulated" if title else "simulated"), path)
    print_best(rows, drawn)


def _sensitivity(
    question: Question,
    policies: Sequence[str],
    over: Sequence[tuple[str, list[str]]],
    outputs: dict[str, str],
    jobs: int | None,
    cluster: str | None,
) -> None:
    """Answer the question itself and every move of it, then write, draw and print the effects."""
    from autohete.files import write_text
    from autohete.policies import parse_policy
    from autohete.report.sensitivity import effects, effects_csv, print_effects, tornado

    for text in policies:
        parse_policy(text)
    some = shifts(question, over)
    check_outputs(outputs)
    profile = _profile(question)
    points = list(shifted(question, some, tuple(dict.fromkeys(policies))))
    keys = ("key", "value", "policy")
    rows = list(_with_progress(_rows(points, keys, jobs, cluster), len(points)))
    order = {setting.texts: place for place, setting in enumerate(points)}
    rows.sort(key=lambda row: order[tuple(row[key] for key in keys)])
    moved = effects(rows, {move.key: move.base for move in some})
    write_text(outputs["--out"], effects_csv(moved))
    if "--plot" in outputs:
        from autohete.report.style import save_figure

        save_figure(tornado(moved, f"{profile.workload.name} on {profile.hardware.name}, simulated"), outputs["--plot"])
    print_effects(moved, rows)


def _check_valid(some: Iterable[Setting]) -> None:
    """Raise the error of the first setting if all settings are invalid."""
    first: InputError | None = None
    for setting in some:
        try:
            _profile(setting.question)
        except InputError as error:
            first = first or error
        else:
            return
    if first is not None:
        raise first


@lru_cache(maxsize=16)
def _profile(question: Question) -> Profile:
    if question.profile is not None:
        return question.answerable()
    from autohete.profile import analytic_profile

    # Many settings have one workload, and many one hardware.
    where = replace(question, workload=None, model=None, module=None, block_names=None, shape=BLANK.shape)
    what = replace(question, **{field: getattr(BLANK, field) for field in _WHERE})
    return analytic_profile(_workload(what), _hardware(where))


@lru_cache(maxsize=64)
def _policy(text: str) -> NamedPolicy:
    from autohete.policies import parse_policy

    return parse_policy(text)


@lru_cache(maxsize=1024)
def _workload(question: Question) -> Workload:
    return question.of_workload()


@lru_cache(maxsize=1024)
def _hardware(question: Question) -> Hardware:
    return question.on_hardware()


def _row(setting: Setting, keys: Sequence[str]) -> Row:
    """Answer one setting."""
    from autohete.report.records import answered, refused
    from autohete.simulate.summary import answer

    key = dict(zip(keys, setting.texts, strict=True))
    try:
        summary, _ = answer(_profile(setting.question), _policy(setting.policy), only_numbers=True)
    except AutoHeteError as error:
        return refused(key, str(error))
    return answered(key, summary)


def _rows(missing: Sequence[Setting], keys: Sequence[str], jobs: int | None, cluster: str | None = None) -> Iterator[Row]:
    """Answer settings, in any order."""
    import joblib

    if cluster is not None:
        from autohete.cli.cluster import on_cluster

        return on_cluster(cluster, jobs, partial(_row, keys=tuple(keys)), missing)
    jobs = min(jobs or joblib.cpu_count(), len(missing))
    if jobs <= 1:
        return (_row(setting, keys) for setting in missing)
    # Batches that take a fraction of a second: a policy that searches takes a hundred times as long as one that does not.
    return in_processes(_row, ((setting, keys) for setting in missing), jobs, batch_size="auto")


def _with_progress(rows: Iterator[Row], total: int) -> Iterator[Row]:
    """Pass rows on, with a progress bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from autohete.report.tables import console

    columns = [TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        bar = progress.add_task("", total=total)
        for row in rows:
            yield row
            progress.advance(bar)
