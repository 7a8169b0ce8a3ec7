"""What is said of a link that was measured."""

from __future__ import annotations

import pytest

from fedwan.link.measure import Measurement, Way, advise


@pytest.mark.parametrize(
    ("up", "down", "buffer", "says"),
    [
        (Way(90.0, "bbr", 0.01), Way(88.0, "bbr", None), 4 << 20, ""),
        (Way(90.0, "cubic", 0.0), Way(88.0, "cubic", None), 0, ""),
        (Way(9.0, "cubic", 1e-3), Way(8.0, "bbr", None), 4 << 20, "on the site: sudo modprobe"),
        (Way(90.0, "bbr", 1e-3), Way(9.0, "cubic", None), 4 << 20, "on the coordinator: sudo mod"),
        (Way(660.0, "bbr", 0.0), Way(650.0, "bbr", None), 4 << 20, "tcp_wmem='4096 131072 16777"),
        (Way(90.0, "", None), Way(88.0, "", None), 4 << 20, ""),
    ],
)
def test_loss_and_small_buffers_are_told_with_the_machine_and_the_command(
    up: Way, down: Way, buffer: int, says: str
) -> None:
    advice = advise(Measurement("a:1", "s1", 4, 100.0, 105.0, up, down), buffer)
    assert says in advice and bool(says) == bool(advice)
