# SPDX-License-Identifier: Apache-2.0
"""Tests of jobs between live modules (reshard.live), of coverage and of rounds of agreement, without PyTorch. Each job
is compiled, run in one process, and compared with a loop over the stated cuts. Run by package_test.py, like
module_test.py."""

import itertools
import re
import tempfile
import threading
import time
import unittest
from pathlib import Path

import reshard
from module_test import has
from reshard.agreement import Agreement
from reshard.coverage import check_coverage
from reshard.live import Cut, Part, Side, from_json, job_of, to_json

if has("numpy"):
    import numpy


def positions(length, part, dimension, rank):
    """The positions of a dimension that a rank holds, one cut after the other."""
    found = list(range(length))
    for cut in part.cuts:
        if cut.dimension == dimension:
            k, r = len(cut.ranks), cut.ranks.index(rank)
            if cut.stride:
                size = len(found) // (k * cut.stride)
                found = [found[(i * k + r) * size + j] for i in range(cut.stride) for j in range(size)]
            else:
                size = -(-len(found) // k)
                found = found[r * size : (r + 1) * size]
    return found


def piece(values, part, rank):
    for dimension in range(values.ndim):
        values = numpy.take(values, positions(values.shape[dimension], part, dimension, rank), dimension)
    return values.copy()


def groups(mesh, ranks):
    """The groups of each axis of a mesh, by rank: {rank: [group of axis 0, group of axis 1, …]};
    the last varies fastest."""
    at = dict(zip(itertools.product(*map(range, mesh)), ranks))
    return {
        rank: [tuple(at[(*where[:axis], i, *where[axis + 1 :])] for i in range(size)) for axis, size in enumerate(mesh)]
        for where, rank in at.items()
    }


def sides(world, mesh, ranks, tensors):
    """The sides of all ranks. tensors: {name: (shape, [(dimension, axis, stride)])}, optionally with a set of ranks."""
    found = groups(mesh, ranks)
    result = []
    for rank in range(world):
        parts = {}
        for name, (shape, cuts, *on) in tensors.items():
            if rank in found and rank in (on[0] if on else ranks):
                parts[name] = Part(
                    shape, "fp32", tuple(Cut(dimension, found[rank][axis], stride) for dimension, axis, stride in cuts)
                )
        result.append(Side(parts))
    return result


class LiveTest(unittest.TestCase):
    def plan(self, job):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "job.yaml")
            path.write_text(job)
            return reshard.compile(path)

    def check(self, world, source, target, left=()):
        """Runs the job and compares each target."""
        source, target = ([from_json(to_json(side)) for side in each] for each in (source, target))
        plan = self.plan(job_of(source, target, left))
        shapes = {name: part.shape for side in source for name, part in side.parts.items()}
        values = {
            name: numpy.random.default_rng(1).standard_normal(shape).astype("float32") for name, shape in shapes.items()
        }
        targets = {}
        with reshard.Executor(plan) as executor:
            for at, all_ranks in zip(plan.endpoints, (source, target)):
                for rank in at.ranks:
                    planned = plan.params(rank, at.role)
                    held = {
                        name: piece(values[name], part, rank)
                        for name, part in all_ranks[rank].parts.items()
                        if name in planned
                    }
                    self.assertEqual(set(held), set(planned))
                    if at.role == "target":
                        targets[rank] = (held, {name: numpy.zeros_like(tensor) for name, tensor in held.items()})
                        held = targets[rank][1]
                    executor.bind(held, at.role, rank)
            executor.prepare()
            executor.run(timeout=60)
        for rank, (expected, found) in targets.items():
            for name in expected:
                self.assertTrue(numpy.array_equal(found[name], expected[name]), f"rank {rank} {name}")
        return plan

    @unittest.skipUnless(has("numpy"), "needs numpy")
    def test_meshes(self):
        shape, four = (13, 10), [0, 1, 2, 3]
        choices = [
            ((4,), four, []),
            ((4,), four, [(0, 0, 0)]),
            ((4,), four, [(1, 0, 0)]),
            ((2, 2), four, [(0, 0, 0), (0, 1, 0)]),
            ((2, 2), four, [(0, 1, 0), (0, 0, 0)]),
            ((2, 2), four, [(0, 0, 0), (1, 1, 0)]),
            ((2, 2), four, [(1, 1, 0)]),
            ((2,), [1, 3], [(1, 0, 0)]),
            ((3, 2), [0, 1, 2, 3, 4, 5], [(0, 0, 0), (0, 1, 0)]),
        ]
        for number, shift in itertools.product(range(len(choices)), (0, 1, 5)):
            one, other = choices[number], choices[(number + shift) % len(choices)]
            with self.subTest(source=one, target=other):
                source, target = (
                    sides(
                        6,
                        mesh,
                        ranks,
                        {"w": (shape, cuts), "s": ((), []), "v": ((3,), [cut for cut in cuts if cut[0] == 0])},
                    )
                    for mesh, ranks, cuts in (one, other)
                )
                self.check(6, source, target)

    @unittest.skipUnless(has("numpy"), "needs numpy")
    def test_stages_and_strides(self):
        """Tensors on some ranks only (pipeline stages, experts), and gate and up projections in strides."""
        mesh, ranks = (2, 2, 2), list(range(8))  # pp, dp, tp
        source = {
            "a": ((8, 3), [(0, 2, 2)], {0, 1, 2, 3}),
            "b": ((8, 3), [(0, 2, 1)], {4, 5, 6, 7}),
            "e": ((4,), [], {2, 3, 6, 7}),
        }
        target = {name: (shape, [(0, 0, stride) for _, _, stride in cuts]) for name, (shape, cuts, _) in source.items()}
        self.check(8, sides(8, mesh, ranks, source), sides(8, mesh, ranks, target))
        self.check(8, sides(8, mesh, ranks, target), sides(8, mesh, ranks, source))
        some = sides(3, (3,), [0, 1, 2], {"a": ((5,), [], {0, 2}), "b": ((2,), [], {1}), "c": ((7,), [(0, 0, 0)])})
        self.check(
            3, some, list(reversed(sides(3, (3,), [2, 1, 0], {"a": ((5,), []), "b": ((2,), []), "c": ((7,), [])})))
        )

    def test_errors(self):
        def side(role=None, **tensors):
            return [Side({name: Part(shape, "fp32", cuts) for name, (shape, *cuts) in tensors.items()})] * 2

        w = {"w": ((4, 2),)}
        cut = [
            Side({"w": Part((4, 2), "fp32", (Cut(0, (0, 1)),))}),
            Side({"w": Part((4, 2), "fp32", (Cut(0, (1, 0)),))}),
        ]
        other = [Side({"w": Part((4, 2), "fp32")}), Side({"w": Part((4, 3), "fp32")})]
        cases = [
            (side(**w, x=((1,),)), side(**w), (), "the target lacks 'x' of the source"),
            (side(**w), side(**w, x=((1,),)), (), "the source lacks 'x' of the target"),
            (side(**w), side(**w), ("y*",), "source and target: left: 'y*' matches no param or buffer"),
            (side(**w), side(w=((4, 3),)), (), "param 'w': found shape [4, 3] in the target, expected [4, 2]"),
            (
                side(**w),
                cut,
                (),
                "target param 'w': group [0, 1] cuts dimension 0, but the groups of all ranks are no axis",
            ),
            (side(**w), other, (), "target param 'w': found shape (4, 3) on rank 1, expected (4, 2) as on rank 0"),
            ([Side({})] * 2, side(**w), (), "source: no rank has a param"),
            (side(**{"a{b}": ((1,),)}), side(**{"a{b}": ((1,),)}), (), "param 'a{b}': a brace in a name"),
        ]
        for source, target, left, text in cases:
            with self.subTest(text=text), self.assertRaises(reshard.Error) as raised:
                job_of(source, target, left)
            self.assertIn(text, str(raised.exception))


