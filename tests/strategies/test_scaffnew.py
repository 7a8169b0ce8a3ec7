"""What control variates cannot be combined with."""

from __future__ import annotations

import pytest

from fedwan.app import load_run
from fedwan.errors import ConfigError


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
