"""What people give: units, workloads, hardware files, policy names. Bad input is refused in one teaching line."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cyclopts import CoercionError
from hypothesis import given
from hypothesis import strategies as st

from autohete.cli.app import app
from autohete.cli.axes import axis_of
from autohete.errors import InputError
from autohete.hardware import Hardware, load_hardware, preset_names, read_hardware, uncertain_figures
from autohete.plan import Activations, Plan, Route, UnitPlan
from autohete.policies import parse_policy
from autohete.policies.autohete import AutoHete
from autohete.policies.checkpointing import Checkpointing
from autohete.policies.stronghold import StrongHold
from autohete.quantities import UNITS, format_bytes, format_seconds, parse_count, parse_quantity
from autohete.workload import WORKLOADS, BlockRole, Precision, Units, Workload, named_workload
from autohete.workload.optimizers import Optimizer, state_bytes

NODE = "a100-40gb-epyc7713"


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("40GiB", "bytes", 40 * 2**30),
        ("40 GB", "bytes", 40e9),
        ("25GB/s", "bandwidth", 25e9),
        ("312TFLOP/s", "rate", 312e12),
        ("10us", "time", 1e-5),
        ("1.5e3MB", "bytes", 1.5e9),
    ],
)
def test_quantities_are_read_in_si(text: str, dimension: str, value: float) -> None:
    """A number with a unit of its dimension is read in SI units."""
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "GB", "25", "25Gb/s", "25 GB", "-1GB/s", "0GB/s", "infGB/s", "1e999GB/s", "25GB/s/s", "25,5GB/s"]
)
def test_a_quantity_that_is_not_one_is_refused(text: str) -> None:
    """No number, no unit, bits, another dimension, zero, negative and infinite are errors that show an example."""
    with pytest.raises(InputError, match="25GB/s"):
        parse_quantity(text, "bandwidth")


@pytest.mark.parametrize(
    "text",
    ["9" * 64_000 + "$", " " * 64_000 + "x", "1" + " " * 64_000 + "$", "1." + "0" * 64_000 + "GB/s/s"],
    ids=["digits", "blanks before", "blanks behind", "fraction"],
)
def test_a_long_text_is_refused_as_soon_as_a_short_one(text: str) -> None:
    """Reading takes no time that grows with the square of the length, and the error repeats only the beginning."""
    begin = time.process_time()
    for read in (parse_count, lambda text: parse_quantity(text, "bandwidth")):
        with pytest.raises(InputError) as refusal:
            read(text)
        assert len(str(refusal.value)) < 500
    assert time.process_time() - begin < 0.1


@given(st.sampled_from(sorted(UNITS)), st.data())
def test_every_unit_is_read(dimension: str, data: st.DataObject) -> None:
    """Every listed unit scales by its factor."""
    unit = data.draw(st.sampled_from(sorted(UNITS[dimension])))
    number = data.draw(st.floats(1e-3, 1e6))
    assert parse_quantity(f"{number}{unit}", dimension) == pytest.approx(number * UNITS[dimension][unit])


def test_sizes_and_times_are_written_with_units() -> None:
    """People read binary sizes and times in the unit that leaves few digits."""
    assert [format_bytes(size) for size in (0, 1023, 1536, 3 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
    assert [format_seconds(s) for s in (12.25, 0.833, 1e-5, 2e-9)] == ["12.25 s", "833 ms", "10.00 us", "2 ns"]


def test_named_workloads_hold_their_published_ranges() -> None:
    """Each preset has the parameters of its name within a tenth, hidden 2048 to 8192, 20 to 42 blocks, sequence 1024."""
    for name, workload in WORKLOADS.items():
        billions = int(name.removeprefix("gpt-").removesuffix("b"))
        assert workload.parameters / 1e9 == pytest.approx(billions, rel=0.12)
        assert 2048 <= workload.hidden_size <= 8192
        assert 20 <= workload.transformer_blocks <= 42
        assert workload.sequence_length == 1024


def test_parameters_are_those_of_gpt2() -> None:
    """GPT-2 small has 124,439,808 parameters, as its released weights do."""
    gpt2 = Workload("gpt2", 768, 12, 12, vocabulary_size=50257, sequence_length=1024)
    assert gpt2.parameters == 124_439_808


def test_embedding_and_head_are_blocks() -> None:
    """Untying the head adds one matrix to the head and nothing elsewhere."""
    tied = Workload("x", 64, 3, 4)
    untied = Workload("x", 64, 3, 4, tied_embeddings=False)
    assert [tied.role(block) for block in range(tied.unit_count)] == [
        BlockRole.EMBEDDING,
        *[BlockRole.TRANSFORMER] * 3,
        BlockRole.HEAD,
    ]
    assert untied.parameters - tied.parameters == 64 * tied.vocabulary_size
    assert untied.unit_parameters(4) - tied.unit_parameters(4) == 64 * tied.vocabulary_size


def test_sublayers_of_a_block_are_its_attention_and_its_mlp() -> None:
    """Cut into sublayers a workload has two units for each block, by turns, and the same parameters."""
    finer = Workload("x", 64, 2, 4, units=Units.SUBLAYER)
    assert [finer.role(unit).value for unit in range(finer.unit_count)] == ["embedding", *["attention", "mlp"] * 2, "head"]
    assert finer.parameters == Workload("x", 64, 2, 4).parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 100, "heads": 3}, "not divisible by 3 heads"),
        ({"hidden_size": 0}, "hidden_size is 0: it must be a whole number between 1"),
        ({"transformer_blocks": -1}, "transformer_blocks is -1"),
        ({"batch_size": 10**12}, "batch_size is 1000000000000"),
    ],
)
def test_absurd_shapes_are_refused(changes: dict[str, int], message: str) -> None:
    """Zero, negative and absurd sizes and heads that do not divide are errors that say what is allowed."""
    with pytest.raises(InputError, match=message):
        replace(Workload("x", 64, 2, 4), **changes)  # type: ignore[arg-type]


def test_an_unknown_name_lists_the_known_ones() -> None:
    """An unknown workload or policy is refused with the allowed names and the nearest."""
    with pytest.raises(InputError, match=r"unknown workload 'gpt-11b': did you mean 'gpt-1.*choose one of gpt-10b, "):
        named_workload("gpt-11b")
    with pytest.raises(InputError, match=r"unknown policy 'zero-offload': .*did you mean 'zero_offload'"):
        parse_policy("zero-offload")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_every_figure_has_its_source(name: str) -> None:
    """Every preset is valid, sourced and dated, and each range contains its value."""
    document = read_hardware(name)
    assert document.name == name
    assert isinstance(document.hardware(), Hardware)
    for figure in uncertain_figures(name):
        assert figure.low <= figure.value <= figure.high, figure.key
        assert figure.value == _figure(document, figure.key)


def _figure(document: object, key: str) -> float:
    for part in key.split("."):
        document = document[part] if isinstance(document, dict) else getattr(document, part)
    value = document.value  # type: ignore[attr-defined]
    assert isinstance(value, float | int)
    return float(value)


def test_figures_are_set_by_key_with_units() -> None:
    """An override replaces one figure and leaves the others."""
    plain, changed = load_hardware(NODE), load_hardware(NODE, {"links.h2d.bandwidth": "50GB/s", "cpu.cores": "8"})
    assert changed.h2d.bandwidth == 50e9
    assert changed.cpu.cores == 8
    assert changed.d2h == plain.d2h
    assert changed.gpu == plain.gpu


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_links_other_rates_follow_its_bandwidth(direction: str) -> None:
    """A link that is made faster or slower keeps its proportions, duplex and pageable, but for those that are given, too."""
    key, plain = f"links.{direction}", getattr(load_hardware(NODE), direction)
    for factor in (0.1, 2.0):
        bandwidth = {f"{key}.bandwidth": f"{plain.bandwidth * factor / 1e9}GB/s"}
        changed = getattr(load_hardware(NODE, bandwidth), direction)
        assert changed.bandwidth == pytest.approx(plain.bandwidth * factor)
        assert changed.duplex_bandwidth == pytest.approx(plain.duplex_bandwidth * factor)
        assert changed.pageable_bandwidth == pytest.approx(plain.pageable_bandwidth * factor)
        assert changed.latency_seconds == plain.latency_seconds
        for name, kept in (("duplex_bandwidth", "pageable_bandwidth"), ("pageable_bandwidth", "duplex_bandwidth")):
            given_too = getattr(load_hardware(NODE, {f"{key}.{name}": "1GB/s", **bandwidth}), direction)
            assert getattr(given_too, name) == 1e9
            assert getattr(given_too, kept) == getattr(changed, kept)


@pytest.mark.parametrize("name", ["update_bandwidth", "elementwise_bandwidth"])
def test_a_cpu_is_not_faster_than_its_memory(name: str) -> None:
    """A rate of the CPU above what the DRAM gives counts as that, and a note says so; raising the DRAM's makes room for it."""
    host = load_hardware(NODE).host
    dram = host.memory_bandwidth * host.usable_share
    faster = {f"cpu.{name}": f"{dram * 1.1!r}B/s"}
    bound = load_hardware(NODE, faster)
    assert getattr(bound.cpu, name) == pytest.approx(dram)
    (note,) = bound.notes
    assert note.startswith(f"cpu.{name} {dram * 1.1 / 1e9:g} GB/s is more than the DRAM allows; using {dram / 1e9:g} GB/s,")
    as_much = load_hardware(NODE, {f"cpu.{name}": f"{dram!r}B/s"})
    assert (getattr(as_much.cpu, name), as_much.notes) == (pytest.approx(dram), ())
    roomy = load_hardware(NODE, {**faster, "host.memory_bandwidth": f"{host.memory_bandwidth * 1.2!r}B/s"})
    assert (getattr(roomy.cpu, name), roomy.notes) == (pytest.approx(dram * 1.1), ())


