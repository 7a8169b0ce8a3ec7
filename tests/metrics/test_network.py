"""Networks that a user names to see images through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fedwan.app import load_run
from fedwan.errors import ConfigError
from fedwan.metrics import NUM_DRAWS, measure_quality, measure_translation
from fedwan.metrics.distances import frechet_between
from fedwan.metrics.network import load_network, network_sha256
from fedwan.workloads.base import Batch

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
CPU = torch.device("cpu")
IMAGES = torch.rand(300, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
SIZES = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
"""Of networks of transformers."""


class Means(nn.Module):
    """Features are the means of channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float().mean(dim=(2, 3))


class Asked(nn.Module):
    """As StyleGAN's Inception: logits, unless it is asked for features."""

    def forward(self, x: Tensor, return_features: bool = False) -> Tensor:
        means = x.float().mean(dim=(2, 3))
        return means if return_features else means.sum(dim=1, keepdim=True)


class Large(nn.Module):
    """Refuses images of fewer pixels than Inception takes."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] >= 299, "small"
        return x.float().mean((2, 3))


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float().mean().expand(7)


def script(module: nn.Module, path: Path) -> str:
    torch.jit.script(module).save(str(path))
    return str(path)


@pytest.mark.parametrize("module", [Means(), Asked()])
def test_a_script_sees_bytes_of_three_channels_and_gives_features(
    tmp_path: Path, module: nn.Module
) -> None:
    see = load_network(script(module, tmp_path / "net.pt"), CPU)
    expected = ((IMAGES + 1) * 127.5).round().mean(dim=(2, 3))
    torch.testing.assert_close(see(IMAGES), expected)
    assert torch.equal(see(IMAGES[:, :1])[:, 0], see(IMAGES[:, :1])[:, 2])


def test_the_distance_is_that_of_its_features_as_they_are(tmp_path: Path) -> None:
    path = script(Means(), tmp_path / "net.pt")
    see = load_network(path, CPU)
    batch = Batch(IMAGES[:40], torch.zeros(40, dtype=torch.int64))
    found = measure_quality("folder", batch, IMAGES[:60] * 0.5, path)
    assert found["num_real"] == 20 and "moments" not in found
    assert found["fd"] > 0 and found["fd_floor"] > 0
    # Of digits and the like the held-out samples are compared whole.
    grey = Batch(IMAGES[:40, :1], batch.y)
    found = measure_quality("digits", grey, IMAGES[:120, :1] * 0.5, path)
    draws = (IMAGES[:120, :1] * 0.5).chunk(NUM_DRAWS)
    whole = [frechet_between(see(grey.x), see(draw)) for draw in draws]
    assert found["fd"] == pytest.approx(sum(whole) / NUM_DRAWS) and found["num_real"] == 40
    assert measure_translation(IMAGES, IMAGES.clone(), path)["num_real"] == 150


def test_a_folder_of_transformers_sees_images_at_its_own_size(tmp_path: Path) -> None:
    sizes = SIZES | {"image_size": 16, "patch_size": 8}
    for config in (transformers.ViTConfig(**sizes), transformers.Dinov2Config(**sizes)):
        folder = tmp_path / type(config).__name__
        transformers.AutoModel.from_config(config).save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text("{}")
        seen = load_network(str(folder), CPU)(IMAGES[:70])
        assert seen.shape == (70, 8) and seen.std(dim=0).min() > 0
    sizes = {"vision_config": sizes, "text_config": sizes | {"vocab_size": 9}}
    clip = transformers.CLIPModel(transformers.CLIPConfig(**sizes))
    clip.save_pretrained(tmp_path / "clip")
    (tmp_path / "clip/preprocessor_config.json").write_text("{}")
    before = network_sha256(str(tmp_path / "clip"))
    assert load_network(str(tmp_path / "clip"), CPU)(IMAGES[:2]).shape == (2, 8)
    clip.logit_scale.data += 1
    clip.save_pretrained(tmp_path / "clip")
    assert network_sha256(str(tmp_path / "clip")) != before


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, (24, 24)),
        ({"size": 16}, (16, 16)),
        ({"size": {"shortest_edge": 32}, "crop_size": {"height": 16, "width": 24}}, (16, 24)),
        ({"size": {"shortest_edge": 32}, "crop_size": 16}, (16, 16)),
        ({"size": {"height": 32, "width": 16}, "crop_size": 8, "do_center_crop": False}, (32, 16)),
        ({"do_normalize": False}, (24, 24)),
    ],
)
def test_a_folder_of_transformers_sees_images_of_the_size_that_its_preprocessor_makes(
    tmp_path: Path, told: dict[str, Any], expected: tuple[int, int]
) -> None:
    config = transformers.Dinov2Config(**SIZES, image_size=24, patch_size=8)
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    x = interpolate((IMAGES[:5] + 1) / 2, expected, mode="bicubic", antialias=True).clamp(0, 1)
    with torch.no_grad():
        pixels = 2 * x - 1 if told.get("do_normalize", True) else x
        made = model.eval()(pixel_values=pixels).pooler_output
    torch.testing.assert_close(
        load_network(str(tmp_path), CPU)(IMAGES[:5]), made, atol=0.05, rtol=0
    )


@pytest.mark.parametrize("kind", ["preprocessor_config.json", "processor_config.json"])
def test_means_and_deviations_are_those_of_the_folder_s_processor(
    tmp_path: Path, kind: str
) -> None:
    config = transformers.Dinov2Config(**SIZES, image_size=24, patch_size=8)
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    told = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    whole = {"image_processor": told} if kind.startswith("processor") else told
    (tmp_path / kind).write_text(json.dumps(whole))
    x = interpolate((IMAGES[:5] + 1) / 2, (24, 24), mode="bicubic", antialias=True).clamp(0, 1)
    mean, deviation = (torch.tensor(told[f"image_{n}"])[:, None, None] for n in ("mean", "std"))
    with torch.no_grad():
        made = model.eval()(pixel_values=(x - mean) / deviation).pooler_output
    torch.testing.assert_close(
        load_network(str(tmp_path), CPU)(IMAGES[:5]), made, atol=0.05, rtol=0
    )


def test_a_folder_that_lacks_weights_or_its_processor_is_refused(tmp_path: Path) -> None:
    sizes = SIZES | {"image_size": 16, "patch_size": 8}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no weights for pooler.dense.bias, pooler"):
        load_network(str(tmp_path), CPU)
    config = transformers.Dinov2Config(**sizes)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "alone")
    with pytest.raises(ConfigError, match="has no preprocessor_config.json, which says"):
        load_network(str(tmp_path / "alone"), CPU)


def test_what_is_no_such_network_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no network")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text("{}")
    script(Wrong(), tmp_path / "wrong.pt")
    script(Large(), tmp_path / "large.pt")
    text = transformers.BertConfig(**SIZES, vocab_size=9)
    pictures = transformers.ViTMAEConfig(**SIZES, image_size=32, patch_size=8)
    for config in (text, pictures):
        model = transformers.AutoModel.from_config(config)
        model.save_pretrained(tmp_path / config.model_type)
        (tmp_path / config.model_type / "preprocessor_config.json").write_text("{}")
    for name, told in {
        "gone.pt": "is no TorchScript file, and no folder",
        "text.pt": "cannot be used",
        "folder": "cannot be used",
        "large.pt": "cannot be used",
        "bert": "cannot be used",
        "vit_mae": "cannot be used",
        "wrong.pt": "gives no tensor of",
    }.items():
        with pytest.raises(ConfigError, match=rf"eval\.features = '.*{name}' {told}") as caught:
            load_network(str(tmp_path / name), CPU)
        assert len(str(caught.value).splitlines()) == 1


OWN = """
def means(device):
    return lambda x: x.to(device).mean(dim=(2, 3))

