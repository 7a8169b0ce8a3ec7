"""The summary: exactly the promised keys, and one screen of it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedwan.config import Config
from fedwan.errors import ConfigError
from fedwan.output.board import board_of
from fedwan.output.records import EventRecord, QualityRecord, Record
from fedwan.output.summary import (
    Summary,
    read_summary,
    render_summary,
    write_summary,
)
from tests.output.runs import event

PROMISED = """
strategy workload sites h steps seed wall_s compute_s wait_s utilisation bytes_up bytes_down
rounds contributions rejected rejoins late dropped staleness quality global_sha256
""".split()


def make_summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {
        "strategy": "diloco",
        "workload": "gan",
        "sites": 4,
        "h": 20,
        "steps": 1200,
        "seed": 0,
        "wall_s": 93.0,
        "compute_s": 60.0,
        "wait_s": 3.0,
        "utilisation": 60 / 63,
        "bytes_up": 96_000_000,
        "bytes_down": 96_200_000,
        "rounds": 60,
        "contributions": 240,
        "rejected": 0,
        "rejoins": 1,
        "late": 0,
        "dropped": 0,
        "staleness": 0.0,
        "quality": {"fd": 0.82, "fd_floor": 0.41, "precision": 0.9, "recall": 0.8},
        "global_sha256": "ab" * 32,
    }
    return Summary(**(values | changes))


CONFIG = Config(sites=4, h=20, steps=1200)
RECORDS: list[Record] = [
    QualityRecord(1.0, 0, 0, {"fd": 120.0}),
    EventRecord(2.0, "done", None, "", {"payload_bytes": 400_000}),
]


def shown(summary: Summary, records: list[Record]) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(render_summary(summary, board_of(CONFIG, records), Path("runs/demo")))
    return console.export_text()


def test_it_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    write_summary(make_summary(), tmp_path / "summary.json")
    row = json.loads((tmp_path / "summary.json").read_text())
    assert list(row) == PROMISED
    assert [field.name for field in dataclasses.fields(Summary)] == PROMISED


def test_a_figure_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    write_summary(make_summary(quality={"fd": math.nan}), tmp_path / "summary.json")
    assert read_summary(tmp_path / "summary.json").quality == {"fd": None}


def test_a_run_that_has_not_ended_is_told_with_the_command_that_ends_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has not ended.*--resume"):
        read_summary(tmp_path / "summary.json")


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_file_that_is_no_summary_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ConfigError, match="is no summary"):
        read_summary(tmp_path / "summary.json")


def test_synchronous_training_sends_every_gradient_both_ways_at_every_step() -> None:
    assert board_of(CONFIG, RECORDS).sync_bytes() == 1200 * 4 * 2 * 400_000
    assert board_of(CONFIG, RECORDS[:1]).sync_bytes() is None


def test_one_screen_says_quality_bytes_and_where_to_look() -> None:
    text = shown(make_summary(), RECORDS)
    for part in (
        "0.82",
        "2.0 times the floor",
        "untrained 120",
        "192 MB",
        "3.84 GB",
        "20 times more",
        "95 %",
        "rejoins of sites: 1",
        "runs/demo/samples.png",
        "runs/demo/report.html",
    ):
        assert part in text
    assert len(text.splitlines()) <= 24


def test_where_sites_keep_their_pictures_no_path_of_one_is_shown() -> None:
    text = shown(make_summary(), [*RECORDS, event("samples_kept", None)])
    assert "stay with the sites" in text and "samples.png" not in text
