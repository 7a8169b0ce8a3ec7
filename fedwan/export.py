"""`fedwan export`: a run's networks as plain files that need no fedwan."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

import fedwan
from fedwan.errors import FedwanError, UserError
from fedwan.names import nearest
from fedwan.output.units import subject
from fedwan.trained import Trained


def export(trained: Trained, to: str, folder: Path) -> None:
    """Write the networks of a run into a new folder, in one of `FORMATS`.

    Raises:
        UserError: there is no such format, or the folder holds something.
    """
    if to not in FORMATS:
        raise UserError(f"--to {to} is none of {', '.join(FORMATS)}{nearest(to, FORMATS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{str(folder)!r} holds something already; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    FORMATS[to](trained, folder)


def _export_safetensors(trained: Trained, folder: Path) -> None:
    """One file per network, `config.json`, and a README on how to load them."""
    try:
        modules = dict(trained.workload().networks)
    except FedwanError:  # there is no recipe, or it has moved on
        modules = {}
    for network, tensors in trained.networks.items():
        whole = {name: value.contiguous() for name, value in tensors.items()}
        save_file(whole, folder / f"{network}.safetensors", {"format": "pt"})
    both = [network for network in trained.networks if network in modules]
    missing = {network: trained.load_into(modules[network], network) for network in both}
    about = {
        "fedwan": fedwan.__version__,
        "weights": "ema" if trained.is_ema else "last",
        "files": {network: f"{network}.safetensors" for network in trained.networks},
        "missing": missing,
        "config": dataclasses.asdict(trained.config),
    }
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    (folder / "README.md").write_text(_readme(trained, modules, missing))


FORMATS: dict[str, Callable[[Trained, Path], None]] = {"safetensors": _export_safetensors}
"""What writes each format."""

_README = """\
# Weights of {subject}, trained with fedwan {version}

These files hold {weights}, one file per network, by the names of the module's
`state_dict()`, parameters in float32. `config.json` holds the run's settings.

| file | tensors | values | first |
| --- | --- | --- | --- |
{rows}

## Loading

Into modules of the same classes and sizes:

```python
from safetensors.torch import load_file

{loading}
```

## What is not here

{absent}
{modules}"""


def _readme(trained: Trained, modules: dict[str, nn.Module], missing: dict[str, list[str]]) -> str:
    rows, loading = [], []
    for name, tensors in trained.networks.items():
        num_values, first = sum(value.numel() for value in tensors.values()), next(iter(tensors))
        rows.append(f"| `{name}.safetensors` | {len(tensors)} | {num_values:,} | `{first}` |")
        strict = "" if missing.get(name) == [] else ", strict=False"
        loading.append(f'{name}.load_state_dict(load_file("{name}.safetensors"){strict})')
    printed = [f"\n`{name}`:\n\n```\n{module}\n```" for name, module in modules.items()]
    return _README.format(
        subject=subject(trained.config),
        version=fedwan.__version__,
        weights=f"the {'moving average of the global' if trained.is_ema else 'last'} weights",
        rows="\n".join(rows),
        loading="\n".join(loading),
        absent=_absent(trained, modules, missing),
        modules="\n".join(["\n## The modules, as torch prints them", *printed]) if modules else "",
    )


_STAYED = """
These never left the sites: frozen tensors are the same everywhere, excluded
ones are each site's own, and spectral norm's vectors follow from the weights."""
_SPECTRAL = ("._u", "._v", "weight_u", "weight_v")
_SPECTRAL_NOTE = """
A few forward passes bring spectral norm's vectors about, before `module.eval()`:

```python
module.train()
with torch.no_grad():
    for _ in range(20):
        module(example)
```"""


def _absent(trained: Trained, modules: dict[str, nn.Module], missing: dict[str, list[str]]) -> str:
    """What the files lack, and why."""
    named = missing if modules else trained.config.excluded
    lines = [
        f"- `{network}`: {', '.join(f'`{name}`' for name in names)}"
        for network, names in named.items()
        if names
    ]
    lines += [f"- all of `{network}`, which is frozen" for network in modules.keys() - missing]
    if not modules:
        lines.append("- frozen networks and parameters, and vectors of spectral norm, if there are")
    elif not lines:
        return "Nothing: the files hold all parameters and buffers."
    lines.append(_STAYED)
    if not modules or any(n.endswith(_SPECTRAL) for names in missing.values() for n in names):
        lines.append(_SPECTRAL_NOTE)
    return "\n".join(lines)
