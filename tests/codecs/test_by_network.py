"""A codec for each network: the bytes, what is owed, and whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.app import strategy_names
from fedwan.codecs import by_network, fp32, int4, int8, topk2, with_feedback
from fedwan.config import Config
from fedwan.coordinator.model import GlobalModel
from fedwan.errors import PayloadError
from fedwan.state import Role, State, hash_state
from strategies import diloco
from tests.coordinator.test_model import CONFIG, make_model, random_state
from tests.coordinator.test_model import INNER as MODEL_INNER
from tests.support import GAN, StrictSource, read_all, run_tiny, same_bits, spec, tiny_config

LAYOUT = {"d/w": spec((2,)), "g/n": spec((), Role.COUNTER, torch.int64), "g/w": spec((2,))}
STATE = {
    "d/w": torch.tensor([1.0, -2.5]),
    "g/n": torch.tensor(3),
    "g/w": torch.tensor([1.0, -2.5]),
}
MIXED = by_network(int4(), {"d": int8()})
# Made by:
# python -c "from tests.codecs.test_by_network import *; print(hex_of_mixed())"
GOLDEN = (
    "4657504c0100000003000000380000000300642f770300010200000004000000000000000300672f"
    "6e00040008000000000000000300672f77040001020000000300000000000000a13c338100000000"
    "0300000000000000b73e930000000000be640547ee6df1c1"
)


def hex_of_mixed() -> str:
    return read_all(MIXED.encode(STATE, {}, LAYOUT)[0]).hex()


# The payload -------------------------------------------------------------------------------------


def test_the_bytes_are_those_that_were_committed() -> None:
    assert hex_of_mixed() == GOLDEN


def test_committed_bytes_are_still_read() -> None:
    payload = StrictSource(bytes.fromhex(GOLDEN))
    in_8, in_4 = (c.decode(c.encode(STATE, {}, LAYOUT)[0], LAYOUT) for c in (int8(), int4()))
    expected = {"d/w": in_8["d/w"], "g/n": STATE["g/n"], "g/w": in_4["g/w"]}
    assert same_bits(MIXED.decode(payload, LAYOUT), expected)


def test_one_codec_for_all_is_that_codec_on_the_wire() -> None:
    assert by_network(int4(), {}).networks == {}
    alike = by_network(int4(), {"d": int4(), "g": int4()})
    assert read_all(alike.encode(STATE, {}, LAYOUT)[0]) == read_all(
        int4().encode(STATE, {}, LAYOUT)[0]
    )


@pytest.mark.parametrize("other", [int4(), by_network(int8(), {"d": int4()}), fp32()])
def test_a_reader_who_expects_another_codec_of_a_network_refuses_it(other: object) -> None:
    payload, _ = other.encode(STATE, {}, LAYOUT)  # type: ignore[attr-defined]
    with pytest.raises(PayloadError, match="set the same codec on both sides") as raised:
        MIXED.decode(payload, LAYOUT)
    assert "\n" not in str(raised.value)


def test_what_a_mixture_is_follows_from_its_parts() -> None:
    assert MIXED.name == "int4 (d: int8)"
    assert MIXED.of("d/w").name == MIXED.of("d").name == "int8"
    assert MIXED.of("g/w").encoding == int4().encoding
    assert by_network(fp32(), {"d": fp32()}).is_exact
    assert not by_network(fp32(), {"d": int8()}).is_exact
    assert by_network(fp32(), {"d": topk2()}).has_feedback
    assert by_network(topk2(), {"d": fp32()}).has_feedback
    assert not by_network(fp32(), {"d": int8()}).has_feedback


# What is owed ------------------------------------------------------------------------------------


def test_each_network_owes_what_its_own_codec_left_out() -> None:
    layout = {"d/w": spec((300,)), "g/w": spec((300,))}
    mixed = by_network(topk2(), {"d": fp32()})
    generator = torch.Generator().manual_seed(0)
    owed: State = {}
    alone: State = {}
    for _ in range(3):
        values = {name: torch.randn(300, generator=generator) for name in layout}
        payload, owed = mixed.encode(values, owed, layout)
        sent = mixed.decode(payload, layout)
        assert torch.equal(sent["d/w"], values["d/w"])
        part = {"g/w": layout["g/w"]}
        payload, alone = topk2().encode(values, alone, part)
        assert same_bits({"g/w": sent["g/w"]}, topk2().decode(payload, part))
        assert same_bits(owed, alone)


def test_feedback_is_given_to_each_part() -> None:
    mixed = by_network(with_feedback(int4()), {"d": with_feedback(fp32())})
    values = {**STATE, "g/w": torch.tensor([1.0, -2.4])}
    payload, owed = mixed.encode(values, {}, LAYOUT)
    assert list(owed) == ["g/w"]
    assert torch.equal(owed["g/w"], values["g/w"] - mixed.decode(payload, LAYOUT)["g/w"])


# Whole runs --------------------------------------------------------------------------------------

ON_ARRIVAL = ("async_diloco", "parameter_server")


def config_of(name: str, codec: str, own: str = "", inner: Any = GAN) -> Config:
    """All networks in a codec, or the discriminator in its own."""
    h = 1 if name in ("parameter_server", "sync") else 4
    sections: dict[str, Any] = {"codec": {"up": codec, "down": codec}}
    if name in ("eager_diloco", "streaming_diloco"):
        sections["stream"] = {"fragments": 2, "tau": 2}
    if own:
        sections["network"] = {"discriminator": {"codec_up": own, "codec_down": own}}
    return tiny_config(name, inner, h=h, steps=4 * h, **sections)


@pytest.mark.parametrize("name", [name for name in strategy_names() if name not in ON_ARRIVAL])
@pytest.mark.parametrize(("codec", "own"), [("int4", "fp32"), ("fp32", "topk2"), ("topk2", "int8")])
def test_each_network_goes_as_it_would_if_all_were_in_its_codec(
    name: str, codec: str, own: str, tmp_path: Path
) -> None:
    """Networks that learn apart: a run in two codecs has a half of a run in each."""
    if name == "scaffnew" and "topk2" in (codec, own):
        codec, own = ("int8", "int4") if codec == "topk2" else ("fp32", "int8")
    final = {}
    for key, config in (
        ("mixed", config_of(name, codec, own)),
        ("rest", config_of(name, codec)),
        ("own", config_of(name, own)),
    ):
        ran = run_tiny(tmp_path / key, config, norm=True)
        assert len(ran.hashes) == 1
        final[key] = ran.state
    for tensor, value in final["mixed"].items():
        key = "own" if tensor.startswith("discriminator/") else "rest"
        assert same_bits({tensor: value}, {tensor: final[key][tensor]})
    assert hash_state(final["rest"]) != hash_state(final["own"])


@pytest.mark.parametrize("name", ON_ARRIVAL)
def test_on_arrival_all_parties_end_on_the_same_bits(name: str, tmp_path: Path) -> None:
    ran = run_tiny(tmp_path, config_of(name, "topk2", "fp32"), norm=True)
    assert len(ran.hashes) == 1


@pytest.mark.parametrize(("codec", "own"), [("topk2", "fp32"), ("fp32", "topk2")])
def test_a_coordinator_that_resumes_sends_the_same_updates(
    codec: str, own: str, tmp_path: Path
) -> None:
    strategy = diloco.build(config_of("diloco", codec, own, MODEL_INNER))
    model = make_model(strategy)
    for seed in range(1, 4):
        model.commit(model.fragments[0], random_state(seed), samples=30)
    model.save(tmp_path, {})
    resumed = GlobalModel.load(tmp_path, strategy, CONFIG)
    for seed in range(4, 7):
        payloads = [m.commit(m.fragments[0], random_state(seed), 30) for m in (model, resumed)]
        assert read_all(payloads[0]) == read_all(payloads[1])
    assert hash_state(model.state) == hash_state(resumed.state)
