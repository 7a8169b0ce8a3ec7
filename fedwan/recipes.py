"""What strategy recipes share: the settings that they may follow, defaults, and parts to build of.

How a page declares what it uses stands in `fedwan.uses`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, Literal

from fedwan.codecs import Codec, codec_by_name
from fedwan.config import Config, OuterConfig
from fedwan.coordinator.policy import RoundPolicy, barrier
from fedwan.errors import ConfigError
from fedwan.fragments import Fragmentation, often, strided, whole
from fedwan.overlap import Overlap
from fedwan.uses import Faults, Needs, Uses, fill, unmet, unused
from fedwan.workloads.base import NetworkKind

__all__ = [
    "APART",
    "ARRIVAL",
    "LOCAL_STEPS",
    "OPTIONAL",
    "STREAM",
    "WAITS",
    "barrier_policy",
    "codec",
    "cut",
    "follows",
    "fragmentation",
    "nesterov",
    "overlap",
    "require_followed",
    "resolve_strategy",
]

OPTIONAL = (
    *("h", "outer.*.lr", "outer.*.momentum", "network.*.h", "network.*.exclude"),
    *("inner.*.state", "inner.*.name=muon", "inner.*.name=own", "codec.up=topk2"),
    *("stream.fragments", "stream.tau", "stream.tau=0"),
    *("round.grace", "round.max_staleness", "round.least_steps"),
    *("site.partition", "site.partition=weights", "site.partition=tensor_parallel"),
    "site.precision=bf16-true",
)
"""Settings that some strategies do not follow."""


def _has_spare_sites(config: Config, _: str) -> bool:
    return 0 < config.round.quorum < config.sites


def _one_less(config: Config) -> str:
    return f"round.quorum={max(1, config.sites - 1)}"


WAITS = (
    Needs("round.grace", _has_spare_sites, _one_less),
    Needs("round.max_staleness", _has_spare_sites, _one_less),
)
"""Of rounds that wait for all sites, or for a quorum."""
APART = Needs("network.*.h", lambda c, _: not c.round.least_steps, "round.least_steps=0")
"""Where networks may travel apart."""
LOCAL_STEPS = ("h", "network.*.exclude", "inner.*", "codec.*", "site.*")
"""Where sites take steps of their own."""
STREAM: Mapping[str, Any] = {
    "stream.fragments": lambda config: min(4, config.h),
    "stream.tau": lambda config: min(5, max(1, config.h - 1)),
}
"""Defaults of a model that travels in fragments."""
ARRIVAL: Mapping[str, Any] = {
    "round.quorum": lambda config: min(2, config.sites),
    "round.max_staleness": lambda config: 4 * config.sites,
}
"""Defaults where updates are made on arrival: two live sites, so that no site trains alone unasked,
and contributions of up to four rounds of all sites ago."""
_COMMON = {"h": 1, "checkpoint.every": 1, "codec.up": "fp32", "codec.down": "fp32"}


def resolve_strategy(
    page: ModuleType,
    config: Config,
    networks: Mapping[str, NetworkKind],
    others: Callable[[], Mapping[str, ModuleType]] = dict,
) -> None:
    """Fill in what a strategy's page has defaults for, and refuse what it does not follow.

    Args:
        page: the recipe.
        config: changed in place; its workload's defaults are filled in.
        networks: those that are trained, with their kinds.
        others: loads all strategies, of which the mend names one.

    Raises:
        ConfigError: a line for each setting that has no effect, or goes with no other.
    """
    require_followed(page, config, others)
    fill(config, {**_COMMON, **_defaults(page)}, networks)
    faults = Faults()
    faults.add(unmet(config, _uses(page)))
    with faults.caught():
        _check_schedule(config)
    with faults.caught():
        _check_stream(config)
    with faults.caught():
        getattr(page, "check", lambda _: None)(config)
    faults.tell()


def require_followed(
    page: ModuleType, config: Config, others: Callable[[], Mapping[str, ModuleType]] = dict
) -> None:
    """Refuse settings that a strategy's page does not follow; for the arguments see above.

    Raises:
        ConfigError: a line for each, with the strategy that follows most of what was asked for, and
            of these is most like the present one.
    """
    found = unused(config, _uses(page), OPTIONAL, _defaults(page))
    if not found:
        return
    pages = others()

    def unlikeness(name: str) -> tuple[int, int, str]:
        left = unused(config, _uses(pages[name]), OPTIONAL, _defaults(pages[name]))
        apart = len(_followed(page) ^ _followed(pages[name]))
        return len(left), apart + len({*_defaults(page)} ^ {*_defaults(pages[name])}), name

    best = min(pages, key=unlikeness, default="")
    mend = f", or set strategy={best}" if best and unlikeness(best)[0] < len(found) else ""
    raise ConfigError(
        "\n".join(
            f"{key} = {value!r} {'does not go' if '=' in entry else 'has no effect'} with strategy "
            f"{config.strategy!r}; leave it out{mend}"
            for key, value, entry in found
        )
    )


def follows(page: ModuleType, entry: str) -> bool:
    """Whether a strategy's page declares one of `OPTIONAL`."""
    return entry in _followed(page)


