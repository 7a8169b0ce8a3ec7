"""What the engine takes from `threading`, `time`, `queue` and `concurrent.futures`, as tasks.

`installed` puts it in the place of those modules and classes, in all modules of fedwan, for as long
as a simulation lasts. Locks are re-entrant, all of them. What a killed task unwinds does nothing.
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
from types import SimpleNamespace
from typing import Any

from benchmarks.seeded.kernel import Kernel, Killed, Task

_kernel: Kernel
"""Of the simulation that runs now."""


class Lock:
    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _kernel.current
        _kernel.pause()
        while self._owner is not None and self._owner is not me:
            if not blocking:
                return False
            self._waiting.append(me)
            _kernel.park()
        if me.process.is_dead:
            raise Killed
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        if self._owner is not _kernel.current:
            return  # a killed task unwinds what it did not take again
        self._depth -= 1
        if not self._depth:
            self._free()

    def _free(self) -> int:
        depth, self._depth, self._owner = self._depth, 0, None
        while self._waiting:
            task = self._waiting.popleft()
            if not task.process.is_dead:
                _kernel.wake(task)
                break
        return depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: Any) -> None:
        self.release()


class Condition(Lock):
    def __init__(self) -> None:
        super().__init__()
        self._listening: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert self._owner is _kernel.current, "wait without the lock"
        me, depth = self._owner, self._depth
        self._listening.append(me)
        self._free()
        was_woken = _kernel.park(timeout)
        if me in self._listening:
            self._listening.remove(me)
        self.acquire()
        self._depth = depth
        return was_woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end = None if timeout is None else _kernel.now + timeout
        while not predicate():
            left = None if end is None else end - _kernel.now
            if left is not None and left <= 0:
                return predicate()
            self.wait(left)
        return True

    def notify(self, n: int = 1) -> None:
        for task in self._listening[:n]:
            _kernel.wake(task)
        del self._listening[:n]

    def notify_all(self) -> None:
        self.notify(len(self._listening))


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            _kernel.wake(task)
        self._waiting = []

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiting.append(_kernel.current)
            _kernel.park(timeout)
            if _kernel.current in self._waiting:
                self._waiting.remove(_kernel.current)
        return self._is_set


class Semaphore(Condition):
    def __init__(self, value: int = 1) -> None:
        super().__init__()
        self._value = value

    def __enter__(self) -> bool:
        with contextlib.ExitStack() as stack:
            Lock.acquire(self)
            stack.callback(Lock.release, self)
            while not self._value:
                self.wait()
            self._value -= 1
        return True

    def __exit__(self, *_: Any) -> None:
        self._value += 1
        self.notify()


class SimpleQueue:
    __class_getitem__ = classmethod(lambda cls, _: cls)  # typing subscripts it

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            _kernel.wake(self._waiting.popleft())

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        end = None if timeout is None else _kernel.now + timeout
        while not self._items:
            left = None if end is None else end - _kernel.now
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            me = _kernel.current
            self._waiting.append(me)
            _kernel.park(left)
            if me in self._waiting:
                self._waiting.remove(me)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items


class Future:
    __class_getitem__ = classmethod(lambda cls, _: cls)  # typing subscripts it

    def __init__(self) -> None:
        self._done = Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        self._result, self._error = result, error
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def join(self, timeout: float | None = None) -> bool:
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        if not self.join(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.join(timeout)
        return self._error


class ThreadPoolExecutor:
    def __init__(self, max_workers: int = 1, *_: Any, **__: Any) -> None:
        self._process = _kernel.current.process
        self._free = max_workers
        self._jobs: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._idle = Event()
        self._idle.set()

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        future = Future()
        self._jobs.append((future, lambda: call(*args, **kwargs)))
        if self._free:
            self._free -= 1
            self._idle.clear()
            _kernel.spawn(self._process, self._work, f"{self._process.name} pool")
        return future

    def _work(self) -> None:
        while self._jobs:
            future, call = self._jobs.popleft()
            try:
                result = call()
            except Killed:
                raise
            except BaseException as error:
                future.finish(error=error)
            else:
                future.finish(result)
        self._free += 1
        self._idle.set()

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future, _ in self._jobs:
                future.finish(error=concurrent.futures.CancelledError())
            self._jobs.clear()
        while wait and not self._idle.is_set():
            self._idle.wait()


def wait(futures: Sequence[Any], timeout: float | None = None) -> Any:
    end = None if timeout is None else _kernel.now + timeout
    for future in futures:
        future.join(None if end is None else end - _kernel.now)
    done = {future for future in futures if future.done()}
    return concurrent.futures._base.DoneAndNotDoneFutures(done, set(futures) - done)


THREADING = SimpleNamespace(
    Lock=Lock,
    RLock=Lock,
    Condition=Condition,
    Event=Event,
    Semaphore=Semaphore,
    local=threading.local,
    get_native_id=threading.get_native_id,
)
TIME = SimpleNamespace(
    monotonic=lambda: _kernel.now,
    time=lambda: 1.7e9 + _kernel.now,
    perf_counter=lambda: _kernel.now,
    sleep=lambda seconds: _sleep(seconds),
)


def _sleep(seconds: float) -> None:
    """Threads of real links that are still there from before are none of the simulation's."""
    if threading.current_thread().name == "task":
        _kernel.park(seconds)
    else:
        time.sleep(seconds)


@contextlib.contextmanager
def installed(kernel: Kernel) -> Iterator[None]:
    """All modules of fedwan block on a kernel, and draw from its seed, while this lasts."""
    global _kernel
    _kernel = kernel
    draws = random.Random(kernel.random.random())
    places: list[tuple[Any, Any]] = [
        (threading, THREADING),
        (time, TIME),
        (queue.SimpleQueue, SimpleQueue),
        (concurrent.futures.Future, Future),
        (concurrent.futures.ThreadPoolExecutor, ThreadPoolExecutor),
        (concurrent.futures.wait, wait),
        (secrets, SimpleNamespace(randbits=draws.getrandbits)),
        (
            uuid,
            SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{draws.getrandbits(128):032x}")),
        ),
    ]
    changed: list[tuple[Any, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "fedwan":
            continue
        for attribute, value in list(vars(module).items()):
            for real, virtual in places:
                if value is real:
                    changed.append((module, attribute, real))
                    setattr(module, attribute, virtual)
    try:
        yield
    finally:
        for module, attribute, real in changed:
            setattr(module, attribute, real)
