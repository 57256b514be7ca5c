# SPDX-License-Identifier: Apache-2.0
"""Live Megatron-Core models in virtual pipeline stages: the names, shapes, dtypes and layers of every rank equal those
of the library's layouts with `switches: {vpp: 2}`. Each rank's model is a list of chunks, whose names are those of
torch.nn.ModuleList(chunks).

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/megatron_chunks_test.py

One process acts as each rank in turn, over PyTorch's fake process group. With --write it rewrites the listings of
tests/library/chunks, which the ordinary suite compares with the layouts."""

import re
import sys
import tempfile
import types
import unittest
import warnings
from pathlib import Path

import library
from commands import BIN, ROOT
from module import importable

try:
    warnings.filterwarnings("ignore")
    import megatron_cpu  # noqa: F401

    import megatron.core
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.ssm.mamba_block import MambaStack
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    MISSING = ""

    class Duplicated(torch.nn.Linear):
        """Transformer Engine's linear with parallel_mode="duplicated"."""

        def __init__(self, rows, columns, **_):
            super().__init__(rows, columns, bias=False)

    multi_latent_attention.TELinear = Duplicated

    class Nothing(torch.nn.Module):
        def __init__(self, *_, **__):
            super().__init__()

except ImportError as error:
    MISSING = f"{error}: run scripts/frameworks.sh and build/frameworks/env.sh"

BASE = {"layers": 8, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 199}
MOE = {**BASE, "experts": 4, "moe_ffn": 24}
MLA = {**MOE, "first_dense": 2, "q_lora": 16, "kv_lora": 12, "nope": 8, "rope": 4, "v_dim": 8}
WHOLE = {"tp": 1, "pp": 2, "dp": 1, "ep": 1}
CUT = {"tp": 2, "pp": 2, "dp": 2, "ep": 2}
INTERLEAVED = "{axis: pp, interleave: vpp}"
LOCAL = (
    "llama3-8b",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "qwen3-30b-a3b",
)  # models with a layout for Megatron-Core's local specs
# model, its numbers, other settings of Megatron-Core's configuration, and the equivalent rule of `place`
CASES = {
    "llama3-8b": ("llama3-8b", BASE, {}, INTERLEAVED),
    "qwen2.5-7b": ("qwen2.5-7b", BASE, {"add_qkv_bias": True}, INTERLEAVED),
    "qwen3-0.6b": ("qwen3-0.6b", BASE, {"qk_layernorm": True}, INTERLEAVED),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", MOE, {"qk_layernorm": True}, INTERLEAVED),
    "glm-4.5": (
        "glm-4.5",
        {**MOE, "first_dense": 3},
        {"qk_layernorm": True, "add_qkv_bias": True, "mtp_num_layers": 1},
        INTERLEAVED,
    ),
    "deepseek-v3": ("deepseek-v3", MLA, {"mtp_num_layers": 1}, INTERLEAVED),
    "kimi-k2": ("kimi-k2", MLA, {}, INTERLEAVED),
    "gpt-oss-120b": (
        "gpt-oss-120b",
        {**BASE, "experts": 4},
        {"add_qkv_bias": True, "add_bias_linear": True, "softmax_type": "learnable"},
        INTERLEAVED,
    ),
    "first stage of two layers": (
        "llama3-8b",
        BASE,
        {"num_layers_in_first_pipeline_stage": 2},
        "{axis: pp, first: 2, interleave: vpp}",
    ),
    "embedding and loss count": (
        "llama3-8b",
        {**BASE, "layers": 6},
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        "{axis: pp, embedding: true, loss: true, interleave: vpp}",
    ),
    "a string of stages": (
        "llama3-8b",
        BASE,
        {"pipeline_model_parallel_layout": "E|ttt|t*4|tL"},
        "{axis: pp, stages: 'E|ttt|t*4|tL'}",
    ),
}
# Without Transformer Engine, norms and experts have other names, which only a layout `megatron-local` can describe.
FUSED = [
    (r"self_attention\.q_layernorm", "self_attention.linear_q_up_proj.layer_norm_weight", "q_lora"),
    (r"self_attention\.kv_layernorm", "self_attention.linear_kv_up_proj.layer_norm_weight", "q_lora"),
    (r"input_layernorm", "self_attention.linear_qkv.layer_norm_weight", "kv_heads"),
    (r"pre_mlp_layernorm", "mlp.linear_fc1.layer_norm_weight", "dense"),
]


