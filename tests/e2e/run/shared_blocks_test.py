# SPDX-License-Identifier: Apache-2.0
"""Conversions on file systems that share blocks between files: XFS and Btrfs in images, mounted by loop
devices. Unchanged bytes that have the same offset in a block in both files take no further blocks, and all
bytes are right. Needs root."""

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import unittest
from pathlib import Path

import numpy as np

from conversions import ConvertTest

IMAGE_BYTES = 320 << 20  # XFS needs 300 MiB; most of the image is a hole
SIZES = (8 << 20, (4 << 20) + 1234, 6 << 20)


def shared_bytes(path: Path) -> int:
    """The bytes of a file in blocks that other files have too (FS_IOC_FIEMAP)."""
    extents, header, record = 1000, "<QQIIII", "<QQQ16xI12x"
    ask = bytearray(struct.pack(header, 0, path.stat().st_size, 1, 0, extents, 0)) + bytearray(
        struct.calcsize(record) * extents
    )  # 1: sync first
    with path.open("rb") as file:
        fcntl.ioctl(file, 0xC020660B, ask)
    found = struct.unpack_from(header, ask)[3]
    each = [
        struct.unpack_from(record, ask, struct.calcsize(header) + i * struct.calcsize(record)) for i in range(found)
    ]
    return sum(length for _, _, length, flags in each if flags & 0x2000)


class SharedBlocks(ConvertTest):
    def mounted(self, kind: str) -> Path:
        """A new file system, until the end of the test."""
        make = shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if make is None:
            self.skipTest(f"mkfs.{kind} is not installed")
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        image, mount = folder / "image", folder / "mount"
        mount.mkdir()
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        subprocess.run([make, "-q", image], check=True, capture_output=True)
        done = subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True, text=True)
        if done.returncode:
            self.skipTest(f"cannot mount an image: {done.stderr.strip()}")
        self.addCleanup(subprocess.run, ["umount", mount], check=True)
        return mount

    def convert_on(self, kind: str) -> None:
        self.folder = self.mounted(kind)
        rng = np.random.default_rng(2)
        values = {f"layers.{i}.weight": rng.integers(0, 256, size, dtype=np.uint8) for i, size in enumerate(SIZES)}
        self.save_checkpoint("hf", values)
        # has another header: its tensors begin at other offsets in a block
        self.convert("hf first --to=safetensors")
        self.convert("first second --to=safetensors")
        for name in ("first", "second"):
            self.check(name, values)
        # All but the blocks in which a tensor, or a part of one that a thread copies, begins or ends.
        self.assertGreater(shared_bytes(self.folder / "second/model.safetensors"), 0.99 * sum(SIZES))
        self.assertEqual(shared_bytes(self.folder / "hf/model.safetensors"), 0)

    def test_xfs(self):
        self.convert_on("xfs")

    def test_btrfs(self):
        self.convert_on("btrfs")


if __name__ == "__main__":
    unittest.main()
