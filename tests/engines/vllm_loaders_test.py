# SPDX-License-Identifier: Apache-2.0
"""vLLM's own loaders against plans, byte by byte: vLLM's model classes are built as one rank of a mesh after the other,
with stand-ins for the process groups, and load a checkpoint by their `load_weights`. A plan from the same checkpoint to
the layout `vllm` must give the same bytes on every rank, before vLLM repacks anything for its kernels. Every family of
the library; tensor parallel, expert parallel, pipeline stages.

    make test-engines"""

import json
import os
import sys
import types
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("frameworks",)]

import support  # noqa: E402
import torch  # noqa: E402
import vllm.distributed.parallel_state as parallel_state  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.model_executor.models import utils as models  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402

#: Cases: the library's name of the model, and the config.json of a small one.
CASES = {name: (name, config) for name, config in support.CONFIGS.items()} | {
    "deepseek-v3": ("deepseek-v3", support.CONFIGS["deepseek-v3"] | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}),
    "qwen3-tied": ("qwen3-0.6b", support.CONFIGS["qwen3-8b"] | {"tie_word_embeddings": True}),
    "llama-1-kv-head": ("llama3-8b", support.CONFIGS["llama3-8b"] | {"num_key_value_heads": 1}),
}
#: Meshes: tensor parallel ranks, pipeline stages, expert parallel.
MESHES = {"tp1": (1, 1, False), "tp2": (2, 1, False), "tp4": (4, 1, False), "ep2": (2, 1, True), "pp2": (1, 2, False), "pp3": (1, 3, False), "tp2pp2": (2, 2, False)}
WITHOUT_EXPERTS = ("qwen3-8b", "qwen3-tied", "llama3-8b", "llama-1-kv-head", "qwen2.5-7b", "nemotron-h-8b")
#: Created on stages that do not use them (docs/library.md).
UNUSED = ("model.embed_tokens.weight", "model.embedding.weight", "model.norm.weight", "model.norm_f.weight", "lm_head.weight")

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


def group(rank, size):
    """The attributes of a process group that constructors and loaders read."""
    ranks = types.SimpleNamespace(rank=lambda: rank, size=lambda: size)
    return types.SimpleNamespace(rank_in_group=rank, world_size=size, is_first_rank=rank == 0, is_last_rank=rank == size - 1, rank=rank,
                                 local_rank=0, ranks=list(range(size)), device_group=ranks, cpu_group=ranks, unique_name="stand-in",
                                 device=torch.device("cpu"))


def loaded(config, rank, mesh, tensors):
    """The params of one rank as vLLM's loader fills them."""
    tp, pp, experts = mesh
    for name in ("_WORLD", "_INNER_DP_WORLD", "_TP", "_PP", "_DP", "_EP", "_PCP", "_DCP", "_EPLB"):
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, group(0, 1))
    parallel_state._TP, parallel_state._PP = group(rank % tp, tp), group(rank // tp, pp)
    if experts:
        parallel_state._EP = group(rank % tp, tp)
    config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size = tp, pp
    config.parallel_config.enable_expert_parallel = experts
    config.compilation_config.static_forward_context.clear()
    models._model_to_pp_missing_layer_names.clear()  # by the address of a model, which may be that of an earlier one
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.no_grad():
        module = initialize_model(config)
        module.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    return {name: param.detach() for name, param in module.named_parameters()}


def moved(plan, tensors):
    """The params of each rank as the plan fills them."""
    import reshard

    target = plan.endpoints[1]
    params = {rank: plan.params(rank, "target") for rank in target.ranks}
    found = {rank: {name: torch.zeros(param.shape, dtype=torch.float32 if param.transform == "neg_exp" else reshard.dtypes.torch_dtype(param.dtype))
                    for name, param in held.items()} for rank, held in params.items()}
    with reshard.Executor(plan, threads=1) as executor:
        executor.bind(tensors, "source", 0)
        for rank, held in params.items():
            executor.bind({name: found[rank][name] for name, param in held.items() if not param.transform}, "target", rank)
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
        self.assertEqual({name: (tensor.dtype, tensor.shape) for name, tensor in found.items()},
                         {name: (wanted[name].dtype, wanted[name].shape) for name in found})
        bytes_of = lambda tensor: tensor.contiguous().view(torch.uint8)  # noqa: E731
        self.assertEqual([name for name in found if not torch.equal(bytes_of(found[name]), bytes_of(wanted[name]))][:4], [], "these have other bytes")
        return len(found)

    def check(self, case, folder, changed=()):
        """Compares all ranks of all meshes of a case; returns the number of params. changed: tensors that the plan moves
        with other values."""
        import reshard

        name, values = CASES[case]
        at = folder / case
        at.mkdir()
        (at / "config.json").write_text(json.dumps(values))
        (at / "model.yaml").write_text(f"extend: {support.MODELS / (name + '.yaml')}\nconfig: config.json\n")
        config = EngineArgs(model=str(at), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16").create_engine_config()
        tensors, count = None, 0
        for mesh in meshes(case):
            tp, pp, experts = MESHES[mesh]
            view = f"{{{'ep' if experts else 'etp'}: {tp}, pp: {pp}}}"
            (at / f"{mesh}.yaml").write_text(f"version: 1\nmodel: model.yaml\nsource: {{layout: hf, mesh: {{}}}}\n"
                                             f"target: {{layout: vllm, mesh: {{tp: {tp}, pp: {pp}, views: [{view}]}}, ranks: 1..{tp * pp}}}\n")
            plan = reshard.compile(at / f"{mesh}.yaml")
            tensors = tensors or support.checkpoint(at / "A", plan.params(0, "source"), 0)
            other = {name: -tensor if name in changed else tensor for name, tensor in tensors.items()}
            for rank, found in enumerate(moved(plan, other)):
                with self.subTest(case=case, mesh=mesh, rank=rank):
                    count += self.compare(loaded(config, rank, MESHES[mesh], tensors), found, MESHES[mesh])
        return count

    def test_bytes(self):
        cases = os.environ.get("CASES", " ".join(CASES)).split()
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
