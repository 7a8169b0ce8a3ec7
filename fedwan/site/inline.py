"""An executor that runs each call at once, in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

__all__ = ["InlineExecutor"]

P = ParamSpec("P")
T = TypeVar("T")


class InlineExecutor(Executor):
    """For what may run in a thread, where it need not."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor`; what is no `Exception` is raised here."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
