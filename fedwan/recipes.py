"""What strategy recipes share when they resolve a configuration: fill in, or refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from fedwan.codecs import Codec, by_network, codec_by_name
from fedwan.config import Config, OuterConfig, StreamConfig
from fedwan.coordinator.policy import RoundPolicy, barrier
from fedwan.errors import ConfigError
from fedwan.fragments import Fragmentation, blocks, often, strided, whole
from fedwan.overlap import Overlap
from fedwan.workloads.base import NetworkKind

__all__ = [
    "barrier_policy",
    "codec",
    "cut",
    "fill_arrival",
    "fill_barrier",
    "fill_codec",
    "fill_nesterov",
    "fill_outer",
    "fill_schedule",
    "fill_stream",
    "fragmentation",
    "overlap",
    "refuse_alpha",
    "refuse_h",
    "refuse_own_inner",
    "refuse_outer",
    "refuse_round",
    "refuse_state",
    "refuse_stream",
    "require_overlap",
]

Way = Literal["up", "down"]


def fill_schedule(config: Config, h: int, checkpoint_every: int) -> None:
    """Fill in H and the checkpoints' interval; see that the steps make whole rounds.

    Args:
        config: changed in place; `steps` is resolved.
        h: steps between uploads where the user named none.
        checkpoint_every: rounds between checkpoints where the user named none.

    Raises:
        ConfigError: `steps` is no multiple of `h`, so that the last steps would never be merged; or
            `h` is no multiple of a network's own.
    """
    config.h = config.h or h
    config.checkpoint.every = config.checkpoint.every or checkpoint_every
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


def fill_codec(config: Config, up: str = "fp32", down: str = "fp32") -> None:
    """Fill in how both directions are coded, where the user named nothing.

    Raises:
        ConfigError: a codec is named that no network takes.
    """
    _fill_way(config, "up", up)
    _fill_way(config, "down", down)


def _fill_way(config: Config, way: Way, default: str) -> None:
    own = _own_codecs(config, way)
    is_unused = bool(own) and own.keys() == config.inner.keys()
    chosen = getattr(config.codec, way) or (next(iter(own.values())) if is_unused else default)
    if is_unused and chosen not in own.values():
        raise ConfigError(
            f"codec.{way}={chosen} has no effect: every network has a codec of its own; "
            "leave it out"
        )
    setattr(config.codec, way, chosen)


def _own_codecs(config: Config, way: Way) -> dict[str, str]:
    """Names of codecs by network, where a network has one of its own."""
    names = {network: getattr(n, f"codec_{way}") for network, n in config.network.items()}
    return {network: name for network, name in names.items() if name}


def codec(config: Config, way: Way, wrap: Callable[[Codec], Codec] = lambda c: c) -> Codec:
    """How one way is coded: all networks alike, but for those with a codec of their own.

    Args:
        config: resolved.
        way: `up` for contributions, `down` for updates.
        wrap: what becomes of each codec, such as `with_feedback`.
    """
    own = {name: wrap(codec_by_name(c)) for name, c in _own_codecs(config, way).items()}
    return by_network(wrap(codec_by_name(getattr(config.codec, way))), own)


def fill_outer(config: Config, network: str, lr: float, momentum: float) -> None:
    """Fill in a network's outer settings where the user named none.

    Raises:
        ConfigError: a value is out of range.
    """
    chosen = config.outer.setdefault(network, OuterConfig(lr, momentum))
    if not chosen.lr > 0:
        raise ConfigError(f"outer.{network}.lr={chosen.lr:g}; set it above 0")
    if not 0 <= chosen.momentum < 1:
        raise ConfigError(f"outer.{network}.momentum={chosen.momentum:g}; set it in [0, 1)")


ADVERSARIAL = (0.5, 0.5)
"""(lr, momentum) of a GAN's networks."""

REGRESSION_LR = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
"""Outer lr by number of sites, Charles et al. 2025 (2503.09799); momentum 0.9."""


