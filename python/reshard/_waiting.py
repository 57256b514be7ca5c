# SPDX-License-Identifier: Apache-2.0
"""Waits that end when a signal's handler raises, as Ctrl-C does."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from ._library import INTERRUPTED


class Signals:
    """Runs the handlers of signals while the library waits: ``asked`` is its function ``interrupted``.

    Python runs handlers between two steps of a Python function. What one raises before the first step of a function
    that the library has called, as a hook, never reaches the library: Python gives it to ``sys.unraisablehook``. So the
    library asks a generator, which is always inside its ``try``, and ``watched`` keeps what hooks lose.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None  #: what a handler has raised
        self.lost = False  #: in place of a hook, which has not run
        steps = self._steps()
        next(steps)
        self.asked = INTERRUPTED(steps.send)

    def _steps(self) -> Generator[int, object, None]:
        while True:
            try:
                while True:
                    yield int(self.raised is not None)  # a handler runs here
            except GeneratorExit:
                return
            except BaseException as raised:
                # Without this frame: a caller may clear those of a traceback, which would end the generator.
                self.raised = raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A call of the library, which may call functions of this package."""
        if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread
            yield
            return
        before = sys.unraisablehook

        def unraisable(lost: Any) -> None:
            if str(getattr(lost.object, "__module__", "")).startswith(__package__ + "."):
                self.raised, self.lost = self.raised or lost.exc_value, True
            else:
                before(lost)

        sys.unraisablehook = unraisable
        try:
            yield
        finally:
            sys.unraisablehook = before


class Helper:
    """Makes calls in a thread, so that one that takes too long, or does not look for signals, does not hold up its
    caller. A thread that was left behind ends with its call, or with the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] | None = None  # of the thread, which ends with None
        self._process = 0  # of the thread: a forked process does not have it

    def __del__(self) -> None:
        if self._calls:
            self._calls.put(None)

    def __call__(self, function: Callable[[], Any], seconds: float | None = None) -> Any:
        """Returns what the function returns, or raises what it raises. After ``seconds``, which may be 0 or less,
        raises queue.Empty."""
        if seconds is not None and seconds <= 0:
            raise queue.Empty
        if not self._calls or self._process != os.getpid():
            self._calls, self._process = queue.SimpleQueue(), os.getpid()
            threading.Thread(target=_serve, args=(self._calls,), name="reshard-helper", daemon=True).start()
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        calls, self._calls = self._calls, None  # left behind unless it answers
        calls.put((function, answers))
        try:
            result, raised = answers.get(timeout=seconds)
        except BaseException:
            calls.put(None)
            raise
        self._calls = calls
        if raised:
            raise raised
        return result


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    while call := calls.get():
        function, answers = call
        try:
            answers.put((function(), None))
        except BaseException as raised:
            answers.put((None, raised))
        del call, function, answers  # a thread that waits keeps nothing alive
