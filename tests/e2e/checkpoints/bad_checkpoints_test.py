# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints as the source of a run, of reshard-inspect, reshard-compile, reshard-exec and reshard-convert:
each has exit code 2 and one error, and nothing is written."""

import hashlib
import json
import os
import shutil
import threading
import unittest
from collections.abc import Callable

import numpy as np
from safetensors.numpy import save_file

from commands import run
from conversions import ConvertTest
from torch_formats import Dcp, archive, safetensors, size, tensor

A = np.arange(35, dtype=np.float32).reshape(7, 5)
B = np.arange(12, dtype=np.int64).reshape(3, 4)
MODEL = "{tensors: {a: {shape: [7, 5], dtype: fp32}, b: {shape: [3, 4], dtype: i64}}, layouts: {same: {params: same}}}"
SHARDS = [f"shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2)]
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


class BadCheckpoints(ConvertTest):
    def setUp(self) -> None:
        super().setUp()
        self.source = self.folder / "source"

    def dcp(self, change: Callable[[Dcp], object] = lambda checkpoint: None) -> Dcp:
        """`a` in the rows 0..3 and 4..6 of two files, and `b`."""
        checkpoint = Dcp(self.source)
        for rank, rows in enumerate((slice(0, 4), slice(4, 7))):
            checkpoint.chunk("a", A.shape, (rows.start, 0), A[rows], f"__{rank}_0.distcp")
        checkpoint.chunk("b", B.shape, (0, 0), B)
        change(checkpoint)
        checkpoint.write()
        return checkpoint

    def megatron(self, **format: object) -> None:
        """With hashes of all files, as Megatron-Core 0.19 writes them."""
        self.dcp()
        (self.source / "common.pt").write_bytes(archive({}, []))
        (self.source / "metadata.json").write_text(json.dumps(BACKEND | format))
        self.manifest()

    def manifest(self, leave_out: str = "", **change: object) -> None:
        (self.source / "integrity.json").unlink(missing_ok=True)
        files = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.source.iterdir()
            if path.name != leave_out
        }
        (self.source / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files} | change))

    def dcp_safetensors(self) -> None:
        self.source.mkdir()
        safetensors(self.source / SHARDS[0], {"a": A[:4], "b": B}, {"a": [0, 0], "b": [0, 0]})
        safetensors(self.source / SHARDS[1], {"a": A[4:]}, {"a": [4, 0]})

    def torch_save(self) -> None:
        self.source.write_bytes(archive({"a": tensor(A, "0"), "b": tensor(B, "1")}, [A, B]))

    def hugging_face(self) -> None:
        self.source.mkdir()
        save_file({"a": A}, self.source / "model-1.safetensors")
        save_file({"b": B}, self.source / "model-2.safetensors")
        self.index()

    def index(self, **change: str) -> None:
        names = {"a": "model-1.safetensors", "b": "model-2.safetensors"} | change
        (self.source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    def cut(self, name: str = "", bytes: int = 1) -> None:
        """Removes the end of a file."""
        path = self.source / name if name else self.source
        path.write_bytes(path.read_bytes()[:-bytes])

    def flip(self, name: str) -> None:
        """Changes a bit of a file where no reader without hashes finds it: in the data of the last tensor."""
        path = self.source / name
        data = bytearray(path.read_bytes())
        data[data.rindex(A[6].tobytes()) if name.startswith("__1") else data.rindex(b"little")] ^= 1
        path.write_bytes(data)

    def compile(self) -> None:
        self.job(MODEL, "{layout: same, storage: source}", "{layout: same, storage: out}")
        self.call("reshard-compile job.yaml -o p.rplan")

    def contents(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()
        }

    def refused(
        self, make: Callable[[], object], damage: Callable[[], object], error: str, blind: tuple[str, ...] = ()
    ) -> None:
        """A plan is compiled for a checkpoint, which is then damaged. `blind`: commands that do not
        read what is damaged."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        make()
        self.compile()
        damage()
        before = self.contents()
        commands = {
            "exec": lambda: self.call("reshard-exec p.rplan --allow=extra", code=2),
            "convert": lambda: self.convert("source out --to=safetensors --allow=extra", code=2),
            "digest": lambda: self.call("reshard-digest source", code=2),
            "inspect": lambda: self.call("reshard-inspect source", code=2),
            "compile": lambda: self.call("reshard-compile job.yaml -o q.rplan", code=2),
        }
        for name in sorted(commands.keys() - set(blind)):
            with self.subTest(error=error, command=name):
                text = commands[name]().stderr
                self.assertIn(error, text.replace(f"{self.folder}/", ""))
                self.assertEqual(text.count("error:"), 1, text)
                self.assertEqual(self.contents(), before)
                self.assertEqual({path.name for path in self.folder.iterdir()}, {"source", "job.yaml", "p.rplan"})

    def test_dcp(self):
        def chunk(checkpoint: Dcp, number: int) -> dict:
            return checkpoint.items["a"].state["chunks"][number].state

        def overlapping(checkpoint: Dcp) -> None:
            chunk(checkpoint, 1).update(offsets=size(3, 0))
            checkpoint.places[1][0].state.update(offset=size(3, 0))

        entry = lambda checkpoint, number: checkpoint.places[number][1].state
        for error, change in (
            (
                ".metadata': tensor 'a': the chunks [0..3, 0..4] in '__0_0.distcp' and [3..5, 0..4] in "
                "'__1_0.distcp' overlap",
                overlapping,
            ),
            (".metadata': tensor 'a': its chunks have 20 of 35 elements", lambda c: c.items["a"].state["chunks"].pop()),
            ("__1_0.distcp': truncated: 'a' has bytes 9", lambda c: entry(c, 1).update(offset=9)),
            (
                ".metadata': 'a' is stored with stream transforms (transform_descriptors)",
                lambda c: entry(c, 0).update(transform_descriptors=["zstd/1"]),
            ),
            (".metadata': unknown version '2.0.0', expected '1.0.0'", lambda c: setattr(c, "version", "2.0.0")),
            (".metadata': unknown version, which is not a text, expected '1.0.0'", lambda c: setattr(c, "version", 1)),
        ):
            self.refused(self.dcp, lambda change=change: self.dcp(change), f"'source/{error}")
        self.refused(self.dcp, lambda: self.cut("__1_0.distcp"), "'source/__1_0.distcp': truncated: 'a' has bytes 0 to")
        self.refused(self.dcp, lambda: (self.source / "__1_0.distcp").unlink(), "source/__1_0.distcp': No such file")
        self.refused(self.dcp, lambda: self.cut(".metadata"), "'source/.metadata': ")

    def test_a_dcp_without_a_version(self):
        self.dcp(lambda checkpoint: setattr(checkpoint, "version", None))
        run("reshard-inspect", self.source)

    def test_dcp_safetensors(self):
        def version() -> None:
            path = self.source / SHARDS[1]
            path.write_bytes(path.read_bytes().replace(b'"DCP_VERSION": "1.0"', b'"DCP_VERSION": "9.0"'))

        self.refused(self.dcp_safetensors, version, f"'source/{SHARDS[1]}': unknown DCP_VERSION '9.0', expected '1.0'")
        self.refused(
            self.dcp_safetensors,
            lambda: safetensors(self.source / SHARDS[1], {"a": A[4:]}, {"a": [3, 0]}),
            "'source': tensor 'a': the chunks",
        )
        self.refused(self.dcp_safetensors, lambda: self.cut(SHARDS[1]), f"'source/{SHARDS[1]}': ")

    def test_megatron(self):
        for error, format in (
            ("unknown sharded_backend_version '2', expected '1'", {"sharded_backend_version": 2}),
            ("unknown sharded_backend 'zarr', expected 'torch_dist'", {"sharded_backend": "zarr"}),
            (
                "unknown common_backend_version, neither a text nor a number, expected '1'",
                {"common_backend_version": None},
            ),
        ):
            change = lambda format=format: self.megatron(**format)
            self.refused(self.megatron, change, f"'source/metadata.json': {error}")
        for error, damage in (
            ("'sharded_backend' is missing", lambda: (self.source / "metadata.json").write_text("{}")),
            ("damaged: not a JSON object", lambda: self.cut("metadata.json")),
        ):
            self.refused(self.megatron, damage, f"'source/metadata.json': {error}")

    def test_hashes_that_do_not_match(self):
        for file in ("__1_0.distcp", "common.pt"):
            self.refused(
                self.megatron,
                lambda file=file: self.flip(file),
                f"'source/{file}': its SHA-256 hash is ",
                blind=("inspect", "compile"),
            )

    def test_a_list_of_hashes_that_does_not_match(self):
        other = self.source / "other.txt"

        def missing() -> None:
            other.touch()
            self.manifest()
            other.unlink()

        for error, damage in (
            (" names the file 'other.txt', which is missing", missing),
            (" names the file 'metadata.json', which is missing", lambda: (self.source / "metadata.json").unlink()),
            (" has no hash of '__1_0.distcp', a file of the checkpoint", lambda: self.manifest("__1_0.distcp")),
            (": the algorithm is 'md5', expected 'sha256'", lambda: self.manifest(algorithm="md5")),
            (": 'files' is missing", lambda: (self.source / "integrity.json").write_text("{}")),
            (": file 'x': expected 64 lower-case hexadecimal digits", lambda: self.manifest(files={"x": "12"})),
            (
                ": invalid file name '../x', expected a file in the same folder",
                lambda: self.manifest(files={"../x": "0" * 64}),
            ),
            (": damaged: not a JSON object", lambda: self.cut("integrity.json")),
        ):
            self.refused(self.megatron, damage, f"'source/integrity.json'{error}")

    def test_hashes_that_match(self):
        self.megatron()
        self.compile()
        text = self.call("reshard-exec p.rplan --allow=extra --check").stdout
        self.assertRegex(text, r"verified +5 file\(s\) have the hashes in integrity.json")
        self.check("out", {"a": A, "b": B})

    def test_torch_save(self):
        self.refused(self.torch_save, lambda: self.cut(bytes=30), "'source': ")

    def test_an_index(self):
        for error, damage in (
            ("source/model-3.safetensors': No such file", lambda: self.index(b="model-3.safetensors")),
            (
                "'source/model-1.safetensors' has 1 tensors, but the index lists 2",
                lambda: self.index(b="model-1.safetensors"),
            ),
            ("'source/model-2.safetensors': ", lambda: self.cut("model-2.safetensors")),
        ):
            self.refused(self.hugging_face, damage, error, blind=("compile",))  # which needs no files of safetensors

    def test_files_of_another_kind(self):
        """A FIFO, a folder, a device and a link in a loop in place of each file."""

        def replace(name: str, kind: str) -> None:
            path = self.source / name if name else self.source
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "folder":
                path.mkdir()
            else:
                path.symlink_to("/dev/zero" if kind == "device" else path.name)

        for make, names, blind in (
            (self.dcp, (".metadata", "__1_0.distcp"), ()),
            (self.megatron, ("common.pt", "metadata.json", "integrity.json", "__0_0.distcp"), ()),
            (self.dcp_safetensors, SHARDS, ("compile",)),
            (self.torch_save, ("",), ("compile",)),
            (self.hugging_face, ("model.safetensors.index.json", "model-2.safetensors"), ("compile",)),
        ):
            for name in names:
                for kind in ("fifo", "folder", "device", "loop"):
                    if name or kind in ("fifo", "device"):  # of the others the error says that there is no checkpoint
                        path = f"source/{name}".rstrip("/")
                        error = (
                            f"cannot open '{path}': Too many levels of symbolic links"
                            if kind == "loop"
                            else f"'{path}' is not a regular file"
                        )
                        # a job without a known format needs no files
                        self.refused(make, lambda name=name, kind=kind: replace(name, kind), error, blind)

    def test_a_link_that_leads_nowhere(self):
        """It is not as if there were no such file: the checkpoint would be read as one of another format, or without
        its objects."""

        def link(name: str) -> None:
            (self.source / name).unlink()
            (self.source / name).symlink_to("nowhere")

        for make, name, blind in (
            (self.megatron, "common.pt", ()),
            (self.megatron, "metadata.json", ()),
            (self.megatron, "integrity.json", ()),
            (self.hugging_face, "model.safetensors.index.json", ("compile",)),
        ):
            self.refused(
                make, lambda name=name: link(name), f"cannot open 'source/{name}': No such file or directory", blind
            )

    def test_files_that_change_while_they_are_read(self):
        """Another program writes to `.metadata`, to an index and to the header of a file again and again: each command
        reads the old or the new file, or has one error."""

        def changing(make: Callable[[], object], name: str) -> None:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            make()
            path = self.source / name if name else self.source
            whole = path.read_bytes()
            done = threading.Event()

            def change() -> None:
                with path.open("r+b", buffering=0) as file:
                    while not done.is_set():
                        for bytes in (len(whole) // 2, 0, len(whole)):
                            file.truncate(bytes)
                            file.seek(0)
                            file.write(whole[:bytes])

            thread = threading.Thread(target=change)
            thread.start()
            try:
                for _ in range(40):
                    for command in ("reshard-inspect", "reshard-digest"):
                        found = self.call(command, "source", code=None)
                        if found.returncode == 3:  # while the data were read, not the header
                            self.assertIn("the file was truncated during the run", found.stderr)
                        else:
                            self.assertIn(found.returncode, (0, 1, 2), f"{name}: {found.stderr}")
                        self.assertEqual(found.stderr.count("\n"), int(found.returncode != 0), found.stderr)
            finally:
                done.set()
                thread.join()

        def many(checkpoint: Dcp) -> None:
            for i in range(2000):
                checkpoint.chunk(f"t{i}", B.shape, (0, 0), B)

        def index() -> None:
            self.source.mkdir()
            save_file({f"t{i}": B for i in range(2000)}, self.source / "model-1.safetensors")
            (self.source / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {f"t{i}": "model-1.safetensors" for i in range(2000)}})
            )

        changing(lambda: self.dcp(many), ".metadata")
        changing(index, "model.safetensors.index.json")
        changing(lambda: self.source.write_bytes(archive({f"t{i}": tensor(B, "0") for i in range(2000)}, [B])), "")

    def test_names_with_control_characters(self):
        """A terminal gets none from a file: neither in listings nor in errors."""
        names = ("w\x1b[31m", "b\x07\n2", "c\x9b1m\x7f")

        def change(checkpoint: Dcp) -> None:
            for name in names:
                checkpoint.chunk(name, A.shape, (0, 0), A)
            checkpoint.object("o\x1b]0;t\x07\r", b"1")

        self.dcp(change)
        self.write(
            "model.yaml",
            "dtype: fp32\ntensors: {a: [7, 5], b: {shape: [3, 4], dtype: i64}}\nlayouts: {all: {params: same}}\n",
        )
        self.job("model.yaml", "{layout: all, storage: source}", "{layout: all, storage: out}")
        self.call("reshard-compile job.yaml -o p.rplan")
        known = ("--model=model.yaml", "--source-layout=all", "--target-layout=all", "--to=safetensors")
        in_text = ("w\\x1b[31m", "b\\x07\\n2")
        for command, shown in (
            (lambda: self.call("reshard-inspect source"), (*in_text, "c\\xc2\\x9b1m\\x7f", "o\\x1b]0;t\\x07\\r")),
            (lambda: self.call("reshard-digest source"), (*in_text, "c\\xc2\\x9b1m\\x7f")),
            (
                lambda: self.call("reshard-compile --describe=source"),
                ('"w\\x1b[31m"', '"b\\x07\\x0a2"', '"c\\x9b1m\\x7f"'),
            ),
            (lambda: self.call("reshard-exec p.rplan", code=2), ("b\\x07\\n2",)),
            (
                lambda: self.convert("source out --to=safetensors", code=2),
                ("control character in the name of a tensor",),
            ),
            (lambda: self.convert("source out", *known, code=2), (*in_text, "c\\x9b1m\\x7f")),
        ):
            done = command()
            text = done.stdout + done.stderr
            self.assertNotRegex(text.replace("\n", ""), r"[\x00-\x1f\x7f-\x9f]")
            for name in shown:
                with self.subTest(name=name):
                    self.assertIn(name, text)

    def test_a_target_that_exists(self):
        self.megatron()
        self.compile()
        self.flip("__1_0.distcp")
        (self.folder / "out").mkdir()
        (self.folder / "out/model.safetensors").write_bytes(b"of an earlier run")
        before = self.contents()
        self.call("reshard-exec p.rplan --allow=extra", code=2)
        self.convert("source out --to=safetensors --allow=extra", code=2)
        self.assertEqual(self.contents(), before)


if __name__ == "__main__":
    unittest.main()
