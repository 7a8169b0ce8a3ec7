"""The socket in a run's folder at which `fedwan status` and `fedwan sites` ask its coordinator.

One request a connection: a line of JSON each way. Its mode lets in nobody but the run's user.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from socketserver import StreamRequestHandler, UnixStreamServer
from typing import Any

from fedwan.config import require_run
from fedwan.errors import ConfigError, UserError
from fedwan.files import disk_full

SOCKET = "control.sock"
MAX_BYTES = 64 << 10
"""Of a request."""
REQUEST_S = 3.0
"""In which a request has to come, and its answer to be taken."""
ANSWER_S = 20.0
"""How long who asks waits: the answer may need a disk that is busy with a checkpoint."""
_TICK_S = 0.2

_log = logging.getLogger(__name__)

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Of a request; a `UserError` says what is wrong with it."""


@contextlib.contextmanager
def serving(out: Path, answer: Answer) -> Iterator[None]:
    """Answer requests in a thread, one at a time; none where the folder can hold no socket."""

    class Handler(StreamRequestHandler):
        timeout = REQUEST_S

        def handle(self) -> None:
            try:
                request = json.loads(self.rfile.readline(MAX_BYTES))
                if not isinstance(request, dict):
                    raise ValueError("no JSON object")
                reply = answer(request)
            except UserError as error:
                reply = {"error": str(error)}
            except (ValueError, RecursionError, TimeoutError):
                text = f"a request is a JSON object in one line of at most {MAX_BYTES} bytes"
                reply = {"error": f"{text}, sent within {REQUEST_S:g} s"}
            except OSError as error:  # of the journal
                reply = {"error": str(disk_full(error, out) or error)}
            with contextlib.suppress(OSError):  # nobody waits for it any more
                self.wfile.write(json.dumps(reply).encode() + b"\n")

    path = out / SOCKET
    with (
        _short(path) as address,
        UnixStreamServer(address, Handler, bind_and_activate=False) as server,
    ):
        path.unlink(missing_ok=True)
        os.fchmod(server.fileno(), 0o600)  # before there is a file
        try:
            server.server_bind()
        except OSError as error:
            _log.warning(
                "no %s can be made (%s): nobody can ask this run, or have sites leave; a folder "
                "on a local disk can hold one",
                path,
                error,
            )
            yield
            return
        server.server_activate()
        serve = partial(server.serve_forever, _TICK_S)
        threading.Thread(target=serve, name="control", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """An address of any path: a socket's own may have 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def ask(
    out: Path, request: Mapping[str, Any], patience_s: float | None = None
) -> dict[str, Any] | None:
    """What a run's coordinator answers; None if none runs. A `UserError` is what it refuses."""
    require_run(out)
    with socket.socket(socket.AF_UNIX) as connection, _short(out / SOCKET) as address:
        connection.settimeout(patience_s or ANSWER_S)
        try:
            connection.connect(address)
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply: dict[str, Any] = json.loads(connection.makefile().readline())
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except (OSError, ValueError) as error:
            may = "" if request["ask"] == "status" else ", and may do yet what it was asked"
            raise ConfigError(
                f"the coordinator of {out} did not answer ({error or type(error).__name__}){may}; "
                f"ask again as its own user, or see {out / 'logs' / 'serverapp.log'}"
            ) from None
    if "error" in reply:
        raise UserError(reply["error"])
    return reply
