"""Which pictures leave a site: none that are made of private inputs, unless its owner says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from fedwan.site.service import _plan
from fedwan.site.settings import SiteSettings
from fedwan.site.sharing import SharedWorkload
from PIL import Image

from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Link
from fedwan.workloads.base import discloses_inputs
from sites import gan, pix2pix
from tests.runs import SameStart, TinyRun, delta_strategy
from tests.sites.support import CPU
from tests.support import WrappedLink, tiny_shard


class Reading(WrappedLink):
    """Keeps what a site reports."""

    def __init__(self, inner: Link, found: list[set[str]]) -> None:
        super().__init__(inner)
        self._found = found

    def report(self, report: wire.QualityReport) -> None:
        self._found.append(set(safetensors.torch.load(report.samples)))
        self._inner.report(report)


class Translating(SameStart):
    """Its samples are made of inputs that the site holds."""

    samples_from_inputs = True


def config(data: DataConfig) -> Config:
    inner = {name: InnerConfig(lr=2e-3, beta1=0.5) for name in pix2pix.NETWORKS}
    model = {"width": 4, "depth": 3}
    return Config(workload="pix2pix", sites=1, steps=2, data=data, inner=inner, model=model)


def pictures(folder: Path) -> DataConfig:
    """Pairs of the site's own."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 64, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{index:02d}.png")
    return DataConfig("pairs", path=str(folder), size=32, batch=2, workers=0)


def tiny_reports(folder: Path, workload: SameStart, *, public: bool, show: bool) -> list[set[str]]:
    found: list[set[str]] = []
    run = TinyRun(
        folder,
        delta_strategy(1),
        sites=("s1",),
        num_versions=1,
        shard_of=lambda _: dataclasses.replace(tiny_shard(1), public=public),
        show_samples=show,
    )
    result = run.start()
    site = run.site("s1", workload, lambda link: Reading(link, found))  # type: ignore[arg-type,return-value]
    result(30.0)
    site(10.0)
    return found


@pytest.mark.parametrize(
    ("workload", "public", "show", "expected"),
    [
        (Translating, False, False, set()),
        (Translating, False, True, {"generated"}),
        (Translating, True, False, {"generated", "real"}),
        (SameStart, False, False, {"generated"}),
    ],
)
def test_pictures_leave_a_site_where_nothing_private_is_in_them_or_its_owner_allows_it(
    workload: type[SameStart], public: bool, show: bool, expected: set[str], tmp_path: Path
) -> None:
    found = tiny_reports(tmp_path, workload(), public=public, show=show)
    assert len(found) == 2 and all(names == expected for names in found)


def test_a_run_s_configuration_cannot_allow_it_in_an_owner_s_place() -> None:
    asked = config(DataConfig("pairs", path="/pairs", show_samples=True))
    settings = SiteSettings("s1", Path("/pki"), Path("/state"))
    assert not _plan(asked, "run", settings).show_samples
    allowed = dataclasses.replace(settings, show_samples=True)
    asked.data.show_samples = False
    assert _plan(asked, "run", allowed).show_samples


def test_only_samples_of_inputs_disclose_them_also_where_processes_share_a_workload() -> None:
    asked = config(DataConfig("photo_edges", batch=4))
    pix2pix.resolve(asked)
    translating = pix2pix.build(asked, CPU)
    plain = Config(data=DataConfig(batch=4))
    gan.resolve(plain)
    for workload, expected in ((translating, True), (gan.build(plain, CPU), False)):
        shared = SharedWorkload(workload, None, None, shares_gradients=False)  # type: ignore[arg-type]
        assert discloses_inputs(workload) is discloses_inputs(shared) is expected
