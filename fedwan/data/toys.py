"""The data sets that come with fedwan; the same in every process, whatever a run's seed.

A mixture of equal, round Gaussians in the plane, on which dropped modes can be counted.

Digits: scikit-learn's bundled 1797 images of 8x8 pixels (UCI, Alpaydin 1998).

Edges and the photographs that they are of, pairs for translating images (Isola et al. 2017): five
photographs that come with scikit-image, made smaller and cut into crops of 32x32 pixels, and the
strength of each crop's own edges (Sobel). Of each photograph's blocks of 64x64 pixels every fifth
is held out, a knight's move apart from the next: held-out crops lie within such a block, training
crops touch none.

Emoji: 3,655 colour pictures of the font Noto Color Emoji, each with one of nine groups and a name,
in Unicode's order (`emoji-test.txt`, Unicode Technical Standard 51). Variants of one emoji, of
skin, hair and gender, are near copies: a family is held out whole or not at all, about one in ten.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d, pad

from fedwan.data.cached import cached
from fedwan.errors import ConfigError
from fedwan.extras import folder_of, require
from fedwan.files import hash_file
from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

_HELD_OUT_PER_DIGIT = 40
_MAX_INK = 16.0  # a pixel counts the dark dots of a 4x4 block of the scan

_PHOTOS = {"astronaut": 2, "coffee": 2, "chelsea": 2, "rocket": 2, "retina": 5}
"""By name, how many times smaller a photograph is made."""
_SIZE, _STRIDE = 32, 8
_BLOCK, _PERIOD = 64, 5
_LUMINANCE = (0.2125, 0.7154, 0.0721)  # of R, G and B, ITU-R BT.709
_GAIN = 4.0  # full strength is where brightness rises by a quarter of its range per pixel

GROUPS = (
    *("Smileys & Emotion", "People & Body", "Animals & Nature", "Food & Drink", "Travel & Places"),
    *("Activities", "Objects", "Symbols", "Flags"),
)
"""Of Unicode; a sample's label is its group's place here."""
FONTS = (
    "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/noto/NotoColorEmoji.ttf",
)
LISTS = ("/usr/share/unicode/emoji/emoji-test.txt",)
_DRAWING = 1  # raise it with any change to the drawing: what is cached is left alone
_STRIKE = 109  # the one size, in pixels, that the font has its bitmaps in
_CANVAS = (136, 128)
_LINE = re.compile(r"^(?P<codes>[0-9A-F ]+?) *; fully-qualified +# \S+ E[\d.]+ (?P<name>.+)$")
_WHO = re.compile(r"^(man|woman|person|men|women|people|boy|girl|child)\b *")


class Mixture(NamedTuple):
    """Centres of the modes, (modes, dimensions), and the deviation of each in every dimension."""

    centres: Tensor
    sigma: float


def ring8() -> Mixture:
    """Eight modes on a circle of radius 2, the usual test for mode collapse (Metz et al. 2017)."""
    angles = torch.arange(8, dtype=torch.float64) * (2 * math.pi / 8)
    return Mixture((2.0 * torch.stack([angles.cos(), angles.sin()], dim=1)).float(), 0.05)


def draw_ring8() -> tuple[Batch, Batch]:
    """8000 training and 400 held-out points (N, 2), as many of every mode, which is y."""
    centres, sigma = ring8()

    def draw(num_per_mode: int, part: str) -> Batch:
        y = torch.arange(len(centres)).repeat(num_per_mode)
        noise = torch.randn(len(y), centres.shape[1], generator=_generator("ring8", part))
        return Batch(centres[y] + sigma * noise, y)

    return draw(1000, "train"), draw(50, "held out")


def _generator(name: str, part: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(name, part))


def load_digits() -> tuple[Batch, Batch]:
    """1397 training and 400 held-out images (N, 1, 8, 8) in [-1, 1], 40 of each digit held out."""
    # The file itself: to import scikit-learn takes a second in every process of a run.
    path = folder_of("sklearn", "demo") / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(path, dtype=np.float32, delimiter=","))
    x, y = table[:, :-1].reshape(-1, 1, 8, 8) * (2 / _MAX_INK) - 1, table[:, -1].long()
    generator = _generator("digits", "held out")
    held_out = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        members = (y == label).nonzero().squeeze(1)
        chosen = torch.randperm(len(members), generator=generator)[:_HELD_OUT_PER_DIGIT]
        held_out[members[chosen]] = True
    return Batch(x[~held_out], y[~held_out]), Batch(x[held_out], y[held_out])


def load_photo_edges() -> tuple[Batch, Batch]:
    """Training and held-out pairs (N, 4, 32, 32) in [-1, 1], with the edges in channel 0.

    Labels say which photograph.
    """
    bundled = require("skimage.data", "demo")
    crops: list[Tensor] = []
    labels: list[Tensor] = []
    shares: list[Tensor] = []
    for label, (name, factor) in enumerate(_PHOTOS.items()):
        photo = torch.tensor(getattr(bundled, name)()).permute(2, 0, 1).float()
        photo = avg_pool2d(photo, factor) / 255
        crops.append(_cut(photo))
        labels.append(torch.full((len(crops[-1]),), label))
        shares.append(_cut(_held_out_blocks(photo)).mean(dim=(1, 2, 3)))
    photos, y, share = torch.cat(crops), torch.cat(labels), torch.cat(shares)
    x = torch.cat([_edges(photos), photos], dim=1) * 2 - 1
    held_out = (share == 1).nonzero().squeeze(1)
    # In no order, so that the first few are of all photographs.
    generator = _generator("photo_edges", "held out")
    held_out = held_out[torch.randperm(len(held_out), generator=generator)]
    return Batch(x[share == 0], y[share == 0]), Batch(x[held_out], y[held_out])


def _held_out_blocks(photo: Tensor) -> Tensor:
    """1 where a photograph (3, height, width) is held out, else 0; (1, height, width)."""
    rows = torch.arange(photo.shape[1]).unsqueeze(1) // _BLOCK
    columns = torch.arange(photo.shape[2]).unsqueeze(0) // _BLOCK
    return ((rows + 2 * columns) % _PERIOD == 0).float().unsqueeze(0)


def _cut(image: Tensor) -> Tensor:
    """Crops of an image (channels, height, width), (N, channels, _SIZE, _SIZE)."""
    windows = image.unfold(1, _SIZE, _STRIDE).unfold(2, _SIZE, _STRIDE)
    return windows.permute(1, 2, 0, 3, 4).reshape(-1, len(image), _SIZE, _SIZE)


def _edges(photos: Tensor) -> Tensor:
    """Strength of edges in [0, 1], (N, 1, _SIZE, _SIZE), of photographs in [0, 1]."""
    brightness = (photos * torch.tensor(_LUMINANCE).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
    across = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]]) / 8
    kernels = torch.stack([across, across.T]).unsqueeze(1)
    gradient = conv2d(pad(brightness, (1, 1, 1, 1), mode="replicate"), kernels)
    return (_GAIN * gradient.square().sum(dim=1, keepdim=True).sqrt()).clamp(max=1)


class Emoji(NamedTuple):
    """One emoji: what to draw, what it is called, and of what group and family it is."""

    text: str
    name: str
    group: int
    family: str

    @property
    def is_held_out(self) -> bool:
        """Whether its family is one of the tenth that nobody trains on."""
        return hashlib.sha256(self.family.encode()).digest()[0] < 26


def listed_emoji() -> list[Emoji]:
    """All emoji of Unicode's list, in its order; a `ConfigError` if it is not installed."""
    path = _installed(LISTS, "Unicode's list of emoji", "unicode-data")
    found, group = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# group: "):
            group = line.removeprefix("# group: ")
        elif group in GROUPS and (match := _LINE.match(line)):
            text = "".join(chr(int(code, 16)) for code in match["codes"].split())
            base = match["name"] if group == "Flags" else match["name"].split(":")[0]
            family = _WHO.sub("", base) or "person"
            found.append(Emoji(text, match["name"], GROUPS.index(group), family))
    return found


