"""`fedwan.lightning`: runs in Lightning's own Trainer."""

from __future__ import annotations

import pytest

from fedwan.app import load_run
from fedwan.config import Config

pytestmark = pytest.mark.filterwarnings("ignore")


def config_of(steps: int, h: int, *words: str, networks: tuple[str, ...] = ("net",)) -> Config:
    """One site whose outer optimiser takes over what the site has."""
    outer = [f"outer.{n}.{word}" for n in networks for word in ("lr=1", "momentum=0")]
    fixed = ["workload=command", "sites=1", f"steps={steps}", "eval.every=0", "checkpoint.every=1"]
    fixed += ["codec.up=fp32", "codec.down=fp32"]
    return load_run(None, [*fixed, f"h={h}", *outer, *words])


GAN = ("discriminator", "generator")


class Killed(Exception):
    pass
