"""`fedwan sample RUN`: pictures from a run's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Last", "RunFolder", "sample"]

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)
]
Last = Annotated[
    bool, typer.Option("--last", help="The last weights instead of their moving average.")
]


def sample(
    run: RunFolder,
    num: Annotated[int, typer.Option(min=1, max=4096, help="How many.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="The same seed, the same samples.")] = 0,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("samples.png"),
    last: Last = False,
) -> None:
    """Draw samples of a run's generator, as its recipe makes them, into one picture.

    Runs of a script of your own have no recipe: fedwan.load(RUN) gives their weights.
    """
    # Imported late: torch takes seconds, and a wrong option is told at once.
    import torch

    import fedwan
    from fedwan.output.samples import draw_samples
    from fedwan.rng import derive_seed, lent_generators

    trained = fedwan.load(run, ema=not last)
    workload, config = trained.workload(), trained.config
    with torch.no_grad(), lent_generators():
        torch.manual_seed(derive_seed(seed, "samples"))  # of recipes that draw from it
        samples = workload.sample(num, seed)
    weights = "last weights" if last else "moving average"
    title = f"{config.workload} on {config.data.name} · {config.strategy} · {weights} · seed {seed}"
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_samples(out, samples.float(), None, title)
    typer.echo(out)
