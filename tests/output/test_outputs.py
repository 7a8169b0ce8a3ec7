"""A run's folder: everything promised is in it, however the run ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fedwan.config import load
from fedwan.output.outputs import Outputs
from fedwan.output.records import EventRecord, RoundRecord, read_records
from fedwan.output.summary import read_summary
from tests.output.runs import FakeTotals, make_config, round_row, write_run


def test_a_finished_run_leaves_everything_that_is_promised(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with Outputs(config, tmp_path) as outputs:
        write_run(outputs, finish=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "config.yaml",
        "metrics.jsonl",
        "samples.png",
        "summary.json",
        "report.html",
    }
    assert load(tmp_path / "config.yaml", []) == config


def test_the_summary_holds_means_over_sites_and_sums_of_bytes(tmp_path: Path) -> None:
    with Outputs(make_config(tmp_path), tmp_path) as outputs:
        write_run(outputs, finish=True)
    summary = read_summary(tmp_path / "summary.json")
    assert (summary.compute_s, summary.wait_s, summary.utilisation) == (4.0, 1.0, 0.8)
    assert (summary.bytes_up, summary.bytes_down) == (4000, 4100)
    assert (summary.rounds, summary.contributions, summary.rejoins) == (2, 4, 1)
    assert summary.quality == FakeTotals().quality
    assert summary.global_sha256 == "ab" * 32


def test_a_run_that_breaks_leaves_a_report_but_no_summary(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Outputs(make_config(tmp_path), tmp_path) as outputs:
        write_run(outputs, finish=False)
        raise RuntimeError("broken")
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / "summary.json").exists()


def test_a_resumed_run_keeps_its_records_up_to_the_checkpoint(tmp_path: Path) -> None:
    with Outputs(make_config(tmp_path), tmp_path) as outputs:
        write_run(outputs, finish=False)
    with Outputs(make_config(tmp_path), tmp_path, resumed_version=1) as outputs:
        outputs.record(round_row(2, "s1"))
    records = read_records(tmp_path / "metrics.jsonl")
    rounds = [(r.version, r.site) for r in records if isinstance(r, RoundRecord)]
    assert rounds == [(1, "s1"), (1, "s2"), (2, "s1")]
    assert (tmp_path / "samples.png").exists()


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\xff" * 64])
def test_bytes_from_a_site_that_hold_no_picture_become_a_warning(
    tmp_path: Path, data: bytes
) -> None:
    with Outputs(make_config(tmp_path), tmp_path) as outputs:
        outputs.samples(3, 60, data)
    (warning,) = read_records(tmp_path / "metrics.jsonl")
    assert isinstance(warning, EventRecord) and warning.event == "warning"
    assert "version 3 cannot be drawn" in warning.text
    assert not (tmp_path / "samples.png").exists()


def test_a_report_without_pictures_is_said_once_and_draws_none(tmp_path: Path) -> None:
    with Outputs(make_config(tmp_path), tmp_path) as outputs:
        outputs.samples(0, 0, save({}))
        outputs.samples(1, 10, save({"moments/a": torch.zeros(1)}))
    (event,) = read_records(tmp_path / "metrics.jsonl")
    assert isinstance(event, EventRecord) and event.event == "samples_kept"
    assert "data.show_samples" in event.text
    assert not (tmp_path / "samples.png").exists()
    assert "stay with them, unless an owner" in (tmp_path / "report.html").read_text()
