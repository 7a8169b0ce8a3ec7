"""The configuration: one dataclass per section, parsed and checked once, at the edge.

What depends on the recipe (the outer learning rate of a generator, say) is left unset here and
filled in by `fedwan.app.resolve`, which also refuses settings that would have no effect. A new
setting is a field here, with what it may be and a line on what it means.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedwan.config_tree import (
    LISTENS,
    NAMED,
    POSITIVE,
    SHARE,
    invalid,
    one_of,
    overlay,
    parse_words,
    read_yaml,
    setting,
    span,
)
from fedwan.errors import ConfigError
from fedwan.files import replace_text
from fedwan.names import nearest, why_unsafe
from fedwan.uses import Faults, Needs, effective, unmet

COMMAND = "command"
"""The workload of a training script of the sites' own: its networks are known once it joins."""
SITE = "{site}"
"""What stands for a site's name in `data.path`, and in a command."""
SET_NAMES = ("digits", "ring8", "emoji", "photo_edges")
"""The values of `data.name` that stand for what comes with fedwan."""
FILE_NAMES = ("folder", "pairs", "pairs_b_to_a", "webdataset", "parquet", "hf")
"""The values of `data.name` that stand for files of the user's."""
CODECS = ("", "fp32", "bf16", "int8", "int4", "int2", "topk2")
MASKED = tuple(f"masked{bits}" for bits in range(3, 9))
"""Codecs of contributions that nobody can read alone."""


def _named_sites(value: Any) -> str:
    """What is wrong with a number of sites, or with their names."""
    if isinstance(value, int) and not isinstance(value, bool):
        return span(1, 10_000)(value)
    if not isinstance(value, list) or not value:
        return "is no number and no list of names; write it like 4, or [paris,rome]"
    names = [*map(str, value)]
    for name in names:
        if reason := why_unsafe(name):
            return f"holds {name!r}, which {reason}; choose another name"
        if names.count(name) > 1:
            return f"holds {name!r} twice; give each site its own name"
    return ""


def _unit(value: Any) -> str:
    """What is wrong with a unit of privacy, and the norm behind it."""
    word, colon, number = value.partition(":")
    if word not in ("sample", "site"):
        return f"is none of sample, site{nearest(word, ('sample', 'site'))}"
    try:
        is_good = not colon or 0 < float(number) < math.inf
    except ValueError:
        is_good = False
    return "" if is_good else f"has no norm above 0 behind its colon; write it like {word}:0.5"


@dataclass
class InnerConfig:
    """One network's inner optimiser, the one that takes the local steps."""

    name: str = one_of("adam", "adamw", "sgd", "own")
    """`own` where the script makes it."""
    lr: float = setting(1e-3, POSITIVE)
    """Learning rate."""
    schedule: str = one_of("constant", "linear", "cosine", counted=True)
    """Of the learning rate: it stays `constant`, or falls to the run's end as `linear` or `cosine`;
    `cosine:200` after 200 steps in which it grows to `lr`."""
    beta1: float = setting(0.9, SHARE)
    """Adam's first decay; momentum of `sgd`."""
    beta2: float = setting(0.999, SHARE)
    """Adam's second decay; unused by `sgd`."""
    weight_decay: float = 0.0
    """Decoupled for `adamw`, added to the gradient otherwise."""
    clip_norm: float = 0.0
    """Largest norm of this network's gradient; 0 leaves it as it is."""
    state: str = one_of("keep", "reset", "average", "ema")
    """What becomes of its moments when an update lands: `keep`; `reset`, as if it had never
    stepped; or `average`, they travel with the weights, uncoded, and are merged. `ema` keeps them,
    and merges what is beside them, coded: a moving average of the weights over every step of every
    site, which takes the place of that over merged weights."""


@dataclass
class OuterConfig:
    """One network's outer optimiser, the one that steps on the merged deltas."""

    lr: float = setting(1.0, POSITIVE)
    """Outer learning rate."""
    momentum: float = setting(0.0, SHARE)
    """Outer Nesterov momentum."""


