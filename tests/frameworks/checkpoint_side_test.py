# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint engines of verl and NeMo-RL have in common, with PyTorch's tensors, over transport ucx: a
canceled refit closes its executor. The two ranks are threads of this process.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/checkpoint_side_test.py"""

import asyncio
import tempfile
import time
import unittest
from pathlib import Path

from support import module_folder

JOB = """version: 1
model: {dtype: fp32, tensors: {a: [64, 8]}}
source: {mesh: {}}
target: {mesh: {}, ranks: [1]}
"""
SECONDS = 10  # the deadline of a run


def closed(member):
    return not member.executor._handle


class CheckpointSideTest(unittest.IsolatedAsyncioTestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = module_folder(cls)
        import reshard

        job = Path(cls.folder, "job.yaml")
        job.write_text(JOB)
        cls.plan = str(reshard.compile(job, output=job.with_suffix(".rplan")).path)

    async def joined(self, *sides):
        url = "file://" + tempfile.mkdtemp(dir=self.folder)
        await asyncio.gather(*(asyncio.to_thread(side.join, rank, url) for rank, side in enumerate(sides)))

    def sides(self):
        from reshard.integrations._engine import CheckpointSide

        return [CheckpointSide(self.plan, timeout=SECONDS) for _ in range(2)]

    async def canceled(self, times):
        """Joins, and cancels the receiver so many times. Returns its member and the sides."""
        sides = self.sides()
        await self.joined(*sides)
        members = [side.member for side in sides]
        receiver = asyncio.create_task(sides[1].receive())
        for _ in range(times):
            await asyncio.sleep(0.5)
            receiver.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await receiver
        self.assertIsNone(sides[1].member)
        return members, sides

    async def test_canceled(self):
        """The executor is closed when the canceled call returns; the sender fails, and both join again."""
        import torch

        from reshard import Error

        members, sides = await self.canceled(1)
        self.assertTrue(closed(members[1]))
        begin = time.monotonic()
        with self.assertRaises(Error):
            await sides[0].send({"a": torch.ones(64, 8)}.items())
        self.assertLess(time.monotonic() - begin, SECONDS / 2)  # it does not wait for its deadline
        await self.joined(*sides)
        sent = torch.arange(512, dtype=torch.float32).reshape(64, 8)
        _, received = await asyncio.gather(sides[0].send({"a": sent}.items()), sides[1].receive())
        self.assertTrue(torch.equal(dict(received)["a"], sent))
        await asyncio.gather(*(asyncio.to_thread(side.member.close) for side in sides))

    async def test_live_experts_that_move(self):
        """A module of vLLM whose experts are not in the slots of its loader is refused when it joins, and later."""
        import torch

        from reshard import Error
        from reshard.integrations._engine import check_slots

        module = torch.nn.ModuleDict({"experts": torch.nn.Module()})
        check_slots(module)
        for name, value, text in (
            ("eplb_state", object(), "found enable_eplb, expected it off"),
            (
                "expert_placement_strategy",
                "round_robin",
                "found expert_placement_strategy 'round_robin', expected linear",
            ),
        ):
            setattr(module["experts"], name, value)
            sides = self.sides()
            sides[1]._live = lambda: module
            with tempfile.TemporaryDirectory() as store, self.assertRaisesRegex(Error, text):
                sides[1].join(1, f"file://{store}")
            delattr(module["experts"], name)

    async def test_canceled_twice(self):
        """The second call returns at once; the executor is closed after its run."""
        members, _ = await self.canceled(2)
        self.assertFalse(closed(members[1]))
        ends = time.monotonic() + 3 * SECONDS
        while not closed(members[1]) and time.monotonic() < ends:
            await asyncio.sleep(0.1)
        self.assertTrue(closed(members[1]))
        await asyncio.to_thread(members[0].close)


if __name__ == "__main__":
    unittest.main()
