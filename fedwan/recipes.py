"""What strategy recipes share: the settings that they may follow, defaults, and parts to build of.

Refused is also what a strategy and a workload do not bear together: networks are built without
memory to see what they consist of. How a page declares what it uses stands in `fedwan.uses`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from fedwan import outer
from fedwan.codecs import Codec, codec_by_name
from fedwan.codecs.masked import MOST_SITES
from fedwan.config import CODECS, MASKED, Config, OuterConfig, RoundConfig
from fedwan.config_tree import keys_of, value_at
from fedwan.errors import ConfigError
from fedwan.fragments import Fragmentation, often, strided, whole
from fedwan.optim_state import NamedOptimizers
from fedwan.outer import Transform
from fedwan.outer.step import ServerStep, step_outer
from fedwan.privacy import require_parameters
from fedwan.protocol.policy import RoundPolicy
from fedwan.protocol.unmasking import LEAST_SITES, majority
from fedwan.state import Layout, State, layout_of
from fedwan.strategy import Overlap, Strategy
from fedwan.uses import Faults, Needs, Uses, fill, followed, unmet, unused
from fedwan.weights import check_initial
from fedwan.workloads.base import NetworkKind
from fedwan.workloads.home import staying_home
from fedwan.workloads.optim import moment_layout
from fedwan.workloads.settings import build_nowhere

if TYPE_CHECKING:
    from fedwan.workloads.descent import Descent

OPTIONAL = (
    *("h", "outer.*.lr", "outer.*.momentum", "network.*.h", "network.*.exclude"),
    *("inner.*.state", "inner.*.name=own", "codec.up=topk2"),
    *("stream.fragments", "stream.tau", "stream.tau=0"),
    *("round.max_staleness", "round.least_steps", "round.merge", "round.gate"),
    *("site.partition", "site.partition=weights", "privacy.epsilon"),
)
"""Settings that some strategies do not follow."""


def _at_most_h(key: str, less: int = 0) -> Needs:
    return Needs(
        key,
        lambda config, _: bool(value_at(config, key) + less <= config.h),
        lambda config: f"{key}={config.h - less} or less",
    )


LATE = (
    Needs(
        "round.max_staleness",
        lambda c, _: 0 < c.round.quorum < c.num_sites,
        lambda c: f"round.quorum={max(1, c.num_sites - 1)}",
    ),
    Needs("round.max_staleness", lambda c, _: not c.round.least_steps, "round.least_steps=0"),
)
"""Where what is too late for its round may be merged into another one."""
MERGES = (
    Needs("round.merge", lambda c, _: not c.round.max_staleness, "round.max_staleness=0"),
    Needs("round.merge", lambda c, _: not c.round.least_steps, "round.least_steps=0"),
    *(
        # Of values that few sites send, nearly all are 0 in the middle.
        Needs(f"round.merge={rule}", lambda c, _: c.codec.up != "topk2", "codec.up=int4, not topk2")
        for rule in ("trimmed_mean", "median")
    ),
)
"""Of rounds that may be merged by a robust rule: one contribution a site, all of about H steps."""
PRIVATE_SITES = Needs("privacy.epsilon", lambda c, _: c.privacy.name == "site", "privacy.unit=site")
"""Where whole sites may be private, and samples may not."""
APART = Needs("network.*.h", lambda c, _: not c.round.least_steps, "round.least_steps=0")
"""Where networks may travel apart."""
GATE = Needs("round.gate", lambda c, _: not c.round.least_steps, "round.least_steps=0")
"""Where contributions are deltas of about as many steps each, so that their sizes compare."""
LOCAL_STEPS = ("h", "network.*.exclude", "inner.*", "codec.*", "site.*")
"""Where sites take steps of their own."""
IN_ROUNDS = (*LOCAL_STEPS, APART, GATE, *LATE)
"""Where they send them in rounds."""
NO_EMA = Needs("inner.*.state=ema", lambda c, _: False, "strategy=diloco or streaming_diloco")
"""Where an average over every step would miss steps: one site's is no mean of all, and what lands
in its place is without those of its flight."""
STREAM: Mapping[str, Any] = {
    "stream.fragments": lambda config: min(4, config.h),
    "stream.tau": lambda config: min(5, max(1, config.h - 1)),
}
"""Defaults of a model that travels in fragments."""
ARRIVAL: Mapping[str, Any] = {
    "round.quorum": lambda config: min(2, config.num_sites),
    "round.max_staleness": lambda config: 4 * config.num_sites,
}
"""Defaults where updates are made on arrival: two live sites, so that no site trains alone unasked,
and contributions of up to four rounds of all sites ago."""
_ROUNDS = (
    _at_most_h("round.least_steps"),
    _at_most_h("stream.fragments"),  # else two would leave after the same step
    _at_most_h("stream.tau", 1),  # else a fragment would leave before its last update has landed
)
"""Of every strategy that has rounds of steps."""
_COMMON = {"h": 1, "checkpoint.every": 1, "codec.up": "fp32", "codec.down": "fp32"}


def resolve_strategy(
    page: ModuleType,
    config: Config,
    networks: Mapping[str, NetworkKind],
    others: Callable[[], Mapping[str, ModuleType]] = dict,
) -> None:
    """Fill in what a strategy's page has defaults for, and refuse what it does not follow.

    In `config`, whose workload is resolved, in place. `others` loads all strategies, for the mend.
    """
    require_followed(page, config, others)
    uses, defaults = declared(page)
    fill(config, {**_COMMON, **defaults}, networks)
    faults = Faults()
    faults.add([*unmet(config, (*uses, *_ROUNDS)), *_off_schedule(config), *_too_few(config)])
    with faults.caught():
        getattr(page, "check", lambda _: None)(config)
    faults.tell()
    if config.codec.up in MASKED:
        faults.add(_unmaskable(config, page.build(config)))
        faults.tell()


def require_followed(
    page: ModuleType, config: Config, others: Callable[[], Mapping[str, ModuleType]] = dict
) -> None:
    """Refuse settings that a page does not follow; the mend is the strategy that follows most."""
    uses, defaults = declared(page)
    found = unused(config, uses, defaults, OPTIONAL)
    if not found:
        return
    pages = others()

    def unlikeness(name: str) -> tuple[int, int, str]:
        its_uses, its_defaults = declared(pages[name])
        left = unused(config, its_uses, its_defaults, OPTIONAL)
        apart = {*followed(its_uses, OPTIONAL)} ^ {*followed(uses, OPTIONAL)}
        return len(left), len(apart) + len({*defaults} ^ {*its_defaults}), name

    best = min(pages, key=unlikeness, default="")
    mend = f", or set strategy={best}" if best and unlikeness(best)[0] < len(found) else ""
    what = f"with strategy {config.strategy!r}; leave it out{mend}"
    raise ConfigError("\n".join(f"{fault} {what}" for fault in found))


def require_script(page: ModuleType, config: Config) -> None:
    """Refuse what a script alone knows: optimisers that a strategy steps at the coordinator.

    And where it does not, settings of theirs that would have no effect.
    """
    is_own = bool(followed(declared(page)[0], ["inner.*.name=own"]))
    keys = "lr schedule weight_decay clip_norm".split()
    own = (
        *(Needs(f"inner.*.{key}", lambda c, _: False, "a recipe") for key in keys),
        Needs("inner.*.beta2", lambda c, n: c.inner[n].state == "average", "a recipe"),
    )
    if is_own and (lines := unmet(config, own)):
        text = "has no effect: a script makes its optimisers itself; leave it out, and set it there"
        raise ConfigError("\n".join(f"{line.partition(' needs')[0]} {text}" for line in lines))
    if not config.inner and not is_own:
        raise ConfigError(
            f"strategy {config.strategy!r} steps the sites' optimisers at the coordinator, "
            "too, which a script makes; set strategy=local_sgd h=1, or say what they are, as "
            "in inner.NETWORK.name=adamw inner.NETWORK.lr=1e-3"
        )


def declared(page: ModuleType) -> tuple[Uses, Mapping[str, Any]]:
    """A page's `USES` and `DEFAULTS`."""
    uses, defaults = getattr(page, "USES", ()), getattr(page, "DEFAULTS", {})
    if isinstance(uses, str):
        raise ConfigError(f"{page.__file__}: USES is {uses!r}; write a tuple, as ({uses!r},)")
    known = list(keys_of(Config))
    for key in (use.key if isinstance(use, Needs) else use for use in uses):
        pattern = re.sub(r"\.[^.]+\.", ".*.", key.partition("=")[0])  # of one network, of any
        if not any(fnmatchcase(each, pattern) for each in known):
            raise ConfigError(f"{page.__file__}: USES has {key!r}, which is no setting")
    return uses, defaults


