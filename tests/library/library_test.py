# SPDX-License-Identifier: Apache-2.0
"""The library of models and layouts: compares names and shapes with listings from the sources of each release,
parameter counts with the published ones, and compiles every ordered pair of layouts of every model. RESHARD_BIN: the
folder of the commands."""

import math
import os
import re
import subprocess
import unittest

import library
import stages
from commands import BIN, FolderTest
from layout_text import endpoints

# The name of the tied embedding on the last pipeline stage, if that is not also the first. In vLLM, lm_head is an
# alias (tie_weights, qwen3.py); in SGLang, it is a separate module (Qwen3ForCausalLM).
TIED = {"vllm": "model.embed_tokens.weight", "sglang": "lm_head.weight"}
# Models whose class in the engine has no pipeline stages.
WITHOUT_STAGES = {("sglang", "gemma-3-27b")}

# The only param of a vision tower that is not on every stage.
ON_FIRST = {("sglang", "visual.pos_embed.weight")}

# Models that transformers 4 does not have.
ONLY_5 = {"qwen3-vl-30b-a3b", "qwen3.5-9b", "qwen3.5-35b-a3b", "kimi-linear-48b-a3b"}


class Library(FolderTest):
    def listings(self):
        """(layout, model, path) of every listing except those of transformers 5."""
        for path in sorted(library.LISTINGS.glob("*/*.txt")):
            layout, model = path.parent.name, path.name[: -len(".txt")]
            if model == "parameters" or layout == "transformers5":
                continue
            if model.endswith(".local"):
                layout, model = layout + "-local", model[: -len(".local")]
            yield layout, model, path

    def test_names_and_shapes(self):
        """Each layout, on one rank, has exactly the params that the source of the release creates."""
        count = 0
        for layout, model, path in self.listings():
            with self.subTest(layout=layout, model=model):
                wanted = library.listing(path)
                found = library.params(BIN, model, layout, self.folder, library.numbers(path))
                self.assertEqual(sorted(set(wanted) - set(found))[:4], [], "params that the layout lacks")
                self.assertEqual(sorted(set(found) - set(wanted))[:4], [], "params that the release lacks")
                wrong = [
                    f"{name}: {found[name]}, expected {wanted[name]}" for name in wanted if wanted[name] != found[name]
                ]
                self.assertEqual(wrong[:4], [])
                count += 1
        self.assertGreater(count, 65)

    def test_stages(self):
        """Each pipeline stage has the layers and other params that the engine gives it (stages.py)."""
        for engine in TIED:
            listed = {}  # model -> stages, or a partition "5,14,9" -> the ranges of layers
            for model, key, ranges in re.findall(r"^([a-z]\S+) ([\d,]+): (.*)$", stages.listing(engine), re.MULTILINE):
                listed.setdefault(model, {})[key] = ranges.split()
            self.assertEqual(sorted(listed), library.NAMES)
            for model, keys in listed.items():
                path = library.LISTINGS / engine / f"{model}.txt"
                self.assertEqual(
                    path.exists(),
                    engine in library.layouts(BIN, model, self.folder),
                    f"{model} has no layout {engine}, or no listing",
                )
                if not path.exists() or (engine, model) in WITHOUT_STAGES:
                    continue
                outside = [name for name in library.listing(path) if ".layers." not in name]
                tower = [name for name in outside if name.startswith("visual.") and (engine, name) not in ON_FIRST]
                first = [name for name in outside if "embed" in name and name not in tower]
                last = [name for name in outside if name not in first + tower]
                last += [] if any(name.endswith("lm_head.weight") for name in last) else [TIED[engine]]
                targets = [
                    f"{{layout: {engine}, mesh: {{pp: {len(ranges)}}}"
                    + (f", place: {{layer: {{axis: pp, sizes: [{key}]}}}}}}" if "," in key else "}")
                    for key, ranges in keys.items()
                ]
                found = library.endpoints(
                    BIN, library.job(model, "{layout: hf, mesh: {}}", f"[{', '.join(targets)}]"), self.folder
                )
                for number, (key, ranges) in enumerate(keys.items()):
                    for stage, wanted in enumerate(ranges):
                        with self.subTest(engine=engine, model=model, stages=key, stage=stage):
                            params = found[f"target.{number}"].params(stage)
                            held = {int(layer) for name in params for layer in re.findall(r"\.layers\.(\d+)\.", name)}
                            begin, end = wanted.split("..")
                            self.assertEqual(sorted(held), list(range(int(begin), int(end) + 1)))
                            self.assertEqual(
                                sorted(name for name in params if ".layers." not in name),
                                sorted(
                                    tower + (first if stage == 0 else []) + (last if stage == len(ranges) - 1 else [])
                                ),
                            )

    def test_chunks(self):
        """With virtual stages, each chunk of each rank has the params of a live Megatron-Core module
        (tests/frameworks/megatron_chunks_test.py)."""
        paths = sorted((library.LISTINGS.parent / "chunks").glob("*.txt"))
        for path in paths:
            head, *ranks = re.split(r"^# rank \d+: ", path.read_text(), flags=re.MULTILINE)
            (model, layout), placement = (
                re.search(r"# model: (\S+) (\S+)", head).groups(),
                re.search(r"# place: (.*)", head)[1],
            )
            found = library.chunked(
                BIN, model, layout, {"pp": len(ranks)}, placement, library.numbers(path), self.folder
            )
            self.assertEqual(len(ranks), 2)
            for rank, text in enumerate(ranks):
                with self.subTest(listing=path.name, rank=rank):
                    layers, params = text.split("\n", 1)
                    wanted = library.listed(params, path.name)
                    self.assertEqual(found.params(rank), wanted)
                    held = {
                        (name.split(".layers.")[0], values["layer"])
                        for name, _, _, values in found.instances(rank)
                        if "layer" in values
                    }
                    self.assertEqual(", ".join(f"{module} {layer}" for module, layer in sorted(held)), layers)
        self.assertGreater(len(paths), 9)

    def test_live_modules(self):
        """fsdp2, on one rank, has the names and shapes of live modules: with transformers 4 those of the checkpoint,
        with transformers 5 its own for models with experts. e_score_correction_bias has the dtype that the release
        gives it in a module of bf16."""
        for path in sorted((library.LISTINGS / "hf").glob("*.txt")):
            model = path.name[: -len(".txt")]
            if model == "parameters":
                continue
            with self.subTest(model=model):
                numbers = library.numbers(path)
                if model not in ONLY_5:
                    self.assertEqual(
                        library.params(BIN, model, "fsdp2", self.folder, numbers, ", switches: {transformers: 4}"),
                        library.listing(path),
                    )
                listed = library.LISTINGS / "transformers5" / path.name
                if listed.exists():
                    wanted = library.listing(listed)
                    more = "" if any(dtype == "fp32" for _, dtype in wanted.values()) else ", dtype: bf16, convert: rne"
                    config = (library.MODELS / f"{model}.config.json").read_text()
                    mtp = (
                        ["mtp=0"]
                        if "nextn" in config or any(name.startswith("mtp.") for name in library.listing(path))
                        else []
                    )
                    found = library.params(BIN, model, "fsdp2", self.folder, [*numbers, *mtp], more)
                else:
                    wanted, found = library.listing(path), library.params(BIN, model, "fsdp2", self.folder, numbers)
                self.assertEqual(found, wanted)
        listed = library.LISTINGS / "transformers5"
        self.assertEqual(
            {path.stem for path in listed.glob("*.txt")},
            {path.name[: -len(".config.json")] for path in listed.glob("*.config.json")},
        )

    def test_configs_of_transformers_5(self):
        """The config.json that transformers 5 writes gives the same checkpoint as the published one."""
        for path in sorted((library.LISTINGS / "transformers5").glob("*.config.json")):
            model = path.name[: -len(".config.json")]
            with self.subTest(model=model):
                text = library.job(model, "{layout: hf, mesh: {}}", "{layout: hf, mesh: {}}")
                found = endpoints(BIN, text, self.folder, [f"model.config={path}"])["target"].params(0)
                self.assertEqual(found, library.params(BIN, model, "hf", self.folder))

    def test_parameter_counts(self):
        """The number of parameters of each model is the published one."""
        published = {}
        for line in (library.LISTINGS / "hf" / "parameters.txt").read_text().splitlines():
            line = line.split("#")[0].split()
            if line:
                published[line[0]] = int(line[1])
        for model in library.NAMES:
            with self.subTest(model=model):
                found = sum(math.prod(shape) for shape, dtype in library.params(BIN, model, "hf", self.folder).values())
                self.assertEqual(found, published[model])

    def compiled(self, model, source, target):
        """The return code of the compiler and its errors, for a job on one rank."""
        self.write(
            "job.yaml",
            library.job(model, f"{{layout: {source}, mesh: {{}}}}", f"{{layout: {target}, mesh: {{}}, convert: rne}}"),
        )
        done = subprocess.run(
            [BIN / "reshard-compile", self.folder / "job.yaml", "--emit=layout"], capture_output=True, text=True
        )
        return done.returncode, done.stderr

    def test_further_layouts_compile(self):
        """The further layouts that a model declares, on one rank: none names a tensor that the model lacks. A model
        with a layout of Megatron-Core has one of its checkpoint, which holds every tensor of the model."""
        count = 0
        for path in sorted(library.MODELS.glob("*.yaml")):
            model, known = path.stem, set()
            if model not in library.NAMES and "\nname:" not in path.read_text():
                continue  # others extend it
            for layout in [*library.FURTHER_LAYOUTS, "megatron"]:  # the others: test_every_pair_compiles
                code, text = self.compiled(model, "hf", layout)
                if f"unknown layout '{layout}'" not in text:
                    self.assertEqual(code, 0, f"{model} {layout}: {text}")
                    known.add(layout)
            count += len(known)
            saved = [layout for layout in known if layout.startswith("megatron-checkpoint")]
            with self.subTest(model=model):
                self.assertEqual(bool(saved), "megatron" in known)
                for layout in saved:
                    self.assertEqual(self.compiled(model, layout, "hf"), (0, ""), layout)
        self.assertGreater(count, 115)

    def test_source_layouts_compile(self):
        """Layouts that only a source can have, to the checkpoint in bf16."""
        for layout, models in (("hf-int4", ("kimi-k2", "kimi-k2.5")), ("hf-int4-multimodal", ("kimi-k2.5",))):
            for model in models:
                self.write(
                    "job.yaml", library.job(model, f"{{layout: {layout}, storage: in}}", "{layout: hf, storage: out}")
                )
                self.call("reshard-compile job.yaml --emit=layout")

    def test_every_pair_compiles(self):
        """All ordered pairs of the layouts of a model compile, with the counts of docs/library-tables.md."""
        table = (library.ROOT / "docs" / "library-tables.md").read_text()
        small = os.environ.get("RESHARD_FULL") != "1"
        for model in library.NAMES:
            known = library.layouts(BIN, model, self.folder)
            self.assertIn("hf", known)
            for s, source in enumerate(known):
                for t, target in enumerate(known):
                    if small and (s + t) % 4 != 0:
                        continue
                    with self.subTest(model=model, source=source, target=target):
                        report = library.compile_pair(BIN, model, source, target, self.folder)
                        balance = report["balance"]
                        self.assertLessEqual(
                            balance["egress_max"], 1.01 * balance["egress_bound"], "busiest source rank"
                        )
                        row = library.row(model, source, target, report)
                        self.assertTrue(
                            row in table, f"docs/library-tables.md is old, run tests/library/table.py; missing: {row}"
                        )


if __name__ == "__main__":
    unittest.main()
