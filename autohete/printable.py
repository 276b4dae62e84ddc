"""Text from outside, made safe to print: names in files, names of files, and what an error repeats of them."""

from __future__ import annotations

#: Characters of a text that an error repeats.
_SHOWN = 200


def printable(text: str) -> str:
    r"""Return ``text`` with every character that cannot be printed as its escape, such as ``\x1b`` for ESC.

    These are control characters, which a terminal obeys; marks that change the direction of writing; line ends; and bytes of
    a file's name that are not UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def shown(given: object) -> str:
    """Return ``repr(given)`` for an error: its beginning and its length if it is long."""
    text = repr(given if not isinstance(given, str) else given[: _SHOWN + 1])
    size = len(given) if isinstance(given, str) else len(text)
    return text if len(text) <= _SHOWN + 2 else f"{text[:_SHOWN]}… ({size:,} characters)"
