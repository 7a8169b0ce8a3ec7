"""The live table: what a run's records say, on a terminal and elsewhere."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedwan.config import dump
from fedwan.output import live, records
from fedwan.output.board import Board
from fedwan.output.live import Follower, _plain_line, render_board, watch
from fedwan.output.outputs import Outputs
from fedwan.output.records import Recorder
from tests.output.runs import event, make_config, quality_row, record_of, round_row, write_run


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(make_config(tmp_path))


def shown(board: Board, width: int = 110) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render_board(board, 75.0))
    return console.export_text()


def test_the_table_has_a_row_per_site_and_a_column_per_loss(board: Board) -> None:
    for t, row in enumerate((round_row(1, "s1"), quality_row(0, 80.0))):
        board.take(record_of(row, float(t)))
    text = shown(board, width=80)
    assert all(part in shown(board, width=60) for part in (" gen…", "training", "1.02 kB"))
    parts = (
        "s1  ",
        " training ",
        " losses ",
        " discriminator  generator ",
        "1:15 elapsed",
        "step 10/20, round 1",
    )
    quality = "untrained: Fréchet distance 80, 200.0 times the floor 0.4"
    for part in (*parts, "80 %", quality):
        assert part in text


def test_a_site_that_a_run_goes_on_without_is_not_waited_for(board: Board) -> None:
    board.take(record_of(round_row(1, "s3"), 0.0))
    board.take(event("listening", None))
    assert board.sites["s3"].state == "left" and "s3" not in board.waiting


def test_what_looks_like_markup_is_shown_as_it_is(board: Board) -> None:
    row = round_row(1, "s1") | {"losses": {"[/]": 1.0, ":x:": 2.0}}
    board.take(record_of(row, 0.0))
    text = shown(board)
    assert " :x: " in text and " [/] " in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_is_left_with_the_last_state_and_elsewhere_there_are_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(live, "_TICK_S", 0.0)
    monkeypatch.setattr("fedwan.output.outputs.write_report", lambda out: None)
    config = make_config(tmp_path)
    looks = iter(range(3))
    outputs = Outputs(config, tmp_path)

    def is_running() -> bool:
        if next(looks) == 1:
            write_run(outputs, finish=True)
            return False
        return True

    stream = io.StringIO()
    console = Console(width=100, file=stream, force_terminal=is_terminal, color_system=None)
    with outputs:
        watch(tmp_path, config, is_running, console)
    text = stream.getvalue()
    if is_terminal:
        assert "step 20/20, round 2" in text.rsplit("fedwan ", 1)[1]
        return
    first, *_, last = text.splitlines()
    assert first.endswith(" s: starting services") and "\x1b" not in text
    assert "rejoin: s2 <rejoined> & is back" in text
    assert "done, round 2, step 20/20, 4.00 kB up, 4.10 kB down, utilisation 80 %" in last


def test_it_tells_the_phases_of_a_run(board: Board) -> None:
    assert board.phase == "starting services"
    for name, site, phase in (
        ("listening", None, "waiting for sites"),
        ("join", "s1", "waiting for s2"),
        ("join", "s2", "training"),
        ("lost", "s1", "waiting for s1"),
        ("rejoin", "s1", "training"),
    ):
        board.take(event(name, site))
        assert board.phase == phase
    for version in (0, 1, 2):
        if version:
            board.take(record_of(round_row(version, "s1"), 1.0))
        board.take(event("measuring", "s2"))
        assert board.phase == ("training" if version == 1 else "measuring quality")
        assert board.sites["s2"].state == "measuring"
        row = {"kind": "quality", "version": version, "step": 10 * version, "site": "s2", "fd": 1.0}
        assert board.measuring_left_s(1.0) == (3.0 if version else None)
        board.take(record_of(row, 4.0))
        assert board.sites["s2"].state == "training" and board.measuring_left_s(4.0) is None
    assert board.phase == "ending"
    board.take(event("measuring", "s2"))
    board.take(record_of(round_row(2, "s2"), 1.0))  # of two that measure one is told of
    assert board.sites["s2"].state == "training"
    board.take(event("done", None))
    assert board.phase == "done"


def test_a_script_without_figures_of_its_own_measures_no_quality(board: Board) -> None:
    board.take(event("listening", None))
    board.take(event("join", "s1"))
    board.take(event("measuring", "s1"))
    assert board.phase == "measuring quality"  # as far as is known
    board.take(record_of({"kind": "quality", "version": 0, "step": 0, "site": "s1"}, 4.0))
    assert "evaluate" not in _plain_line(board) + shown(board)
    board.take(event("measuring", "s1"))
    assert board.phase == "asking for samples"


def test_where_contributions_are_merged_as_they_come_a_live_quorum_waits_for_nobody(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path)
    config.sites, config.round.quorum, config.steps = 3, 2, 900
    board = Board(config)
    for name, site in (("listening", None), ("join", "s1"), ("join", "s2"), ("join", "s3")):
        board.take(event(name, site))
    for site in ("s1", "s2", "s3"):  # a round of all: the warm-up
        board.take(record_of(round_row(1, site), 1.0))
    board.take(event("lost", "s3"))
    assert board.phase == "waiting for s3" and board.waiting
    board.take(record_of(round_row(2, "s3"), 2.0))  # it had come before
    assert (board.phase, board.waiting, board.sites["s3"].state) == ("training", "", "silent")
    board.take(event("lost", "s2"))
    assert board.phase == "waiting for s2, s3" and "s2 (silent" in board.waiting


def test_a_round_is_one_though_a_network_travels_several_times_in_it(board: Board) -> None:
    for version in range(1, 9):
        row = round_row(version, "s1") | {"run_step": 10 * (version // 4), "fragment": 1}
        board.take(record_of(row, float(version)))
        if version % 4 == 0:
            board.take(record_of(round_row(version // 4, "s1"), version + 0.5))
    assert board.version == board.sites["s1"].rounds == 2


def test_it_sums_what_sites_did_and_measures_their_speed(board: Board) -> None:
    assert board.total.utilisation is None
    board.take(record_of(round_row(1, "s1"), 100.0))
    assert board.remaining_s is None
    board.take(record_of(round_row(2, "s1"), 105.0))
    row = board.sites["s1"]
    assert (row.step, row.bytes_up, row.bytes_down, row.utilisation) == (20, 2000, 2050, 0.8)
    assert board.remaining_s == 0.0
    # The run's utilisation is that of all the time spent, as in its summary.
    board.take(record_of({**round_row(1, "s2"), "compute_s": 6.0, "wait_s": 29.0}, 106.0))
    assert board.total.utilisation == 10 / 40


def test_a_resumed_run_expects_every_site_again_and_keeps_its_sums(tmp_path: Path) -> None:
    board = Board(make_config(tmp_path), since=100.0)
    for record in (
        event("listening", None, 1.0),
        event("join", "s1", 2.0),
        record_of(round_row(1, "s1"), 3.0),
        event("warning", "s1", 4.0),
    ):
        board.take(record)
    assert board.phase == "starting services"
    assert (board.version, board.sites["s1"].bytes_up) == (1, 1000)
    assert board.sites["s1"].state == "expected" and board.news == []
    board.take(event("resume", None, 101.0))
    board.take(record_of(round_row(2, "s1"), 102.0))
    assert board.sites["s1"].state == "training"
    assert [e.event for e in board.news] == ["resume"]


def test_what_sites_spent_in_earlier_starts_counts_and_a_new_run_has_no_past(
    tmp_path: Path,
) -> None:
    board = Board(make_config(tmp_path), since=100.0)
    board.take(record_of(round_row(1, "s1"), 3.0))
    left = replace(event("leave", "s1", 4.0), details={"bytes_up": 500})
    board.take(left)
    assert board.sites["s1"].bytes_up == 1500
    follower = Follower(tmp_path, make_config(tmp_path))
    follower.board.take(event("warning", "s1", time.time() - 3600))  # the clock was set back
    assert [e.event for e in follower.board.news] == ["warning"]


def test_a_follower_reads_on_from_the_last_whole_line_and_bears_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Follower(tmp_path, config := make_config(tmp_path))
    follower.poll()
    dump(config, tmp_path / "config.yaml")
    recorder, given = Recorder(tmp_path), list[int]()
    to_record = records.to_record

    def counted(row: Any) -> Any:
        given.append(row["version"])
        return to_record(row)

    monkeypatch.setattr(records, "to_record", counted)
    for version in (1, 2, 3):
        recorder.write(round_row(version, "s1"))
        del given[:]  # which writing asks for, too
        follower.poll(is_last=True)
        assert given == [version]
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "rou')
    follower.poll(is_last=True)
    assert follower.board.sites["s1"].bytes_up == 3000
    Recorder(tmp_path, resumed=(2, [2])).close()  # which replaces the file
    follower.poll(is_last=True)
    assert follower.board.version == 2 and follower.board.sites["s1"].bytes_up == 2000
    (tmp_path / "metrics.jsonl").write_text("nonsense\n{}\n")
    follower.poll(is_last=True)
    assert follower.board.version == 2
