# SPDX-License-Identifier: Apache-2.0
"""The cases of Megatron-Core's own resharding tests, by the name of the test: moved here and compared element by
element. The cases about precision (MXFP8, casts) are in tests/quantize and tests/e2e; those about Python objects
(caches, matching of operations, NVSHMEM's packs) do not apply."""

import unittest

from harness import Case
from models import gpt, mamba, plain, refit, rows

WHOLE = {}


def mesh(offset=0, **axes):
    size = 1
    for n in axes.values():
        size *= n
    return {"mesh": axes, **({"ranks": f"{offset}..{offset + size - 1}"} if offset else {})}


class Planner(Case):
    """The planner: two dimensions, one of the given global length."""

    def tp(self, length, d, src, dst, first=None, second=None, **more):
        shape = [4, length] if d else [length, 4]
        return self.moved(
            plain({"w": (shape, first or rows("tp", d), second or rows("tp", d))}, mesh(tp=src), mesh(tp=dst, **more))
        )

    def test_tp2_to_1_dim1_128_plain(self):
        self.assertEqual(self.tp(128, 1, 2, 1)["transfers"], 2)

    def test_tp1_to_2(self):
        self.assertEqual(self.tp(128, 0, 1, 2)["transfers"], 2)

    def test_tp2_to_4_cover(self):
        self.assertEqual(self.tp(128, 0, 2, 4)["transfers"], 4)

    def test_tp2_to_2_from_itself(self):
        report = self.tp(128, 0, 2, 2)
        self.assertEqual((report["transfers"], report["messages"], report["bytes"]["remote"]), (2, 0, 0))

    def test_tp2_to_1_dim0_64_rows(self):
        self.assertEqual(self.tp(64, 0, 2, 1)["transfers"], 2)

    def test_tp4_to_2_128_conservation(self):
        self.assertEqual(self.tp(128, 0, 4, 2)["bytes"]["target"], 128 * 4 * 2)

    def test_rank_not_in_dst_is_empty(self):
        self.moved(plain({"w": ([8, 2], rows("tp"), WHOLE)}, mesh(tp=4), {"mesh": {}}, world=9))

    def test_no_descriptors_replicated(self):
        self.moved(plain({"w": ([8, 2], WHOLE, WHOLE)}, mesh(tp=2), mesh(tp=2)))

    def test_tp2_of_64_to_100_is_a_size_mismatch(self):
        self.refused(
            plain({"w": ([100], rows("tp", sizes=[64, 64]), rows("tp"))}, mesh(tp=2), mesh(tp=1)), "128", "100"
        )

    def test_blocks_32_16_tp2_to_1_list_on_one_side(self):
        self.tp(96, 0, 2, 1, rows("tp", blocks=[64, 32]), WHOLE)

    def test_blocks_32_16_tp1_to_2_reverse(self):
        self.tp(96, 0, 1, 2, WHOLE, rows("tp", blocks=[64, 32]))

    def test_three_blocks_16_8_4_tp2_to_4(self):
        blocks = rows("tp", blocks=[32, 16, 8])
        self.tp(56, 0, 2, 4, blocks, blocks)

    def test_dp_01_to_01_self(self):
        self.assertEqual(self.moved(plain({"w": ([8], WHOLE, WHOLE)}, mesh(dp=2), mesh(dp=2)))["bytes"]["remote"], 0)

    def test_dp_23_to_01(self):
        self.moved(plain({"w": ([8], WHOLE, WHOLE)}, {"mesh": {"dp": 2}, "ranks": "2..3"}, mesh(dp=2)))

    def test_dp_0123_to_4567(self):
        report = self.moved(plain({"w": ([64], WHOLE, WHOLE)}, mesh(dp=4), mesh(4, dp=4)))
        self.assertEqual(report["balance"]["egress_max"], 128)  # each replica sends to one target


class DataParallelBalance(Case):
    def weights(self, **more):
        return {f"w{i}": ([16, 8], rows("tp"), WHOLE) for i in range(4)}

    def test_tp2dp2_to_dp4(self):
        report = self.moved(plain(self.weights(), mesh(tp=2, dp=2), mesh(4, dp=4)))
        self.assertEqual(report["balance"]["egress_max"], report["balance"]["egress_bound"])

    def test_tp2dp4_to_16(self):
        report = self.moved(plain(self.weights(), mesh(tp=2, dp=4), mesh(8, dp=16)))
        self.assertEqual(report["balance"]["egress_max"], report["balance"]["egress_bound"])

    def test_ep2_to_ep2_owner_in_either_replica(self):
        self.moved(refit(gpt(experts=4), (1, 1, 2), (1, 1, 2), ranks="8..15"))

    def test_ep4_to_ep8(self):
        self.moved(refit(gpt(experts=8), (1, 1, 4), (1, 1, 8), ranks="8..15"))

    def test_collocated_ranks_take_their_own(self):
        report = self.moved(
            plain({"w": ([8], WHOLE, WHOLE)}, mesh(dp=8), {"mesh": {"dp": 2}, "ranks": "[0, 4]"[1:-1].split(", ")})
        )
        self.assertEqual(report["bytes"]["remote"], 0)

    def test_remote_rank_8_takes_from_any(self):
        report = self.moved(plain({"w": ([8], WHOLE, WHOLE)}, mesh(dp=8), {"mesh": {}, "ranks": "8..8"}))
        self.assertEqual(report["bytes"]["remote"], report["bytes"]["target"])
        self.assertEqual(report["balance"]["egress_max"], report["balance"]["egress_bound"])


