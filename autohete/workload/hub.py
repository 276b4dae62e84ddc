"""The local cache of the Hugging Face Hub, in which ``transformers`` and ``hf download`` keep models. Nothing is downloaded.

    models--ORGANISATION--NAME/refs/main              the commit that was downloaded last
                               snapshots/COMMIT/...   the model's files, such as config.json

The folder is that of ``huggingface_hub`` 1: ``HF_HUB_CACHE``, else ``hub`` in ``HF_HOME``, else in ``~/.cache/huggingface``.
"""

from __future__ import annotations

import os
from pathlib import Path

CONFIG = "config.json"
_PREFIX, _BETWEEN, _SNAPSHOTS = "models--", "--", "snapshots"


def cache_folder() -> Path:
    """Return the folder of the cache, whether or not it exists."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return Path(os.path.expandvars(given)).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def cached_models(name: str) -> dict[str, Path]:
    """Return the models in the cache that ``name`` means: ``ORGANISATION/NAME`` -> the folder of its config.json.

    Args:
        name: in any case, with or without the organisation.
    """
    wanted = name.casefold()
    try:
        folders = sorted(cache_folder().iterdir())
    except OSError:
        return {}
    found = {}
    for folder in folders:
        full = folder.name.removeprefix(_PREFIX).replace(_BETWEEN, "/")
        if folder.name.startswith(_PREFIX) and wanted in (full.casefold(), full.rpartition("/")[2].casefold()):
            snapshot = _snapshot(folder)
            if snapshot is not None:
                found[full] = snapshot
    return found


def model_of(folder: Path) -> str:
    """Return the name of the model in a folder: of a snapshot that of the model, not of its commit."""
    folder = Path(os.path.abspath(folder))
    repository = folder.parent.parent.name
    if folder.parent.name == _SNAPSHOTS and repository.startswith(_PREFIX):
        return repository.rpartition(_BETWEEN)[2]
    return folder.name


def _snapshot(repository: Path) -> Path | None:
    """Return the snapshot of ``main``, or without it the newest, among those with a config.json."""
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = ""
    try:
        there = [one for one in (repository / _SNAPSHOTS).iterdir() if (one / CONFIG).is_file()]
        return max(there, key=lambda one: (one.name == commit, one.stat().st_mtime_ns, one.name), default=None)
    except OSError:
        return None
