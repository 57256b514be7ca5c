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

from commands import FolderTest, limited
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


def assembled(path: Path, found: dict) -> dict[str, np.ndarray]:
    """The tensors of a listing, read from the places that it names."""
    tensors = {}
    for name, entry in found["tensors"].items():
        tensors[name] = np.zeros(entry["shape"], DTYPES[entry["dtype"]])
        for chunk in entry["chunks"]:
            file, begin = path / chunk["file"] if chunk["file"] else path, chunk["begin"]
            data = file.read_bytes()[begin : begin + chunk["bytes"]]
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
            part = np.ascontiguousarray(B[:, columns])
            checkpoint.chunk("model.b", (3, 4), (0, columns.start), part, f"__{rank}_0.distcp")
        checkpoint.chunk("scale", (), (), np.array(3.5, np.float32))
        checkpoint.chunk("none", (0, 4), (0, 0), np.zeros((0, 4), np.uint8))
        checkpoint.object("step", pickle.dumps(17))
        return checkpoint

    def refusal(self, path: object, *options: str) -> str:
        done = self.call("reshard-inspect", path, *options, code=2)
        self.assertEqual(done.stdout, "")
        text = done.stderr.replace(str(self.folder) + "/", "")
        self.assertEqual(text.count("\n"), 1, text)
        return text.removeprefix("reshard-inspect: error: ").strip()

    def refused(self, expected: str, path: object, *options: str) -> None:
        self.assertIn(expected, self.refusal(path, *options))

    def torch_file(self, value: object, *arrays: np.ndarray) -> Path:
        """A file of torch.save."""
        path = self.folder / "x.pt"
        path.write_bytes(archive(value, arrays))
        return path

    def holds(self, path: Path, wanted: dict[str, np.ndarray]) -> dict:
        """The listing of a checkpoint, which names exactly these arrays."""
        found = self.listing(path)
        self.compare(path, found, wanted)
        return found

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
        small = {"scale": np.array(3.5, np.float32), "none": np.zeros((0, 4), np.uint8)}
        found = self.holds(self.folder / "dcp", {"model.a": A, "model.b": B} | small)
        self.assertEqual((found["format"], found["version"]), ("DCP", "1.0.0"))
        step = found["objects"]["step"]
        data = (self.folder / "dcp" / step["file"]).read_bytes()
        self.assertEqual(pickle.loads(data[step["begin"] : step["begin"] + step["bytes"]]), 17)
        text = self.call("reshard-inspect dcp").stdout
        self.assertIn("DCP 1.0.0: 4 tensors in 7 chunks, 3 files", text)
        self.assertIn("  model.a  fp32 [7, 5]  3 chunks\n", text)
        text = self.call("reshard-inspect dcp --param=*.b").stdout
        self.assertIn("    [0, 3] + [3, 1]  __1_0.distcp at byte", text)
        self.assertNotIn("model.a", text)

    def test_megatron(self):
        self.dcp().write()
        self.write("dcp/metadata.json", '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        (self.folder / "dcp" / "common.pt").write_bytes(archive({"iteration": 3}, []))
        found = self.listing("dcp")
        self.assertEqual(found["format"], "Megatron torch_dist")
        self.assertEqual(sorted(found["objects"]), ["common.pt", "step"])

    def test_torch_save(self):
        value = {
            "a": tensor(A, "0"),
            "rows": tensor(A[:2], "0"),
            "nested": {"b": Call("torch._utils", "_rebuild_parameter", (tensor(B, "1"), True, HOOKS))},
            "list": [tensor(B, "1"), 5],
            "step": 3,
        }
        found = self.holds(self.torch_file(value, A, B), {"a": A, "rows": A[:2], "nested.b": B, "list.0": B})
        self.assertEqual(found["format"], "torch.save")
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

    def sharded(self, parts: list[np.ndarray], mesh: tuple[int, ...], *placements: Call) -> Path:
        """`a` on all ranks of a mesh."""
        parts = [np.ascontiguousarray(part) for part in parts]
        return self.ranks(
            *({"a": dtensor(part, "0", A.shape, mesh, at, *placements)} for part, at in zip(parts, np.ndindex(*mesh))),
            arrays=[[part] for part in parts],
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
            self.call("reshard-compile job.yaml -o p.rplan")
            done = self.call("reshard-exec p.rplan --check-replicas --check", code=code)
            self.assertIn(wanted, done.stdout + done.stderr)
            self.assertEqual((self.folder / "out").exists(), code == 0)
            shutil.rmtree(self.folder / "out", ignore_errors=True)
        (self.folder / "ranks/model_world_size_4_rank_3.pt").unlink()
        self.fails("has no file 'model_world_size_4_rank_3.pt'", "reshard-exec p.rplan --check-replicas")

    def test_torch_save_of_ranks(self):
        rows, columns, replicate = placement("Shard", dim=0), placement("Shard", dim=1), placement("Replicate")
        strided = placement("_StridedShard", dim=0, split_factor=2)
        cases = {
            "uneven rows": ([A[:2], A[2:4], A[4:6], A[6:]], (4,), rows),
            "columns": ([A[:, :3], A[:, 3:]], (2,), columns),
            "more ranks than rows": ([A[i : i + 1] for i in range(9)], (9,), rows),
            "HSDP": ([A[:4], A[4:], A[:4], A[4:]], (2, 2), replicate, rows),
            "FSDP over TP": ([A[:4, :3], A[:4, 3:], A[4:, :3], A[4:, 3:]], (2, 2), rows, columns),
            # Rows 0..3 and 4..6 belong to the two ranks of the second dimension; each piece is cut over the first.
            "FSDP over TP, the same dimension": ([A[0:2], A[4:6], A[2:4], A[6:7]], (2, 2), strided, rows),
            # The rank's rows are in two intervals.
            "strided": ([np.concatenate([A[0:2], A[4:6]]), np.concatenate([A[2:4], A[6:7]])], (2,), strided),
            "one rank": ([A], (1,), rows),
        }
        for name, (parts, mesh, *placements) in cases.items():
            with self.subTest(name):
                folder = self.sharded(parts, mesh, *placements)
                self.assertEqual(self.holds(folder, {"a": A})["format"], "torch.save")
        self.holds(folder / "model_world_size_1_rank_0.pt", {"a": A})
        parts = [
            {"a": dtensor(A[at], "0", A.shape, (2,), (i,), rows), "b": tensor(B, "1"), "step": 3}
            for i, at in enumerate((slice(0, 4), slice(4, 7)))
        ]
        folder = self.ranks(*parts, arrays=[[A[:4], B], [A[4:], B]], name="rank_{rank}.pt")
        (folder / "extra_state_rank_x.pt").touch()
        self.assertEqual(list(self.holds(folder, {"a": A, "b": B})["objects"]), ["step"])

    def test_damaged_files_of_ranks(self):
        rows = placement("Shard", dim=0)
        halves, partial = [A[:4], A[4:]], placement("Partial", dim=0)
        strided = lambda dim, factor: placement("_StridedShard", dim=dim, split_factor=factor)
        self.refused(
            "its local tensor has another shape than its placements or offsets give",
            self.sharded([A[:3], A[3:]], (2,), rows),
        )
        for text, mesh, *placements in (
            ("it is sharded in dimension 2 of 2", (2,), placement("Shard", dim=2)),
            ("no placement for each dimension", (2,)),
            ("the split_factor of a _StridedShard is 1099511627776", (2,), strided(0, 2**40)),
            ("a placement is none of", (2,), placement("Shard", axis=0)),
            ("_StridedShard cuts its elements", (2,), strided(1, 2)),
            ("the global 'torch.distributed.tensor.placement_types.Partial' is not one", (2,), partial),
        ):
            with self.subTest(text):
                columns = [A[:, [0, 1, 3]], A[:, 3:]] if "cuts" in text else halves
                self.refused(text, self.sharded(columns, mesh, *placements))
        self.refused(
            "its device mesh has another form than that of PyTorch 2.13",
            self.ranks({"a": dtensor(A[:4], "0", A.shape, (0,), (0,), rows)}, arrays=[[A[:4]]]),
        )
        folder = self.sharded(halves, (2,), rows)
        self.refused(
            "its chunks have 20 of 35 elements; the folder with the files of all ranks has all parts",
            folder / "model_world_size_2_rank_0.pt",
        )
        (folder / "model_world_size_2_rank_1.pt").unlink()
        self.refused("has no file 'model_world_size_2_rank_1.pt', expected those of 2 ranks", folder)
        folder = self.sharded(halves, (2,), rows)
        (folder / "model_world_size_4_rank_0.pt").touch()
        self.refused("has several sets of files 'model…_rank_R.pt', expected one", folder)
        folder = self.ranks({"b": tensor(B, "0")}, {"b": tensor(B + 1, "0")}, arrays=[[B], [B + 1]])
        self.refused(
            "tensor 'b': it is not a distributed tensor and differs from that of a lower rank: how it is sharded is "
            "not stated",
            folder,
        )
        folder = self.ranks({"b": tensor(B, "0")}, {"b": tensor(B[:2], "0")}, arrays=[[B], [B[:2]]])
        self.refused("tensor 'b': its dtype or shape differs from that of a lower rank", folder)

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
        self.holds(folder, {"a": A, "short": B[:1]})
        self.refused("its chunks have 30 of 35 elements", saved(slice(0, 4), slice(4, 6)))
        self.refused("overlap", saved(slice(0, 4), slice(3, 7)))
        self.refused("overlap", saved(slice(0, 4), slice(2, 5)))  # with as many elements as the tensor
        api = "torch.distributed._shard.sharded_tensor.api"
        kind, parts = Global(api, "ShardedTensor"), lambda *shards: sharded_tensor(list(shards), A.shape)
        cases = {
            "its rank has 2 shards of it, expected one": parts((A[:4], "0", (0, 0)), (A[4:], "0", (4, 0))),
            "its shard has positions 5 and 4 more of dimension 0, which has 7": parts((A[:4], "0", (5, 0))),
            "its shard has another form than that of PyTorch 2.13": parts((A[:4], "0", (0,))),
            "the dtype 'torch Size' is not supported": sharded_tensor([], A.shape, "Size"),
            f"the global '{api}.ShardedTensor.gather' is not one": Member(kind, "gather"),
            f"the global '{api}.ShardedTensor.ProcessGroupState.os' is not one": Member(
                Member(kind, "ProcessGroupState"), "os"
            ),
            "expected a global and a name as the arguments of getattr": Member({}, "keys"),
        }
        for expected, value in cases.items():
            with self.subTest(expected):
                self.refused(expected, self.ranks({"x": value}, arrays=[[A[:4]]]))

    def test_objects_of_other_classes(self):
        """A value of a class that is not known is an object; one that has tensors is refused by the name of the
        class."""
        others = {
            "args": Call("argparse", "Namespace", ()),
            "kind": Global("enum", "Enum"),
            "config": {"x": Call("omegaconf.listconfig", "ListConfig", ({"lr": 0.1},)), "step": 3},
        }
        found = self.holds(self.torch_file({"a": tensor(A, "0")} | others, A), {"a": A})
        self.assertEqual(sorted(found["objects"]), ["args", "config.step", "config.x", "kind"])
        net = Call("my.module", "Net", ({"w": tensor(A, "0")},))
        self.assertEqual(
            self.refusal(self.torch_file({"a": tensor(A, "0"), "model": net}, A)),
            "'x.pt': 'model': it is made by the global 'my.module.Net', which is not one that this format uses, and "
            "has tensors; save a dictionary of tensors",
        )
        self.assertRegex(
            self.refusal(self.torch_file({"a": Call("os", "system", ("true",))})),
            r"^'x.pt': byte \d+: the global 'os.system' is not one that this format uses; nothing was executed$",
        )

    def test_tensors_with_attributes(self):
        parameter = Call(
            "torch._utils",
            "_rebuild_parameter_with_state",
            (tensor(B, "1"), True, Call("collections", "OrderedDict"), {"sequence_parallel": True}),
        )
        self.holds(self.torch_file({"a": with_attributes(tensor(A, "0")), "b": parameter}, A, B), {"a": A, "b": B})
        file = self.torch_file({"a": with_attributes(tensor(A, "0"), Global("torch", "Size"))}, A)
        self.refused("tensor 'a': 'torch._tensor._rebuild_from_type_v2' does not make a plain tensor", file)

    def test_two_pickles(self):
        """PyTorch takes that of the archive's first folder, others take another one."""
        file = self.torch_file({"a": tensor(A, "0")}, A)
        for name in ("other/data.pkl", "archive/inner/data.pkl", "data.pkl"):
            shutil.copy(file, self.folder / "y.pt")
            with zipfile.ZipFile(self.folder / "y.pt", "a") as members:
                members.writestr(name, pickled({"a": tensor(A, "0")}))
            first, second = sorted(("archive/data.pkl", name))
            self.refused(f"'y.pt': has two pickles, '{first}' and '{second}', expected one", "y.pt")

    def test_arguments_that_are_not_understood(self):
        """Each argument of the functions that make tensors is understood or refused: negative and conjugate bits,
        hooks, attributes that replace elements, further ones."""
        rows = placement("Shard", dim=0)
        plain, parted = tensor(A, "0"), dtensor(A, "0", A.shape, (1,), (0,), rows)

        def with_arguments(made: Call, at: int, *values: object) -> Call:
            """With other arguments from number `at` on."""
            arguments = (*made.arguments[:at], *values, *made.arguments[at + len(values) :])
            return Call(made.target.module, made.target.name, arguments)

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
        self.holds(self.torch_file(good, A, A), dict.fromkeys(good, A))
        v2, v3 = "of 'torch._utils._rebuild_tensor_v2'", "of 'torch._utils._rebuild_tensor_v3'"
        not_plain = "'torch._utils._rebuild_tensor_v2' does not make a plain tensor"
        its = "its elements are not stored themselves, but their"
        negative, float32 = with_arguments(plain, 6, {"neg": True}), Global("torch", "float32")
        state = parted.arguments[3][1]
        sparse = Call("torch.serialization", "_get_layout", ("torch.sparse_coo",))
        dtensor_of = lambda part: wrapper(
            Global("torch.distributed.tensor", "DTensor"), "float32", A.shape, (None, state | {"_local_tensor": part})
        )
        utils = lambda name, *arguments: Call("torch._utils", name, *arguments)
        parameters = "'torch._utils._rebuild_parameter"
        cases = [
            (f"argument 7 {v2} (metadata) sets 'neg': {its} negatives; save tensor.resolve_neg()", negative),
            (
                f"argument 7 {v2} (metadata) sets 'conj': {its} conjugates; save tensor.resolve_conj()",
                with_arguments(plain, 6, {"conj": True}),
            ),
            (
                f"argument 7 {v2} (metadata) sets 'backend', which is not understood",
                with_arguments(plain, 6, {"backend": True}),
            ),
            (f"argument 7 {v2} (metadata) is not a dictionary", with_arguments(plain, 6, True)),
            (
                f"argument 8 {v3} (metadata) sets 'neg': {its} negatives; save tensor.resolve_neg()",
                untyped(float32, {"neg": True}),
            ),
            (
                f"argument 7 {v3} (dtype) or its storage 'torch.storage.UntypedStorage' has another form",
                untyped("torch.float32"),
            ),
            (f"argument 5 {v2} (requires_grad) is not a boolean", with_arguments(plain, 4, {"data": 1})),
            (f"argument 6 {v2} (backward_hooks) is not an empty dictionary", with_arguments(plain, 5, {"hook": 1})),
            (not_plain, with_arguments(plain, 6, {}, 1)),
            (not_plain, utils("_rebuild_tensor_v2", plain.arguments[:4])),
            (not_plain, utils("_rebuild_tensor_v2", plain.arguments, {"data": 1})),
            (
                f"argument 3 of {parameters}' (backward_hooks) is not an empty dictionary",
                parameter(plain, True, {1: 1}),
            ),
            (
                f"{parameters}' does not have the arguments data, requires_grad, backward_hooks",
                utils("_rebuild_parameter", (plain, True)),
            ),
            (
                f"argument 4 of {parameters}_with_state' (state) sets more than attributes",
                parameter(plain, True, HOOKS, {"data": tensor(A, "0")}),
            ),
            (f"argument 7 {v2} (metadata) sets 'neg'", parameter(negative, True, HOOKS)),
            (f"argument 7 {v2} (metadata) sets 'neg'", with_attributes(negative)),
            (f"argument 7 {v2} (metadata) sets 'neg'", dtensor_of(negative)),
            (
                "'torch._tensor._rebuild_from_type_v2' does not make a plain tensor",
                with_attributes(plain, state={"data": 1}),
            ),
            ("'torch._utils._rebuild_wrapper_subclass' does not have the 8 arguments of PyTorch 2.13", wrapped(8, 1)),
            ("its layout is not torch.strided", wrapped(5, sparse)),
            ("its state sets more than attributes", with_arguments(parted, 3, ({"data": 1}, state))),
            (
                "a placement has other attributes than those of PyTorch 2.13",
                dtensor(A, "0", A.shape, (1,), (0,), placement("Shard", dim=0, step=2)),
            ),
            ("it is on the device 'meta' and has no data", with_arguments(plain, 0, Storage(A, "0", "meta"))),
            (
                "its storage 'archive/data/0' is a 'torch.LongStorage' here and a 'torch.FloatStorage' elsewhere",
                {"a": plain, "b": tensor(B, "0")},
            ),
            (
                "'torch._tensor._rebuild_from_type' is not one",
                Call("torch._tensor", "_rebuild_from_type", with_attributes(plain).arguments),
            ),
        ]
        for kind in (
            "qtensor",
            "sparse_tensor",
            "nested_tensor",
            "device_tensor_from_numpy",
            "device_tensor_from_cpu_tensor",
            "meta_tensor_no_storage",
            "xla_tensor",
            "tensor",
        ):
            function = f"_rebuild_{kind}"
            cases.append((f"'torch._utils.{function}' is not one", utils(function, plain.arguments)))
        for expected, value in cases:
            with self.subTest(expected):
                self.refused(expected, self.torch_file({"x": value}, A, A))

    def test_dcp_safetensors(self):
        folder = self.folder / "hf"
        folder.mkdir()
        safetensors(
            folder / "shard-00001-model-00001-of-00001.safetensors", {"a": A[:4], "b": B}, {"a": [0, 0], "b": [0, 0]}
        )
        safetensors(folder / "shard-00002-model-00001-of-00001.safetensors", {"a": A[4:]}, {"a": [4, 0]})
        found = self.holds(folder, {"a": A, "b": B})
        self.assertEqual((found["format"], found["version"]), ("DCP safetensors", "1.0"))
        safetensors(folder / "shard-00002-model-00001-of-00001.safetensors", {"a": A[4:]}, {"a": [3, 0]})
        self.assertEqual(
            self.refusal(folder),
            "'hf': tensor 'a': the chunks [0..3, 0..4] in 'shard-00001-model-00001-of-00001.safetensors' and "
            "[3..5, 0..4] in 'shard-00002-model-00001-of-00001.safetensors' overlap",
        )
        safetensors(folder / "shard-00002-model-00001-of-00001.safetensors", {"a": A[4:]}, {})
        self.refused("has no offset for each of its 2 dimensions", folder)

    def test_safetensors(self):
        safetensors(self.folder / "model.safetensors", {"a": A, "b": B}, None)
        for path in (self.folder, self.folder / "model.safetensors"):
            self.assertEqual(self.holds(path, {"a": A, "b": B})["format"], "safetensors")

    def test_damaged_dcp(self):
        self.dcp().write()
        file = self.folder / "dcp" / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-1])
        self.refused("'dcp/__1_0.distcp': truncated: 'model.b' has bytes", "dcp")
        file.unlink()
        self.refused("__1_0.distcp", "dcp")
        chunk = lambda c: c.items["model.a"].state["chunks"][0].state
        index, entry = (lambda c: c.places[0][0].state), (lambda c: c.places[0][1].state)
        cases = {
            "its chunks have 30 of 35 elements": lambda c: c.items["model.a"].state["chunks"].pop(),
            "two entries with one offset": lambda c: c.places.append(c.places[0]),
            "a chunk has no entry in storage_data": lambda c: c.places.pop(0),
            "invalid file name '../x'": lambda c: entry(c).update(relative_path="../x"),
            "a negative offset or length": lambda c: entry(c).update(offset=-1),
            "stored with stream transforms (transform_descriptors)": lambda c: entry(c).update(
                transform_descriptors=["zstd"]
            ),
            "'model.a' is stored with stream transforms": lambda c: entry(c).update(transform_descriptors="zstd"),
            "found more chunks in all tensors than values": self.share_chunks,
            "'scale': expected TensorStorageMetadata with properties, a size of at most 64 dimensions, and "
            "chunks": lambda c: c.items["scale"].state.update(size=size(*[1] * 65)),
            "its offset in storage_data is no list of at most 64 integers": lambda c: index(c).update(
                offset=size(*[0] * 65)
            ),
            "expected ChunkStorageMetadata with offsets and sizes of at most 64 integers": lambda c: chunk(c).update(
                sizes=size(*[1] * 65)
            ),
            "'dcp/__0_0.distcp': the entries 'model.a' at byte 0 and 'scale' at byte 1 overlap": self.overlap_entries,
            "damaged zip archive": lambda c: entry(c).update(offset=entry(c)["offset"] + 1),
            "expected TensorStorageMetadata": lambda c: c.items.update(x=3),
        }
        for expected, damage in cases.items():
            with self.subTest(expected):
                checkpoint = self.dcp()
                damage(checkpoint)
                checkpoint.write()
                self.refused(expected, "dcp")

    def test_hostile_pickles(self):
        marker = self.folder / "executed"
        cases = {
            "the global 'os.system' is not one": Call("os", "system", (f"touch {marker}",)),
            "the global 'builtins.eval' is not one": Call("builtins", "eval", ("1",)),
            "the global 'torch.load' is not one": Global("torch", "load"),
        }
        for expected, value in cases.items():
            with self.subTest(expected):
                self.refused(expected, self.torch_file({"a": value}))
                folder = self.folder / "hostile"
                folder.mkdir(exist_ok=True)
                (folder / ".metadata").write_bytes(pickled(value))
                self.refused(expected, folder)
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
                self.refused(expected, folder)
        deep = b"\x80\x02" + b"(" * 200000 + b"t" * 200000 + b"."  # tuples in tuples
        (folder / ".metadata").write_bytes(deep)
        self.refused("expected a Metadata", folder)
        # List i + 1 has list i twice: 2^60 ways lead to the first one.
        shared = b"\x80\x02]q\x000" + b"".join(b"]q%c(h%ch%ce0" % (i + 1, i, i) for i in range(60)) + b"h\x3c."
        self.refused("its values refer to each other so often", self.torch_file(shared))
        # Each name of the list's members begins with a key of a million bytes.
        self.refused("its values refer to each other so often", self.torch_file({"k" * 1_000_000: [None] * 100_000}))
        # A key that is written twice has the last value, as in Python.
        twice = b"\x80\x02}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u."
        self.assertEqual(list(self.listing(self.torch_file(twice))["objects"]), ["a"])
        # A tensor and a value of one name: which of them it is depends on their order.
        both = b"\x80\x02}(X\x01\0\0\0a" + pickled(tensor(A, "0"))[2:-1] + b"X\x01\0\0\0aK\x02u."
        self.refused("tensor 'a': the name is repeated", self.torch_file(both, A))

    def test_attributes_have_a_bound(self):
        """An instance has few attributes; a dictionary of many could be the state of many instances."""
        checkpoint = self.dcp()
        checkpoint.items["none"].state |= {f"key {i}": None for i in range(60)}
        checkpoint.write()
        self.listing("dcp")
        checkpoint.items["none"].state |= {f"key {i}": None for i in range(100)}
        checkpoint.write()
        self.refused(
            "'none': expected TensorStorageMetadata with properties, a size of at most 64 dimensions, and chunks",
            self.folder / "dcp",
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
        formats = json.loads(self.call("reshard-inspect --list-formats").stdout)
        names = ["safetensors", "dcp-safetensors", "dcp", "megatron", "torch-save"]
        self.assertEqual([each["name"] for each in formats], names)
        self.assertEqual([each["name"] for each in formats if each["chunks"]], ["dcp", "megatron"])
        self.assertEqual([each["name"] for each in formats if not each["split"]], ["torch-save"])
        self.fails("expected 0: ", "reshard-inspect --list-formats x")

    def test_usage(self):
        self.dcp().write()
        self.refused(
            "is a checkpoint; --rank, --explain, --simulate, --replicas and --verify need a plan",
            self.folder / "dcp",
            "--verify",
        )
        self.fails("no tensor and no object matches 'x*'", "reshard-inspect dcp --param=x*", code=1)
        (self.folder / "empty").mkdir()
        self.refused("not a checkpoint: expected '.metadata'", "empty")
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
                self.refused(found, "unread")
                shutil.rmtree(self.folder / "unread")
        for name, begin, found in (
            ("x.gguf", b"GGUF\x03\0\0\0more than sixteen bytes", "found GGUF, llama.cpp's format"),
            ("x.nemo", b"./model_config.yaml and more", "found an archive of NeMo"),
        ):
            (self.folder / name).write_bytes(begin)
            self.refused(found, name)
        for name in ("adapter_model", "rank-00000"):
            (self.folder / name).mkdir()
            safetensors(self.folder / name / f"{name}.safetensors", {"a": A}, None)
            text = f"found 1 safetensors file(s), such as '{name}.safetensors', expected 'model.safetensors'"
            self.refused(text, name)
        (self.folder / "legacy").mkdir()
        for path, named in (("x.pt", "x.pt"), ("legacy/model.pt", "legacy")):
            (self.folder / path).write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80")
            self.refused("is a file of torch.save in the form before PyTorch 1.6", named)
        (self.folder / "x.pt").write_bytes(b"%PDF-1.4 and more")
        for options in ((), ("--verify",)):
            self.refused("'x.pt' is neither a plan nor a checkpoint", "x.pt", *options)
        self.refused("its elements are not contiguous", self.torch_file({"t": tensor(A, "0", strides=(1, 7))}, A))
        self.refused("its storage 'archive/data/1' is missing", self.torch_file({"t": tensor(A, "1")}, A))
        self.refused("it lies outside its storage of 60 bytes", self.torch_file({"t": tensor(A, "0")}, A[:3]))


if __name__ == "__main__":
    unittest.main()
