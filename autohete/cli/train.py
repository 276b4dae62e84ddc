"""``autohete train``."""

from __future__ import annotations

from autohete.cli.outputs import check_outputs
from autohete.cli.runtime import check_runtime
from autohete.cli.text_options import (
    NO_FILES,
    NO_FOLDERS,
    NO_SAVING,
    PLAIN_MODEL,
    PLAIN_TRAINING,
    ModelFolders,
    SavingOptions,
    TextModel,
    TextTraining,
    TimelineFiles,
)


def train(
    *,
    training: TextTraining = PLAIN_TRAINING,
    folders: ModelFolders = NO_FOLDERS,
    saving: SavingOptions = NO_SAVING,
    model: TextModel = PLAIN_MODEL,
    files: TimelineFiles = NO_FILES,
) -> None:
    """Train a GPT, or a model of Hugging Face, on text, within a memory budget; compare the prediction with the measurement."""
    from autohete.cli.text_model import train as run

    check_outputs(files.by_option)
    check_runtime()
    run(model, training, folders, saving, files)
