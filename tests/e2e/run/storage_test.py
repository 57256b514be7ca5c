# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that every rank can access: each byte is read or written once, the work is balanced, and ranks exchange
bytes that several of them need. RESHARD_BIN: the folder of the commands."""

import itertools
import json
import re
import shutil
import unittest

import safetensors_io
from commands import FolderTest, mpirun, run

MODEL = """
version: 1
model:
  dtype: bf16
  index: {layer: 3}
  tensors:
    embed: [3000, 64]
    layers.{layer}.w: {shape: [512, 256], shard: {0: tp}}
    layers.{layer}.norm: [256]
    head: [3000, 64]
"""
SIZE = 2 * (2 * 3000 * 64 + 3 * (512 * 256 + 256))


class Storage(FolderTest):
    def compile(self, source, target, options="", *flags):
        self.write("job.yaml", f"{MODEL}source: {source}\ntarget: {target}\n{options}\n")
        self.call("reshard-compile job.yaml -o plan --verify-each --report=report", *flags)
        self.call("reshard-inspect plan --verify")
        return self.json("report")

    def run_command(self, command, *options):
        self.call(command, "plan", *options)

    def test_read_once(self):
        for mesh, options in (
            ("{tp: 2}", ""),
            ("{tp: 2, dp: 4}", ""),
            ("{tp: 4, dp: 4}", "options: {topology: {ranks_per_node: 4}}"),
            (
                "{tp: 1, dp: 6}",
                "options: {staging: 64KiB, topology: {ranks_per_node: 4, nics: {per_node: 2, rate: 1GB/s}}}",
            ),
        ):
            with self.subTest(mesh, options=options):
                report = self.compile("{storage: files}", f"{{mesh: {mesh}}}", options)
                self.assertEqual(report["bytes"]["storage"], SIZE)
                self.assertEqual(report["bytes"]["storage"] + report["bytes"]["remote"], report["bytes"]["target"])
                self.assertEqual(report["bytes"]["relayed"], report["bytes"]["remote"])
                self.assertLessEqual(
                    report["balance"]["storage_max"], 1.01 * report["balance"]["storage_bound"] + (256 << 10)
                )
                self.call("reshard-exec plan --synthesize --check")
                source, target = self.folder / "in", self.folder / "out"
                self.run_command("reshard-exec", "--synthesize", f"--source={source}")
                self.run_command("reshard-exec", f"--source={source}", f"--target={target}", "--check")
                for folder in (source, target):
                    shutil.rmtree(folder)

    def test_exchanges(self):
        hops = {
            "p2p": "0 -> 1, 0 -> 2, 0 -> 3, 0 -> 4",
            "broadcast": "0 -> 1, 0 -> 2, 1 -> 3, 0 -> 4",
            "gather-rounds": "0 -> 1, 1 -> 2, 2 -> 3, 3 -> 4",
            "nodes": "0 -> 1, 0 -> 2, 0 -> 3, 0 -> 4",
        }
        for algorithm in ("optimum", "megatron"):
            for exchange, route in hops.items():
                with self.subTest(exchange, algorithm=algorithm):
                    report = self.compile(
                        "{storage: files}",
                        "{mesh: {tp: 1, dp: 5}}",
                        f"options: {{exchange: {exchange}}}",
                        f"--algorithm={algorithm}",
                    )
                    self.assertEqual(report["bytes"]["storage"], SIZE)
                    self.assertEqual(report["bytes"]["remote"], 4 * SIZE)
                    self.prints(f"route 0 {route}\n", f"reshard-compile job.yaml --emit=ir --algorithm={algorithm}")
                    self.call("reshard-exec plan --synthesize --check")
        self.write(
            "job.yaml", f"{MODEL}source: {{storage: f}}\ntarget: {{mesh: {{tp: 1}}}}\noptions: {{exchange: ring}}\n"
        )
        self.fails(
            "error: expected auto, nodes, p2p, broadcast or gather-rounds for 'exchange', found 'ring'",
            "reshard-compile job.yaml -o plan",
        )

    def test_auto_is_the_exchange_of_least_time(self):
        # One shard that all ranks need. Inside one node, a tree or a ring is faster than copies from its reader;
        # between nodes, each byte enters a node once.
        one, many = "model: {dtype: u8, tensors: {w: {opaque: %d}}}", MODEL.split("version: 1\n")[1]
        for model, mesh, topology, expected in (
            (one % 64, "{dp: 16}", "{ranks_per_node: 16}", "nodes"),
            (one % (64 << 20), "{dp: 16}", "{ranks_per_node: 16}", "gather-rounds"),
            (one % (64 << 20), "{dp: 16}", "{ranks_per_node: 4}", "nodes"),
            (many, "{tp: 1, dp: 4}", "{ranks_per_node: 4}", "nodes"),
        ):
            with self.subTest(model, topology=topology):
                times = {}
                for exchange in ("auto", "nodes", "p2p", "broadcast", "gather-rounds"):
                    self.write(
                        "job.yaml",
                        f"version: 1\n{model}\nsource: {{storage: files}}\ntarget: {{mesh: {mesh}}}\n"
                        f"options: {{exchange: {exchange}, topology: {topology}}}\n",
                    )
                    self.write("topology.yaml", topology)
                    for output, emit in (("plan", "plan"), ("ir", "ir")):
                        self.call("reshard-compile job.yaml -o", output, f"--emit={emit}")
                    simulated = self.call("reshard-inspect plan --simulate=topology.yaml --format=json")
                    times[exchange] = json.loads(simulated.stdout)["seconds"]
                    if exchange == "auto":
                        self.assertIn(f'exchange "{expected}"', (self.folder / "ir").read_text())
                self.assertLessEqual(times["auto"], 1.1 * min(times.values()), times)

    def test_several_targets(self):
        """Targets on equal, nested, overlapping and permuted ranks, and in files, with every exchange and algorithm."""
        model = (
            "{dtype: bf16, index: {e: 3}, tensors: {t: [5], 'q.{e}': [4, 3], 'k.{e}': [2, 3]}, layouts: {hf: "
            "{params: same}, "
            "packed: {params: {t: {holds: t}, qk: {stack: e, interleave: {groups: 2, of: ['q.{e}', 'k.{e}']}}}}}}"
        )

        def targets(*lists):
            return [f"{{layout: packed, mesh: {{x: {len(ranks)}}}, ranks: {ranks}}}" for ranks in lists]

        files = "{layout: hf, storage: out}"
        cases = [
            ("{layout: hf, storage: source}", each)
            for each in (
                targets([0, 1, 2, 3], [0, 1, 2, 4]),
                targets([0, 1], [0, 2]),
                targets([0, 1], [0, 1]),
                targets([0, 1, 2], [0, 1]),
                targets([0, 1], [0, 2, 1], [3, 0]),
                targets([0, 1], [1, 0]),
                [*targets([1, 2]), files, *targets([1, 3])],
            )
        ]
        cases += [
            (source, [*targets(*lists), files])
            for source in ("{layout: hf, mesh: {}}", "{layout: packed, mesh: {x: 2}}")
            for lists in ([[1]], [[2, 3], [3, 1]])
        ]
        for source, all in cases:
            reads = "storage" in source
            for algorithm, exchange, nodes in itertools.product(
                ("optimum", "megatron"),
                ("auto", "nodes", "p2p", "broadcast", "gather-rounds") if reads else ("",),
                (0, 1, 2),
            ):
                options = ([f"exchange: {exchange}"] if exchange else []) + (
                    [f"topology: {{ranks_per_node: {nodes}}}"] if nodes else []
                )
                with self.subTest(source=source, targets=all, algorithm=algorithm, options=options):
                    self.write(
                        "job.yaml",
                        f"version: 1\nmodel: {model}\nsource: {source}\ntarget: "
                        f"[{', '.join(all)}]\noptions: {{{', '.join(options)}}}\n",
                    )
                    self.call(f"reshard-compile job.yaml -o plan --verify-each --algorithm={algorithm}")
                    self.call("reshard-inspect plan --verify")
                    self.call("reshard-exec plan --synthesize --check")

    def test_a_target_without_params(self):
        """A checkpoint all of whose params are ignored, or without elements, is right in every format."""
        source = self.folder / "source"
        source.mkdir()
        safetensors_io.write(source / "model.safetensors", {"w": ("bf16", [2], b"abcd"), "none": ("bf16", [0, 3], b"")})
        for format, ignore in itertools.product(
            ("safetensors", "dcp", "dcp-safetensors", "megatron", "torch-save"), ("'*'", "[w]")
        ):
            with self.subTest(format, ignore=ignore):
                target = self.folder / f"{format}-{'none' if 'w' in ignore else 'all'}"
                self.write(
                    "job.yaml",
                    "version: 1\nmodel: {dtype: bf16, tensors: {w: [2], none: [0, "
                    "3]}, layouts: {hf: {params: same}}}\n"
                    f"source: {{layout: hf, storage: source}}\ntarget: {{layout: hf, "
                    f"storage: {{folder: out, format: {format}}}, ignore: "
                    f"{ignore}}}\n",
                )
                self.call("reshard-compile job.yaml -o plan")
                self.run_command("reshard-exec", f"--target={target}", "--check", "--allow=extra")
                self.assertTrue(target.is_dir())
                if format == "dcp" or format == "megatron" or ignore == "[w]":
                    listing = json.loads(run("reshard-inspect", target, "--format=json").stdout)
                    self.assertEqual(list(listing["tensors"]), ["none"] if ignore == "[w]" else [])

    def test_opaque_objects(self):
        # Megatron's ShardedObjects: exactly one rank reads or writes each, as a whole.
        model = (
            'version: 1\nmodel: {dtype: bf16, index: {layer: 8}, tensors: {"layers.{layer}.extra_state": {opaque: '
            "1000003}, rng: {opaque: 5000}, w: [1000, 100]}}\n"
        )
        for source, target in (("{storage: files}", "{mesh: {dp: 8}}"), ("{mesh: {dp: 8}}", "{storage: files}")):
            self.write("job.yaml", f"{model}source: {source}\ntarget: {target}\n")
            for output, emit in (("plan", "plan"), ("ir", "ir")):
                self.call("reshard-compile job.yaml -o", output, f"--emit={emit}", "--verify-each", "--report=report")
            self.call("reshard-inspect plan --verify")
            self.call("reshard-exec plan --synthesize --check")
            self.assertEqual(self.json("report")["bytes"]["storage"], 8 * 1000003 + 5000 + 200000)
            overlaps = [line for line in (self.folder / "ir").read_text().splitlines() if line.startswith("overlap ")]
            whole = [number for number, line in enumerate(overlaps) if "extra_state" in line or "rng" in line]
            transfers = [line for line in (self.folder / "ir").read_text().splitlines() if line.startswith("transfer ")]
            self.assertEqual([line for line in transfers if int(line.split()[1]) in whole and " rows " in line], [])
            layers = [line for line in transfers if "extra_state" in overlaps[int(line.split()[1])]]
            self.assertEqual(len(layers), 8)  # eight ranks, one layer's object each

    def test_read_once_into_each_node(self):
        report = self.compile(
            "{storage: files}", "{mesh: {tp: 1, dp: 8}}", "options: {exchange: nodes, topology: {ranks_per_node: 4}}"
        )
        self.assertEqual(
            report["bytes"]["between_nodes"], SIZE
        )  # each byte is read on one of two nodes and sent to the other once

    def test_written_once(self):
        for mesh in ("{tp: 2, dp: 4}", "{tp: 1, dp: 6}"):
            with self.subTest(mesh):
                report = self.compile(f"{{mesh: {mesh}}}", "{storage: files}")
                self.assertEqual(report["bytes"]["storage"], SIZE)
                self.assertEqual(report["bytes"]["remote"], 0)
                self.assertLessEqual(report["balance"]["storage_max"], 1.01 * report["balance"]["storage_bound"] + 512)
                self.call("reshard-exec plan --synthesize --check")


class Processes(FolderTest):
    """From files to files: the processes share out the bytes. Files are mapped, so system calls do not show what a
    process reads: the bytes are those that the steps of its rank name, and the run checks the result."""

    MODEL = """version: 1
