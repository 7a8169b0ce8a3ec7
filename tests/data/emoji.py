"""Emoji for machines that have no font: a short list, and pictures that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedwan.data import toys

LIST = """
# group: People & Body
1F44B ; fully-qualified # 👋 E0.6 waving hand
1F44B 1F3FB ; fully-qualified # 👋🏻 E1.0 waving hand: light skin tone
1F468 200D 1F373 ; fully-qualified # 👨‍🍳 E4.0 man cook
1F469 200D 1F373 ; fully-qualified # 👩‍🍳 E4.0 woman cook
# group: Component
1F3FB ; component # 🏻 E1.0 light skin tone
# group: Flags
1F1EB 1F1F7 ; fully-qualified # 🇫🇷 E2.0 flag: France
1F1E9 1F1EA ; fully-qualified # 🇩🇪 E0.6 flag: Germany
263A ; unqualified # ☺ E0.6 smiling face
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = LIST) -> None:
    """A list of emoji, and a file that is no font."""
    (folder / "emoji-test.txt").write_text(text)
    (folder / "font.ttf").write_bytes(b"no font")
    monkeypatch.setattr(toys, "LISTS", (str(folder / "emoji-test.txt"),))
    monkeypatch.setattr(toys, "FONTS", (str(folder / "font.ttf"),))
    monkeypatch.setenv("HOME", str(folder / "home"))


def fake_drawing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Another picture for each; the sizes of all drawings, as they come."""
    sizes: list[int] = []

    def draw(listed: list[toys.Emoji], font: Path, size: int) -> Tensor:
        sizes.append(size)
        pixels = torch.arange(len(listed) * 3 * size * size) % 251
        return pixels.to(torch.uint8).view(-1, 3, size, size)

    monkeypatch.setattr(toys, "_draw", draw)
    return sizes


def many(num: int) -> str:
    """A list of so many."""
    lines = (f"{0x1F300 + n:X} ; fully-qualified # x E1.0 thing {n}" for n in range(num))
    return "\n".join(["# group: Objects", *lines])
