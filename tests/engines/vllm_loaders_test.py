# SPDX-License-Identifier: Apache-2.0
"""vLLM's own loaders against plans, byte by byte: vLLM's model classes are built as one rank of a mesh after the other,
with stand-ins for the process groups, and load a checkpoint by their `load_weights`. A plan from the same checkpoint to
the layout `vllm` must give the same bytes on every rank, before vLLM repacks anything for its kernels. Every family of
the library; tensor parallel, expert parallel, pipeline stages.

    make test-engines"""

import contextlib
import os
import unittest

import torch

import support

#: Meshes: tensor parallel ranks, pipeline stages, expert parallel.
MESHES = {
    "tp1": (1, 1, False),
    "tp2": (2, 1, False),
    "tp4": (4, 1, False),
    "ep2": (2, 1, True),
    "pp2": (1, 2, False),
    "pp3": (1, 3, False),
    "tp2pp2": (2, 2, False),
}
WITHOUT_EXPERTS = (
    "qwen3-8b",
    "qwen3-tied",
    "llama3-8b",
    "llama-1-kv-head",
    "qwen2.5-7b",
    "nemotron-h-8b",
    "gemma-3-27b",
    "gemma-4-31b",
    "ministral-3-8b",
    "olmo-3-7b",
    "phi-3.5-mini",
    "qwen3.5-9b",
    "seed-oss-36b",
)
#: Created on stages that do not use them (docs/library.md).
UNUSED = (
    "model.embed_tokens.weight",
    "model.embedding.weight",
    "model.norm.weight",
    "model.norm_f.weight",
    "lm_head.weight",
)

#: With several ranks that cut experts, only the first one adds this bias; the others keep the zeros that vLLM has made.
ZEROS = ".mlp.experts.routed_experts.w2_bias"


def meshes(case):
    """The names of the meshes of a case."""
    for name in MESHES:
        if name == "ep2" and case in WITHOUT_EXPERTS:
            continue
        if name == "pp3" and case == "glm-4.5":
            continue  # vLLM refuses a stage without routed experts, here the first
        if name == "tp4" and case == "nemotron-h-8b":
            continue  # vLLM refuses more ranks than groups of the state, 2 here
        yield name


def loaded(at, mesh, tensors):
    """Yields the params and persistent buffers of one rank after the other as vLLM's loader fills them."""
    from reshard.integrations.vllm import OWN_BUFFERS
    from reshard_record import vllm
    from reshard_record.engine import Engine, params_of

    tp, pp, experts = mesh
    for _, module in vllm.modules(at, Engine(tp, pp, experts), contextlib.nullcontext):
        with torch.no_grad():
            module.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
        yield {name: param.detach() for name, param in params_of(module, OWN_BUFFERS).items()}


def moved(plan, tensors):
    """The params of each rank as the plan fills them."""
    import reshard

    target = plan.endpoints[1]
    params = {rank: plan.params(rank, "target") for rank in target.ranks}
    found = {
        rank: {
            name: torch.zeros(
                param.shape,
                dtype=torch.float32 if param.transform == "neg_exp" else reshard.dtypes.torch_dtype(param.dtype),
            )
            for name, param in held.items()
        }
        for rank, held in params.items()
    }
    with reshard.Executor(plan, threads=1) as executor:
        executor.bind(tensors, "source", 0)
        for rank, held in params.items():
            executor.bind(
                {name: found[rank][name] for name, param in held.items() if not param.transform}, "target", rank
            )
        executor.set_transform("neg_exp", finalize=lambda param: reshard.neg_exp(found[param.rank])["finalize"](param))
        executor.set_hook("absorb_kv_b", lambda rank: None)  # a product of MLA's kernels, after loading
        executor.prepare()
        executor.run(timeout=60)
    return [found[rank] for rank in target.ranks]


class Loaders(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = support.module_folder(cls)

    def compare(self, wanted, found, mesh):
        """Compares one rank; returns the number of params."""
        tp, pp, experts = mesh
        self.assertEqual(sorted(set(found) - set(wanted))[:4], [], "vLLM lacks these")
        other = [name for name in wanted if name not in found and not (pp > 1 and name in UNUSED)]
        if tp > 1 and not experts:
            other = [name for name in other if not name.endswith(ZEROS) or wanted[name].any()]
        self.assertEqual(other[:4], [], "the layout lacks these")
        self.assertEqual(
            {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()},
            {name: (wanted[name].dtype, wanted[name].shape) for name in found},
        )
        bytes_of = lambda tensor: tensor.contiguous().view(torch.uint8)
        self.assertEqual(
            [name for name in found if not torch.equal(bytes_of(found[name]), bytes_of(wanted[name]))][:4],
            [],
            "these have other bytes",
        )
        return len(found)

    def check(self, case, folder, changed=()):
        """Compares all ranks of all meshes of a case; returns the number of params. changed: tensors that the plan
        moves with other values."""
        import reshard

        at = support.model(folder, case, support.CASES)
        tensors, count = None, 0
        for mesh in meshes(case):
            tp, pp, experts = MESHES[mesh]
            view = f"{{{'ep' if experts else 'etp'}: {tp}, pp: {pp}}}"
            (at / f"{mesh}.yaml").write_text(
                f"version: 1\nmodel: model.yaml\nsource: {{layout: hf, mesh: {{}}}}\n"
                f"target: {{layout: vllm, mesh: {{tp: {tp}, pp: {pp}, views: [{view}]}}, ranks: 1..{tp * pp}}}\n"
            )
            plan = reshard.compile(at / f"{mesh}.yaml")
            tensors = tensors or support.checkpoint(at / "A", plan.params(0, "source"), 0)
            other = {name: -tensor if name in changed else tensor for name, tensor in tensors.items()}
            for rank, (wanted, found) in enumerate(
                zip(loaded(at, MESHES[mesh], tensors), moved(plan, other), strict=True)
            ):
                with self.subTest(case=case, mesh=mesh, rank=rank):
                    count += self.compare(wanted, found, MESHES[mesh])
        return count

    def test_bytes(self):
        cases = os.environ.get("CASES", " ".join(support.CASES)).split()
        counts = {case: self.check(case, self.folder) for case in cases}
        self.assertGreater(min(counts.values()), 100)
        print(f"{sum(counts.values())} params of {len(counts)} models")

    def test_other_values_differ(self):
        folder = self.folder / "other"
        folder.mkdir()
        result, control = unittest.TestResult(), Loaders("test_bytes")
        control.test_bytes = lambda: control.check("qwen3-8b", folder, ["model.layers.1.self_attn.k_proj.weight"])
        control.run(result)
        self.assertEqual(result.errors, [])
        self.assertEqual(len(result.failures), 1 + 2 + 4 + 1 + 1 + 2, "all ranks that have layer 1")
        for _, text in result.failures:
            self.assertIn("['model.layers.1.self_attn.qkv_proj.weight'] != []", text)


if __name__ == "__main__":
    unittest.main()
