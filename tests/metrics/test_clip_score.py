"""CLIP's score of pictures and captions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from fedwan.errors import ConfigError
from fedwan.metrics.clip_score import clip_score
from tests.sites.pipelines import clip

CAPTIONS = ["a red cat", "a dog", "a very long caption that says more than anybody reads", "", "d"]
PICTURES = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("clip")
    clip(made)
    return str(made)


def test_it_is_the_mean_cosine_of_each_picture_and_its_own_caption(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    bytes_ = ((PICTURES + 1) * 127.5).round() / 255
    cosines = []
    for x, caption in zip(bytes_, CAPTIONS, strict=True):
        told = words([caption], truncation=True, max_length=8, return_tensors="pt")
        with torch.no_grad():
            seen = model(pixel_values=2 * x[None] - 1, **told)
        cosines.append(torch.cosine_similarity(seen.image_embeds, seen.text_embeds).item())
    expected = 100 * sum(cosines) / len(cosines)
    assert clip_score(folder, PICTURES, CAPTIONS) == pytest.approx(expected, rel=1e-3)
    other = clip_score(folder, PICTURES, CAPTIONS[::-1])
    assert other != pytest.approx(expected, rel=1e-3)
    monkeypatch.setattr("fedwan.metrics.clip_score._CHUNK", 2)
    assert clip_score(folder, PICTURES, CAPTIONS) == pytest.approx(expected, rel=1e-3)


def test_a_folder_of_something_else_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no folder of a transformers CLIP") as caught:
        clip_score(str(tmp_path), PICTURES, CAPTIONS)
    assert len(str(caught.value).splitlines()) == 1