def flat(device):
    return lambda x: x.mean().expand(7)

def broken(device):
    return lambda x: x @ x[0, 0, :1]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "own_features"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "seen.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    return package / "seen.py"


def test_a_function_of_an_installed_package_gives_a_network_of_images(own: Path) -> None:
    name = "own_features.seen:means"
    see, mean = load_network(name, CPU), IMAGES.mean(dim=(2, 3))
    torch.testing.assert_close(see(IMAGES), mean)
    torch.testing.assert_close(see(IMAGES[:, :1]), mean[:, :1].expand(-1, 3))
    before = network_sha256(name)
    assert load_run(None, [f"eval.features={name}"]).eval.features == name
    own.write_text(OWN + "# another one")
    assert network_sha256(name) != before


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("own_gone.seen:means", "no module 'own_gone.seen' is installed"),
        ("own_features.gone:means", "no module 'own_features.gone' is installed"),
        ("own_broken.seen:means", "ZeroDivisionError: .*install"),
        ("own_features.seen:gone", "has no attribute 'gone'"),
        ("own_features.seen:broken", r"cannot be used: .*\(seen.py:9\)"),
        ("own_features.seen:flat", "gives no tensor of"),
        ("own_broken:means", r"cannot be used: .*division by zero.* \(own_broken.py:1\)"),
    ],
)
@pytest.mark.usefixtures("own")
def test_a_function_that_is_none_or_gives_no_features_is_told_in_a_line(
    name: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        load_network(name, CPU)
    assert name in str(caught.value) and len(str(caught.value).splitlines()) == 1
