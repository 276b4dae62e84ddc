"""Tables of a calibration in the terminal."""

from __future__ import annotations

from autohete.calibrate.calibration import Calibration
from autohete.calibrate.figures import MeasuredFigure
from autohete.quantities import format_bytes, format_ratio, format_seconds
from autohete.report.tables import IN_JSON, console, print_text, table


def print_calibration(found: Calibration) -> None:
    """Print the steps, the parts of an iteration predicted and measured, the explanations, and the figures."""
    out = console()
    gpu = f" on {found.gpu}" if found.gpu else ""
    steps = f"{found.steps} steps" if found.steps > 1 else "1 step"
    print_text(out, f"{found.trace}: {steps}{gpu}, {format_seconds(found.measured_seconds)} per iteration")
    if found.predicted_seconds is not None and found.calibrated_seconds is not None:
        for what, seconds in (("predicted", found.predicted_seconds), ("calibrated", found.calibrated_seconds)):
            ratio = format_ratio(seconds, found.measured_seconds)
            print_text(out, f"{what}: {format_seconds(seconds)} per iteration, {ratio} than measured")
    for remark in found.remarks:
        print_text(out, f"note: {remark}")
    print_text(out, "")
    predicted = found.predicted_seconds is not None
    columns = ["part", *(["predicted"] if predicted else []), "measured", "5 %", "95 %", *(["calibrated"] if predicted else [])]
    parts = table("one iteration, by part", columns, give_way=["5 %", "95 %"], elsewhere=IN_JSON)
    for row in found.parts:
        measured = [row.measured, row.low, row.high]
        if row.predicted is not None and row.calibrated is not None:
            measured = [row.predicted, *measured, row.calibrated]
        parts.add_row(str(row.part), *map(format_seconds, measured))
    out.print(parts)
    if found.explanations:
        print_text(out, "the largest differences:")
        for number, line in enumerate(found.explanations, 1):
            print_text(out, f"{number}. {line}", indent=3)
        print_text(out, "")
    if found.figures:
        figures = table("figures of the hardware", ["figure", "before", "measured", "5 %", "95 %", "samples"], remark=True)
        for figure in found.figures:
            values = (figure.before, figure.value, figure.low, figure.high)
            figures.add_row(figure.key, *(_written(figure, value) for value in values), figure.samples)
        out.print(figures)


def _written(figure: MeasuredFigure, value: float | None) -> str:
    if value is None:
        return "-"
    if figure.unit == "s":
        return format_seconds(value)
    if figure.unit == "B":
        return format_bytes(value)
    return f"{value / 1e9:.3g} GB/s" if figure.unit == "B/s" else f"{value:.3g}"
