"""``autohete calibrate``."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from cyclopts import Parameter

from autohete.cli.groups import HARDWARE, MODEL, POLICY, JsonSwitch, OutputFile
from autohete.cli.outputs import check_outputs
from autohete.cli.question import BLANK, Question
from autohete.errors import InputError


def calibrate(
    trace: str,
    /,
    *,
    question: Question = BLANK,
    policy: Annotated[str | None, Parameter(group=POLICY)] = None,
    step_name: Annotated[str | None, Parameter(group=MODEL)] = None,
    device: Annotated[Literal["gpu", "cpu"], Parameter(group=HARDWARE)] = "gpu",
    hardware_out: OutputFile = None,
    profile_out: OutputFile = None,
    json_: JsonSwitch = False,
) -> None:
    """Measure a hardware with a trace of your own training, and show what was predicted for it beside what happened.

    Parameters
    ----------
    trace:
        A trace of torch.profiler (.json, .json.gz), or an export of Nsight Systems (nsys export --type sqlite), of a training
        with DeepSpeed, FSDP, transformers or anything else.
    policy:
        How the training moved and updated its values: NAME[:flag,flag=value], or your own MODULE:CLASS. Default: resident,
        which keeps all on the GPU.
    step_name:
        How the names of the ranges begin that mark steps. Default: ProfilerStep#, or else the optimizer's steps, or else the
        whole trace is one step.
    device:
        cpu: the training ran on the CPU, which stands in for the GPU; its operators are what the device does.
    hardware_out:
        Write the measured figures to this hardware file (.toml), based on --hardware; every command takes it as --hardware.
    profile_out:
        Write the times of the model's passes and the hardware to this file (.json); `simulate --profile` and `plan --profile`
        answer with them.
    json_:
        Print JSON: one object.
    """
    from autohete.calibrate.calibration import calibrate as calibrated
    from autohete.calibrate.reading import read_recorded
    from autohete.calibrate.recorded_steps import find_steps
    from autohete.hardware.document import find
    from autohete.hardware.template import based_text, hardware_name
    from autohete.policies import parse_policy

    if question.profile is not None:
        raise InputError("--profile is what calibrate writes: name the model instead, and the file to write with --profile-out")
    asked = question.names_workload
    if not asked and (policy is not None or profile_out is not None):
        option = "--policy" if policy is not None else "--profile-out"
        raise InputError(f"{option} needs the model that was trained: give --model, --module, --workload or its shape")
    if profile_out is not None and question.divided()[0] > 1:
        raise InputError("--profile-out is a profile of one GPU: leave out --gpus, or write only --hardware-out")
    outputs = {"--hardware-out": hardware_out, "--profile-out": profile_out}
    check_outputs({option: path for option, path in outputs.items() if path is not None})
    workload = question.of_workload() if asked else None
    site = question.site()
    base = site.hardware().name
    chosen = parse_policy("resident" if policy is None else policy) if asked else None
    phased = find_steps(read_recorded(trace, device=device == "cpu"), step_name)
    found, files = calibrated(phased, site, workload, chosen, hardware_name(hardware_out or trace))
    if hardware_out is not None:
        from autohete.files import write_text

        entries = {key: find(files.document, key) for key in (*site.given, *(figure.key for figure in found.figures))}
        title = f"{base}, calibrated with {found.trace}"
        write_text(hardware_out, based_text(hardware_out, question.hardware, title, entries))
    if profile_out is not None and files.profile is not None:
        from autohete.profile.profile_file import write_profile

        about = {"date": found.date, "machine": found.gpu or base, "trace": found.trace}
        write_profile(profile_out, files.profile, dict(files.document), about)
    if json_:
        from autohete.documents import as_json

        print(json.dumps(as_json(found), indent=2, ensure_ascii=True))
    else:
        from autohete.report.calibration_tables import print_calibration

        print_calibration(found)
