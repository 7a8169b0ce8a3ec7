from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fedwan.data import emoji, find_source
from fedwan.data.emoji import GROUPS, listed_emoji
from fedwan.errors import ConfigError

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


def test_variants_of_skin_and_gender_are_one_family_and_flags_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "emoji-test.txt"
    path.write_text(LIST)
    monkeypatch.setattr(emoji, "LISTS", (str(path),))
    found = listed_emoji()
    assert [one.name for one in found][:2] == ["waving hand", "waving hand: light skin tone"]
    assert Counter(one.family for one in found) == {
        "waving hand": 2,
        "cook": 2,
        "flag: France": 1,
        "flag: Germany": 1,
    }
    assert {GROUPS[one.group] for one in found} == {"People & Body", "Flags"}


def test_a_missing_font_is_one_line_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emoji, "LISTS", ("/no/list",))
    with pytest.raises(ConfigError, match=r"data\.name=emoji needs .* install .* unicode-data"):
        listed_emoji()


@pytest.mark.skipif(
    not all(Path(paths[0]).exists() for paths in (emoji.FONTS, emoji.LISTS)),
    reason="the font Noto Color Emoji or Unicode's list is not installed",
)
def test_no_family_is_on_both_sides_and_every_group_is_held_out() -> None:
    train, held_out = find_source("emoji").load()
    assert train.x.shape[1:] == (3, 32, 32) and len(train.x) > 3000
    assert -1 <= float(train.x.min()) < float(train.x.max()) <= 1
    assert set(held_out.y.tolist()) == set(range(len(GROUPS)))
    assert len({one.family for one in listed_emoji() if one.is_held_out}) > 100
