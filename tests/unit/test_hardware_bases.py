"""Hardware files that take over figures of another: what they change, what follows from that, and what is refused."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hardware_files import NODE, OWN, own, write

from autohete.errors import InputError
from autohete.hardware import WrittenFigure, load_hardware, preset_names, read_hardware, uncertain_figures, written_figures
from autohete.hardware.pcie import DEFAULT, JOIN
from autohete.hardware.schema import known_keys
from autohete.hardware.template import new_hardware_text

FIGURES = {name: written_figures(name) for name in preset_names()}


def figures(source: str | Path) -> dict[str, WrittenFigure]:
    """All figures by key."""
    return {figure.key: figure for figure in written_figures(source)}


@pytest.mark.parametrize("name", preset_names())
def test_a_file_that_only_names_its_base_equals_it(name: str, tmp_path: Path) -> None:
    """Over any number of files in between, a base's figures are those of the base."""
    write(tmp_path / "a.toml", "", name)
    (tmp_path / "deeper").mkdir()
    write(tmp_path / "deeper" / "b.toml", "", "../a.toml")
    last = write(tmp_path / "c.toml", "", "deeper/b.toml")
    assert read_hardware(last) == read_hardware(name)
    assert written_figures(last) == FIGURES[name]
    assert uncertain_figures(last) == uncertain_figures(name)


@given(st.sampled_from(sorted(FIGURES)), st.data())
def test_a_figure_of_ones_own_changes_only_itself(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    """A figure replaces that of the base with its source, date and range; only rates of a link follow its bandwidth."""
    figure = data.draw(st.sampled_from([figure for figure in FIGURES[name] if figure.home != DEFAULT]))
    ends = [end for other in FIGURES[name] if other.key == figure.key for end in other.range or (other.value,)]
    value = data.draw(st.sampled_from(ends))
    path = tmp_path_factory.mktemp("hardware") / "own.toml"
    before, after = figures(name), figures(write(path, own(figure.key, value), name))
    assert after[figure.key] == WrittenFigure(figure.key, value, None, "measured", "2026-11", str(path))
    link, _, last = figure.key.rpartition(".")
    followers = {f"{link}.duplex_bandwidth", f"{link}.pageable_bandwidth"} if last == "bandwidth" else set()
    followers |= {f"{JOIN}.bandwidth"} if figure.key.startswith("links.") else set()  # if it is the default over PCIe
    assert {key for key in before if after[key] != before[key]} <= {figure.key, *followers}
    assert before.keys() == after.keys()


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_links_rates_follow_its_bandwidth_as_with_an_override(direction: str, tmp_path: Path) -> None:
    """A file that changes a bandwidth is the base with that override; ranges scale, and sources say what was done."""
    key = f"links.{direction}"
    path = write(tmp_path / "fast.toml", own(f"{key}.bandwidth", "51GB/s"))
    assert load_hardware(path) == load_hardware(NODE, {f"{key}.bandwidth": "51GB/s"})
    plain, fast = load_hardware(NODE), load_hardware(path)
    factor = 51e9 / getattr(plain, direction).bandwidth
    duplex = figures(path)[f"{key}.duplex_bandwidth"]
    assert duplex.source.startswith(f"in proportion to {key}.bandwidth; before: derived")
    before, after = ({f.key: f for f in uncertain_figures(source)}[f"{key}.duplex_bandwidth"] for source in (NODE, path))
    assert [after.low, after.value, after.high] == pytest.approx([factor * x for x in (before.low, before.value, before.high)])
    assert replace(fast, **{direction: getattr(plain, direction)}, notes=(), interconnect=plain.interconnect) == plain
    assert fast.notes == (
        f"{key}.duplex_bandwidth follows {key}.bandwidth: {getattr(fast, direction).duplex_bandwidth / 1e9:.3g} GB/s",
    )


def test_a_rate_given_beside_the_bandwidth_does_not_follow(tmp_path: Path) -> None:
    """The rate that a file gives is its own; the one that it leaves out follows, from the nearest base."""
    path = write(tmp_path / "a.toml", own("links.h2d.bandwidth", "51GB/s") + own("links.h2d.duplex_bandwidth", "30GB/s"))
    found = load_hardware(path).h2d
    assert (found.bandwidth, found.duplex_bandwidth) == (51e9, 30e9)
    assert found.pageable_bandwidth == pytest.approx(44e9)  # 22 of 25.5
    again = load_hardware(write(tmp_path / "b.toml", own("links.h2d.bandwidth", "102GB/s"), "a.toml")).h2d
    assert (again.duplex_bandwidth, again.pageable_bandwidth) == pytest.approx((60e9, 88e9))


def test_a_file_adds_tables_that_its_base_lacks(tmp_path: Path) -> None:
    """Optional figures and whole tables come on top."""
    assumed = load_hardware(NODE).interconnect
    assert assumed is not None
    assert assumed.assumed
    join = 'interconnect.model = "PCIe"\n' + "".join(
        own(f"interconnect.{key}", value) for key, value in (("gpus", 2), ("bandwidth", "20GB/s"), ("latency", "10us"))
    )
    found = load_hardware(write(tmp_path / "two.toml", f'name = "two"\n{join}' + own("host.pinned_memory", "32GiB")))
    assert found.name == "two"
    assert found.interconnect is not None
    assert (found.interconnect.gpus, found.interconnect.assumed) == (2, False)
    assert found.host.pinned_bytes == 32 * 2**30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[gpu.memory]\nvalue = "48GiB"',
            r"gpu.memory.source: missing: name the origin .*; gpu.memory.date: missing: give the date",
        ),
        (f"[gpu.memory]\n{OWN}", "gpu.memory.value: missing: give the figure"),
        (own("gpu.memory", "24GiB") + 'range = ["32GiB", "48GiB"]', "range goes from .* without the value 2.57698038e.10: "),
        (own("gpu.memory", "24GiB") + 'range = ["24GiB"]', r"memory.range.1: a range has two ends, .*given: \['24GiB'\]"),
        (own("gpu.memory", "24GiB") + 'range = "24GiB"', r"memory.range: a range has two ends, .*given: '24GiB'"),
        (own("gpu.memory", "24GiB").replace("2026-11", "today"), "date: give the date .* such as \"2026-11\" .given: 'today'"),
        ('name = "my node"', "name: give a name without blanks, or a base .given: 'my node'"),
        ('[gpu.memory]\nvalue = "48GiB"\nsource = ""\ndate = "2026"', "gpu.memory.source: empty: name the origin"),
        (own("gpu.memry", "48GiB"), "gpu.memry: unknown key: remove it or correct its spelling; did you mean 'gpu.memory'?"),
        (own("gpu", "48GiB"), "gpu.value: unknown key"),
        (own("links.h2d.bandwidth", 51), "links.h2d.bandwidth.value: 51 has no unit"),
        (own("links.h2d.bandwidth", "51"), "links.h2d.bandwidth.value: '51' has no unit"),
        (f"[a{'.a' * 20}]\nx = 1", "nests tables more than 8 deep"),
        (f"[a{'.a' * 2000}]\nx = 1", "has too many parts"),
        ("links = 3", r"links: not a table \(given: 3\)"),
        ('gpu.memory = "48GiB"', r"gpu.memory: not a table \(given: '48GiB'\): give one; that of a figure has value, source"),
    ],
)
def test_a_figure_of_ones_own_keeps_to_the_rules(text: str, message: str, tmp_path: Path) -> None:
    """Over a base, too, a figure needs its unit, source and date; no fault is said to be in the base."""
    with pytest.raises(InputError, match=message) as refusal:
        load_hardware(write(tmp_path / "own.toml", text))
    assert "in its base" not in str(refusal.value)


