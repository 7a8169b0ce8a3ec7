"""The live table of a run: follows its records, and knows of nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedwan.config import Config, load_dumped
from fedwan.errors import ConfigError
from fedwan.output.board import Board
from fedwan.output.journal import JOURNAL
from fedwan.output.records import METRICS, iter_records
from fedwan.output.units import (
    bytes_text,
    duration_text,
    number_text,
    percent_text,
    sites_text,
    subject,
)

_TICK_S = 0.25
_PLAIN_EVERY_S = 15.0
_STATE_STYLES = {"training": "green", "measuring": "cyan", "silent": "bold red"}
_MOST_LOSSES = 4
_LONGEST_S = 5.0
"""Between two looks, however long one takes on a busy machine."""


class Follower:
    """A board that follows a run's folder while the run goes on."""

    def __init__(self, out: Path, config: Config) -> None:
        self._out = out
        # A new run has no past, and its clock may be set back.
        self._since = time.time() if (out / JOURNAL).exists() else 0.0
        self._began = time.monotonic()
        self._sizes: dict[str, int] = {}
        self._at: dict[str, int] = {}
        """Bytes of each file that the board has."""
        self._due_s = 0.0
        self.board = Board(config, self._since)

    @property
    def elapsed_s(self) -> float:
        """Since the watch began."""
        return time.monotonic() - self._began

    def poll(self, *, is_last: bool = False) -> None:
        """Read on in the run's files if they have grown, a fiftieth of the time at most."""
        paths = [path for name in (METRICS, JOURNAL) if (path := self._out / name).exists()]
        sizes, begun_s = {path.name: path.stat().st_size for path in paths}, self.elapsed_s
        if sizes == self._sizes or begun_s < self._due_s and not is_last:
            return
        with suppress(ConfigError):  # damage must not end a live view
            config, at, board = load_dumped(self._out), self._at.copy(), self.board
            if is_new := any(sizes.get(name, 0) < begin for name, begin in at.items()) or not at:
                at, board = {}, Board(config, self._since)  # perhaps written anew
            records, board.config = iter_records(self._out, at), config
            # All of a long run at once would fill memory; of others damage must leave the board.
            for record in records if is_new else list(records):
                board.take(record)
            self.board, self._at, self._sizes = board, at, sizes
        self._due_s = self.elapsed_s + min(_LONGEST_S, 50 * (self.elapsed_s - begun_s))


def watch(out: Path, config: Config, is_running: Callable[[], bool], console: Console) -> None:
    """Show a run until it ends: a live table on a terminal, occasional lines elsewhere.

    `is_running`, whether there is more to come, is asked a few times a second.
    """
    follower, told = Follower(out, config), set[tuple[float, str]]()
    due_s, phase, last, goes_on = 0.0, "", "", True
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while goes_on:
            goes_on = is_running()
            follower.poll(is_last=not goes_on)
            board, elapsed_s = follower.board, follower.elapsed_s
            new = {(e.t, e.text): f"{e.event}: {e.text}" for e in board.news}
            said = [text for key, text in new.items() if key not in told]
            told |= new.keys()
            line = _plain_line(board)
            is_due = elapsed_s >= due_s or board.phase != phase or not goes_on
            if console.is_terminal:
                live.update(render_board(board, elapsed_s), refresh=True)
            elif line != last and is_due:
                due_s, phase, last = elapsed_s + _PLAIN_EVERY_S, board.phase, line
                said.append(f"{duration_text(elapsed_s)}: {line}")
            for text in said:
                console.print(text, markup=False, highlight=False, soft_wrap=True)
            time.sleep(_TICK_S if goes_on else 0)
    if console.is_terminal:
        console.print(render_board(follower.board, follower.elapsed_s))


def _plain_line(board: Board) -> str:
    is_silent = any(row.state == "silent" for row in board.sites.values())
    parts, total = [is_silent and board.waiting or board.phase], board.total
    if board.version:
        parts += [
            f"round {board.version}",
            f"step {board.step}/{board.config.steps or '?'}",
            f"{bytes_text(total.bytes_up)} up, {bytes_text(total.bytes_down)} down",
        ]
        if total.utilisation is not None:
            parts.append(f"utilisation {percent_text(total.utilisation)}")
    if board.quality and board.quality.figures:  # a script may give samples alone
        parts.append(_quality(board))
    return ", ".join(parts)


def render_board(board: Board, elapsed_s: float) -> RenderableType:
    """The table and its header, so many seconds after the command began."""
    config = board.config
    title = Text.assemble(
        ("fedwan ", "bold cyan"),
        (f"{subject(config)} · {config.strategy}", "bold"),
        f" · {sites_text(config.num_sites)} · H = {config.h}",
    )
    left, times = board.remaining_s, f"{duration_text(elapsed_s)} elapsed"
    if left and not board.is_done:
        times += f", about {duration_text(left)} left"
    if (measuring_s := board.measuring_left_s(time.time())) is not None:
        times += f", {duration_text(measuring_s)} of measuring left"
    progress = Table.grid(padding=(0, 2))
    progress.add_row(
        ProgressBar(total=max(1, config.steps), completed=board.step, width=30),
        Text(f"step {board.step:,}/{config.steps:,}, round {board.version:,}"),
        Text(times),
        Text(board.phase, style="green" if board.phase in ("training", "done") else "yellow"),
    )
    lines: list[RenderableType] = [title, progress]
    if board.quality and board.quality.figures:
        lines.append(Text(_quality(board)))
    if board.waiting:
        lines.append(Text(board.waiting, style="yellow"))
    return Group(*lines, _site_table(board))


def _quality(board: Board) -> str:
    name, value, beside = board.quality_told()
    start = "untrained: " if board.quality and board.quality.version == 0 else ""
    return ", ".join([f"{start}{name} {value}", *beside[:1]])


def _site_table(board: Board) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, header_style="dim")
    for name in ("site", "state"):
        table.add_column(name, no_wrap=True, vertical="bottom")
    losses = sorted({name for row in board.sites.values() for name in row.losses})[:_MOST_LOSSES]
    for name in ("step", *losses, "util.", "up", "down"):
        table.add_column(Text(name), justify="right", no_wrap=True, vertical="bottom")
    # What does not fit is cut where it costs least, in the names of losses.
    for column, name in zip(table.columns[3:], losses, strict=False):
        told = f"{'losses' if len(losses) > 1 else 'loss'}\n" if name == losses[0] != "loss" else ""
        column.header = Text(told + name, no_wrap=True, overflow="ellipsis")
        column.no_wrap = False
    for row in board.sites.values():
        table.add_row(
            Text(row.name, style="bold"),
            Text(row.state, style=_STATE_STYLES.get(row.state, "dim")),
            f"{row.step:,}",
            *(number_text(row.losses.get(name)) for name in losses),
            percent_text(row.utilisation),
            bytes_text(row.bytes_up),
            bytes_text(row.bytes_down),
            style="" if row.state in ("training", "measuring") else "dim",
        )
    return table
