"""Emoji: 3,655 colour pictures of an installed font, each with one of nine groups and a name.

Drawn from the font Noto Color Emoji in Unicode's order (`emoji-test.txt`, Unicode Technical
Standard 51). Variants of one emoji, of skin, hair and gender, are near copies: a family
is held out whole or not at all, about one in ten.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedwan.errors import ConfigError
from fedwan.extras import require
from fedwan.workloads.base import Batch

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
_STRIKE = 109  # the one size, in pixels, that the font has its bitmaps in
_CANVAS = (136, 128)
_LINE = re.compile(r"^(?P<codes>[0-9A-F ]+?) *; fully-qualified +# \S+ E[\d.]+ (?P<name>.+)$")
_WHO = re.compile(r"^(man|woman|person|men|women|people|boy|girl|child)\b *")


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
    pictures = _draw(listed, size).float() / 127.5 - 1
    groups = torch.tensor([one.group for one in listed])
    held_out = torch.tensor([one.is_held_out for one in listed])
    order = torch.randperm(int(held_out.sum()), generator=torch.Generator().manual_seed(0))
    return (
        Batch(pictures[~held_out], groups[~held_out]),
        Batch(pictures[held_out][order], groups[held_out][order]),
    )


def _installed(paths: tuple[str, ...], what: str, package: str) -> Path:
    for path in map(Path, paths):
        if path.exists():
            return path
    raise ConfigError(
        f"data.name=emoji needs {what}, which is not at {paths[0]}: install the package {package}"
    )


def _draw(listed: list[Emoji], size: int) -> Tensor:
    font = _installed(FONTS, "the font Noto Color Emoji", "fonts-noto-color-emoji")
    image, draw = require("PIL.Image", "demo"), require("PIL.ImageDraw", "demo")
    loaded = require("PIL.ImageFont", "demo").truetype(str(font), _STRIKE)
    pictures = np.empty((len(listed), size, size, 3), np.uint8)
    for picture, one in zip(pictures, listed, strict=True):
        canvas = image.new("RGB", _CANVAS, "white")
        draw.Draw(canvas).text((0, 0), one.text, font=loaded, embedded_color=True)
        picture[:] = canvas.resize((size, size), image.Resampling.BOX, (4, 0, 132, 128))
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()
