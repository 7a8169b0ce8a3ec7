"""A run's folder: everything promised is in it, however the run ends."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save

from fedwan.config import load
from fedwan.output.outputs import Outputs, _run_id, metrics_of
from fedwan.output.records import EventRecord, iter_records
from fedwan.output.summary import read_summary
from tests.output.runs import TOTALS, make_config, quality_row, record_of, round_row, write_run
from tests.planes import eventually


def test_a_finished_run_leaves_everything_that_is_promised(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.sites = ["s1", "s2"]
    with Outputs(config, tmp_path) as outputs:
        outputs.event("warning", None, 'it says "event":"warning"')
        write_run(outputs, finish=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "config.yaml",
        "journal.jsonl",
        "metrics.jsonl",
        "samples.png",
        "summary.json",
        "report.html",
    }
    assert load(tmp_path / "config.yaml", []) == config
    # Seconds are means over the sites, bytes are sums.
    summary = read_summary(tmp_path / "summary.json")
    assert (summary.compute_s, summary.wait_s, summary.utilisation) == (4.0, 1.0, 0.8)
    assert (summary.bytes_up, summary.bytes_down) == (4000, 4100)
    assert (summary.rounds, summary.contributions, summary.rejoins) == (2, 4, 1)
    assert summary.quality == TOTALS.quality and summary.sites == 2
    assert (summary.global_sha256, summary.warnings) == ("ab" * 32, 1)


@pytest.mark.slow
def test_a_run_that_breaks_leaves_a_report_but_no_summary_and_its_picture_when_resumed(
    tmp_path: Path,
) -> None:
    with pytest.raises(RuntimeError), Outputs(make_config(tmp_path), tmp_path) as outputs:
        write_run(outputs, finish=False)
        raise RuntimeError("broken")
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / "summary.json").exists()
    with Outputs(make_config(tmp_path), tmp_path, resumed=(1, [1])):
        pass
    assert (tmp_path / "samples.png").exists()


def test_a_report_that_cannot_be_written_does_not_hide_how_the_run_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        with Outputs(make_config(tmp_path), tmp_path) as outputs:
            write_run(outputs, finish=False)
            (tmp_path / "summary.json").write_text("none")
            raise RuntimeError("broken")
    assert "the report cannot be written" in caplog.text


def test_bytes_from_a_site_that_hold_no_picture_become_a_warning(tmp_path: Path) -> None:
    with Outputs(make_config(tmp_path), tmp_path) as outputs:
        undrawable = [save({"generated": torch.zeros(n)}) for n in ((4, 3), (0, 1, 8, 8))]
        for data in (b"nonsense", b"\xff" * 64, *undrawable):
            outputs.samples(3, 60, data)
    for warning in (found := list(iter_records(tmp_path))):
        assert isinstance(warning, EventRecord) and warning.event == "warning"
        assert "version 3 cannot be drawn" in warning.text
    assert len(found) == 4 and not (tmp_path / "samples.png").exists()


def test_a_report_without_pictures_is_said_once_and_draws_none(tmp_path: Path) -> None:
    with Outputs(make_config(tmp_path), tmp_path) as outputs:
        outputs.samples(0, 0, b"")  # nothing to make any with
        outputs.samples(0, 0, save({}))
        outputs.samples(1, 10, save({"moments/a": torch.zeros(1)}))
    (event,) = list(iter_records(tmp_path))
    assert isinstance(event, EventRecord) and event.event == "samples_kept"
    assert "data.show_samples" in event.text
    assert not (tmp_path / "samples.png").exists()
    assert "stay with them, unless an owner" in (tmp_path / "report.html").read_text()


def test_rounds_and_quality_become_metrics_and_lists_and_events_do_not() -> None:
    metrics = metrics_of(record_of(round_row(2, "s1"), 1.0))
    assert (metrics["step"], metrics["s1/loss/generator"]) == (20, 0.7)
    assert (metrics["s1/norm/discriminator"], metrics["s1/bytes_up"]) == (1.0, 1000)
    metrics = metrics_of(record_of(quality_row(2, 1.5), 1.0))
    assert metrics["quality/fd"] == 1.5 and "quality/histogram" not in metrics
    assert metrics_of(EventRecord(1.0, "join", "s1", "")) == {}


@pytest.mark.slow
def test_an_offline_run_is_logged_with_its_pictures_under_a_name_that_stays(tmp_path: Path) -> None:
    with Outputs(make_config(tmp_path, wandb="offline"), tmp_path) as outputs:
        write_run(outputs, finish=False)
    (first,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    eventually(lambda: first.stat().st_size > 1000)  # its service writes on after it has answered
    assert list((tmp_path / "wandb").glob("offline-run-*/files/media/images/samples_*.png"))
    assert first.name == f"run-{_run_id(tmp_path)}.wandb"


@pytest.mark.parametrize("told", ["no route", "it has not ended in 0.1 s"])
def test_if_it_breaks_or_hangs_it_is_dropped_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setattr("fedwan.output.outputs.write_report", lambda out: None)
    monkeypatch.setattr("fedwan.output.outputs._LEAVE_S", 0.1)
    goes_on, calls = threading.Event(), []

    def log(metrics: object) -> None:
        calls.append(metrics)
        if told == "no route":
            raise ConnectionError(told)
        goes_on.wait(10.0)

    with caplog.at_level(logging.WARNING), Outputs(make_config(tmp_path), tmp_path) as outputs:
        outputs._wandb._run = SimpleNamespace(log=log)
        write_run(outputs, finish=True)
    assert len(calls) == 1
    assert f"Weights & Biases is dropped: {told}" in caplog.text
    assert (tmp_path / "summary.json").exists()
    goes_on.set()
