"""A site as its service starts it: torchrun, an assignment, a data plane under mutual TLS."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedwan.site.assignment import read_outcome
from tests.site.support import Served, asked

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_and_the_next_start_ends_on_the_same_bits(
    identities: Path, tmp_path: Path
) -> None:
    script, shas = Path(__file__).with_name("script.py"), set()
    for name, killed in (("whole", ()), ("first", (0, 5)), ("second", (1, 5))):
        served = Served(asked("h=2", "round.patience_s=60"), tmp_path / name, identities)
        with served.serving():
            if killed:
                assert served.start(*TORCHRUN, script, *killed).wait(120) != 0
            assert served.start(*TORCHRUN, script).wait(120) == 0
        outcome, has_joined = read_outcome(served.assignment)
        assert has_joined and outcome is not None and not outcome.error
        shas.add(served.sha256)
        assert served.run.site_sha256() == {"s1": served.sha256}
    assert len(shas) == 1
