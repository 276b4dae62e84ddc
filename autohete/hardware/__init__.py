"""Where training runs: one node's capacities and rates.

:class:`HardwareFile` is the document (``file.py``); :class:`Hardware` has the plain numbers for the model (``node.py``).
"""

from autohete.hardware.file import (
    HardwareFile,
    UncertainFigure,
    figure_keys,
    load_hardware,
    preset_names,
    read_hardware,
    uncertain_figures,
)
from autohete.hardware.node import Cpu, Gpu, Hardware, Host, Interconnect, Link, Nvme

__all__ = [
    "Cpu",
    "Gpu",
    "Hardware",
    "HardwareFile",
    "Host",
    "Interconnect",
    "Link",
    "Nvme",
    "UncertainFigure",
    "figure_keys",
    "load_hardware",
    "preset_names",
    "read_hardware",
    "uncertain_figures",
]
