# SPDX-License-Identifier: Apache-2.0
"""The state of a live distributed optimizer of Megatron-Core (four ranks, gloo, CPU) after three steps of Adam, saved
as `dp_reshardable`: `buckets_model` records its buckets, and two jobs give them the names of `fully_reshardable`. Every
element of every state is the one that the optimizer holds, and that of the checkpoint that it saves as
`fully_reshardable` itself, if there is one bucket. The other way, Megatron-Core loads buckets that reshard wrote.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/megatron_optimizer_test.py"""

import json
import re
import unittest

import torch
from safetensors.torch import load_file

import ranks
from commands import run
from documents import examples
from megatron_test import MISSING, Model

if not MISSING:
    from megatron_training import STATES, STEPS, OnCpu, Training, held

    from megatron_checkpoint_test import DENSE, EXPERTS, folder_of, on_rank_0

#: Of the optimizer's params: the names in the rank files that layout `ranks` describes.
RANKS = """  ranks: {extend: megatron-local, rename: {"": "0."}, optimizer: "{param}.{state}"}
optimizer: {param: fp32, exp_avg: fp32, exp_avg_sq: fp32}
"""


def job(folder, name, model, source, target):
    (folder / f"{name}.yaml").write_text(f"version: 1\nmodel: {model}\nsource: {source}\ntarget: {target}\n")
    run("reshard-compile", folder / f"{name}.yaml", "-o", folder / f"{name}.rplan")
    run("reshard-exec", folder / f"{name}.rplan", "--check", "--allow=extra", cwd=folder)


def digests(folder):
    """{name: digest} of the tensors of a checkpoint."""
    return json.loads(run("reshard-digest", folder, "--format=json").stdout)


#: The states, which are selected on both sides of a job.
ONLY = "only: [" + ", ".join(f"'*.{state}'" for state in STATES) + "]"


