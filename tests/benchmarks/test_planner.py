"""The planner's benchmark: its points and its predictions."""

from __future__ import annotations

import pytest

from benchmarks import planner


def test_a_point_has_the_prediction_beside_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = planner.pix2pix_layout()
    assert sum(spec.num_values for spec in layout.values()) == 57_182_660
    row = {"utilisation": 0.5, "fragments": 1, "emulation": "tun"}
    monkeypatch.setattr(planner, "measure_case", lambda case: row)
    case = planner.cases(True)[2]
    found = planner.compare(case, planner.predict(case, layout))
    keys = "strategy codec h rate_mbit rtt_ms loss predicted measured".split()
    assert list(found)[: len(keys)] == keys
    assert found["measured"] == 0.5 and 0 < found["predicted"] < 1
    assert found["error"] == pytest.approx(found["predicted"] / 0.5 - 1, abs=1e-3)
    rows = [{"error": 0.2}, {"error": -0.1}, {"error": 0.15}]
    assert list(planner.summarise(rows)) == ["2 of 3 predicted within 15% of what was measured"]
