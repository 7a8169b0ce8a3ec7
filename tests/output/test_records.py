"""Records: what is written is read back, and a crash costs half a line at most."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedwan.errors import ConfigError
from fedwan.output.records import EventRecord, QualityRecord, Recorder, RoundRecord, iter_records
from tests.output.runs import event_row, quality_row, round_row


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "metrics.jsonl"


def record(path: Path, *rows: dict[str, Any], resume: int | None = None) -> None:
    recorder = Recorder(path.parent, None if resume is None else (resume, [resume, 4 * resume]))
    for row in rows:
        recorder.write(row)
    recorder.close()


def test_every_kind_of_record_is_read_back_and_what_json_cannot_hold_is_null(path: Path) -> None:
    odd = {"losses": {"generator": math.nan}, "norms": {"g": math.inf}}
    row = quality_row(3, math.nan) | {"modes": 7}
    record(path, event_row("join", "s1"), round_row(3, "s1") | odd, row)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    join, work, quality = list(iter_records(path.parent))
    assert isinstance(join, EventRecord) and (join.event, join.site) == ("join", "s1")
    assert isinstance(work, RoundRecord) and (work.version, work.bytes_up) == (3, 1000)
    assert work.losses["generator"] is None and work.norms["g"] is None
    assert isinstance(quality, QualityRecord)
    assert (quality.numbers["modes"], "fd" in quality.numbers) == (7, False)
    assert join.t <= work.t <= quality.t


def test_half_a_last_line_is_left_out(path: Path) -> None:
    record(path, round_row(1, "s1"), round_row(2, "s1"))
    data = path.read_bytes()
    for cut in range(len(data) // 2 + 2, len(data) - 1, 7):
        path.write_bytes(data[:cut])
        assert [record.version for record in iter_records(path.parent)] == [1]  # type: ignore[union-attr]


def test_a_damaged_line_in_the_middle_is_named_and_a_kind_of_the_future_passed_over(
    path: Path,
) -> None:
    record(path, round_row(1, "s1"))
    text = path.read_text()
    path.write_text('{"kind":"weather","t":1.0}\n' + text)
    assert len(list(iter_records(path.parent))) == 1
    path.write_text("nonsense\n" + text)
    with pytest.raises(ConfigError, match="line 1 is no record"):
        list(iter_records(path.parent))


@pytest.mark.parametrize(
    "change",
    [
        *({"losses": None}, {"losses": {"g": "low"}}, {"version": None}, {"bytes_up": None}),
        *({"run_step": None}, {"norms": None}, {"site": None}, {"site": 5}, {"t": "now"}),
    ],
)
def test_a_line_whose_values_are_of_other_kinds_is_named(
    path: Path, change: dict[str, Any]
) -> None:
    row = {"t": 1.0, **round_row(1, "s1")}
    path.parent.mkdir()
    path.write_text("\n".join(json.dumps(each) for each in (row, row | change, row)) + "\n")
    with pytest.raises(ConfigError, match="line 2 is no record"):
        list(iter_records(path.parent))
    path.write_text("[" * 100_000 + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="line 1 is no record"):
        list(iter_records(path.parent))
    path.write_text(json.dumps(row | {"fragment": 7}) + "\n")
    Recorder(path.parent, (1, [1])).close()
    assert list(iter_records(path.parent)) == []


def test_a_resumed_run_drops_what_it_will_make_again_and_keeps_what_happened(path: Path) -> None:
    for version in (1, 2, 3):
        rows = (round_row(version, "s1"), quality_row(version, 1.0))
        record(path, *rows, event_row(f"after-{version}", None), resume=version)
    for version in (7, 8, 9, 10):  # of a network that travels four times a round
        record(path, round_row(version, "s1") | {"fragment": 1}, resume=3)
    with path.open("a") as file:
        file.write('{"kind":"round","t":')
    record(path, round_row(3, "s2"), resume=2)
    records = list(iter_records(path.parent))
    rounds = [(r.version, r.site) for r in records if isinstance(r, RoundRecord)]
    assert rounds == [(1, "s1"), (2, "s1"), (7, "s1"), (8, "s1"), (3, "s2")]
    assert [r.version for r in records if isinstance(r, QualityRecord)] == [1, 2]
    events = [r.event for r in records if isinstance(r, EventRecord)]
    assert events == ["after-1", "after-2", "after-3"]


def test_threads_never_mix_their_lines_and_a_row_that_lacks_a_field_is_none(path: Path) -> None:
    recorder = Recorder(path.parent)

    def write(site: str) -> None:
        for version in range(1, 101):
            recorder.write(round_row(version, site))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, ("s1", "s2", "s3", "s4")))
    with pytest.raises(TypeError):
        recorder.write({"kind": "round", "site": "s1"})
    recorder.close()
    assert len(list(iter_records(path.parent))) == 400
