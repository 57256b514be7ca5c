# SPDX-License-Identifier: Apache-2.0
"""The simulator compared with closed formulas: one pair, packing, incast, ring, all-to-all, a chain, a shared NIC,
slots of different sizes; its memory; engine replicas that pull, also on the shipped topologies, against their lower
bound. RESHARD_BIN: the folder of the commands."""

import json
import os
import re
import sys
import unittest

from commands import ROOT, FolderTest, run, words_of

LINK, NIC, COPY = 100e9, 10e9, 200e9
LINK_LATENCY, NIC_LATENCY = 5e-6, 50e-6
ROWS, COLUMNS = 1 << 10, 1 << 14  # of bf16: 32 MiB
SIZE = 2 * ROWS * COLUMNS
RANGE = 4 << 20  # bytes that an engine replica reads at a time
PROTOCOL = 6 * NIC_LATENCY  # three round trips
# Runs a command, and prints the KiB of its peak memory, which is that of the child of a small Python process.
PEAK = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)

SMALL, FULL = "RESHARD_SMALL" in os.environ, "RESHARD_FULL" in os.environ
# A job and its ranks by topology: the engine begins at a node.
POOLS = {
    ("clusters/llama3-70b-48-to-16x8", "h100x8"): "48..55",
    ("clusters/llama3-70b-48-to-16x8", "gb200-nvl72"): "72..79",
    ("clusters/kimi-k2-256-to-4x128", "h100x8"): "256..383",
    ("clusters/kimi-k2-256-to-4x128", "gb200-nvl72"): "288..415",
    ("clusters/kimi-k2-256-to-4x32", "h100x8"): "256..287",
}


class SimulationTest(FolderTest):
    def simulate(self, source, target, per_node=64, nics=None, tensors=None, options=(), code=0):
        """Compiles and simulates a job, with source and target endpoints as YAML. Sets self.ir to the plan's IR and
        returns the JSON report."""
        (self.folder / "t.yaml").write_text(f"""
ranks_per_node: {per_node}
link: {{rate: 100GB/s, latency: 5us}}
nics: {{per_node: {nics or per_node}, rate: 10GB/s, latency: 50us}}
copy: {{rate: 200GB/s}}
""")
        tensors = tensors or f"w: {{shape: [{ROWS}, {COLUMNS}], shard: {{0: tp}}}}"
        (self.folder / "job.yaml").write_text(f"""
version: 1
model: {{dtype: bf16, tensors: {{{tensors}}}}}
source: {source}
target: {target}
options: {{topology: t.yaml}}
""")
        for emit in ("plan", "ir"):
            self.call("reshard-compile job.yaml -o", emit, f"--emit={emit}")
        self.ir = (self.folder / "ir").read_text()
        done = self.call("reshard-inspect plan --simulate=t.yaml --format=json", *options, code=code)
        self.stderr = done.stderr
        return json.loads(done.stdout) if code == 0 else None

    def chunks(self, kind="send"):
        """The bytes of each chunk of a kind of step, in the order of the IR."""
        found = []
        for line in self.ir.splitlines():
            if line.startswith(f"  {kind} round"):
                bytes, chunk = (
                    int(line.split()[3]),
                    int(line.split("as chunks of ")[1].split()[0]) if "as chunks of" in line else 0,
                )
                found += [min(chunk or bytes, bytes - begin) for begin in range(0, bytes, chunk or bytes)]
        return found


