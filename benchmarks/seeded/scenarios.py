"""The runs that faults are caused in: what is set, and for how long their bits must be the same."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from benchmarks.seeded import script
from fedwan.app import load_run
from fedwan.config import Config

SGD = " ".join(
    f"inner.{network}.name=sgd inner.{network}.lr=0.05 inner.{network}.beta1=0.9"
    for network in script.KINDS
)
MOMENTUM = " ".join(f"outer.{network}.momentum=0.5" for network in script.KINDS)


class Scenario(NamedTuple):
    """Settings of a run, and how long its bits are those of the undisturbed one."""

    words: str
    same_bits: Literal["always", "until a death", "never"]


SCENARIOS = {
    "diloco": Scenario("h=2 strategy=diloco codec.up=fp32", "always"),
    "diloco int2": Scenario("h=2 strategy=diloco codec.up=int2 codec.down=int2", "always"),
    "scaffnew": Scenario(
        "h=2 strategy=scaffnew codec.up=int4 codec.down=int4 " + MOMENTUM,
        "always",
    ),
    "sync": Scenario("strategy=sync steps=12 " + SGD, "until a death"),
    "streaming": Scenario(
        "strategy=streaming_diloco stream.fragments=2 stream.tau=1 h=4 codec.up=int4",
        "until a death",
    ),
    "eager": Scenario("h=2 strategy=eager_diloco codec.up=int4", "until a death"),
    "quorum": Scenario("h=2 strategy=diloco codec.up=int2 codec.down=int4 round.quorum=2", "never"),
    "sync quorum": Scenario("strategy=sync steps=12 round.quorum=2 " + SGD, "never"),
    "streaming quorum": Scenario(
        "strategy=streaming_diloco stream.fragments=2 stream.tau=1 h=2 codec.up=int4 "
        "codec.down=int4 round.quorum=2",
        "never",
    ),
    "async": Scenario("h=2 strategy=async_diloco codec.up=int4", "never"),
    "one site": Scenario("sites=1 h=2 strategy=diloco codec.up=topk2 codec.down=int4", "always"),
    "own h": Scenario(
        "h=2 strategy=diloco codec.up=int4 network.discriminator.h=1", "until a death"
    ),
    "own pace": Scenario("h=4 strategy=async_diloco codec.up=int4 round.least_steps=1", "never"),
    "masked": Scenario("h=2 strategy=diloco codec.up=masked4 codec.down=int4", "always"),
    "masked quorum": Scenario("h=2 strategy=diloco codec.up=masked4 round.quorum=2", "never"),
}


@cache
def configure(scenario: str) -> Config:
    """A run's whole configuration."""
    words = "workload=command sites=3 steps=24 checkpoint.every=1 eval.every=16".split()
    return load_run(None, [*words, *SCENARIOS[scenario].words.split()])