model:
  dtype: bf16
  index: {layer: 3}
  tensors:
    layers.{layer}.rows: {shape: [480, 256], shard: {0: tp}}
    layers.{layer}.columns: {shape: [256, 480], shard: {1: tp}}
    layers.{layer}.norm: [256]
"""
    RUN = "reshard-exec plan --transport=mpi --target=out --check"
    ROW, TENSOR = 2 * 480, 2 * 480 * 256  # bytes of the longest row of a shard, and of a matrix
    SHARDED, WHOLE = 3 * 2 * 2 * 480 * 256, 3 * 2 * 256  # bytes; every target rank has the norms

    def read(self, rank):
        listing = self.call(f"reshard-inspect plan --rank={rank}").stdout
        self.assertNotRegex(listing, "send|receive")
        return sum(int(count) for count in re.findall(r"<- source .*? (\d+) bytes: ", listing))

    def checked(self, text, ranks):
        found = [int(count) for count in re.findall("rank [0-9]: ([0-9]+) bytes right", text)]
        self.assertEqual(len(found), ranks)
        return found

    def test_each_byte_is_read_once(self):
        for ranks in (2, 3, 4):
            for source in ("{storage: in}", "{storage: in, mesh: {tp: 2}}"):
                with self.subTest(source, processes=ranks):
                    self.write(
                        "job.yaml",
                        f"{self.MODEL}source: {source}\ntarget: {{storage: out, mesh: {{tp: {ranks}}}}}\n"
                        f"world: {ranks}\n",
                    )
                    self.call("reshard-compile job.yaml -o plan")
                    read = [self.read(rank) for rank in range(ranks)]
                    self.assertEqual(sum(read), self.SHARDED + ranks * self.WHOLE)
                    self.assertLessEqual(max(read) - min(read), self.ROW)
                    self.call("reshard-exec plan --synthesize --source=in")
                    done = mpirun(ranks, self.RUN, cwd=self.folder)
                    self.assertEqual(sum(self.checked(done.stdout, ranks)), self.SHARDED + ranks * self.WHOLE)
                    for folder in ("in", "out"):
                        shutil.rmtree(self.folder / folder)

    def test_a_checkpoint_is_written_by_all(self):
        model = self.MODEL.replace(", shard: {0: tp}", "").replace(", shard: {1: tp}", "") + "    big: [1024, 1120]\n"
        big = 2 * 1024 * 1120  # one contiguous run, longer than 1 MiB
        all, rows = self.SHARDED + self.WHOLE + big, self.SHARDED // 2 + big
        jobs = [(format, "", all) for format in ("safetensors", "dcp", "dcp-safetensors", "megatron", "torch-save")]
        jobs.append(("dcp", ", dtype: fp8_e4m3, convert: rne", all // 2))
        jobs.append(
            ("safetensors", ", quantize: {format: mxfp8, only: ['*.rows', big]}", all - rows + rows // 2 * 33 // 32)
        )
        for format, dtype, written in jobs:
            with self.subTest(format, dtype=dtype):
                target = f"{{storage: {{folder: out, format: {format}}}{dtype}}}"
                self.write("job.yaml", f"{model}source: {{storage: in}}\ntarget: {target}\nworld: 3\n")
                self.call("reshard-compile job.yaml -o plan")
                self.call("reshard-inspect plan --verify")
                read = [self.read(rank) for rank in range(3)]
                self.assertEqual(sum(read), all)
                self.assertLessEqual(max(read) - min(read), self.TENSOR)  # a shorter run is not cut
                self.call("reshard-exec plan --synthesize --source=in")
                done = mpirun(3, self.RUN, cwd=self.folder)
                checked = self.checked(done.stdout, 3)
                if "quantize" not in dtype:  # the first process checks quantized params
                    self.assertGreater(min(checked), 0)
                self.assertEqual(sum(checked), written)
                self.write("job.yaml", f"{model}source: {{storage: in}}\ntarget: {target}\n")
                self.call("reshard-compile job.yaml -o plan")
                self.call("reshard-exec plan --target=alone")
                for path in sorted((self.folder / "alone").iterdir()):
                    self.assertEqual((self.folder / "out" / path.name).read_bytes(), path.read_bytes(), path.name)
                for folder in ("in", "out", "alone"):
                    shutil.rmtree(self.folder / folder)


class Megatron(FolderTest):
    """The assignment of Megatron-Core's `distribute_shards_to_ranks` for tp 2, dp 4 and fp32: repl1 and repl2 have 10
    elements on a TP shard, B 20 on a rank, C 100, D 1000, E 100."""

    MODEL = """