def fused(name, numbers, dense):
    """The name in Transformer Engine's modules; `dense`: a layer without experts."""
    name = re.sub(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$", r".experts.\2.\3\1", name)
    for local, other, needs in FUSED:
        has = {"q_lora": "q_lora" in numbers, "kv_heads": "q_lora" not in numbers, "dense": dense}[needs]
        if has:
            name = re.sub(local + r"\.weight$", other, name)
    return name


def configuration(model, numbers, more, mesh):
    experts = numbers.get("experts")
    more = dict(more)
    if experts:
        more |= {"num_moe_experts": experts, "moe_ffn_hidden_size": numbers.get("moe_ffn", numbers["ffn"])}
        if "first_dense" in numbers:
            more |= {
                "moe_layer_freq": [int(layer >= numbers["first_dense"]) for layer in range(numbers["layers"])],
                "moe_shared_expert_intermediate_size": numbers["moe_ffn"],
                "moe_router_enable_expert_bias": True,
                "moe_router_score_function": "sigmoid",
            }
    if "q_lora" in numbers:
        more |= {
            "q_lora_rank": numbers["q_lora"],
            "kv_lora_rank": numbers["kv_lora"],
            "qk_head_dim": numbers["nope"],
            "qk_pos_emb_head_dim": numbers["rope"],
            "v_head_dim": numbers["v_dim"],
            "qk_layernorm": True,
            "multi_latent_attention": True,
        }
    else:
        more |= {"num_query_groups": numbers["kv_heads"], "kv_channels": numbers["head_dim"]}
    if "pipeline_model_parallel_layout" not in more:
        more["virtual_pipeline_model_parallel_size"] = 2
    return (MLATransformerConfig if "q_lora" in numbers else TransformerConfig)(
        num_layers=numbers["layers"],
        hidden_size=numbers["hidden"],
        num_attention_heads=numbers["heads"],
        ffn_hidden_size=numbers["ffn"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=more.pop("add_bias_linear", False),
        tensor_model_parallel_size=mesh["tp"],
        pipeline_model_parallel_size=mesh["pp"],
        expert_model_parallel_size=mesh["ep"] if experts else 1,
        expert_tensor_parallel_size=1,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        **more,
    )


class Rank:
    """One rank of a fake world."""

    def __init__(self, mesh, rank):
        self.mesh, self.rank, self.world = mesh, rank, mesh["tp"] * mesh["pp"] * mesh["dp"]

    def __enter__(self):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.world)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.mesh["tp"],
            pipeline_model_parallel_size=self.mesh["pp"],
            virtual_pipeline_model_parallel_size=2,
            expert_model_parallel_size=self.mesh["ep"],
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )

    def __exit__(self, *_):
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def chunks(config, numbers, tied, mesh):
    """A rank's model, built as Megatron-LM's get_model does."""
    vocabulary = -(-numbers["vocab"] // (128 * mesh["tp"])) * 128 * mesh["tp"]
    for chunk in range(2):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=chunk)
        if "q_lora" in numbers:
            for layer in spec.layer_specs:
                parts = layer.submodules.self_attention.submodules
                parts.linear_q_down_proj = parts.linear_kv_down_proj = Duplicated
                parts.core_attention = (
                    Nothing  # the local attention does not accept heads of two lengths; neither has params
                )
        mtp = (
            get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=chunk)
            if config.mtp_num_layers
            else None
        )
        module = GPTModel(
            config,
            spec,
            vocabulary,
            64,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            mtp_block_spec=mtp,
            vp_stage=chunk,
        )
        module.bfloat16()
        for each in module.modules():
            if hasattr(each, "_maintain_float32_expert_bias"):
                each._maintain_float32_expert_bias()
        yield module


