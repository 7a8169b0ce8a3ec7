"""What a run that goes on takes from its journal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedwan.coordinator.past import Past
from fedwan.coordinator.run import CoordinatedRun
from fedwan.output.journal import JOURNAL
from fedwan.output.records import SPENT
from tests.support import run_tiny, tiny_config

CONFIG = tiny_config(steps=4)


def append(folder: Path, *rows: Mapping[str, Any]) -> None:
    with (folder / JOURNAL).open("a") as journal:
        journal.writelines(json.dumps(row) + "\n" for row in rows)


def again(folder: Path) -> CoordinatedRun:
    return CoordinatedRun(CONFIG, "again", folder, lambda row: None, lambda *_: None)


def test_rejoins_and_farewells_count_once_whenever_the_checkpoint_was_written(
    tmp_path: Path,
) -> None:
    before = run_tiny(tmp_path, CONFIG).result.totals
    rejoin = {"event": "rejoin", "site": "s1"}
    drained = {"event": "leave", "site": "s2", "text": "s2 left: it was drained"}
    append(tmp_path, rejoin, drained, rejoin)
    run = again(tmp_path)
    run.resume()
    assert run.hub.agreement.agreed is not None, "who has other weights is refused as before"
    assert run._registry.rejoins == 2
    assert run.hub.unmerged.bytes_down > 0
    run.totals.add_work(run.hub.unmerged)
    for name in SPENT:
        assert getattr(run.totals, name) == pytest.approx(getattr(before, name)), name


def test_an_older_checkpoint_is_told_of_unless_it_was_chosen(tmp_path: Path) -> None:
    run_tiny(tmp_path, CONFIG)
    assert again(tmp_path).resume()[1] == ""
    append(tmp_path, {"event": "checkpoint", "versions": [9]})
    assert "of version 2, and one of 9 was written" in again(tmp_path).resume()[1]
    assert again(tmp_path).resume(goes_back=True)[1] == ""


def test_where_sites_began_anew_is_kept_and_comes_sooner_where_versions_are_taken_back(
    tmp_path: Path,
) -> None:
    warning = {"event": "warning", "text": "s2 has no checkpoint", "anew_from": [8]}
    append(tmp_path, {"event": "warning", "text": "of something else"}, warning)
    assert Past.read(tmp_path / JOURNAL).anew_from == [8]
    append(tmp_path, {"event": "resume", "versions": [5]}, {"event": "resume", "versions": [7]})
    assert Past.read(tmp_path / JOURNAL).anew_from == [6]
