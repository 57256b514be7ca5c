# SPDX-License-Identifier: Apache-2.0
"""Loaders in PyTorch, recorded on the meta device, against the same loaders run on tensors whose values are their
element numbers. Needs PyTorch; part of `make test-engines`."""

from __future__ import annotations

import unittest

from record_support import documented, elements, recording, temporary_folder

from reshard import Error

try:
    import torch

    MISSING = ""
except ImportError as error:
    MISSING = f"{error}: run scripts/frameworks.sh and build/frameworks/env.sh"

SHAPES = {
    "q": (8, 6),
    "k": (4, 6),
    "v": (4, 6),
    "up": (12, 6),
    "down": (6, 12),
    "bias": (12,),
    "e.0": (4, 6),
    "e.1": (4, 6),
    "scalar": (),
}
UNWRITTEN, FILLED = -1.0, -2.0


def moves():
    """Loaders that only move elements: {name: (shape of the param, function of the param and the tensors)}."""

    def pack(p, t):
        for begin, name in ((0, "q"), (4, "k"), (6, "v")):
            half = t[name].shape[0] // 2
            p[begin : begin + half].data.copy_(t[name].narrow(0, half, half))

    def experts(p, t):
        for index in range(2):
            p.data[index].copy_(t[f"e.{index}"].chunk(2, 0)[1])

    def padded(p, t):
        p[:5].data.copy_(t["k"].reshape(-1)[:5].view(5))
        p[5:].data.zero_()

    def through_empty(p, t):
        row = torch.empty(8, 6, dtype=t["q"].dtype, device=t["q"].device)
        row[::2] = t["k"]
        row[1::2] = t["v"]
        p.data.copy_(row)

    def heads(p, t):
        p.data.copy_(t["q"].view(2, 4, 6).transpose(0, 1).reshape(8, 6))

    return {
        "whole": ((8, 6), lambda p, t: p.data.copy_(t["q"])),
        "pack": ((8, 6), pack),
        "experts": ((2, 2, 6), experts),
        "padded": ((8,), padded),
        "through_empty": ((8, 6), through_empty),
        "heads": ((8, 6), heads),
        "transposed": ((12, 6), lambda p, t: p.copy_(t["down"].t())),
        "contiguous": ((6, 6), lambda p, t: p.copy_(t["down"].t().contiguous()[3:9])),
        "cat": ((16, 6), lambda p, t: p.copy_(torch.cat([t["q"], t["k"], t["v"]]))),
        "cat columns": ((6, 16), lambda p, t: p.copy_(torch.cat([t["q"].t(), t["k"].t(), t["v"].t()], dim=1))),
        "stack": ((4, 2, 6), lambda p, t: p.copy_(torch.stack([t["k"], t["v"]], dim=1))),
        "hstack of splits": ((4, 12), lambda p, t: p.copy_(torch.hstack(t["q"].split(4)))),
        "expand": ((3, 12), lambda p, t: p.copy_(t["bias"])),
        "repeat": ((2, 4, 6), lambda p, t: p.copy_(t["k"].unsqueeze(0).expand(2, -1, -1).contiguous())),
        "cast": ((12,), lambda p, t: p.copy_(t["bias"].to(torch.float32).clone())),
        "flatten": ((48,), lambda p, t: p.copy_(t["q"].flatten())),
        "steps": ((4, 3), lambda p, t: p.copy_(t["q"][1::2, ::2])),
        "overwritten": ((4, 6), lambda p, t: (p.copy_(t["k"]), p[1:3].copy_(t["v"][2:]))),
        "scalar": ((1,), lambda p, t: p.copy_(t["scalar"].reshape(1))),
        "item assignment": ((4, 6), lambda p, t: p.__setitem__(slice(0, 2), t["k"][2:])),
        "unbind": ((6,), lambda p, t: p.copy_(t["k"].unbind(0)[2])),
        "movedim": ((6, 2, 4), lambda p, t: p.copy_(t["q"].unflatten(0, (2, 4)).movedim(-1, 0))),
        "shapes changed in place": ((6, 12), lambda p, t: p.copy_(t["up"].clone().unsqueeze_(0).squeeze_(0).t_())),
        "squeeze": ((12, 6), lambda p, t: p.copy_(t["up"].unsqueeze(1).squeeze(1))),
        "detached clone": ((4, 6), lambda p, t: p.copy_(t["k"].detach().clone(memory_format=torch.contiguous_format))),
        "zeros": (
            (6, 6),
            lambda p, t: p.copy_(torch.cat([t["k"], torch.zeros(2, 6, dtype=t["k"].dtype, device=t["k"].device)])),
        ),
    }


