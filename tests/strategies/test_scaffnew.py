"""What control variates are for: a GAN whose sites hold different data, which averaging ruins."""

from __future__ import annotations

import pytest
import torch
from benchmarks.simulated import run_simulated

from fedwan.app import load_run
from fedwan.errors import ConfigError

RATES = ("inner.generator.lr=5e-4", "inner.discriminator.lr=5e-4")


def distance(*words: str) -> float:
    asked = ["workload=gan", "data.name=ring8", "data.split=by_label", "sites=4", "h=20", *RATES]
    config = load_run(None, [*asked, "inner.discriminator.state=average", *words])
    return float(run_simulated(config).totals.quality["fd"])


@pytest.mark.slow
def test_sites_of_two_modes_each_learn_the_whole_ring() -> None:
    torch.set_num_threads(1)
    coded = ("codec.up=int4", "codec.down=int4")
    # Averaging ends above 2, with no sample near the ring's far side.
    assert distance("strategy=scaffnew", "steps=1400", *coded) < 0.4


def test_settings_that_cannot_be_corrected_for_are_refused() -> None:
    for word, text in (
        ("codec.up=topk2", "set codec.up=int4, or strategy=local_sgd"),
        ("network.generator.codec_up=topk2", "set network.generator.codec_up=int4, or strategy="),
        ("round.least_steps=1", "compares equal numbers of steps"),
        ("round.max_staleness=1 round.quorum=3 round.grace=3", "steps from the same weights"),
        ("outer.generator.lr=0.5", "averages the weights"),
        ("stream.tau=2", "stream.tau"),
        ("site.partition=weights site.processes=2", "set site.partition=gradients"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_run(None, ["workload=gan", "strategy=scaffnew", *word.split()])
