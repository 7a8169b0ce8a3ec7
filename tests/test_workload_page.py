"""docs/workloads.md stays true: every workload is on it, and every setting with its default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from fedwan.app import load_workload

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")
WORKLOADS = sorted(
    path.stem
    for path in (ROOT / "sites").glob("*.py")
    if path.stem != "client_app" and not path.stem.startswith("_")
)
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}


def told(value: object) -> str:
    """A default as the page writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`" if value else "none"
    return "none" if value == {} else str(value)


def test_every_bundled_workload_has_a_section_and_no_other() -> None:
    assert sorted(SECTIONS) == WORKLOADS
    for name in WORKLOADS:
        assert f"| [`{name}`](#{name}) |" in PAGE


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_setting_of_a_workload_s_model_is_there_in_order_with_its_default(name: str) -> None:
    rows = re.findall(r"^\| `model\.(\w+)` \| (.+?) \| (.+) \|$", SECTIONS[name], re.MULTILINE)
    model = load_workload(name).Model()
    expected = [(f.name, told(getattr(model, f.name))) for f in dataclasses.fields(model)]
    assert [row[:2] for row in rows] == expected
    assert all(meaning.strip() for _, _, meaning in rows)
