# SPDX-License-Identifier: Apache-2.0
"""Loaders in NumPy and of files, recorded by values: the elements are those of the loader, and computed values are
recognized."""

from __future__ import annotations

import unittest

from record_support import documented, elements, expand, recording, temporary_folder

import numpy
from safetensors import safe_open

from reshard.dtypes import numpy_dtype
from reshard_record.digits import record_values, write_checkpoint

SHAPES = {"q": (16, 6), "k": (4, 6), "v": (4, 6), "down": (6, 40), "bias": (300,), "empty": (0, 3), "scalar": ()}
BF16 = numpy_dtype("bf16")


def loaders():
    """{name: (param of {tensor name: array})}. In numbered() the values are element numbers."""

    def padded(t):
        result = numpy.zeros((8, 6), t["k"].dtype)
        result[:4] = t["k"]
        return result

    return {
        "whole": lambda t: t["down"],
        "pack": lambda t: numpy.concatenate([t["q"][8:], t["k"][2:], t["v"][2:]]),
        "transposed": lambda t: t["down"].T[20:],
        "stack": lambda t: numpy.stack([t["k"], t["v"]]),
        "alternating": lambda t: numpy.stack([t["k"], t["v"]], 1).reshape(8, 6),
        "every second": lambda t: t["bias"][1::2],
        "reversed": lambda t: t["bias"][::-1],
        "padded": padded,
        "scalar": lambda t: t["scalar"],
        "columns": lambda t: t["down"][:, 20:],
        "empty": lambda t: t["empty"],
    }


class Digits(unittest.TestCase):
    def record(self, load, dtype="bf16"):
        return record_values(
            load=lambda tensors: load(dict(tensors)),
            checkpoint={name: (dtype, shape) for name, shape in SHAPES.items()},
            mesh={},
        )

    def numbered(self):
        values, first, begin = {}, {}, 1
        for name, shape in sorted(SHAPES.items()):
            count = int(numpy.prod(shape))
            values[name], first[name] = numpy.arange(begin, begin + count).reshape(shape), begin
            begin += count
        return values, first

    def test_elements(self):
        values, first = self.numbered()
        for dtype in ("bf16", "fp32", "fp8_e4m3", "fp8_e5m2", "i8", "u8", "fp16", "bool"):
            with self.subTest(dtype=dtype):
                found = self.record(lambda t: {name: load(t) for name, load in loaders().items()}, dtype)
                for name, load in loaders().items():
                    self.assertEqual(found.params[name].computed, [], name)
                    self.assertEqual(found.params[name].dtype, dtype)
                    numpy.testing.assert_array_equal(expand(found.params[name], first), load(values), name)

    def test_few_boxes(self):
        found = self.record(lambda t: {name: load(t) for name, load in loaders().items()})
        counts = {name: len(param.boxes) for name, param in found.params.items()}
        self.assertEqual(
            counts,
            {
                "whole": 1,
                "pack": 3,
                "transposed": 1,
                "stack": 2,
                "alternating": 8,
                "every second": 1,
                "reversed": 1,
                "padded": 2,
                "scalar": 1,
                "columns": 1,
                "empty": 0,
            },
        )

    def test_casts(self):
        found = self.record(lambda t: {"p": t["k"].astype(numpy.float32)})
        self.assertEqual(
            found.params["p"].boxes, [elements.Box((0, 0), (4, 6), elements.Tensor("k", ("fp32",)), 0, (6, 1))]
        )

    def test_computed(self):
        cases = {
            "exp": lambda t: -numpy.exp(t.astype(numpy.float32) / 8),
            "twice": lambda t: t * 2,
            "half": lambda t: t.astype(numpy.float32) / 2,
            "one more": lambda t: t + 1,
            "sum of two": lambda t: t[:150] + t[150:],
            "nan": lambda t: t * numpy.nan,
            "rounded": lambda t: (t.astype(numpy.float32) / 4).round() * 4,
        }
        for name, compute in cases.items():
            with self.subTest(operation=name):
                found = self.record(lambda t: {"p": compute(t["bias"]), "other": t["k"]})
                self.assertTrue(found.params["p"].computed)
                right = sum(
                    box.elements() for box in found.params["p"].boxes if isinstance(box.origin, elements.Tensor)
                )
                self.assertLessEqual(right, 3 if name != "rounded" else 30)
                self.assertEqual(found.params["other"].computed, [])

    def test_files(self):
        """A loader that reads a checkpoint from files."""

        def load(tensors):
            with temporary_folder() as folder:
                write_checkpoint(folder, tensors.items())
                with safe_open(folder / "model.safetensors", "numpy") as file:
                    return {"qk": numpy.concatenate([file.get_tensor("q"), file.get_slice("k")[2:4]])}

        found = self.record(load, "fp32")
        self.assertEqual(
            found.params["qk"].boxes,
            [
                elements.Box((0, 0), (16, 6), elements.Tensor("q"), 0, (6, 1)),
                elements.Box((16, 0), (2, 6), elements.Tensor("k"), 12, (6, 1)),
            ],
        )
        self.assertIn(
            '{concat: ["q", "k"]',
            recording.merge([self.record(lambda t: {"qk": numpy.concatenate([t["q"], t["k"]])})]).yaml,
        )

    def test_document(self):
        printed, shown = documented(1)
        self.assertEqual(printed, shown)

    def test_passes_that_differ(self):
        seen = []

        def load(tensors):
            seen.append(1)
            return {f"p{len(seen)}": tensors["k"]}

        with self.assertRaisesRegex(Exception, "pass 1 of the loader returned other params than pass 0: p1, p2"):
            self.record(load)


if __name__ == "__main__":
    unittest.main()
