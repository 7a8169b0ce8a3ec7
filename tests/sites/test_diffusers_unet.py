"""Networks of diffusers: folders in, folders out, and what no such network can be trained of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from fedwan.config import Config, DataConfig
from fedwan.errors import ConfigError
from fedwan.workloads.denoising import TARGETS
from sites import diffusers_unet
from tests.data.files import write_folder
from tests.sites.support import Run, refused, weights

pytestmark = pytest.mark.slow
UNET = {
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "layers_per_block": 1,
    "block_out_channels": (8, 8),
    "down_block_types": ("DownBlock2D",) * 2,
    "up_block_types": ("UpBlock2D",) * 2,
    "norm_num_groups": 4,
}
DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "in_channels": 1,
    "out_channels": 2,
    "num_layers": 1,
    "sample_size": 8,
    "patch_size": 4,
    "num_embeds_ada_norm": 10,
    "norm_num_groups": 1,
}


def config(path: Path | str = "", data: str = "digits", **model: Any) -> Config:
    model = {"path": str(path), "sampling_steps": 3} | model
    return Config("diffusers_unet", sites=2, data=DataConfig(data, batch=8), model=model)


def pipeline(folder: Path, **scheduler: Any) -> Path:
    torch.manual_seed(0)
    noises = diffusers.DDPMScheduler(**scheduler)
    diffusers.DDPMPipeline(diffusers.UNet2DModel(**UNET), noises).save_pretrained(folder)
    return folder


def test_training_starts_from_the_folders_weights_by_what_its_scheduler_says(
    tmp_path: Path,
) -> None:
    losses = {}
    for target in TARGETS:
        folder = pipeline(tmp_path / target, prediction_type=target)
        run = Run(diffusers_unet, config(folder))
        kept = diffusers.UNet2DModel.from_pretrained(folder / "unet").state_dict()
        state = run.workload.networks["denoiser"].state_dict()
        assert all(torch.equal(kept[name], state[name]) for name in kept)
        losses[target] = float(run.step()["denoiser"])
        assert run.workload.sample(3, 0).shape == (3, 1, 8, 8)
    assert len(set(losses.values())) == 3


def test_a_transformer_learns_a_flow_and_is_told_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusers.DiTTransformer2DModel(**DIT).save_pretrained(tmp_path / "transformer")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0).save_pretrained(tmp_path / "scheduler")
    run = Run(diffusers_unet, config(tmp_path / "transformer"))
    before = weights(run)
    run.step(2)
    assert not all(map(torch.equal, before, weights(run)))
    assert run.workload.sample(4, 0).isfinite().all()
    run.workload.save_pretrained(tmp_path / "out")  # type: ignore[attr-defined]
    opened = follow_readme(tmp_path / "out", monkeypatch)
    assert opened["network"].config.num_embeds_ada_norm == 10
    assert opened["solver"].config.shift == 2.0


def test_a_network_that_is_told_classes_is_exported_with_the_lines_that_sample_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(diffusers_unet, config(width=8))
    run.step()
    run.workload.save_pretrained(tmp_path / "out")  # type: ignore[attr-defined]
    follow_readme(tmp_path / "out", monkeypatch)


def follow_readme(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What its lines leave, which make eight samples."""
    monkeypatch.chdir(folder)
    _, code, _ = re.split("```(?:python)?\n", Path("README.md").read_text())
    exec(code, found := {})  # noqa: S102
    assert found["x"].shape == (8, 1, 8, 8) and found["x"].isfinite().all()
    return found


def test_a_pipeline_that_is_exported_makes_the_same_samples(tmp_path: Path) -> None:
    run = Run(diffusers_unet, config(pipeline(tmp_path / "in")))
    run.step(2)
    run.workload.save_pretrained(tmp_path / "out")  # type: ignore[attr-defined]
    opened = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    again = Run(diffusers_unet, config(tmp_path / "out"))
    assert torch.equal(run.workload.sample(2, 0), again.workload.sample(2, 0))
    assert opened(num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 1)