def numbered():
    """The checkpoint with values that are element numbers over all tensors, and the number of the first of each."""
    begin, values, first = 0, {}, {}
    for name, shape in SHAPES.items():
        count = int(torch.tensor(shape).prod()) if shape else 1
        first[name], values[name] = begin, torch.arange(begin, begin + count, dtype=torch.float32).view(shape)
        begin += count
    return values, first


def expand(param, first):
    """The values that a recorded param has if it is loaded from the numbered checkpoint."""
    result = torch.full(param.shape or (1,), UNWRITTEN)
    for box in param.boxes:
        at = tuple(slice(start, start + size) for start, size in zip(box.start, box.size))
        assert (result[at] == UNWRITTEN).all(), "boxes overlap"
        if isinstance(box.origin, elements.Constant):
            result[at] = box.origin.value
            continue
        value = torch.full(box.size, float(first[box.origin.name] + box.offset))
        for dimension, (count, step) in enumerate(zip(box.size, box.steps)):
            value += (torch.arange(count) * step).view([-1] + [1] * (len(box.size) - 1 - dimension))
        result[at] = value
    return result.view(param.shape)


@unittest.skipIf(MISSING, MISSING)
class Provenance(unittest.TestCase):
    def record(self, load, params, **more):
        tensors = {name: ("fp32", shape) for name, shape in SHAPES.items()}
        return recording.record(load=load, params=params, checkpoint=tensors, mesh={}, **more)

    def test_moves(self):
        values, first = numbered()
        for device in ("meta", "cpu"):
            for name, (shape, load) in moves().items():
                with self.subTest(loader=name, params=device):
                    wanted = torch.full(shape, UNWRITTEN)
                    load(wanted, values)
                    live = torch.full(shape, FILLED, device=device)
                    found = self.record(lambda tensors: load(live, dict(tensors)), {"p": live}).params["p"]
                    self.assertEqual(found.computed, [])
                    self.assertTrue(torch.equal(expand(found, first), wanted), found.boxes)
                    if device == "cpu":
                        self.assertTrue((live == FILLED).all(), "the param's own values were changed")

    def test_params_in_one_storage(self):
        values, first = numbered()
        buffer = torch.empty(16, 6, device="meta")
        params = {"qk": buffer[:12], "column": buffer[:, 2], "all": buffer}
        found = self.record(lambda tensors: buffer[4:].copy_(dict(tensors)["up"]), params).params
        wanted = torch.cat([torch.full((4, 6), UNWRITTEN), values["up"]])
        for name, part in (("qk", wanted[:12]), ("column", wanted[:, 2]), ("all", wanted)):
            self.assertTrue(torch.equal(expand(found[name], first), part), name)
        self.assertEqual(found["qk"].unwritten, 24)

    def test_replaced_params(self):
        module = torch.nn.Linear(6, 4, bias=False, device="meta")

        def load(tensors):
            module.weight = torch.nn.Parameter(dict(tensors)["q"][4:].contiguous())

        found = self.record(load, lambda: dict(module.named_parameters())).params["weight"]
        self.assertEqual(found.boxes, [elements.Box((0, 0), (4, 6), elements.Tensor("q"), 24, (6, 1))])

    def test_casts(self):
        bf16, fp16, fp32, fp8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
        # (dtype of the tensor, conversions, dtype of the param, casts of the recorded origin or None if computed)
        cases = [
            ("fp32", [], bf16, ("bf16",)),
            ("bf16", [], fp32, ("fp32",)),
            ("bf16", [fp32], bf16, ()),
            ("bf16", [fp32], fp16, ("fp16",)),
            ("fp32", [bf16], fp32, None),
            ("fp32", [fp16], bf16, None),
            ("fp32", [], fp8, None),
            ("i32", [], torch.int64, None),
            ("i32", [], torch.int32, ()),
        ]
        for dtype, conversions, into, casts in cases:
            with self.subTest(dtype=dtype, conversions=conversions, into=into):

                def load(tensors, conversions=conversions):
                    tensor = dict(tensors)["k"]
                    for each in conversions:
                        tensor = tensor.to(each)
                    param.copy_(tensor)

                param = torch.empty(4, 6, dtype=into, device="meta")
                found = recording.record(
                    load=load, params={"p": param}, checkpoint={"k": (dtype, (4, 6))}, mesh={}
                ).params["p"]
                self.assertEqual(
                    [box.origin for box in found.boxes if casts is not None],
                    [elements.Tensor("k", casts)] if casts is not None else [],
                )
                self.assertEqual(bool(found.computed), casts is None)

    def test_computed(self):
        cases = {
            "aten.exp": lambda p, t: p.copy_(-torch.exp(t["bias"])),
            "aten.mul_": lambda p, t: (p.copy_(t["bias"]), p.mul_(2)),
            "aten.flip": lambda p, t: p.copy_(t["bias"].flip(0)),
            "aten.add_": lambda p, t: p.zero_().add_(t["bias"]),
            "view.dtype": lambda p, t: (
                p.view(torch.int32).to(torch.int16) is None or p.copy_(t["bias"].view(torch.int16)[::2])
            ),
            "aten.sort": lambda p, t: p.copy_(t["bias"].sort()[0]),
            "aten.index_put_": lambda p, t: p.__setitem__(torch.tensor([1, 0]), t["bias"][:2]),
        }
        for op, load in cases.items():
            with self.subTest(op=op):
                param = torch.empty(12, device="meta")
                found = self.record(lambda tensors: load(param, dict(tensors)), {"p": param}).params["p"]
                self.assertTrue(found.computed, found.boxes)
                self.assertTrue(all(isinstance(box.origin, elements.Computed) for box in found.boxes), found.boxes)
                self.assertEqual({each.tensors for each in found.computed}, {("bias",)})
                self.assertTrue(
                    op in found.computed[0].op or op == "aten.exp" and "neg" in found.computed[0].op, found.computed
                )

    def test_values_from_elsewhere(self):
        param = torch.empty(12, device="meta")

        def load(tensors):
            values = torch.arange(12.0)
            values[:3] = dict(tensors)["bias"][:3]
            param.copy_(values)

        found = self.record(load, {"p": param}).params["p"]
        self.assertEqual(
            [box.origin for box in found.boxes],
            [elements.Tensor("bias"), elements.Computed("a value that is not from the checkpoint")],
        )
        found = self.record(lambda tensors: param.copy_(torch.arange(12.0)), {"p": param}).params["p"]
        self.assertEqual(found.computed, [elements.Computed("a value that is not from the checkpoint")])

    def test_tables_of_the_loader_keep_their_values(self):
        """A loader may compute with tensors of its own, as with the numbers of its experts."""

        def load(tensors):
            table = torch.full((4,), -1, dtype=torch.int32)
            table[2:] = torch.arange(2, dtype=torch.int32)
            local = torch.zeros(4, dtype=torch.int32)
            local += table
            t = dict(tensors)
            for expert in range(4):
                if local[expert].item() >= 0:
                    param[int(local[expert])].copy_(t["q"][expert])

        param = torch.empty(2, 6)
        found = self.record(load, {"p": param}).params["p"]
        self.assertEqual(found.boxes, [elements.Box((0, 0), (2, 6), elements.Tensor("q"), 12, (6, 1))])

    def test_reading_values_is_refused(self):
        param = torch.empty(12, device="meta")
        for load in (
            lambda t: param.fill_(t[0].item()),
            lambda t: t.tolist(),
            lambda t: bool((t == 0).all()),
            lambda t: t.numpy(),
        ):
            with self.assertRaisesRegex(Error, "bias"):
                self.record(lambda tensors: [load(tensor) for name, tensor in tensors if name == "bias"], {"p": param})

    def test_dtensors_are_refused(self):
        class Sharded(torch.Tensor):
            def to_local(self):
                return self

        with self.assertRaisesRegex(Error, "param p is a DTensor"):
            self.record(list, {"p": torch.empty(4).as_subclass(Sharded)})

    def test_document(self):
        printed, shown = documented(0)
        self.assertEqual(printed, shown)

    def test_rank_outside_the_mesh(self):
        with self.assertRaisesRegex(Exception, r"rank 2 is not in mesh \{'tp': 2\}, expected 0 to 1"):
            recording.record(load=list, params={}, checkpoint={}, mesh={"tp": 2}, rank=2)

    def test_saved(self):
        param = torch.empty(8, 6, dtype=torch.bfloat16, device="meta")
        found = self.record(lambda tensors: moves()["pack"][1](param, dict(tensors)), {"p": param})
        found.params["p"].boxes.append(elements.Box((7, 0), (1, 1), elements.Computed("aten.exp", ("q",)), 0, (0, 0)))
        with temporary_folder() as folder:
            found.save(folder / "r.json")
            self.assertEqual(recording.Recording.open(folder / "r.json"), found)


if __name__ == "__main__":
    unittest.main()
