"""Hardware files: TOML in which every figure has a value with its unit, a source, a date and an optional range."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from autohete.errors import InputError, unknown_name
from autohete.hardware.node import Cpu, Gpu, Hardware, Host, Interconnect, Link, Nvme
from autohete.quantities import EXAMPLES, parse_quantity


def _quantity(dimension: str) -> Callable[[object], object]:
    def read(value: object) -> object:
        if not isinstance(value, str):
            raise ValueError(f'{value!r} has no unit: write a string such as "{EXAMPLES[dimension]}"')
        try:
            return parse_quantity(value, dimension)
        except InputError as error:
            raise ValueError(str(error)) from None

    return read


_Size = Annotated[float, BeforeValidator(_quantity("bytes")), Field(ge=1, le=2.0**60)]
_Bandwidth = Annotated[float, BeforeValidator(_quantity("bandwidth")), Field(ge=1e3, le=1e18)]
_Rate = Annotated[float, BeforeValidator(_quantity("rate")), Field(ge=1e6, le=1e21)]
_Time = Annotated[float, BeforeValidator(_quantity("time")), Field(ge=1e-12, le=10)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Cores = Annotated[float, Field(ge=0.1, le=1e6)]
_Count = Annotated[int, Field(ge=1, le=1_000_000)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_Value = TypeVar("_Value", bound=float)


class Figure(_Table, Generic[_Value]):
    """One figure of a hardware file: the value, its source and date, and the range of published values."""

    value: _Value
    source: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}(-\d{2}){0,2}$")
    range: tuple[_Value, _Value] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.range is not None and not self.range[0] <= self.range[1]:
            raise ValueError(f"range goes from {self.range[0]} to {self.range[1]}: write the lower end first")
        return self


class GpuFigures(_Table):
    model: str
    memory: Figure[_Size]
    reserved_memory: Figure[_Size]
    peak_16bit: Figure[_Rate]
    peak_32bit: Figure[_Rate]
    memory_bandwidth: Figure[_Bandwidth]
    memory_efficiency: Figure[_Share]
    gemm_efficiency: Figure[_Share]
    gemm_efficiency_32bit: Figure[_Share] | None = None
    multiprocessors: Figure[_Count] | None = None
    kernel_overhead: Figure[_Time]


class LinkFigures(_Table):
    bandwidth: Figure[_Bandwidth]
    duplex_bandwidth: Figure[_Bandwidth]
    pageable_bandwidth: Figure[_Bandwidth] | None = None
    latency: Figure[_Time]


class LinksFigures(_Table):
    h2d: LinkFigures
    d2h: LinkFigures


class HostFigures(_Table):
    memory: Figure[_Size]
    memory_bandwidth: Figure[_Bandwidth]
    usable_share: Figure[_Share]
    pinned_memory: Figure[_Size] | None = None


class CpuFigures(_Table):
    model: str
    cores: Figure[_Count]
    update_bandwidth: Figure[_Bandwidth]
    elementwise_bandwidth: Figure[_Bandwidth] | None = None
    concurrent_share: Figure[_Share] | None = None
    launch: Figure[_Time] | None = None
    ranks_update_bandwidth: Figure[_Bandwidth] | None = None


class NvmeFigures(_Table):
    model: str
    capacity: Figure[_Size]
    read_bandwidth: Figure[_Bandwidth]
    write_bandwidth: Figure[_Bandwidth]
    latency: Figure[_Time]


class InterconnectFigures(_Table):
    model: str
    gpus: Figure[_Count]
    bandwidth: Figure[_Bandwidth]
    latency: Figure[_Time]
    network_bandwidth: Figure[_Bandwidth] | None = None
    network_latency: Figure[_Time] | None = None


class EmulationFigures(_Table):
    shared_cores: Figure[_Cores]


class HardwareFile(_Table):
    """A hardware TOML file. Strict: an unknown key, a missing figure or a figure without its unit is an error.

    Optional figures have neutral defaults, see :class:`Gpu`, :class:`Link`, :class:`Host` and :class:`Cpu`.
    """

    name: str = Field(pattern=r"^[\w.+-]+$", max_length=100)
    title: str = Field(pattern=r"^[^\x00-\x1f]+$", max_length=200)
    gpu: GpuFigures
    links: LinksFigures
    host: HostFigures
    cpu: CpuFigures
    nvme: NvmeFigures | None = None
    interconnect: InterconnectFigures | None = None
    emulation: EmulationFigures | None = None

    def hardware(self) -> Hardware:
        """Convert to plain numbers in SI units."""
        gpu, host, cpu = self.gpu, self.host, self.cpu
        if gpu.reserved_memory.value >= gpu.memory.value:
            raise InputError(
                f"{self.name}: gpu.reserved_memory {gpu.reserved_memory.value:.0f} B leaves nothing of gpu.memory "
                f"{gpu.memory.value:.0f} B: lower it or raise gpu.memory"
            )
        dram = host.memory_bandwidth.value * host.usable_share.value
        notes: list[str] = []
        update = _within_dram("update_bandwidth", cpu.update_bandwidth.value, dram, notes)
        elementwise = _value(cpu.elementwise_bandwidth)
        if elementwise is not None:
            elementwise = _within_dram("elementwise_bandwidth", elementwise, dram, notes)
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
            ),
            h2d=_link(self.links.h2d),
            d2h=_link(self.links.d2h),
            host=Host(
                round(host.memory.value),
                host.memory_bandwidth.value,
                host.usable_share.value,
                None if host.pinned_memory is None else round(host.pinned_memory.value),
            ),
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
            nvme=None if self.nvme is None else _nvme(self.nvme),
            interconnect=None if self.interconnect is None else _interconnect(self.interconnect),
        )


def _nvme(figures: NvmeFigures) -> Nvme:
    return Nvme(
        round(figures.capacity.value),
        figures.read_bandwidth.value,
        figures.write_bandwidth.value,
        figures.latency.value,
    )


def _interconnect(figures: InterconnectFigures) -> Interconnect:
    return Interconnect(
        figures.gpus.value,
        figures.bandwidth.value,
        figures.latency.value,
        _value(figures.network_bandwidth),
        0.0 if figures.network_latency is None else figures.network_latency.value,
    )


def _link(figures: LinkFigures) -> Link:
    bandwidth, duplex = figures.bandwidth.value, figures.duplex_bandwidth.value
    # A direction cannot be faster with both in use than alone; an override that lowers only `bandwidth` must keep that true.
    return Link(bandwidth, min(bandwidth, duplex), figures.latency.value, _value(figures.pageable_bandwidth))


def _within_dram(name: str, rate: float, dram: float, notes: list[str]) -> float:
    """Return the rate of a CPU kernel, limited to the DRAM's; add a note if the limit applies."""
    if rate <= dram * (1 + 1e-9):
        return rate
    notes.append(
        f"cpu.{name} {rate / 1e9:g} GB/s is more than the DRAM allows; using {dram / 1e9:g} GB/s, which is "
        "host.memory_bandwidth x host.usable_share"
    )
    return dram