class CoverageTest(unittest.TestCase):
    def test_each_tensor_is_covered_once(self):
        names, tied = ["a", "b", "c", "d"], {"b": "a", "c": "a"}
        for planned, left in ((["a", "d"], []), (["c", "d"], []), (["c"], ["d"]), ([], ["*"]), (["a", "d"], ["b"])):
            with self.subTest(planned=planned, left=left):
                check_coverage(names, planned, left, "rank 0", tied)
        for planned, left, text in (
            (["d"], [], "rank 0 param 'a': the module has it, but not the plan"),
            (["d"], ["a"], "rank 0 param 'b': the module has it, but not the plan"),
            (["a", "d"], ["d"], "rank 0 param 'd': found in left and in the plan"),
            (["a", "d", "e"], [], "rank 0 param 'e': the plan has it, but not the module"),
            (["a", "d"], ["e*"], "rank 0: left: 'e*' matches no param or buffer"),
        ):
            with self.subTest(text=text), self.assertRaisesRegex(reshard.BindError, re.escape(text)):
                check_coverage(names, planned, left, "rank 0", tied)


class Store:
    """A store of torch.distributed for threads."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key):
        return self.values[key]

    def wait(self, keys, timeout):
        with self.changed:
            if not self.changed.wait_for(lambda: all(key in self.values for key in keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")

    def delete_key(self, key):
        return self.values.pop(key, None) is not None


class AgreementTest(unittest.TestCase):
    def ranks(self, world, function):
        """Calls function(agreement) in a thread for each rank. Returns the results, or the errors."""
        store, results = Store(), [None] * world

        def call(rank):
            try:
                results[rank] = function(Agreement(store, rank, world))
            except Exception as raised:
                results[rank] = raised

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results, store

    def test_answers(self):
        def rounds(agreement):
            return [
                agreement({"value": agreement.rank * n}, lambda all: {"sum": sum(each["value"] for each in all)}, 10)[
                    "sum"
                ]
                for n in range(20)
            ]

        for world in (1, 3):
            results, store = self.ranks(world, rounds)
            self.assertEqual(results, [[sum(range(world)) * n for n in range(20)]] * world)
            self.assertLessEqual(len(store.values), 2)  # keys of earlier rounds are deleted

    def test_one_failure_is_raised_on_all(self):
        failure = ValueError("no memory")
        results, _ = self.ranks(
            3, lambda agreement: agreement({}, lambda _: {}, 10, failure if agreement.rank == 1 else None)
        )
        self.assertIs(results[1], failure)
        for rank in (0, 2):
            self.assertIsInstance(results[rank], reshard.Error)
            self.assertEqual(str(results[rank]), "rank 1: ValueError: no memory")

    def test_a_failure_of_rank_0_to_merge_is_raised_on_all(self):
        def merge(_):
            raise reshard.CompileError("job.yaml:1: error")

        results, _ = self.ranks(2, lambda agreement: agreement({}, merge, 10))
        self.assertEqual([str(each) for each in results], ["rank 0: job.yaml:1: error"] * 2)

    def test_a_store_that_fails(self):
        def call(agreement):
            if agreement.rank == 1:
                agreement.store = None
            return agreement({}, lambda _: {}, 1)

        results, _ = self.ranks(2, call)
        self.assertIsInstance(results[1], reshard.Error)
        self.assertIn("rank 1: the store of torch.distributed failed: ", str(results[1]))

    def test_deadlines(self):
        for missing, text in ((2, "ranks [2] of 3 did not call in time"), (0, "rank 0 did not answer in 1 s")):
            begun = time.monotonic()
            results, _ = self.ranks(
                3, lambda agreement: None if agreement.rank == missing else agreement({}, lambda _: {}, 1)
            )
            self.assertLess(time.monotonic() - begun, 5)
            for rank in {0, 1, 2} - {missing}:
                self.assertIsInstance(results[rank], reshard.TimeoutError)
                self.assertIn(text, str(results[rank]))

    def test_a_late_rank_leaves_no_key(self):
        def call(agreement):
            time.sleep(1.5 * agreement.rank)  # rank 0 has given up before
            return agreement({}, lambda _: {}, 1)

        results, store = self.ranks(2, call)
        for result in results:
            self.assertIsInstance(result, reshard.TimeoutError)
            self.assertIn("ranks [1] of 2 did not call in time", str(result))
        self.assertEqual(list(store.values), ["reshard/agreement/1/answer"])


if __name__ == "__main__":
    unittest.main()
