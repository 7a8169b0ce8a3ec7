"""`fedwan config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fedwan._config_tree import keys_of
from fedwan.app import load_run
from fedwan.cli.main import main
from fedwan.config import Config, from_json


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["config", *words])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_every_setting_is_listed_with_its_type_default_and_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = json.loads(printed(capsys, "--list", "--json"))
    assert [row["key"] for row in rows] == keys_of(Config)
    assert all(row["type"] and row["meaning"] for row in rows)
    by_key = {row["key"]: row for row in rows}
    assert by_key["stream.tau"]["default"] is None and by_key["sites"]["default"] == 4
    text = printed(capsys, "--list")
    assert all(f"{key} (" in text for key in by_key)


def test_what_a_run_would_be_resolved_to_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("strategy: local_sgd\n")
    expected = load_run(path, ["h=10"])
    assert from_json(printed(capsys, str(path), "h=10", "--json")) == expected
    assert from_json(json.dumps(yaml.safe_load(printed(capsys, str(path), "h=10")))) == expected
    assert "h: 10" in printed(capsys, "h=10")


def test_each_fault_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["config", "stepz=5", "link.rtt=3"])
    lines = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and len(lines) == 2
    assert all(line.startswith("fedwan: unknown key") for line in lines)