def test_a_date_needs_no_quotes(tmp_path: Path) -> None:
    """A date as TOML has it is read, checked and shown as one in quotes is."""
    quoted = own("gpu.memory", "48GiB").replace("2026-11", "2026-11-22")
    found = [
        figures(write(tmp_path / "node.toml", text))["gpu.memory"].date
        for text in (quoted, quoted.replace('"2026-11-22"', "2026-11-22"))
    ]
    assert found == ["2026-11-22", "2026-11-22"]


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    """Some editors begin a file with one."""
    file = tmp_path / "node.toml"
    file.write_text(f'base = "{NODE}"', encoding="utf-8-sig")
    assert load_hardware(file) == load_hardware(NODE)


def test_a_fault_in_a_base_is_said_to_be_there(tmp_path: Path) -> None:
    """Errors name the file to correct."""
    write(tmp_path / "a.toml", '[gpu.memory]\nvalue = "48GiB"')
    path = write(tmp_path / "b.toml", "", "a.toml")
    with pytest.raises(
        InputError, match=r"b.toml': gpu.memory.source: missing: .* \(in its base '.*a.toml'\); gpu.memory.date"
    ):
        load_hardware(path)


def test_a_base_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """Unknown presets, missing files and what is not text are errors that name the file and its base."""
    path = tmp_path / "node.toml"
    with pytest.raises(InputError, match=r"base of hardware '.*node.toml': unknown hardware 'rtx4090-work'.*did you mean"):
        load_hardware(write(path, "", "rtx4090-work"))
    with pytest.raises(InputError, match=r"base of hardware '.*node.toml': .*other.toml' cannot be read: No such file"):
        load_hardware(write(path, "", "other.toml"))
    path.write_text("base = 3")
    with pytest.raises(InputError, match=r"base of hardware '.*node.toml': base is 3: give a preset's name or"):
        load_hardware(path)
    path.write_text("base = 'other.toml'")
    (tmp_path / "other.toml").write_text("[gpu")
    with pytest.raises(InputError, match=r"base of hardware '.*node.toml': hardware file '.*other.toml' is not valid TOML"):
        load_hardware(path)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_file_based_on_itself_is_refused_by_name(length: int, tmp_path: Path) -> None:
    """A cycle of any length is shown from the file asked for, also if it is written in other ways."""
    paths = [tmp_path / f"{i}.toml" for i in range(length)]
    for i, path in enumerate(paths):
        write(path, "", f"../{tmp_path.name}/{(i + 1) % length}.toml")
    arrows = " -> ".join(rf"\S*/{i % length}\.toml" for i in range(length + 1))
    with pytest.raises(InputError, match=rf"0.toml' is based on itself: {arrows}; remove 'base' from one"):
        load_hardware(paths[0])