version: 1
model:
  dtype: fp32
  tensors:
    repl1: {shape: [20], shard: {0: tp}}
    repl2: {shape: [20], shard: {0: tp}}
    B: {shape: [160], shard: {0: [dp, tp]}}
    C: [100]
    D: [1000]
    E: [100]
"""
    RANKS, FILES = "{mesh: {tp: 2, dp: 4}}", "{storage: files}"

    run_command = Storage.run_command

    def assigned(self, read, group="", algorithm="megatron"):
        """{tensor: [ranks that read or write it]}, from the plan's transfers."""
        options = f"--algorithm={algorithm} --verify-each --report=report"
        source, target = (self.FILES, self.RANKS) if read else (self.RANKS, self.FILES)
        self.write("job.yaml", f"{self.MODEL}source: {source}\ntarget: {target}\n{group}\n")
        for output, emit in (("plan", "plan"), ("ir", "ir")):
            self.call(f"reshard-compile job.yaml {options} -o {output} --emit={emit}")
        self.call("reshard-inspect plan --verify")
        self.call("reshard-exec plan --synthesize --check")
        overlaps, found = [], {}
        for line in (self.folder / "ir").read_text().splitlines():
            if line.startswith("overlap "):
                overlaps.append(line.split("// ")[1].split(" ->")[0])
            elif line.startswith("transfer "):
                words = line.split()
                mesh_rank = int(words[words.index("to") + 1] if read else words[words.index("from") + 1])
                found.setdefault(overlaps[int(words[1])], []).append(mesh_rank)
        return {name: sorted(mesh_ranks) for name, mesh_ranks in found.items()}

    def test_world(self):
        for read in (True, False):
            with self.subTest(read=read):
                self.assertEqual(
                    self.assigned(read),
                    {"B": list(range(8)), "repl1": [0, 1], "repl2": [2, 3], "D": [4], "C": [5], "E": [6]},
                )

    def test_groups(self):
        # DP groups: ranks 0, 2, 4, 6 of tp 0 and 1, 3, 5, 7 of tp 1; "rank in group" n of the table is mesh rank 2n or
        # 2n + 1.
        group = "options: {group: dp}"
        both = self.assigned(True, group)
        tp0 = {"B": [0, 2, 4, 6], "D": [0], "C": [2], "E": [4], "repl1": [6], "repl2": [6]}
        tp1 = {"B": [1, 3, 5, 7], "repl1": [1], "repl2": [3], "D": [5], "C": [7], "E": [1]}
        self.assertEqual(both, {name: sorted(tp0[name] + tp1[name]) for name in tp0})
        saved = self.assigned(False, group)
        self.assertEqual(
            saved, {name: sorted(tp0[name] + (tp1[name] if name in ("B", "repl1", "repl2") else [])) for name in tp0}
        )

    def test_cross_reads(self):
        # dp8 {a: [0], b: [1], c: all} -> a 0, b 1, c 2; tp8: c is read from rank 0 by all others.
        self.MODEL = (
            "version: 1\nmodel: {dtype: fp32, tensors: {ab: [16], c: [8]}, layouts: {files: {params: same}, "
            "ranks: {params: same, shard: {ab: {0: {axis: dp, sizes: [8, 8, 0, 0, 0, 0, 0, 0]}}}}}}\n"
        )
        self.FILES, self.RANKS = "{layout: files, storage: files}", "{layout: ranks, mesh: {dp: 8}}"
        self.assertEqual(self.assigned(True), {"ab": [0, 1], "c": [2]})

    def test_the_optimum_is_no_worse(self):
        report = {}
        for algorithm in ("megatron", "optimum"):
            self.assigned(True, algorithm=algorithm)
            report[algorithm] = self.json("report")["balance"]
        self.assertEqual(report["megatron"]["storage_max"], 4 * 1020)  # B's 20 and D's 1000
        self.assertEqual(report["optimum"]["storage_megatron"], report["megatron"]["storage_max"])
        self.assertLessEqual(report["optimum"]["storage_max"], 1.01 * report["optimum"]["storage_bound"] + 64)

    def test_options_without_effect_are_refused(self):
        ranks, files, megatron = self.RANKS, self.FILES, "--algorithm=megatron"
        for source, target, options, flags, error in (
            (
                ranks,
                ranks,
                "{group: dp}",
                "",
                "job.yaml:14:18: error: 'group' distributes the reading and writing of files, but no endpoint has "
                "'storage'",
            ),
            (
                ranks,
                files,
                "{exchange: p2p}",
                "",
                "job.yaml:14:21: error: 'exchange' applies to a source that is read from files, but this source has "
                "no 'storage'",
            ),
            (ranks, files, "{group: dp}", "", f"error: 'group' has an effect on writing only with {megatron}"),
            (ranks, ranks, "{staging: 1MiB}", megatron, f"error: {megatron} distributes reads and writes of files"),
            (
                files,
                ranks,
                "{group: dp}",
                f"{megatron} --keep=plan",
                "but --keep pins it: expected only one of the two options",
            ),
        ):
            with self.subTest(error):
                self.write("job.yaml", f"{self.MODEL}source: {source}\ntarget: {target}\noptions: {options}\n")
                self.fails(error, f"reshard-compile job.yaml -o out {flags}")
                self.assertFalse((self.folder / "out").exists())

    def test_refused(self):
        self.write("job.yaml", f"{self.MODEL}source: {self.FILES}\ntarget: {self.RANKS}\noptions: {{group: [dq]}}\n")
        self.fails(
            "job.yaml:14:19: error: unknown axis 'dq' in 'group'; known here: tp, dp",
            "reshard-compile job.yaml -o plan",
        )


if __name__ == "__main__":
    unittest.main()
