"""What messages of sites may hold."""

from __future__ import annotations

import json

import pytest

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.protocol.limits import MOST_FIGURES, read_report


def test_a_report_has_so_many_figures_and_no_more() -> None:
    figures = {f"figure {number}": 1.0 for number in range(MOST_FIGURES)}
    found, problem = read_report(wire.QualityReport(figures_json=json.dumps(figures)))
    assert (found.figures, problem) == (figures, "")
    with pytest.raises(PayloadError, match=f"no JSON object of at most {MOST_FIGURES} names"):
        read_report(wire.QualityReport(figures_json=json.dumps(figures | {"another": 1.0})))
