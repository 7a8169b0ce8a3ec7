"""Text-to-image pipelines: by their folder, with adapters, out again, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedwan
from fedwan.app import resolve
from fedwan.cli import results
from fedwan.config import Config, DataConfig, SiteConfig
from fedwan.data import files, open_shard
from fedwan.data.toys import listed_emoji
from fedwan.errors import ConfigError, DiskFull
from fedwan.rng import NamedGenerators, derive_seed
from fedwan.simulation import simulate
from fedwan.state import hash_state, state_of
from fedwan.workloads.denoising import sealed
from fedwan.workloads.pipelines import Folder
from fedwan.workloads.settings import resolve_page
from sites import text_to_image
from tests.data.emoji import fake_drawing, install, many
from tests.sites.pipelines import (
    captioned,
    clip,
    stable_diffusion,
    stable_diffusion_3,
    stable_diffusion_xl,
)
from tests.sites.support import CPU, refused
from tests.support import keep_local

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captioned(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stable_diffusion(tmp_path_factory.mktemp("pipelines") / "sd")


def config(folder: Path, data: Path, flip: bool = False, **model: Any) -> Config:
    settings = {"path": str(folder), "sampling_steps": 3, "lora": 2} | model
    of_data = DataConfig("folder", path=str(data), size=16, batch=4, flip=flip)
    return Config("text_to_image", sites=1, data=of_data, model=settings)


class Trained:
    """A site of it, prepared, after some steps."""

    def __init__(self, chosen: Config, folder: Path, steps: int = 2) -> None:
        resolve_page(text_to_image, chosen)
        self.workload = text_to_image.build(chosen, CPU)
        shard = open_shard(chosen.data, 0, 1, 0, captions=True)
        self.shard = self.workload.prepare(shard, folder)
        self.losses = []
        rng = NamedGenerators(0, "s1")
        loader = self.shard.loader(4, rng["data"])
        for _ in range(steps):
            self.losses.append(self.workload.step(next(loader), rng, keep_local)["denoiser"])


@pytest.mark.parametrize("make", [stable_diffusion, stable_diffusion_xl, stable_diffusion_3])
def test_an_exported_adapter_makes_the_same_pictures_in_plain_diffusers(
    make: Callable[[Path], Path],
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = ["a red one", "a blue one"]
    run = Trained(config(make(tmp_path / "in"), pictures, prompts=prompts), tmp_path)
    for param in run.workload.networks["denoiser"].parameters():
        param.data += 0.05 * param.requires_grad  # what two steps learn would not show
    made = run.workload.sample(2, 0)
    run.workload.save_pretrained(tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "README.md",
        "pytorch_lora_weights.safetensors",
    ]
    readme = (tmp_path / "adapter" / "README.md").read_text()
    assert "an adapter of rank 2" in readme
    scope: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path / "adapter")
    exec(readme.split("```")[1].removeprefix("python"), scope)  # noqa: S102
    plain = scope["pipeline"]
    generator = torch.Generator().manual_seed(derive_seed(0, "sample"))
    asked = {
        "prompt": prompts,
        "latents": torch.randn(2, 4, 8, 8, generator=generator),
        "num_inference_steps": 3,
        "guidance_scale": 4.0,
        "output_type": "pt",
    }
    torch.testing.assert_close(plain(**asked).images * 2 - 1, made, atol=1e-5, rtol=0)
    plain.unload_lora_weights()
    assert (plain(**asked).images * 2 - 1 - made).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("make", "model"), [(stable_diffusion, {"min_snr": 5.0}), (stable_diffusion_3, {})]
)
def test_all_of_a_denoiser_is_exported_as_a_pipeline(
    make: Callable[[Path], Path], model: Any, pictures: Path, tmp_path: Path
) -> None:
    run = Trained(config(make(tmp_path / "in"), pictures, lora=0, **model), tmp_path)
    run.workload.save_pretrained(tmp_path / "out")
    again = Trained(config(tmp_path / "out", pictures, lora=0), tmp_path / "again", steps=0)
    assert torch.equal(run.workload.sample(2, 0), again.workload.sample(2, 0))


def test_noise_has_the_offset_that_is_asked_for(
    pipeline: Path, pictures: Path, tmp_path: Path
) -> None:
    first, other = (
        Trained(config(pipeline, pictures, noise_offset=offset), tmp_path, steps=1).losses[0]
        for offset in (0.0, 2.0)
    )
    assert float(other) > 2 * float(first)  # its square is 1 + 4, of an untrained network


def test_pictures_and_captions_are_encoded_once(
    pipeline: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Trained(config(pipeline, pictures, flip=True), tmp_path)
    assert len(first.shard.train) == 2 * 28  # 12 are held out, the rest is there twice
    assert np.load(tmp_path / "encoded" / "encoder_hidden_states.npy").shape == (4, 8, 16)
    assert set(first.shard.held_out.y.tolist()) <= {1, 2, 3}
    rows = [first.shard.train[place].x for place in (0, 28)]
    assert not torch.equal(rows[0], rows[1])
    monkeypatch.setattr(text_to_image.TextToImage, "_encode", None)
    again = Trained(config(pipeline, pictures, flip=True), tmp_path)
    assert first.losses == again.losses
    assert set(first.workload.evaluate(first.shard.held_out, 0)) >= {"fd", "fd_floor", "moments"}
    clip(tmp_path)
    again.workload.config.eval.features = str(tmp_path)
    score = again.workload.evaluate(again.shard.held_out, 0)["clip_score"]
    held_out = again.shard.held_out
    other = held_out._replace(y=held_out.y.flip(0))
    assert -100 <= score <= 100 and score != again.workload.evaluate(other, 0)["clip_score"]


def test_a_disk_without_room_for_what_is_encoded_is_told_before(
    pipeline: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match="encoded is full .* MB needed"):
        Trained(config(pipeline, pictures), tmp_path)


def test_captions_that_are_cut_are_named(
    pipeline: Path, pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = shutil.copytree(pictures, tmp_path / "data")
    lines = data / "metadata.jsonl"
    lines.write_text(lines.read_text().replace("a red one", "red").replace("a blue one", "b"))
    Trained(config(pipeline, data), tmp_path, steps=0)
    assert "1 of 3 captions are longer than the text encoders read, such as 'a gr" in caplog.text


def test_sites_whose_folders_say_other_things_of_a_caption_or_of_noise_are_told_apart(
    pipeline: Path, tmp_path: Path
) -> None:
    def frozen(folder: Path) -> str:
        network = sealed(Folder(str(folder)).digest())
        return hash_state(state_of({"folder": network}))

    other, first = shutil.copytree(pipeline, tmp_path / "other"), frozen(pipeline)
    assert frozen(other) == first
    _edit(other / "scheduler" / "scheduler_config.json", prediction_type="v_prediction")
    assert frozen(other) != first
    other = shutil.copytree(pipeline, tmp_path / "third")
    (file,) = (other / "text_encoder").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert frozen(other) != first


def test_emoji_are_pictures_with_captions(
    pipeline: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, many(60))
    fake_drawing(monkeypatch)
    chosen = config(pipeline, pictures)
    chosen.data = DataConfig("emoji", size=16, batch=4)
    run, num = Trained(chosen, tmp_path), sum(not one.is_held_out for one in listed_emoji())
    assert len(run.shard.train) == num < 60 == len(run.workload._table["encoder_hidden_states"]) - 1
    monkeypatch.setattr(text_to_image.TextToImage, "_encode", None)
    assert Trained(chosen, tmp_path).losses == run.losses


def test_captions_come_with_the_batch_and_some_are_left_out(
    pipeline: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Trained(config(pipeline, pictures, caption_dropout=0.5), tmp_path, steps=0)
    rng, table = NamedGenerators(0, "s1"), np.load(tmp_path / "encoded/encoder_hidden_states.npy")
    batch = next(run.shard.loader(16, rng["data"]))
    given = torch.from_numpy(table[batch.y])
    assert torch.equal(batch.told["encoder_hidden_states"], given)
    monkeypatch.setattr(run.workload, "_of", None)  # it would wait for the GPU
    told: list[torch.Tensor] = []
    run.workload.networks["denoiser"].register_forward_pre_hook(
        lambda _, args, named: told.append(named["encoder_hidden_states"]), with_kwargs=True
    )
    run.workload.step(batch, rng, keep_local)
    kept = torch.rand(16, generator=NamedGenerators(0, "s1")["captions"]) >= 0.5
    none = torch.from_numpy(table[:1])
    assert 0 < kept.sum() < 16
    assert torch.equal(told[0], torch.where(kept.view(-1, 1, 1), given, none).float())


def test_large_pictures_are_encoded_and_made_in_parts(
    pipeline: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
        run = Trained(config(pipeline, pictures), folder, steps=0)
        denoiser = run.workload.networks["denoiser"]
        denoiser.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
        latents = np.load(folder / "encoded" / "latents.npy")
        return torch.from_numpy(latents), run.workload.sample(3, 0)

    sizes: list[int] = []
    whole = made(tmp_path / "whole")
    assert max(sizes) == 2 * 3  # with and without a caption
    sizes.clear()
    monkeypatch.setattr(text_to_image, "MOST_PIXELS", 2 * 16 * 16)
    torch.testing.assert_close(made(tmp_path / "parts"), whole)
    assert max(sizes) == 2 * 2


@pytest.mark.parametrize("make", [stable_diffusion, stable_diffusion_3])
def test_in_half_precision_the_denoiser_and_text_encoders_alone_compute_in_it(
    make: Callable[[Path], Path], pictures: Path, tmp_path: Path
) -> None:
    chosen = config(make(tmp_path / "in"), pictures, prompts=["a red one"])
    whole = Trained(copy.deepcopy(chosen), tmp_path).workload
    full = whole.sample(2, 0)
    chosen.site.precision = "bf16-mixed"
    run, dtypes = Trained(chosen, tmp_path), []
    for module in (run.workload.networks["denoiser"], run.workload.networks["vae"].decoder):
        module.register_forward_hook(lambda _, given, out: dtypes.append(out[0].dtype))
    made = run.workload.sample(2, 0)
    assert dtypes == [*[torch.bfloat16] * 3, torch.float32]
    assert made.dtype == torch.float32 and 0 < (made - full).abs().max() < 0.1
    told = [workload._of(torch.arange(3)) for workload in (run.workload, whole)]
    is_half = [all(torch.equal(v, v.bfloat16().float()) for v in t.values()) for t in told]
    assert is_half == [True, False]


@pytest.mark.parametrize("make", [stable_diffusion, stable_diffusion_3])
def test_adapters_learn_alike_however_a_site_computes(
    make: Callable[[Path], Path], pictures: Path, tmp_path: Path
) -> None:
    folder = make(tmp_path / "in")

    def trained(precision: str = "32-true", **site: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = config(folder, pictures)
        chosen.site = SiteConfig(precision, **site)
        run = Trained(chosen, tmp_path)
        state = run.workload.networks["denoiser"].state_dict().items()
        norms = [value.norm() for name, value in state if "lora_B" in name]
        return torch.stack(run.losses), torch.stack(norms)

    plain = trained()
    assert (plain[1] > 0).all()
    torch.testing.assert_close(trained(recompute=True), plain, rtol=0, atol=0)
    torch.testing.assert_close(trained(accumulate=2), plain, rtol=1e-3, atol=0)
    for precision in ("bf16-mixed", "16-mixed"):
        half = trained(precision, recompute=True, accumulate=2)
        torch.testing.assert_close(half, plain, rtol=0.2, atol=0)
        assert not torch.equal(half[0], plain[0])


def test_what_was_encoded_of_other_settings_or_data_is_encoded_anew(
    pipeline: Path, pictures: Path, tmp_path: Path
) -> None:
    def latents(chosen: Config) -> np.ndarray:
        Trained(chosen, tmp_path, steps=0)
        return np.load(tmp_path / "encoded" / "latents.npy")

    first = latents(config(pipeline, pictures))
    assert len(latents(config(pipeline, pictures, flip=True))) == 2 * len(first)
    small = config(pipeline, pictures)
    small.data.size = 8
    assert latents(small).shape == (28, 4, 4, 4)
    more = captioned(tmp_path / "more", 50)
    assert len(latents(config(pipeline, more))) == 38
    lines, table = more / "metadata.jsonl", tmp_path / "encoded" / "encoder_hidden_states.npy"
    lines.write_text(lines.read_text().replace("a red one", "a new one", 5))
    before = len(np.load(table))
    files._open.cache_clear()  # as in another process
    latents(config(pipeline, more))
    assert len(np.load(table)) == 1 + before
    other = shutil.copytree(pipeline, tmp_path / "other")
    (other / "vae").rename(tmp_path / "vae")  # one that several pipelines share
    (other / "vae").symlink_to(tmp_path / "vae")
    latents(config(other, pictures))
    _edit(other / "vae" / "config.json", scaling_factor=1.0)
    assert not np.array_equal(latents(config(other, pictures)), first)
    run = Trained(config(other, pictures), tmp_path, steps=0)
    held_out = run.shard.held_out
    shard = open_shard(config(other, pictures).data, 0, 1, 0, captions=True)
    fewer = {name: values[:-1] for name, values in shard.held_out.items()}  # one was not read
    again = run.workload.prepare(dataclasses.replace(shard, held_out=fewer), tmp_path)
    assert len(again.held_out.y) == len(held_out.y) - 1


def test_a_process_that_was_killed_while_it_encoded_has_its_successor_go_on(
    pipeline: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_to_image, "_SAVE_EVERY_S", 0.0)
    plain, batches = text_to_image.TextToImage._latents, list[int]()

    def latents(workload: Any, x: torch.Tensor) -> torch.Tensor:
        if stops_at and sum(batches) == stops_at:
            raise KeyboardInterrupt
        batches.append(len(x))
        return plain(workload, x)

    monkeypatch.setattr(text_to_image.TextToImage, "_latents", latents)
    for folder, stops_at in (("whole", 0), ("cut", 32), ("cut", 0)):
        chosen = config(pipeline, pictures, flip=True)
        batches.clear()
        if stops_at:
            with pytest.raises(KeyboardInterrupt):
                Trained(chosen, tmp_path / folder, steps=0)
        else:
            Trained(chosen, tmp_path / folder, steps=0)
    assert batches == [16, 8], "28 pictures twice, of which 32 were encoded before"
    whole, cut = (sorted((tmp_path / name / "encoded").iterdir()) for name in ("whole", "cut"))
    assert [path.name for path in whole] == [path.name for path in cut]
    assert all(
        one.read_bytes() == other.read_bytes() for one, other in zip(whole, cut, strict=True)
    )


def test_quality_is_measured_on_held_out_captions_in_turn_and_no_picture_more(
    pipeline: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = Trained(config(pipeline, pictures), tmp_path, steps=0), []
    made = run.workload._of
    monkeypatch.setattr(run.workload, "_of", lambda rows: asked.append(rows) or made(rows))
    held_out = run.shard.held_out
    run.workload.evaluate(held_out, 0)
    captions = torch.cat(asked[::2])  # between them: of none, for guidance
    assert torch.equal(captions, held_out.y.repeat(2)[:18])


@pytest.mark.parametrize(
    ("precision", "held"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)]
)
def test_a_run_ends_with_an_adapter_which_alone_travels(
    precision: str, held: torch.dtype, pipeline: Path, pictures: Path, tmp_path: Path
) -> None:
    chosen = dataclasses.replace(config(pipeline, pictures), sites=2, steps=2, h=2)
    chosen.site.precision = precision
    simulate(resolve(chosen), tmp_path / "run")
    trained = fedwan.load(tmp_path / "run")
    adapters = trained.networks["denoiser"].items()
    assert all(".lora_" in name and value.dtype == torch.float32 for name, value in adapters)
    workload = trained.workload()
    for prompt in ("a red one", "a blue one"):
        results.sample(tmp_path / "run", 1, 0, tmp_path / f"{prompt}.png", [prompt])
    assert len({path.read_bytes() for path in tmp_path.glob("a*one.png")}) == 2
    results.export(tmp_path / "run", tmp_path / "adapter", "diffusers")
    (file,) = (tmp_path / "adapter").glob("*.safetensors")
    assert {value.dtype for value in load_file(file).values()} == {torch.float32}
    assert len(load_file(file)) == len(adapters)
    kept = diffusers.UNet2DConditionModel.from_pretrained(pipeline / "unet").state_dict()
    state = workload.networks["denoiser"].state_dict().items()
    found = {name.replace(".base_layer", ""): value for name, value in state}
    assert all(torch.equal(value.to(held), found[name]) for name, value in kept.items())
    assert workload.sample(1, 0).dtype == torch.float32
    assert next(workload.networks["vae"].parameters()).dtype == torch.float32


def _edit(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_latents_are_not_clipped_where_the_folder_does_not_ask_for_it(
    pipeline: Path, pictures: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(pipeline, tmp_path / "sd")
    shutil.rmtree(folder / "scheduler")  # that of Stable Diffusion 1, which has no such setting
    diffusers.PNDMScheduler(set_alpha_to_one=True, steps_offset=1).save_pretrained(
        folder / "scheduler"
    )
    _edit(folder / "model_index.json", scheduler=["diffusers", "PNDMScheduler"])
    made = [
        Trained(config(each, pictures), tmp_path, steps=0).workload.sample(2, 0)
        for each in (pipeline, folder)
    ]
    assert torch.equal(*made)


def test_a_vae_whose_file_lacks_settings_has_those_of_diffusers(
    pipeline: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(pipeline, tmp_path / "sd")
    path = folder / "vae" / "config.json"
    missing = ("scaling_factor", "shift_factor", "latent_channels", "block_out_channels")
    found = {k: v for k, v in json.loads(path.read_text()).items() if k not in missing}
    path.write_text(json.dumps(found))
    old = Folder(str(folder))
    assert (old.scale, old.shift, old.channels, old.factor) == (0.18215, 0, 4, 1)


@pytest.mark.parametrize(
    ("file", "settings", "model", "text"),
    [
        ("model_index.json", {"_class_name": "FluxPipeline"}, {}, "is of FluxPipeline, which"),
        ("unet/config.json", {"in_channels": 9}, {}, "takes 9 channels and the VAE makes 4"),
        ("vae/config.json", {"block_out_channels": [8] * 6}, {}, "size = 16 is no multiple of 64"),
        ("vae/config.json", {}, {"path": "hub/sd"}, "path = 'hub/sd' is no folder on this"),
        ("vae/config.json", {}, {"path": "."}, "holds no model_index.json; give a folder"),
        ("vae/config.json", {}, {"lora_targets": ["to_q", "q_proj"]}, "'q_proj' matches no layer"),
        ("vae/config.json", {}, {"lora_targets": ["attn1"]}, "cannot be adapted .*Attention"),
        ("vae/config.json", {}, {"lora_targets": []}, "cannot be adapted .No `target_modules`"),
        ("vae/config.json", {}, {"lora": 0, "lora_targets": ["to_q"]}, "needs a model.lora of 1"),
        ("vae/config.json", {}, {"caption_dropout": 1}, "caption_dropout = 1.0 is out of range"),
        ("scheduler/scheduler_config.json", {"prediction_type": "x"}, {}, "prediction_type 'x'"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    file: str, settings: Any, model: Any, text: str, pipeline: Path, pictures: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(pipeline, tmp_path / "sd")
    _edit(folder / file, **settings)
    refused(text_to_image, config(folder, pictures, **model), text)


def test_pictures_beyond_the_places_of_a_transformer_are_one_line(
    pictures: Path, tmp_path: Path
) -> None:
    chosen = config(stable_diffusion_3(tmp_path / "sd3"), pictures)
    chosen.data.size = 388
    refused(text_to_image, chosen, "data.size = 388 is above the 384 that .* has places for")


def test_a_folder_without_some_weights_is_one_line(
    pipeline: Path, pictures: Path, tmp_path: Path
) -> None:
    for part in ("vae", "text_encoder"):
        folder = shutil.copytree(pipeline, tmp_path / part)
        (file,) = (folder / part).glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            Trained(config(folder, pictures), tmp_path)
        assert "\n" not in str(caught.value)


def test_data_without_captions_and_settings_without_effect_are_refused(
    pipeline: Path, pictures: Path
) -> None:
    for data, text in (
        ({"classes": "a,b"}, "data.classes = 'a,b' needs data.split=by_label or dirichlet:A"),
        ({"workers": 2}, "data.workers = 2 has no effect: pictures are read once"),
        ({"name": "digits"}, "data.name = 'digits' has no captions"),
    ):
        chosen = config(pipeline, pictures)
        chosen.data = dataclasses.replace(chosen.data, **data)
        refused(text_to_image, chosen, text)
