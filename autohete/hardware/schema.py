"""Hardware files: TOML in which every figure has a value with its unit, a source, a date and an optional range."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from autohete.errors import InputError, suggestion
from autohete.hardware.document import REPLACED, WITHOUT, Document, combine, figure_keys, find, follows, overridden, read_chain
from autohete.hardware.node import Cpu, Gpu, Hardware, Host, Interconnect, Link, Place, check_place_name, within_dram
from autohete.hardware.pcie import ASSUMED, DEFAULT, joined
from autohete.printable import shown
from autohete.quantities import EXAMPLES, UNITS, parse_quantity

#: What CPU work and copies reach of the DRAM, in words.
_USABLE = "host.memory_bandwidth x host.usable_share"


def _quantity(dimension: str) -> Callable[[object], object]:
    def read(value: object) -> object:
        if not isinstance(value, str):
            raise ValueError(f'{shown(value)} has no unit: write a string such as "{EXAMPLES[dimension]}"')
        try:
            return parse_quantity(value, dimension)
        except InputError as error:
            raise ValueError(str(error)) from None

    return read


def _text(dimension: str) -> WithJsonSchema:
    """Return the schema of a figure with a unit, which a file has as text."""
    units = "|".join(sorted(UNITS[dimension], key=len))
    pattern = rf"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*({units})\s*$"
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [EXAMPLES[dimension]]})


def _name_of_place(value: str) -> str:
    try:
        check_place_name(value)
    except InputError as error:
        raise ValueError(str(error)) from None
    return value


_Size = Annotated[float, BeforeValidator(_quantity("bytes")), Field(ge=1, le=2.0**60), _text("bytes")]
_Bandwidth = Annotated[float, BeforeValidator(_quantity("bandwidth")), Field(ge=1e3, le=1e18), _text("bandwidth")]
_Rate = Annotated[float, BeforeValidator(_quantity("rate")), Field(ge=1e6, le=1e21), _text("rate")]
_Time = Annotated[float, BeforeValidator(_quantity("time")), Field(ge=1e-12, le=10), _text("time")]
_Share = Annotated[float, Field(gt=0, le=1)]
_Capability = Annotated[float, Field(ge=5, le=20)]
_Cores = Annotated[float, Field(ge=0.1, le=1e6)]
_Count = Annotated[int, Field(ge=1, le=1_000_000)]
_KINDS: dict[str, object] = {
    "Size": _Size,
    "Bandwidth": _Bandwidth,
    "Rate": _Rate,
    "Time": _Time,
    "Share": _Share,
    "Capability": _Capability,
    "Cores": _Cores,
    "Count": _Count,
}
#: Faults that an error lists.
_MOST_FAULTS = 20
#: Stands for the name of a place in keys.
_ANY_PLACE = "NAME"
_PlaceName = Annotated[str, BeforeValidator(_name_of_place)]


class _Table(BaseModel):
    # Only HardwareFile validates. The tables in it need no validators of their own, whose building would delay every start.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


_Value = TypeVar("_Value", bound=float)


class Figure(_Table, Generic[_Value]):
    """One figure of a hardware file: the value, its source and date, and the range of published values."""

    value: _Value
    source: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}(-\d{2}){0,2}$")
    range: tuple[_Value, _Value] | None = None

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        """Name figures by what they measure, as their schema does."""
        return f"{cls.__name__}Of{next((name for name, kind in _KINDS.items() if kind is params[0]), 'Any')}"

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        if self.range is None:
            return self
        low, high = self.range
        if low > high:
            raise ValueError(f"range goes from {low:.9g} to {high:.9g}: write the lower end first")
        if not low <= self.value <= high:
            raise ValueError(f"range goes from {low:.9g} to {high:.9g} without the value {self.value:.9g}: correct one of them")
        return self


class GpuFigures(_Table):
    model: str
    memory: Figure[_Size]
    reserved_memory: Figure[_Size]
    peak_16bit: Figure[_Rate]
    peak_32bit: Figure[_Rate]
    peak_8bit: Figure[_Rate] | None = None
    memory_bandwidth: Figure[_Bandwidth]
    memory_efficiency: Figure[_Share]
    gemm_efficiency: Figure[_Share]
    gemm_efficiency_32bit: Figure[_Share] | None = None
    multiprocessors: Figure[_Count] | None = None
    compute_capability: Figure[_Capability] | None = None
    kernel_overhead: Figure[_Time]


class LinkFigures(_Table):
    bandwidth: Figure[_Bandwidth]
    duplex_bandwidth: Figure[_Bandwidth]
    pageable_bandwidth: Figure[_Bandwidth] | None = None
    far_bandwidth: Figure[_Bandwidth] | None = None
    all_gpus_bandwidth: Figure[_Bandwidth] | None = None
    all_gpus_duplex_bandwidth: Figure[_Bandwidth] | None = None
    latency: Figure[_Time]


class LinksFigures(_Table):
    h2d: LinkFigures
    d2h: LinkFigures


class HostFigures(_Table):
    memory: Figure[_Size]
    memory_bandwidth: Figure[_Bandwidth]
    usable_share: Figure[_Share]
    pinned_memory: Figure[_Size] | None = None
    memory_domains: Figure[_Count] | None = None
    numa: Literal["near", "far"] = "near"
    pinned_rounding: Literal["power-of-two", "none"] = "power-of-two"


class CpuFigures(_Table):
    model: str
    cores: Figure[_Count]
    update_bandwidth: Figure[_Bandwidth] | None = None
    elementwise_bandwidth: Figure[_Bandwidth] | None = None
    concurrent_share: Figure[_Share] | None = None
    launch: Figure[_Time] | None = None
    ranks_update_bandwidth: Figure[_Bandwidth] | None = None


class PlaceFigures(_Table):
    model: str
    beside: Literal["host", "gpu"] = "host"
    capacity: Figure[_Size]
    read_bandwidth: Figure[_Bandwidth]
    write_bandwidth: Figure[_Bandwidth]
    both_bandwidth: Figure[_Bandwidth] | None = None
    update_bandwidth: Figure[_Bandwidth] | None = None
    latency: Figure[_Time]


class InterconnectFigures(_Table):
    model: str
    path: Literal["direct", "host"] = "direct"
    gpus: Figure[_Count]
    bandwidth: Figure[_Bandwidth]
    latency: Figure[_Time]
    network_bandwidth: Figure[_Bandwidth] | None = None
    network_latency: Figure[_Time] | None = None
    concurrent_share: Figure[_Share] | None = None


class EmulationFigures(_Table):
    shared_cores: Figure[_Cores]


class HardwareFile(_Table):
    """A hardware TOML file with its bases. Strict: an unknown key, a missing figure or one without its unit is an error.

    Optional figures have neutral defaults, see :class:`Gpu`, :class:`Link`, :class:`Host`, :class:`Cpu` and
    :class:`Interconnect`. Without a table for the interconnect, PCIe is assumed (``pcie.py``). Unified hardware has no links
    and no host; all other hardware needs both, and an update bandwidth.
    """

    name: str = Field(pattern=r"^[\w.+-]+$", max_length=100)
    title: str = Field(pattern=r"^[^\x00-\x1f]+$", max_length=200)
    unified: bool = False
    gpu: GpuFigures
    links: LinksFigures | None = None
    host: HostFigures | None = None
    cpu: CpuFigures
    places: dict[_PlaceName, PlaceFigures] = Field(default_factory=dict)
    interconnect: InterconnectFigures | None = None
    emulation: EmulationFigures | None = None

    @classmethod
    def of(cls, document: object) -> Self:
        """Validate a raw document, after adding the default over PCIe.

        Raises:
            ValidationError: it is not the document of a hardware file.
        """
        # Through JSON: strict mode accepts a JSON array for a tuple, but not a Python list.
        return cls.model_validate_json(json.dumps(joined(document) if isinstance(document, Mapping) else document))

    def hardware(self) -> Hardware:
        """Convert to plain numbers in SI units."""
        gpu, cpu = self.gpu, self.cpu
        if (self.links is None or self.host is None or cpu.update_bandwidth is None) and not self.unified:
            raise InputError(f"{self.name} has no links, host or cpu.update_bandwidth: only unified hardware can do without")
        if gpu.reserved_memory.value >= gpu.memory.value:
            raise InputError(
                f"{self.name}: gpu.reserved_memory {gpu.reserved_memory.value:.0f} B leaves nothing of gpu.memory "
                f"{gpu.memory.value:.0f} B: lower it or raise gpu.memory"
            )
        notes: list[str] = []
        h2d, d2h, host = self._pool() if self.links is None or self.host is None else self._host(self.links, self.host, notes)
        dram = host.usable_bandwidth
        update, elementwise = _value(cpu.update_bandwidth) or dram, _value(cpu.elementwise_bandwidth)
        if not self.unified:
            update = within_dram("update_bandwidth", update, dram, _USABLE, notes)
        if elementwise is not None and not self.unified:
            elementwise = within_dram("elementwise_bandwidth", elementwise, dram, _USABLE, notes)
        return Hardware(
            name=self.name,
            gpu=Gpu(
                memory_bytes=round(gpu.memory.value),
                reserved_bytes=round(gpu.reserved_memory.value),
                peak_16bit_flops=gpu.peak_16bit.value,
                peak_32bit_flops=gpu.peak_32bit.value,
                memory_bandwidth=gpu.memory_bandwidth.value,
                memory_efficiency=gpu.memory_efficiency.value,
                gemm_efficiency=gpu.gemm_efficiency.value,
                kernel_overhead_seconds=gpu.kernel_overhead.value,
                gemm_efficiency_32bit=_value(gpu.gemm_efficiency_32bit),
                multiprocessors=_value(gpu.multiprocessors),
                peak_8bit_flops=_value(gpu.peak_8bit),
                compute_capability=_value(gpu.compute_capability),
            ),
            h2d=h2d,
            d2h=d2h,
            host=host,
            cpu=Cpu(
                cpu.cores.value,
                update,
                elementwise,
                1.0 if cpu.concurrent_share is None else cpu.concurrent_share.value,
                0.0 if cpu.launch is None else cpu.launch.value,
                _value(cpu.ranks_update_bandwidth),
            ),
            shared_cores=None if self.emulation is None else self.emulation.shared_cores.value,
            notes=tuple(notes),
            places=tuple(_place(name, figures) for name, figures in self.places.items()),
            interconnect=None if self.interconnect is None else _interconnect(self.interconnect),
            unified=self.unified,
        )

    def _pool(self) -> tuple[Link, Link, Host]:
        """Return the links and the host of unified hardware: no capacity of their own, and the rate of the pool."""
        bandwidth, share = self.gpu.memory_bandwidth.value, self.gpu.memory_efficiency.value
        link = Link(bandwidth, bandwidth, self.gpu.kernel_overhead.value)
        return link, link, Host(0, bandwidth, share)

    def _host(self, links: LinksFigures, host: HostFigures, notes: list[str]) -> tuple[Link, Link, Host]:
        """Return the links, and the memory domain that the GPU uses; add notes on rates that were not given."""
        pair = []
        for name, figures in (("links.h2d", links.h2d), ("links.d2h", links.d2h)):
            if (with_key := follows(figures.duplex_bandwidth.source)) is not None:
                notes.append(f"{name}.duplex_bandwidth follows {with_key}: {figures.duplex_bandwidth.value / 1e9:.3g} GB/s")
            pair.append(_link(figures) if host.numa == "near" else _far_link(self.name, name, figures))
        domains = 1 if host.memory_domains is None else host.memory_domains.value
        memory = Host(
            round(host.memory.value) // domains,
            host.memory_bandwidth.value / domains,
            host.usable_share.value,
            None if host.pinned_memory is None else round(host.pinned_memory.value) // domains,
            domains,
            host.pinned_rounding == "power-of-two",
        )
        return pair[0], pair[1], memory


def known_keys(places: Sequence[str] = (_ANY_PLACE,)) -> tuple[list[str], list[str]]:
    """Return the dotted keys of all figures that a file may have, and those of all names of products (``gpu.model``).

    Args:
        places: the names of its places.
    """
    figures: list[str] = []
    models: list[str] = []

    def walk(table: type[BaseModel], prefix: str) -> None:
        for name, field in table.model_fields.items():
            kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
            inner = next((kind for kind in kinds if issubclass(kind, _Table)), None)
            if inner is not None and issubclass(inner, Figure):
                figures.append(prefix + name)
            elif inner is PlaceFigures:
                for place in places:
                    walk(inner, f"{prefix}{name}.{place}.")
            elif inner is not None:
                walk(inner, f"{prefix}{name}.")
            elif prefix:
                models.append(prefix + name)

    walk(HardwareFile, "")
    return figures, models


def _place(name: str, figures: PlaceFigures) -> Place:
    return Place(
        name,
        round(figures.capacity.value),
        figures.read_bandwidth.value,
        figures.write_bandwidth.value,
        figures.latency.value,
        _value(figures.both_bandwidth),
        figures.beside,
        _value(figures.update_bandwidth),
    )


def _interconnect(figures: InterconnectFigures) -> Interconnect:
    return Interconnect(
        figures.gpus.value,
        figures.bandwidth.value,
        figures.latency.value,
        _value(figures.network_bandwidth),
        0.0 if figures.network_latency is None else figures.network_latency.value,
        1.0 if figures.concurrent_share is None else figures.concurrent_share.value,
        figures.path == "host",
        figures.bandwidth.source.startswith(ASSUMED),
    )


def _link(figures: LinkFigures) -> Link:
    bandwidth, duplex = figures.bandwidth.value, figures.duplex_bandwidth.value
    # A direction cannot be faster with both in use than alone; an override that lowers only `bandwidth` must keep that true.
    return Link(
        bandwidth,
        min(bandwidth, duplex),
        figures.latency.value,
        _value(figures.pageable_bandwidth),
        _value(figures.all_gpus_bandwidth),
        _value(figures.all_gpus_duplex_bandwidth),
    )


def _far_link(hardware: str, name: str, figures: LinkFigures) -> Link:
    """Return the link to memory of another domain: its other rates keep their proportion, but are no faster than it."""
    near = _link(figures)
    if figures.far_bandwidth is None:
        raise InputError(
            f'{hardware}: host.numa is "far", but there is no {name}.far_bandwidth: give it, or set host.numa to "near"'
        )
    far = figures.far_bandwidth.value
    factor = far / near.bandwidth
    return replace(
        near,
        far=True,
        bandwidth=far,
        duplex_bandwidth=near.duplex_bandwidth * factor,
        pageable_bandwidth=None if near.pageable_bandwidth is None else min(far, near.pageable_bandwidth),
    )


def _value(figure: Figure[_Value] | None) -> _Value | None:
    return None if figure is None else figure.value


# --- reading ------------------------------------------------------------------------------------------------------


def read_hardware(source: str | Path, overrides: Mapping[str, str] | None = None) -> HardwareFile:
    """Read the preset or file ``source``, with some figures replaced.

    Args:
        source: a preset's name (:func:`preset_names`), the path of a TOML file, or that of a measured profile (.json), whose
            machine is meant.
        overrides: dotted key -> text with unit, for example ``{"links.h2d.bandwidth": "50GB/s"}``.

    A file may name a ``base``: a preset, or a file by its path from this one. It then has all that the base has, except the
    figures that it gives itself, each as a whole: with its source, date and range. Rates of a link follow its bandwidth. What
    ``without`` lists is left out of the base: dotted keys of tables or figures.

    Raises:
        InputError: no such preset or file, not TOML, a file that is based on itself, or missing, unknown or absurd figures (up
            to 20 of them listed in one message).
    """
    return _validated(read_chain(str(source)), overrides or {})


def _validated(chain: Sequence[Document], overrides: Mapping[str, str]) -> HardwareFile:
    document = overridden(combine(chain), overrides) if overrides else combine(chain)
    try:
        checked = HardwareFile.of(document)
    except ValidationError as error:
        listed = error.errors(include_url=False)[:_MOST_FAULTS]
        more = [f"and {error.error_count() - len(listed):,} more"] if error.error_count() > len(listed) else []
        faults = "; ".join([*(_fault(chain, fault) for fault in listed), *more, *_of_pool(chain, document)])
        raise InputError(f"hardware {chain[0].label!r}: {faults}") from error
    if wrong := _of_pool(chain, document):
        raise InputError(f"hardware {chain[0].label!r}: {'; '.join(wrong)}")
    return checked


def _of_pool(chain: Sequence[Document], document: Mapping[str, Any]) -> list[str]:
    """Describe what is missing, or what unified hardware cannot have."""
    if document.get("unified") is not True:
        needed = ("links", "host", *(["cpu.update_bandwidth"] if find(document, "cpu") is not None else []))
        missing = (key for key in needed if find(document, key) is None)
        return [_fault(chain, {"loc": key.split("."), "type": "missing"}) for key in missing]
    given = [key for key in ("links", "host") if key in document]
    cure = f"write {WITHOUT} = {json.dumps(given)}" if len(chain) > 1 else "remove it"
    return [f"{key}: unified hardware has one pool of memory, gpu.memory, and copies nothing: {cure}" for key in given]


def _fault(chain: Sequence[Document], fault: Any) -> str:
    """Describe a fault: its key, what is wrong, and the base that it is in if it is not in the document itself."""
    key = ".".join(map(str, fault["loc"]))
    home = _home(chain, key if fault["type"] != "missing" else key.rpartition(".")[0])
    return f"{key}: {_reason(fault)}" + (f" (in its base {home!r})" if home not in (None, chain[0].label) else "")


def _home(chain: Sequence[Document], key: str) -> str | None:
    """Return the label of the document that gives what the chain has at ``key``; None if no one does."""
    return next((document.label for document in chain if find(document.tables, key) is not None), None)


def _reason(fault: Any) -> str:
    name = fault["loc"][-1] if fault["loc"] else ""  # of a text that is no JSON, such as half a surrogate pair
    if "range" in fault["loc"] and fault["type"] in ("missing", "too_long", "tuple_type"):
        return f"a range has two ends, each written as the value is, the lower one first (given: {shown(fault['input'])})"
    if fault["type"] == "missing":
        return "missing: " + _MISSING.get(name, "give it a table with value, source and date")
    if fault["type"] == "extra_forbidden":
        key = ".".join(map(str, fault["loc"]))
        if key == "nvme":
            return "unknown key: drives are a place: write [places.nvme] and [places.nvme.capacity]"
        if key in REPLACED:
            return f"unknown key: {REPLACED[key]}"
        place = str(fault["loc"][1]) if key.startswith("places.") else _ANY_PLACE
        return f"unknown key: remove it or correct its spelling{suggestion(key, _keys(HardwareFile, place))}"
    if fault["type"] == "model_type":
        return f"not a table (given: {shown(fault['input'])}): give one; that of a figure has value, source and date"
    if name in _MISSING and fault["type"].startswith("string_"):
        return f"{_MISSING[name]} (given: {shown(fault['input'])})" if fault["input"] else "empty: " + _MISSING[name]
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{message} (given: {shown(fault['input'])})" if fault["type"] != "value_error" else message


def _keys(model: type[BaseModel], place: str, prefix: str = "") -> Iterator[str]:
    """All dotted keys that a file may have: tables, figures, and what figures consist of."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                named = f"{place}." if kind is PlaceFigures else ""
                yield from _keys(kind, place, f"{prefix}{name}.{named}")


