# SPDX-License-Identifier: Apache-2.0
"""Rounds of agreement: all ranks state something to rank 0 over a store of torch.distributed, and all obtain its answer
or the errors of all ranks."""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ._waiting import Helper
from .errors import Error, TimeoutError

#: What a rank states, or what rank 0 answers: values of JSON.
Statement = dict[str, Any]


def _pack(value: Statement) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()


def _unpack(text: bytes | str) -> Statement:
    found: Statement = json.loads(zlib.decompress(base64.b64decode(text)))
    return found


class Agreement:
    """The rounds of one set of ranks. All ranks make the same calls in the same order.

    store: a store of torch.distributed (``set``, ``get``, ``wait``, ``delete_key``); None if there is one rank.
    """

    def __init__(self, store: Any, rank: int, world: int):
        self.store, self.rank, self.world = store, rank, world
        self._round = 0
        self._helper = Helper()

    def _key(self, number: int, of: int | str) -> str:
        return f"reshard/agreement/{number}/{of}"

    def _wait(self, key: str, ends: float) -> bool:
        """Waits for a key. Returns False at the deadline."""
        try:
            limit = timedelta(seconds=max(0.001, ends - time.monotonic()))
            self._helper(lambda: self.store.wait([key], limit))  # in another thread: it does not look for signals
        except Exception as raised:  # DistStoreError or RuntimeError, by the version and the kind of the store
            if time.monotonic() < ends - 0.5 and "imeout" not in str(raised) and "imed out" not in str(raised):
                raise
            return False
        return True

    def __call__(
        self,
        mine: Statement,
        merge: Callable[[Sequence[Statement]], Statement],
        timeout: float,
        failure: BaseException | None = None,
    ) -> Statement:
        """States ``mine`` to rank 0 and returns its answer.

        merge: called on rank 0 with the statements of all ranks, in order; returns the answer.
        timeout: seconds. Rank 0 gives up a tenth of the time earlier, so that the others obtain its reason.
        failure: an exception of this rank, stated in place of ``mine``. This rank raises it after the round.

        Raises Error with the errors of all ranks if any rank states a failure or ``merge`` raises, or if the store
        fails, and TimeoutError, which names the ranks that are missing.
        """
        try:
            answer = self._ask({"failure": f"{type(failure).__name__}: {failure}"} if failure else mine, merge, timeout)
        except Exception as raised:
            if failure:
                raise failure from raised
            if isinstance(raised, Error):
                raise
            raise Error(f"rank {self.rank}: the store of torch.distributed failed: {raised}") from raised
        if failure:
            raise failure
        if "failure" in answer:
            raise (TimeoutError if answer.get("late") else Error)(answer["failure"])
        return answer

    def _ask(
        self, statement: Statement, merge: Callable[[Sequence[Statement]], Statement], timeout: float
    ) -> Statement:
        self._round += 1
        ends = time.monotonic() + timeout
        if self.rank == 0:
            return self._answer(statement, merge, ends - timeout / 10)
        self.store.set(self._key(self._round, self.rank), _pack(statement))
        if not self._wait(self._key(self._round, "answer"), ends):
            raise TimeoutError(
                f"rank {self.rank}: rank 0 did not answer in "
                f"{timeout:g} s; all ranks must call with the same modules in the same order"
            )
        answer = _unpack(self.store.get(self._key(self._round, "answer")))
        if answer.get("late"):  # this statement may be later than rank 0's deletion of all
            self.store.delete_key(self._key(self._round, self.rank))
        return answer

    def _answer(self, mine: Statement, merge: Callable[[Sequence[Statement]], Statement], ends: float) -> Statement:
        """Rank 0: gathers the statements and publishes the answer."""
        statements, missing = [mine], []
        for rank in range(1, self.world):
            if self._wait(self._key(self._round, rank), ends):
                statements.append(_unpack(self.store.get(self._key(self._round, rank))))
            else:
                missing.append(rank)
        failures = (
            [f"rank {rank}: {each['failure']}" for rank, each in enumerate(statements) if "failure" in each]
            if not missing
            else []
        )
        if missing:
            answer: Statement = {"failure": f"ranks {missing[:8]} of {self.world} did not call in time", "late": True}
        elif failures:
            answer = {"failure": "\n".join(failures)}
        else:
            try:
                answer = merge(statements)
            except Exception as raised:
                answer = {"failure": f"rank 0: {raised}"}
        if self.world > 1:
            self.store.set(self._key(self._round, "answer"), _pack(answer))
            self._forget()
        return answer

    def _forget(self) -> None:
        """Deletes the keys that no rank reads any more: statements of this round, and the answer of the last one."""
        for key in [
            *(self._key(self._round, rank) for rank in range(1, self.world)),
            self._key(self._round - 1, "answer"),
        ]:
            self.store.delete_key(key)
