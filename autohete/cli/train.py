"""``autohete train``."""

from __future__ import annotations

from autohete.cli.outputs import check_outputs
from autohete.cli.runtime import check_runtime
from autohete.cli.text_options import NO_FILES, PLAIN_MODEL, PLAIN_TRAINING, TextModel, TextTraining, TimelineFiles


def train(*, training: TextTraining = PLAIN_TRAINING, model: TextModel = PLAIN_MODEL, files: TimelineFiles = NO_FILES) -> None:
    """Train a GPT on text, within a memory budget, and compare the prediction with the measurement."""
    from autohete.cli.text_model import train as run

    check_outputs(files.by_option)
    check_runtime()
    run(model, training, files)
