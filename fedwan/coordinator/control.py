"""The socket in a run's folder at which `fedwan status` and `fedwan sites` ask its coordinator.

One request a connection: a line of JSON each way. Its mode lets in nobody but the run's user.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedwan.errors import ConfigError, UserError

SOCKET = "control.sock"
MAX_BYTES = 64 << 10
"""Of a request."""
REQUEST_S = 3.0
"""In which a request has to come, and its answer to be taken."""
ANSWER_S = 20.0
"""How long who asks waits: the answer may need a disk that is busy with a checkpoint."""
_TICK_S = 0.2

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Of a request; a `UserError` says what is wrong with it."""


@contextlib.contextmanager
def serving(out: Path, answer: Answer) -> Iterator[None]:
    """Answer requests in a thread, one at a time."""
    path = out / SOCKET
    is_over = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener, _short(path) as address:
        path.unlink(missing_ok=True)
        os.fchmod(listener.fileno(), 0o600)  # before there is a file
        listener.bind(address)
        listener.listen()
        listener.settimeout(_TICK_S)

        def serve() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        _reply(connection, answer)

        thread = threading.Thread(target=serve, name="control", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(timeout=REQUEST_S)
            path.unlink(missing_ok=True)


def _reply(connection: socket.socket, answer: Answer) -> None:
    try:
        reply = answer(_read(connection, REQUEST_S, MAX_BYTES))
    except UserError as error:
        reply = {"error": str(error)}
    except (ValueError, RecursionError, TimeoutError):
        text = f"a request is a JSON object in one line of at most {MAX_BYTES} bytes"
        reply = {"error": f"{text}, sent within {REQUEST_S:g} s"}
    connection.settimeout(REQUEST_S)
    connection.sendall(json.dumps(reply).encode() + b"\n")


def _read(connection: socket.socket, within_s: float, most_bytes: int = 1 << 30) -> dict[str, Any]:
    """The JSON object that comes in a line; a ValueError or a TimeoutError if none does."""
    data, deadline, part = bytearray(), time.monotonic() + within_s, b"more"
    while part and not data.endswith(b"\n") and len(data) <= most_bytes:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(MAX_BYTES)
        data += part
    found = json.loads(data) if len(data) <= most_bytes else None
    if not isinstance(found, dict):
        raise ValueError("no JSON object in a line")
    return found


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """An address of any path: a socket's own may have 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def ask(out: Path, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a run's coordinator answers; None if none runs. A `UserError` is what it refuses."""
    if not (out / "config.yaml").is_file():
        raise ConfigError(f"RUN = {str(out)!r} is no run's folder; it has no config.yaml")
    with socket.socket(socket.AF_UNIX) as connection, _short(out / SOCKET) as address:
        connection.settimeout(REQUEST_S)
        try:
            connection.connect(address)
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply = _read(connection, ANSWER_S)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the coordinator of {out} did not answer ({error or type(error).__name__}); "
                f"ask again as its own user, or see {out / 'logs' / 'serverapp.log'}"
            ) from None
    if "error" in reply:
        raise UserError(reply["error"])
    return reply