@dataclass
class NetworkConfig:
    """How one network travels, where it differs from the others."""

    h: int = 0
    """Steps between two uploads of this network, of which the run's `h` is a multiple; 0: `h`."""
    exclude: list[str] = field(default_factory=list, metadata={"valid": NAMED})
    """Patterns of names of its parameters and buffers, as in `norm.*`; `*` stands for any
    characters. What they match never travels: each site trains its own."""


@dataclass
class DataConfig:
    """The data, and how it is split over the sites."""

    name: str = setting("digits", NAMED)
    """`digits` (scikit-learn's 8x8 handwritten digits), `ring8` (eight Gaussians on a circle),
    `emoji` (pictures of an installed font); and for workloads that learn from pairs
    `photo_edges` (photographs and their edges, 32x32). Files of your own, which need not fit in
    memory (docs/data.md): `folder`, `pairs` (or `pairs_b_to_a`, in the other direction),
    `webdataset`, `parquet`, `hf`."""
    split: str = setting("iid", NAMED)
    """Of data that all sites could read: `iid`, `by_label`, or `dirichlet:A` with A > 0 (small A:
    more uneven). `own`: each site has files of its own, and uses all of them."""
    batch: int = 0
    """Samples per site and step; 0 takes the recipe's own."""
    path: str = ""
    """Of files: the absolute path of their folder, with the same files at every site; or, with
    `data.split=own`, with the site's (`{site}` is its name). SITE.yaml may name another."""
    classes: str = ""
    """Of files: the names of their classes, as in `cat,dog`, or how many, as in `10` for 0 to 9;
    the same at every site, whatever classes it has. Empty: no classes."""
    size: int = setting(0, span(8, 1024, or_zero=True))
    """Pixels a side. Of files: that images are resized to; 0 takes 64, or 256 of `pairs`. Of
    `emoji`: that they are drawn with, 16 to 128; 0 takes 32."""
    flip: bool = False
    """Of files: whether half of all pictures, drawn anew for each batch, are mirrored."""
    workers: int = setting(0, span(0, 64))
    """Of files and of a recipe's own data set: processes of each site that read ahead; 0 reads when
    a step asks. Batches are the same with any number, but for those of streams."""
    labels: str = one_of("class", "site")
    """What networks that are told a label (`gan` with `model.conditional=true`, `flow` with
    `model.network=dit`) are told: a sample's `class`, or the `site` that holds it."""


@dataclass
class SiteConfig:
    """How a site computes its steps."""

    precision: str = one_of("32-true", "bf16-mixed", "16-mixed")
    """What matrix products are computed in, by autocast; `16-mixed` repeats a step until its
    gradients are finite, with one scale for all losses."""
    accumulate: int = setting(1, span(1))
    """Parts that a step's batch is computed in, one after the other, to save memory."""
    recompute: bool = False
    """Whether the backward pass computes the inside of blocks again, to save memory."""
    processes: int = setting(1, span(1, 64))
    """Processes that compute each step together, on a GPU each where there are GPUs: each a part of
    its batch."""
    partition: str = one_of("none", "gradients", "weights")
    """What these processes share out: `none`; `gradients`, gradients and moments (FSDP2 that does
    not reshard after the forward pass); `weights`, the weights as well (FSDP2)."""


@dataclass
class CodecConfig:
    """How tensors are written on the wire."""

    up: str = one_of(*CODECS, *MASKED)
    """Of contributions, site to coordinator; empty takes the strategy's own, `fp32` for most."""
    down: str = one_of(*CODECS)
    """Of updates, coordinator to sites."""


