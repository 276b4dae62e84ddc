"""Saves a training from the command line, also when a signal ends it, and continues it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autohete.cli.text_options import SavingOptions
from autohete.errors import AutoHeteError, InputError
from autohete.files import make_folder
from autohete.report.tables import console, print_text

if TYPE_CHECKING:
    from autohete.train.trainer import Trainer


class SavedTraining:
    """Checkpoints of a training.

    Args:
        trainer: trains.
        options: where and when to save.
        settings: what a training that continues must have in common with this one, by name.
    """

    def __init__(self, trainer: Trainer, options: SavingOptions, settings: Mapping[str, Any]) -> None:
        self._trainer, self._options, self._settings = trainer, options, dict(settings)
        #: Whether the last step has been saved.
        self._is_saved = True

    def begin(self, steps: int, *, may_have_ended: bool) -> int:
        """Continue from the latest checkpoint if that is wanted; return the number of steps that have been made.

        Args:
            steps: number of steps to make in all.
            may_have_ended: whether all of them may have been made.

        Raises:
            InputError: there is no checkpoint, or it is of another training, or has made all steps; or, to begin with, there is
                one.
        """
        folder, resume = self._options.save, self._options.resume
        if folder is None:
            return 0
        if not resume:
            from autohete.train.checkpoints import checkpoints

            if checkpoints(Path(folder)):
                raise InputError(f"{folder!r} has checkpoints of a training: continue it with --resume, or give another folder")
            make_folder(folder)  # fails now, and not after the first steps
            return 0
        found = self._trainer.load(folder)
        theirs = found if isinstance(found, dict) else {}
        for name, ours in self._settings.items():
            if theirs.get(name) != ours:
                raise InputError(
                    f"the training in {folder!r} has another {name} ({theirs.get(name)}, not {ours}): continue it with what it "
                    "began with, or give another folder"
                )
        done = self._trainer.steps
        if done > steps or (done == steps and not may_have_ended):
            raise InputError(f"the training in {folder!r} has made {done} steps: give --steps of more than that to continue it")
        return done

    def after_step(self, count: int) -> None:
        """Save if it is time; ``count`` steps have been made since :meth:`begin`."""
        self._is_saved = False
        every = self._options.save_every
        if every is not None and self._trainer.steps % every == 0:
            self._save()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save in the end, also if it is a signal."""
        try:
            yield
        except KeyboardInterrupt:
            self._is_saved = False  # the step in progress will end
            if self._options.save is not None:
                print_text(console(stderr=True), self._saved_or_not())
            raise
        self._save()

    def _saved_or_not(self) -> str:
        """Save, and describe how that went: a signal ends the program in any case."""
        try:
            self._save()
        except AutoHeteError as error:
            return f"not saved: {error}"
        return f"saved after step {self._trainer.steps}: {self._options.save}"

    def _save(self) -> None:
        if self._options.save is not None and not self._is_saved:
            self._trainer.save(self._options.save, extra=self._settings)
            self._is_saved = True
