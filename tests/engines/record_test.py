# SPDX-License-Identifier: Apache-2.0
"""vLLM's own model classes and loaders, recorded without memory on every rank of several meshes: the library's layouts
`vllm` give the same elements, and so do the layouts that are inferred without the library. Part
of `make test-engines`."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import unittest
from pathlib import Path

from record_support import recording

import reshard
from commands import ROOT
from reshard_record.command import run
from reshard_record.compiled import as_recordings, compare, compile_layout
from reshard_record.infer import mesh_text

try:
    import torch
    import transformers
    from safetensors.torch import save_file
    from vllm.model_executor.models import utils as models

    from reshard import releases
    from reshard.integrations.vllm import PACKAGES
    from reshard_record import transformers as live
    from reshard_record import vllm
    from reshard_record.engine import Engine

    releases.installed(*PACKAGES)
    MISSING = ""
except Exception as error:
    MISSING = f"{error}: run scripts/frameworks.sh and build/frameworks/env.sh"

BASE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 512,
    "hidden_act": "silu",
    "rope_theta": 10000,
}
ROUTED = {"moe_intermediate_size": 128, "num_experts_per_tok": 2, "norm_topk_prob": True}
SHARED = {
    **ROUTED,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
#: config.json of cut-down models, by the library's name: 2 key heads (replicated at tp 4), a vocabulary that is padded.
CONFIGS = {
    "qwen3-0.6b": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "llama3-8b": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2.5-7b": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **ROUTED,
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "nemotron-h-8b": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*",
        "mamba_num_heads": 16,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "chunk_size": 128,
        "expand": 2,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "attention_bias": True,
        "rope_theta": 150000,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm-4.5": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **SHARED,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
    },
}
#: Meshes of each model: (tp, pp, expert parallel).
MESHES = {
    "qwen3-0.6b": [(1, 1, False), (2, 1, False), (4, 1, False)],
    "llama3-8b": [(1, 1, False), (2, 1, False), (4, 1, False)],
    "qwen3-30b-a3b": [(1, 1, False), (2, 1, False), (4, 1, False), (2, 1, True)],
    "gpt-oss-120b": [(2, 1, False)],
    "qwen2.5-7b": [(2, 1, False)],
    "mixtral-8x7b": [(2, 1, False)],
    "glm-4.5": [(2, 1, False), (2, 1, True)],
}
#: config.json of architectures that the library lacks.
OTHERS = {
    "granite": {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "pad_token_id": 0},
    "stablelm": {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "use_qkv_bias": True,
        "pad_token_id": 0,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
}
#: Sizes: two from which one model is made, and others of it. (config.json, tp)
GENERAL = [
    ({"num_hidden_layers": 2, "tie_word_embeddings": True, "moe_intermediate_size": 128, "num_experts": 8}, 4),
    (
        {
            "hidden_size": 320,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "head_dim": 64,
            "num_key_value_heads": 4,
            "intermediate_size": 768,
            "vocab_size": 400,
            "moe_intermediate_size": 192,
            "num_experts": 6,
        },
        2,
    ),
    (
        {
            "hidden_size": 192,
            "num_attention_heads": 12,
            "head_dim": 16,
            "intermediate_size": 384,
            "vocab_size": 1200,
            "moe_intermediate_size": 160,
            "num_experts": 4,
        },
        4,
    ),
    (
        {
            "hidden_size": 192,
            "num_attention_heads": 12,
            "head_dim": 48,
            "num_key_value_heads": 6,
            "intermediate_size": 576,
            "vocab_size": 130,
            "moe_intermediate_size": 64,
            "num_experts": 10,
            "tie_word_embeddings": True,
        },
        2,
    ),
]
#: Params that vLLM creates and loads on stages that do not use them (docs/library.md).
UNUSED = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@unittest.skipIf(MISSING, MISSING)
class Record(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.seen = {}

    def model(self, name, size=None):
        """(folder with config.json, library's model of it, {name: (dtype, shape)} of its checkpoint). size:
        further keys of config.json."""
        at = self.folder / (name if size is None else f"{name}-{len(list(self.folder.iterdir()))}")
        at.mkdir(exist_ok=True)
        config = BASE | CONFIGS[name] | (size or {})
        (at / "config.json").write_text(json.dumps(config))
        library = f"extend: {ROOT / 'examples/models' / (name + '.yaml')}\nconfig: {at / 'config.json'}\n"
        params = compile_layout(library, "hf", "{}").source.params(0)
        tied = ("lm_head.weight",) if config["tie_word_embeddings"] else ()
        return (
            at,
            library,
            {tensor: (param.dtype, param.shape) for tensor, param in params.items() if tensor not in tied},
        )

    def recorded(self, name, tp, pp, expert_parallel):
        key = name, tp, pp, expert_parallel
        if key not in self.seen:
            at, _, checkpoint = self.model(name)
            self.seen[key] = list(vllm.recordings(at, Engine(tp, pp, expert_parallel), checkpoint))
        return self.seen[key]

    def test_library(self):
        count = 0
        for name in MESHES:
            _, library, _ = self.model(name)
            for tp, pp, expert_parallel in MESHES[name]:
                with self.subTest(model=name, tp=tp, ep=expert_parallel):
                    found = self.recorded(name, tp, pp, expert_parallel)
                    mesh = f"{{tp: {tp}, views: [{{{'ep' if expert_parallel else 'etp'}: {tp}}}]}}"
                    self.assertEqual(compare(compile_layout(library, "vllm", mesh), found)[:6], [])
                    count += sum(len(one.params) for one in found)
        self.assertGreater(count, 1000)
        print(f"{count} params of {len(MESHES)} models")

    def test_inferred(self):
        for name in MESHES:
            for mesh in MESHES[name]:
                with self.subTest(model=name, mesh=mesh):
                    found = self.recorded(name, *mesh)
                    layout = recording.merge(found)
                    self.assertEqual((layout.refused, layout.differences, layout.left), ({}, [], {}), layout.yaml)
                    self.assertEqual(
                        compare(compile_layout(layout.yaml, "recorded", mesh_text(layout.mesh)), found), []
                    )

    def test_general(self):
        """One model of two recorded sizes gives what vLLM's loader does at two other sizes."""
        for name in ("llama3-8b", "qwen3-30b-a3b"):
            found = []
            for size, tp in GENERAL:
                at, _, checkpoint = self.model(name, {"tie_word_embeddings": False} | size)
                found.append((at / "config.json", list(vllm.recordings(at, Engine(tp), checkpoint))))
            general = recording.generalize([(recording.merge(each), config) for config, each in found[:2]])
            self.assertTrue(general.exact, (general.kept, general.differences))
            (self.folder / "general.yaml").write_text(general.yaml)
            for (config, recorded), (_, tp) in zip(found, GENERAL):
                with self.subTest(model=name, config=config.parent.name, tp=tp):
                    compiled = compile_layout(
                        f"extend: {self.folder / 'general.yaml'}\nconfig: {config}\n",
                        "recorded",
                        f"{{tp: {tp}, pp: 1}}",
                    )
                    self.assertEqual(compare(compiled, recorded)[:6], [], general.yaml)
                    self.assertEqual(as_recordings(compiled, {})[0].tensors, recorded[0].tensors)

    def test_transformers(self):
        """from_pretrained of transformers 5 puts every element where the library's layout of a live module has it."""
        count = 0
        for name in CONFIGS:
            with self.subTest(model=name):
                at, library, checkpoint = self.model(name)
                found = live.recording(at, checkpoint=checkpoint)
                left = "let: {mtp: 0}\n" if name == "glm-4.5" else ""  # transformers leaves these layers out
                self.assertEqual(
                    compare(compile_layout(library + left, "fsdp2", "{}", ", switches: {transformers: 5}"), [found])[
                        :6
                    ],
                    [],
                )
                layout = recording.merge([found])
                self.assertEqual((layout.refused, layout.differences, layout.left), ({}, [], {}), layout.yaml)
                count += len(found.params)
        self.assertGreater(count, 270)
        print(f"{count} params of {len(CONFIGS)} models")

    def test_stages(self):
        """Pipeline stages: the layers of each stage. Params that stages do not use are in the recording alone."""
        models._model_to_pp_missing_layer_names[0] = ["model."]  # as a module of an earlier stage leaves it
        for name in ("llama3-8b", "qwen3-30b-a3b"):
            _, library, _ = self.model(name)
            found = self.recorded(name, 2, 3, False)
            self.assertNotIn(0, models._model_to_pp_missing_layer_names)
            lines = compare(compile_layout(library, "vllm", "{tp: 2, pp: 3, views: [{etp: 2, pp: 3}]}"), found)
            self.assertEqual(
                [
                    line
                    for line in lines
                    if not line.endswith("only in the recording") or line.split(": ")[1] not in UNUSED
                ],
                [],
            )
            layout = recording.merge(found)
            self.assertTrue(layout.exact, layout.differences[:5])
            self.assertIn("place: {layer: ", layout.yaml)

    def test_refit_of_architectures_that_the_library_lacks(self):
        """A layout without a line by hand: what a plan moves are the bytes that vLLM's own loader puts there."""
        for name, config in OTHERS.items():
            with self.subTest(architecture=name):
                at = self.folder / name
                at.mkdir()
                (at / "config.json").write_text(json.dumps(BASE | config))
                module = transformers.AutoModelForCausalLM.from_config(
                    transformers.AutoConfig.from_pretrained(at), dtype=torch.bfloat16
                )
                weights = {
                    tensor: torch.randn_like(value)
                    for tensor, value in module.state_dict().items()
                    if tensor in dict(module.named_parameters())
                }
                save_file(weights, at / "model.safetensors")
                layout = recording.merge(vllm.recordings(at, Engine(tp=2)))
                self.assertEqual((layout.refused, layout.differences, layout.left), ({}, [], {}), layout.yaml)
                (at / "model.yaml").write_text(layout.yaml)
                (at / "job.yaml").write_text(
                    f"version: 1\nmodel: model.yaml\nsource: {{layout: hf, mesh: {{}}}}\n"
                    f"target: {{layout: recorded, mesh: {mesh_text(layout.mesh)}, ranks: 1..2}}\n"
                )
                moved = self.moved(reshard.compile(at / "job.yaml"), weights)
                for rank, module in vllm.modules(at, Engine(tp=2), contextlib.nullcontext):
                    with torch.no_grad():
                        module.load_weights(iter(weights.items()))
                    loaded = dict(module.named_parameters())
                    self.assertEqual(sorted(loaded), sorted(moved[rank]))
                    self.assertEqual([each for each in loaded if not torch.equal(loaded[each], moved[rank][each])], [])

    @staticmethod
    def moved(plan, weights):
        """The params of both target ranks after a run in this process."""
        with reshard.Executor(plan, threads=1) as executor:
            executor.bind(weights, "source", 0)
            targets = [
                {
                    name: torch.full(param.shape, 3.0, dtype=reshard.dtypes.torch_dtype(param.dtype))
                    for name, param in plan.params(1 + rank, "target").items()
                }
                for rank in range(2)
            ]
            for rank, params in enumerate(targets):
                executor.bind(params, "target", 1 + rank)
            executor.prepare()
            executor.run(timeout=60)
        return targets

    def test_computed_by_the_loader(self):
        """Nemotron-H: vLLM's A is -exp(A_log), which the recorder does not state, but says how; everything else is
        stated."""
        at, _, checkpoint = self.model("nemotron-h-8b")
        layout = recording.merge(vllm.recordings(at, Engine(tp=2), checkpoint))
        self.assertTrue(layout.refused)
        self.assertEqual({name.split(".", 3)[3] for name in layout.refused}, {"mixer.A"})
        for why in layout.refused.values():
            self.assertRegex(
                why,
                r"computed by aten\.neg of aten\.exp of .*\.A_log; add it to the layout by hand: .*: "
                r"{holds: .*, shard: {0: tp}, transform: neg_exp}$",
            )
        self.assertEqual(layout.differences, [])
        (line,) = {why.partition("by hand: ")[2] for why in layout.refused.values()}
        compiled = compile_layout(f"{layout.yaml}      {line}\n", "recorded", mesh_text(layout.mesh))
        self.assertLessEqual(set(layout.refused), set(compiled.target.params(1)))

    def test_control(self):
        """A layout that is wrong: k and v swapped."""
        found = self.recorded("llama3-8b", 2, 1, False)
        right = recording.merge(found).yaml
        swapped = right.replace(
            'k_proj.weight", "model.layers.{layer}.self_attn.v_proj',
            'v_proj.weight", "model.layers.{layer}.self_attn.k_proj',
        )
        self.assertNotEqual(swapped, right)
        lines = compare(compile_layout(swapped, "recorded", "{tp: 2, pp: 1}"), found)
        self.assertEqual(
            {line.split(": ")[1] for line in lines},
            {f"model.layers.{layer}.self_attn.qkv_proj.weight" for layer in range(4)},
        )
        self.assertEqual(len(lines), 2 * 2 * 4)  # k and v on two ranks in four layers

    def test_command(self):
        """reshard-record writes the layout of a checkpoint in files, and --check finds it right, then wrong."""
        at, _, checkpoint = self.model("qwen3-0.6b")
        save_file(
            {name: torch.empty(shape, dtype=torch.bfloat16) for name, (_, shape) in checkpoint.items()},
            at / "model.safetensors",
        )
        written = self.folder / "x.yaml"
        self.assertEqual(run(["vllm", "--model", str(at), "--tp", "2", "-o", str(written)]), 0)
        self.assertIn("# reshard-record vllm --model qwen3-0.6b --tp 2", written.read_text())
        self.assertEqual(run(["--check", str(written)]), 0)
        text = written.read_text()
        self.assertIn('down_proj.weight", shard: {1: tp}}', text)
        written.write_text(
            text.replace('down_proj.weight", shard: {1: tp}}', 'down_proj.weight", shard: {1: {axis: tp, stride: 2}}}')
        )
        self.assertEqual(run(["--check", str(written)]), 1)
        self.assertEqual(run(["transformers", "--model", str(at), "-o", str(written)]), 0)
        self.assertIn("# reshard-record transformers --model qwen3-0.6b --dtype bfloat16", written.read_text())
        self.assertEqual(run(["--check", str(written)]), 0)

    def test_processed(self):
        """vLLM for CPUs with AVX-512 packs the linear layers, and moves the experts; the norms stay."""
        at, _, _ = self.model("qwen3-30b-a3b", {"num_hidden_layers": 1, "vocab_size": 64})
        for rank in range(2):
            found = vllm.processed(at, Engine(tp=2), rank)
            loaded = {
                name
                for _, module in vllm.modules(at, Engine(tp=2), ranks=[rank])
                for name, _ in module.named_parameters()
            }
            self.assertEqual(loaded - set(found), set())
            kinds = {name: change.kind for name, change in found.items()}
            self.assertEqual({kind for name, kind in kinds.items() if "norm" in name}, {"unchanged"})
            self.assertNotIn("computed", kinds.values())
            for name, change in found.items():
                self.assertIn(change.of, ((), (name,)))
        written = self.folder / "processed.txt"
        self.assertEqual(run(["vllm", "--model", str(at), "--processed", "-o", str(written)]), 0)
        self.assertIn("rank 0: ", written.read_text().splitlines()[-1])
        self.assertEqual(run(["transformers", "--model", str(at), "--processed"]), 2)


if __name__ == "__main__":
    if MISSING:
        print(f"SKIPPED: {MISSING}", file=sys.stderr)
    unittest.main()