@dataclass
class LinkConfig:
    """The data plane, and the wide-area link that a local run emulates."""

    listen: str = setting("127.0.0.1:0", LISTENS)
    """`host:port` that the data plane listens on; port 0 takes a free one (local runs only). Sites
    dial this port of the host whose front door they know."""
    door: str = setting("127.0.0.1:0", LISTENS)
    """`host:port` that Flower's mutual-TLS front door listens on."""
    rate_mbit: float = 0.0
    """Emulated rate of each site's link in Mbit/s, each way; 0 does not limit."""
    rtt_ms: float = 0.0
    """Emulated round-trip time in ms."""
    congestion: str = one_of("auto", "bbr", "cubic", "system")
    """TCP's, for payloads: `auto` takes bbr where the user may, else the system's; `bbr` and
    `cubic` warn where they are refused."""
    pace_mbit: float = setting(0.0, span(0.1, 1_000_000, or_zero=True))
    """Most that a site's transfers may take, Mbit/s each way with all headers; 0 sets no limit. A
    little below the link's own rate, no queue builds up before it. Linux only."""


@dataclass
class StreamConfig:
    """Streaming: the model travels in fragments, while the sites go on stepping."""

    fragments: int = 0
    """Fragments that the model is cut into, or as many as its largest network has modules; 0 takes
    the strategy's own."""
    tau: int | None = None
    """Steps that a site takes between sending a fragment and mixing its update in; 0 waits for it,
    null takes the strategy's own."""


@dataclass
class RoundConfig:
    """When a round closes."""

    quorum: int = 0
    """Fewest sites a round may close with, or, where nobody waits for others, that must be live; 0
    takes the strategy's own, all of them for most. Who has gone is not waited for then, and who is
    late until median + 3 deviations of past rounds' times."""
    patience_s: float = setting(600.0, POSITIVE)
    """Seconds to wait for missing sites while no site takes a step, before the run stops (with a
    quorum: before the first round closes without one that is here), and that a site keeps trying to
    reach the coordinator."""
    max_staleness: int = 0
    """Versions by which a contribution may be late and be merged; 0 takes the strategy's own."""
    least_steps: int = 0
    """Lets slow sites take fewer steps than H between uploads, but no fewer than this; a run ends
    when all sites together have taken `sites` x `steps`. 0 takes the strategy's own, H for most."""
    merge: str = one_of(
        *("mean", "trimmed_mean", "median", "centered_clip", "krum", "closest"), counted=True
    )
    """How contributions become one: their `mean`, or a rule that bears one site that lies, or F of
    them, as in `krum:2`. It needs more than 2 F contributions, `krum` 2 F + 3."""
    gate: float = 50.0
    """k: a contribution is refused whose norm is above median + k · MAD of those merged last, in
    any network (MAD: a quarter of the median at least); 0 refuses none for its size."""

    @property
    def rule(self) -> tuple[str, int]:
        """The name in `merge`, and the sites that it bears."""
        name, _, count = self.merge.partition(":")
        return name, int(count or 1)


@dataclass
class PrivacyConfig:
    """Differential privacy of samples or of whole sites (docs/security.md)."""

    epsilon: float = setting(0.0, span(0.01, 1000, or_zero=True))
    """Budget of each unit for the whole run, from which the noise follows; 0 for no privacy."""
    unit: str = setting("sample", _unit)
    """What is protected: each `sample` of a shard, by noise on its site's gradients; or each whole
    `site`, by noise on the mean of contributions, from all but the coordinator. `sample:3` clips
    gradients to a norm of 3, `site:0.3` contributions to 0.3; without a number it is 1."""
    delta: float = setting(1e-5, span(1e-15, 0.5))
    """Probability with which the bound may fail; less than one in the samples of any site, or in
    the sites."""

    @property
    def name(self) -> str:
        """Of the unit alone."""
        return self.unit.partition(":")[0]

    @property
    def clip(self) -> float:
        """Largest norm of one sample's gradient, or of one site's contribution."""
        return float(self.unit.partition(":")[2] or 1)

    def is_of(self, name: str) -> bool:
        """Whether there is privacy, and of this unit."""
        return self.epsilon > 0 and self.name == name

    def broken_promise(self, num: int, units: str) -> str:
        """What is wrong with `delta` where so many are protected; empty where nothing is."""
        if self.delta * num < 1:
            return ""
        return (
            f"privacy.delta = {self.delta} is no promise to {num} {units}; set it well "
            f"below 1 / {num}, as in privacy.delta=1e-05"
        )