DENSE = [
    ((2, 1), (1, 1)),
    ((1, 1), (2, 1)),
    ((2, 1), (4, 1)),
    ((1, 2), (1, 1)),
    ((1, 1), (1, 2)),
    ((2, 2), (1, 1)),
    ((1, 1), (2, 2)),
    ((2, 1), (1, 2)),
    ((1, 2), (2, 1)),
    ((1, 2), (2, 4)),
]
EXPERTS = [
    ((1, 1, 2), (1, 1, 4)),
    ((1, 1, 2), (1, 1, 1)),
    ((1, 1, 2), (1, 2, 2)),
    ((1, 1, 1), (1, 1, 2)),
    ((2, 1, 2), (1, 1, 1)),
    ((1, 1, 1), (2, 1, 2)),
    ((4, 1, 1), (2, 1, 2)),
    ((2, 1, 2), (4, 1, 1)),
    ((4, 1, 1), (1, 1, 4)),
    ((1, 1, 4), (4, 1, 1)),
]
LATENT = [((1, 1, 2), (1, 1, 1)), ((2, 1, 2), (1, 1, 1)), ((1, 1, 1), (2, 1, 2))]


class EndToEndRefit(Case):
    def test_dense(self):
        for source, target in DENSE:
            with self.subTest(row=f"dense (TP,PP) {source} -> {target}"):
                self.moved(refit(gpt(layers=4 if source[1] > 1 or target[1] > 1 else 2), source, target))

    def test_moe_4_experts(self):
        for source, target in EXPERTS:
            with self.subTest(row=f"MoE (TP,PP,EP) {source} -> {target}"):
                self.moved(refit(gpt(layers=4 if target[1] > 1 else 2, experts=4), source, target))

    def test_latent_16_glu_shared_expert(self):
        for source, target in LATENT:
            with self.subTest(row=f"latent {source} -> {target}"):
                self.moved(refit(gpt(experts=4, latent=16, shared=32), source, target))

    def test_latent_with_mtp_1(self):
        for source, target in [((1, 1, 1), (1, 1, 2)), *LATENT[1:]]:
            with self.subTest(row=f"latent + MTP {source} -> {target}"):
                self.moved(refit(gpt(experts=4, latent=16, shared=32, mtp=1), source, target))

    def test_router_expert_bias_fp32(self):
        for source, target in (((2, 1, 2), (1, 1, 1)), ((1, 1, 1), (2, 1, 2)), ((1, 1, 2), (2, 1, 2))):
            with self.subTest(row=f"expert_bias (TP,EP) {source[::2]} -> {target[::2]}"):
                self.moved(refit(gpt(experts=4, expert_bias=True), source, target))

    def test_router_expert_bias_ranks_01_to_23_rest_idle(self):
        job = refit(gpt(experts=4, expert_bias=True), (2, 1), (2, 1), world=2, ranks="2..3")
        self.moved({**job, "world": 8})

    def test_hybrid_m_star_h256(self):
        for source, target in (
            ((2, 1), (1, 1)),
            ((1, 1), (2, 1)),
            ((2, 1), (4, 1)),
            ((1, 1), (2, 2)),
            ((2, 1), (1, 2)),
        ):
            with self.subTest(row=f"hybrid M* (TP,PP) {source} -> {target}"):
                self.moved(refit(mamba(), source, target))


class Execution(Case):
    def test_full_copy_and_row_slice_8_to_4(self):
        self.moved(plain({"w": ([8, 4], rows("tp"), rows("tp"))}, mesh(tp=1), mesh(tp=1)))
        self.moved(plain({"w": ([8, 4], WHOLE, rows("tp"))}, mesh(tp=1), mesh(1, tp=2)))

    def test_source_only_dest_only_idle_ranks(self):
        self.moved(plain({"w": ([8, 4], rows("tp"), rows("tp"))}, mesh(tp=2), mesh(4, tp=2), world=9))

    def test_missing_names_are_an_error(self):
        self.refused(
            plain({"w": ([8], WHOLE, WHOLE), "x": ([8], None, WHOLE)}, mesh(tp=1), mesh(tp=1)),
            "x",
            "which no param of the source holds",
        )