def fill_nesterov(
    config: Config, networks: Mapping[str, NetworkKind], momentum: float = 0.9
) -> None:
    """Fill in the outer settings of DiLoCo and its kin, by kind of network.

    Adversarial networks bear little momentum: with 0.9, which suits language models and flows, a
    GAN's two networks overshoot each other and diverge.

    Args:
        config: changed in place.
        networks: by name.
        momentum: of networks that are trained by regression.

    Raises:
        ConfigError: see `fill_outer`.
    """
    nearest = max(n for n in REGRESSION_LR if n <= max(1, config.sites))
    defaults = {"adversarial": ADVERSARIAL, "regression": (REGRESSION_LR[nearest], momentum)}
    for network, kind in networks.items():
        lr, momentum = defaults[kind]
        fill_outer(config, network, lr=lr, momentum=momentum)


def refuse_outer(config: Config, networks: Mapping[str, NetworkKind], why: str) -> None:
    """Refuse outer settings, which a strategy without outer optimiser would ignore.

    Raises:
        ConfigError: there are some.
    """
    for network in networks:
        if network in config.outer:
            raise ConfigError(
                f"outer.{network} has no effect: strategy {config.strategy!r} {why}; "
                "leave it out, or set strategy=diloco"
            )


def refuse_state(config: Config, why: str) -> None:
    """Refuse what would become of inner moments at updates that leave none of them behind.

    Raises:
        ConfigError: a network's are not simply kept.
    """
    for network, inner in config.inner.items():
        if inner.state != "keep":
            raise ConfigError(
                f"inner.{network}.state={inner.state} has no effect: strategy "
                f"{config.strategy!r} {why}; leave it out, or set strategy=diloco"
            )


def refuse_h(config: Config, why: str) -> None:
    """Refuse an H that a strategy without local steps would ignore.

    Raises:
        ConfigError: H is neither open nor 1.
    """
    if config.h not in (0, 1):
        raise ConfigError(
            f"h={config.h} has no effect: strategy {config.strategy!r} {why}; "
            "leave it out, or set strategy=local_sgd"
        )


def refuse_own_inner(config: Config, why: str) -> None:
    """Refuse inner optimisers that a workload's code makes, where a strategy must know them.

    Raises:
        ConfigError: there is one.
    """
    for network, inner in config.inner.items():
        if inner.name == "own":
            raise ConfigError(
                f"strategy {config.strategy!r} {why}, but the inner optimiser of {network!r} is "
                f"made by the code of workload {config.workload!r}; set strategy=local_sgd h=1"
            )


def fill_stream(config: Config, fragments: int, tau: int, alpha: float | None = None) -> None:
    """Fill in the stream's settings where the user named none.

    Args:
        config: changed in place; `h` is resolved.
        fragments: into which the model is cut.
        tau: steps between a fragment's departure and its update's landing.
        alpha: share of its own weights that a site keeps; None if the strategy has no such thing.

    Raises:
        ConfigError: there are more fragments than steps in a round, an update would land after the
            next departure, or a share would be kept of steps that were not taken.
    """
    stream = config.stream
    stream.fragments = stream.fragments or min(fragments, config.h)
    stream.pattern = stream.pattern or "strided"
    stream.tau = min(tau, max(1, config.h - 1)) if stream.tau is None else stream.tau
    if stream.alpha is None and alpha is not None:
        stream.alpha = alpha if stream.tau else 0.0
    if stream.fragments > config.h:
        raise ConfigError(
            f"stream.fragments={stream.fragments} is more than h={config.h}, so that two would "
            f"leave after the same step; set stream.fragments={config.h} or less"
        )
    if stream.tau >= config.h:
        nearest = f"stream.tau={config.h - 1}" if config.h > 1 else "h=2 or more"
        raise ConfigError(
            f"stream.tau={stream.tau} is not below h={config.h}, so that a fragment would leave "
            f"again before its update has landed; set {nearest}"
        )
    if stream.alpha and not stream.tau:
        raise ConfigError(
            f"stream.alpha={stream.alpha:g} has no effect with stream.tau=0, where a site takes no "
            "step before an update is mixed in; leave it out, or set stream.tau=1 or more"
        )


def require_overlap(config: Config, why: str) -> None:
    """Refuse to wait for updates, where a strategy does nothing else but not to wait.

    Raises:
        ConfigError: τ is 0.
    """
    if config.stream.tau == 0:
        raise ConfigError(
            f"stream.tau=0 leaves no steps in between: strategy {config.strategy!r} {why}; "
            "set stream.tau=1 or more, or strategy=streaming_diloco"
        )


