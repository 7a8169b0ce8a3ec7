"""What messages of sites may hold, whatever they ask for: checked before anything else is done.

A field is checked by its type, which its descriptor tells; what a round takes of steps and samples
is `Rounds.check`'s. A `PayloadError` says what does not fit.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import safetensors
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from safetensors import SafetensorError

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire

MOST_FIGURES = 64
"""Losses of a contribution, or figures of it or of a report; and names of either over a run."""
_LONGEST_NAME = 64
_LONGEST_TEXT = 128
_LONGEST = {"layout_json": 4 << 20, "figures_json": 1 << 20}
_LONGEST |= {"kinds_json": 1 << 16, "sources_json": 1 << 16}
_CUT = {"error": 400}
"""Texts that say something and decide nothing: what does not fit is left out."""
_MOST_COUNT = 1 << 53
_LARGEST = 1e100
_MOST_BINS = 1 << 12
_TAKEN = frozenset({"kind", "t", "version", "step", "site"})
"""What a record of quality holds besides the figures."""
_SIDES = range(1, 1 << 24)
_DTYPES = dict.fromkeys(("generated", "real"), {"U8", "F32", "F16"})
_DTYPES |= {"moments:counts": {"I64"}, "moments:means": {"F64"}, "moments:covariances": {"F64"}}


class Report(NamedTuple):
    """A site's answer to the question how good some weights are."""

    version: int
    figures: dict[str, Any]
    """Numbers or lists of numbers; NaN where one was not finite."""
    samples: bytes = b""
    """Safetensors that were checked, or nothing."""
    evaluation_s: float = 0.0


def is_name(text: str) -> bool:
    """Whether a name is short and can be shown anywhere."""
    return 0 < len(text) <= _LONGEST_NAME and text.isprintable()


def bound(message: Message, passed_s: float) -> None:
    """Check a message of a site; texts are cut and names of losses left out in place.

    No more seconds count than those that have passed since the run began, as far as is known: a
    clock may have been set back.
    """
    for field, value in message.ListFields():
        name, kind = field.name, field.type
        if isinstance(value, MutableMapping):
            _bound_map(value)
        elif kind == FieldDescriptor.TYPE_MESSAGE:
            bound(value, passed_s)
        elif kind == FieldDescriptor.TYPE_STRING:
            if name in _CUT:
                setattr(message, name, shown(value, _CUT[name]))
            elif len(value) > (most := _LONGEST.get(name, _LONGEST_TEXT)):
                raise PayloadError(f"{name} of {len(value)} characters, {most} are taken")
            elif not value.isprintable():
                raise PayloadError(f"{name} {value[:40]!r} holds characters that cannot be shown")
        elif kind == FieldDescriptor.TYPE_DOUBLE:
            if not 0 <= value < math.inf:
                raise PayloadError(f"{name} of {value} s, which is no time")
            setattr(message, name, min(value, passed_s))
        elif kind == FieldDescriptor.TYPE_UINT64:
            largest = max(value) if isinstance(value, Sequence) else value
            if largest > _MOST_COUNT:
                raise PayloadError(f"{name} of {largest}, {_MOST_COUNT} is the most that is taken")


def shown(text: str, most: int) -> str:
    """A text in one line that does nothing to a terminal."""
    line = " ".join(text[: 2 * most].split())
    return "".join(c if c.isprintable() else "?" for c in line)[:most]


def _bound_map(values: MutableMapping[str, float]) -> None:
    names = sorted(name for name in values if is_name(name))[:MOST_FIGURES]
    for name in values.keys() - set(names):
        del values[name]
    for name in names:
        if not abs(values[name]) <= _LARGEST:
            values[name] = math.nan


class Names:
    """The names of losses and figures that are taken of each site over a run: the first ones."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], set[str]] = defaultdict(set)

    def keep(self, site: str, kind: str, values: Mapping[str, float]) -> dict[str, float]:
        """What is taken of a site's values of a kind."""
        taken = self._taken[site, kind]
        taken.update(sorted(values.keys() - taken)[: MOST_FIGURES - len(taken)])
        return {name: value for name, value in values.items() if name in taken}


def read_report(report: wire.QualityReport) -> tuple[Report, str]:
    """Check figures and samples; figures that cannot be taken are left out, and the first told."""
    _check_samples(report.samples)
    try:
        said = json.loads(report.figures_json)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or len(said) > MOST_FIGURES:
        raise PayloadError(f"a report's figures are no JSON object of at most {MOST_FIGURES} names")
    figures: dict[str, Any] = {}
    problem = ""
    for name, value in said.items():
        try:
            figures[name] = _figure(name, value)
        except PayloadError as error:
            problem = problem or f"{error}; the others are taken"
    return Report(report.version, figures, report.samples, report.evaluation_s), problem


def _figure(name: str, value: object) -> Any:
    if not is_name(name) or name in _TAKEN:
        raise PayloadError(
            f"a report has a figure named {name[:_LONGEST_NAME]!r}; give it another name, of "
            f"at most {_LONGEST_NAME} characters and none of {', '.join(sorted(_TAKEN))}"
        )
    is_list = isinstance(value, list) and name != "fd"
    numbers: Any = value if is_list else [value]
    if len(numbers) > _MOST_BINS or not all(map(_is_number, numbers)):
        raise PayloadError(
            f"a report's figure {name!r} is no number up to {_LARGEST:g}, and no list of up "
            f"to {_MOST_BINS} of them"
        )
    numbers = [n if math.isfinite(n) else math.nan for n in numbers]
    return numbers if is_list else numbers[0]


def _is_number(value: object) -> bool:
    is_one = isinstance(value, int | float)
    return is_one and not _LARGEST < abs(value) < math.inf  # type: ignore[arg-type]


def _check_samples(data: bytes) -> None:
    """Tensors of the names, dtypes and shapes that are taken, or nothing."""
    try:
        found = safetensors.deserialize(data) if data else []  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise PayloadError(f"a report's samples cannot be taken: {error}") from None
    for name, row in found:
        dtype, shape = row["dtype"], row["shape"]
        if dtype not in _DTYPES.get(name, ()):
            raise PayloadError(f"a report's samples hold {name[:40]!r} of dtype {dtype!r}")
        if len(shape) > 7 or not all(side in _SIDES for side in shape):
            raise PayloadError(f"a report's samples {name!r} are of shape {shape}")


class Allowance:
    """So many at once, and one more after each so many seconds."""

    def __init__(self, at_once: int = 8, another_after_s: float = 10.0) -> None:
        self._most, self._another_after_s = at_once, another_after_s
        self._left, self._counted_s = float(at_once), 0.0

    def spend(self, now_s: float) -> bool:
        """Whether there may be one more now."""
        more = (now_s - self._counted_s) / self._another_after_s
        self._left, self._counted_s = min(self._most, self._left + more), now_s
        may = self._left >= 1
        self._left -= may
        return may


class Refusals:
    """What is told of one site's refusals: the same one in a row at every tenth power of times."""

    def __init__(self) -> None:
        self._last, self._times = "", 0
        self._allowance = Allowance()
        self._untold = 0

    def tell(self, text: str, now_s: float) -> str:
        """What to tell of the next one; empty where it is only counted."""
        self._times = self._times + 1 if text == self._last else 1
        self._last = text
        if self._times > 1:
            is_told = str(self._times).rstrip("0") == "1"
            return f"{text} ({self._times} times in a row)" if is_told else ""
        if not self._allowance.spend(now_s):
            self._untold += 1
            return ""
        more, self._untold = self._untold, 0
        return f"{text} (and {more} others since the last one)" if more else text
