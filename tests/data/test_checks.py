"""Faults of data, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from fedwan.config import Config, DataConfig
from fedwan.data import check_files
from tests.data.files import write_folder


def asked(path: Path, batch: int = 4) -> Config:
    data = DataConfig("folder", "own", batch, f"{path}/{{site}}", size=16)
    return Config("flow", sites=2, data=data)


def test_all_faults_of_all_sites_are_told_at_once(tmp_path: Path) -> None:
    write_folder(tmp_path / "s1", range(30))
    for number in (3, 5):
        (tmp_path / "s1" / f"{number:04d}.jpg").write_bytes(b"no image")
    faults = check_files(asked(tmp_path, batch=20))
    assert len(faults) == 4
    assert "data.batch = 20 is more than the 18 samples" in faults[0]
    assert "0003.jpg cannot be read" in faults[1] and "0005.jpg cannot be read" in faults[2]
    assert "s2' is no folder on this machine" in faults[3]
    assert all("\n" not in fault for fault in faults)


def test_pictures_of_other_modes_are_converted_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for site in ("s1", "s2"):
        write_folder(tmp_path / site, range(30))
    Image.new("L", (20, 20)).save(tmp_path / "s2" / "grey.png")
    assert check_files(asked(tmp_path)) == []
    assert "s2 holds pictures of mode L, converted to RGB" in caplog.text


def test_a_batch_larger_than_the_smallest_shard_is_told_of_bundled_data_too() -> None:
    data = DataConfig("digits", batch=700)
    assert check_files(Config(sites=2, data=data))[0].startswith("data.batch = 700 is more than")
    assert check_files(Config(sites=2, data=DataConfig("digits", batch=64))) == []