def load_emoji(size: int = 32) -> tuple[Batch, Batch]:
    """Training and held-out pictures (N, 3, size, size) in [-1, 1] on white; labels are groups."""
    listed = listed_emoji()
    pictures, groups = _pictures(listed, size), torch.tensor([one.group for one in listed])
    # In place: at 128 pixels they are 0.7 GB.
    train, held_out = (
        Batch(pictures[places].float().div_(127.5).sub_(1), groups[places])
        for places in _parts(listed)
    )
    return train, held_out


def emoji_names() -> tuple[list[str], list[str]]:
    """Of the pictures that `load_emoji` gives."""
    listed = listed_emoji()
    train, held_out = ([listed[place].name for place in part] for part in _parts(listed))
    return train, held_out


def _parts(listed: list[Emoji]) -> tuple[Tensor, Tensor]:
    """Places of those to train on and of those held out, which are in no order; int64."""
    held_out = torch.tensor([one.is_held_out for one in listed])
    order = torch.randperm(int(held_out.sum()), generator=torch.Generator().manual_seed(0))
    return (~held_out).nonzero().squeeze(1), held_out.nonzero().squeeze(1)[order]


def _installed(paths: tuple[str, ...], what: str, package: str) -> Path:
    for path in map(Path, paths):
        if path.exists():
            return path
    raise ConfigError(
        f"data.name=emoji needs {what}, which is not at {paths[0]}: install the package {package}"
    )


def _pictures(listed: list[Emoji], size: int) -> Tensor:
    """(N, 3, size, size), uint8: drawn once on a machine, which takes some 10 s."""
    font = _installed(FONTS, "the font Noto Color Emoji", "fonts-noto-color-emoji")
    texts = " ".join(one.text for one in listed)
    of = (_DRAWING, hash_file(font), texts, require("PIL", "demo").__version__)
    like = torch.empty((len(listed), 3, size, size), dtype=torch.uint8, device="meta")
    name = f"emoji-{size}-{derive_seed(*of):016x}"
    return cached(name, {"x": like}, lambda: {"x": _draw(listed, font, size)})["x"]


def _draw(listed: list[Emoji], font: Path, size: int) -> Tensor:
    if not require("PIL.features", "demo").check("raqm"):
        # Pillow would draw an emoji of several characters as several, and say nothing.
        raise ConfigError(
            "data.name=emoji needs a Pillow that lays out text with raqm, which this one cannot: "
            "install the package libfribidi0, and Pillow from its wheel"
        )
    image, draw = require("PIL.Image", "demo"), require("PIL.ImageDraw", "demo")
    loaded = require("PIL.ImageFont", "demo").truetype(str(font), _STRIKE)
    pictures = np.empty((len(listed), size, size, 3), np.uint8)
    for picture, one in zip(pictures, listed, strict=True):
        canvas = image.new("RGB", _CANVAS, "white")
        draw.Draw(canvas).text((0, 0), one.text, font=loaded, embedded_color=True)
        picture[:] = canvas.resize((size, size), image.Resampling.BOX, (4, 0, 132, 128))
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()
