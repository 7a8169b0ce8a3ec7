"""The live table: what a run's records say, on a terminal and elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedwan.output import live
from fedwan.output.board import Board
from fedwan.output.live import render_board, watch
from fedwan.output.outputs import Outputs
from tests.output.runs import event, make_config, quality_row, record_of, round_row, write_run


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(make_config(tmp_path))


def test_the_table_has_a_row_per_site_and_a_column_per_loss(board: Board) -> None:
    for t, row in enumerate((round_row(1, "s1"), quality_row(0, 80.0))):
        board.take(record_of(row, float(t)))
    board.take(event("warning", "s2"))
    console = Console(width=110, file=io.StringIO(), record=True)
    console.print(render_board(board, 75.0))
    text = console.export_text()
    for part in (
        "s1",
        "s2",
        "discriminator",
        "generator",
        "1:15 elapsed",
        "step 10/20, round 1",
        "80 %",
    ):
        assert part in text
    assert "step 10/20, round 1" in text
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
    assert "step 20/20, round 2" in text.rsplit("fedwan ", 1)[1]


def test_elsewhere_there_are_plain_lines_without_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_TICK_S", 0.0)
    text = show(tmp_path, is_terminal=False)
    assert text.isascii() is False and "\x1b" not in text
    first, *_, last = text.splitlines()
    assert first == "0 s: starting services"
    assert "rejoin: s2 <rejoined> & is back" in text
    assert "done, round 2, step 20/20, 4.00 kB up, 4.10 kB down, utilisation 80 %" in last
