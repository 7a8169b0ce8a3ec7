"""Sites that train on files of their own: the real engine, killed in the middle of an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import Crash, TinyRun

from fedwan.config import Config, DataConfig
from fedwan.data import Shard, data_at_site, open_shard
from fedwan.rng import NamedGenerators
from fedwan.site.checkpoint import Ledger, SiteCheckpoints, Work
from fedwan.site.replica import Replica
from fedwan.state import hash_state
from fedwan.workloads.base import Batch, keep_local
from fedwan.workloads.settings import resolve_page
from sites import flow, pix2pix
from strategies import diloco
from tests.data.files import write_folder, write_shards

CPU = torch.device("cpu")
H = 3
VERSIONS = 4
SITES = ("s1", "s2")


def config(folder: Path, name: str, workers: int) -> Config:
    """18 images a site and batches of 4: an epoch ends within a round, and rounds within epochs."""
    write = write_folder if name == "folder" else write_shards
    for index, site in enumerate(SITES):
        if not (folder / site).exists():
            write(folder / site, range(100 * index, 100 * index + 30))
    data = DataConfig(name, "own", 4, f"{folder}/{{site}}", size=8, workers=workers)
    asked = Config("flow", sites=2, h=H, steps=H * VERSIONS, data=data)
    asked.model = {"width": 8, "depth": 1, "euler_steps": 2}
    resolve_page(flow, asked)
    resolve_strategy(diloco, asked, flow.NETWORKS)
    return asked


class Crashing:
    """A workload that notes what it steps on, and dies after so many steps."""

    def __init__(
        self, workload: Any, seen: list[bytes], after_steps: int = -1, pause_s: float = 0.0
    ) -> None:
        self._workload = workload
        self._pause_s = pause_s
        self._seen = seen
        self._left = after_steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def step(self, batch: Batch, *args: Any) -> Any:
        if self._left == 0:
            raise Crash
        self._left -= 1
        time.sleep(self._pause_s)
        self._seen.append(batch.x.numpy().tobytes())
        return self._workload.step(batch, *args)


class FileRun:
    """Two sites with files of their own."""

    def __init__(self, folder: Path, asked: Config) -> None:
        self.asked = asked
        self.seen: dict[str, list[bytes]] = {site: [] for site in SITES}
        self.run = TinyRun(
            folder,
            diloco.build(asked),
            num_versions=VERSIONS,
            eval_every=2,
            shard_of=self.shard,
            has_own_data=True,
        )

    def shard(self, site: str) -> Shard:
        return open_shard(data_at_site(self.asked.data, site), SITES.index(site), 2, 0)

    def site(
        self, name: str, after_steps: int = -1, pause_s: float = 0.0
    ) -> Callable[[float], str]:
        workload = Crashing(flow.build(self.asked, CPU), self.seen[name], after_steps, pause_s)
        return self.run.site(name, workload)


def undisturbed(folder: Path, asked: Config, pause_s: float = 0.0) -> tuple[str, FileRun]:
    files = FileRun(folder, asked)
    result = files.run.start()
    ends = [files.site(name, pause_s=pause_s) for name in SITES]
    sha256 = hash_state(result(60.0).state)
    assert [end(20.0) for end in ends] == [sha256, sha256]
    return sha256, files


@pytest.mark.parametrize(("name", "workers"), [("folder", 1), ("webdataset", 0)])
def test_a_site_killed_in_the_middle_of_an_epoch_changes_no_batch_and_no_bit(
    tmp_path: Path, name: str, workers: int
) -> None:
    data = tmp_path / "data"
    expected, plain = undisturbed(tmp_path / "a", config(data, name, workers=0))
    files = FileRun(tmp_path / "b", config(data, name, workers=workers))
    result = files.run.start()
    first = files.site("s1")
    with pytest.raises(Crash):
        files.site("s2", after_steps=2 * H + 1)(60.0)
    second = files.site("s2")
    assert hash_state(result(60.0).state) == expected
    assert first(20.0) == second(20.0) == expected
    # The steps since the last checkpoint were taken twice, on the same batches.
    assert files.seen["s1"] == plain.seen["s1"]
    again = files.seen["s2"]
    assert again[: 2 * H] == plain.seen["s2"][: 2 * H]
    assert again[2 * H] == again[2 * H + 1] == plain.seen["s2"][2 * H]
    assert again[2 * H + 1 :] == plain.seen["s2"][2 * H :]


def test_sites_measure_their_data_together(tmp_path: Path) -> None:
    asked = config(tmp_path / "data", "folder", workers=0)
    # Sites measure what they hold when they are asked: not before the next round is over.
    _, files = undisturbed(tmp_path / "run", asked, pause_s=0.2)
    rows = [row for row in files.run.rows if row["kind"] == "quality"]
    assert rows[0]["version"] == 0 and rows[0]["site"] in SITES
    assert [(row["version"], row["site"]) for row in rows[1:]] == [(2, "s1, s2"), (4, "s1, s2")]
    assert all(row["fd"] > 0 < row["fd_floor"] for row in rows)
    assert "moments" not in rows[-1]
    assert files.run.events("warning") == []
    assert files.run.samples == [0, 2, 4]


def test_a_checkpoint_holds_where_batches_were_taken_though_others_were_read_ahead(
    tmp_path: Path,
) -> None:
    asked = config(tmp_path / "data", "folder", workers=2)
    shard = FileRun(tmp_path / "run", asked).shard("s1")

    def site() -> tuple[Any, NamedGenerators, Any, SiteCheckpoints]:
        workload, rng = flow.build(asked, CPU), NamedGenerators(0, "s1")
        stream = shard.loader(4, rng["data"])
        return (
            *(workload, rng, stream),
            SiteCheckpoints(tmp_path / "kept", Replica(workload), stream, rng),
        )

    workload, rng, stream, checkpoints = site()
    for _ in range(4):  # 16 of 18 samples: what is read ahead is of the next epoch
        workload.step(next(stream), rng, keep_local)
    checkpoints.save(1, 0, Ledger({}, {}, Work(4, 16), (0,)))
    rest = [next(stream).x for _ in range(6)]
    stream.close()
    _, _, again, checkpoints = site()
    next(again)
    checkpoints.load(1, with_model=True)
    assert all(torch.equal(next(again).x, x) for x in rest)
    again.close()


def test_pix2pix_reads_its_inputs_where_its_site_has_them(tmp_path: Path) -> None:
    write_folder(tmp_path / "s2", range(12))
    data = DataConfig("pairs", "own", 2, f"{tmp_path}/{{site}}", size=32)
    asked = Config("pix2pix", sites=2, data=data, model={"width": 4})
    resolve_page(pix2pix, asked)
    asked.data = data_at_site(asked.data, "s2")
    workload = pix2pix.build(asked, CPU)
    shard = open_shard(asked.data, 1, 2, 0)
    assert workload.sample(5, 0).shape == (5, 3, 32, 32)
    figures = workload.evaluate(shard.held_out, 0)
    assert set(figures) == {"fd", "fd_floor", "l1", "moments"}