class Distribution(Case):
    """Shards that several ranks hold are stored once; a rank receives what it lacks from a rank that holds it."""

    SHARDS = {
        "repl1": ([20], rows("tp"), WHOLE),
        "repl2": ([20], rows("tp"), WHOLE),
        "B": ([160], rows(["dp", "tp"]), WHOLE),
        "C": ([100], WHOLE, WHOLE),
        "D": ([1000], WHOLE, WHOLE),
        "E": ([100], WHOLE, WHOLE),
    }

    def test_tp2_dp4_saved_once(self):
        job = plain(self.SHARDS, mesh(tp=2, dp=4), {}, dtype="fp32")
        job["target"] = {"layout": "dst", "storage": "checkpoint"}
        report = self.moved(job)
        self.assertEqual(report["bytes"]["target"], 4 * (20 + 20 + 160 + 100 + 1000 + 100))  # each shard is stored once

    def test_tp2_dp4_loaded_by_all(self):
        job = plain(
            {name: (shape, target, source) for name, (shape, source, target) in self.SHARDS.items()},
            {},
            mesh(tp=2, dp=4),
            dtype="fp32",
        )
        job["source"] = {"layout": "src", "storage": "checkpoint"}
        self.moved(job)

    def test_cross_reads_dp8_a_b_c(self):
        tensors = {"a": ([8], {"at": {"dp": 0}}, WHOLE), "b": ([8], {"at": {"dp": 1}}, WHOLE), "c": ([8], WHOLE, WHOLE)}
        self.moved(plain(tensors, mesh(dp=8), mesh(dp=8), dtype="fp32"))

    def test_objects_travel_as_bytes(self):
        self.moved(
            plain(
                {f"object{i}": ([7 + i], {"at": {"dp": i}}, WHOLE) for i in range(8)},
                mesh(dp=8),
                mesh(dp=8),
                dtype="u8",
            )
        )


class Uneven(Case):
    DTYPES = ["fp32", "fp64", "i32", "i64"]

    def test_dim0_rows_3w_plus_2_and_dim1_cols_2w_plus_1(self):
        for dtype in self.DTYPES:
            self.moved(
                plain(
                    {
                        "a": ([14, 3], rows("fsdp", scheme="chunk"), WHOLE),
                        "b": ([3, 9], rows("fsdp", 1, scheme="chunk"), WHOLE),
                    },
                    mesh(fsdp=4),
                    mesh(fsdp=4),
                    dtype=dtype,
                )
            )

    def test_2d_mesh_shard_replicate(self):
        self.moved(plain({"a": ([14, 3], rows("fsdp", scheme="chunk"), WHOLE)}, mesh(fsdp=4, dp=2), mesh(4, fsdp=4)))

    def test_shards_0_1_13_by_15(self):
        both = {"shard": {"0": {"axis": "a", "scheme": "chunk"}, "1": {"axis": "b", "scheme": "chunk"}}}
        for columns in (15, 23):
            self.moved(plain({"w": ([13, columns], both, WHOLE)}, mesh(a=2, b=4), mesh(a=1)))

    def test_3d_shards_0_2(self):
        both = {"shard": {"0": {"axis": "a", "scheme": "chunk"}, "2": {"axis": "b", "scheme": "chunk"}}}
        self.moved(plain({"w": ([5, 3, 7], both, rows("a", 1, scheme="balanced"))}, mesh(a=2, b=3), mesh(a=2)))

    def test_random_lengths_with_zero(self):
        self.moved(
            plain({"w": ([11], rows("x", sizes=[0, 6, 0, 5]), rows("x", sizes=[4, 0, 7, 0]))}, mesh(x=4), mesh(x=4))
        )
        both = {"shard": {"0": {"axis": "x", "sizes": [0, 6, 5]}, "1": {"axis": "y", "sizes": [3, 0]}}}
        self.moved(plain({"w": ([11, 3], both, WHOLE)}, mesh(x=3, y=2), mesh(x=1)))

    def test_split_16_by_4_and_3_5_5(self):
        self.moved(plain({"w": ([16, 13], rows("x"), rows("x", 1, sizes=[3, 5, 5, 0]))}, mesh(x=4), mesh(x=4)))

    def test_split_3w_plus_1_by_2_and_first_rank_empty(self):
        self.moved(
            plain(
                {
                    "w": ([13], rows("x", scheme="chunk"), rows("x", scheme="balanced")),
                    "v": ([10], rows("x", sizes=[0, 5, 3, 2]), rows("x", sizes=[5, 5, 0, 0])),
                },
                mesh(x=4),
                mesh(x=4),
            )
        )


