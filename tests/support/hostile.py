"""Hostile input, made from the options of the program and the schemas of its files."""

from __future__ import annotations

import json
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from cyclopts import App
from hypothesis import strategies as st

from autohete.cli.app import app
from autohete.hardware.document import combine, read_chain
from autohete.hardware.schema import known_keys, load_hardware
from autohete.profile import analytic_profile
from autohete.profile.profile_file import write_profile
from autohete.workload import Workload
from autohete.workload.config import model_names
from autohete.workload.families import FAMILIES
from support.kineto import known_trace

NODE = "rtx4090-workstation"
ESCAPE = "\x1b[31mred"

# --- options ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """An option or an argument of a command: its name in the command line, and the type of its value."""

    command: tuple[str, ...]
    name: str
    hint: Any


def _options(part: App, command: tuple[str, ...] = ()) -> Iterator[Option]:
    for name in part:
        if not name.startswith("-"):
            yield from _options(part[name], (*command, name))
    if part.default_command is not None:
        for argument in part.assemble_argument_collection():
            if argument.parse is not False and not argument.children:
                name = argument.names[0] if argument.index is None else f"{argument.index}"
                yield Option(command, name, argument.hint)


#: All options of all commands.
OPTIONS = list(_options(app))

# fmt: off
_NO_NUMBERS = (
    "", "x", "nan", "-inf", "9" * 5000, "-" + "9" * 30, "1,2", "½", "0x1g", ESCAPE, "\udcff", "$1$", "1 1", "--", "*",
)
_NO_WORDS = (
    "", "none such", "a" * 100_000, ESCAPE, "\udcff.x", "[bold]", "a\nb", "'", '"', "--", "../..", "$(id)", "=1+1", "{0}",
)
_NO_QUANTITIES = (
    "", "9" * 64_000 + "$", " " * 64_000 + "x", "1e999GB", "-1GB", "0GB", "1Gb", "nanGB", f"1{ESCAPE}", "1 GB GB", "\udcff",
)
_NO_POLICIES = (
    "", ":", "resident:x=1", "autohete.policies:NamedPolicy", "os:PathLike", "hostile_module:Policy", "..:X",
    f"resident{ESCAPE}", "joint:" + "x," * 9999, "zero_offload:paper=", "a.b:C,d=\udcff", "autohete.policies:System",
)
_NO_ITEMS = (
    "", "=", "x", "=1", "gpu.memory=", f"gpu.memory={'9' * 64_000}$", f"{ESCAPE}=1", "gpu.memory=1GB=2", "x" * 99_999 + "=1",
)
_NO_MODULES = (
    "", "none such", "a" * 100_000, ESCAPE, "\udcff.x", "missing.py:build", "input.json:build", "folder.py:build", "gpt2:x=1",
    "gpt2:n_layer=", ":", "x" * 300 + ".py:build",
)
_NO_AXES = (*_NO_ITEMS[:5], "batch-size=1..x:1", "batch-size=1..9:0", "batch-size=9..1:1", "batch-size=1..999999999:1")
# fmt: on

_FILES = (
    *("fifo", "zero", "folder", "latin", "large", "deep", "digits", "hex", "nul", "empty", "binary"),
    *("loop", "dangling"),
)
#: What is wrong with a file that is to be written; the first part is where no file can be.
_UNWRITABLE = ("none/such/out", "folder", "zero/out", "readonly", "input", "x" * 300)

#: Options with a text, by what the text names.
_READ = {
    "--model": ".json",
    "--profile": ".json",
    "--hardware": ".toml",
    "--grid": ".toml",
    "--base": ".toml",
    "--data": ".txt",
    "--from": ".json",
}
_WRITTEN = {
    **dict.fromkeys(("--trace", "--predicted-trace"), ".json"),
    **dict.fromkeys(("--gantt", "--memory", "--plot"), ".png"),
    **{"--out": ".csv", "--schedule": ".txt", "--html": ".html", "--json": ".json"},
    **{"--hardware-out": ".toml", "--profile-out": ".json"},
}
_NAMES = ("--step-name", "--workload", "--lora-targets", "--tokenizer", "--family")
_QUANTITIES = (
    "--gpu-memory",
    "--host-memory",
    "--pinned-memory",
    "--system-memory",
    "--tokens",
    "--iteration-tokens",
    "--timeout",
)
_ARGUMENTS = {("compare",): ".json", ("calibrate",): ".json", ("hardware", "show"): ".toml", ("hardware", "check"): ".toml"}
_WRITTEN_ARGUMENTS = ((("profile",), "0"), (("trace",), "1"))
#: Folders that a training fills, and a cluster, which is waited for.
_NOT_TRIED = ("--save", "--drive", "--cluster")