class Simulate(SimulationTest):
    def test_one_pair(self):
        found = self.simulate("{mesh: {tp: 1}}", "{mesh: {}, ranks: [1]}")
        self.assertGreater(len(self.chunks()), 1)
        self.assertAlmostEqual(found["seconds"], SIZE / LINK + LINK_LATENCY, delta=1e-9)
        self.assertAlmostEqual(found["lower_bound"], found["seconds"], delta=1e-9)
        self.assertAlmostEqual(found["seconds_by_kind"]["transmit"], SIZE / LINK, delta=1e-9)
        self.assertEqual(found["seconds_by_kind"]["pack"], 0)

    def test_one_pair_between_nodes(self):
        found = self.simulate("{mesh: {tp: 1}}", "{mesh: {}, ranks: [1]}", per_node=1)
        self.assertAlmostEqual(found["seconds"], SIZE / NIC + NIC_LATENCY, delta=1e-9)
        self.assertEqual(found["busiest_nic"]["seconds"], found["busiest_rank"]["seconds"])

    def test_copies_wait(self):
        """Elements are quantized when all of their blocks have arrived. The shards end within blocks of 32 columns."""
        self.simulate(
            "{mesh: {tp: 2}}",
            "{mesh: {}, ranks: [2], quantize: mxfp8}",
            tensors="w: {shape: [96, 96], shard: {1: tp}}",
            options=[f"--trace={self.folder / 'trace'}"],
        )
        events = [
            (event["name"].split()[0], event["ts"], event["ts"] + event["dur"])
            for event in self.json("trace")["traceEvents"]
        ]
        copies = [begin for kind, begin, _ in events if kind == "copy"]
        self.assertEqual(len(copies), 1)
        self.assertGreaterEqual(
            copies[0] + 0.002, max(end for kind, _, end in events if kind == "unpack")
        )  # of microseconds, which the trace rounds

    def test_packing_overlaps(self):
        # Columns are packed, sent and unpacked in two slots: only packing the first chunk and unpacking the last one
        # add time.
        found = self.simulate(
            "{mesh: {tp: 2}}", "{mesh: {}, ranks: [2]}", tensors=f"w: {{shape: [{ROWS}, {COLUMNS}], shard: {{1: tp}}}}"
        )
        sent = self.chunks()
        least = sent[0] / COPY + SIZE / LINK + LINK_LATENCY + self.chunks("recv")[-1] / COPY
        self.assertAlmostEqual(found["seconds"], least, delta=1e-9)
        self.assertAlmostEqual(found["seconds_by_kind"]["unpack"], SIZE / COPY, delta=1e-6)

    def test_slots_by_address(self):
        """A chunk waits until its bytes of the arena are free. Where another message has chunks of another size, its
        slot of the same number is elsewhere. The receiver gets half of the columns in several chunks, then the other
        half in one chunk, whose slot is as long as all of those."""
        copy = 10e9
        for chunks, waits in ((8, True), (7, False), (6, True)):
            with self.subTest(chunks=chunks):
                self.simulate(
                    "{mesh: {tp: 2}}",
                    "{mesh: {}, ranks: [2]}",
                    tensors=f"w: {{shape: [{ROWS}, {COLUMNS}], shard: {{1: tp}}}}",
                )
                chunk = -(-SIZE // 2 // chunks // 256) * 256
                text = self.ir
                for found, replaced, times in (
                    (r"^schedule \d+ rounds", f"schedule {chunks + 1} rounds", 1),
                    (r"arena \d+$", f"arena {SIZE}", 3),
                    (
                        r"round \d+ (\d+) bytes as chunks of \d+ message 0",
                        rf"round 0 \1 bytes as chunks of {chunk} message 0",
                        2,
                    ),
                    (
                        r"round \d+ (\d+) bytes as chunks of \d+ message 1 (peer \d staging \d+)( slot 1)?",
                        rf"round {chunks} \1 bytes message 1 \2",
                        2,
                    ),
                ):
                    text, count = re.subn(found, replaced, text, flags=re.MULTILINE)
                    self.assertEqual(count, times, found)
                self.write("edited.rir", text)
                self.call("reshard-compile edited.rir -o plan")
                self.write("slow.yaml", (self.folder / "t.yaml").read_text().replace("rate: 200GB/s", "rate: 10GB/s"))
                # The first message is packed, sent and unpacked chunk after chunk. Meanwhile the other one is packed.
                first = SIZE / 2 / copy + chunk / LINK + LINK_LATENCY + chunk / copy
                # The slot of an even number overlaps those of all chunks. That of an odd number overlaps none: there
                # the message arrives while the last chunk is unpacked.
                transmit = SIZE / 2 / LINK + LINK_LATENCY
                self.assertLess(transmit, chunk / copy)
                self.assertAlmostEqual(
                    self.listing("plan", "--simulate=slow.yaml")["seconds"],
                    first + transmit * waits + SIZE / 2 / copy,
                    delta=1e-9,
                )

    @unittest.skipIf(SMALL, "sanitizers need memory of their own")
    def test_memory(self):
        """A plan of 1 MiB with half a million chunks: no list of them is kept."""
        file = ROOT / "examples/topologies/h100x8.yaml"
        self.call(
            "reshard-compile --no-verify -o plan",
            ROOT / "examples/clusters/qwen3-30b-a3b-16-to-30.yaml",
            f"--set=options.topology={file}",
            "--set=options.staging=2MiB",
        )
        done = run(
            sys.executable, "-S", "-c", PEAK, *words_of("reshard-inspect plan", f"--simulate={file}"), cwd=self.folder
        )
        self.assertLess(int(done.stdout) << 10, 48 << 20)

    def test_incast(self):
        for k in (2, 5):
            found = self.simulate(
                f"{{mesh: {{tp: {k}}}}}",
                f"{{mesh: {{}}, ranks: [{k}]}}",
                tensors=f"w: {{shape: [{k * 100}, {COLUMNS}], shard: {{0: tp}}}}",
            )
            self.assertAlmostEqual(found["seconds"], 2 * k * 100 * COLUMNS / LINK + LINK_LATENCY, delta=1e-9)

    def test_ring(self):
        k = 6  # each shard moves to the next rank
        found = self.simulate(
            f"{{mesh: {{tp: {k}}}}}",
            f"{{mesh: {{tp: {k}}}, ranks: [{', '.join(str((r + 1) % k) for r in range(k))}]}}",
            tensors=f"w: {{shape: [{k * 100}, {COLUMNS}], shard: {{0: tp}}}}",
        )
        self.assertAlmostEqual(found["seconds"], 2 * 100 * COLUMNS / LINK + LINK_LATENCY, delta=1e-9)

    def test_all_to_all(self):
        k = 8  # rows to columns
        found = self.simulate(
            f"{{layout: rows, mesh: {{tp: {k}}}}}",
            f"{{layout: columns, mesh: {{tp: {k}}}}}",
            tensors=f"w: [{k * 64}, {k * 512}]}}, layouts: {{rows: {{params: same, shard: {{w: {{0: tp}}}}}}, "
            f"columns: {{params: same, shard: {{w: {{1: tp}}}}}}",
        )
        each = 2 * 64 * 512
        transmit = (k - 1) * each / LINK
        self.assertEqual(sorted(set(self.chunks())), [each])
        # Rounds of equal chunks: transmission, the first pack, the last unpack, and the local copy, which shares
        # bandwidth with the first pack.
        self.assertGreaterEqual(found["seconds"], transmit + LINK_LATENCY)
        self.assertLessEqual(found["seconds"], transmit + (k - 1) * LINK_LATENCY + 4 * each / COPY)
        self.assertAlmostEqual(found["busiest_rank"]["seconds"], transmit, delta=1e-9)

    def test_chain(self):
        n = 5  # one source, n nodes of one rank: the source's NIC is the bottleneck, so the targets relay
        found = self.simulate("{mesh: {tp: 1}}", f"{{mesh: {{dp: {n}}}, ranks: 1..{n}}}", per_node=1)
        self.assertIn("route 0 0 -> ", self.ir)
        first = next(iter(self.chunks()))
        hops = max(line.count("->") for line in self.ir.splitlines() if line.startswith("route"))
        self.assertEqual(hops, n - 1)
        # S/b + (depth - 1) * c/b, and a latency a hop.
        self.assertAlmostEqual(found["seconds"], SIZE / NIC + hops * first / NIC + n * NIC_LATENCY, delta=1e-6)

    def test_shared_nic(self):
        # Two pairs between two nodes of two ranks with one NIC each, which sends one after the other.
        found = self.simulate("{mesh: {tp: 2}}", "{mesh: {tp: 2}, ranks: [2, 3]}", per_node=2, nics=1)
        self.assertAlmostEqual(found["seconds"], SIZE / NIC + NIC_LATENCY, delta=1e-9)
        self.assertAlmostEqual(found["lower_bound"], found["seconds"], delta=1e-9)

    def test_trace(self):
        self.simulate(
            "{mesh: {tp: 2}}",
            "{mesh: {}, ranks: [2]}",
            tensors=f"w: {{shape: [{ROWS}, {COLUMNS}], shard: {{1: tp}}}}",
            options=["--trace=trace.json"],
        )
        events = self.json("trace.json")["traceEvents"]
        kinds = [event["tid"] for event in events]
        sent = len(self.chunks())
        self.assertEqual(
            {kind: kinds.count(kind) for kind in set(kinds)}, {"pack": sent, "transmit": sent, "unpack": sent}
        )
        self.assertEqual(sum(event["args"]["bytes"] for event in events if event["tid"] == "transmit"), SIZE)

    def test_other_nodes(self):
        self.simulate("{mesh: {tp: 1}}", "{mesh: {}, ranks: [1]}")
        self.write("t.yaml", "ranks_per_node: 3\n")
        self.prints(
            "lower bound  unknown: the plan was compiled for a topology with other nodes (options.topology)",
            "reshard-inspect plan --simulate=t.yaml",
        )

    def test_refused(self):
        self.simulate("{mesh: {tp: 1}}", "{mesh: {}, ranks: [1]}")

        def refused(*options):
            done = self.call("reshard-inspect plan", *options, code=2)
            self.assertEqual(done.stdout, "")
            return done.stderr

        self.assertIn("cannot read 'none.yaml'", refused("--simulate=none.yaml"))
        self.write("bad.yaml", "ranks_per_node: 8\nlinks: {rate: 1GB/s}\n")
        self.assertIn(
            "bad.yaml:2:1: error: unknown key 'links' in 'topology', did you mean 'link'?",
            refused("--simulate=bad.yaml"),
        )
        self.assertIn("--trace needs --simulate=TOPOLOGY", refused("--trace=x"))


class Pool(SimulationTest):
    """Engine replicas that pull one version."""

    def pool(self, replicas, source="{mesh: {tp: 1}}", target="{mesh: {}, replicas: 2}", **options):
        return self.simulate(
            source, target, per_node=options.pop("per_node", 1), options=[f"--replicas={replicas}"], **options
        )

    def test_chain(self):
        # A request and its answer, at line rate; each further replica is behind by one range.
        for replicas in (1, 2, 3, 7):
            found = self.pool(replicas)
            late = SIZE / NIC + 2 * NIC_LATENCY + PROTOCOL
            self.assertAlmostEqual(found["seconds"], late + (replicas - 1) * (RANGE / NIC + NIC_LATENCY), delta=1e-9)
            self.assertAlmostEqual(found["lower_bound"], SIZE / NIC + NIC_LATENCY, delta=1e-9)
            self.assertAlmostEqual(found["ratio"], found["seconds"] / found["lower_bound"], delta=1e-9)
            self.assertAlmostEqual(found["late_joiner"]["seconds"], late, delta=1e-9)
            self.assertAlmostEqual(found["late_joiner"]["lower_bound"], SIZE / NIC + NIC_LATENCY, delta=1e-9)
            self.assertEqual(found["replicas"], replicas)

    def test_number_in_the_job(self):
        self.assertEqual(self.simulate("{mesh: {tp: 1}}", "{mesh: {}, replicas: 5}", per_node=1)["replicas"], 5)

    def test_packing_overlaps(self):
        # Columns are packed and unpacked: only the first range and the last one add time, once for each hop.
        for replicas in (1, 3):
            found = self.pool(
                replicas, tensors=f"w: {{shape: [{ROWS}, {COLUMNS}], shard: {{1: tp}}}}", source="{mesh: {tp: 2}}"
            )
            least = SIZE / NIC + 2 * NIC_LATENCY + PROTOCOL + 2 * RANGE / COPY
            self.assertAlmostEqual(
                found["seconds"], least + (replicas - 1) * (RANGE / NIC + NIC_LATENCY + 2 * RANGE / COPY), delta=1e-9
            )

    def test_nodes_forward_inside(self):
        # Both ranks of an engine need everything: each reads half between nodes, and they exchange the halves.
        target = "{mesh: {dp: 2}, ranks: 2..3, replicas: 2}"
        found = self.pool(4, "{mesh: {tp: 1, dp: 2}}", target, per_node=2)
        self.assertAlmostEqual(found["lower_bound"], SIZE / 2 / NIC + NIC_LATENCY, delta=1e-9)
        self.assertGreaterEqual(found["seconds"], SIZE / 2 / NIC + 3 * RANGE / NIC)
        self.assertLessEqual(found["seconds"], SIZE / 2 / NIC + 4 * RANGE / NIC + 20 * NIC_LATENCY)

    def test_the_source_is_read_once(self):
        # Four readers in one replica, one source NIC: the source is the bottleneck, for any number of replicas.
        target = "{mesh: {tp: 4}, ranks: 4..7, replicas: 2}"
        found = self.pool(
            8, "{mesh: {}}", target, per_node=4, tensors=f"w: {{shape: [{ROWS}, {COLUMNS}], shard: {{0: tp}}}}"
        )
        self.assertAlmostEqual(
            found["lower_bound_terms"]["egress of source NICs"], SIZE / 4 / NIC + NIC_LATENCY, delta=1e-9
        )  # with relays
        self.assertGreaterEqual(found["seconds"], SIZE / NIC)
        self.assertLessEqual(found["seconds"], SIZE / NIC + 8 * RANGE / NIC + 40 * NIC_LATENCY)
        self.assertLessEqual(found["late_joiner"]["seconds"], SIZE / 4 / NIC + 20 * NIC_LATENCY)

    def test_converted_messages_come_from_the_source(self):
        # The memory of an engine has codes and scales, which are not the bytes that were sent.
        target = "{mesh: {}, replicas: 2, quantize: mxfp8}"
        one, three = (self.pool(replicas, target=target)["seconds"] for replicas in (1, 3))
        self.assertAlmostEqual(one, SIZE / NIC, delta=0.2 * SIZE / NIC)
        self.assertAlmostEqual(three, one + 2 * SIZE / NIC, delta=1e-6)

    def test_near_the_lower_bound(self):
        for (job, topology), ranks in POOLS.items():
            if SMALL and "kimi" in job:
                continue
            file = ROOT / f"examples/topologies/{topology}.yaml"
            self.call(
                "reshard-compile",
                ROOT / f"examples/{job}.yaml",
                f"--set=options.topology={file}",
                f"--set=target.ranks={ranks}",
                "-o",
                "plan",
            )
            for replicas in (1, 4) if SMALL or ("kimi" in job and not FULL) else (1, 4, 16, 64):
                with self.subTest(job=job, topology=topology, replicas=replicas):
                    found = self.listing("plan", f"--simulate={file}", f"--replicas={replicas}")
                    self.assertGreaterEqual(found["ratio"], 1)
                    self.assertLessEqual(found["ratio"], 1.10)
                    self.assertGreaterEqual(found["late_joiner"]["ratio"], 1)
                    self.assertLessEqual(found["late_joiner"]["ratio"], 1.02)

    def test_text(self):
        self.pool(2)
        done = self.call("reshard-inspect plan --simulate=t.yaml")
        self.assertIn(
            "until 2 engine replicas have the version: one reads from the sources, each other from the one before it",
            done.stdout,
        )
        self.assertRegex(done.stdout, r"late joiner  [\d.]+ ms; lower bound [\d.]+ ms; this plan: [\d.]+ x\n")

    def test_refused_options(self):
        self.simulate("{mesh: {tp: 32}}", "{mesh: {tp: 32}, replicas: 2}", per_node=8)

        def refused(*options):
            return self.call("reshard-inspect plan", *options, code=2).stderr

        self.assertIn("--replicas needs --simulate=TOPOLOGY", refused("--replicas=2"))
        self.assertIn("--trace shows the activities of one run", refused("--simulate=t.yaml", "--trace=x"))
        self.assertIn("have 2097152 ranks, expected at most 1048576", refused("--simulate=t.yaml", "--replicas=65536"))
        refused("--simulate=t.yaml", "--replicas=0")
        refused("--simulate=t.yaml", "--replicas=65537")
        self.simulate("{mesh: {tp: 1}}", "{mesh: {}, ranks: [1]}")
        self.assertIn("has no engine replicas (key 'replicas')", refused("--simulate=t.yaml", "--replicas=2"))


if __name__ == "__main__":
    unittest.main()
