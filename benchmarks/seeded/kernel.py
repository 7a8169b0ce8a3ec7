"""Threads that take turns: one runs at a time, a seed chooses which, and time is virtual.

The engine keeps its threads, locks, queues and sleeps. Here they are tasks of a `Kernel`: each is
a greenlet of one thread. It gives up its turn where it would block, and now and then where it takes
a lock. When no task can run, the clock moves on to the next timer; when there is none either, all
are waiting for ever: a `Standstill`. Tasks belong to processes, which can be killed, or stopped for
a while, at any such moment.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable

import torch
from greenlet import getcurrent, greenlet

PREEMPTION = 0.1
"""Share of the locks at which another task may run first."""
MAX_PAUSES = 20_000
"""Locks taken while no time passes, after which a task is taken to wait in a busy loop."""


class Killed(BaseException):
    """The process of this task was killed."""


class Standstill(Exception):  # noqa: N818
    """Nobody can go on, or not within the time given."""


class Process:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.stopped_until = 0.0
        self.tasks: dict[Task, None] = {}


class Task:
    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.turn: greenlet
        self.joining: list[Task] = []
        """Those that wait for its end."""
        self.wait_id = 0
        """Of its present wait: timers of earlier ones are void."""
        self.is_waiting = True
        self.is_woken = False
        self.is_ready = False


class Kernel:
    """Runs tasks until the last one has ended.

    Args:
        seed: of every choice.
        limit_s: virtual seconds after which those that are left stand still.
    """

    def __init__(self, seed: int, limit_s: float) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.clocks: dict[str, tuple[float, float, float]] = {}
        """Of processes by name: seconds ahead, at which time, and seconds more in each since."""
        self.limit_s = limit_s
        self.failures: list[BaseException] = []
        """What ended a task of a living process and nobody caught."""
        self.thread = threading.get_ident()
        self.current = self._main = Task(Process("kernel"), "kernel")
        self._main.turn = getcurrent()
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._order = itertools.count()
        self._tasks: dict[Task, None] = {}
        self._pauses = 0
        """Since time passed last."""

    # Tasks ---------------------------------------------------------------------------------

    def spawn(
        self, process: Process, body: Callable[[], object], name: str = "", delay_s: float = 0.0
    ) -> Task:
        """A new task of a process, which begins after a while."""
        task = Task(process, name or process.name)
        process.tasks[task] = self._tasks[task] = None

        def run() -> None:
            torch.set_grad_enabled(True)  # a thread's own, and tasks have none
            try:
                if not process.is_dead:
                    body()
            except BaseException as error:
                if not process.is_dead:
                    self.failures.append(error)
            del process.tasks[task], self._tasks[task]
            for other in task.joining:
                self.wake(other)

        task.turn = greenlet(run, self._main.turn)
        if delay_s > 0.0:
            self._set_timer(task, self.now + delay_s)
        else:
            self.wake(task)
        return task

    def join(self, task: Task) -> None:
        """Wait for the end of a task, which its process may have met."""
        while task in self._tasks:
            task.joining.append(self.current)
            self.park()

    def run(self) -> None:
        """Let tasks take turns until all have ended."""
        self._go_on()
        if self._tasks:
            waiting = ", ".join(sorted({task.name for task in self._tasks}))
            for task in list(self._tasks):
                task.process.is_dead = True
                self.wake(task)
            self._go_on()
            raise Standstill(f"at {self.now:.0f} s these wait for ever: {waiting}")

    def _go_on(self) -> None:
        while (following := self._next()) is not None:
            self.current = following
            following.turn.switch()
        self.current = self._main

    def kill(self, process: Process) -> None:
        """End a process: its tasks get no further than where they are."""
        if process.is_dead:
            return
        process.is_dead = True
        process.stopped_until = 0.0
        for task in list(process.tasks):
            self.wake(task)
        self.check()

    def check(self) -> Task:
        """The task that runs; `Killed` if its process is dead."""
        if self.current.process.is_dead:
            raise Killed
        return self.current

    def stop(self, process: Process, seconds: float) -> None:
        """Let a process stand still for a while, as SIGSTOP does."""
        process.stopped_until = max(process.stopped_until, self.now + seconds)

    def wall_s(self) -> float:
        """What the clock of the present process's machine shows, in Unix seconds."""
        ahead_s, since, drift = self.clocks.get(self.current.process.name, (0.0, 0.0, 0.0))
        return 1.7e9 + self.now + ahead_s + drift * (self.now - since)

    # Turns ---------------------------------------------------------------------------------

    def park(self, timeout: float | None = None) -> bool:
        """Give up the turn until woken; whether that came before the timeout, in seconds."""
        task = self.check()
        task.is_waiting, task.is_woken = True, False
        if timeout is not None:
            self._set_timer(task, self.now + max(1e-6, timeout))  # time must pass
        has_gradients = torch.is_grad_enabled()
        self._main.turn.switch()
        torch.set_grad_enabled(has_gradients)
        return self.check().is_woken

    def wake(self, task: Task) -> None:
        """A task that is parked may go on."""
        if task.is_waiting and not task.is_woken:
            task.is_woken = True
            self._make_ready(task)

    def pause(self) -> None:
        """A moment at which another task may run first."""
        self._pauses += 1
        if self._pauses > MAX_PAUSES:
            self._pauses = 0
            raise Standstill(f"{self.current.name} runs in circles at {self.now:.3f} s")
        if self._ready and self.random.random() < PREEMPTION:
            self.park(0.0)

    def _make_ready(self, task: Task) -> None:
        if not task.is_ready:
            task.is_ready = True
            self._ready.append(task)

    def _set_timer(self, task: Task, at: float) -> None:
        heapq.heappush(self._timers, (at, next(self._order), task, task.wait_id))

    def _next(self) -> Task | None:
        while True:
            while self._timers and self._timers[0][0] <= self.now:
                _, _, task, wait_id = heapq.heappop(self._timers)
                if task.is_waiting and task.wait_id == wait_id:
                    self._make_ready(task)
            while self._ready:
                task = self._ready.pop(self.random.randrange(len(self._ready)))
                task.is_ready = False
                if task.process.stopped_until > self.now:
                    self._set_timer(task, task.process.stopped_until)
                    continue
                task.is_waiting = False
                task.wait_id += 1
                return task
            if not self._timers or self._timers[0][0] > self.limit_s:
                return None
            self.now = self._timers[0][0]
            self._pauses = 0