def values(option: Option) -> st.SearchStrategy[str] | None:
    """Values that the option must refuse; None for a switch, and for what is not tried."""
    either = typing.get_origin(option.hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(option.hint) if either else (option.hint,)
    if bool in kinds:
        return st.sampled_from(_NO_WORDS[1:4])
    if int in kinds or float in kinds:
        return st.sampled_from(_NO_NUMBERS)
    if any(typing.get_origin(kind) is typing.Literal or (isinstance(kind, type) and issubclass(kind, Enum)) for kind in kinds):
        return st.sampled_from(_NO_WORDS)
    name, command = option.name, option.command
    if name in _NOT_TRIED or (command == ("train",) and name in ("--model", "--out")):
        return None
    if suffix := _READ.get(name) or (_ARGUMENTS.get(command) if name.isdecimal() else None):
        files = [file for file in _FILES if name != "--data" or file not in ("deep", "digits", "hex")]  # these are text
        return st.sampled_from(
            [*(f"{file}{suffix}" for file in files), "x" * 300 + suffix, f"{ESCAPE}{suffix}", f"\udcff{suffix}"]
        )
    if suffix := _WRITTEN.get(name) or (".json" if (command, name) in _WRITTEN_ARGUMENTS else None):
        files = [
            file for file in _UNWRITABLE if file != "input" or command not in (("profile",), ("trace",), ("calibrate",))
        ]  # which do not read it
        return st.sampled_from([*(f"{file}{suffix}" for file in files), ""])
    if command == ("hardware", "new"):
        return st.sampled_from(["", "x", "input.toml", "none/x.toml", "x" * 300 + ".toml", "dangling.toml", "readonly.toml"])
    if name == "--module" or (command == ("trace",) and name == "0"):
        return st.sampled_from(_NO_MODULES)
    if name == "--block-names":
        return st.sampled_from(_NO_WORDS[1:9])
    if name == "--runnable":
        return st.sampled_from(["none", "deepspeed,none", ESCAPE, "[bold]", "\udcff"])
    if name == "--sample-lengths":
        return st.sampled_from(
            [*_NO_NUMBERS[:6], ESCAPE, ",", "1,", "1,,2", "0,5", "5,-1", "1;2", "5," + "9" * 5000, "1" + ",1" * 9999 + ",x"]
        )
    if name == "--write":
        return st.sampled_from(["", "input.json", "input.json/x"])
    if name == "--policy":
        return st.sampled_from(_NO_POLICIES)
    if name == "--price":
        return st.sampled_from([*_NO_ITEMS[:5], "gpu-memory=x", "gpu-memory=nan", "gpu-memory=-1", "gpu-memory=inf"])
    if name in ("--set", "--over"):
        return st.sampled_from(_NO_ITEMS if name == "--set" else _NO_AXES)
    if name == "--parallel":
        return st.sampled_from(
            [
                "",
                "tp",
                "tp=",
                "tp=0",
                "tp=-1",
                "tp=" + "9" * 5000,
                "sp=off",
                "comm=a2a",
                "tp=x",
                "tp=2,tp=2",
                "sp=2",
                "comm=x",
                "zp=2",
                "tp=٣",
                ESCAPE,
                "\udcff",
            ]
        )
    if name in _QUANTITIES:
        return st.sampled_from(_NO_QUANTITIES)
    if name in _NAMES or command == ("presets",):
        return st.sampled_from(_NO_WORDS[1:9])
    raise AssertionError(f"no hostile values for {option}")


_SHAPE = {"--hidden": "64", "--blocks": "2", "--heads": "2", "--vocabulary": "100", "--batch-size": "1"}
_TEXT = {"--hidden": "8", "--blocks": "1", "--heads": "1", "--data": "input.txt", "--steps": "1"}


def command_line(option: Option, value: str) -> list[str]:
    """A command line that is right but for one value."""
    command, name = option.command, option.name
    if name.isdecimal() and command == ("compare",):
        return ["compare", *(("input.json", value) if name == "1" else (value, "input.json"))]
    if name.isdecimal() and command == ("trace",):
        return ["trace", *((value, "out.json") if name == "0" else ("gpt2:n_layer=1", value))]
    if name.isdecimal():
        return [*command, value, *(["--base", NODE] if command == ("hardware", "new") else [])]
    with_model = name in _WRITTEN or name in ("--model", "--module", "--workload", "--profile")
    model = {"--model": "input.json"} if name in _WRITTEN else {}
    question: dict[str, str] = model if with_model else dict(_SHAPE)
    whole = ("--html", "--tokens", "--system-memory", "--draws", "--seed", "--iteration-tokens", "--price", "--timeout")
    others: dict[tuple[str, ...], dict[str, str]] = {
        ("largest",): {"--family": "gpt2", "--policy": "resident"},
        ("simulate",): question | {"--policy": "resident"},
        ("calibrate",): question | {"--policy": "resident"},
        ("sweep",): question | {"--policy": "resident", "--out": "out.csv", "--jobs": "1"},
        ("plan",): question | ({} if name in (*whole, "--from", "--runnable") else {"--policy": "resident"}),
        ("train",): _TEXT,
        ("profile",): {name: text for name, text in _TEXT.items() if name != "--steps"},
    }
    given = others.get(command, {}) | {name: value}
    arguments = {("compare",): ["input.json", "input.json"], ("profile",): ["out.json"], ("hardware", "new"): ["new.toml"]}
    arguments[("calibrate",)] = ["recording.json"]
    arguments[("trace",)] = ["gpt2:n_layer=1", "out.json"]
    return [*command, *arguments.get(command, []), *(f"{key}={text}" for key, text in given.items())]


def make_files(folder: Path) -> None:
    """Fill a folder with files that are not what they are named, and some good ones, which nothing may change."""
    (folder / "zero").symlink_to("/dev/zero")
    contents = {
        "latin": b'name = "caf\xe9"',
        "deep": b"[" * 100_000,
        "digits": b'{"hidden_size": ' + b"9" * 100_000 + b"}",
        "hex": b"[over]\nheads = [0x" + b"f" * 100_000 + b"]\n",
        "nul": b"\0",
        "empty": b"",
        "binary": bytes(range(256)) * 9,
        "readonly": b"keep",
    }
    for suffix in (".json", ".toml", ".txt", ".png", ".csv", ".html", ""):
        os.mkfifo(folder / f"fifo{suffix}")
        (folder / f"folder{suffix}").mkdir()
        (folder / f"loop{suffix}").symlink_to(f"loop{suffix}")
        (folder / f"dangling{suffix}").symlink_to("none/such")
        if suffix:
            (folder / f"zero{suffix}").symlink_to("/dev/zero")
        with (folder / f"large{suffix}").open("wb") as stream:
            stream.truncate(2**40)  # of zeros, which take no room
        for name, content in contents.items():
            (folder / f"{name}{suffix}").write_bytes(content)
        (folder / f"readonly{suffix}").chmod(0o444)
    model = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 1024}
    (folder / "input.json").write_text(json.dumps(model))
    for suffix in (".png", ".csv", ".html", ".txt"):
        os.link(folder / "input.json", folder / f"input{suffix}")
    (folder / "input.toml").write_text(f'base = "{NODE}"\n')
    known_trace(3e14, 1.5e12).write(folder / "recording.json")
    (folder / "hostile_module.py").write_text("raise SystemExit('imported')")