class Case:
    """A model with its optimizer in one parallelism, and its endpoints of jobs. Their mesh is the smallest one with
    these model parallel ranks."""

    def __init__(self, mesh, bucket_size=None, experts=0):
        self.mesh, self.experts = mesh, experts
        self.bucket_size = bucket_size
        self.size = max(mesh.values())

    def training(self, seed):
        return Training(Model(seed, **self.mesh, experts=self.experts), self.bucket_size)

    def models(self, folder, text):
        """The model files of both jobs."""
        (folder / "buckets.yaml").write_text(text)
        (folder / "config.json").write_text("{}")
        (folder / "model.yaml").write_text((EXPERTS if self.experts else DENSE + "layouts:\n") + RANKS)

    def checkpoint(self, storage):
        return (
            f"{{layout: {'local' if self.experts else 'megatron-checkpoint'}, storage: {storage}, only: "
            f"'optimizer.state.*'}}"
        )

    def params(self, storage):
        """Rank files, with Megatron-Core's params of the model."""
        sizes = (
            self.mesh
            | {"dp": self.size // (self.mesh.get("tp", 1) * self.mesh.get("pp", 1))}
            | ({"etp": 1} if self.experts else {})
        )
        return (
            f"{{layout: ranks, mesh: {{megatron: {json.dumps(sizes)}}}, switches: {{divisible: "
            f"{128 // self.mesh.get('tp', 1)}}}, storage: {storage}, {ONLY}}}"
        )

    def ranks(self, storage):
        """Rank files, with the params that buckets_model describes."""
        return f"{{layout: ranks, mesh: {{rank: {self.size}}}, storage: {storage}, {ONLY}}}"


def check(rank, case, count):
    """`count`: how many buckets there are, those of equal model parallel ranks once."""
    from reshard.integrations.megatron_buckets import buckets_model

    folder = folder_of(rank)
    with OnCpu():
        training = case.training(1)
        training.train()
        for kind in ("dp_reshardable", "fully_reshardable"):
            training.save(rank, folder, kind)
        expected = held(training)
    text = buckets_model(training.optimizer, training.module)

    def convert():
        assert text.count('"flat"') == count, text.count('"flat"')
        case.models(folder, text)
        job(
            folder,
            "first",
            "buckets.yaml",
            f"{{layout: buckets, storage: dp_reshardable, {ONLY}}}",
            case.ranks("ranks"),
        )
        job(folder, "second", "model.yaml", case.params("ranks"), case.checkpoint("{folder: ours, format: megatron}"))
        compare()

    def compare():
        files = [load_file(folder / f"ranks/rank-{number:05d}.safetensors") for number in range(case.size)]
        files_of = files_with(json.loads(text)["layouts"])
        for number, group, name, state, first, values in expected:
            for at in files_of[number, group]:
                assert torch.equal(files[at][f"0.{name}.{state}"].flatten()[first : first + len(values)], values), (
                    number,
                    group,
                    name,
                    state,
                )
        size = sum(len(values) * len(files_of[number, group]) for number, group, *_, values in expected)
        assert size == sum(value.numel() for file in files for value in file.values())
        found, saved = digests(folder / "ours"), digests(folder / "dp_reshardable")
        assert len(found) == 3 * 10, sorted(found)
        for name, digest in saved.items():  # in fp32 the optimizer's params are the weights
            if "optimizer." not in name and not name.endswith("expert_bias"):
                assert found[f"optimizer.state.param.{name}"] == digest, name
        theirs = {
            name: digest
            for name, digest in digests(folder / "fully_reshardable").items()
            if name.startswith("optimizer.")
        }
        assert (found == theirs) == (case.bucket_size is None), (
            "docs/checkpoints.md says when Megatron-Core's own file is right"
        )

    on_rank_0(rank, convert)


def files_with(layouts):
    """{(number of the optimizer, model parallel rank): the numbers of the rank files that have its params}."""
    found = {}
    for name in layouts["buckets"]["params"]:
        number, variable = re.match(
            r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\{(\w+)\}", name
        ).groups()
        for at, groups in enumerate(layouts["ranks"]["place"][variable]["map"]):
            for group in groups:
                found.setdefault((int(number or 0), group), set()).add(at)
    return found


def one_bucket(rank):
    check(rank, Case({"tp": 2}), 1)


def several_buckets(rank):
    """Here the `fully_reshardable` file of Megatron-Core 0.16.1 does not have the elements that the optimizer holds."""
    check(rank, Case({"tp": 2}, 6000), 3)


def stages(rank):
    """The buckets of the two stages differ."""
    torch.manual_seed(7)
    check(rank, Case({"pp": 2}), 2)


def experts(rank):
    """A second optimizer has the experts."""
    check(rank, Case({"ep": 2}, experts=4), 2)
    check(rank, Case({"tp": 2, "ep": 4}, experts=4), 2)


def to_buckets(rank, source, target):
    """The state of another parallelism becomes buckets, which Megatron-Core's own load reads: every element is the one
    that it loads from the file of the other parallelism, and so is every one after three more steps."""
    from reshard.integrations.megatron_buckets import buckets_model

    folder = folder_of(rank)
    with OnCpu():
        first = source.training(1)
        torch.manual_seed(7)
        first.train()
        first.save(rank, folder, "fully_reshardable")
        live, peer = target.training(2), target.training(3)
        text = buckets_model(live.optimizer, live.module)

        def convert():
            target.models(folder, text)
            job(folder, "first", "model.yaml", target.checkpoint("fully_reshardable"), target.params("ranks"))
            job(
                folder,
                "second",
                "buckets.yaml",
                target.ranks("ranks"),
                f"{{layout: buckets, storage: {{folder: dp_reshardable, format: megatron}}, {ONLY}}}",
            )

        on_rank_0(rank, convert)
        peer.load(folder, "fully_reshardable")
        program = {}
        exec(examples("As the source or the target of a job", "python", "checkpoints")[0], program)
        program["load"](live.model.module, live.optimizer, str(folder / "dp_reshardable"), STEPS, "dp_reshardable")
        for _ in range(2):
            found, expected = ({tuple(key): values for *key, values in held(each)} for each in (live, peer))
            ranks.same(found, expected)
            live.model.module.load_state_dict(peer.model.module.state_dict())
            for each in (live, peer):
                torch.manual_seed(8)
                each.train()


def from_stages_to_buckets(rank):
    to_buckets(rank, Case({"pp": 2}), Case({"tp": 2}, 6000))


def from_experts_to_buckets(rank):
    to_buckets(rank, Case({"ep": 2}, experts=4), Case({"tp": 2, "ep": 4}, 6000, experts=4))


@unittest.skipIf(MISSING, MISSING)
class MegatronOptimizerTest(ranks.RanksTest):
    def test_buckets(self):
        self.ranks(4, one_bucket, several_buckets, stages, experts, from_stages_to_buckets, from_experts_to_buckets)


if __name__ == "__main__":
    unittest.main()
