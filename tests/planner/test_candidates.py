"""Which settings a plan compares."""

from __future__ import annotations

import pytest

from fedwan.app import strategy_names
from fedwan.config import CodecConfig, StreamConfig
from fedwan.errors import ConfigError
from fedwan.fragments import strided
from fedwan.planner.candidates import candidates, synthetic_layout
from tests.planner.models import question

OTHERS = {"experts", "async_diloco", "parameter_server"}
"""One trains another model, two let sites that are unequal go at a pace of their own."""


def test_every_strategy_takes_part_that_trains_the_same_model_and_would_run() -> None:
    found = candidates(question())
    assert {c.config.strategy for c in found} == set(strategy_names()) - OTHERS
    assert len({(c.config.strategy, c.strategy.h, c.codec) for c in found}) == len(found)
    for candidate in found:
        h = candidate.strategy.h
        assert candidate.config.steps % h == 0 and candidate.config.steps >= 10_000
        assert candidate.num_fragments <= h and candidate.strategy.overlap.tau < h
    # With error feedback strategies keep codecs of their own.
    own = {(c.config.strategy, c.codec) for c in found if c.strategy.up.has_feedback}
    assert {name for name, _ in own} == {"scaffnew", "sparse_loco"}
    assert [codec for name, codec in own if name == "sparse_loco"] == ["topk2/int4"]


def test_what_is_settled_is_kept() -> None:
    settled = question(("h", "codec.up"), h=25, codec=CodecConfig(up="int8"))
    found = candidates(settled)
    assert {candidate.strategy.h for candidate in found} == {25}
    assert {candidate.strategy.up.name for candidate in found} == {"int8"}
    assert all(candidate.strategy.contributes == "delta" for candidate in found)


def test_settled_streams_leave_those_out_that_do_not_stream() -> None:
    found = candidates(question(("stream.tau",), stream=StreamConfig(tau=15)))
    assert found and all(candidate.strategy.overlap.tau == 15 for candidate in found)
    assert min(candidate.strategy.h for candidate in found) == 20


def test_a_model_has_as_many_values_as_asked_in_fragments_of_about_equal_weight() -> None:
    large = synthetic_layout(200_000_000_000)
    assert max(spec.num_values for spec in large.values()) < 1 << 32
    for count in (1, 2, 3, 79, 80, 1000, 57_182_660, 7_000_000_000):
        layout = synthetic_layout(count)
        assert sum(spec.num_values for spec in layout.values()) == count
    assert len(strided(50, 50)(layout)) == 40
    sizes = [fragment.num_bytes for fragment in strided(10, 20)(layout)]
    assert max(sizes) < 1.05 * min(sizes)


@pytest.mark.parametrize(
    ("named", "settings", "says"),
    [
        (("h", "stream.tau"), {"h": 20, "stream": StreamConfig(tau=25)}, "stream.tau=19 or less"),
        (("h", "stream.fragments"), {"h": 20, "stream": StreamConfig(30)}, "fragments=20 or less"),
        (("h", "steps"), {"h": 20, "steps": 1001}, "set steps=1000 or 1020"),
        (("strategy", "h"), {"strategy": "sync", "h": 20}, "h = 20 has no effect with strategy"),
        (("strategy",), {"strategy": "async_diloco"}, "cannot be planned: it is for unequal"),
        (("strategy",), {"strategy": "experts"}, "cannot be planned: each site trains a model"),
        (("strategy",), {"strategy": "dilco"}, "did you mean 'diloco'?"),
        # Of the largest H that was compared.
        (("stream.fragments",), {"stream": StreamConfig(100_000)}, "stream.fragments=100 or less"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_works(
    named: tuple[str, ...], settings: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        candidates(question(named, **settings))
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_error_feedback_that_was_settled_for_the_way_up_leaves_the_way_down_open() -> None:
    settled = question(("codec.up", "strategy"), strategy="diloco", codec=CodecConfig(up="topk2"))
    found = candidates(settled)
    assert {c.strategy.up.name for c in found} == {"topk2"}
    assert {c.strategy.down.name for c in found} == {"fp32", "bf16", "int8", "int4"}