#: The cure for entries other than figures that are missing or malformed.
_MISSING = {
    "value": "give the figure, with its unit if it has one",
    "source": "name the origin of the value; a value that differs from the base needs its own source",
    "date": 'give the date of the source or of the measurement, such as "2026-11"',
    "name": "give a name without blanks, or a base",
    "title": "give one line that describes the hardware, or a base",
    "model": "give the name of the product",
}


def load_hardware(source: str | Path, overrides: Mapping[str, str] | None = None) -> Hardware:
    """Read hardware as :func:`read_hardware` does, and convert it to plain numbers."""
    return read_hardware(source, overrides).hardware()


@dataclass(frozen=True, slots=True)
class UncertainFigure:
    """A figure for which published values differ: its dotted key, range and value in SI, and the SI unit as text."""

    key: str
    low: float
    value: float
    high: float
    unit: str

    def text(self, number: float) -> str:
        """Format ``number`` as :func:`read_hardware` accepts it."""
        return f"{number:.9g}{self.unit}"


@dataclass(frozen=True, slots=True)
class WrittenFigure:
    """A figure as its file has it.

    Args:
        key: dotted, such as ``gpu.memory``.
        value: a number, or text with a unit.
        range: both ends of the published values, as ``value``; None without a range.
        source, date: where the value comes from, and of when that is.
        home: the preset or file that gives it: the requested one, or one of its bases; or "the default over PCIe".
    """

    key: str
    value: str | float
    range: tuple[str | float, str | float] | None
    source: str
    date: str
    home: str


