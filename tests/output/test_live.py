"""The live table: what a run's records say, on a terminal and elsewhere."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedwan.output import live
from fedwan.output.board import Board
from fedwan.output.live import render_board, watch
from fedwan.output.outputs import Outputs
from fedwan.output.records import Record, to_record
from tests.output.runs import make_config, quality_row, round_row, write_run


def record_of(row: dict[str, Any], t: float) -> Record:
    record = to_record(row | {"t": t})
    assert record is not None
    return record


def event(name: str, site: str | None, t: float = 0.0) -> Record:
    return record_of({"kind": "event", "event": name, "site": site, "text": f"{site} {name}"}, t)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(make_config(tmp_path))


class TestBoard:
    def test_it_tells_the_phases_of_a_run(self, board: Board) -> None:
        assert board.phase == "starting services"
        board.take(event("listening", None))
        assert board.phase == "waiting for sites"
        board.take(event("join", "s1"))
        assert board.phase == "waiting for s2"
        board.take(event("join", "s2"))
        assert board.phase == "training"
        board.take(event("lost", "s1"))
        assert board.phase == "waiting for s1"
        board.take(event("rejoin", "s1"))
        for version in (1, 2):
            board.take(record_of(round_row(version, "s1"), 1.0))
        assert board.phase == "measuring quality"
        board.take(event("done", None))
        assert board.phase == "done"

    def test_it_sums_what_sites_did_and_measures_their_speed(self, board: Board) -> None:
        board.take(record_of(round_row(1, "s1"), 100.0))
        assert board.remaining_s is None
        board.take(record_of(round_row(2, "s1"), 105.0))
        row = board.sites["s1"]
        assert (row.step, row.bytes_up, row.bytes_down) == (20, 2000, 2050)
        assert row.utilisation == 0.8
        assert row.steps_per_s == 2.0
        assert board.remaining_s == 0.0

    def test_time_away_is_not_counted_as_slowness(self, board: Board) -> None:
        board.take(record_of(round_row(1, "s1"), 100.0))
        board.take(event("rejoin", "s1", 500.0))
        board.take(record_of(round_row(2, "s1"), 600.0))
        assert board.sites["s1"].steps_per_s is None

    def test_a_resumed_run_expects_every_site_again(self, board: Board) -> None:
        for site in ("s1", "s2"):
            board.take(event("join", site))
        board.take(event("resume", None))
        assert {row.state for row in board.sites.values()} == {"expected"}

    def test_it_remembers_the_untrained_model(self, board: Board) -> None:
        board.take(record_of(quality_row(0, 80.0), 1.0))
        board.take(record_of(quality_row(2, 0.9), 2.0))
        assert (board.fd_untrained, board.fd, board.fd_floor) == (80.0, 0.9, 0.4)


def test_the_table_has_a_row_per_site_and_a_column_per_loss(board: Board) -> None:
    for t, row in enumerate((round_row(1, "s1"), quality_row(0, 80.0))):
        board.take(record_of(row, float(t)))
    board.take(event("warning", "s2"))
    console = Console(width=110, file=io.StringIO(), record=True)
    console.print(render_board(board, 75.0))
    text = console.export_text()
    for part in ("s1", "s2", "discriminator", "generator", "1:15 elapsed", "round 1/2", "80 %"):
        assert part in text
    assert "Fréchet distance 80 (floor 0.4, untrained 80)" in text
    assert "warning s2 warning" in text


def show(out: Path, *, is_terminal: bool) -> str:
    """What a watcher prints of a run that ends while it watches."""
    config = make_config(out)
    looks = iter(range(3))
    outputs = Outputs(config, out)

    def is_running() -> bool:
        if next(looks) == 1:
            write_run(outputs, finish=True)
            return False
        return True

    stream = io.StringIO()
    console = Console(width=100, file=stream, force_terminal=is_terminal, color_system=None)
    with outputs:
        watch(out, config, is_running, console)
    return stream.getvalue()


def test_a_terminal_is_left_with_the_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_TICK_S", 0.0)
    text = show(tmp_path, is_terminal=True)
    assert "round 2/2" in text.rsplit("fedwan ", 1)[1]


def test_elsewhere_there_are_plain_lines_without_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_TICK_S", 0.0)
    text = show(tmp_path, is_terminal=False)
    assert text.isascii() is False and "\x1b" not in text
    first, *_, last = text.splitlines()
    assert first == "0 s: starting services"
    assert "rejoin: s2 <rejoined> & is back" in text
    assert "done, round 2/2, step 20/20, 4.00 kB up, 4.10 kB down, utilisation 80 %" in last


def test_a_run_that_never_wrote_a_record_can_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_TICK_S", 0.0)
    stream = io.StringIO()
    watch(tmp_path, make_config(tmp_path), lambda: False, Console(file=stream))
    assert stream.getvalue() == "0 s: starting services\n"
