from __future__ import annotations

import asyncio
import http.server
import threading
import warnings
from collections.abc import Awaitable, Iterator
from types import SimpleNamespace

import pytest
import uvicorn.server

with warnings.catch_warnings():
    # Flower's libraries warn of one another while they are imported: not ours to mend.
    warnings.simplefilter("ignore")
    import flwr.cli.build
    import flwr.serverapp
    import flwr.supercore.control  # noqa: F401

from fedwan.flower import forwarder, relay


@pytest.fixture(autouse=True)
def quick_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relays wait less; Uvicorn looks ten times a second whether it is to end, here a hundred."""

    def soon(seconds: float) -> Awaitable[None]:
        return asyncio.sleep(min(seconds, 0.01))

    quick = SimpleNamespace(**{**vars(asyncio), "sleep": soon})
    monkeypatch.setattr(uvicorn.server, "asyncio", quick)
    monkeypatch.setattr(relay, "_LATE_S", 0.01)
    monkeypatch.setattr(relay, "_AGAIN_S", 0.05)
    monkeypatch.setattr(forwarder, "_ASK_AGAIN_S", 0.03)


class FakeSuperLink(http.server.ThreadingHTTPServer):
    """Answers every POST with what it got, and keeps a list."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.requests: list[tuple[str, bytes, dict[str, str]]] = []
        self.statuses: list[int | None] = []
        """Of the next answers, None for none at all; 200 after them."""
        self.content: bytes | None = None
        """Of all answers, in place of what was asked."""
        self.num_empty = 0
        """Next answers that hold nothing."""
        self.may_answer = threading.Event()
        self.may_answer.set()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                fake.requests.append((self.path, body, dict(self.headers)))
                fake.may_answer.wait(20.0)
                status = fake.statuses.pop(0) if fake.statuses else 200
                if status is None:
                    self.close_connection = True
                    return
                body = body if fake.content is None else fake.content
                if fake.num_empty:
                    fake.num_empty, body = fake.num_empty - 1, b""
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(body)))
                if status // 100 == 3:
                    self.send_header("location", f"http://127.0.0.1:{fake.server_port}/other")
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *words: object) -> None:
                pass

        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.serve_forever, args=(0.005,), daemon=True).start()


@pytest.fixture
def superlink() -> Iterator[FakeSuperLink]:
    with FakeSuperLink() as server:
        yield server
        server.shutdown()
