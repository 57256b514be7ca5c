# SPDX-License-Identifier: Apache-2.0
"""reshard-inspect lists checkpoints of torch.distributed.checkpoint, Megatron-Core, torch.save and safetensors: each
chunk that it names has the element values of the tensor. Damaged and hostile files are refused with one error."""

import json
import os
import pickle
import shutil
import unittest
import zipfile
from pathlib import Path

import numpy as np

from commands import FolderTest, limited, run
from torch_formats import (
    HOOKS,
    Call,
    Dcp,
    Global,
    Member,
    Storage,
    UntypedStorage,
    archive,
    dtensor,
    pickled,
    placement,
    safetensors,
    sharded_tensor,
    size,
    tensor,
    with_attributes,
    wrapper,
)

A = np.arange(35, dtype=np.float32).reshape(7, 5)
B = np.arange(12, dtype=np.int64).reshape(3, 4) - 2**40
DTYPES = {"fp32": np.float32, "i64": np.int64, "u8": np.uint8}


def listing(path: Path) -> dict:
    return json.loads(run("reshard-inspect", path, "--format=json").stdout)


def assembled(path: Path, found: dict) -> dict[str, np.ndarray]:
    """The tensors of a listing, read from the places that it names."""
    tensors = {}
    for name, entry in found["tensors"].items():
        tensors[name] = np.zeros(entry["shape"], DTYPES[entry["dtype"]])
        for chunk in entry["chunks"]:
            data = (path / chunk["file"] if chunk["file"] else path).read_bytes()[
                chunk["begin"] : chunk["begin"] + chunk["bytes"]
            ]
            box = tuple(slice(at, at + length) for at, length in zip(chunk["offsets"], chunk["lengths"]))
            tensors[name][box] = np.frombuffer(data, DTYPES[entry["dtype"]]).reshape(chunk["lengths"])
    return tensors


