"""The live table of a run: follows `metrics.jsonl`, and knows of nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedwan.config import Config
from fedwan.output.board import Board, Follower
from fedwan.output.units import (
    bytes_text,
    duration_text,
    number_text,
    percent_text,
    sites_text,
    subject,
)

__all__ = ["render_board", "watch"]

_TICK_S = 0.25
_PLAIN_EVERY_S = 15.0
_STATE_STYLES = {"training": "green", "silent": "bold red"}
_MOST_NEWS = 3


def watch(out: Path, config: Config, is_running: Callable[[], bool], console: Console) -> None:
    """Show a run until it ends: a live table on a terminal, occasional lines elsewhere.

    `is_running`, whether there is more to come, is asked a few times a second.
    """
    follower = Follower(out, config)
    if console.is_terminal:
        _watch_live(follower, is_running, console)
    else:
        _watch_plainly(follower, is_running, console)


def _watch_live(follower: Follower, is_running: Callable[[], bool], console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        shown = -1
        while is_running():
            second = int(follower.elapsed_s)
            if follower.poll() or second != shown:
                shown = second
                live.update(render_board(follower.board, follower.elapsed_s), refresh=True)
            time.sleep(_TICK_S)
    follower.poll()
    console.print(render_board(follower.board, follower.elapsed_s))


def _watch_plainly(follower: Follower, is_running: Callable[[], bool], console: Console) -> None:
    due_s, phase, last = 0.0, "", ""
    told: set[tuple[float, str]] = set()
    goes_on = True

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    while goes_on:
        goes_on = is_running()
        follower.poll()
        board = follower.board
        for event in board.news:
            if (event.t, event.text) not in told:
                told.add((event.t, event.text))
                say(f"{event.event}: {event.text}")
        line = _plain_line(board)
        is_due = follower.elapsed_s >= due_s or board.phase != phase or not goes_on
        if line != last and is_due:
            due_s, phase, last = follower.elapsed_s + _PLAIN_EVERY_S, board.phase, line
            say(f"{duration_text(follower.elapsed_s)}: {line}")
        time.sleep(_TICK_S if goes_on else 0)


def _plain_line(board: Board) -> str:
    sites = board.sites.values()
    parts = [board.phase]
    if board.version:
        up, down = sum(row.bytes_up for row in sites), sum(row.bytes_down for row in sites)
        parts += [
            f"round {board.version}",
            f"step {board.step}/{board.config.steps}",
            f"{bytes_text(up)} up, {bytes_text(down)} down",
        ]
        if board.utilisation is not None:
            parts.append(f"utilisation {percent_text(board.utilisation)}")
    if board.fd is not None:
        parts.append(_quality(board))
    return ", ".join(parts)


def render_board(board: Board, elapsed_s: float) -> RenderableType:
    """The table and its header, so many seconds after the command began."""
    config = board.config
    title = Text.assemble(
        ("fedwan ", "bold cyan"),
        (f"{subject(config)} · {config.strategy}", "bold"),
        f" · {sites_text(config.sites)} · H = {config.h}",
    )
    left = board.remaining_s
    times = f"{duration_text(elapsed_s)} elapsed"
    if left is not None and not board.is_done:
        times += f", about {duration_text(left)} left"
    progress = Table.grid(padding=(0, 2))
    progress.add_row(
        ProgressBar(total=max(1, config.steps), completed=board.step, width=30),
        Text(f"step {board.step:,}/{config.steps:,}, round {board.version:,}"),
        Text(times),
        Text(board.phase, style="green" if board.phase in ("training", "done") else "yellow"),
    )
    lines: list[RenderableType] = [title, progress]
    if board.fd is not None:
        lines.append(Text(_quality(board)))
    lines.append(_site_table(board))
    lines += [
        Text.from_markup(f"[yellow]{event.event}[/] {escape(event.text)}")
        for event in board.news[-_MOST_NEWS:]
    ]
    return Group(*lines)


def _quality(board: Board) -> str:
    text = f"Fréchet distance {number_text(board.fd)} (floor {number_text(board.fd_floor)}"
    if board.fd_untrained is not None:
        text += f", untrained {number_text(board.fd_untrained)}"
    return text + ")"


def _site_table(board: Board) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="dim")
    table.add_column("site")
    table.add_column("state")
    losses = sorted({name for row in board.sites.values() for name in row.losses})
    for name in ("step", *losses, "utilisation", "up", "down", "steps/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in board.sites.values():
        table.add_row(
            Text(row.name, style="bold"),
            Text(row.state, style=_STATE_STYLES.get(row.state, "dim")),
            f"{row.step:,}",
            *(number_text(row.losses.get(name)) for name in losses),
            percent_text(row.utilisation),
            bytes_text(row.bytes_up),
            bytes_text(row.bytes_down),
            number_text(row.steps_per_s),
            style="" if row.state == "training" else "dim",
        )
    return table
