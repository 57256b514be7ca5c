# SPDX-License-Identifier: Apache-2.0
"""Stores of Python programs, through which the processes of a job find each other."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable
from typing import Any

from . import _library, errors
from ._waiting import Helper
from .errors import Error


def _find(store: Any, key: str) -> bytes | None:
    """Returns the value of a key, or None if it is not set.

    ``get`` of torch.distributed's stores waits until the key is set, so ``check`` is asked first.
    """
    if hasattr(store, "check"):
        value = store.get(key) if store.check([key]) else None
    else:
        try:
            value = store.get(key)
        except (LookupError, OSError) as raised:
            if isinstance(raised, OSError) and not isinstance(raised, TimeoutError):
                raise
            value = None
    if value is not None and not isinstance(value, (bytes, bytearray, memoryview)):
        raise Error(
            f"store: get({key!r}) returned {type(value).__name__}, expected bytes, or None for a key that is not set"
        )
    return None if value is None else bytes(value)


def store_of(
    store: Any, failed: Callable[[BaseException], None], left: Callable[[], float | None] = lambda: None
) -> _library.Store:
    """Returns a store as reshard_store, which must stay alive as long as the executor.

    store: an object with ``set(key, value)`` and ``get(key)``, such as a store of torch.distributed. Without ``check``,
        ``get`` returns None, or raises a LookupError or TimeoutError, for a key that is not set.
    failed: called with exceptions of the store.
    left: returns the seconds that the store has; None: no limit. With a limit, another thread calls the store, and a
        call that takes longer is left behind.
    """
    helper = Helper()

    def in_time(what: str, call: Callable[[], Any]) -> Any:
        seconds = left()
        if seconds is None:
            return call()
        try:
            return helper(call, seconds)
        except queue.Empty:
            raise errors.TimeoutError(f"store: {what} has not returned at the deadline") from None

    for name in ("set", "get"):
        if not callable(getattr(store, name, None)):
            raise Error(
                f"rendezvous: found {type(store).__name__} without {name}(), expected a URL, or a store with set(key, "
                "value) and get(key)"
            )

    def set_(_user: int, key: bytes, value: int, size: int) -> int:
        try:
            content = ctypes.string_at(value, size)
            in_time(f"set({key.decode()!r})", lambda: store.set(key.decode(), content))
            return _library.OK
        except BaseException as raised:
            failed(raised)
            return _library.TIMEOUT if isinstance(raised, errors.TimeoutError) else _library.FAILED

    def get(_user: int, key: bytes, buffer: int, capacity: int, size: Any) -> int:
        try:
            value = in_time(f"get({key.decode()!r})", lambda: _find(store, key.decode()))
            if value is None:
                return _library.TIMEOUT
            size[0] = len(value)
            if len(value) <= capacity:
                ctypes.memmove(buffer, value, len(value))
            return _library.OK
        except BaseException as raised:
            failed(raised)
            return _library.TIMEOUT if isinstance(raised, errors.TimeoutError) else _library.FAILED

    return _library.Store(set=_library.STORE_SET(set_), get=_library.STORE_GET(get))
