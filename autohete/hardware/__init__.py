"""Where training runs: one node's capacities and rates.

A file and its bases make one document (``document.py``); :class:`HardwareFile` validates it (``file.py``); :class:`Hardware`
has the plain numbers for the model (``node.py``).
"""

from autohete.hardware.document import preset_names, presets_like
from autohete.hardware.node import OVER_PCIE, Cpu, Gpu, Hardware, Host, Interconnect, Link, Place, node_text
from autohete.hardware.parallelism import ALONE, ContextExchange, Parallelism, parse_parallel
from autohete.hardware.schema import (
    HardwareFile,
    UncertainFigure,
    WrittenFigure,
    left_out,
    load_hardware,
    read_hardware,
    uncertain_figures,
    written_figures,
)

__all__ = [
    "ALONE",
    "OVER_PCIE",
    "ContextExchange",
    "Cpu",
    "Gpu",
    "Hardware",
    "HardwareFile",
    "Host",
    "Interconnect",
    "Link",
    "Parallelism",
    "Place",
    "UncertainFigure",
    "WrittenFigure",
    "left_out",
    "load_hardware",
    "node_text",
    "parse_parallel",
    "preset_names",
    "presets_like",
    "read_hardware",
    "uncertain_figures",
    "written_figures",
]
