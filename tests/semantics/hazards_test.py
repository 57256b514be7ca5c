# SPDX-License-Identifier: Apache-2.0
"""Known limitations and silent errors of Megatron-Core's resharding, by number: reshard handles each correctly."""

import unittest

from harness import Case
from models import gpt, plain, refit, rows
from rows_test import WHOLE, mesh

ELSEWHERE = {
    "12 (dtype)": "dtype conversion of params: tests/e2e; buffers by resolved names: test_12",
    14: "task ids: each message has one number in the plan, which both ends read (tests/executor)",
    15: "MXFP8 slices: tests/quantize",
    18: "a Python attribute of gather_rounds; not applicable",
    21: "planning on every rank: a plan is compiled once, a rank reads its segment (tests/schema, docs/performance.md)",
    23: "contention within rounds: tests/compiler; one message per pair: test_20",
}


class Hazards(Case):
    def test_01_uneven_shards(self):
        self.moved(
            plain({"w": ([17, 2], rows("tp", scheme="chunk"), rows("tp", scheme="balanced"))}, mesh(tp=3), mesh(tp=4))
        )
        self.moved(
            plain({"w": ([12, 2], rows("tp", stride=3), rows("tp", scheme="round_robin"))}, mesh(tp=2), mesh(tp=5))
        )

    def test_02_two_dimensions_fsdp_and_weight_rematerialization(self):
        both = {"shard": {"0": "tp", "1": {"axis": "fsdp", "scheme": "chunk"}}}
        self.moved(plain({"w": ([8, 7], both, rows(["gtp", "tp"]))}, mesh(tp=2, fsdp=3), mesh(gtp=2, tp=2)))

    def test_03_sharded_to_replicated_over_a_tp_group_and_back(self):
        self.moved(plain({"w": ([8, 2], rows("tp"), WHOLE)}, mesh(tp=2), mesh(tp=4)))
        self.moved(plain({"w": ([8, 2], WHOLE, rows("tp"))}, mesh(tp=4), mesh(tp=2)))

    def test_04_virtual_stages(self):
        model = gpt(layers=8)
        model["layouts"]["virtual"] = {
            **model["layouts"]["megatron"],
            "chunks": "{layer.chunk}.",
            "place": {"layer": {"axis": "pp", "interleave": 2}},
        }
        job = refit(model, (2, 2), (1, 4))
        job["source"]["layout"] = "virtual"
        self.moved(job)
        job["target"]["layout"], job["source"]["layout"] = "virtual", "megatron"
        job["target"]["mesh"] = {"megatron": {"pp": 4, "dp": 2}}
        self.moved(job)

    def test_05_experts_by_any_name(self):
        with self.subTest("SequentialMLP is renumbered"):
            self.moved(refit(gpt(experts=4, grouped=False), (1, 1, 2), (1, 1, 4)))
        with self.subTest("fused expert tensors change their expert-parallel size"):
            self.moved(plain({"w13": ([8, 6, 4], rows("ep"), rows("ep"))}, mesh(ep=2), mesh(ep=4)))
        with self.subTest("remainders"):
            model = gpt(experts=5)
            model["layouts"]["megatron"]["place"]["expert"] = {"axis": "ep", "scheme": "balanced"}
            self.moved(refit(model, (1, 1, 2), (1, 1, 4)))

        with self.subTest("replicas that hold their experts in different slot orders divide the transfers"):
            tensors = {"e.{expert}.w": [4, 2]}
            layouts = {
                "src": {
                    "place": {"expert": {"axis": "ep", "map": [[0, 1, 2], [2, 0, 1]]}},
                    "params": {"w": {"stack": "expert", "holds": "w"}},
                },
                "dst": {"params": {"w": {"stack": "expert", "holds": "w"}}},
            }
            model = {"dtype": "bf16", "index": {"expert": 3}, "tensors": tensors, "layouts": layouts}
            self.moved(
                {
                    "version": 1,
                    "model": model,
                    "source": {"layout": "src", **mesh(ep=2)},
                    "target": {"layout": "dst", **mesh(2, tp=2)},
                }
            )

    def test_06_vocabulary_padded_to_different_sizes(self):
        pad = lambda m: {**rows("tp"), "pad": {"0": f"{m} * tp"}}
        self.moved(
            plain({"vocab": ([119, 4], pad(8), pad(8)), "other": ([119, 4], pad(3), pad(16))}, mesh(tp=2), mesh(tp=4))
        )

    def test_07_ties_in_both_directions(self):
        for source, target in (("embed", "head"), ("head", "embed"), ("embed", "both"), ("both", "head")):
            with self.subTest(f"{source} -> {target}"):
                held = {"embed": ["embed"], "head": ["head"], "both": ["embed", "head"]}
                layouts = {
                    side: {"params": {f"my.{name}": {"holds": name, **rows("tp")} for name in held[which]}}
                    for side, which in (("src", source), ("dst", target))
                }
                model = {"dtype": "bf16", "tensors": {"embed": [16, 4], "head": {"tied": "embed"}}, "layouts": layouts}
                self.moved(
                    {
                        "version": 1,
                        "model": model,
                        "source": {"layout": "src", **mesh(tp=2)},
                        "target": {"layout": "dst", **mesh(2, tp=4)},
                    }
                )

    def test_08_fewer_kv_heads_than_ranks(self):
        shared = rows("tp", unit=4, replicate=True)
        self.moved(plain({"k": ([8, 3], shared, shared)}, mesh(tp=4), mesh(tp=8)))

    def test_09_collocated_experts_with_attention_data_parallel(self):
        """EP2 -> EP4 collocated: there, ranks 1 and 2 get experts 3 and 0 instead of 1 and 2."""
        self.moved(refit(gpt(experts=4, bias=True), (1, 1, 2), (1, 1, 4), world=4))

    def test_10_grouped_glu_etp2_to_1(self):
        job = refit(gpt(experts=4), (2, 1, 2), (1, 1, 2), world=4)
        job["source"]["mesh"]["megatron"]["etp"] = 2
        self.moved(job)

    def test_11_row_parallel_expert_biases_etp2_to_1(self):
        job = refit(gpt(experts=4, bias=True), (2, 1, 2), (1, 1, 1), world=4)
        job["source"]["mesh"]["megatron"]["etp"] = 2
        self.moved(job)

    def test_12_buffers_follow_their_layers_over_pipeline_stages(self):
        self.moved(refit(gpt(layers=4, experts=4, expert_bias=True), (1, 2, 2), (1, 4, 1)))

    def test_13_nothing_is_skipped(self):
        with self.subTest("a target without a source"):
            self.refused(
                plain({"w": ([8], None, WHOLE), "x": ([8], WHOLE, WHOLE)}, mesh(tp=1), mesh(tp=1)),
                "target param 'w'",
                "source",
            )
        with self.subTest("ranks of groups are world ranks"):
            self.moved(plain({"w": ([8, 2], rows("tp"), rows("tp"))}, mesh(5, tp=2), mesh(11, tp=4), world=16))

    def test_16_plans_of_equal_sizes_differ(self):
        """A cache keyed by sizes would return the wrong plan."""
        jobs = []
        for sizes in ([1, 3], [3, 1]):
            model = gpt(layers=4)
            model["layouts"]["megatron"]["place"]["layer"] = {"axis": "pp", "sizes": sizes}
            jobs.append(self.moved(refit(model, (1, 2), (2, 2)))["digest"])
        self.assertNotEqual(jobs[0], jobs[1])

    def test_17_nesting_orders_gaps_and_bad_sections(self):
        for axes in (["a", "b"], ["b", "a"]):
            self.moved(plain({"w": ([12, 2], rows(axes), WHOLE)}, mesh(a=2, b=3), mesh(a=1)))
        self.refused(
            plain({"w": ([12], rows("x", map=[[0, 1, 2, 3, 4], [6, 7, 8, 9, 10, 11]]), WHOLE)}, mesh(x=2), mesh(x=1)),
            "row 5",
        )
        self.refused(plain({"w": ([12], rows("x", sizes=[5, 6]), WHOLE)}, mesh(x=2), mesh(x=1)), "sum to 11", "12")

    def test_19_one_transfer_per_intersection(self):
        report = self.moved(plain({"w": ([24, 2], rows("tp"), rows("tp"))}, mesh(tp=8), mesh(8, tp=6)))
        self.assertEqual(report["transfers"], 12)  # Megatron-Core: 24 micro-tiles
        glu = {"concat": ["gate", "up"], **rows("tp")}
        model = {"dtype": "bf16", "tensors": {"gate": [8, 2], "up": [8, 2]}, "layouts": {"l": {"params": {"fc1": glu}}}}
        identity = self.moved(
            {
                "version": 1,
                "model": model,
                "source": {"layout": "l", **mesh(tp=2)},
                "target": {"layout": "l", **mesh(tp=2)},
            }
        )
        self.assertEqual((identity["descriptors"]["after"], identity["messages"]), (2, 0))  # one per rank

    def test_20_one_message_per_pair_within_the_staging_limit(self):
        tensors = {f"w{i}": ([16, 8], rows("tp"), rows("tp", 1)) for i in range(12)}
        job = plain(tensors, mesh(tp=4), mesh(4, tp=4))
        self.assertEqual(self.moved(job)["messages"], 16)
        report = self.moved({**job, "options": {"staging": 1024}})
        self.assertLessEqual(report["staging"]["max"], 1024)

    def test_22_load_is_balanced_by_bytes(self):
        tensors = {f"w{i}": ([64 * (i + 1)], WHOLE, WHOLE) for i in range(4)}
        report = self.moved(
            plain(tensors, mesh(dp=4), mesh(4, dp=4))
        )  # tp1·dp4 -> 4 remote ranks: Megatron-Core sends all from rank 0
        self.assertEqual(report["balance"]["egress_max"], report["balance"]["egress_bound"])

    def test_24_only_needed_bytes_are_sent(self):
        tensors = {"w": ([64], rows("tp"), rows("tp"))}
        report = self.moved(plain(tensors, mesh(tp=4), mesh(4, tp=4)))
        self.assertEqual(report["bytes"]["remote"], 128)


if __name__ == "__main__":
    unittest.main()
