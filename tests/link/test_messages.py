"""Messages: the committed generated code is what wire.proto says; a ticket is checked."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from fedwan.errors import WireError
from fedwan.link.base import Ticket

ROOT = Path(__file__).resolve().parents[2]
PROTO = "fedwan/link/wire.proto"


def test_generated_code_matches_the_proto(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="make proto needs grpcio-tools")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", PROTO]
    subprocess.run(command, cwd=ROOT, check=True)

    def descriptor_of(path: Path) -> str:
        # The generator's version stands elsewhere in the file and may differ.
        (line,) = [x for x in path.read_text().splitlines() if "AddSerializedFile(" in x]
        return line

    written = descriptor_of(tmp_path / "fedwan/link/wire_pb2.py")
    assert written == descriptor_of(ROOT / "fedwan/link/wire_pb2.py"), "run `make proto`"


def test_a_ticket_survives_a_carrier_of_strings_and_a_missing_field_is_named() -> None:
    ticket = Ticket("coordinator.example.com:7444", "1" * 32, '{"seed": 0}', "a")
    values = asdict(ticket)
    assert Ticket.from_dict(values | {"of a newer coordinator": "red"}) == ticket
    for field in values:
        for value in (None, "", 3):
            with pytest.raises(WireError, match=f"ticket field '{field}'"):
                Ticket.from_dict({**values, field: value})
    for value in ("../../x", "/any/folder", "1" * 31, "1" * 32 + "\n", "\x1b]0;x\x07"):
        with pytest.raises(WireError, match="run_id is .* not 32 hexadecimal digits"):
            Ticket.from_dict({**values, "run_id": value})
