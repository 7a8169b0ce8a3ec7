"""Who may join, and what sites must have alike: no single site decides for the others.

Each Join carries a claim: layout, kinds of networks, steps, hashes of initial and frozen weights
and of the recipes' source. A run starts with the claim that as many sites make as it asks for.
Sites that differ from more than half of them are refused, with both values; so are all, once all
are here and no claim is made by more than half.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Self

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL
from fedwan.state import Layout, TensorSpec, layout_from_json

_parse = lru_cache(maxsize=2)(layout_from_json)


class Claim(NamedTuple):
    """What one site says of itself; compared in this order: causes before effects."""

    sources_json: str
    layout_json: str
    kinds_json: str
    num_steps: int
    frozen_sha256: str
    initial_sha256: str

    @classmethod
    def of(cls, hello: wire.Hello) -> Self:
        """A Join's. A layout of megabytes takes seconds, unless it was read before.

        Raises:
            PayloadError: the layout, kinds or sources cannot be read.
        """
        try:
            names = list(_parse(hello.layout_json))
            for text in (hello.kinds_json, hello.sources_json):
                values = json.loads(text or "{}")
                if type(values) is not dict or any(type(v) is not str for v in values.values()):
                    raise ValueError(f"{text[:40]!r} is no JSON object of texts")
                names += [*values, *values.values()]
            if unfit := [name for name in names if not name.isprintable()]:
                raise ValueError(f"{unfit[0][:40]!r} holds characters that cannot be shown")
        except (ValueError, RecursionError) as error:
            raise PayloadError(f"layout cannot be read: {error}") from None
        return cls(*(getattr(hello, field) for field in cls._fields))

    @property
    def layout(self) -> Layout:
        """Of the model; not to be changed."""
        return _parse(self.layout_json)

    @property
    def kinds(self) -> dict[str, str]:
        """By trained network."""
        kinds: dict[str, str] = json.loads(self.kinds_json or "{}")
        return kinds

    def difference(self, other: Claim) -> str:
        """What sets another claim apart from this one, both values named."""
        if self.sources_json != other.sources_json:
            name, mine, theirs = _first_difference(
                json.loads(self.sources_json or "{}"), json.loads(other.sources_json or "{}")
            )
            return (
                f"its {name} is another one: SHA-256 {(theirs or 'nothing')[:12]}, the run's "
                f"{(mine or 'nothing')[:12]}; install the version that the run began with, at "
                "every site"
            )
        if self.layout_json != other.layout_json:
            name, mine, theirs = _first_difference(self.layout, other.layout)
            return (
                f"its tensor {name!r} is {_spec_text(theirs)}, the run's {_spec_text(mine)}; build "
                "the same networks, with the same settings and library versions, at every site"
            )
        for what, mine, theirs, mend in (
            ("networks are", self.kinds, other.kinds, "pass the same `kinds`"),
            (
                *("number of steps is", self.num_steps, other.num_steps),
                "give the same everywhere, or set steps=… of the run",
            ),
            (
                *("frozen networks hash to", self.frozen_sha256[:12], other.frozen_sha256[:12]),
                "use the same files that they come from, code and library versions at every site",
            ),
            (
                *("initial weights hash to", self.initial_sha256[:12], other.initial_sha256[:12]),
                "use the same seed, code and library versions at every site",
            ),
        ):
            if mine != theirs:
                return f"its {what} {theirs}, the run's {mine}; {mend}"
        return ""


@dataclass
class Agreement:
    """Collects claims until enough sites agree. Not locked: its owner is."""

    names: Sequence[str]
    needed: int
    sources: Mapping[str, str] | None = None
    has_steps: bool = False
    agreed: Claim | None = None
    """What the run was started with, or will be."""
    _claims: dict[str, Claim] = field(default_factory=dict)

    def claim(self, claim: Claim, checkpoint: int = 0) -> Claim:
        """One as it is compared: where the run has steps of its own, a script's say nothing.

        Nor do initial weights of who comes back with a checkpoint, and takes over the run's: a
        script may have loaded its own. Of equal ones the first that was heard: layouts of megabytes
        are compared, and kept, once.
        """
        if checkpoint and (agreed := self.agreed):
            claim = claim._replace(initial_sha256=agreed.initial_sha256)
        if self.has_steps:
            claim = claim._replace(num_steps=0)
        return next((c for c in (self.agreed, *self._claims.values()) if c == claim), claim)

    def knows(self, layout_json: str) -> bool:
        """Whether a site that is here has said this layout before: it is read."""
        claims = [self.agreed, *self._claims.values()]
        return any(claim is not None and claim.layout_json == layout_json for claim in claims)

    def objection(self, site: str, claim: Claim) -> str:
        """How a claim differs from what was agreed on; takes long, and needs no lock."""
        agreed = self.agreed
        return f"site {site}: {agreed.difference(claim)}" if agreed not in (None, claim) else ""

    def join(self, site: str, hello: wire.Hello, claim: Claim, objection: str = "") -> str:
        """Take a Join and its claim; why it is refused, or nothing.

        `objection` is what the method of that name says, if it was asked.
        """
        if site not in self.names:
            return (
                f"site {site!r} is not in this run, which has {', '.join(self.names)}; "
                "ask whoever runs it to add it to sites"
            )
        if hello.site != site:
            return (
                f"site calls itself {hello.site!r} but its certificate says {site!r}; "
                "use the identity folder that was issued for it"
            )
        if not hello.session:
            return "site names no session; start site and coordinator from the same app"
        if hello.protocol != PROTOCOL:
            return (
                f"site speaks protocol {hello.protocol}, this coordinator {PROTOCOL}; "
                "install the same fedwan on both sides"
            )
        if self.sources is not None and json.loads(claim.sources_json or "{}") != self.sources:
            mine = claim._replace(sources_json=json.dumps(dict(self.sources), sort_keys=True))
            return f"site {site}: {mine.difference(claim)}"
        return objection or self.hear(site, claim)

    def hear(self, site: str, claim: Claim) -> str:
        """Take a site's claim; why it is refused, or nothing."""
        self._claims[site] = claim
        leading = self.agreed or self._majority()
        if leading is not None and claim != leading:
            del self._claims[site]
            return f"site {site}: {leading.difference(claim)}"
        needed = min(self.needed, len(self.names))
        if self.agreed is None and [*self._claims.values()].count(claim) >= needed:
            self.agreed = claim
        return ""

    def expect(self, site_names: Sequence[str]) -> None:
        """Only these may take part from now on."""
        self.names = site_names
        self._claims = {name: c for name, c in self._claims.items() if name in self.names}

    def _majority(self) -> Claim | None:
        for claim, count in Counter(self._claims.values()).most_common(1):
            if 2 * count > len(self.names):
                return claim
        return None

    def dispute(self) -> str:
        """Why nothing can come of the claims: all sites are here, and no half of them agrees."""
        if self.agreed or self._majority() or len(self._claims) < len(self.names):
            return ""
        first, *others = self.names
        claim = self._claims[first]
        return "; ".join(
            f"{name} differs from {first}: {claim.difference(self._claims[name])}"
            for name in others
            if self._claims[name] != claim
        )

    def missing(self) -> list[str]:
        """Sites that have made no claim."""
        return [name for name in self.names if name not in self._claims]

    def waits_for(self, why: Mapping[str, str] = {}) -> str:
        """For whom the start of the run waits, and why it is not there, where that is known."""
        if not (missing := self.missing()):
            return "all sites are here"
        told = ", ".join(f"{name} ({why[name]})" if name in why else name for name in missing)
        return f"{len(self._claims)} of {len(self.names)} sites are here, not {told}"


def _first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """Of two that differ, if in nothing else then in their order: a name, and what each has."""
    names = sorted(mine.keys() | theirs.keys())
    name = next((name for name in names if mine.get(name) != theirs.get(name)), "order")
    return name, mine.get(name), theirs.get(name)


def _spec_text(spec: TensorSpec | None) -> str:
    if spec is None:
        return "no such tensor"
    return f"{'x'.join(map(str, spec.shape)) or 'a scalar'} {str(spec.dtype)[6:]}"
