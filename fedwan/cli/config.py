"""`fedwan config`: every setting there is, or what a run would be resolved to."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from omegaconf import OmegaConf

from fedwan import config as sections
from fedwan.cli.arguments import FileAndWords, file_and_words
from fedwan.config import Config
from fedwan.config_tree import keys_of, kind_at
from fedwan.errors import ConfigError


def config(
    words: FileAndWords = None,
    every: Annotated[
        bool, typer.Option("--list", help="Every key, with its type, default and meaning.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Print a configuration with nothing left open: what a run's config.yaml would hold.

    CONFIG.yaml may be left out: fedwan config strategy=streaming_diloco h=50

    --list prints what can be set instead.
    """
    if every:
        if words:
            raise ConfigError(
                f"--list has every key: {' '.join(words)} changes nothing; leave it out"
            )
        rows = settings()
        lines = [f"{x['key']} ({x['type']}, {x['default']!r})\n    {x['meaning']}" for x in rows]
        typer.echo(json.dumps(rows, indent=2) if as_json else "\n".join(lines))
        return
    from fedwan.app import load_run

    resolved = OmegaConf.structured(load_run(*file_and_words(words)))
    text = json.dumps(OmegaConf.to_container(resolved), indent=2) + "\n"
    typer.echo(text if as_json else OmegaConf.to_yaml(resolved), nl=False)


def settings() -> list[dict[str, Any]]:
    """Every setting: `key`, `type`, `default` and `meaning`, the docstring under it.

    Keys are as in `inner.NETWORK.lr`; those of `model` depend on the workload (docs/workloads.md).
    """
    meanings = _meanings()
    rows = []
    for key in keys_of(Config):
        head, _, leaf = key.rpartition(".")
        section = kind_at(Config, head)
        field = section.__dataclass_fields__[leaf]
        kind = "|".join(field.metadata.get("choices", ())) or field.type
        default, meaning = getattr(section(), leaf), meanings[section.__name__, leaf]
        rows.append({"key": key, "type": str(kind), "default": default, "meaning": meaning})
    return rows


def _meanings() -> dict[tuple[str, str], str]:
    """By class and setting, the docstring under it, in one line."""
    tree = ast.parse(Path(inspect.getfile(sections)).read_text(encoding="utf-8"))
    found: dict[tuple[str, str], str] = {}
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, text in zip(section.body, section.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                words = str(ast.literal_eval(text.value)).split()
                found[section.name, field.target.id] = " ".join(words)
    return found