@pytest.mark.parametrize("name", preset_names())
def test_no_preset_is_faster_than_its_memory(name: str) -> None:
    """The figures of every preset are taken as given."""
    assert load_hardware(name).notes == ()


#: Figures of a hardware file that need not be there, and what stands for them.
OPTIONAL: dict[str, float | None] = {
    "gpu.gemm_efficiency_32bit": None,
    "gpu.multiprocessors": None,
    "links.h2d.pageable_bandwidth": None,
    "links.d2h.pageable_bandwidth": None,
    "cpu.elementwise_bandwidth": None,
    "cpu.concurrent_share": 1.0,
    "cpu.launch": 0.0,
}


def test_optional_figures_may_be_left_out(tmp_path: Path) -> None:
    """A file without the optional figures loads with neutral values, and all else is as before."""
    tables = re.split(r"^(?=\[)", _preset_text(), flags=re.MULTILINE)
    path = tmp_path / "node.toml"
    path.write_text("".join(table for table in tables if not any(table.startswith(f"[{key}]") for key in OPTIONAL)))
    full, bare = load_hardware(NODE), load_hardware(path)
    part: object
    for key, neutral in OPTIONAL.items():
        name = "launch_seconds" if key == "cpu.launch" else key.rpartition(".")[2]
        for node in (full, bare):
            part = getattr(node, key.removeprefix("links.").partition(".")[0])
            assert (getattr(part, name) == neutral) is (node is bare), key
    assert bare.h2d == replace(full.h2d, pageable_bandwidth=None)
    assert bare.gpu == replace(full.gpu, gemm_efficiency_32bit=None, multiprocessors=None)
    faster = load_hardware(path, {"links.h2d.bandwidth": f"{2 * bare.h2d.bandwidth!r}B/s"})
    assert faster.h2d.duplex_bandwidth == pytest.approx(2 * bare.h2d.duplex_bandwidth)
    assert faster.h2d.pageable_bandwidth is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("links.h2d.bandwith", "50GB/s", "did you mean 'links.h2d.bandwidth'"),
        ("links.h2d", "50GB/s", "unknown hardware figure"),
        ("links.h2d.bandwidth.value", "50GB/s", "unknown hardware figure"),
        ("links.h2d.bandwidth", "50", "has no unit"),
        ("links.h2d.bandwidth", "50Gb/s", "unit 'Gb/s'"),
        ("links.h2d.bandwidth", "-5GB/s", "positive"),
        ("gpu.memory_efficiency", "1.5", "less than or equal to 1"),
        ("gpu.memory_efficiency", "much", "plain number"),
        ("gpu.memory_efficiency", "nan", "gpu.memory_efficiency"),
        ("cpu.cores", "0", "cpu.cores"),
        ("gpu.memory", "1MB", "leaves nothing"),
    ],
)
def test_bad_figures_are_refused(key: str, value: str, message: str) -> None:
    """A key that does not exist, a value without its unit or out of range is named."""
    with pytest.raises(InputError, match=message):
        load_hardware(NODE, {key: value})


