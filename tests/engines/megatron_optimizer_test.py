# SPDX-License-Identifier: Apache-2.0
"""The state of a live distributed optimizer of Megatron-Core (tp 2 × dp 2, gloo, CPU) after three steps of Adam, saved as
`dp_reshardable`: `buckets_model` records its buckets, `reshard-convert` joins their stored chunks, and two jobs give them the
names of `fully_reshardable`. Every element of every state is the one that the optimizer holds, and that of the checkpoint
that it saves as `fully_reshardable` itself, if there is one bucket.

    scripts/frameworks.sh && . build/frameworks/env.sh
    RESHARD_BIN=build/release $RESHARD_FRAMEWORKS_PYTHON tests/engines/megatron_optimizer_test.py"""

import json
import os
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "lib")]
import ranks  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent))  # tests/frameworks has a megatron_test too
import torch  # noqa: E402
from commands import run  # noqa: E402
from documents import examples  # noqa: E402
from megatron_test import MISSING, Model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

if not MISSING:
    from megatron_checkpoint_test import DENSE, folder_of, on_rank_0
    from megatron_training import STATES, STEPS, OnCpu, Training, held

#: Of the optimizer's params: the names in the rank files that layout `ranks` describes.
LOCAL = """optimizer: {param: fp32, exp_avg: fp32, exp_avg_sq: fp32}
layouts:
  local: {extend: megatron-local, rename: {"": "0."}, optimizer: "{param}.{state}"}
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


def local(mesh, storage):
    """The endpoint of rank files with Megatron-Core's params."""
    return f"{{layout: local, mesh: {json.dumps(mesh)}, switches: {{divisible: {64 if 'tp' in mesh else 128}}}, storage: {storage}, {ONLY}}}"


def check(rank, mesh, bucket_size, count):
    """`count`: how many buckets there are, those of equal model parallel ranks once."""
    from reshard.integrations.megatron_buckets import buckets_model

    folder = folder_of(rank)
    with OnCpu():
        training = Training(Model(1, **mesh), bucket_size)
        training.train()
        for kind in ("dp_reshardable", "fully_reshardable"):
            training.save(rank, folder, kind)
        expected = held(training)
    text = buckets_model(training.optimizer, training.module)

    def convert():
        assert text.count('"flat"') == count, text.count('"flat"')
        models(folder, text)
        run(sys.executable, "-c", "from reshard.commands import convert; convert()", "dp_reshardable", "joined", "--to=safetensors", "--only=optimizer.distributed.*", "--allow=extra",
            cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        job(folder, "first", "buckets.yaml", f"{{layout: buckets, storage: joined, {ONLY}}}", f"{{layout: ranks, mesh: {{rank: 2}}, storage: ranks, {ONLY}}}")
        job(folder, "second", "model.yaml", local(mesh, "ranks"), "{layout: megatron-checkpoint, storage: {folder: ours, format: megatron}, only: 'optimizer.state.*'}")
        compare()

    def compare():
        files = [load_file(folder / f"ranks/rank-{group:05d}.safetensors") for group in range(2)]
        for group, name, state, first, values in expected:
            assert torch.equal(files[group][f"0.{name}.{state}"].flatten()[first : first + len(values)], values), (group, name, state)
        assert sum(len(values) for *_, values in expected) == sum(value.numel() for file in files for value in file.values())
        found, saved = digests(folder / "ours"), digests(folder / "dp_reshardable")
        assert len(found) == 3 * 10, sorted(found)
        for name, digest in saved.items():  # in fp32 the optimizer's params are the weights
            if not name.startswith("optimizer."):
                assert found[f"optimizer.state.param.{name}"] == digest, name
        theirs = {name: digest for name, digest in digests(folder / "fully_reshardable").items() if name.startswith("optimizer.")}
        assert (found == theirs) == (bucket_size is None), "docs/checkpoints.md says when Megatron-Core's own file is right"

    on_rank_0(rank, convert)


def models(folder, text):
    """The model files of both jobs."""
    (folder / "buckets.yaml").write_text(text)
    (folder / "config.json").write_text("{}")
    (folder / "model.yaml").write_text(DENSE + LOCAL)


def one_bucket(rank):
    check(rank, {"tp": 2}, None, 1)


def several_buckets(rank):
    """Here the `fully_reshardable` file of Megatron-Core 0.16.1 does not have the elements that the optimizer holds."""
    check(rank, {"tp": 2}, 6000, 3)


def stages(rank):
    """The buckets of the two stages differ."""
    torch.manual_seed(7)
    check(rank, {"pp": 2}, None, 2)


def to_buckets(rank):
    """The state of another parallelism becomes buckets, which Megatron-Core's own load reads: every element is the one that it loads from the file of the other
    parallelism, and so is every one after three more steps."""
    from reshard.integrations.megatron_buckets import buckets_model

    folder, mesh = folder_of(rank), {"tp": 2}
    with OnCpu():
        source = Training(Model(1, pp=2), None)
        torch.manual_seed(7)
        source.train()
        source.save(rank, folder, "fully_reshardable")
        target, peer = Training(Model(2, **mesh), 6000), Training(Model(3, **mesh), 6000)
        text = buckets_model(target.optimizer, target.module)

        def convert():
            models(folder, text)
            job(folder, "first", "model.yaml", "{layout: megatron-checkpoint, storage: fully_reshardable, only: 'optimizer.state.*'}", local(mesh, "ranks"))
            job(folder, "second", "buckets.yaml", f"{{layout: ranks, mesh: {{rank: 2}}, storage: ranks, {ONLY}}}",
                f"{{layout: buckets, storage: {{folder: dp_reshardable, format: megatron}}, {ONLY}}}")

        on_rank_0(rank, convert)
        peer.load(folder, "fully_reshardable")
        load = {"model": target.model.module, "optimizer": target.optimizer, "folder": str(folder / "dp_reshardable"), "steps": STEPS}
        exec(examples("As the source or the target of a job", "python", "checkpoints")[2], load)
        for _ in range(2):
            found, expected = ({tuple(key): values for *key, values in held(each)} for each in (target, peer))
            ranks.same(found, expected)
            target.model.module.load_state_dict(peer.model.module.state_dict())
            target.train(), peer.train()


@unittest.skipIf(MISSING, MISSING)
class MegatronOptimizerTest(ranks.RanksTest):
    def test_buckets(self):
        self.ranks(4, one_bucket, several_buckets, stages, to_buckets)


if __name__ == "__main__":
    unittest.main()
