# SPDX-License-Identifier: Apache-2.0
"""What an engine does to its params after loading: left, permuted, computed, emptied, removed
and new params, by name."""

from __future__ import annotations

import unittest

from record_support import recording  # noqa: F401

import numpy

from reshard_record.processing import COMPUTED, EMPTIED, PERMUTED, REMOVED, UNCHANGED, changes

LOADED = {
    name: ("fp32", shape)
    for name, shape in {
        "same": (4, 6),
        "twin": (4, 6),
        "packed": (8, 6),
        "padded": (5, 6),
        "scaled": (300,),
        "cast": (12,),
        "swapped": (4,),
        "other": (4,),
        "kept": (7,),
        "gone": (2, 2),
        "empty": (0, 3),
    }.items()
}


def process(values):
    params = {name: value.copy() for name, value in values}
    params["packed"] = (
        params["packed"].reshape(2, 4, 6).transpose(0, 2, 1).reshape(8, 6)
    )  # the same name, shape and dtype
    params["padded"] = numpy.concatenate([params["padded"], numpy.zeros((3, 6), numpy.float32)])
    params["scaled"] *= 3
    params["cast"] = params["cast"].astype(numpy.float16)
    params["swapped"], params["other"] = params["other"], params["swapped"]
    params["bias"] = params["kept"]
    params["kept"] = numpy.zeros((0,), numpy.float32)
    del params["gone"]
    params["constant"] = numpy.ones((3,), numpy.float32) * 0.5
    params["zeros"] = numpy.zeros((3,), numpy.float32)
    return params


class Processing(unittest.TestCase):
    def test_kinds(self):
        found = changes(LOADED, process)
        self.assertEqual(
            {name: each.kind for name, each in found.items()},
            {
                "same": UNCHANGED,
                "twin": UNCHANGED,
                "packed": PERMUTED,
                "padded": PERMUTED,
                "scaled": COMPUTED,
                "cast": PERMUTED,
                "swapped": PERMUTED,
                "other": PERMUTED,
                "kept": EMPTIED,
                "gone": REMOVED,
                "empty": UNCHANGED,
                "bias": PERMUTED,
                "constant": COMPUTED,
                "zeros": COMPUTED,
            },
        )
        self.assertEqual(
            {name: each.of for name, each in found.items() if each.kind == PERMUTED},
            {
                "packed": ("packed",),
                "padded": ("padded",),
                "cast": ("cast",),
                "swapped": ("other",),
                "other": ("swapped",),
                "bias": ("kept",),
            },
        )

    def test_elements(self):
        """The origins of a permuted param are those of the permutation."""
        param = changes(LOADED, process)["packed"].param
        numbers = numpy.full((8, 6), -1)
        for box in param.boxes:
            at = tuple(slice(start, start + size) for start, size in zip(box.start, box.size))
            numbers[at] = box.offset + sum(
                numpy.arange(n).reshape([-1] + [1] * (1 - d)) * step
                for d, (n, step) in enumerate(zip(box.size, box.steps))
            )
        numpy.testing.assert_array_equal(numbers, numpy.arange(48).reshape(2, 4, 6).transpose(0, 2, 1).reshape(8, 6))


if __name__ == "__main__":
    unittest.main()