def _off_schedule(config: Config) -> Iterator[str]:
    """Steps that make no whole rounds, or networks out of step with them."""
    if rest := config.steps % config.h:
        below, above = config.steps - rest, config.steps - rest + config.h
        yield (
            f"steps={config.steps} is no multiple of h={config.h}, so the last {rest} steps would "
            f"never be merged; set steps={f'{below} or ' if below else ''}{above}"
        )
    for network, special in config.network.items():
        if special.h and config.h % special.h:
            fitting = max(h for h in range(1, special.h + 1) if config.h % h == 0)
            yield (
                f"network.{network}.h={special.h} does not divide h={config.h}, so that it would "
                f"not have travelled when the others do; set network.{network}.h={fitting}"
            )
    if config.inner and set(_times(config)) == set(config.inner):
        yield (
            f"every network has an h of its own below h={config.h}, which then has no effect; "
            "set h to the largest of them"
        )


def _too_few(config: Config) -> Iterator[str]:
    """A robust rule that has too few contributions to tell who lies."""
    rule, bad = config.round.rule
    fewest, needed = config.round.quorum or config.num_sites, 2 * bad + (3 if rule == "krum" else 1)
    if rule != "mean" and fewest < needed:
        key = "round.quorum" if config.num_sites >= needed else "sites"
        yield (
            f"round.merge = {config.round.merge!r} needs {needed} contributions where a round may "
            f"close with {fewest}; set {key}={needed}, or round.merge=mean"
        )


