"""Weights & Biases: the real library, offline, and what happens when it breaks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fedwan.output.outputs import Outputs
from fedwan.output.records import EventRecord
from fedwan.output.wandb_log import metrics_of
from tests.output.runs import make_config, quality_row, record_of, round_row, write_run


def test_rounds_and_quality_become_metrics_and_lists_and_events_do_not() -> None:
    metrics = metrics_of(record_of(round_row(2, "s1"), 1.0))
    assert (metrics["step"], metrics["s1/loss/generator"]) == (20, 0.7)
    assert (metrics["s1/norm/discriminator"], metrics["s1/bytes_up"]) == (1.0, 1000)
    metrics = metrics_of(record_of(quality_row(2, 1.5), 1.0))
    assert metrics["quality/fd"] == 1.5 and "quality/histogram" not in metrics
    assert metrics_of(EventRecord(1.0, "join", "s1", "")) == {}


@pytest.mark.slow
def test_an_offline_run_is_logged_with_its_pictures_and_goes_on_under_its_name(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, wandb="offline")
    with Outputs(config, tmp_path) as outputs:
        write_run(outputs, finish=False)
    (first,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert first.stat().st_size > 1000
    assert list((tmp_path / "wandb").glob("offline-run-*/files/media/images/samples_*.png"))
    name = (tmp_path / "wandb" / "run-id").read_text()
    assert first.name == f"run-{name}.wandb"
    with Outputs(config, tmp_path, resumed_version=1) as outputs:
        write_run(outputs, finish=True)
    assert (tmp_path / "wandb" / "run-id").read_text() == name


def test_if_it_breaks_it_is_dropped_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking:
        calls = 0

        def log(self, metrics: object) -> None:
            Breaking.calls += 1
            raise ConnectionError("no route")

    with caplog.at_level(logging.WARNING), Outputs(make_config(tmp_path), tmp_path) as outputs:
        outputs._wandb._run = Breaking()
        write_run(outputs, finish=True)
    assert Breaking.calls == 1
    assert "Weights & Biases is dropped: no route" in caplog.text
    assert (tmp_path / "summary.json").exists()
