"""The second sink: real Weights & Biases, offline, and what happens when it breaks."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from fedwan.output import outputs as outputs_module
from fedwan.output.outputs import Outputs
from fedwan.output.records import EventRecord, QualityRecord, Record, RoundRecord, to_record
from fedwan.output.sinks import metrics_of, open_sinks
from tests.output.runs import make_config, quality_row, round_row, write_run


def test_nothing_is_opened_and_nothing_imported_unless_asked_for(tmp_path: Path) -> None:
    assert open_sinks(make_config(tmp_path), tmp_path) == []
    code = "import sys, fedwan.output.outputs; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_round_becomes_metrics_under_its_site() -> None:
    record = to_record(round_row(2, "s1") | {"t": 1.0})
    assert isinstance(record, RoundRecord)
    metrics = metrics_of(record)
    assert metrics["step"] == 20
    assert metrics["s1/loss/generator"] == 0.7
    assert metrics["s1/norm/discriminator"] == 1.0
    assert metrics["s1/bytes_up"] == 1000


def test_quality_becomes_metrics_and_lists_and_events_do_not() -> None:
    record = to_record(quality_row(2, 1.5) | {"t": 1.0})
    assert isinstance(record, QualityRecord)
    assert metrics_of(record)["quality/fd"] == 1.5
    assert "quality/histogram" not in metrics_of(record)
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


def test_a_sink_that_breaks_is_dropped_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking:
        calls = 0

        def write(self, record: Record) -> None:
            Breaking.calls += 1
            raise ConnectionError("no route")

        def picture(self, path: Path, step: int) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(outputs_module, "open_sinks", lambda config, out: [Breaking()])
    with caplog.at_level(logging.WARNING), Outputs(make_config(tmp_path), tmp_path) as outputs:
        write_run(outputs, finish=True)
    assert Breaking.calls == 1
    assert "Breaking is dropped: no route" in caplog.text
    assert (tmp_path / "summary.json").exists()