@dataclass
class CheckpointConfig:
    """What survives a crash."""

    every: int = 0
    """Rounds between checkpoints of coordinator and sites; 0 takes the strategy's own. With 1
    a killed site costs no bit, but under `sync`, overlap or a quorum; with more, its optimisers and
    data order may go back as many."""


@dataclass
class EvalConfig:
    """Quality of the EMA weights while training."""

    every: int | None = None
    """Steps between two evaluations; 0 evaluates only before and after training, null takes the
    recipe's own: for most a tenth of the run, 200 at least; for a script 200."""
    num: int | None = setting(None, span(2, or_zero=True))
    """Held-out samples that the weights are measured on; 0 takes all, null the recipe's own, all
    for most."""
    features: str = ""
    """Network that images are seen through: the path, at the coordinator and at every site, of a
    TorchScript file (such as Inception's) or of a transformers vision model's folder; or
    `package.module:function` of what is installed at all of them."""


@dataclass
class LogConfig:
    """Where metrics go besides `metrics.jsonl`."""

    wandb: str = one_of("disabled", "offline", "online")
    """`disabled`, `offline` or `online`."""


@dataclass
class Config:
    """A run. Defaults are the demo's."""

    workload: str = setting("gan", NAMED)
    """A recipe in `sites/`: `gan`, `flow`, `distill`, `pix2pix`, `diffusers_unet`, `text_to_image`;
    or `command`, a script of the sites' own."""
    strategy: str = setting("diloco", NAMED)
    """A recipe in `strategies/`: `sync`, `parameter_server`, `local_sgd`, `scaffnew`, `diloco`,
    `streaming_diloco`, `eager_diloco`, `async_diloco`, `sparse_loco` or `experts`."""
    sites: Any = setting(4, _named_sites)
    """Number of sites, which are named s1, s2, …; or their names, as in `[paris,rome]`, each the
    common name of that site's certificate."""
    steps: int = 0
    """Completed inner steps per site; 0 takes the recipe's own."""
    h: int = 0
    """Steps between two uploads; 0 takes the strategy's own."""
    seed: int = 0
    """Of initial weights, data order and every draw."""
    out: str = setting("runs/demo", NAMED)
    """Folder of the run."""
    device: str = one_of("auto", "cpu", "cuda")
    """`auto`, `cpu` or `cuda`, on every site."""
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of the workload's networks; docs/workloads.md lists them."""
    data: DataConfig = field(default_factory=DataConfig)
    init: dict[str, str] = field(default_factory=dict)
    """Weights to start from, by network: `init.generator=path.safetensors`, as `fedwan export`
    writes them; the same path at the coordinator and at every site."""
    inner: dict[str, InnerConfig] = field(default_factory=dict)
    """Inner optimiser by network: `inner.generator.lr=…`."""
    outer: dict[str, OuterConfig] = field(default_factory=dict)
    """Outer optimiser by network: `outer.generator.lr=…`."""
    network: dict[str, NetworkConfig] = field(default_factory=dict)
    """What is special to a network: `network.discriminator.h=5`."""
    site: SiteConfig = field(default_factory=SiteConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    round: RoundConfig = field(default_factory=RoundConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def num_sites(self) -> int:
        """Number of sites."""
        return len(site_names(self))

    @property
    def half_life(self) -> float:
        """Of the moving average of the weights, in samples of all sites: a tenth of a run."""
        return self.steps * self.num_sites * self.data.batch / 10

    @property
    def excluded(self) -> dict[str, list[str]]:
        """By network, the patterns of what stays at its site; networks that have some."""
        return {name: list(n.exclude) for name, n in self.network.items() if n.exclude}


_NO_AVERAGE = "inner.NETWORK.state=keep or reset"
NEEDS = (
    Needs(
        "eval.features",
        lambda c, _: c.workload != COMMAND and c.data.name != "ring8",
        "a recipe that makes pictures",
    ),
    *(
        Needs(key, lambda c, _: c.workload != COMMAND, "a recipe: a script has its own way")
        for key in (
            *("model.*", "eval.num", "site.precision", "site.accumulate", "site.recompute"),
            *("data.split=by_label", "data.split=dirichlet"),
            *(f"data.{key}" for key in "name path classes size flip workers labels".split()),
        )
    ),
    *(
        Needs(
            f"data.{key}",
            # Names that nobody knows are told as such, once data are looked at.
            lambda c, _: c.workload == COMMAND or c.data.name not in SET_NAMES,
            "files, as with data.name=folder",
        )
        for key in ("path", "classes", "flip", "split=own")
    ),
    Needs(
        "data.size",
        lambda c, _: (
            c.workload == COMMAND or c.data.name == "emoji" or c.data.name not in SET_NAMES
        ),
        "files, as with data.name=folder, or data.name=emoji",
    ),
    *(
        Needs(f"data.{key}", lambda c, _: c.num_sites > 1, "sites=2 or more")
        for key in ("labels", "split=by_label", "split=dirichlet")
    ),
    *(
        Needs(
            f"site.{key}", lambda c, _: c.workload != COMMAND, "a recipe: torchrun starts a script"
        )
        for key in ("processes", "partition")
    ),
    Needs(
        "site.partition",
        lambda c, _: c.workload == COMMAND or c.site.processes > 1,
        "site.processes=2",
    ),
    Needs(
        "inner.*.state=average",
        lambda c, n: c.inner[n].name != "own",
        "inner.NETWORK.name=adamw, or what the script makes",
    ),
    Needs(
        "inner.*.state=ema",
        lambda c, _: "topk" not in c.codec.up,
        "codec.up=int4",  # a sixtieth of its values a round would leave it behind
    ),
    *(
        Needs(f"inner.*.{key}", lambda c, n: c.inner[n].name != "own", "a recipe")
        for key in "lr schedule beta1 beta2 weight_decay clip_norm".split()
    ),
    Needs("inner.*.beta2", lambda c, n: c.inner[n].name != "sgd", "another optimiser than sgd"),
    *(
        Needs(
            f"inner.*.state={state}",
            lambda c, n: c.inner[n].name != "sgd" or c.inner[n].beta1 > 0,
            "an optimiser with moments, such as sgd with beta1=0.9",
        )
        for state in ("reset", "average")
    ),
    *(
        Needs(f"privacy.{key}", lambda c, _: c.privacy.epsilon > 0, "privacy.epsilon=8")
        for key in ("unit", "delta")
    ),
    *(
        Needs("privacy.epsilon", holds, mend)
        for holds, mend in (
            (
                lambda c, _: c.privacy.name == "site" or c.workload != COMMAND,
                "a recipe that makes noise, workload=flow or gan, or privacy.unit=site",
            ),
            (
                lambda c, _: c.privacy.name == "site" or c.site == SiteConfig(),
                "site.* as it is by default",
            ),
            # A step that is repeated must be the same one, or it costs more than is counted.
            (lambda c, _: c.checkpoint.every < 2, "checkpoint.every=1"),
            (lambda c, _: c.round.quorum in (0, c.num_sites), "round.quorum=0"),
            (lambda c, _: not c.round.least_steps, "round.least_steps=0"),
            (lambda c, _: not any(n.h for n in c.network.values()), "no network.NETWORK.h"),
        )
    ),
    *(
        Needs("privacy.unit=site", holds, mend)
        for holds, mend in (
            (lambda c, _: c.num_sites > 1, "sites=2 or more"),
            (lambda c, _: c.codec.up not in MASKED, "contributions to clip, codec.up=int4"),
            (lambda c, _: c.round.merge == "mean", "round.merge=mean"),
            (lambda c, _: all(i.state in ("keep", "reset") for i in c.inner.values()), _NO_AVERAGE),
        )
    ),
    # Who is refused would depend on what the others have sent; what is clipped needs no gate.
    Needs("round.gate", lambda c, _: not c.privacy.is_of("site"), "privacy.unit=sample"),
)
"""Settings that have an effect beside others alone."""


def _together(config: Config) -> Iterator[str]:
    """Lines on settings that contradict each other."""
    link = config.link
    if config.round.quorum > (sites := config.num_sites):
        yield f"round.quorum = {config.round.quorum} is out of range; choose 0 to sites ({sites})"
    if config.privacy.is_of("site") and (broken := config.privacy.broken_promise(sites, "sites")):
        yield broken
    if link.listen == link.door and not link.listen.endswith(":0"):
        yield f"link.door = {link.door!r} is link.listen as well; give the front door another port"


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then a YAML file, then words such as `outer.generator.lr=0.3`, checked once."""
    return merge(Config(), {} if path is None else read_yaml(path), parse_words(overrides, Config))


def require_run(out: Path) -> None:
    """Refuse a folder that holds no run."""
    if not (out / "config.yaml").is_file():
        raise ConfigError(
            f"{str(out)!r} holds no run (no config.yaml); give the folder that out= named"
        )


_OF_EVERY_RUN = ("workload", "strategy", "sites", "steps", "h", "seed", "log")
"""Keys of what `dump` writes, to the last: defaults would stand for what was cut off."""


def load_dumped(out: Path) -> Config:
    """The configuration in a run's folder, as `dump` wrote it.

    Raises:
        ConfigError: there is none, or it is not whole.
    """
    require_run(out)
    tree = read_yaml(path := out / "config.yaml")
    if lacking := [key for key in _OF_EVERY_RUN if key not in tree]:
        raise ConfigError(
            f"{path} is not whole, it lacks {', '.join(lacking)}; restore it, as from a copy"
        )
    return merge(Config(), tree)


def merge(config: Config, *trees: Mapping[str, Any]) -> Config:
    """A copy of a configuration with nested values put over it, later trees over earlier ones.

    >>> merge(Config(), {"outer": {"generator": {"lr": 0.3}}}).outer["generator"].momentum
    0.0
    """
    result, faults = overlay(config, *trees), Faults()
    faults.add(invalid(result))
    if reason := _named_sites(result.sites):  # of a mapping or null, too, on which all else rests
        faults.add([f"sites = {result.sites!r} {reason}"])
    else:
        faults.add([*_together(result), *unmet(result, NEEDS)])
    faults.tell()
    return result


def dump(config: Config, path: Path) -> None:
    """Write a configuration as YAML that `load` reads back exactly; the file is replaced whole.

    Without settings that could have no effect, as `data.name` of a script.
    """
    replace_text(path, OmegaConf.to_yaml(OmegaConf.create(to_tree(config))))


def to_tree(config: Config) -> dict[str, Any]:
    """What `dump` writes, nested values that `merge` reads back."""
    return effective(config, NEEDS)


def to_json(config: Config) -> str:
    """A configuration as one line of JSON that `from_json` reads back exactly."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True, allow_nan=False)


def hash_config(config: Config) -> bytes:
    """SHA-256 of a configuration, as a site's ticket has it."""
    return hashlib.sha256(to_json(config).encode()).digest()


def from_json(text: str) -> Config:
    """A configuration from `to_json`, checked like any other."""
    try:
        tree = {**json.loads(text)}
        if "${" in json.dumps(tree):  # else this machine's environment would be put in its place
            raise ConfigError("configuration holds '${', which that of a run never does")
        return merge(Config(), tree)
    except (TypeError, ValueError):
        raise ConfigError(f"configuration {text[:40]!r} is no JSON object") from None


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of a `host:port` that was checked.

    >>> host_and_port("[::1]:7444")
    ('::1', 7444)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def site_names(config: Config) -> list[str]:
    """The names of the sites, in site order.

    >>> site_names(Config(sites=2))
    ['s1', 's2']
    """
    if isinstance(config.sites, int):
        return [f"s{index + 1}" for index in range(config.sites)]
    return [str(name) for name in config.sites]
