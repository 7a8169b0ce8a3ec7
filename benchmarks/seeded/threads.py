"""What the engine takes from `threading`, `time`, `queue` and `concurrent.futures`, as tasks.

`installed` puts it in the place of those modules and classes, in all modules of fedwan, for as long
as a simulation lasts. Locks are re-entrant, all of them. What a killed task unwinds does nothing.
"""

# ruff: noqa: D101, D102, D103, D107 (they are those of the standard library)

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

__all__ = ["Primitives", "installed"]


class Primitives:
    """The standard library's names over one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

        class Lock(_Lock):
            def __init__(self) -> None:
                super().__init__(kernel)

        class Condition(_Condition):
            def __init__(self) -> None:
                super().__init__(kernel)

        class Event(_Event):
            def __init__(self) -> None:
                super().__init__(kernel)

        class Semaphore(_Semaphore):
            def __init__(self, value: int = 1) -> None:
                super().__init__(kernel, value)

        class SimpleQueue(_SimpleQueue):
            def __init__(self) -> None:
                super().__init__(kernel)

        class Future(_Future):
            def __init__(self) -> None:
                super().__init__(kernel)

        class ThreadPoolExecutor(_Executor):
            def __init__(self, max_workers: int = 1, *_: Any, **__: Any) -> None:
                super().__init__(kernel, max_workers)

        # Typing subscripts them: `SimpleQueue[…]`, `Future[…]`.
        for kind in (SimpleQueue, Future):
            kind.__class_getitem__ = classmethod(lambda cls, _: cls)  # type: ignore[attr-defined]
        self.SimpleQueue, self.Future = SimpleQueue, Future
        self.ThreadPoolExecutor = ThreadPoolExecutor
        self.Event = Event
        self.threading = SimpleNamespace(
            Lock=Lock,
            RLock=Lock,
            Condition=Condition,
            Event=Event,
            Semaphore=Semaphore,
            local=threading.local,
            get_native_id=threading.get_native_id,
        )
        self.time = SimpleNamespace(
            monotonic=lambda: kernel.now,
            time=lambda: 1.7e9 + kernel.now,
            perf_counter=lambda: kernel.now,
            sleep=kernel.park,
        )

    def wait(self, futures: Sequence[Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self.kernel.now + timeout
        for future in futures:
            future.join(None if end is None else end - self.kernel.now)
        done = {future for future in futures if future.done()}
        return concurrent.futures._base.DoneAndNotDoneFutures(done, set(futures) - done)


class _Lock:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel, me = self._kernel, self._kernel.current
        kernel.pause()
        while self._owner is not None and self._owner is not me:
            if not blocking:
                return False
            self._waiting.append(me)
            kernel.park()
        if me.process.is_dead:
            raise Killed
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        if self._owner is not self._kernel.current:
            return  # a killed task unwinds what it did not take again
        self._depth -= 1
        if not self._depth:
            self._free()

    def _free(self) -> int:
        depth, self._depth, self._owner = self._depth, 0, None
        while self._waiting:
            task = self._waiting.popleft()
            if not task.process.is_dead:
                self._kernel.wake(task)
                break
        return depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: Any) -> None:
        self.release()


class _Condition(_Lock):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._listening: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert self._owner is self._kernel.current, "wait without the lock"
        me, depth = self._owner, self._depth
        self._listening.append(me)
        self._free()
        was_woken = self._kernel.park(timeout)
        if me in self._listening:
            self._listening.remove(me)
        self.acquire()
        self._depth = depth
        return was_woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end = None if timeout is None else self._kernel.now + timeout
        while not predicate():
            left = None if end is None else end - self._kernel.now
            if left is not None and left <= 0:
                return predicate()
            self.wait(left)
        return True

    def notify(self, n: int = 1) -> None:
        for task in self._listening[:n]:
            self._kernel.wake(task)
        del self._listening[:n]

    def notify_all(self) -> None:
        self.notify(len(self._listening))


class _Event:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            self._kernel.wake(task)
        self._waiting = []

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiting.append(self._kernel.current)
            self._kernel.park(timeout)
            if self._kernel.current in self._waiting:
                self._waiting.remove(self._kernel.current)
        return self._is_set


class _Semaphore(_Condition):
    def __init__(self, kernel: Kernel, value: int) -> None:
        super().__init__(kernel)
        self._value = value

    def __enter__(self) -> bool:
        with contextlib.ExitStack() as stack:
            _Lock.acquire(self)
            stack.callback(_Lock.release, self)
            while not self._value:
                self.wait()
            self._value -= 1
        return True

    def __exit__(self, *_: Any) -> None:
        self._value += 1
        self.notify()


class _SimpleQueue:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._kernel.wake(self._waiting.popleft())

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        end = None if timeout is None else self._kernel.now + timeout
        while not self._items:
            left = None if end is None else end - self._kernel.now
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            me = self._kernel.current
            self._waiting.append(me)
            self._kernel.park(left)
            if me in self._waiting:
                self._waiting.remove(me)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items


class _Future:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._done = _Event(kernel)
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


class _Executor:
    def __init__(self, kernel: Kernel, num: int) -> None:
        self._kernel = kernel
        self._process = kernel.current.process
        self._free = num
        self._jobs: deque[tuple[_Future, Callable[[], Any]]] = deque()
        self._idle = _Event(kernel)
        self._idle.set()

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> _Future:
        future = _Future(self._kernel)
        self._jobs.append((future, lambda: call(*args, **kwargs)))
        if self._free:
            self._free -= 1
            self._idle.clear()
            self._kernel.spawn(self._process, self._work, f"{self._process.name} pool")
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


@contextlib.contextmanager
def installed(kernel: Kernel) -> Iterator[Primitives]:
    """All modules of fedwan block on a kernel, and draw from its seed, while this lasts."""
    primitives = Primitives(kernel)
    draws = random.Random(kernel.random.random())
    places: list[tuple[Any, Any]] = [
        (threading, primitives.threading),
        (time, primitives.time),
        (queue.SimpleQueue, primitives.SimpleQueue),
        (concurrent.futures.Future, primitives.Future),
        (concurrent.futures.ThreadPoolExecutor, primitives.ThreadPoolExecutor),
        (concurrent.futures.wait, primitives.wait),
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
        yield primitives
    finally:
        for module, attribute, real in changed:
            setattr(module, attribute, real)