def tensors(made):
    return {
        name: tensor for name, tensor in made.state_dict().items() if torch.is_tensor(tensor)
    }  # without _extra_state


def modules(case, mesh, rank):
    """A rank's chunks, and {name of a tensor in a layer: the layer's number}."""
    model, numbers, more, _ = CASES[case]
    with Rank(mesh, rank):
        made = torch.nn.ModuleList(
            chunks(configuration(model, numbers, more, mesh), numbers, model == "qwen3-0.6b", mesh)
        )
    layers = {
        name: module.layer_number - 1
        for name, module in made.named_modules()
        if re.search(r"\.decoder\.layers\.\d+$", name)
    }
    return made, {
        name: number for prefix, number in layers.items() for name in tensors(made) if name.startswith(prefix + ".")
    }


def live(case, mesh, rank):
    """{name: (shape, dtype, layer)} of a rank."""
    model, numbers, _, _ = CASES[case]
    made, layers = modules(case, mesh, rank)
    result = {}
    for name, tensor in tensors(made).items():
        layer = layers.get(name)
        dense = layer is not None and ("experts" not in numbers or layer < numbers.get("first_dense", 0))
        full = name if model in LOCAL else fused(name, numbers, dense)
        result[full] = (list(tensor.shape), {torch.bfloat16: "bf16", torch.float32: "fp32"}[tensor.dtype], layer)
    return result


def planned(case, mesh, folder):
    """The same according to the layout, by rank."""
    model, numbers, _, placement = CASES[case]
    source = library.chunked(
        BIN, model, layout(model), mesh, placement, [f"{name}={value}" for name, value in numbers.items()], folder
    )
    return [
        {name: (shape, dtype, values.get("layer")) for name, shape, dtype, values in source.instances(rank)}
        for rank in range(mesh["tp"] * mesh["pp"] * mesh["dp"])
    ]


def layout(model):
    return "megatron-local" if model in LOCAL else "megatron"


def ranged(names, pattern):
    """Joins names that differ only in the number after `pattern`: layers.{0..1}.weight."""
    groups = {}
    for name, value in names.items():
        found = re.search(pattern + r"(\d+)", name)
        key = (name[: found.start(1)], name[found.end(1) :], value) if found else (name, None, value)
        groups.setdefault(key, []).append(int(found[1]) if found else 0)
    result = {}
    for (head, tail, value), numbers in groups.items():
        assert tail is None or numbers == list(range(numbers[0], numbers[-1] + 1)), (head, numbers)
        result[head if tail is None else f"{head}{{{numbers[0]}..{numbers[-1]}}}{tail}"] = value
    return result


def write(folder):
    folder.mkdir(exist_ok=True)
    for case, (model, numbers, more, placement) in CASES.items():
        lines = [
            f"# origin: megatron-core {megatron.core.__version__}, GPTModel in two virtual stages on "
            "each of two ranks, local specs"
            + ("" if model in LOCAL else "; names as Transformer Engine's modules have them")
            + ",",
            "# made by tests/frameworks/megatron_chunks_test.py "
            f"--write{''.join(f', {name} {value}' for name, value in more.items())}",
            f"# model: {model} {layout(model)}",
            f"# set: {' '.join(f'{name}={value}' for name, value in numbers.items())}",
            f"# place: {placement}",
        ]
        for rank in range(2):
            found = live(case, WHOLE, rank)
            layers = sorted(
                {(name.split(".layers.")[0], layer) for name, (_, _, layer) in found.items() if layer is not None}
            )
            lines.append(f"# rank {rank}: " + ", ".join(f"{module} {layer}" for module, layer in layers))
            names = {
                name: f"[{', '.join(map(str, shape))}]" + ("" if dtype == "bf16" else " " + dtype)
                for name, (shape, dtype, _) in found.items()
            }
            for pattern in (r"decoder\.layers\.", r"\.weight(?=\d)", r"\.bias(?=\d)", r"local_experts\."):
                names = ranged(names, pattern)
            lines += [f"{name}  {value}" for name, value in names.items()]
        (folder / f"{case.replace(' ', '-')}.txt").write_text("\n".join(lines) + "\n")


