"""Print the version that a release has: the newest of CHANGELOG.md, if it is dated and everything else agrees.

Command: ``python .ci/release_version.py [TAG]``. Exit code 1 and one line if a file, or the tag, has another version.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def release_version(tag: str | None = None, root: Path = ROOT) -> str:
    """Return the version to release.

    Args:
        tag: such as ``v0.1.0``; None: not tagged yet.
        root: the repository.

    Raises:
        ValueError: the newest entry has no date, or ``autohete.__version__``, CITATION.cff or the tag has another version.
    """
    entry = re.search(r"^## \[(.+?)\] - (.+)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if entry is None:
        raise ValueError("CHANGELOG.md has no entry such as '## [0.1.0] - 2026-12-01'")
    version, date = entry.groups()
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        raise ValueError(f"CHANGELOG.md says {version} - {date}: replace {date!r} by the date of the release")
    elsewhere = {
        "autohete/__init__.py": _found(root / "autohete" / "__init__.py", r'^__version__ = "(.+?)"'),
        "CITATION.cff": _found(root / "CITATION.cff", r"^version: (.+)$"),
        "the tag": version if tag is None else tag.removeprefix("v"),
    }
    for place, other in elsewhere.items():
        if other != version:
            raise ValueError(f"{place} says {other}, CHANGELOG.md says {version}: correct one of them")
    return version


def _found(path: Path, pattern: str) -> str:
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "nothing"


if __name__ == "__main__":
    try:
        print(release_version(*sys.argv[1:2]))
    except ValueError as error:
        sys.exit(str(error))