def test_the_example_of_the_documentation_loads(tmp_path: Path) -> None:
    """The file that docs/tutorials/own_hardware.md shows is its base with other memory and another name."""
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "own_hardware.md").read_text()
    (example,) = re.findall(r"^```toml\n((?!\[over\]).*?)^```", page, re.DOTALL | re.MULTILINE)
    path = tmp_path / "my-workstation.toml"
    path.write_text(example)
    expected = load_hardware(NODE, {"host.memory": "64GiB"})
    assert load_hardware(path) == replace(expected, name="my-workstation")


@pytest.mark.parametrize("name", preset_names())
def test_a_new_file_is_its_base_until_figures_are_filled_in(name: str, tmp_path: Path) -> None:
    """As written it is the base under another name; every figure in it can be given as it stands but for source and date."""
    path = tmp_path / "new one.toml"
    template = new_hardware_text(str(path), name)
    path.write_text(template)
    document = read_hardware(path)
    assert (document.name, document.title) == ("new-one", f"Based on {name}")
    assert load_hardware(path) == replace(load_hardware(name), name="new-one")
    filled = template.replace('source = ""', 'source = "measured"').replace('date = ""', 'date = "2026-11"')
    tables = re.findall(r"^# base: (.*)\n((?:#.*\n)+)", filled, re.MULTILINE)
    assert len(tables) == len(known_keys()[0])
    path.write_text(f'base = "{name}"\n' + "".join(table.replace("#", "") for before, table in tables if before != "none"))
    assert load_hardware(path) == load_hardware(name)
    assert {figure.home for figure in written_figures(path)} <= {str(path), DEFAULT}


def test_a_new_file_finds_a_base_in_another_folder(tmp_path: Path) -> None:
    """A base given by its path is named by its path from the new file, whatever the working directory is."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    base = write(tmp_path / "a" / "base.toml", own("gpu.memory", "40GiB"))
    path = tmp_path / "b" / "new.toml"
    path.write_text(new_hardware_text(str(path), str(base)))
    assert 'base = "./../a/base.toml"' in path.read_text()
    assert load_hardware(path).gpu.memory_bytes == 40 * 2**30


def test_a_chain_of_bases_has_an_end(tmp_path: Path) -> None:
    """A file based on another, and that on the next, is refused after 16 of them, however many there are."""
    for number in range(300):
        (tmp_path / f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    begin = time.process_time()
    with pytest.raises(InputError, match=r"0.toml' has more than 16 bases"):
        read_hardware(tmp_path / "0.toml")
    assert time.process_time() - begin < 1
    write(tmp_path / "15.toml", "")
    assert read_hardware(tmp_path / "0.toml") == read_hardware(NODE)


def test_an_error_is_no_longer_than_its_use(tmp_path: Path) -> None:
    """Of many faults 20 are listed, and the others counted; suggestions for them take no time."""
    path = write(tmp_path / "many.toml", "".join(f"key{number} = 1\n" for number in range(20_000)))
    begin = time.process_time()
    with pytest.raises(InputError, match=r"key19: unknown key.*; and 19,980 more$") as refusal:
        read_hardware(path)
    assert time.process_time() - begin < 5
    assert len(str(refusal.value)) < 5000
