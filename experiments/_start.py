"""Imported first by the scripts of this folder: find the packages, and catch interrupts before the imports that take time.

``python experiments/NAME.py`` puts this folder on the path, not the repository's, so scripts import this module by itself.
``python -m experiments.NAME`` needs only the interrupts, see ``__init__.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autohete.cli.interrupt import catch_interrupts

catch_interrupts(Path(sys.argv[0]).stem)
