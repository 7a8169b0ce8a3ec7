"""How long bytes take on a link that is modelled or was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fedwan.config import LinkConfig
from fedwan.errors import ConfigError
from fedwan.link.measure import Measurement, Way, read_measurement
from fedwan.link.tcp import TcpSettings, flow_mbit
from fedwan.planner.costs import measured_link, modelled_link


def mbit(**settings: object) -> float:
    return modelled_link(LinkConfig(**settings)).up.bytes_per_s * 8 / 1e6  # type: ignore[arg-type]


def test_payloads_never_get_the_whole_rate_and_a_pace_saves_what_bbr_loses_at_the_queue() -> None:
    link = {"rate_mbit": 100.0, "rtt_ms": 100.0, "congestion": "bbr"}
    # Headers alone leave 96.5 %.
    assert 80 < (plain := mbit(**link)) < mbit(**link, pace_mbit=99.0) < 96.5
    # A pace above the rate changes nothing.
    assert mbit(**link, pace_mbit=200.0) == plain == mbit(**link | {"congestion": "auto"})
    # A link without limits takes no time.
    assert modelled_link(LinkConfig()).up.transfer_s(1e12) == 0.0


def test_losses_hold_cubic_back_and_bbr_hardly() -> None:
    lossy = {"rate_mbit": 200.0, "rtt_ms": 150.0, "loss": 0.001}
    assert mbit(**lossy, congestion="cubic") == 4 * flow_mbit("cubic", 150.0, 0.001)
    assert mbit(**lossy, congestion="bbr") > 160


MACHINE = TcpSettings(("reno", "bbr"), ("reno", "bbr", "cubic"), (4096, 131072, 6291456), ())
FOUND = Measurement(
    *("coordinator:7444", "s1", 4, 100.0, 105.0),
    *(Way(90.0, "bbr", 0.01), Way(40.0, "cubic", None), MACHINE),
)


def test_each_way_gets_what_was_measured_less_the_other_one_s_acknowledgements() -> None:
    up, down = measured_link(FOUND)
    assert 0.97 * 90 < up.bytes_per_s * 8 / 1e6 < 90
    assert 0.97 * 40 < down.bytes_per_s * 8 / 1e6 < 40
    assert up.rtt_s == 0.1


def test_what_doctor_wrote_is_read_back_and_anything_else_refused(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps(asdict(FOUND) | {"advice": None}))
    assert measured_link(read_measurement(path)) == measured_link(FOUND)
    for text in ("", "[]", "{}", '{"advice": null, "up": 3}', "nonsense"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no measurement; write one with `fedwan doctor l"):
            read_measurement(path)
