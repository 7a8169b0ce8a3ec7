"""The summary: exactly the promised keys, and one screen of it."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from fedwan.config import Config, DataConfig, PrivacyConfig
from fedwan.errors import ConfigError
from fedwan.output.board import Board
from fedwan.output.records import EventRecord, QualityRecord, Record
from fedwan.output.summary import Summary, privacy_of, read_summary, render_summary, write_summary
from tests.output.runs import event

PROMISED = """
strategy workload sites h steps seed wall_s compute_s wait_s utilisation evaluation_s bytes_up
bytes_down rounds contributions rejected rejoins late dropped staleness quality global_sha256
privacy warnings quality_version
""".split()


QUALITY = {"fd": 0.82, "fd_floor": 0.41, "num_real": 500, "seen_through": "own classifier"}
SUMMARY = Summary(
    *("diloco", "gan", 4, 20, 1200, 0, 93.0, 60.0, 3.0, 60 / 63, 12.0, 96_000_000, 96_200_000),
    *(60, 240, 0, 1, 0, 0, 0.0, QUALITY, "ab" * 32),
)
CONFIG = Config(sites=4, h=20, steps=1200)
RECORDS: list[Record] = [
    QualityRecord(1.0, 0, 0, {"fd": 120.0}),
    EventRecord(2.0, "done", None, "", {"payload_bytes": 400_000}),
]


def shown(
    summary: Summary,
    records: list[Record],
    out: Path = Path("runs/demo"),
    config: Config = CONFIG,
) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    board = Board(config)
    for record in records:
        board.take(record)
    console.print(render_summary(summary, board, out))
    return console.export_text()


def test_figures_of_another_version_than_the_last_are_told_as_that() -> None:
    assert "of version 58, not of" in shown(
        dataclasses.replace(SUMMARY, quality_version=58), RECORDS
    )
    assert "not of the last one" not in shown(
        dataclasses.replace(SUMMARY, quality_version=60), RECORDS
    )


def test_a_summary_of_an_older_fedwan_is_read(tmp_path: Path) -> None:
    write_summary(SUMMARY, path := tmp_path / "summary.json")
    row = json.loads(path.read_text())
    del row["quality_version"]
    path.write_text(json.dumps(row))
    assert read_summary(path) == SUMMARY


def test_it_has_exactly_the_promised_keys_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    summary = dataclasses.replace(SUMMARY, quality={"fd": math.nan})
    write_summary(summary, tmp_path / "summary.json")
    assert list(json.loads((tmp_path / "summary.json").read_text())) == PROMISED
    assert read_summary(tmp_path / "summary.json").quality == {"fd": None}


@pytest.mark.parametrize(
    ("unit", "means", "not_covered"),
    [
        ("sample", "one sample of one site", ("same person", "samples a shard has", "held-out")),
        ("site", "one whole site", ("coordinator sees", "losses", "held-out", "several sites")),
    ],
)
def test_privacy_has_what_was_spent_of_which_unit_and_what_is_not_covered(
    tmp_path: Path, unit: str, means: str, not_covered: tuple[str, ...]
) -> None:
    config = PrivacyConfig(8.0, unit, delta=1e-6)
    summary = dataclasses.replace(SUMMARY, privacy=privacy_of(config, 7.5))
    write_summary(summary, tmp_path / "summary.json")
    told = json.loads((tmp_path / "summary.json").read_text())["privacy"]
    assert list(told) == ["epsilon", "delta", "unit", "not_covered"]
    assert (told["epsilon"], told["delta"]) == (7.5, 1e-6)
    assert told["unit"].startswith(means)
    for words in (*not_covered, "how long steps take", "other runs on the same data"):
        assert sum(words in line for line in told["not_covered"]) == 1, words
    assert "epsilon 7.5 at delta 1e-06 for one" in shown(summary, RECORDS)
    assert privacy_of(dataclasses.replace(config, epsilon=0.0), 0.0) == {}


def test_what_is_no_summary_is_told_with_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(SUMMARY, path)
    whole = json.loads(path.read_text())
    odd = ({"bytes_up": None}, {"wall_s": "x"}, {"global_sha256": 5}, {"quality": None})
    for text in ("{", "{}", "[]", *(json.dumps(whole | each) for each in odd)):
        path.write_text(text)
        with pytest.raises(
            ConfigError, match="is no summary .*; remove it, and the run's --resume"
        ):
            read_summary(path)


def test_one_screen_says_quality_bytes_and_where_to_look() -> None:
    text = shown(SUMMARY, RECORDS)
    quality = (
        "quality  Fréchet distance 0.82, 2.0 times the floor 0.41",
        "own classifier, n = 500; untrained 120",
    )
    # Synchronous training sends every gradient both ways at every step.
    sent = ("192 MB", f"{1200 * 4 * 2 * 400_000 / 1e9:.2f} GB", "20 times more")
    files = ("runs/demo/samples.png", "runs/demo/report.html")
    time = (
        "1:33 that the coordinator ran",
        "each site computed 1:00 and waited 3.0 s (utilisation 95 %)",
        "the other 30 s: starting and measuring; evaluations took 12 s",
    )
    for part in (*quality, *sent, *files, *time, "rejoins of sites: 1"):
        assert part in text
    assert len(text.splitlines()) <= 24 and "warnings" not in text
    assert "warnings  2" in shown(dataclasses.replace(SUMMARY, warnings=2), RECORDS)
    few = {"fd": 25.8, "fd_floor": 15.0, "num_real": 6, "seen_through": "random features"}
    text = shown(dataclasses.replace(SUMMARY, quality=few), RECORDS)
    assert "25.8, floor 15" in text and "n = 6, too few to compare; untrained" in text
    large = {"fd": 20_467.3, "fd_floor": 33.2, "num_real": 500}
    text = shown(dataclasses.replace(SUMMARY, quality=large, compute_s=0.42), RECORDS)
    assert "Fréchet distance 20,500, 616.5 times" in text and "each site computed 0.4 s and" in text
    late = dataclasses.replace(SUMMARY, late=3, quality={"score": 7})
    text = shown(late, RECORDS[:1])
    assert "score 7" in text and "3 contributions merged late" in text and "times more" not in text


def test_what_one_site_measured_is_not_compared_with_what_all_did() -> None:
    own = dataclasses.replace(CONFIG, data=DataConfig(split="own"))
    records = [RECORDS[0], QualityRecord(2.0, 60, 1200, {"fd": 0.82}), *RECORDS[1:]]
    assert "untrained 120" in shown(SUMMARY, records)
    assert "untrained" not in shown(SUMMARY, records, config=own)


def test_where_sites_keep_their_pictures_no_path_of_one_is_shown(tmp_path: Path) -> None:
    # Not where a demo may have left one.
    text = shown(SUMMARY, [*RECORDS, event("samples_kept", None)], tmp_path)
    assert "stay with the sites" in text and "samples.png" not in text


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    summary = dataclasses.replace(SUMMARY, workload="[/w]", quality={"[/]": 7, ":x:": 8})
    text = shown(summary, RECORDS, Path("runs/[/red]:x:"))
    parts = ("[/w] · diloco", ":x: 8, [/] 7", "[/red]:x:/samples.png", "[/red]:x:/report.html")
    assert all(part in text for part in parts), text
