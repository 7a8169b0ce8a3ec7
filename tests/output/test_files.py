"""Files are replaced whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedwan.output import files
from fedwan.output.files import replace_text


def test_the_folder_is_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    replace_text(tmp_path / "new" / "a.txt", "ü")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "ü".encode()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.txt"]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_text(tmp_path / "a.txt", "old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        replace_text(tmp_path / "a.txt", "new")
    monkeypatch.setattr(files.os, "fsync", os.fsync)
    assert (tmp_path / "a.txt").read_text() == "old"
