from __future__ import annotations

from pathlib import Path

import pytest

from fedwan.errors import CheckpointError
from fedwan.flower.errand import Errand


def test_a_resumed_run_keeps_its_id_and_a_new_one_does_not(tmp_path: Path) -> None:
    first = Errand.begin(tmp_path, Path("pki/coordinator"), resume=False)
    resumed = Errand.begin(tmp_path, Path("pki/coordinator"), resume=True)
    second = Errand.begin(tmp_path, Path("pki/coordinator"), resume=False)
    assert resumed.run_id == first.run_id
    assert resumed.resume and not first.resume
    assert second.run_id != first.run_id
    assert Errand.read(tmp_path) == second
    assert Path(second.identity).is_absolute()


@pytest.mark.parametrize("text", [None, "", "{}", "[1]"])
def test_without_a_run_there_is_nothing_to_resume(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "flower").mkdir()
        (tmp_path / "flower" / "errand.json").write_text(text)
    with pytest.raises(CheckpointError, match="holds no run to go on with"):
        Errand.begin(tmp_path, Path("identity"), resume=True)
