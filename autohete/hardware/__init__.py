"""Where training runs: one node's capacities and rates.

A file and its bases make one document (``document.py``); :class:`HardwareFile` validates it (``file.py``); :class:`Hardware`
has the plain numbers for the model (``node.py``).
"""

from autohete.hardware.document import preset_names, presets_like
from autohete.hardware.node import OVER_PCIE, Cpu, Gpu, Hardware, Host, Interconnect, Link, Place
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
    "OVER_PCIE",
    "Cpu",
    "Gpu",
    "Hardware",
    "HardwareFile",
    "Host",
    "Interconnect",
    "Link",
    "Place",
    "UncertainFigure",
    "WrittenFigure",
    "left_out",
    "load_hardware",
    "preset_names",
    "presets_like",
    "read_hardware",
    "uncertain_figures",
    "written_figures",
]