def fragmentation(config: Config) -> Fragmentation:
    """The cut that a resolved `stream` asks for."""
    pattern = {"strided": strided, "blocks": blocks}[config.stream.pattern]
    return cut(config, pattern(config.stream.fragments, config.h))


def overlap(config: Config) -> Overlap:
    """The overlap that a resolved `stream` asks for.

    Args:
        config: resolved.
    """
    assert config.stream.tau is not None, "see fill_stream"
    return Overlap(config.stream.tau, config.stream.alpha or 0.0)


def refuse_alpha(config: Config, why: str) -> None:
    """Refuse the share that a strategy which does not blend updates in would ignore.

    Raises:
        ConfigError: there is one.
    """
    if config.stream.alpha is not None:
        raise ConfigError(
            f"stream.alpha={config.stream.alpha:g} has no effect: strategy {config.strategy!r} "
            f"{why}; leave it out, or set strategy=streaming_diloco"
        )


def refuse_stream(config: Config) -> None:
    """Refuse stream settings, which a strategy that waits for its updates would ignore.

    Raises:
        ConfigError: there are some.
    """
    for key, unset in vars(StreamConfig()).items():
        value = getattr(config.stream, key)
        if value != unset:
            raise ConfigError(
                f"stream.{key}={value} has no effect: strategy {config.strategy!r} sends the whole "
                "model and waits; leave it out, or set strategy=streaming_diloco"
            )


def fill_barrier(config: Config) -> None:
    """Check the settings of rounds that wait for every site, or for a quorum.

    Raises:
        ConfigError: a setting has no effect, or no run could use it.
    """
    rounds = config.round
    refuse_round(config, "warmup", "makes updates behind a barrier all along", "async_diloco")
    if rounds.quorum in (0, config.sites):
        for key in ("grace", "max_staleness"):
            if getattr(rounds, key):
                raise ConfigError(
                    f"round.{key}={getattr(rounds, key):g} has no effect where every round waits "
                    f"for all {config.sites} sites; set round.quorum={max(1, config.sites - 1)}"
                )
    if rounds.least_steps and _times(config):
        network, special = next((n, c) for n, c in config.network.items() if c.h)
        raise ConfigError(
            f"network.{network}.h={special.h} has no effect with round.least_steps, where a site "
            "uploads at a pace of its own; leave one of them out"
        )
    if rounds.least_steps > config.h:
        raise ConfigError(
            f"round.least_steps={rounds.least_steps} is above h={config.h}, which the fastest site "
            f"takes; set round.least_steps={config.h} or less"
        )


def barrier_policy(config: Config) -> RoundPolicy:
    """Rounds that wait as a resolved `round` asks for."""
    rounds = config.round
    return barrier(
        config.sites, rounds.quorum, rounds.patience_s, rounds.grace, rounds.max_staleness
    )


def fill_arrival(config: Config, warmup: int, least_steps: int) -> None:
    """Fill in the settings of updates that are made on arrival.

    A quorum of two (of one, where there is one site), so that no site trains alone unasked, and
    contributions of up to four rounds of all sites ago.

    Args:
        config: changed in place; `h` is resolved.
        warmup: rounds that wait for every site.
        least_steps: see `RoundConfig`; 0 if steps are not the sites' own.

    Raises:
        ConfigError: a setting has no effect, or no run could use it.
    """
    rounds = config.round
    refuse_round(config, "grace", "waits for no site", "diloco")
    rounds.quorum = rounds.quorum or min(2, config.sites)
    rounds.max_staleness = rounds.max_staleness or 4 * config.sites
    rounds.warmup = rounds.warmup or warmup
    rounds.least_steps = rounds.least_steps or least_steps
    if rounds.least_steps > config.h:
        raise ConfigError(
            f"round.least_steps={rounds.least_steps} is above h={config.h}, which the fastest site "
            f"takes; set round.least_steps={config.h} or less"
        )


def refuse_round(config: Config, key: str, why: str, instead: str) -> None:
    """Refuse a setting of rounds that a strategy would ignore.

    Raises:
        ConfigError: it is set.
    """
    value = getattr(config.round, key)
    if value:
        raise ConfigError(
            f"round.{key}={value:g} has no effect: strategy {config.strategy!r} {why}; "
            f"leave it out, or set strategy={instead}"
        )
