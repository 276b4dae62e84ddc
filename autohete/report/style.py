"""The look of figures: one style, one look per kind of task, and reproducible files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib.colors
import matplotlib.style
from matplotlib.figure import Figure

from autohete.errors import InputError
from autohete.files import atomic_write
from autohete.printable import printable
from autohete.schedule import Kind

# Okabe and Ito, "Color Universal Design" (2008), with a grey.
SKY, BLUE, GREEN, YELLOW = "#56B4E9", "#0072B2", "#009E73", "#F0E442"
ORANGE, VERMILION, PURPLE, GREY = "#E69F00", "#D55E00", "#CC79A7", "#999999"


@dataclass(frozen=True, slots=True)
class Look:
    """Colour (``#RRGGBB``) and matplotlib hatch of a kind."""

    colour: str
    hatch: str = ""

    def pale(self) -> str:
        """Return the colour mixed with equal white, as ``#RRGGBB``."""
        red, green, blue = matplotlib.colors.to_rgb(self.colour)
        return matplotlib.colors.to_hex(((1 + red) / 2, (1 + green) / 2, (1 + blue) / 2))


#: The colour shows what is computed or moved (parameters green, activations purple, gradients blue, updates and states grey),
#: the hatch shows why. Kinds that share a lane also differ in lightness or hatch, so that they differ in greyscale,
#: and no pale colour looks like another's full one: a blue backward, when pale, would look like forward.
LOOKS: dict[Kind, Look] = {
    Kind.FORWARD: Look(SKY),
    Kind.LOSS: Look(YELLOW),
    Kind.RECOMPUTE: Look(SKY, "//////"),
    Kind.BACKWARD: Look(VERMILION),
    Kind.GPU_UPDATE: Look(GREY, "xxxxxx"),
    Kind.PREFETCH_FORWARD: Look(GREEN),
    Kind.PREFETCH_BACKWARD: Look(GREEN, "//////"),
    Kind.REFRESH: Look(ORANGE),
    Kind.FETCH_ACTIVATIONS: Look(PURPLE, "xxxxxx"),
    Kind.OFFLOAD_ACTIVATIONS: Look(PURPLE, "......"),
    Kind.WRITE_BACK_FORWARD: Look(GREEN, "\\\\\\\\\\\\"),
    Kind.WRITE_BACK_BACKWARD: Look(GREEN, "xxxxxx"),
    Kind.OFFLOAD_GRADIENTS: Look(BLUE),
    Kind.FETCH_GRADIENTS: Look(BLUE, "\\\\\\\\\\\\"),
    Kind.CPU_UPDATE: Look(GREY),
    Kind.FETCH_STATES: Look(GREY, "......"),
    Kind.WRITE_BACK_STATES: Look(GREY, "//////"),
    Kind.ACCUMULATE: Look(BLUE, "......"),
    Kind.READ_STATES: Look(GREY, "++++++"),
    Kind.WRITE_STATES: Look(GREY, "------"),
    Kind.WRITE_GRADIENTS: Look(BLUE, "------"),
    Kind.READ_ACTIVATIONS: Look(PURPLE, "++++++"),
    Kind.WRITE_ACTIVATIONS: Look(PURPLE, "------"),
    Kind.READ_FORWARD: Look(ORANGE, "//////"),
    Kind.READ_BACKWARD: Look(ORANGE, "++++++"),
    Kind.WRITE_PARAMETERS: Look(ORANGE, "------"),
    Kind.GATHER_FORWARD: Look(GREEN, "......"),
    Kind.GATHER_BACKWARD: Look(GREEN, "++++++"),
    Kind.REDUCE_GRADIENTS: Look(BLUE, "//////"),
    Kind.GATHER_UPDATED: Look(ORANGE, "......"),
    Kind.SEND_INPUT: Look(YELLOW, "//////"),
    Kind.SEND_INPUT_GRADIENT: Look(YELLOW, "xxxxxx"),
    Kind.SUM_TIED_GRADIENTS: Look(YELLOW, "......"),
    Kind.SUM_NORMS: Look(YELLOW, "++++++"),
    Kind.PLACE_UPDATE: Look(GREY, "\\\\\\\\\\\\"),
    Kind.READ_UPDATED: Look(ORANGE, "xxxxxx"),
    Kind.GRADIENT_NORM: Look(BLUE, "xxxxxx"),
    Kind.CLIP: Look(BLUE, "++++++"),
}


def look(kind: Kind) -> Look:
    """Return the colour and hatch of ``kind``."""
    return LOOKS[kind]


def luminance(colour: str) -> float:
    """Return the lightness of ``colour`` in greyscale, 0 to 1 (ITU-R BT.601)."""
    red, green, blue = matplotlib.colors.to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


@contextmanager
def style() -> Iterator[None]:
    """Apply AutoHete's style on top of matplotlib's defaults, so that user settings do not change the figures. A character that
    the font does not have is drawn as a box, without a warning.
    """
    with matplotlib.style.context("autohete.report.autohete", after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def as_label(text: str) -> str:
    """Return ``text`` for a figure, as it is: without what a terminal obeys, and with dollar signs that begin no formula."""
    return "\n".join(map(printable, text.split("\n"))).replace("$", r"\$")


#: Metadata that would differ between runs or matplotlib versions is left out of the files.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}


def figure_format(path: str | Path) -> str:
    """Return ``png``, ``pdf`` or ``svg``, according to the suffix of ``path``.

    Raises:
        InputError: another suffix.
    """
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in _METADATA:
        raise InputError(f"a figure cannot be written as {str(path)!r}: end the name in .{', .'.join(_METADATA)}")
    return suffix


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write ``figure`` as PNG, PDF or SVG, according to the suffix of ``path``; the same figure gives the same bytes.

    Raises:
        InputError: another suffix, or ``path`` cannot be written.
    """
    suffix = figure_format(path)
    with style():  # hatches and fonts are only read from the style when the figure is written
        atomic_write(path, lambda stream: figure.savefig(stream, format=suffix, metadata=_METADATA[suffix]))
