"""Records of a healthy run, made without training, for tests to bend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedwan.doctor.diagnosis import Doctor, Finding
from fedwan.output.records import RoundRecord

SITES = ("s1", "s2", "s3", "s4")
FIGURES = {
    "shard/samples": 350.0,
    "shard/distinct": 1.0,
    "x/low": -1.0,
    "x/high": 1.0,
    "x/smooth": 0.55,
    "lr/generator": 3e-3,
    "lr/discriminator": 3e-3,
    "memory/discriminator": 0.52,
    "spread/generator": 0.85,
}
NETWORKS = ("discriminator", "generator")

Bend = Callable[[RoundRecord], RoundRecord]


def healthy(version: int, site: str) -> RoundRecord:
    """What a site of a GAN tells in a run that goes well; no two sites tell quite the same."""
    wobble = 1 + 0.05 * ((version * 7 + SITES.index(site) * 3) % 5 - 2)
    return RoundRecord(
        t=0.0,
        version=version,
        site=site,
        step=20 * version,
        samples=640,
        losses={"discriminator": 1.2 * wobble, "generator": 0.9 * wobble, "r1": 0.3 * wobble},
        compute_s=1.0,
        wait_s=0.1,
        bytes_up=1,
        bytes_down=1,
        norms={"discriminator": 2.0 * wobble, "generator": 3.0 * wobble},
        round_s=1.0,
        figures=dict(FIGURES),
        cosines=dict.fromkeys(NETWORKS, 0.5),
        agreement=dict.fromkeys(NETWORKS, 0.6),
        backward=dict.fromkeys(NETWORKS, -0.1),
    )


def told(bend: Bend, rounds: int = 10, sites: tuple[str, ...] = SITES) -> list[Finding]:
    """What the doctor tells of a healthy run, once every record is bent."""
    doctor = Doctor()
    found: list[Finding] = []
    for version in range(1, rounds + 1):
        found += doctor.take([bend(healthy(version, site)) for site in sites])
    return found


def at(site: str, bend: Bend) -> Bend:
    """Only one site's records are bent."""
    return lambda record: bend(record) if record.site == site else record


def figures(**values: float) -> Bend:
    """Other figures; `x_low` stands for `x/low`."""
    named = {name.replace("_", "/", 1): value for name, value in values.items()}
    return lambda record: replace(record, figures={**record.figures, **named})