def _preset_text() -> str:
    import autohete

    return (Path(autohete.__file__).parent / "hardware" / "presets" / f"{NODE}.toml").read_text()


@pytest.mark.parametrize(
    ("mangle", "message"),
    [
        (lambda text: "[gpu\n" + text, "not valid TOML"),
        (lambda text: text.replace("[gpu.memory]", "[gpu.memry]"), r"gpu.memory: missing.*gpu.memry: unknown key"),
        (lambda text: text.replace('value = "24.8GB/s"', "value = 24.8"), r"links.h2d.bandwidth.value: 24.8 has no unit"),
        (lambda text: text.replace('value = "24.8GB/s"', "value = true"), r"links.h2d.bandwidth.value"),
        (lambda text: text.replace("value = 64", "value = 6.4"), r"cpu.cores.value"),
        (lambda text: text.replace("value = 64", 'value = "64"'), r"cpu.cores.value"),
        (lambda text: text[: len(text) // 2], "missing|not valid TOML"),
        (lambda text: "", "gpu: missing"),
    ],
)
def test_a_hardware_file_that_is_wrong_is_refused(mangle: object, message: str, tmp_path: Path) -> None:
    """Malformed, incomplete and mistyped files are refused with every fault and its path."""
    path = tmp_path / "node.toml"
    assert callable(mangle)
    path.write_text(mangle(_preset_text()))
    with pytest.raises(InputError, match=message):
        load_hardware(path)


def test_a_hardware_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A missing file, a folder, and bytes that are not text are errors about the file."""
    with pytest.raises(InputError, match="cannot be read"):
        load_hardware(tmp_path / "none.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        load_hardware(tmp_path / "folder.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load_hardware(tmp_path / "bytes.toml")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """Loading twice sees what was written in between."""
    path = tmp_path / "node.toml"
    path.write_text(_preset_text())
    before = load_hardware(path)
    path.write_text(_preset_text().replace('value = "24.8GB/s"', 'value = "25GB/s"'))
    assert before.h2d.bandwidth < load_hardware(path).h2d.bandwidth == 25e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stronghold:windw=3", "unknown flag of stronghold 'windw'.*did you mean 'window'"),
        ("stronghold:window", "takes a whole number"),
        ("stronghold:window=0", "at least 1"),
        ("stronghold:window=-3", "takes a whole number"),
        ("stronghold:window=3,window=4", "given twice"),
        ("autohete:priority=maybe", "is a switch"),
        ("resident:checkpointing=half", "choose one of best, full, selective, alternate, none"),
        ("patrickstar:gpu_share=101", "between 1 and 100"),
        ("patrickstar:chunk_size=0", "between 1 and 4096"),
        ("", "unknown policy ''"),
    ],
)
def test_bad_flags_are_refused(text: str, message: str) -> None:
    """A flag that does not exist, or a value that it does not take, is refused with what is allowed."""
    with pytest.raises(InputError, match=message):
        parse_policy(text)


def test_flags_are_read() -> None:
    """Switches take on and off, numbers and choices their values; the name keeps what was asked for."""
    policy = parse_policy(" stronghold:window=8,checkpointing=full ")
    assert policy.name == "stronghold:window=8,checkpointing=full"
    assert policy.system == StrongHold(window=8, checkpointing=Checkpointing.FULL)
    assert parse_policy("autohete:priority=off,fused_casts").system == AutoHete(priority=False, fused_casts=True)


@pytest.mark.parametrize("text", ["1.5", "-0.5", "1e9", "", "many", "9" * 5000])
def test_a_count_that_is_no_whole_number_is_refused(text: str) -> None:
    """On the command line as on an axis of a sweep, nothing is rounded, and the message stays short."""
    with pytest.raises(CoercionError, match="is not a whole number") as refused:
        app(["simulate", f"--batch-size={text}"], exit_on_error=False, print_error=False)
    assert len(str(refused.value)) < 120
    with pytest.raises((CoercionError, InputError), match=r"is not a whole number|has the value ''"):
        axis_of("batch-size", [text])


def test_a_count_may_be_written_with_a_fraction_of_zero() -> None:
    """As ranges of a sweep may write it."""
    assert axis_of("batch-size", ["2.0", "3"]).values == {"2": 2, "3": 3}


def test_contradictory_plans_are_refused() -> None:
    """A plan checks itself once, in its constructor."""
    with pytest.raises(InputError, match="only parameters that leave the GPU stay or move"):
        Route(stays_after_forward=True)
    with pytest.raises(InputError, match="cannot be a negative number"):
        Route("host", ahead=-1)
    with pytest.raises(InputError, match="nothing can rest in 'pinned'"):
        Route("pinned")
    valid = Plan("x", (UnitPlan(),) * 3)
    offloaded = UnitPlan(parameters=Route("host"))
    with pytest.raises(InputError, match="needs embedding"):
        replace(valid, units=(UnitPlan(),))
    with pytest.raises(InputError, match="embedding and head"):
        replace(valid, units=(UnitPlan(Activations.RECOMPUTE), offloaded, UnitPlan()))
    with pytest.raises(InputError, match="excludes offloaded parameters"):
        replace(valid, units=(UnitPlan(), offloaded, UnitPlan()), delayed=True)


def test_precisions_say_their_bytes() -> None:
    """Mixed precision keeps 2 + 2 + 12 bytes per parameter, fp32 4 + 4 + 8: both 16."""
    for precision in Precision:
        states = state_bytes(Optimizer.ADAMW, 1, (), mixed=precision.is_mixed)
        assert 2 * precision.element_bytes + states == 16
    assert math.isclose(Precision.BF16.element_bytes, 2)
