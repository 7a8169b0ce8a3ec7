"""States: names, roles, hashes and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from fedwan.errors import CheckpointError
from fedwan.state import (
    Role,
    State,
    hash_state,
    layout_from_json,
    layout_of,
    layout_to_json,
    read_tensors,
    spectral_norms,
    state_of,
    write_tensors,
)
from tests.support import same_bits


class Everything(nn.Module):
    """One tensor of every role."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.conv = spectral_norm(nn.Linear(3, 2))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)
        self.register_buffer("empty", torch.zeros(0))


def make_state() -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        "g/bool": torch.tensor([True, False]),
        "g/empty": torch.zeros(0, 2),
        "g/half": torch.randn(3, generator=generator).bfloat16(),
        "g/scalar": torch.tensor(1.5),
        "g/strided": torch.randn(4, 4, generator=generator)[:, ::2],
    }


# Names and roles ---------------------------------------------------------------------------------


def test_every_tensor_has_the_role_that_decides_how_it_is_merged() -> None:
    roles = {name: s.role for name, s in layout_of({"g": Everything()}).items()}
    assert roles == {
        "g/conv.bias": Role.PARAMETER,
        "g/conv.parametrizations.weight.original": Role.PARAMETER,
        "g/empty": Role.MEAN,
        "g/norm.bias": Role.PARAMETER,
        "g/norm.num_batches_tracked": Role.COUNTER,
        "g/norm.running_mean": Role.MEAN,
        "g/norm.running_var": Role.VARIANCE,
        "g/norm.weight": Role.PARAMETER,
        "g/table": Role.MEAN,
    }


def test_state_and_layout_agree_in_name_order_and_share_memory_with_the_modules() -> None:
    networks = {"z": nn.Linear(2, 3), "a": Everything()}
    state, layout = state_of(networks), layout_of(networks)
    assert list(state) == list(layout) == sorted(state)
    assert all(layout[n] == (tuple(v.shape), v.dtype, layout[n].role) for n, v in state.items())
    state["z/bias"].fill_(7.0)
    assert networks["z"].bias.tolist() == [7.0] * 3


# Layouts on the wire -----------------------------------------------------------------------------


def test_a_layout_round_trips_through_json() -> None:
    layout = layout_of({"a": Everything(), "b": nn.Linear(2, 2).half()})
    assert layout_from_json(layout_to_json(layout)) == layout


NO_LAYOUTS = """
[]
7
null
{"a": 1}
{"a": []}
{"a": [[1], "float32"]}
{"a": [[1], "float32", "boss"]}
{"a": [[1], "Tensor", "mean"]}
{"a": [[1], 3, "mean"]}
{"a": [[-1], "float32", "mean"]}
{"a": [["x"], "float32", "mean"]}
{"a": [[Infinity], "float32", "mean"]}
{"a": [3, "float32", "mean"]}"""


@pytest.mark.parametrize("text", [*NO_LAYOUTS.split("\n"), "[" * 100_000])
def test_what_is_no_layout_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        layout_from_json(text)


# Hashes ------------------------------------------------------------------------------------------


def test_a_hash_does_not_depend_on_order_or_memory_layout() -> None:
    state = make_state()
    other = {name: value.clone().contiguous() for name, value in reversed(state.items())}
    assert hash_state(state) == hash_state(other)


@pytest.mark.parametrize(
    "other",
    [
        {"g/v": torch.tensor([1.0, 2.0])},
        {"g/w": torch.tensor([1.0, 2.0 + 2**-22])},
        {"g/w": torch.tensor([[1.0, 2.0]])},
        {"g/w": torch.tensor([1.0, 2.0]).view(torch.int32)},
        {"g/w": torch.tensor([1.0, 2.0]), "g/x": torch.zeros(0)},
        {},
    ],
)
def test_name_bits_shape_and_dtype_all_count(other: State) -> None:
    assert hash_state(other) != hash_state({"g/w": torch.tensor([1.0, 2.0])})


def test_a_view_that_is_conjugate_or_negative_is_hashed_as_what_it_stands_for() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    for view in (values.conj(), values.conj().imag):
        assert hash_state({"x": view}) == hash_state({"x": torch.tensor(view.tolist())})


def test_a_hash_is_the_same_for_ever() -> None:
    # (printf 'g/n|torch.int64|()|\x03\0\0\0\0\0\0\0';
    #  printf 'g/w|torch.float32|(2,)|\0\0\x80\x3f\0\0\x20\xc0') | sha256sum
    state = {"g/n": torch.tensor(3), "g/w": torch.tensor([1.0, -2.5])}
    assert hash_state(state) == ("368208cdb7e3a33fa19af3f278637755f56fb86b48aeb8262c1d48521efe5475")


# Spectral norm -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [spectral_norm, torch.nn.utils.spectral_norm])
def test_refreshed_vectors_of_both_forms_belong_to_the_weight_at_hand(form: Any) -> None:
    torch.manual_seed(0)
    network = form(nn.Linear(6, 4), n_power_iterations=1)
    layout = layout_of({"d": network})
    assert {spec.role for spec in layout.values()} == {Role.PARAMETER} and len(layout) == 2
    (weight,) = [value for value in network.parameters() if value.dim() == 2]
    with torch.no_grad():
        weight.copy_(torch.randn(4, 6))
    (refresh,) = spectral_norms({"d": network})
    for _ in range(20):
        refresh()
    network.eval()
    network(torch.zeros(1, 6))
    largest = torch.linalg.matrix_norm(network.weight, ord=2)
    torch.testing.assert_close(largest, torch.tensor(1.0))


# Files -------------------------------------------------------------------------------------------


def test_a_file_gives_back_the_same_bits_and_meta(tmp_path: Path) -> None:
    meta = {"version": 3, "text": "ä\n", "nested": {"list": [1, 2.5, None]}}
    write_tensors(tmp_path / "deep" / "file", make_state(), meta)
    state, read = read_tensors(tmp_path / "deep" / "file")
    assert same_bits(dict(sorted(state.items())), make_state()) and read == meta


def test_any_flipped_bit_of_a_file_and_a_shorter_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_tensors(path, {"net/w": torch.arange(6.0), "net/n": torch.tensor(3)}, {"version": 2})
    whole = path.read_bytes()
    for at in range(0, 8 * len(whole), 7):
        data = bytearray(whole)
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            read_tensors(path)
        path.write_bytes(whole[: at // 8])
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_tensors(path)