class StoredCheckpoints(FolderTest):
    def dcp(self, **info: object) -> Dcp:
        """`model.a` in uneven chunks of three files, `model.b` cut along dimension 1, a scalar, an empty
        tensor and an object."""
        checkpoint = Dcp(self.folder / "dcp")
        for rank, rows in enumerate((slice(0, 3), slice(3, 6), slice(6, 7))):
            checkpoint.chunk("model.a", (7, 5), (rows.start, 0), A[rows], f"__{rank}_0.distcp", **info)
        for rank, columns in enumerate((slice(0, 3), slice(3, 4))):
            checkpoint.chunk(
                "model.b", (3, 4), (0, columns.start), np.ascontiguousarray(B[:, columns]), f"__{rank}_0.distcp"
            )
        checkpoint.chunk("scale", (), (), np.array(3.5, np.float32))
        checkpoint.chunk("none", (0, 4), (0, 0), np.zeros((0, 4), np.uint8))
        checkpoint.object("step", pickle.dumps(17))
        return checkpoint

    def refusal(self, path: Path, *options: str) -> str:
        done = run("reshard-inspect", path, *options, code=2)
        self.assertEqual(done.stdout, "")
        text = done.stderr.replace(str(self.folder) + "/", "")
        self.assertEqual(text.count("\n"), 1, text)
        return text.removeprefix("reshard-inspect: error: ").strip()

    def share_chunks(self, checkpoint: Dcp) -> None:
        """Adds empty tensors with one list of chunks."""
        chunks = checkpoint.items["none"].state["chunks"] * 200
        for name in (f"none.{i}" for i in range(200)):
            checkpoint.chunk(name, (0, 4), (0, 0), np.zeros((0, 4), np.uint8))
            checkpoint.items[name].state["chunks"] = chunks

    def overlap_entries(self, checkpoint: Dcp) -> None:
        for index, info in checkpoint.places:
            if index.state["fqn"] == "scale":
                info.state.update(offset=1, length=5)

    def compare(self, path: Path, found: dict, wanted: dict[str, np.ndarray]) -> None:
        tensors = assembled(path, found)
        self.assertEqual(tensors.keys(), wanted.keys())
        for name, array in wanted.items():
            self.assertEqual(tensors[name].shape, array.shape, name)
            np.testing.assert_array_equal(tensors[name], array, name)

    def test_dcp(self):
        self.dcp().write()
        found = listing(self.folder / "dcp")
        self.assertEqual((found["format"], found["version"]), ("DCP", "1.0.0"))
        self.compare(
            self.folder / "dcp",
            found,
            {"model.a": A, "model.b": B, "scale": np.array(3.5, np.float32), "none": np.zeros((0, 4), np.uint8)},
        )
        step = found["objects"]["step"]
        self.assertEqual(
            pickle.loads(
                (self.folder / "dcp" / step["file"]).read_bytes()[step["begin"] : step["begin"] + step["bytes"]]
            ),
            17,
        )
        text = run("reshard-inspect", self.folder / "dcp").stdout
        self.assertIn("DCP 1.0.0: 4 tensors in 7 chunks, 3 files", text)
        self.assertIn("  model.a  fp32 [7, 5]  3 chunks\n", text)
        text = run("reshard-inspect", self.folder / "dcp", "--param=*.b").stdout
        self.assertIn("    [0, 3] + [3, 1]  __1_0.distcp at byte", text)
        self.assertNotIn("model.a", text)

    def test_megatron(self):
        self.dcp().write()
        (self.folder / "dcp" / "metadata.json").write_text(
            '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
        )
        (self.folder / "dcp" / "common.pt").write_bytes(archive({"iteration": 3}, []))
        found = listing(self.folder / "dcp")
        self.assertEqual(found["format"], "Megatron torch_dist")
        self.assertEqual(sorted(found["objects"]), ["common.pt", "step"])

    def test_torch_save(self):
        path = self.folder / "model.pt"
        value = {
            "a": tensor(A, "0"),
            "rows": tensor(A[:2], "0"),
            "nested": {"b": Call("torch._utils", "_rebuild_parameter", (tensor(B, "1"), True, HOOKS))},
            "list": [tensor(B, "1"), 5],
            "step": 3,
        }
        path.write_bytes(archive(value, [A, B]))
        found = listing(path)
        self.assertEqual(found["format"], "torch.save")
        self.compare(path, found, {"a": A, "rows": A[:2], "nested.b": B, "list.0": B})
        self.assertEqual(sorted(found["objects"]), ["list.1", "step"])

    def ranks(
        self,
        *parts: dict[str, Call],
        arrays: list[list[np.ndarray]],
        name: str = "model_world_size_{world}_rank_{rank}.pt",
    ) -> Path:
        """A folder with a file of torch.save for each rank."""
        folder = self.folder / "ranks"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for rank, (value, data) in enumerate(zip(parts, arrays)):
            (folder / name.format(world=len(parts), rank=rank)).write_bytes(archive(value, data))
        return folder

    def sharded(
        self, locals_: list[np.ndarray], mesh: tuple[int, ...], *placements: Call, shape: tuple[int, ...] = A.shape
    ) -> Path:
        """`a` on all ranks of a mesh."""
        coordinates = list(np.ndindex(*mesh))
        return self.ranks(
            *({"a": dtensor(local, "0", shape, mesh, at, *placements)} for local, at in zip(locals_, coordinates)),
            arrays=[[local] for local in locals_],
        )

    def test_replicas_in_files_of_ranks(self):
        """HSDP: --check-replicas compares the parts that other files have too."""
        (self.folder / "job.yaml").write_text(f"""version: 1
model: {{dtype: fp32, tensors: {{a: {list(A.shape)}}}, layouts: {{same: {{params: same}}}}}}
source: {{layout: same, storage: ranks}}
target: {{layout: same, storage: out}}
""")
        placements = placement("Replicate"), placement("Shard", dim=0)
        other = A[4:].copy()
        other[1, 2] += 1
        for last, code, wanted in (
            (A[4:], 0, f"{A.nbytes} B compared, all equal"),
            (
                other,
                1,
                "ranks': tensor 'a': its part [4..6, 0..4] in 'model_world_size_4_rank_3.pt' differs from that in "
                "'model_world_size_4_rank_1.pt', "
                "first in byte ",
            ),
        ):
            self.sharded([A[:4], A[4:], A[:4], last], (2, 2), *placements)
            run("reshard-compile", self.folder / "job.yaml", "-o", self.folder / "p.rplan")
            done = run("reshard-exec", self.folder / "p.rplan", "--check-replicas", "--check", code=code)
            self.assertIn(wanted, done.stdout + done.stderr)
            self.assertEqual((self.folder / "out").exists(), code == 0)
            shutil.rmtree(self.folder / "out", ignore_errors=True)
        (self.folder / "ranks/model_world_size_4_rank_3.pt").unlink()
        self.assertIn(
            "has no file 'model_world_size_4_rank_3.pt'",
            run("reshard-exec", self.folder / "p.rplan", "--check-replicas", code=2).stderr,
        )

    def test_torch_save_of_ranks(self):
        rows, columns, replicate = placement("Shard", dim=0), placement("Shard", dim=1), placement("Replicate")
        cases = {
            "uneven rows": ([A[:2], A[2:4], A[4:6], A[6:]], (4,), rows),
            "columns": ([np.ascontiguousarray(A[:, :3]), np.ascontiguousarray(A[:, 3:])], (2,), columns),
            "more ranks than rows": ([A[i : i + 1] for i in range(9)], (9,), rows),
            "HSDP": ([A[:4], A[4:], A[:4], A[4:]], (2, 2), replicate, rows),
            "FSDP over TP": (
                [
                    np.ascontiguousarray(A[:4, :3]),
                    np.ascontiguousarray(A[:4, 3:]),
                    np.ascontiguousarray(A[4:, :3]),
                    np.ascontiguousarray(A[4:, 3:]),
                ],
                (2, 2),
                rows,
                columns,
            ),
            # Rows 0..3 and 4..6 belong to the two ranks of the second dimension; each piece is cut over the first.
            "FSDP over TP, the same dimension": (
                [A[0:2], A[4:6], A[2:4], A[6:7]],
                (2, 2),
                placement("_StridedShard", dim=0, split_factor=2),
                rows,
            ),
            # The rank's rows are in two intervals.
            "strided": (
                [np.concatenate([A[0:2], A[4:6]]), np.concatenate([A[2:4], A[6:7]])],
                (2,),
                placement("_StridedShard", dim=0, split_factor=2),
            ),
            "one rank": ([A], (1,), rows),
        }
        for name, (locals_, mesh, *placements) in cases.items():
            with self.subTest(name):
                folder = self.sharded(locals_, mesh, *placements)
                found = listing(folder)
                self.assertEqual(found["format"], "torch.save")
                self.compare(folder, found, {"a": A})
        self.compare(
            folder / "model_world_size_1_rank_0.pt", listing(folder / "model_world_size_1_rank_0.pt"), {"a": A}
        )
        parts = [
            {"a": dtensor(A[at], "0", A.shape, (2,), (i,), rows), "b": tensor(B, "1"), "step": 3}
            for i, at in enumerate((slice(0, 4), slice(4, 7)))
        ]
        folder = self.ranks(*parts, arrays=[[A[:4], B], [A[4:], B]], name="rank_{rank}.pt")
        (folder / "extra_state_rank_x.pt").touch()
        found = listing(folder)
        self.compare(folder, found, {"a": A, "b": B})
        self.assertEqual(list(found["objects"]), ["step"])

    def test_damaged_files_of_ranks(self):
        rows = placement("Shard", dim=0)
        halves = [A[:4], A[4:]]
        self.assertIn(
            "its local tensor has another shape than its placements or offsets give",
            self.refusal(self.sharded([A[:3], A[3:]], (2,), rows)),
        )
        for text, mesh, *placements in (
            ("it is sharded in dimension 2 of 2", (2,), placement("Shard", dim=2)),
            ("no placement for each dimension", (2,)),
            (
                "the split_factor of a _StridedShard is 1099511627776",
                (2,),
                placement("_StridedShard", dim=0, split_factor=2**40),
            ),
            ("a placement is none of", (2,), placement("Shard", axis=0)),
            ("_StridedShard cuts its elements", (2,), placement("_StridedShard", dim=1, split_factor=2)),
            (
                "the global 'torch.distributed.tensor.placement_types.Partial' is not one",
                (2,),
                placement("Partial", dim=0),
            ),
        ):
            with self.subTest(text):
                columns = (
                    [np.ascontiguousarray(A[:, [0, 1, 3]]), np.ascontiguousarray(A[:, 3:])]
                    if "cuts" in text
                    else halves
                )
                self.assertIn(text, self.refusal(self.sharded(columns, mesh, *placements)))
        self.assertIn(
            "its device mesh has another form than that of PyTorch 2.13",
            self.refusal(self.ranks({"a": dtensor(A[:4], "0", A.shape, (0,), (0,), rows)}, arrays=[[A[:4]]])),
        )
        folder = self.sharded(halves, (2,), rows)
        self.assertIn(
            "its chunks have 20 of 35 elements; the folder with the files of all ranks has all parts",
            self.refusal(folder / "model_world_size_2_rank_0.pt"),
        )
        (folder / "model_world_size_2_rank_1.pt").unlink()
        self.assertIn("has no file 'model_world_size_2_rank_1.pt', expected those of 2 ranks", self.refusal(folder))
        folder = self.sharded(halves, (2,), rows)
        (folder / "model_world_size_4_rank_0.pt").touch()
        self.assertIn("has several sets of files 'model…_rank_R.pt', expected one", self.refusal(folder))
        folder = self.ranks({"b": tensor(B, "0")}, {"b": tensor(B + 1, "0")}, arrays=[[B], [B + 1]])
        self.assertIn(
            "tensor 'b': it is not a distributed tensor and differs from that of a lower rank: how it is sharded is "
            "not stated",
            self.refusal(folder),
        )
        folder = self.ranks({"b": tensor(B, "0")}, {"b": tensor(B[:2], "0")}, arrays=[[B], [B[:2]]])
        self.assertIn("tensor 'b': its dtype or shape differs from that of a lower rank", self.refusal(folder))

    def test_sharded_tensors_of_ranks(self):
        def saved(*shards, **options):
            """`a` and `short`, of which the last rank has no part."""
            return self.ranks(
                *(
                    {
                        "a": sharded_tensor([(A[at], "0", (at.start, 0))], A.shape),
                        "short": sharded_tensor([(B[:1], "1", (0,) * B.ndim)] if i == 0 else [], B[:1].shape, "int64"),
                    }
                    | options
                    for i, at in enumerate(shards)
                ),
                arrays=[[A[at], B[:1]] for at in shards],
            )

        folder = saved(slice(0, 4), slice(4, 7))
        self.compare(folder, listing(folder), {"a": A, "short": B[:1]})
        self.assertIn("its chunks have 30 of 35 elements", self.refusal(saved(slice(0, 4), slice(4, 6))))
        self.assertIn("overlap", self.refusal(saved(slice(0, 4), slice(3, 7))))
        api = "torch.distributed._shard.sharded_tensor.api"
        cases = {
            "its rank has 2 shards of it, expected one": sharded_tensor(
                [(A[:4], "0", (0, 0)), (A[4:], "0", (4, 0))], A.shape
            ),
            "its shard has positions 5 and 4 more of dimension 0, which has 7": sharded_tensor(
                [(A[:4], "0", (5, 0))], A.shape
            ),
            "its shard has another form than that of PyTorch 2.13": sharded_tensor([(A[:4], "0", (0,))], A.shape),
            "the dtype 'torch Size' is not supported": sharded_tensor([], A.shape, "Size"),
            f"the global '{api}.ShardedTensor.gather' is not one": Member(Global(api, "ShardedTensor"), "gather"),
            f"the global '{api}.ShardedTensor.ProcessGroupState.os' is not one": Member(
                Member(Global(api, "ShardedTensor"), "ProcessGroupState"), "os"
            ),
            "expected a global and a name as the arguments of getattr": Member({}, "keys"),
        }
        for expected, value in cases.items():
            with self.subTest(expected):
                self.assertIn(expected, self.refusal(self.ranks({"x": value}, arrays=[[A[:4]]])))

    def test_objects_of_other_classes(self):
        """A value of a class that is not known is an object; one that has tensors is refused by the name of the
        class."""
        file = self.folder / "full.pt"
        others = {
            "args": Call("argparse", "Namespace", ()),
            "kind": Global("enum", "Enum"),
            "config": {"x": Call("omegaconf.listconfig", "ListConfig", ({"lr": 0.1},)), "step": 3},
        }
        file.write_bytes(archive({"a": tensor(A, "0")} | others, [A]))
        found = listing(file)
        self.compare(file, found, {"a": A})
        self.assertEqual(sorted(found["objects"]), ["args", "config.step", "config.x", "kind"])
        file.write_bytes(
            archive({"a": tensor(A, "0"), "model": Call("my.module", "Net", ({"w": tensor(A, "0")},))}, [A])
        )
        self.assertEqual(
            self.refusal(file),
            "'full.pt': 'model': it is made by the global 'my.module.Net', which is "
            "not one that this format uses, and has tensors; save a dictionary of "
            "tensors",
        )
        file.write_bytes(archive({"a": Call("os", "system", ("true",))}, []))
        self.assertRegex(
            self.refusal(file),
            r"^'full.pt': byte \d+: the global 'os.system' is not one that this "
            r"format uses; nothing was executed$",
        )

    def test_tensors_with_attributes(self):
        file = self.folder / "full.pt"
        parameter = Call(
            "torch._utils",
            "_rebuild_parameter_with_state",
            (tensor(B, "1"), True, Call("collections", "OrderedDict"), {"sequence_parallel": True}),
        )
        file.write_bytes(archive({"a": with_attributes(tensor(A, "0")), "b": parameter}, [A, B]))
        self.compare(file, listing(file), {"a": A, "b": B})
        file.write_bytes(archive({"a": with_attributes(tensor(A, "0"), Global("torch", "Size"))}, [A]))
        self.assertIn(
            "tensor 'a': 'torch._tensor._rebuild_from_type_v2' does not make a plain tensor", self.refusal(file)
        )

    def test_two_pickles(self):
        """PyTorch takes that of the archive's first folder, others take another one."""
        file = self.folder / "x.pt"
        file.write_bytes(archive({"a": tensor(A, "0")}, [A]))
        for name in ("other/data.pkl", "archive/inner/data.pkl", "data.pkl"):
            shutil.copy(file, self.folder / "y.pt")
            with zipfile.ZipFile(self.folder / "y.pt", "a") as members:
                members.writestr(name, pickled({"a": tensor(A, "0")}))
            first, second = sorted(("archive/data.pkl", name))
            self.assertIn(
                f"'y.pt': has two pickles, '{first}' and '{second}', expected one", self.refusal(self.folder / "y.pt")
            )

    def test_arguments_that_are_not_understood(self):
        """Each argument of the functions that make tensors is understood or refused: negative and conjugate bits,
        hooks, attributes that replace elements, further ones."""
        file = self.folder / "x.pt"
        rows = placement("Shard", dim=0)
        plain, parted = tensor(A, "0"), dtensor(A, "0", A.shape, (1,), (0,), rows)

        def with_arguments(made: Call, at: int, *values: object) -> Call:
            """With other arguments from number `at` on."""
            return Call(
                made.target.module,
                made.target.name,
                (*made.arguments[:at], *values, *made.arguments[at + len(values) :]),
            )

        def untyped(*last: object) -> Call:
            return Call(
                "torch._utils", "_rebuild_tensor_v3", (UntypedStorage(A, "1"), 0, A.shape, (5, 1), False, HOOKS, *last)
            )

        def parameter(*arguments: object) -> Call:
            return Call("torch._utils", "_rebuild_parameter" + "_with_state" * (len(arguments) > 3), arguments)

        def wrapped(at: int, *values: object) -> Call:
            inner = parted.arguments[2]
            return with_arguments(parted, 2, (*inner[:at], *values, *inner[at + len(values) :]))

        good = {
            "plain": plain,
            "no bits": with_arguments(plain, 6, {"neg": False, "conj": False}),
            "none": with_arguments(plain, 6, None),
            "untyped": untyped(Global("torch", "float32")),
            "parameter": parameter(plain, True, HOOKS),
            "attributes": parameter(plain, True, HOOKS, {"is_bias": True}),
            "slots": with_attributes(plain, state=({"a": 1}, None)),
            "parted": parted,
        }
        file.write_bytes(archive(good, [A, A]))
        self.compare(file, listing(file), dict.fromkeys(good, A))
        v2, v3 = "of 'torch._utils._rebuild_tensor_v2'", "of 'torch._utils._rebuild_tensor_v3'"
        bits = "their negatives; save tensor.resolve_neg()"
        cases = [
            (
                f"argument 7 {v2} (metadata) sets 'neg': its elements are not stored themselves, but {bits}",
                with_arguments(plain, 6, {"neg": True}),
            ),
            (
                f"argument 7 {v2} (metadata) sets 'conj': its elements are not stored themselves, "
                "but their conjugates; "
                "save tensor.resolve_conj()",
                with_arguments(plain, 6, {"conj": True}),
            ),
            (
                f"argument 7 {v2} (metadata) sets 'backend', which is not understood",
                with_arguments(plain, 6, {"backend": True}),
            ),
            (f"argument 7 {v2} (metadata) is not a dictionary", with_arguments(plain, 6, True)),
            (
                f"argument 8 {v3} (metadata) sets 'neg': its elements are not stored themselves, but {bits}",
                untyped(Global("torch", "float32"), {"neg": True}),
            ),
            (
                f"argument 7 {v3} (dtype) or its storage 'torch.storage.UntypedStorage' has another form",
                untyped("torch.float32"),
            ),
            (f"argument 5 {v2} (requires_grad) is not a boolean", with_arguments(plain, 4, {"data": 1})),
            (f"argument 6 {v2} (backward_hooks) is not an empty dictionary", with_arguments(plain, 5, {"hook": 1})),
            ("'torch._utils._rebuild_tensor_v2' does not make a plain tensor", with_arguments(plain, 6, {}, 1)),
            (
                "'torch._utils._rebuild_tensor_v2' does not make a plain tensor",
                Call("torch._utils", "_rebuild_tensor_v2", plain.arguments[:4]),
            ),
            (
                "'torch._utils._rebuild_tensor_v2' does not make a plain tensor",
                Call("torch._utils", "_rebuild_tensor_v2", plain.arguments, {"data": 1}),
            ),
            (
                "argument 3 of 'torch._utils._rebuild_parameter' (backward_hooks) is not an empty dictionary",
                parameter(plain, True, {1: 1}),
            ),
            (
                "'torch._utils._rebuild_parameter' does not have the arguments data, requires_grad, backward_hooks",
                Call("torch._utils", "_rebuild_parameter", (plain, True)),
            ),
            (
                "argument 4 of 'torch._utils._rebuild_parameter_with_state' (state) sets more than attributes",
                parameter(plain, True, HOOKS, {"data": tensor(A, "0")}),
            ),
            (f"argument 7 {v2} (metadata) sets 'neg'", parameter(with_arguments(plain, 6, {"neg": True}), True, HOOKS)),
            (f"argument 7 {v2} (metadata) sets 'neg'", with_attributes(with_arguments(plain, 6, {"neg": True}))),
            (
                f"argument 7 {v2} (metadata) sets 'neg'",
                wrapper(
                    Global("torch.distributed.tensor", "DTensor"),
                    "float32",
                    A.shape,
                    (None, parted.arguments[3][1] | {"_local_tensor": with_arguments(plain, 6, {"neg": True})}),
                ),
            ),
            (
                "'torch._tensor._rebuild_from_type_v2' does not make a plain tensor",
                with_attributes(plain, state={"data": 1}),
            ),
            ("'torch._utils._rebuild_wrapper_subclass' does not have the 8 arguments of PyTorch 2.13", wrapped(8, 1)),
            (
                "its layout is not torch.strided",
                wrapped(5, Call("torch.serialization", "_get_layout", ("torch.sparse_coo",))),
            ),
            ("its state sets more than attributes", with_arguments(parted, 3, ({"data": 1}, parted.arguments[3][1]))),
            (
                "a placement has other attributes than those of PyTorch 2.13",
                dtensor(A, "0", A.shape, (1,), (0,), placement("Shard", dim=0, step=2)),
            ),
            ("it is on the device 'meta' and has no data", with_arguments(plain, 0, Storage(A, "0", "meta"))),
            (
                "its storage 'archive/data/0' is a 'torch.LongStorage' here and a 'torch.FloatStorage' elsewhere",
                {"a": plain, "b": tensor(B, "0")},
            ),
        ]
        for function in (
            "_rebuild_qtensor",
            "_rebuild_sparse_tensor",
            "_rebuild_nested_tensor",
            "_rebuild_device_tensor_from_numpy",
            "_rebuild_device_tensor_from_cpu_tensor",
            "_rebuild_meta_tensor_no_storage",
            "_rebuild_xla_tensor",
            "_rebuild_tensor",
        ):
            cases.append(
                (
                    f"'torch._utils.{function}' is not one",
                    with_arguments(Call("torch._utils", function, plain.arguments), 0),
                )
            )
        cases.append(
            (
                "'torch._tensor._rebuild_from_type' is not one",
                Call("torch._tensor", "_rebuild_from_type", with_attributes(plain).arguments),
            )
        )
        for expected, value in cases:
            with self.subTest(expected):
                file.write_bytes(archive({"x": value}, [A, A]))
                self.assertIn(expected, self.refusal(file))

    def test_dcp_safetensors(self):
        folder = self.folder / "hf"
        folder.mkdir()
        safetensors(
            folder / "shard-00001-model-00001-of-00001.safetensors", {"a": A[:4], "b": B}, {"a": [0, 0], "b": [0, 0]}
        )
        safetensors(folder / "shard-00002-model-00001-of-00001.safetensors", {"a": A[4:]}, {"a": [4, 0]})
        found = listing(folder)
        self.assertEqual((found["format"], found["version"]), ("DCP safetensors", "1.0"))
        self.compare(folder, found, {"a": A, "b": B})
        safetensors(folder / "shard-00002-model-00001-of-00001.safetensors", {"a": A[4:]}, {"a": [3, 0]})
        self.assertEqual(
            self.refusal(folder),
            "'hf': tensor 'a': the chunks [0..3, 0..4] in 'shard-00001-model-00001-of-00001.safetensors' and "
            "[3..5, 0..4] in 'shard-00002-model-00001-of-00001.safetensors' overlap",
        )
        safetensors(folder / "shard-00002-model-00001-of-00001.safetensors", {"a": A[4:]}, {})
        self.assertIn("has no offset for each of its 2 dimensions", self.refusal(folder))

    def test_safetensors(self):
        safetensors(self.folder / "model.safetensors", {"a": A, "b": B}, None)
        for path in (self.folder, self.folder / "model.safetensors"):
            found = listing(path)
            self.assertEqual(found["format"], "safetensors")
            self.compare(path, found, {"a": A, "b": B})

    def test_damaged_dcp(self):
        self.dcp().write()
        file = self.folder / "dcp" / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-1])
        self.assertIn("'dcp/__1_0.distcp': truncated: 'model.b' has bytes", self.refusal(self.folder / "dcp"))
        file.unlink()
        self.assertIn("__1_0.distcp", self.refusal(self.folder / "dcp"))
        cases = {
            "its chunks have 30 of 35 elements": lambda c: c.items["model.a"].state["chunks"].pop(),
            "two entries with one offset": lambda c: c.places.append(c.places[0]),
            "a chunk has no entry in storage_data": lambda c: c.places.pop(0),
            "invalid file name '../x'": lambda c: c.places[0][1].state.update(relative_path="../x"),
            "a negative offset or length": lambda c: c.places[0][1].state.update(offset=-1),
            "stored with stream transforms (transform_descriptors)": lambda c: c.places[0][1].state.update(
                transform_descriptors=["zstd"]
            ),
            "'model.a' is stored with stream transforms": lambda c: c.places[0][1].state.update(
                transform_descriptors="zstd"
            ),
            "found more chunks in all tensors than values": self.share_chunks,
            "'scale': expected TensorStorageMetadata with properties, a size of at most 64 dimensions, and "
            "chunks": lambda c: c.items["scale"].state.update(size=size(*[1] * 65)),
            "its offset in storage_data is no list of at most 64 integers": lambda c: c.places[0][0].state.update(
                offset=size(*[0] * 65)
            ),
            "expected ChunkStorageMetadata with offsets and sizes of at most 64 integers": lambda c: (
                c.items["model.a"].state["chunks"][0].state.update(sizes=size(*[1] * 65))
            ),
            "'dcp/__0_0.distcp': the entries 'model.a' at byte 0 and 'scale' at byte 1 overlap": self.overlap_entries,
            "damaged zip archive": lambda c: c.places[0][1].state.update(offset=c.places[0][1].state["offset"] + 1),
            "expected TensorStorageMetadata": lambda c: c.items.update(x=3),
        }
        for expected, damage in cases.items():
            with self.subTest(expected):
                checkpoint = self.dcp()
                damage(checkpoint)
                checkpoint.write()
                self.assertIn(expected, self.refusal(self.folder / "dcp"))

    def test_hostile_pickles(self):
        marker = self.folder / "executed"
        cases = {
            "the global 'os.system' is not one": Call("os", "system", (f"touch {marker}",)),
            "the global 'builtins.eval' is not one": Call("builtins", "eval", ("1",)),
            "the global 'torch.load' is not one": Global("torch", "load"),
        }
        for expected, value in cases.items():
            with self.subTest(expected):
                (self.folder / "x.pt").write_bytes(archive({"a": value}, []))
                self.assertIn(expected, self.refusal(self.folder / "x.pt"))
                folder = self.folder / "hostile"
                folder.mkdir(exist_ok=True)
                (folder / ".metadata").write_bytes(pickled(value))
                self.assertIn(expected, self.refusal(folder))
        self.assertFalse(marker.exists())
        raw = {
            "too few values on the stack": b"\x80\x02R.",
            "the opcode 0x69": b"\x80\x02i",
            "no value has the number 4294967295": b"\x80\x02j\xff\xff\xff\xff.",
            "the pickle ends within a value": b"\x80\x02X\xff\xff\xff\xffabc",
            "an integer of 255 bytes": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
            "protocol 6": b"\x80\x06.",
            "the pickle ends with more than one value": b"\x80\x02K\x01K\x01.",
            "no mark on the stack": b"\x80\x02t.",
            "expected a Metadata": b"\x80\x02}.",
        }
        folder = self.folder / "raw"
        folder.mkdir()
        for expected, data in raw.items():
            with self.subTest(expected):
                (folder / ".metadata").write_bytes(data)
                self.assertIn(expected, self.refusal(folder))
        deep = b"\x80\x02" + b"(" * 200000 + b"t" * 200000 + b"."  # tuples in tuples
        (folder / ".metadata").write_bytes(deep)
        self.assertIn("expected a Metadata", self.refusal(folder))
        # List i + 1 has list i twice: 2^60 ways lead to the first one.
        shared = b"\x80\x02]q\x000" + b"".join(b"]q%c(h%ch%ce0" % (i + 1, i, i) for i in range(60)) + b"h\x3c."
        (self.folder / "x.pt").write_bytes(archive(shared, []))
        self.assertIn("its values refer to each other so often", self.refusal(self.folder / "x.pt"))
        # Each name of the list's members begins with a key of a million bytes.
        (self.folder / "x.pt").write_bytes(archive({"k" * 1_000_000: [None] * 100_000}, []))
        self.assertIn("its values refer to each other so often", self.refusal(self.folder / "x.pt"))
        # A key that is written twice has the last value, as in Python.
        twice = b"\x80\x02}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u."
        (self.folder / "x.pt").write_bytes(archive(twice, []))
        self.assertEqual(list(listing(self.folder / "x.pt")["objects"]), ["a"])
        # A tensor and a value of one name: which of them it is depends on their order.
        both = b"\x80\x02}(X\x01\0\0\0a" + pickled(tensor(A, "0"))[2:-1] + b"X\x01\0\0\0aK\x02u."
        (self.folder / "x.pt").write_bytes(archive(both, [A]))
        self.assertIn("tensor 'a': the name is repeated", self.refusal(self.folder / "x.pt"))

    def test_attributes_have_a_bound(self):
        """An instance has few attributes; a dictionary of many could be the state of many instances."""
        checkpoint = self.dcp()
        checkpoint.items["none"].state |= {f"key {i}": None for i in range(60)}
        checkpoint.write()
        listing(self.folder / "dcp")
        checkpoint.items["none"].state |= {f"key {i}": None for i in range(100)}
        checkpoint.write()
        self.assertIn(
            "'none': expected TensorStorageMetadata with properties, a size of at most 64 dimensions, and chunks",
            self.refusal(self.folder / "dcp"),
        )

    def test_many_tensors(self):
        count = 3_000 if "RESHARD_SMALL" in os.environ else 70_000
        (self.folder / "many").mkdir()
        safetensors(
            self.folder / "many/model.safetensors", {f"t{i}": np.zeros(1, np.uint8) for i in range(count)}, None
        )
        for command in ("reshard-inspect", "reshard-digest"):
            with self.subTest(command):
                found = json.loads(limited(10, command, self.folder / "many", "--format=json").stdout)
                self.assertEqual(len(found.get("tensors", found)), count)

    def test_formats(self):
        formats = json.loads(run("reshard-inspect", "--list-formats").stdout)
        names = ["safetensors", "dcp-safetensors", "dcp", "megatron", "torch-save"]
        self.assertEqual([each["name"] for each in formats], names)
        self.assertEqual([each["name"] for each in formats if each["chunks"]], ["dcp", "megatron"])
        self.assertEqual([each["name"] for each in formats if not each["split"]], ["torch-save"])
        self.assertIn("expected 0: ", run("reshard-inspect", "--list-formats", "x", code=2).stderr)

    def test_usage(self):
        self.dcp().write()
        self.assertIn(
            "is a checkpoint; --rank, --explain, --simulate, --replicas and --verify need a plan",
            self.refusal(self.folder / "dcp", "--verify"),
        )
        self.assertIn(
            "no tensor and no object matches 'x*'",
            run("reshard-inspect", self.folder / "dcp", "--param=x*", code=1).stderr,
        )
        (self.folder / "empty").mkdir()
        self.assertIn("not a checkpoint: expected '.metadata'", self.refusal(self.folder / "empty"))
        for name, found in {  # what is no checkpoint says what it is
            "pytorch_model.bin": "found 'pytorch_model.bin': a file of torch.save; name the file itself",
            "pytorch_model.bin.index.json": "found 'pytorch_model.bin.index.json': load it with transformers' "
            "from_pretrained",
            "llama.Q4_K_M.gguf": "found 'llama.Q4_K_M.gguf': GGUF, llama.cpp's format",
            "model.nemo": "found 'model.nemo': an archive of NeMo; unpack it",
            "zero_pp_rank_0_mp_rank_00_model_states.pt": "DeepSpeed's form of ZeRO; 'python zero_to_fp32.py",
            "manifest.ocdbt": "a checkpoint of Orbax",
            "__0_0.distcp": "without '.metadata', which is written last",
            "layer/.zarray": "found 'layer': an array of zarr",
            "mp_rank_00/model_optim_rng.pt": "found 'mp_rank_00': Megatron's format 'torch'",
            "iter_0001000/.metadata": "found checkpoints in folders of it: name one, such as 'iter_0001000'",
        }.items():
            with self.subTest(name):
                path = self.folder / "unread" / name
                path.parent.mkdir(parents=True)
                path.write_bytes(b"x")
                self.assertIn(found, self.refusal(self.folder / "unread"))
                shutil.rmtree(self.folder / "unread")
        for name, begin, found in (
            ("x.gguf", b"GGUF\x03\0\0\0more than sixteen bytes", "found GGUF, llama.cpp's format"),
            ("x.nemo", b"./model_config.yaml and more", "found an archive of NeMo"),
        ):
            (self.folder / name).write_bytes(begin)
            self.assertIn(found, self.refusal(self.folder / name))
        for name in ("adapter_model", "rank-00000"):
            (self.folder / name).mkdir()
            safetensors(self.folder / name / f"{name}.safetensors", {"a": A}, None)
            self.assertIn(
                f"found 1 safetensors file(s), such as '{name}.safetensors', expected 'model.safetensors'",
                self.refusal(self.folder / name),
            )
        (self.folder / "legacy").mkdir()
        for path in (self.folder / "x.pt", self.folder / "legacy/model.pt"):
            path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80")
            self.assertIn(
                "is a file of torch.save in the form before PyTorch 1.6",
                self.refusal(path if path.name == "x.pt" else path.parent),
            )
        (self.folder / "x.pt").write_bytes(b"%PDF-1.4 and more")
        for options in ((), ("--verify",)):
            self.assertIn("'x.pt' is neither a plan nor a checkpoint", self.refusal(self.folder / "x.pt", *options))
        (self.folder / "x.pt").write_bytes(archive({"t": tensor(A, "0", strides=(1, 7))}, [A]))
        self.assertIn("its elements are not contiguous", self.refusal(self.folder / "x.pt"))
        (self.folder / "x.pt").write_bytes(archive({"t": tensor(A, "1")}, [A]))
        self.assertIn("its storage 'archive/data/1' is missing", self.refusal(self.folder / "x.pt"))
        (self.folder / "x.pt").write_bytes(archive({"t": tensor(A, "0")}, [A[:3]]))
        self.assertIn("it lies outside its storage of 60 bytes", self.refusal(self.folder / "x.pt"))


if __name__ == "__main__":
    unittest.main()
