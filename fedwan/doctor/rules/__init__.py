"""The doctor's rules: one idea a file, causes before what follows from them.

A rule is a function of the chart, and of a site, to findings. Of one site only what stands highest
here is told: whoever has the wrong pixels will also have long steps and a large loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fedwan.doctor.chart import Chart
from fedwan.doctor.finding import Finding
from fedwan.doctor.rules.collapse import collapse, collapse_everywhere
from fedwan.doctor.rules.diverging import diverging, diverging_everywhere, overpowering
from fedwan.doctor.rules.heterogeneity import heterogeneity
from fedwan.doctor.rules.learning_rate import learning_rate
from fedwan.doctor.rules.memorising import memorising, memorising_everywhere
from fedwan.doctor.rules.noise import noise
from fedwan.doctor.rules.pixel_range import pixel_range
from fedwan.doctor.rules.small_shard import small_shard
from fedwan.doctor.rules.stale import stale
from fedwan.doctor.rules.unlike import unlike

__all__ = ["RUN_RULES", "SITE_RULES"]

SITE_RULES: tuple[Callable[[Chart, str], Iterator[Finding]], ...] = (
    *(small_shard, noise, pixel_range, learning_rate, stale),
    *(memorising, overpowering, diverging, collapse, unlike),
)
"""Of one site."""

RUN_RULES: tuple[Callable[[Chart], Iterator[Finding]], ...] = (
    *(diverging_everywhere, collapse_everywhere, memorising_everywhere, heterogeneity),
)
"""Of all sites together; told while no site is known to be at fault."""