def _value(figure: Figure[_Value] | None) -> _Value | None:
    return None if figure is None else figure.value


# --- reading ------------------------------------------------------------------------------------------------------


def preset_names() -> list[str]:
    """Return the names of the hardware presets that come with the package."""
    folder = resources.files("autohete.hardware") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _read(source: str) -> dict[str, Any]:
    """Return the raw document of a preset, by name, or of a file, by path."""
    preset = resources.files("autohete.hardware") / "presets" / f"{source}.toml"
    try:
        if source in preset_names():
            text = preset.read_text(encoding="utf-8")
        elif source.endswith(".toml") or "/" in source:
            text = Path(source).read_text(encoding="utf-8")
        else:
            raise unknown_name("hardware", source, [*preset_names(), "FILE.toml"])
        return tomllib.loads(text)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"hardware file {source!r} cannot be read: {reason}; give a preset or a TOML file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"hardware file {source!r} is not UTF-8 text: give a TOML file") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number of thousands of digits, a NUL in the path
        raise InputError(f"hardware file {source!r} is not valid TOML: {str(error)[:200]}") from error


#: The one figure that can be set where a file leaves it out: a limit of the system, not of the machine.
PINNED_MEMORY = "host.pinned_memory"


def _override(document: dict[str, Any], key: str, text: str) -> None:
    """Set the value of figure ``key`` (such as ``links.h2d.bandwidth``) to ``text``; its other entries stay."""
    node: Any = document
    for part in key.split("."):
        if key == PINNED_MEMORY and part == "pinned_memory" and isinstance(node, dict):
            node.setdefault(part, {"value": text, "source": "an override", "date": date.today().isoformat()})
        if not isinstance(node, dict) or part not in node:
            raise unknown_name("hardware figure", key, [*figure_keys(document), PINNED_MEMORY])
        node = node[part]
    if not (isinstance(node, dict) and "value" in node):
        raise unknown_name("hardware figure", key, figure_keys(document))
    number: object = text
    if not isinstance(node["value"], str):
        try:
            number = int(text) if text.isdecimal() and len(text) < 20 else float(text)
        except ValueError:
            raise InputError(f"{key} is a plain number, not {text!r}: write it such as {node['value']}") from None
    node["value"] = number


