"""The report: one page that needs nothing else, for runs that ended and runs that did not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fedwan.config import dump
from fedwan.errors import ConfigError
from fedwan.output import report
from fedwan.output.chart import Points
from fedwan.output.outputs import Outputs
from fedwan.output.records import Recorder
from fedwan.output.report import write_report
from tests.output.runs import TOTALS, event_row, make_config, quality_row, round_row, write_run


def test_a_script_s_own_figures_and_losses_bear_its_names_once(tmp_path: Path) -> None:
    with Outputs(make_config(tmp_path), tmp_path) as outputs:
        for step in (0, 10, 20):
            row = {"kind": "quality", "version": step // 10, "step": step, "site": "s1"}
            finite = {"accuracy": 0.5} if step < 20 else {"accuracy": float("nan")}
            outputs.record(row | {"val_mse": 0.25 / (1 + step), **finite})
        outputs.record(round_row(1, "s1") | {"losses": {"loss": 0.7}})
    html = (tmp_path / "report.html").read_text()
    assert "Fréchet" not in html and ">0.0119<" in html
    assert "val_mse of the EMA weights" in html and "accuracy of the EMA weights" in html
    assert "<figcaption>Loss</figcaption>" in html


def test_a_finished_run_is_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    with Outputs(make_config(tmp_path), tmp_path) as outputs:
        write_run(outputs, finish=True)
    html = (tmp_path / "report.html").read_text()
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o600
    charts = (
        "Fréchet distance of the EMA weights",
        "Loss: generator",
        "Loss: discriminator",
        "Norm of the contribution: generator",
        "Where the time of each site went",
        "Bytes on the wire, all sites",
    )
    escaped = "s2 &lt;rejoined&gt; &amp; is back"
    rest = (">done<", "data:image/png;base64,", "workload: gan", "untrained 80", "4.9 times more")
    rest += ("20 of 20 steps; evaluations: 3.0 s",)
    for part in (*charts, escaped, *rest):
        assert part in html, part
    # The page loads nothing from anywhere.
    assert not re.search(r"https?://|<script|<link|@import|url\(", html)
    assert all(source.startswith("data:") for source in re.findall(r'src="([^"]*)', html))
    assert "prefers-color-scheme:dark" in html


def test_of_many_refusals_the_page_says_how_many_there_were_and_a_late_answer_is_not_the_newest(
    tmp_path: Path,
) -> None:
    with Outputs(make_config(tmp_path), tmp_path) as outputs:
        write_run(outputs, finish=False)
        outputs.event("rejected", "s1", "contribution of s1 refused: not finite")
        outputs.record(quality_row(1, 30.0))  # of a site that took its time
        outputs.finish(replace(TOTALS, rejected=11), 12.5, 2, 500, "ab" * 32)
    html = write_report(tmp_path).read_text()
    assert "1 rejoined, 11 rejected" in html
    assert "10.0 times the floor" in html  # 4 for 0.4, of version 2


def test_a_run_that_has_only_begun_has_a_report_too_and_a_folder_without_one_is_refused(
    tmp_path: Path,
) -> None:
    dump(make_config(tmp_path), tmp_path / "config.yaml")
    html = write_report(tmp_path).read_text()
    assert "no record yet" in html and "not measured" in html and "<figure>" not in html
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path / "else")


def test_a_long_run_is_drawn_by_as_many_points_as_a_short_one_and_loses_no_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fragments that take turns as many each; what happened in the middle is counted."""
    drawn: dict[str, Mapping[str, Points]] = {}
    monkeypatch.setattr(
        report, "line_chart", lambda title, lines, *_, **__: drawn.update({title: lines})
    )
    monkeypatch.setattr(report, "_MOST_POINTS", 8)
    for num, every in ((4, 1), (40, 8)):
        out = tmp_path / str(num)
        out.mkdir()
        recorder = Recorder(out)
        dump(make_config(out), out / "config.yaml")
        for number in range(num):
            for site in ("s1", "s2"):
                turn = {"fragment": number % 2, "norms": {"ab"[number % 2]: number}}
                recorder.write(round_row(number + 1, site, loss=number) | turn)
            for _ in range(10):
                recorder.write(event_row("rejoin", "s2"))
        recorder.close()
        html = write_report(out).read_text()
        assert set(drawn) >= {"Loss: generator", "Norm of the contribution: b"}
        assert [y for _, y in drawn["Norm of the contribution: b"]["s2"] if y is not None] == [
            float(number) for number in range(1, num, 2 * every)
        ]
        assert (10.0, 0.0) == drawn["Loss: generator"]["s1"][0]
        assert drawn["Bytes on the wire, all sites"]["up"][:2] == [
            (10 * (number + 1), 2000 * (number + 1)) for number in (0, every)
        ]
        assert f"{10 * num} rejoined" in html and (">200 more<" in html) == (num == 40)
        assert f">{num // 2}</td>" in html  # rounds of a site


@pytest.mark.slow
def test_a_flood_of_names_leaves_the_charts_of_those_that_came_most_often(tmp_path: Path) -> None:
    with Outputs(make_config(tmp_path), tmp_path) as outputs:
        for version in (1, 2, 3):
            for site in ("s1", "s2"):
                row = round_row(version, site)
                names = [f"{version}/{number}" for number in range(50 if site == "s1" else 0)]
                for values in (row["losses"], row["norms"]):
                    values |= dict.fromkeys(names, 1.0)
                outputs.record(row)
    html = (tmp_path / "report.html").read_text()
    assert "Loss: generator" in html and "Norm of the contribution: discriminator" in html
    assert 10 < html.count("<figure>") <= 50