def test_a_unet_of_our_own_for_pictures_without_classes_is_exported_as_a_pipeline(
    tmp_path: Path,
) -> None:
    chosen = config(width=8)
    path = str(write_folder(tmp_path / "pictures", range(30)))
    chosen.data = DataConfig("folder", path=path, size=16, batch=4)
    run = Run(diffusers_unet, chosen)
    run.step()
    run.workload.save_pretrained(tmp_path / "out")  # type: ignore[attr-defined]
    opened = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert isinstance(opened, diffusers.DDPMPipeline)
    assert opened(num_inference_steps=2, output_type="np").images.shape == (1, 16, 16, 3)


def of_class(name: str) -> Callable[[Path], Any]:
    """Writes the settings of a network of this class."""
    return lambda folder: (folder / "config.json").write_text(json.dumps({"_class_name": name}))


def unet(**settings: Any) -> Callable[[Path], Any]:
    return lambda folder: diffusers.UNet2DModel(**UNET | settings).save_config(folder)


def shifted(folder: Path) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.save_pretrained(pipeline(folder) / "scheduler")


def latent(folder: Path) -> None:
    parts = {"_class_name": "LDMPipeline", "unet": [], "vqvae": []}
    (folder / "model_index.json").write_text(json.dumps(parts))


def pickled(folder: Path) -> None:
    diffusers.UNet2DModel(**UNET).save_pretrained(folder, safe_serialization=False)


def nothing(folder: Path) -> None:
    """Of our own."""


@pytest.mark.parametrize(
    ("make", "model", "text"),
    [
        (nothing, {}, "holds no model_index.json and no config.json"),
        (nothing, {"path": "", "data": "ring8"}, "needs images, which 'ring8' has none of"),
        (nothing, {"path": "", "width": 12}, "makes no images of 1 x 8 x 8 .*divisible by num_gro"),
        (nothing, {"path": "", "scheduler": "DDPMSchedule"}, "did you mean 'DDPMScheduler'"),
        (nothing, {"path": "", "scheduler": "AmusedScheduler"}, "'AmusedScheduler' with .* none"),
        (shifted, {}, "FlowMatch schedulers whose use_dynamic_shifting is false"),
        (of_class("UNet2DConditionModel"), {}, "no images of .*argument: .encoder_hidden_states"),
        (of_class("Tensor"), {}, "'Tensor' is no network of diffusers"),
        (latent, {}, "is of LDMPipeline, whose vqvae shows that it denoises latents"),
        (lambda folder: (folder / "config.json").write_text("{"), {}, "cannot be read"),
        (unet(), {"width": 64}, "model.width = 64 needs model.path=''; set that, or leave it out"),
        (pipeline, {"scheduler": "DDIMScheduler"}, "needs a model.path that names no scheduler"),
        (unet(), {"labels": "site"}, "data.labels = 'site' needs a network that knows classes"),
        (pickled, {}, "diffusion_pytorch_model.bin' is a pickle.* write it again as safetensors"),
        (unet(in_channels=3), {}, "UNet2DModel makes no images of 1 x 8 x 8 of a timestep"),
        (unet(num_class_embeds=5), {}, "knows 5 classes, and data have 10"),
        (
            lambda folder: pipeline(folder, prediction_type="flow"),
            {},
            "with prediction_type 'flow' is none that this workload knows",
        ),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    make: Any, model: dict[str, Any], text: str, tmp_path: Path
) -> None:
    make(tmp_path)
    labels = model.pop("labels", "class")
    chosen = config(**{"path": tmp_path} | model)
    chosen.data.labels = labels
    refused(diffusers_unet, chosen, text)


def test_a_file_of_weights_that_is_cut_short_is_one_line(tmp_path: Path) -> None:
    (file,) = (pipeline(tmp_path) / "unet").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="its weights cannot be read") as caught:
        Run(diffusers_unet, config(tmp_path))
    assert "\n" not in str(caught.value)
