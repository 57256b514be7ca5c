# SPDX-License-Identifier: Apache-2.0
"""Small models in Megatron-Core's layouts, as jobs for the tests. A job is a map with the contents of a YAML file."""

MEGATRON_AXES = ["tp", "pp", "etp", "ep"]


def plain(tensors, source, target, dtype="bf16", **more):
    """A job of tensors with a param of the same name on each side: {name: (shape, source param, target param)}."""
    layouts = {"src": {"params": {}}, "dst": {"params": {}}}
    for name, (_, first, second) in tensors.items():
        for layout, param in (("src", first), ("dst", second)):
            if param is not None:
                layouts[layout]["params"][name] = {"holds": name, **param}
    model = {"dtype": dtype, "tensors": {name: each[0] for name, each in tensors.items()}, "layouts": layouts}
    model.update({key: more.pop(key) for key in ("index", "let") if key in more})
    return {
        "version": 1,
        "model": model,
        "source": {"layout": "src", **source},
        "target": {"layout": "dst", **target},
        **more,
    }


def rows(axis, d=0, **rule):
    return {"shard": {str(d): {"axis": axis, **rule} if rule else axis}}


def gpt(layers=2, experts=0, glu=True, latent=0, shared=0, mtp=0, bias=False, expert_bias=False, grouped=True):
    """Megatron's test model: hidden 32, 8 heads, 4 query groups, vocabulary 128, untied; optionally with experts."""
    h, heads, kv, d, ffn, vocab = 32, 8, 4, 4, 64, 128
    t = {"embed": [vocab, h], "out": [vocab, h], "final": [h]}
    p = {
        "embedding.word_embeddings.weight": {"holds": "embed", **rows("tp"), "at": {"pp": "first"}},
        "decoder.final_layernorm.weight": {"holds": "final", "at": {"pp": "last"}},
        "output_layer.weight": {"holds": "out", **rows("tp"), "at": {"pp": "last"}},
    }

    def block(at, prefix, extra):
        t.update(
            {
                f"{at}.q": [heads * d, h],
                f"{at}.k": [kv * d, h],
                f"{at}.v": [kv * d, h],
                f"{at}.o": [h, heads * d],
                f"{at}.norm1": [h],
                f"{at}.norm2": [h],
            }
        )
        p.update(
            {
                f"{prefix}.self_attention.linear_qkv.weight": {
                    "interleave": {"groups": kv, "of": [f"{at}.q", f"{at}.k", f"{at}.v"]},
                    **rows("tp", unit=1),
                    **extra,
                },
                f"{prefix}.self_attention.linear_proj.weight": {"holds": f"{at}.o", **rows("tp", 1), **extra},
                f"{prefix}.input_layernorm.weight": {"holds": f"{at}.norm1", **extra},
                f"{prefix}.pre_mlp_layernorm.weight": {"holds": f"{at}.norm2", **extra},
            }
        )
        if not experts:
            t.update({f"{at}.gate": [ffn, h], f"{at}.up": [ffn, h], f"{at}.down": [h, ffn]})
            p.update(
                {
                    f"{prefix}.mlp.linear_fc1.weight": {"concat": [f"{at}.gate", f"{at}.up"], **rows("tp"), **extra},
                    f"{prefix}.mlp.linear_fc2.weight": {"holds": f"{at}.down", **rows("tp", 1), **extra},
                }
            )
            return
        width = latent or h
        t.update(
            {
                f"{at}.router": [experts, h],
                f"{at}.e.{{expert}}.gate": [ffn, width],
                f"{at}.e.{{expert}}.up": [ffn, width],
                f"{at}.e.{{expert}}.down": [width, ffn],
            }
        )
        fc = (
            (lambda n: f"{prefix}.mlp.experts.linear_fc{n}.weight{{expert.local}}")
            if grouped
            else (lambda n: f"{prefix}.mlp.experts.local_experts.{{expert.local}}.linear_fc{n}.weight")
        )
        first = (
            {"concat": [f"{at}.e.{{expert}}.gate", f"{at}.e.{{expert}}.up"]}
            if glu
            else {"holds": f"{at}.e.{{expert}}.up"}
        )
        if not glu:
            del t[f"{at}.e.{{expert}}.gate"]
        p.update(
            {
                f"{prefix}.mlp.router.weight": {"holds": f"{at}.router", **extra},
                fc(1): {**first, **rows("etp"), **extra},
                fc(2): {"holds": f"{at}.e.{{expert}}.down", **rows("etp", 1), **extra},
            }
        )
        if bias:  # of the row-parallel linear layer: not sharded over etp
            t[f"{at}.e.{{expert}}.down_bias"] = [width]
            p[f"{prefix}.mlp.experts.linear_fc2.bias{{expert.local}}"] = {
                "holds": f"{at}.e.{{expert}}.down_bias",
                **extra,
            }
        if expert_bias:
            t[f"{at}.expert_bias"] = {"shape": [experts], "dtype": "fp32"}
            p[f"{prefix}.mlp.router.expert_bias"] = {"holds": f"{at}.expert_bias", **extra}
        if latent:
            t.update({f"{at}.into": [latent, h], f"{at}.back": [h, latent]})
            p.update(
                {
                    f"{prefix}.mlp.fc1_latent_proj.weight": {"holds": f"{at}.into", **extra},
                    f"{prefix}.mlp.fc2_latent_proj.weight": {"holds": f"{at}.back", **extra},
                }
            )
        if shared:
            t.update(
                {f"{at}.shared.gate": [shared, h], f"{at}.shared.up": [shared, h], f"{at}.shared.down": [h, shared]}
            )
            p.update(
                {
                    f"{prefix}.mlp.shared_experts.linear_fc1.weight": {
                        "concat": [f"{at}.shared.gate", f"{at}.shared.up"],
                        **rows("tp"),
                        **extra,
                    },
                    f"{prefix}.mlp.shared_experts.linear_fc2.weight": {
                        "holds": f"{at}.shared.down",
                        **rows("tp", 1),
                        **extra,
                    },
                }
            )

    block("l.{layer}", "decoder.layers.{layer.local}", {})
    if mtp:
        block("m", "mtp.layers.0.transformer_layer", {"at": {"pp": "last"}})
        t["eh"] = [h, 2 * h]
        p["mtp.layers.0.eh_proj.weight"] = {"holds": "eh", **rows("tp"), "at": {"pp": "last"}}
    index = {"layer": layers, **({"expert": experts} if experts else {})}
    placement = {"layer": "pp", **({"expert": "ep"} if experts else {})}
    return {
        "dtype": "bf16",
        "index": index,
        "tensors": t,
        "layouts": {"megatron": {"axes": MEGATRON_AXES, "place": placement, "params": p}},
    }


