from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedwan.errors import ConfigError
from fedwan.flower.lock import only_one


def test_a_folder_is_held_by_one_and_free_again_after(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with only_one(folder, "dir"):
        with pytest.raises(ConfigError, match=r"dir .* is in use by another service"):
            with only_one(folder, "dir"):
                pass
    with only_one(folder, "dir"):
        pass


def test_a_holder_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fedwan.flower.lock import only_one\n"
        "with only_one(Path(sys.argv[1]), 'dir'): print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError):
            with only_one(tmp_path, "dir"):
                pass
        holder.kill()
    with only_one(tmp_path, "dir"):
        pass


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        with only_one(tmp_path / "file" / "state", "dir"):
            pass
