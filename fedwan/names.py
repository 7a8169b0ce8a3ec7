"""Names that users type: how near a wrong one is to a right one, and what is a name at all."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

RESERVED_NAMES = frozenset({"ca", "coordinator", "localhost"})
"""Folders of the authority beside the sites' own, and a host name that every coordinator bears."""

_FUNCTION = re.compile(r"([^\W\d][\w.]*):(\w+)")
_SITE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def closest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that `name` was most likely meant to be, or None if none is like it.

    >>> closest("stepz", ["steps", "sites"])
    'steps'
    """
    by_lower = {choice.lower(): choice for choice in sorted(valid, reverse=True)}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: `"; did you mean 'x'?"`, or nothing if no name is like it.

    >>> nearest("digit", ["digits", "ring8"])
    "; did you mean 'digits'?"
    >>> nearest("quux", ["digits", "ring8"])
    ''
    """
    choice = closest(name, valid)
    return f"; did you mean {choice!r}?" if choice is not None else ""


def why_unsafe(name: str) -> str | None:
    """Why a site cannot bear this name, or None if it can.

    A site's name becomes a folder, a file name and the common name and DNS name of a certificate,
    so it is a DNS label: lower-case letters, digits and inner hyphens, 63 of them at most.

    >>> why_unsafe("paris-2") is None
    True
    >>> why_unsafe("../ca")
    'is no DNS label (lower-case letters, digits, inner hyphens, at most 63)'
    """
    if not _SITE_NAME.fullmatch(name):
        return "is no DNS label (lower-case letters, digits, inner hyphens, at most 63)"
    if name in RESERVED_NAMES:
        return "is reserved"
    return None


def named_function(text: str) -> tuple[str, str] | None:
    """The module and the function that `eval.features` names; None if it is a path."""
    match = _FUNCTION.fullmatch(text)
    return (match[1], match[2]) if match and not Path(text).exists() else None
