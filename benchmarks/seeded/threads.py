"""What the engine takes from `threading`, `time`, `queue` and `concurrent.futures`, as tasks.

There is one lock, on which a task of a `Kernel` parks. Conditions, events, semaphores, queues and
futures are the standard library's own classes, whose globals are changed to it. `installed` puts
them in the place of the real ones, in all modules of fedwan, for as long as a simulation lasts.
What a killed task unwinds does nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import random
import secrets
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from benchmarks.seeded.kernel import Kernel, Killed, Task

_kernel: Kernel
"""Of the simulation that runs now."""


class Lock:
    """As `threading.Lock`."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me, end = _kernel.check(), _kernel.now + timeout
        _kernel.pause()
        while self._is_held:
            if not blocking or (timeout >= 0 and _kernel.now >= end):
                return False
            self._waiting.append(me)
            if not _kernel.park(None if timeout < 0 else end - _kernel.now):
                self._waiting.remove(me)
        self._is_held = True
        return True

    def release(self) -> None:
        _kernel.check()
        self._is_held = False
        for task in self._waiting:
            _kernel.wake(task)
        self._waiting.clear()

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Local:
    """As `threading.local`."""

    def __init__(self) -> None:
        vars(self)["_of"] = WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        try:
            return self._of[_kernel.current][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._of.setdefault(_kernel.current, {})[name] = value


def _again(module: Any, *names: str, **replaced: Any) -> SimpleNamespace:
    """Classes of a module once more, in whose code these names have another meaning."""
    space = {**vars(module), **replaced}
    for name in names:
        content = {
            key: FunctionType(v.__code__, space, key, v.__defaults__, v.__closure__)
            if isinstance(v, FunctionType)
            else v
            for key, v in vars(space[name]).items()
            if key not in ("__dict__", "__weakref__")
        }
        space[name] = type(name, (), content)
    return SimpleNamespace(**{name: space[name] for name in (*names, *replaced)})


TIME = SimpleNamespace(
    monotonic=lambda: _kernel.now,
    time=lambda: _kernel.wall_s(),
    perf_counter=lambda: _kernel.now,
    sleep=lambda seconds: _sleep(seconds),
)
THREADING = _again(
    threading,
    *("_RLock", "Condition", "Semaphore", "Event"),
    Lock=Lock,
    _allocate_lock=Lock,
    RLock=lambda: THREADING._RLock(),
    _time=TIME.monotonic,
    get_ident=lambda: id(_kernel.check()),
    local=Local,
    get_native_id=threading.get_native_id,
)
SimpleQueue = _again(queue, "_PySimpleQueue", threading=THREADING)._PySimpleQueue
Future = _again(concurrent.futures._base, "Future", threading=THREADING).Future


class ThreadPoolExecutor:
    """As that of `concurrent.futures`; a thread ends when there is nothing to do."""

    def __init__(self, max_workers: int = 1, *_: Any, **__: Any) -> None:
        self._process = _kernel.current.process
        self._most = max_workers
        self._jobs: deque[tuple[Any, Callable[[], Any]]] = deque()
        self._working: list[Task] = []

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        future = Future()
        self._jobs.append((future, lambda: call(*args, **kwargs)))
        if len(self._working) < self._most:
            name = f"{self._process.name} pool"
            self._working.append(_kernel.spawn(self._process, self._work, name))
        return future

    def _work(self) -> None:
        while self._jobs:
            future, call = self._jobs.popleft()
            try:
                result = call()
            except Killed:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._working.remove(_kernel.current)

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        while cancel_futures and self._jobs:
            self._jobs.popleft()[0].cancel()
        while wait and self._working:
            _kernel.join(self._working[0])


def wait(futures: Sequence[Any], timeout: float | None = None) -> Any:
    end = None if timeout is None else _kernel.now + timeout
    for future in futures:
        with contextlib.suppress(Exception):
            future.exception(None if end is None else max(0.0, end - _kernel.now))
    done = {future for future in futures if future.done()}
    return concurrent.futures._base.DoneAndNotDoneFutures(done, set(futures) - done)


def _sleep(seconds: float) -> None:
    """Threads of real links that are still there from before are none of the simulation's."""
    if threading.get_ident() == _kernel.thread:
        _kernel.park(seconds)
    else:
        time.sleep(seconds)


@contextlib.contextmanager
def installed(kernel: Kernel) -> Iterator[None]:
    """All modules of fedwan block on a kernel, and draw from its seed, while this lasts."""
    global _kernel
    _kernel = kernel
    draws = random.Random(kernel.random.random())
    drawn = SimpleNamespace(uuid4=lambda: uuid.UUID(int=draws.getrandbits(128)))
    places: list[tuple[Any, Any]] = [
        (threading, THREADING),
        (time, TIME),
        (queue.SimpleQueue, SimpleQueue),
        (concurrent.futures.Future, Future),
        (concurrent.futures.ThreadPoolExecutor, ThreadPoolExecutor),
        (concurrent.futures.wait, wait),
        (secrets, SimpleNamespace(randbits=draws.getrandbits, token_bytes=draws.randbytes)),
        (uuid, drawn),
    ]
    changed: list[tuple[Any, str, Any]] = []
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()) if name.startswith("fedwan.") else ():
            for real, virtual in places:
                if value is real:
                    changed.append((module, attribute, real))
                    setattr(module, attribute, virtual)
    try:
        yield
    finally:
        for module, attribute, real in changed:
            setattr(module, attribute, real)
