"""`fedwan doctor RUN_DIR` on folders as runs leave them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedwan.cli.main import main
from tests.doctor.records import SITES, Bend, at, figures, healthy

BYTES = at("s2", figures(x_low=0.0, x_high=255.0))


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    """Exit code, and what was printed: on stderr for a mistake."""
    with pytest.raises(SystemExit) as caught:
        main(("doctor", *words))
    out, err = capsys.readouterr()
    return caught.value.code, err or out


def make_run(folder: Path, bend: Bend = lambda record: record, rounds: int = 6) -> str:
    rows: list[dict[str, Any]] = [
        {"kind": "round", **asdict(bend(healthy(version, site)))}
        for version in range(1, rounds + 1)
        for site in SITES
    ]
    (folder / "config.yaml").write_text("sites: 4\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_a_finding_is_told_with_round_site_network_why_and_mend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    code, text = doctor(capsys, make_run(tmp_path, BYTES), "--json", str(path))
    lines = text.splitlines()
    assert code == 0
    assert lines[0] == f"{tmp_path}: 6 rounds, 4 sites, not finished"
    assert lines[2] == "round 3, site s2, all networks: range"
    assert lines[3].split()[0] == "why" and "from 0 to 255" in lines[3]
    assert lines[4].split()[0] == "mend" and "[-1, 1]" in lines[4]
    assert doctor(capsys, str(tmp_path), "--strict")[0] == 1
    (finding,) = json.loads(path.read_text())
    assert (finding["kind"], finding["site"], finding["version"]) == ("range", "s2", 3)


def test_a_killed_run_and_one_without_a_round_are_read_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path, BYTES)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "round", "t"')
    code, text = doctor(capsys, folder)
    assert code == 0 and "from 0 to 255" in text
    (tmp_path / "metrics.jsonl").unlink()
    code, text = doctor(capsys, folder)
    assert code == 0 and "no round yet" in text and "too early to tell" in text
    assert doctor(capsys, folder, "--strict")[0] == 1
    code, text = doctor(capsys, make_run(tmp_path, rounds=2), "--strict")
    assert code == 0 and text.splitlines()[-1] == "too early to tell: that takes 3 rounds or more"


@pytest.mark.parametrize("folder", ["lnik", "no/such/folder"])
def test_what_is_no_run_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    code, text = doctor(capsys, str(tmp_path / folder))
    assert code == 2 and text.count("\n") == 1
    assert "holds no run (no config.yaml); give the folder" in text and folder in text


def test_damaged_records_are_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("nonsense\n{}\n")
    code, text = doctor(capsys, folder)
    assert code == 2 and "line 1 is no record" in text


def test_help_names_both_uses(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("--help",)):
        code, text = doctor(capsys, *words)
        assert code == 0 and "RUN_DIR" in text and "link" in text
