# SPDX-License-Identifier: Apache-2.0
"""Element maps against NumPy: arrays of element numbers, and random views of them that are written and read."""

from __future__ import annotations

import os
import random
import unittest

from record_support import elements

import numpy

Box, Constant, ElementMap, Loop, Tensor = (
    elements.Box,
    elements.Constant,
    elements.ElementMap,
    elements.Loop,
    elements.Tensor,
)
COUNT = 4000 if os.environ.get("RESHARD_FULL") else 400


def random_view(array: numpy.ndarray, source: random.Random) -> numpy.ndarray:
    """A view of a contiguous array by a few random operations."""
    view = array
    for _ in range(source.randrange(4)):
        operation = source.choice(["slice", "transpose", "split", "merge"])
        if operation == "slice" and view.ndim:
            axis = source.randrange(view.ndim)
            begin = source.randrange(view.shape[axis])
            end = source.randrange(begin, view.shape[axis]) + 1
            view = view[tuple([slice(None)] * axis + [slice(begin, end, source.choice([1, 1, 1, 2, 3]))])]
        elif operation == "transpose":
            view = view.transpose(source.sample(range(view.ndim), view.ndim))
        elif operation == "split" and view.ndim:
            axis = source.randrange(view.ndim)
            inner = source.choice([n for n in range(1, view.shape[axis] + 1) if view.shape[axis] % n == 0])
            view = numpy.lib.stride_tricks.as_strided(
                view,
                (*view.shape[:axis], view.shape[axis] // inner, inner, *view.shape[axis + 1 :]),
                (*view.strides[:axis], view.strides[axis] * inner, view.strides[axis], *view.strides[axis + 1 :]),
            )
        elif operation == "merge" and view.ndim > 1:
            axis = source.randrange(view.ndim - 1)
            if view.strides[axis] == view.strides[axis + 1] * view.shape[axis + 1]:
                view = numpy.lib.stride_tricks.as_strided(
                    view,
                    (*view.shape[:axis], view.shape[axis] * view.shape[axis + 1], *view.shape[axis + 2 :]),
                    (*view.strides[:axis], *view.strides[axis + 1 :]),
                )
    return view


def loops(array: numpy.ndarray, view: numpy.ndarray, other: tuple[int, ...]) -> tuple[int, list]:
    """The offset and the loops of a view, in elements; `other`: the steps in the other array."""
    offset = (view.__array_interface__["data"][0] - array.__array_interface__["data"][0]) // array.itemsize
    return offset, [Loop(n, step // array.itemsize, there) for n, step, there in zip(view.shape, view.strides, other)]


def values(boxes: list, shape: tuple[int, ...]) -> numpy.ndarray:
    """The array that boxes describe: element numbers of tensor "t", constants as negative numbers, -1 if unwritten."""
    result = numpy.full(shape or (1,), -1)
    for box in boxes:
        at = tuple(slice(start, start + size) for start, size in zip(box.start, box.size))
        if not (result[at] == -1).all():
            raise AssertionError("boxes overlap")
        if isinstance(box.origin, Constant):
            result[at] = box.origin.value
        else:
            result[at] = box.offset + sum(
                numpy.arange(n).reshape([-1] + [1] * (len(box.size) - 1 - d)) * step
                for d, (n, step) in enumerate(zip(box.size, box.steps))
            )
    return result.reshape(shape)


class Elements(unittest.TestCase):
    def test_random_views(self):
        source = random.Random(1)
        parts = 0
        for case in range(COUNT):
            shape = tuple(source.choice([1, 2, 3, 4, 6, 8, 12]) for _ in range(source.randrange(1, 4)))
            size = int(numpy.prod(shape))
            wanted, found = numpy.full(shape, -1), ElementMap(shape)
            for _ in range(source.randrange(1, 4)):
                target = random_view(wanted, source)
                begin = size * source.randrange(3)
                steps = [source.choice([1, 5, 7, 40]) for _ in target.shape]  # any affine map
                numbers = begin + sum(
                    numpy.arange(n).reshape([-1] + [1] * (target.ndim - 1 - d)) * s
                    for d, (n, s) in enumerate(zip(target.shape, steps))
                )
                offset, each = loops(wanted, target, tuple(steps))
                target[...] = numbers
                found.write(offset, each, Tensor("t"), begin)
            with self.subTest(case=case, shape=shape):
                numpy.testing.assert_array_equal(values(found.in_shape(), shape), wanted)
                self.assertEqual(found.unwritten(), (wanted == -1).sum())
                view = random_view(wanted, source)
                offset, each = loops(wanted, view, (0,) * view.ndim)
                seen = found.view(view.shape, [loop.step for loop in each], offset)
                numpy.testing.assert_array_equal(values(seen.in_shape(), view.shape), view)
                parts += len(seen.boxes)
        self.assertGreater(parts, COUNT)

    def test_merge_restores_one_box(self):
        whole = ElementMap.filled((8, 6), Tensor("t"))
        whole.split(0, 4)
        whole.split(2, 3)
        cut = ElementMap((8, 6))
        for first in range(0, 8, 2):
            cut.write(first * 6, [Loop(2, 6, 6), Loop(6, 1, 1)], Tensor("t"), first * 6)
        cut.merge()
        self.assertEqual(cut.boxes, [Box((0, 0), (8, 6), Tensor("t"), 0, (6, 1))])
        self.assertEqual(whole.in_shape(), cut.boxes)

    def test_constants_and_unwritten(self):
        found = ElementMap((4, 2))
        found.write(2, [Loop(3, 2), Loop(2, 1)], Constant(0))
        found.write(4, [Loop(2, 1)], None)
        numpy.testing.assert_array_equal(values(found.in_shape(), (4, 2)), [[-1, -1], [0, 0], [-1, -1], [0, 0]])

    def test_empty_and_scalar(self):
        self.assertEqual(ElementMap.filled((0, 3), Tensor("t")).in_shape(), [])
        self.assertEqual(ElementMap.filled((0, 3), Tensor("t")).view((3, 0), (1, 3), 0).boxes, [])
        self.assertEqual(ElementMap.filled((), Tensor("t")).in_shape(), [Box((0,), (1,), Tensor("t"), 0, (0,))])

    def test_differences(self):
        one, other = ElementMap.filled((4, 4), Tensor("t")).in_shape(), ElementMap.filled((4, 4), Tensor("t"))
        self.assertEqual(list(elements.differences(one, other.in_shape())), [])
        other.write(5, [Loop(2, 4, 4), Loop(2, 1, 1)], Tensor("t"), 6)
        other.write(15, [], None)
        found = list(elements.differences(one, other.in_shape()))
        self.assertEqual(
            [(a.start, a.size, b and b.offset) for a, b in found], [((1, 1), (2, 2), 6), ((3, 3), (1, 1), None)]
        )

    def test_two_values_for_one_element(self):
        with self.assertRaisesRegex(Exception, "several values"):
            ElementMap((4,)).write(0, [Loop(2, 0, 1)], Tensor("t"))


if __name__ == "__main__":
    unittest.main()
