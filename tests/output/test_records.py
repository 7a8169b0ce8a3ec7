"""Records: what is written is read back, and a crash costs half a line at most."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest

from fedwan.errors import ConfigError
from fedwan.output.records import (
    EventRecord,
    QualityRecord,
    Recorder,
    RoundRecord,
    read_records,
)
from tests.output.runs import event_row, quality_row, round_row


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "metrics.jsonl"


def test_every_kind_of_record_is_read_back(path: Path) -> None:
    recorder = Recorder(path.parent)
    for row in (event_row("join", "s1"), round_row(3, "s1"), quality_row(3, 1.25) | {"modes": 7}):
        recorder.write(row)
    recorder.close()
    join, work, quality = read_records(path.parent)
    assert isinstance(join, EventRecord) and (join.event, join.site) == ("join", "s1")
    assert isinstance(work, RoundRecord) and (work.version, work.losses["generator"]) == (3, 0.7)
    assert isinstance(quality, QualityRecord) and quality.figure("modes") == 7.0
    assert join.t <= work.t <= quality.t


def test_numbers_that_json_cannot_hold_become_null(path: Path) -> None:
    recorder = Recorder(path.parent)
    row = round_row(1, "s1") | {"losses": {"generator": math.nan}, "norms": {"g": math.inf}}
    recorder.write(row)
    recorder.write(quality_row(1, math.nan))
    recorder.close()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    work, quality = read_records(path.parent)
    assert isinstance(work, RoundRecord) and work.losses["generator"] is None
    assert isinstance(quality, QualityRecord) and quality.figure("fd") is None


def test_half_a_last_line_is_left_out(path: Path) -> None:
    recorder = Recorder(path.parent)
    recorder.write(round_row(1, "s1"))
    recorder.write(round_row(2, "s1"))
    recorder.close()
    data = path.read_bytes()
    for cut in range(len(data) // 2 + 2, len(data) - 1, 7):
        path.write_bytes(data[:cut])
        assert [record.version for record in read_records(path.parent)] == [1]  # type: ignore[union-attr]


def test_a_damaged_line_in_the_middle_is_named(path: Path) -> None:
    recorder = Recorder(path.parent)
    recorder.write(round_row(1, "s1"))
    recorder.close()
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(ConfigError, match="line 1 is no record"):
        read_records(path.parent)


def test_records_of_a_kind_from_the_future_are_passed_over(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"kind":"weather","t":1.0}\n')
    assert read_records(path.parent) == []


def test_a_resumed_run_drops_what_it_will_make_again_and_keeps_what_happened(path: Path) -> None:
    recorder = Recorder(path.parent)
    for version in (1, 2, 3):
        recorder.write(round_row(version, "s1"))
        recorder.write(quality_row(version, 1.0))
        recorder.write(event_row(f"after-{version}", None))
    recorder.close()
    with path.open("a") as file:
        file.write('{"kind":"round","t":')
    resumed = Recorder(path.parent, resume_version=2)
    resumed.write(round_row(3, "s2"))
    resumed.close()
    records = read_records(path.parent)
    rounds = [(r.version, r.site) for r in records if isinstance(r, RoundRecord)]
    assert rounds == [(1, "s1"), (2, "s1"), (3, "s2")]
    assert [r.version for r in records if isinstance(r, QualityRecord)] == [1, 2]
    events = [r.event for r in records if isinstance(r, EventRecord)]
    assert events == ["after-1", "after-2", "after-3"]


def test_threads_never_mix_their_lines(path: Path) -> None:
    recorder = Recorder(path.parent)

    def write(site: str) -> None:
        for version in range(1, 101):
            recorder.write(round_row(version, site))

    threads = [threading.Thread(target=write, args=(f"s{k}",)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert len(read_records(path.parent)) == 400


def test_a_row_that_lacks_a_field_is_our_own_bug(path: Path) -> None:
    recorder = Recorder(path.parent)
    row = round_row(1, "s1")
    del row["norms"]
    with pytest.raises(TypeError):
        recorder.write(row)
    recorder.close()
    assert read_records(path.parent) == []