def mamba(layers=2):
    """The hybrid pattern M* with hidden 256: in_proj [z, x, B, C, dt], conv1d [x, B, C]; layers alternate."""
    h, inner, groups, state, heads = 256, 512, 8, 16, 8
    bc = groups * state
    kinds = "M*" * (layers // 2)
    m, a = {"layer": {"pattern": kinds, "is": "M"}}, {"layer": {"pattern": kinds, "is": "*"}}
    t = {
        "embed": [128, h],
        "final": [h],
        "l.{layer}.in_proj": {"shape": [2 * inner + 2 * bc + heads, h], "where": m},
        "l.{layer}.conv": {"shape": [inner + 2 * bc, 1, 4], "where": m},
        "l.{layer}.conv_bias": {"shape": [inner + 2 * bc], "where": m},
        "l.{layer}.dt_bias": {"shape": [heads], "where": m},
        "l.{layer}.A_log": {"shape": [heads], "where": m, "dtype": "fp32"},
        "l.{layer}.D": {"shape": [heads], "where": m},
        "l.{layer}.gate_norm": {"shape": [inner], "where": m},
        "l.{layer}.out": {"shape": [h, inner], "where": m},
        "l.{layer}.q": {"shape": [64, h], "where": a},
        "l.{layer}.k": {"shape": [32, h], "where": a},
        "l.{layer}.v": {"shape": [32, h], "where": a},
        "l.{layer}.o": {"shape": [h, 64], "where": a},
    }
    at = "decoder.layers.{layer.local}."
    p = {
        "embedding.word_embeddings.weight": {"holds": "embed", **rows("tp"), "at": {"pp": "first"}},
        "decoder.final_norm.weight": {"holds": "final", "at": {"pp": "last"}},
        at + "mixer.in_proj.weight": {"holds": "in_proj", **rows("tp", blocks=[inner, inner, bc, bc, heads])},
        at + "mixer.conv1d.weight": {"holds": "conv", **rows("tp", blocks=[inner, bc, bc])},
        at + "mixer.conv1d.bias": {"holds": "conv_bias", **rows("tp", blocks=[inner, bc, bc])},
        at + "mixer.dt_bias": {"holds": "dt_bias", **rows("tp")},
        at + "mixer.A_log": {"holds": "A_log", **rows("tp")},
        at + "mixer.D": {"holds": "D", **rows("tp")},
        at + "mixer.norm.weight": {"holds": "gate_norm", **rows("tp")},
        at + "mixer.out_proj.weight": {"holds": "out", **rows("tp", 1)},
        at + "self_attention.linear_qkv.weight": {
            "interleave": {"groups": 8, "of": ["l.{layer}.q", "l.{layer}.k", "l.{layer}.v"]},
            **rows("tp"),
        },
        at + "self_attention.linear_proj.weight": {"holds": "l.{layer}.o", **rows("tp", 1)},
    }
    return {
        "dtype": "bf16",
        "index": {"layer": layers},
        "tensors": t,
        "layouts": {"megatron": {"axes": MEGATRON_AXES, "place": {"layer": "pp"}, "params": p}},
    }


def refit(model, source, target, world=8, **more):
    """A job with (TP, PP) or (TP, PP, EP) on each side, data-parallel over the rest of `world` ranks, collocated."""

    def endpoint(shape):
        tp, pp, ep = (*shape, 1)[:3]
        return {"layout": "megatron", "mesh": {"megatron": {"tp": tp, "pp": pp, "ep": ep, "dp": world // (tp * pp)}}}

    return {"version": 1, "model": model, "source": endpoint(source), "target": {**endpoint(target), **more}}
