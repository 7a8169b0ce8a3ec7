from __future__ import annotations

import contextlib
import http.server
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedwan.flower.processes import free_port
from fedwan.link import pki

with warnings.catch_warnings():
    # Flower's libraries warn of one another while they are imported: not ours to mend.
    warnings.simplefilter("ignore")
    import flwr.cli.build
    import flwr.serverapp
    import flwr.supercore.control  # noqa: F401


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, its coordinator, and the sites s1 and s2."""
    folder = tmp_path_factory.mktemp("authority")
    pki.init(folder, ["127.0.0.1"])
    pki.issue(folder, "s1")
    pki.issue(folder, "s2")
    return folder


@pytest.fixture(scope="session")
def foreign_authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another federation's authority, with sites of the same names."""
    folder = tmp_path_factory.mktemp("foreign")
    pki.init(folder, ["127.0.0.1"])
    pki.issue(folder, "s1")
    return folder


class FakeSuperLink(http.server.ThreadingHTTPServer):
    """Answers every POST with what it got, and keeps a list."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.requests: list[tuple[str, bytes, dict[str, str]]] = []
        self.statuses: list[int] = []
        """Of the next answers; 200 after them."""
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                fake.requests.append((self.path, body, dict(self.headers)))
                self.send_response(fake.statuses.pop(0) if fake.statuses else 200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *words: object) -> None:
                pass

        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def superlink() -> Iterator[FakeSuperLink]:
    with serving(FakeSuperLink()) as server:
        yield server


@pytest.fixture
def late_superlink() -> Iterator[tuple[int, Callable[[], FakeSuperLink]]]:
    """A port, and a function that starts a SuperLink on it."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        yield port, lambda: stack.enter_context(serving(FakeSuperLink(port)))


@contextlib.contextmanager
def serving(server: FakeSuperLink) -> Iterator[FakeSuperLink]:
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