#: Figures of a link that keep their proportion to its bandwidth if only the bandwidth is changed.
_FOLLOW = ("duplex_bandwidth", "pageable_bandwidth")


def _followers(document: dict[str, Any], overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the figures that scale with a link's bandwidth, unless overridden: a faster link is also faster in duplex."""
    found: dict[str, str] = {}
    for direction in ("h2d", "d2h"):
        link = f"links.{direction}"
        text = overrides.get(f"{link}.bandwidth")
        figures = document.get("links", {}).get(direction, {})
        if text is None or not isinstance(figures, dict):
            continue
        try:
            factor = parse_quantity(text, "bandwidth") / parse_quantity(figures["bandwidth"]["value"], "bandwidth")
            for name in _FOLLOW:
                if name in figures:
                    before = parse_quantity(figures[name]["value"], "bandwidth")
                    found[f"{link}.{name}"] = f"{before * factor:.17g}B/s"
        except (InputError, KeyError, TypeError):
            continue  # reading the document reports the fault
    return found


def figure_keys(document: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of all figures in a raw document."""

    def walk(node: Mapping[str, Any], prefix: str) -> list[str]:
        found: list[str] = []
        for key, child in node.items():
            if isinstance(child, Mapping):
                found += [f"{prefix}{key}"] if "value" in child else walk(child, f"{prefix}{key}.")
        return found

    return walk(document, "")


def read_hardware(source: str | Path, overrides: Mapping[str, str] | None = None) -> HardwareFile:
    """Read the preset or file ``source``, with some figures replaced.

    Args:
        source: a preset's name (:func:`preset_names`) or the path of a TOML file.
        overrides: dotted key -> text with unit, for example ``{"links.h2d.bandwidth": "50GB/s"}``.

    Raises:
        InputError: no such preset or file, not TOML, or missing, unknown or absurd figures (all listed in one message).
    """
    document = copy.deepcopy(_read(str(source)))
    overrides = dict(overrides or {})
    for key, text in (_followers(document, overrides) | overrides).items():
        _override(document, key, text)
    try:
        # Through JSON: strict mode accepts a JSON array for a tuple, but not a Python list.
        return HardwareFile.model_validate_json(json.dumps(document, default=str))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {_reason(fault)}" for fault in error.errors())
        raise InputError(f"hardware {str(source)!r}: {faults}") from error


def _reason(fault: Any) -> str:
    if fault["type"] == "missing":
        return "missing: give it a table with value, source and date"
    if fault["type"] == "extra_forbidden":
        return "unknown key: remove it or correct its spelling"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{message} (given: {fault['input']!r})" if fault["type"] != "value_error" else message


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


def uncertain_figures(source: str | Path) -> list[UncertainFigure]:
    """Return the figures of ``source`` that have a range."""
    document = _read(str(source))
    found = []
    for key in figure_keys(document):
        node: Any = document
        for part in key.split("."):
            node = node[part]
        if "range" in node:
            (low, unit), (value, _), (high, _) = (_in_si(end) for end in (node["range"][0], node["value"], node["range"][1]))
            found.append(UncertainFigure(key, low, value, high, unit))
    return found


def _in_si(written: object) -> tuple[float, str]:
    """Convert a figure as written to SI; return it with the SI unit."""
    if not isinstance(written, str):
        return float(written), ""  # type: ignore[arg-type]
    for dimension, unit in (("bytes", "B"), ("bandwidth", "B/s"), ("rate", "FLOP/s"), ("time", "s")):
        try:
            return parse_quantity(written, dimension), unit
        except InputError:
            continue
    raise InputError(f"{written!r} is not a quantity")