@unittest.skipIf(MISSING, MISSING)
class VirtualStages(unittest.TestCase):
    def test_hybrid_models_have_none(self):
        """Megatron-Core 0.16.1 refuses virtual stages of Mamba hybrids, so nemotron-h cannot be compared."""
        config = types.SimpleNamespace(virtual_pipeline_model_parallel_size=2)
        with self.assertRaisesRegex(AssertionError, "virtual/interleaved pipeline"):
            MambaStack._select_layers_for_pipeline_parallel(types.SimpleNamespace(config=config), [])

    def test_chunks_are_bound_and_moved(self):
        """The list of chunks is bound directly, and each layer's weights are read from the chunk that has the layer."""
        with tempfile.TemporaryDirectory() as folder:
            importable(folder)
            import reshard

            for case in LOCAL:
                with self.subTest(case=case):
                    model, numbers, _, placement = CASES[case]
                    path = Path(folder) / "job.yaml"
                    path.write_text(
                        library.job(
                            model, library.chunked_endpoint(layout(model), CUT, placement), "{layout: hf, mesh: {}}"
                        )
                    )
                    plan = reshard.compile(
                        path, flags=[f"--set=model.let.{name}={value}" for name, value in numbers.items()]
                    )
                    target = {
                        name: torch.zeros(param.shape, dtype=torch.bfloat16)
                        for name, param in plan.params(0, "target").items()
                    }
                    with reshard.Executor(plan) as executor:
                        for rank in range(8):
                            made, layers = modules(case, CUT, rank)
                            for name, tensor in tensors(made).items():
                                tensor.fill_(layers[name] + 1 if name in layers else 100)
                            executor.bind(tensors(made), "source", rank)
                        executor.bind(target, "target", 0)
                        executor.prepare()
                        executor.run(timeout=60)
                    for name, tensor in target.items():
                        layer = re.search(r"\.layers\.(\d+)\.", name)
                        self.assertTrue(bool((tensor == (int(layer[1]) + 1 if layer else 100)).all()), name)

    def test_names_shapes_and_layers(self):
        count = 0
        with tempfile.TemporaryDirectory() as folder:
            for case in CASES:
                for mesh in (WHOLE, CUT):
                    plan = planned(case, mesh, folder)
                    for rank, wanted in enumerate(plan):
                        with self.subTest(case=case, mesh=mesh, rank=rank):
                            found = live(case, mesh, rank)
                            self.assertEqual(sorted(set(wanted) - set(found))[:4], [], "Megatron-Core lacks these")
                            self.assertEqual(sorted(set(found) - set(wanted))[:4], [], "the layout lacks these")
                            wrong = [
                                f"{name}: {found[name]}, expected {wanted[name]}"
                                for name in found
                                if found[name] != wanted[name]
                            ]
                            self.assertEqual(wrong[:4], [])
                            count += len(found)
        self.assertGreater(count, 1000)
        print(f"{count} params of {len(CASES)} cases")


if __name__ == "__main__":
    if MISSING:
        print(f"SKIPPED: {MISSING}", file=sys.stderr)
    if "--write" in sys.argv and not MISSING:
        write(ROOT / "tests" / "library" / "chunks")
    else:
        unittest.main()
