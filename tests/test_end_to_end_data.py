"""Whole runs through Flower on files of the sites' own, in processes of their own, with a kill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.files import write_folder
from tests.test_end_to_end import fedwan, finish, kill, rows, summary, wait_for_version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLASSES = ("cat", "dog")


def words(data: Path, out: Path, *others: str) -> list[str]:
    return [
        f"out={out}",
        "workload=flow",
        "sites=2",
        "steps=160",
        "eval.every=80",
        "data.name=folder",
        f"data.path={data}/{{site}}",
        "data.split=own",
        "data.classes=cat,dog",
        "data.size=16",
        "data.batch=16",
        "model.width=16",
        "model.depth=1",
        *others,
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_folder(folder / "s1", range(70), CLASSES)
    write_folder(folder / "s2", range(100, 150), CLASSES[1:])
    return folder


def test_a_killed_site_goes_on_in_the_middle_of_its_epoch_to_the_same_bits(
    tmp_path: Path, data: Path
) -> None:
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    process = fedwan("demo", *words(data, plain, "data.workers=0"))
    output = finish(process)
    assert process.returncode == 0, output
    process = fedwan("demo", *words(data, killed, "data.workers=2"))
    wait_for_version(killed, 3)
    kill(killed / "sites" / "s2" / "clientapp.json")
    output = finish(process)
    assert process.returncode == 0, output
    assert summary(killed)["global_sha256"] == summary(plain)["global_sha256"]
    assert summary(killed)["rejoins"] == 1
    quality = [row for row in rows(plain) if row["kind"] == "quality"]
    assert [row["site"] for row in quality[1:]] == ["s1, s2"] * 2
    assert summary(plain)["quality"]["fd"] < quality[0]["fd"]


def test_a_site_whose_files_cannot_be_used_ends_the_run_with_one_line(
    tmp_path: Path, data: Path
) -> None:
    process = fedwan("demo", *words(data, tmp_path / "out", "data.classes=cat,fox"))
    output = finish(process)
    assert process.returncode == 2, output
    text = " ".join(output.split())
    assert "is of class 'dog', which data.classes does not name (cat, fox)" in text
    assert "Traceback" not in output


def test_translations_of_a_folder_s_pairs_are_drawn_on_the_owner_s_own_machine(
    tmp_path: Path,
) -> None:
    pairs, out = tmp_path / "pairs", tmp_path / "out"
    pairs.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 64, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(pairs / f"{index:02d}.png")
    process = fedwan(
        *("demo", f"out={out}", "workload=pix2pix", "sites=1", "steps=4", "h=2", "data.batch=2"),
        *("data.name=pairs", f"data.path={pairs}", "data.size=32", "model.width=4"),
    )
    output = finish(process)
    assert process.returncode == 0, output
    assert (out / "samples.png").is_file()
    assert "stay with the sites" not in output
    assert "data:image/png" in (out / "report.html").read_text()
    assert not [row for row in rows(out) if row.get("event") == "samples_kept"]
