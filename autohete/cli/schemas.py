"""``autohete schema``."""

from __future__ import annotations

import json
from typing import Any, Literal


def schema(document: Literal["plan", "simulation", "profile", "calibration", "trace", "training"], /) -> None:
    """Print the JSON Schema of a document that AutoHete writes. Its title has the version of the document's form.

    Parameters
    ----------
    document:
        plan: what `plan --json` prints; simulation: `simulate --json`; profile: the file of `profile`; calibration:
        `calibrate --json`; trace: the file of --trace; training: `state.json` of a checkpoint.
    """
    print(json.dumps(document_schema(document), indent=2))


def document_schema(document: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of document."""
    from autohete.documents import schema_of

    if document == "plan":
        from autohete.answer.answer_document import AnswerDocument
        from autohete.simulate.plan_document import PlanDocument

        return schema_of("autohete-plan 1", AnswerDocument, PlanDocument)
    if document == "simulation":
        from autohete.simulate.plan_document import SimulationDocument

        return schema_of("autohete-simulation 1", SimulationDocument, tuple[SimulationDocument, ...])
    if document == "profile":
        from autohete.profile.profile_file import ProfileDocument

        return schema_of("autohete-profile 1", ProfileDocument)
    if document == "calibration":
        from autohete.calibrate.calibration import Calibration

        return schema_of("autohete-calibration 1", Calibration)
    if document == "trace":
        from autohete.report.perfetto import TraceDocument

        return schema_of("autohete-trace 1", TraceDocument)
    from autohete.train.checkpoint_document import CheckpointDocument

    return schema_of("autohete-checkpoint 1", CheckpointDocument)