def _uses(page: ModuleType) -> Uses:
    uses: Uses = getattr(page, "USES", ())
    return uses


def _defaults(page: ModuleType) -> Mapping[str, Any]:
    defaults: Mapping[str, Any] = getattr(page, "DEFAULTS", {})
    return defaults


def _followed(page: ModuleType) -> set[str]:
    """What of `OPTIONAL` a page declares."""
    patterns = [use.key if isinstance(use, Needs) else use for use in _uses(page)]
    return {o for o in OPTIONAL if any(fnmatchcase(o, pattern) for pattern in patterns)}


def _check_schedule(config: Config) -> None:
    """Refuse steps that make no whole rounds, or networks out of step with them."""
    rest = config.steps % config.h
    if rest:
        below, above = config.steps - rest, config.steps - rest + config.h
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"steps={config.steps} is no multiple of h={config.h}, so the last {rest} steps would "
            f"never be merged; set steps={nearest}"
        )
    for network, special in config.network.items():
        if special.h and config.h % special.h:
            fitting = max(h for h in range(1, special.h + 1) if config.h % h == 0)
            raise ConfigError(
                f"network.{network}.h={special.h} does not divide h={config.h}, so that it would "
                f"not have travelled when the others do; set network.{network}.h={fitting}"
            )
    if config.network and set(_times(config)) == set(config.inner):
        raise ConfigError(
            f"every network has an h of its own below h={config.h}, which then has no effect; "
            "set h to the largest of them"
        )
    if config.round.least_steps > config.h:
        raise ConfigError(
            f"round.least_steps={config.round.least_steps} is above h={config.h}, which the "
            f"fastest site takes; set round.least_steps={config.h} or less"
        )


def _check_stream(config: Config) -> None:
    """Refuse fragments that would leave together, or again before their update has landed."""
    stream = config.stream
    if stream.fragments > config.h:
        raise ConfigError(
            f"stream.fragments={stream.fragments} is more than h={config.h}, so that two would "
            f"leave after the same step; set stream.fragments={config.h} or less"
        )
    if stream.tau is not None and stream.tau >= config.h:
        nearest = f"stream.tau={config.h - 1}" if config.h > 1 else "h=2 or more"
        raise ConfigError(
            f"stream.tau={stream.tau} is not below h={config.h}, so that a fragment would leave "
            f"again before its update has landed; set {nearest}"
        )


def _times(config: Config) -> dict[str, int]:
    """Networks that travel more than once in a round, and how often."""
    counts = {name: config.h // n.h for name, n in config.network.items() if n.h}
    return {name: count for name, count in counts.items() if count > 1}


def cut(config: Config, rest: Fragmentation = whole) -> Fragmentation:
    """Into what a model is cut: as `rest` says, but for networks with an h of their own.

    Args:
        config: resolved.
        rest: of the networks that travel once in a round.
    """
    times = _times(config)
    return often(times, rest) if times else rest


def codec(
    config: Config, way: Literal["up", "down"], wrap: Callable[[Codec], Codec] = lambda c: c
) -> Codec:
    """How one way is coded.

    Args:
        config: resolved.
        way: `up` for contributions, `down` for updates.
        wrap: what becomes of the codec, such as `with_feedback`.
    """
    return wrap(codec_by_name(getattr(config.codec, way)))


ADVERSARIAL = (0.5, 0.5)
"""(lr, momentum) of a GAN's networks."""

REGRESSION_LR = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
"""Outer lr by number of sites, Charles et al. 2025 (2503.09799); momentum 0.9."""


def nesterov(momentum: float = 0.9) -> Callable[[Config, NetworkKind], OuterConfig]:
    """The default of `outer.*` for DiLoCo and its kin, by kind of network.

    Adversarial networks bear little momentum: with 0.9, which suits language models and flows, a
    GAN's two networks overshoot each other and diverge.

    Args:
        momentum: of networks that are trained by regression.
    """

    def default(config: Config, kind: NetworkKind) -> OuterConfig:
        nearest = max(n for n in REGRESSION_LR if n <= max(1, config.sites))
        regression = (REGRESSION_LR[nearest], momentum)
        return OuterConfig(*{"adversarial": ADVERSARIAL, "regression": regression}[kind])

    return default


def fragmentation(config: Config) -> Fragmentation:
    """The cut that a resolved `stream` asks for."""
    return cut(config, strided(config.stream.fragments, config.h))


def overlap(config: Config, alpha: float = 0.0) -> Overlap:
    """The overlap that a resolved `stream` asks for.

    Args:
        config: resolved.
        alpha: share of its own weights that a site keeps of steps that it took meanwhile.
    """
    tau = config.stream.tau
    assert tau is not None, "resolved"
    return Overlap(tau, alpha if tau else 0.0)


def barrier_policy(config: Config) -> RoundPolicy:
    """Rounds that wait as a resolved `round` asks for."""
    rounds = config.round
    return barrier(
        config.sites, rounds.quorum, rounds.patience_s, rounds.grace, rounds.max_staleness
    )