class KeyValueCache(Case):
    """L12 H8: layers over pp, heads over tp."""

    def cache(self, source, target, src=None, dst=None, heads=8):
        def side(rule):
            return {"k{layer}": {"holds": "k", **rule}, "v{layer}": {"holds": "v", **rule}}

        layouts = {
            "src": {
                "axes": ["tp", "pp"],
                "place": {"layer": src or "pp"},
                "params": side(rows("tp", 0, unit=1, replicate=True)),
            },
            "dst": {
                "axes": ["tp", "pp"],
                "place": {"layer": dst or "pp"},
                "params": side(rows("tp", 0, unit=1, replicate=True)),
            },
        }
        model = {
            "dtype": "bf16",
            "index": {"layer": 12},
            "tensors": {"c.{layer}.k": [heads, 5, 4], "c.{layer}.v": [heads, 5, 4]},
            "layouts": layouts,
        }
        return {
            "version": 1,
            "model": model,
            "source": {"layout": "src", **source},
            "target": {"layout": "dst", **target},
        }

    def test_tp_pp(self):
        for a, b in (
            ((1, 1), (1, 1)),
            ((2, 1), (4, 1)),
            ((4, 1), (2, 1)),
            ((1, 2), (1, 3)),
            ((2, 2), (4, 3)),
            ((2, 3), (4, 2)),
            ((2, 2), (4, 1)),
            ((2, 2), (2, 1)),
            ((2, 2), (1, 3)),
        ):
            with self.subTest(row=f"KV (TP,PP) {a} -> {b}"):
                self.moved(self.cache(mesh(tp=a[0], pp=a[1]), mesh(8, tp=b[0], pp=b[1])))

    def test_ep_etp_replicas_are_one_source(self):
        for axes in ({"ep": 2}, {"etp": 2}, {"ep": 2, "etp": 2}):
            self.moved(self.cache(mesh(tp=2, **axes), mesh(8, tp=4)))

    def test_window_5_plus_7_to_pp1(self):
        self.moved(self.cache(mesh(pp=2), mesh(2, pp=1), src={"axis": "pp", "sizes": [5, 7]}))

    def test_half_a_window_is_refused(self):
        self.refused(self.cache(mesh(pp=2), mesh(2, pp=1), src={"axis": "pp", "sizes": [5, 6]}), "sum to 11", "12")


class StateSpace(Case):
    """4 layers, 8 heads of 4, state 2, 2 groups, conv 3: the conv axis [x | B | C], recurrent state by heads."""

    def state(self, source, target, groups=2):
        conv = rows("tp", blocks=[32, groups * 2, groups * 2])
        params = {"conv{layer}": {"holds": "conv", **conv}, "ssm{layer}": {"holds": "ssm", **rows("tp")}}
        layout = {"axes": ["tp", "pp"], "place": {"layer": "pp"}, "params": params}
        model = {
            "dtype": "fp32",
            "index": {"layer": 4},
            "layouts": {"l": layout},
            "tensors": {"s.{layer}.conv": [32 + 4 * groups, 3], "s.{layer}.ssm": [8, 4, 2]},
        }
        return {"version": 1, "model": model, "source": {"layout": "l", **source}, "target": {"layout": "l", **target}}

    def test_tp_pp(self):
        for a, b in (
            ((2, 1), (1, 1)),
            ((1, 1), (2, 1)),
            ((1, 2), (1, 1)),
            ((1, 1), (1, 2)),
            ((2, 2), (1, 1)),
            ((2, 2), (2, 2)),
        ):
            with self.subTest(row=f"SSM (TP,PP) {a} -> {b}"):
                self.moved(self.state(mesh(tp=a[0], pp=a[1]), mesh(tp=b[0], pp=b[1])))

    def test_tp4_with_2_groups_shares_the_groups(self):
        """Megatron-Core refuses this; here groups are units that two ranks replicate."""
        parts = {
            name: ([n, 3], rows("tp", unit=u, replicate=True), rows("tp", unit=u, replicate=True))
            for name, n, u in (("x", 32, 4), ("B", 4, 2), ("C", 4, 2))
        }
        self.moved(plain(parts, mesh(tp=4), mesh(tp=2), dtype="fp32"))

    def test_gdp_three_householder_copies_tp2_to_1(self):
        names = ["z", "v0", "v1", "v2", "k0", "k1", "k2", "q", "b0", "b1", "b2", "a"]
        tensors = {n: [8, 2] for n in names}
        model = {
            "dtype": "bf16",
            "tensors": tensors,
            "layouts": {"l": {"params": {"in_proj": {"concat": names, **rows("tp")}}}},
        }
        self.moved(
            {
                "version": 1,
                "model": model,
                "source": {"layout": "l", "mesh": {"tp": 2}},
                "target": {"layout": "l", "mesh": {}},
            }
        )


if __name__ == "__main__":
    unittest.main()