def _unmaskable(config: Config, strategy: Strategy) -> Iterator[str]:
    """Where single contributions must be read, or there are too few to hide among."""
    what, rounds, sites = f"codec.up = {config.codec.up!r}", config.round, config.num_sites
    is_sum = strategy.contributes == "delta" and strategy.clock == "versions"
    if not is_sum or strategy.hook or strategy.share or strategy.policy.arrivals_from is not None:
        more = " and round.least_steps=0" if rounds.least_steps else ""
        yield (
            f"{what} does not go with strategy {config.strategy!r}, which does more with "
            f"contributions than to add them up; set strategy=diloco, streaming_diloco, "
            f"sparse_loco or local_sgd{more}, or codec.up=int4"
        )
    if not LEAST_SITES <= sites <= MOST_SITES:
        yield (
            f"{what} hides a site among {LEAST_SITES} to {MOST_SITES}, and sites = {sites}; "
            f"set sites={min(MOST_SITES, max(LEAST_SITES, sites))}, or codec.up=int4"
        )
    if 0 < rounds.quorum < (least := majority(sites)):
        yield (
            f"round.quorum = {rounds.quorum}: more than half of all sites take the masks off; "
            f"set round.quorum={least}"
        )
    if config.checkpoint.every > 1:
        yield (
            f"checkpoint.every = {config.checkpoint.every}: no version is summed twice under "
            "masks, so that a run could not go on from a checkpoint of rounds before; "
            "set checkpoint.every=1"
        )
    for key in ("merge", "max_staleness", "gate"):
        if (value := getattr(rounds, key)) != getattr(RoundConfig(), key):
            yield (
                f"round.{key} = {value!r} reads contributions alone, and {what}; "
                "leave one of them out"
            )