# --- files --------------------------------------------------------------------------------------------------------

_NO_FIGURES: tuple[Any, ...] = (
    *(True, -1, 0, 10**40, float("nan"), float("inf"), "x", "", "1e999GB", "9" * 64_000 + "GB", "-1GB", [], [[[]]], {}),
    *({"value": 1}, {"a": {"b": 1}}, ESCAPE, "[bold]", "1 GB/s"[::-1]),
)
_NO_SIZES: tuple[Any, ...] = (-1, 0.5, 10**40, float("inf"), "x", [], {}, "9" * 64_000, ESCAPE, [[]], {"a": [1]})


def toml(tables: Mapping[str, Any]) -> str:
    """TOML with one line for each entry."""
    return "".join(f"{json.dumps(key)} = {_inline(node)}\n" for key, node in tables.items())


def _inline(node: Any) -> str:
    if isinstance(node, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(child)}" for key, child in node.items()) + "}"
    if isinstance(node, list):
        return f"[{', '.join(map(_inline, node))}]"
    return str(node) if isinstance(node, float) else json.dumps(node)


def _changed(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of ``document`` with another value at ``path``."""
    if not path:
        return value
    copy: Any = list(document) if isinstance(document, list) else dict(document)
    first: Any = path[0]
    below = copy[first] if isinstance(copy, list) else copy.get(first, {})
    copy[first] = _changed(below if isinstance(below, (dict, list)) else {}, path[1:], value)
    return copy


@st.composite
def hardware_files(draw: st.DrawFn) -> str:
    """A hardware file with a figure, or a part of one, that cannot be."""
    whole: Any = combine(read_chain(NODE))
    figures, _ = known_keys([*whole["places"]])
    key = draw(st.sampled_from([*figures, "name", "gpu", "links.h2d", "places.nvme", "without", "base"]))
    part = draw(st.sampled_from(["value", "range", "date", None])) if key in figures else None
    value = draw(st.sampled_from(_NO_FIGURES if part != "date" else [1, "yesterday", [], ESCAPE, "2026-1"]))
    if (key, value) == ("without", []):
        value = [1]
    if key == "name" and value in ("x",):
        value = "a b"
    return toml(_changed(whole, (*key.split("."), *([part] if part else [])), value))


@st.composite
def model_files(draw: st.DrawFn) -> str:
    """A ``config.json`` with a size that cannot be."""
    from importlib import resources

    name = draw(st.sampled_from(model_names()))
    config = json.loads((resources.files("autohete.workload") / "models" / f"{name}.json").read_text())
    fields = FAMILIES[config["model_type"]].model_fields
    sizes = sorted(field.alias or key for key, field in fields.items() if field.annotation is int and field.is_required())
    key = draw(st.sampled_from([*sizes, "model_type"]))
    return json.dumps(config | {key: draw(st.sampled_from(_NO_SIZES))})


def _leaves(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    if not children:
        yield path
    for key, child in children:
        yield from _leaves(child, (*path, key))


def profile_document(folder: Path) -> Any:
    """A profile that can be read."""
    profile = analytic_profile(Workload("small", 64, 2, 2, vocabulary_size=100, batch_size=1), load_hardware(NODE))
    hardware: Any = combine(read_chain(NODE))
    write_profile(folder / "good.json", profile, hardware, {"date": "2026-11"})
    document = json.loads((folder / "good.json").read_text())
    assert asdict(profile.workload)["name"] == document["workload"]["name"]
    return document


@st.composite
def profile_files(draw: st.DrawFn, document: Any) -> str:
    """A profile with an entry of another type."""
    paths = [path for path in _leaves(document) if path[0] not in ("measured", "hardware")]
    path = draw(st.sampled_from(paths))
    value = draw(st.sampled_from([{"a": 1}, [[1]], "\x1b[31m" * 99, 10**400, float("nan"), -1e300]))
    return json.dumps(_changed(document, path, value))


@st.composite
def trace_files(draw: st.DrawFn, document: Any) -> str:
    """A trace with an entry of another type."""
    events = document["traceEvents"]
    number = draw(st.sampled_from([place for place, event in enumerate(events) if event["ph"] == "X"]))
    path = draw(
        st.sampled_from(
            [
                *(("traceEvents", number, key) for key in ("ts", "dur", "name", "args")),
                *(("autohete", key) for key in ("format", "clock", "iterations", "schedule")),
                ("autohete", "schedule", draw(st.integers(0, len(document["autohete"]["schedule"]) - 1))),
                ("traceEvents",),
            ]
        )
    )
    value = draw(
        st.sampled_from([{"a": 1}, [[1]], ESCAPE, 10**40, float("nan"), -1.5, None, "lane \x1b fifo", "task F0 gpu 9"])
    )
    return json.dumps(_changed(document, path, value))


@st.composite
def recordings(draw: st.DrawFn, document: Any) -> str:
    """A recording with an entry of another type."""
    events = document["traceEvents"]
    number = draw(st.integers(0, len(events) - 1))
    keys = [*(("args", key) for key in events[number]["args"]), *((key,) for key in events[number])]
    path = ("traceEvents", number, *draw(st.sampled_from(keys)))
    numbers = (10**40, float("nan"), float("inf"), -1.5)
    value = draw(st.sampled_from([{"a": 1}, [[1]], ESCAPE, *numbers, None, True, "9" * 5000, []]))
    return json.dumps(_changed(document, path, value))


@st.composite
def grid_files(draw: st.DrawFn) -> str:
    """A grid with an option of :data:`OPTIONS`, or with an unknown key, whose values it cannot have."""
    keys = [option.name.removeprefix("--") for option in OPTIONS if option.command == ("sweep",)]
    key = draw(st.sampled_from([*(key for key in keys if key not in ("gantt",)), "gpu.memory", "x", ESCAPE]))
    value = draw(
        st.sampled_from([1, True, [], {}, [[]], [{}], [ESCAPE], ["a\nb"], [""], [10**40, "x"], [float("nan")], "x", [-1]])
    )
    return toml({"over": {key: value}}) + draw(st.sampled_from(["", "other = 1\n", "]", "over = 2\n"]))
