"""Shards, and what is found wrong with them before a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from fedwan.app import load_run
from fedwan.config import Config, DataConfig
from fedwan.data import check_files, dataset_of, open_shard, toys
from fedwan.data.sources import check_data
from fedwan.workloads.base import Batch
from tests.data.emoji import fake_drawing, install, many
from tests.data.files import refused, write_folder


def test_sites_share_out_all_training_data_and_hold_out_the_same() -> None:
    config = DataConfig("ring8", split="dirichlet:0.5")
    shards = [open_shard(config, site, 4, seed=5) for site in range(4)]
    assert sum(shard.num_samples for shard in shards) == 8000
    for shard in shards:
        assert shard.held_out is shards[0].held_out
        assert shard.public


def test_networks_may_be_told_the_site_instead_of_the_class() -> None:
    shard = open_shard(DataConfig(split="by_label", labels="site"), 2, 4, seed=0)
    plain = open_shard(DataConfig(split="by_label"), 2, 4, seed=0)
    batches = [next(s.loader(64, torch.Generator().manual_seed(0))) for s in (shard, plain)]
    assert torch.equal(batches[0].x, batches[1].x)
    assert batches[0].y.tolist() == [2] * 64
    # The doctor compares samples of the same classes, and then tells the network the site.
    assert torch.equal(shard.drawn(50, 0).y, plain.drawn(50, 0).y)
    assert torch.equal(shard.held_out.y, plain.held_out.y)
    assert set(shard.tell(shard.held_out).y.tolist()) == {2}
    assert plain.tell(plain.held_out) is plain.held_out


def test_an_emoji_s_name_is_its_caption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, many(60))
    fake_drawing(monkeypatch)
    config = DataConfig("emoji", size=16)
    one, other = (open_shard(config, site, 2, 0, captions=True) for site in range(2))
    drawn = toys._draw(toys.listed_emoji(), Path(), 16).float() / 127.5 - 1
    seen = [one.train[place] for place in range(one.num_samples)]
    batch = next(other.loader(other.num_samples, torch.Generator()))
    for many_of in (batch, other.held_out):
        rows = zip(many_of["x"], many_of["caption"], strict=True)
        seen += [{"x": x, "caption": caption} for x, caption in rows]
    assert sorted(int(sample["caption"][6:]) for sample in seen) == list(range(60))
    assert all(torch.equal(s["x"], drawn[int(s["caption"][6:])]) for s in seen)
    assert one.count(9).tolist() == [0] * 6 + [one.num_samples, 0, 0]
    again = open_shard(config, 0, 2, 0, captions=True)
    assert one.train.stamp() == again.train.stamp() != other.train.stamp()
    says = "data.name = 'digits' has no captions; set data.name=folder"
    refused(says, lambda: open_shard(DataConfig(), 0, 2, 0, captions=True))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (DataConfig("digit"), "data.name is 'digit', .*; did you mean 'digits'"),
        (DataConfig(split="label"), "data.split is 'label'; valid: iid"),
        (DataConfig("folder", "by_label", path="/x"), "is 'by_label', and no class is named; set"),
        (DataConfig("pairs", size=16, path="/x"), "data.size = 16 is out of range for pairs"),
        (DataConfig("folder", path="/x/{site}"), "another folder at each site, .*split=own"),
        (DataConfig("folder", path="x"), "data.path is 'x'; name the folder .* from the root"),
    ],
)
def test_what_cannot_work_is_refused_without_reading_data(config: DataConfig, text: str) -> None:
    refused(text, lambda: check_data(config))


def test_a_path_from_here_is_told_from_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes").mkdir()
    for path, told in (
        ("", "/data/facades"),
        ("shape", "/data/facades"),
        ("shapes", tmp_path / "shapes"),
    ):
        asked = DataConfig("folder", path=path)
        refused(f"from the root, as in data.path={told}", lambda asked=asked: check_data(asked))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("data.split=own", "data.split = 'own' needs files, as with data.name=folder"),
        ("data.size=16", "data.size = 16 needs files"),
        ("sites=1 data.labels=site", "data.labels = 'site' needs sites=2 or more"),
        ("sites=1 data.split=dirichlet:1", "needs sites=2 or more"),
    ],
)
def test_a_setting_of_data_without_effect_is_refused(words: str, text: str) -> None:
    refused(text, lambda: load_run(None, ["sites=2", *words.split()]))


def page(made: Any) -> ModuleType:
    module = ModuleType("recipe")
    module.dataset = lambda config, site: made  # type: ignore[attr-defined]
    return module


ASKED = Config("text", data=DataConfig(batch=4))


def test_any_data_set_becomes_a_shard_with_held_out_samples_or_without() -> None:
    tokens = TensorDataset(torch.arange(60).view(10, 6), torch.arange(10))
    shard = dataset_of(page(tokens), ASKED, "s1")
    assert shard.held_out is None and shard.num_samples == 10
    rows, numbers = next(shard.loader(4, torch.Generator()))
    assert torch.equal(rows[:, 0] // 6, numbers)
    assert len(shard.drawn(3, 0)[1]) == 3 and shard.count(2).tolist() == [0, 0]
    tokens.labels = (np.arange(10) // 6).astype(np.int32)  # as data sets of torchvision have them
    assert shard.count(2).tolist() == [6, 4]
    one, other = [{"latents": torch.ones(2)}] * 9, [{"latents": torch.zeros(2)}] * 3
    tokens.labels = np.array([0, 5] * 5)
    refused("a label 5, and networks are told 0 to 1", lambda: shard.count(2))
    shard = dataset_of(page((one, other)), ASKED, "s1")
    assert shard.held_out["latents"].shape == (3, 2)
    assert dataset_of(page(shard), ASKED, "s1") is shard
    by_class = dataset_of(page((one, torch.arange(200) // 20)), ASKED, "s1").held_out
    assert len({*by_class[:64].tolist()}) == 10, "the first few are of all classes"


def test_what_the_settings_say_of_data_holds_for_a_data_set_of_one_s_own() -> None:
    pairs = [Batch(torch.arange(4.0).view(1, 2, 2), torch.tensor(3))] * 9
    asked = replace(ASKED, sites=2, data=DataConfig(batch=4, flip=True, labels="site"))
    shard = dataset_of(page(pairs), asked, "s2")
    batch = next(shard.loader(8, torch.Generator().manual_seed(0)))
    assert batch.y.tolist() == [1] * 8
    mirrored = [x[0, 0, 0].item() == 1.0 for x in batch.x]
    assert any(mirrored) and not all(mirrored)
    bare = dataset_of(page([torch.ones(2)] * 9), asked, "s2")
    says = "data.labels=site is of samples with 'y'"
    refused(says, lambda: next(bare.loader(4, torch.Generator())))
    dealt = replace(ASKED, data=DataConfig(batch=4, split="dirichlet:0.1"))
    says = "dataset.. of workload 'text' is called at each"
    refused(says, lambda: dataset_of(page(pairs), dealt, "s1"))


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (([torch.ones(1)] * 9, Nothing()), "a stream of data gives no samples; see that it has"),
        (None, "returned a NoneType for site 's1'"),
        ([], "returned nothing for site 's1'"),
        ([torch.ones(1)] * 3, "data.batch = 4 is more than the 3 samples"),
    ],
)
def test_what_is_no_data_set_is_refused(made: Any, text: str) -> None:
    refused(text, lambda: dataset_of(page(made), ASKED, "s1"))


def test_all_faults_of_all_sites_files_are_told_at_once(tmp_path: Path) -> None:
    write_folder(tmp_path / "s1", range(30))
    for number in (3, 5):
        (tmp_path / "s1" / f"{number:04d}.jpg").write_bytes(b"no image")
    data = DataConfig("folder", "own", 20, f"{tmp_path}/{{site}}", size=16)
    config = Config("flow", sites=2, data=data)
    faults = check_files(config)
    assert len(faults) == 4
    assert "0003.jpg cannot be read" in faults[0] and "0005.jpg cannot be read" in faults[1]
    assert "data.batch = 20 is more than the 18 samples" in faults[2]
    assert "s2' is no folder on this machine" in faults[3]
    config.data.batch = 4
    for site in ("s1", "s2"):
        write_folder(tmp_path / site, range(30))
    assert check_files(config) == []