def _times(config: Config) -> dict[str, int]:
    """Networks that travel more than once in a round, and how often."""
    counts = {name: config.h // n.h for name, n in config.network.items() if n.h}
    return {name: count for name, count in counts.items() if count > 1}


def check_built(config: Config, workload: ModuleType, strategy: Strategy) -> None:
    """Refuse what networks and strategy do not bear together, as the sites would, but too late."""
    faults = Faults()
    faults.add(
        f"codec {codec.name!r} of strategy {config.strategy!r} has encoding = {codec.encoding!r}; "
        "choose one from 100 to 255, which are for codecs of one's own"
        for codec in dict.fromkeys((strategy.up, strategy.down))
        if codec.encoding not in range(100, 256) and codec.name not in (*CODECS, *MASKED)
    )
    is_private = config.privacy.is_of("site")
    if config.excluded or config.init or is_private:
        built = build_nowhere(workload, config)
        if built is not None:  # else it reads its own values
            with faults.caught():
                check_initial(built.networks, config)
            with faults.caught():
                layout = travelling(config, built)  # refuses what matches nothing, or everything
                require_parameters(layout if is_private else {})
    faults.tell()


def travelling(config: Config, built: Descent) -> Layout:
    """What sites send of a workload's networks, moments too where `inner` has them averaged."""
    trained = {name: built.networks[name] for name in built.optimizers}
    # Without memory some recipes make no optimisers: then all parameters count as held.
    is_known = all(built.optimizers.values())
    held = NamedOptimizers.of(built.networks, built.optimizers).held() if is_known else None
    layout = layout_of(trained, staying_home(trained, held, config.excluded))
    return dict(sorted((layout | moment_layout(layout, config.inner)).items()))


def cut(config: Config, rest: Fragmentation = whole) -> Fragmentation:
    """Into what a model is cut: as `rest` says, but for networks with an h of their own."""
    times = _times(config)
    return often(times, rest) if times else rest


def codec(config: Config, way: Literal["up", "down"]) -> Codec:
    """How contributions (`up`) or updates (`down`) are coded."""
    return codec_by_name(getattr(config.codec, way), config.num_sites)


_REGRESSION_LR = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
"""Outer lr by number of sites, Charles et al. 2025 (2503.09799)."""


def nesterov(momentum: float = 0.9) -> Callable[[Config, NetworkKind], OuterConfig]:
    """The default of `outer.*` for DiLoCo and its kin, by kind of network.

    Adversarial networks bear little momentum: with 0.9, which suits language models and flows, a
    GAN's two networks overshoot each other and diverge. `momentum` is of regression alone.
    """

    def default(config: Config, kind: NetworkKind) -> OuterConfig:
        if kind == "adversarial":
            return OuterConfig(lr=0.5, momentum=0.5)
        nearest = max(n for n in _REGRESSION_LR if n <= max(1, config.num_sites))
        return OuterConfig(_REGRESSION_LR[nearest], momentum)

    return default


AVERAGING = outer.sgd(lr=1.0)
"""The mean of the sites' weights: the global ones minus the mean delta."""


def with_momentum(config: Config) -> Mapping[str, Transform]:
    """Nesterov's, as a resolved `outer` asks for."""
    return {network: outer.nesterov(o.lr, o.momentum) for network, o in config.outer.items()}


def deltas_in_rounds(
    config: Config, transforms: Mapping[str, Transform] | Transform, **others: Any
) -> Strategy:
    """Sites send what H steps have moved, and wait; `others` are fields of the strategy."""
    least = config.round.least_steps
    usual: dict[str, Any] = {
        "fragments": cut(config),
        "up": codec(config, "up"),
        "down": codec(config, "down"),
        "policy": barrier_policy(config),
        "clock": "samples" if least else "versions",
        "least_steps": least,
    }
    return Strategy(
        contributes="delta", h=config.h, server_step=step_outer(transforms), **{**usual, **others}
    )


def gradients(
    config: Config, step: Callable[[State, Layout], ServerStep], policy: RoundPolicy, **others: Any
) -> Strategy:
    """Sites send the gradients of every step; `others` are fields of the strategy."""
    up, down = codec(config, "up"), codec(config, "down")
    return Strategy("gradient", 1, whole, step, up, down, policy, **others)


def streamed(config: Config, alpha: float = 0.0) -> dict[str, Any]:
    """A strategy's cut and overlap, as a resolved `stream` asks for; `alpha` as in `Overlap`."""
    tau = config.stream.tau
    assert tau is not None, "resolved"
    fragments = cut(config, strided(config.stream.fragments, config.h))
    return {"fragments": fragments, "overlap": Overlap(tau, alpha if tau else 0.0)}


def barrier_policy(config: Config, *, has_deadline: bool = True) -> RoundPolicy:
    """Rounds that wait as a resolved `round` asks for: for all sites, unless it has a quorum."""
    rounds = config.round
    waits = (config.num_sites, rounds.quorum or config.num_sites, rounds.patience_s, has_deadline)
    return RoundPolicy(*waits, rounds.max_staleness)


def on_arrival(config: Config, warmup: int, discount: float = 0.0) -> RoundPolicy:
    """Every contribution is a round of its own, after `warmup` rounds of all sites."""
    policy = barrier_policy(config, has_deadline=False)
    quorum = config.round.quorum
    return policy._replace(quorum=quorum, discount=discount, arrivals_from=warmup)