def written_figures(source: str | Path) -> list[WrittenFigure]:
    """Return all figures of the preset or file ``source`` and its bases.

    Raises:
        InputError: as :func:`read_hardware`.
    """
    chain = read_chain(str(source))
    _validated(chain, {})
    document = joined(combine(chain))
    figures = []
    for key in figure_keys(document):
        figure = find(document, key)
        ends = tuple(figure["range"]) if "range" in figure else None
        home = _home(chain, key) or DEFAULT
        figures.append(WrittenFigure(key, figure["value"], ends, figure["source"], figure["date"], home))
    return figures


def left_out(source: str | Path) -> list[str]:
    """Return, for the preset or file ``source`` and each of its bases, a line on what it leaves out of its base for good.

    Raises:
        InputError: the documents cannot be read, see :func:`read_hardware`.
    """
    chain = read_chain(str(source))
    combined = combine(chain)
    lines = []
    for document, base in pairwise(chain):
        keys = [key for key in document.without if find(combined, key) is None]
        lines += [f"without {', '.join(keys)} of {base.label}"] if keys else []
    return lines


def uncertain_figures(source: str | Path) -> list[UncertainFigure]:
    """Return the figures of ``source`` that have a range."""
    uncertain = []
    for figure in written_figures(source):
        if figure.range is not None:
            (low, unit), (value, _), (high, _) = map(_in_si, (figure.range[0], figure.value, figure.range[1]))
            uncertain.append(UncertainFigure(figure.key, low, value, high, unit))
    return uncertain


def _in_si(written: str | float) -> tuple[float, str]:
    """Convert a figure as written to SI; return it with the SI unit."""
    if not isinstance(written, str):
        return float(written), ""
    for dimension, unit in (("bytes", "B"), ("bandwidth", "B/s"), ("rate", "FLOP/s"), ("time", "s")):
        try:
            return parse_quantity(written, dimension), unit
        except InputError:
            continue
    raise InputError(f"{written!r} is not a quantity")
