"""Networks of the user's own that metrics see images through: `eval.features`.

A TorchScript file, as those of Inception are handed around: it gets images as uint8 (N, 3, height,
width) and gives features (N, features); one whose `forward` has `return_features`, as StyleGAN's
have, is asked for them. Or the folder of a transformers vision model (DINOv2, CLIP, ...), which
gives its pooled output of images that are resized and normalised as the folder says.

Neither runs Python of its own, but TorchScript reads and writes files: a site loads those alone
whose SHA-256 its owner allows (`fedwan.flower.site_file`). Or `package.module:function` of an
installed package: the function gets a device, and gives a callable of images (N, 3, height, width)
in [-1, 1] on it, to features.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedwan.errors import ConfigError, FedwanError, place_of
from fedwan.extras import require
from fedwan.names import named_function

_CHUNK = 64
_BILINEAR = 2  # as Pillow numbers it
_SIDE = 64  # of the image that a network is tried on

Network = Callable[[Tensor], Tensor]


def find_network(text: str) -> Path:
    """The file or folder that `eval.features` names, or its module's; else a `ConfigError`."""
    if named := named_function(text):
        return _source_of(text, named[0])
    found = Path(text)
    if not found.is_file() and not (found / "config.json").is_file():
        raise ConfigError(
            f"eval.features = {text!r} is no TorchScript file, and no folder of a transformers "
            "model (config.json, model.safetensors); give the path of one, or module:function"
        )
    return found


def _source_of(text: str, module: str) -> Path:
    """A module's file; what imports it needs are its packages, which may fail in any way."""
    try:
        spec, why = find_spec(module), ""
    except Exception as error:
        spec, why = None, f" ({type(error).__name__}: {' '.join(str(error).split())})"
    if spec is None or not Path(spec.origin or "").is_file():
        raise ConfigError(
            f"eval.features = {text!r}: no module {module!r} is installed here{why}; install the "
            "package that holds it at the coordinator and at every site"
        )
    return Path(str(spec.origin))


def network_sha256(text: str) -> str:
    """Of a file, of a folder's settings and weights, or of a module's source alone."""
    found, total = find_network(text), hashlib.sha256()
    files = (*sorted(found.glob("*.json")), *sorted(found.glob("*.safetensors")))
    for part in (found,) if found.is_file() else files:
        with part.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


@cache
def load_network(text: str, device: torch.device) -> Network:
    """The network that `text` names: images (N, 1 or 3, …) in [-1, 1] to (N, features).

    A `ConfigError` if it cannot be read, or does not give features of an image.
    """
    found = find_network(text)
    try:
        if named := named_function(text):
            forward: Network = getattr(import_module(named[0]), named[1])(device)
        else:
            forward = _scripted(found, device) if found.is_file() else _pretrained(found, device)
        features = forward(torch.zeros(2, 3, _SIDE, _SIDE, device=device))
    except FedwanError:
        raise
    except Exception as error:  # whatever another's network fails with
        first = str(error).strip().splitlines()
        raise ConfigError(
            f"eval.features = {text!r} cannot be used: {first[-1] if first else error!r}"
            f"{place_of(error)}; give a TorchScript file that takes uint8 images, a transformers "
            "vision model, or a function that gets a device and gives such a network"
        ) from None
    if not isinstance(features, Tensor) or features.dim() < 2 or len(features) != 2:
        raise ConfigError(
            f"eval.features = {text!r} gives no tensor of (images, features) for two images; "
            "give a network that does"
        )

    @torch.no_grad()
    def see(images: Tensor) -> Tensor:
        parts = []
        for chunk in torch.split(images.detach(), _CHUNK):
            x = chunk.to(device, torch.float32).expand(-1, 3, -1, -1)
            parts.append(forward(x).flatten(1).to("cpu", torch.float32))
        return torch.cat(parts)

    return see


def _bytes(x: Tensor) -> Tensor:
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _scripted(path: Path, device: torch.device) -> Network:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what the field hands around is this
        network: Any = torch.jit.load(str(path), map_location=device)  # type: ignore[no-untyped-call]
    network.eval()
    arguments = {argument.name for argument in network.forward.schema.arguments}
    if "return_features" in arguments:
        return lambda x: network(_bytes(x), return_features=True)
    return lambda x: network(_bytes(x))


def _pretrained(folder: Path, device: torch.device) -> Network:
    transformers = require("transformers", "diffusers")
    model = whole_model(transformers.AutoModel, folder)
    vision = getattr(model, "vision_model", model).to(device).eval()
    pixels = pixels_of(folder, vision.config, device)

    def forward(x: Tensor) -> Tensor:
        output: Tensor = vision(pixel_values=pixels(x)).pooler_output
        return output

    return forward


def whole_model(kind: Any, folder: Path) -> Any:
    """A transformers model in fp32; a `ConfigError` where weights of it are not in its folder.

    transformers would draw those at random, others in each process.
    """
    model, told = kind.from_pretrained(
        folder,
        local_files_only=True,
        use_safetensors=True,
        dtype=torch.float32,
        output_loading_info=True,
    )
    if missing := sorted(told["missing_keys"]):
        raise ConfigError(
            f"eval.features = {str(folder)!r} has no weights for {', '.join(missing[:3])}, which "
            "features come through; give the folder of a model that was saved with them"
        )
    return model


def _preprocessor(folder: Path) -> Mapping[str, Any]:
    """What a folder says of its images."""
    own, of_all = folder / "preprocessor_config.json", folder / "processor_config.json"
    told: Any = None
    if own.is_file():
        told = json.loads(own.read_text())
    elif of_all.is_file():  # as a processor of images and text writes it
        told = json.loads(of_all.read_text()).get("image_processor")
    if not isinstance(told, Mapping):
        raise ConfigError(
            f"eval.features = {str(folder)!r} has no preprocessor_config.json, which says how "
            "images are made ready; save the model's image processor there, too, or write {} to it "
            "for images in [-1, 1] at the model's own size"
        )
    return told


def pixels_of(folder: Path, config: Any, device: torch.device) -> Network:
    """What a transformers folder makes of images (N, 3, …) in [-1, 1] before its network.

    `config` is that of the network, whose `image_size` counts where the folder names no size.
    """
    told = _preprocessor(folder)
    size = _size(told) or _height_width(config.image_size)
    mode = "bilinear" if told.get("resample") == _BILINEAR else "bicubic"
    is_normal = told.get("do_normalize", True)
    mean, deviation = (
        torch.tensor(told.get(name, [0.5] * 3) if is_normal else [plain] * 3, device=device)
        for name, plain in (("image_mean", 0.0), ("image_std", 1.0))
    )

    def pixels(x: Tensor) -> Tensor:
        resized = functional.interpolate(_bytes(x) / 255, size, mode=mode, antialias=True)
        return (resized.clamp(0, 1) - mean[:, None, None]) / deviation[:, None, None]

    return pixels


def _size(told: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width that a preprocessor brings images to; None if it does not say.

    The whole image is resized to the size of the crop, of which nothing is cut off.
    """
    if told.get("crop_size") and told.get("do_center_crop", True):
        return _height_width(told["crop_size"])
    return _height_width(told["size"]) if told.get("size") else None


def _height_width(size: Any) -> tuple[int, int]:
    """Of a number, a pair, or a dict: `height` and `width`, or `shortest_edge`."""
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        size = edge or (size["height"], size["width"])
    return (size, size) if isinstance(size, int) else (size[0], size[1])
