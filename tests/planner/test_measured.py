"""A link as `fedwan doctor link` measured it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fedwan.errors import ConfigError
from fedwan.link.measure import Measurement, Way
from fedwan.link.tcp import TcpSettings
from fedwan.planner.measured import measured_link, read_measurement

MACHINE = TcpSettings(("reno", "bbr"), ("reno", "bbr", "cubic"), (4096, 131072, 6291456), ())
FOUND = Measurement(
    *("coordinator:7444", "s1", 4, 100.0, 105.0),
    *(Way(90.0, "bbr", 0.01), Way(40.0, "cubic", None), MACHINE),
)


def test_each_way_gets_what_was_measured_less_the_other_one_s_acknowledgements() -> None:
    up, down = measured_link(FOUND)
    assert 0.97 * 90 < up.bytes_per_s * 8 / 1e6 < 90
    assert 0.97 * 40 < down.bytes_per_s * 8 / 1e6 < 40
    assert (up.rtt_s, up.restarts, down.restarts) == (0.1, False, True)


def test_what_doctor_wrote_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps(asdict(FOUND) | {"advice": None}))
    assert measured_link(read_measurement(path)) == measured_link(FOUND)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"advice": null, "up": 3}', "nonsense"])
def test_anything_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "link.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is no measurement; write one with `fedwan doctor link"):
        read_measurement(path)
