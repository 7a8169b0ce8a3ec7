"""The commands for what a run has made, `report` to `export`; and `new`, to begin one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedwan.cli.arguments import JsonPath, NewFolder, RunFolder, check_not_own, option, write_option
from fedwan.errors import FedwanError, UserError
from fedwan.files import replace_bytes

Last = Annotated[
    bool, typer.Option("--last", help="The last weights instead of their moving average.")
]

Ca = Annotated[
    Path | None,
    option("--ca", "PATH", "Authorities: all must be signed, by certificates of theirs."),
]


def report(run: RunFolder) -> None:
    """Write RUN/report.html: plots, samples and events on one page.

    Works for runs that are still going on, too.
    """
    from fedwan.output.report import write_report

    typer.echo(write_report(run))


def verify(run: RunFolder, ca: Ca = None, json_path: JsonPath = None) -> None:
    """Check RUN/journal.jsonl: chain, signatures, versions, and that the checkpoint is one of them.

    Exits with 1 and names the first line that is wrong; with 2 if there is no journal.
    """
    from fedwan.output.journal import verify as walk

    found = walk(run, ca)
    write_option(json_path, json.dumps(found, indent=2) + "\n")
    versions, saved = (" ".join(map(str, found[name] or ())) for name in ("versions", "checkpoint"))
    merged = f"from {found['contributions']} contributions, none merged twice"
    events = (f"{count} {event}" for event, count in sorted(found["events"].items()))
    signed = f"{found['signed_lines']} of lines, {found['signed_contributions']} of contributions"
    by = f"keys that {ca} knows" if ca else "the keys below; --ca checks whose they are"
    rest = f"; {found['unsigned_end']} lines at the end are not" if found["unsigned_end"] else ""
    rows = {
        "journal": f"{found['lines']} lines, each follows on the last; hash {found['hash']}",
        "signatures": f"{signed}, by {by}{rest}" if found["signed_lines"] else "none",
        "versions": f"{versions or 'none'}, {merged}",
        "events": ", ".join(events),
        "checkpoint": f"{saved}, undamaged, with the weights that the journal tells of"
        if saved
        else "none",
        "end": "the run is done" if found["is_done"] else "the run is not done",
    }
    if found["keys"]:
        told = (f"{', '.join(keys)} of {name}" for name, keys in found["keys"].items())
        rows["keys"] = ("\n" + 12 * " ").join(told)
    if found["torn_bytes"]:
        rows["note"] = f"{found['torn_bytes']} bytes at the end are no whole line yet"
    for name, text in rows.items():
        typer.echo(f"{name:<10}  {text}")


def sample(
    run: RunFolder,
    num: Annotated[int, typer.Option(min=1, max=4096, help="How many.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="The same seed, the same samples.")] = 0,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("samples.png"),
    prompt: Annotated[
        list[str] | None, option("--prompt", "TEXT", "Of text_to_image: in place of model.prompts.")
    ] = None,
    last: Last = False,
) -> None:
    """Draw samples of a run's generator, as its recipe makes them, into one picture.

    On a GPU where there is one.

    RUN may be what `fedwan export --to safetensors` wrote. Runs of a script of your own have no
    recipe: fedwan.load(RUN) gives their weights.
    """
    # Imported late: torch takes seconds, and a wrong option is told at once.
    import torch

    import fedwan
    from fedwan.output.samples import draw_samples, most_shown
    from fedwan.rng import derive_seed, lent_generators
    from fedwan.site.joining import choose_device

    if out.suffix.lower() != ".png":
        raise UserError(f"--out {out} is no PNG file; name one, as samples.png")
    check_not_own("--out", out)
    trained = fedwan.load(run, ema=not last)
    config = trained.config
    if prompt and "prompts" not in config.model:
        raise UserError(f"--prompt: samples of workload {config.workload!r} are made of none")
    config.model |= {"prompts": prompt} if prompt else {}
    workload = trained.workload(choose_device("auto"))
    with torch.no_grad(), lent_generators():
        one = workload.sample(1, seed)  # before all are made: how large they are
        if one.dim() == 4 and (most := most_shown(one, num)) < num:
            tall, wide = one.shape[2:]
            raise UserError(
                f"--num {num}: there is no room for so many pictures of {tall} by {wide} pixels; "
                f"give --num {most} or less"
            )
        torch.manual_seed(derive_seed(seed, "samples"))  # of recipes that draw from it
        samples = workload.sample(num, seed)
    weights = "moving average" if trained.is_ema else "last weights"
    title = f"{config.workload} on {config.data.name} · {config.strategy} · {weights} · seed {seed}"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        draw_samples(out, samples.float(), None, title, config.model.get("prompts", ()))
    except ValueError as error:
        raise UserError(f"{error}; fedwan.load(RUN).workload().sample() gives them") from None
    typer.echo(out)


def export(
    run: RunFolder,
    folder: NewFolder,
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="`safetensors`: a file per network; `diffusers`.")
    ] = "safetensors",
    last: Last = False,
) -> None:
    """Write a run's networks into DIR, as files that need no fedwan to be loaded."""
    from safetensors import SafetensorError

    import fedwan
    from fedwan.weights import export as export_networks

    trained = fedwan.load(run, ema=not last)
    try:
        export_networks(trained, to, folder)
    except SafetensorError as error:  # which is no `OSError`, whatever the system has said
        raise UserError(f"{folder} cannot be written: {error}; give another folder") from error
    typer.echo(folder)


def new(folder: NewFolder) -> None:
    """Write a project: a training script that runs at once, its test, and its settings."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{str(folder)!r} holds something already; give a new folder")
    skeleton = Path(__file__).resolve().parents[1] / "_skeleton"
    files = {folder / p.name: p.read_bytes() for p in sorted(skeleton.iterdir()) if p.is_file()}
    try:
        for path, data in files.items():
            replace_bytes(path, data)
    except (FedwanError, OSError):  # what is left would stand in the way of the next try
        for path in files:
            path.unlink(missing_ok=True)
        raise
    for path in files:
        typer.echo(path)
    typer.echo(f"next: cd {shlex.quote(str(folder))} && python train.py")
