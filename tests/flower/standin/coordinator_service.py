"""Takes the place of `fedwan/coordinator/service.py`: waits for sites, writes down what it sees.

It ends once a file `finish` is in the run's folder and every site that is there has been told so.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import fedwan
from fedwan.config import Config, to_json
from fedwan.errors import ConfigError
from fedwan.link.ticket import Ticket


def run_coordinator(
    config: Config,
    run_id: str,
    identity: Path,
    resume: bool,
    announce: Callable[[Ticket], AbstractContextManager[object]],
) -> None:
    out = Path(config.out)
    if (out / "make-it-fail").exists():
        raise ConfigError("the stand-in was told to fail; remove make-it-fail")
    listener = socket.create_server(("127.0.0.1", config.link.port))
    note(
        out,
        code=str(Path(fedwan.__file__).parent),
        run_id=run_id,
        identity=str(identity),
        resume=resume,
    )
    finish = threading.Event()
    threading.Thread(target=_accept, args=(listener, out, finish), daemon=True).start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with announce(Ticket(address, run_id, to_json(config))):
        while not (out / "finish").exists():
            time.sleep(0.1)
        finish.set()
        time.sleep(0.5)


def note(out: Path, **values: object) -> None:
    with (out / "seen.jsonl").open("a") as file:
        file.write(json.dumps({"t": time.time(), **values}) + "\n")


def _accept(listener: socket.socket, out: Path, finish: threading.Event) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection, out, finish), daemon=True).start()


def _serve(connection: socket.socket, out: Path, finish: threading.Event) -> None:
    stream = connection.makefile("rw")
    hello = json.loads(stream.readline())
    note(out, joined=hello["site"], pid=hello["pid"], code=hello["code"])
    finish.wait()
    with contextlib.suppress(OSError):
        stream.write("finish\n")
        stream.flush()
