// SPDX-License-Identifier: Apache-2.0
// Reading of models: let and config, index, tensors, layouts. Errors are tested by errors/*.yaml.

#include "compiler/frontend/reading.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <fstream>

namespace reshard {
namespace {

std::optional<Model> read(const std::string &text, Diagnostics &diagnostics, const std::string &folder = "") {
  const auto node = parseYaml(diagnostics.addFile("model.yaml", text), diagnostics);
  Model model = node ? readModel(*node, folder, diagnostics) : Model();
  return diagnostics.ok() ? std::optional(std::move(model)) : std::nullopt;
}

Model read(const std::string &text, const std::string &folder = "") {
  Diagnostics diagnostics;
  auto model = read(text, diagnostics, folder);
  EXPECT_TRUE(model) << diagnostics.text();
  return model ? std::move(*model) : Model();
}

ShardRule rule(const std::string &text) {
  Diagnostics diagnostics;
  const auto node = parseYaml(diagnostics.addFile("rule", text), diagnostics);
  auto result = node ? readShardRule(*node, nullptr, diagnostics) : std::nullopt;
  EXPECT_TRUE(result) << diagnostics.text();
  return result ? std::move(*result) : ShardRule();
}

std::vector<std::string> axes(const ShardRule &rule) {
  std::vector<std::string> names;
  for (const auto &[name, at] : rule.axes)
    names.push_back(name);
  return names;
}

using Names = std::vector<std::string>;

TEST(Model, LetIndexTensors) {
  const Model model = read(R"yaml(
name: tiny
dtype: bf16
let: {hidden: 8, ffn: 4 * hidden, tied: true, vocab: "ceil(50257, 128)"}
index: {layer: hidden / 2, expert: 0}
tensors:
  embed: [vocab, hidden]
  l.{layer}.norm: {shape: [hidden], dtype: fp32, where: {layer: [3, 0..1, 1..2, 2..1]}}
  l.{layer}.e.{expert}: {shape: [ffn, 0], shard: {0: tp, 1: [dp, tp]}}
  scalar: []
  head: {tied: embed, shard: {1: tp}}
)yaml");
  EXPECT_EQ(model.name, "tiny");
  EXPECT_EQ(model.let, (Environment{{"hidden", 8}, {"ffn", 32}, {"tied", 1}, {"vocab", 50304}}));
  EXPECT_EQ(model.variables, (std::vector<ir::IndexVariable>{{"layer", 4}, {"expert", 0}}));
  ASSERT_EQ(model.tensors.size(), 5u);
  EXPECT_EQ(model.tensors[0].shape, (std::vector<int64_t>{50304, 8}));
  const TensorDeclaration &norm = model.tensors[1];
  EXPECT_EQ(norm.dtype, ir::DType::fp32);
  EXPECT_EQ(norm.variables, Names{"layer"});
  ASSERT_EQ(norm.where.at("layer").size(), 1u); // merged to 0..3
  EXPECT_EQ(norm.where.at("layer")[0].first, 0);
  EXPECT_EQ(norm.where.at("layer")[0].last, 3);
  EXPECT_EQ(model.tensors[2].variables, (Names{"layer", "expert"}));
  EXPECT_EQ(axes(model.tensors[2].shard.at(1)), (Names{"dp", "tp"}));
  EXPECT_TRUE(model.tensors[3].shape.empty());
  EXPECT_EQ(model.tensors[4].tied->first, "embed");
  EXPECT_EQ(model.tensors[4].shapeAt.line, 0u);
}

TEST(Model, WhereMayBeEmpty) {
  const Model model =
      read("dtype: bf16\nindex: {layer: 2}\ntensors: {\"l.{layer}\": {shape: [8], where: {layer: 0..-1}}}");
  EXPECT_TRUE(model.tensors[0].where.at("layer").empty());
}

TEST(Model, ConfigKeys) {
  const tests::TemporaryFolder temporary;
  const std::string &folder = temporary.path();
  std::ofstream(folder + "/config.json")
      << R"({"hidden_size": 8, "tie": true, "none": null, "text_config": {"heads": 4}, "theta": 1e6, "types": ["mamba", "mlp", "mamba"], "letters": "M-M"})";
  Diagnostics diagnostics; // the default is checked although it is not used
  EXPECT_FALSE(read("config: config.json\ndtype: bf16\nlet: {h: $hidden_size or nothing}\ntensors: {w: [h]}\n",
                    diagnostics, folder));
  EXPECT_EQ(diagnostics.errors(), 1u) << diagnostics.text();
  const Model model =
      read("config: config.json\ndtype: bf16\nlet: {h: $hidden_size, t: $tie, n: $none or h / 2, m: $missing or 3, "
           "k: $text_config.heads, d: $text_config.dim or 2, e: $theta}\ntensors: {w: [h]}\n",
           folder);
  EXPECT_EQ(model.let, (Environment{{"h", 8}, {"t", 1}, {"n", 4}, {"m", 3}, {"k", 4}, {"d", 2}, {"e", 1000000}}));
  const Model other = read(
      "config: config.json\ndtype: bf16\n"
      "let: {a: $missing or $hidden_size, b: $none or $missing or a / 2, l: $layers or $types}\nindex: {layer: l}\n"
      "tensors:\n  \"m.{layer}\": {shape: [a], where: {layer: {pattern: $pattern or $types, is: [M, mamba]}}}\n"
      "  \"n.{layer}\": {shape: [b], where: {layer: {pattern: $letters or $types, is: [M, mamba]}}}\n",
      folder);
  EXPECT_EQ(other.let,
            (Environment{
                {"a", 8}, {"b", 4}, {"l", 3}})); // the first key that exists and is not null; for an array its length
  for (const TensorDeclaration &tensor : other.tensors) {
    const auto &layers = tensor.where.at("layer");
    ASSERT_EQ(layers.size(), 2u);
    EXPECT_EQ(std::pair(layers[0].first, layers[1].last), std::pair(int64_t{0}, int64_t{2}));
  }
}

// Of a multimodal model: the keys that the config lacks are those of its language model.
TEST(Model, ConfigKeysOfTheLanguageModel) {
  const tests::TemporaryFolder temporary;
  const std::string &folder = temporary.path();
  std::ofstream(folder + "/config.json")
      << R"({"tie": true, "n": 1, "text_config": {"hidden_size": 8, "head_dim": 2, "n": 5, "types": ["a", "b"]}})";
  const Model model =
      read("config: config.json\ndtype: bf16\nlet: {h: $hidden_size, d: $head_dim or 7, n: $n, l: $types, "
           "t: $tie, m: $missing or 3}\ntensors: {w: [h]}\n",
           folder);
  EXPECT_EQ(model.let, (Environment{{"h", 8}, {"d", 2}, {"n", 1}, {"l", 2}, {"t", 1}, {"m", 3}}));
  Diagnostics diagnostics;
  EXPECT_FALSE(
      read("config: config.json\ndtype: bf16\nlet: {h: $hiden_size}\ntensors: {w: [h]}\n", diagnostics, folder));
  EXPECT_NE(
      diagnostics.text().find("'config.json' has no key 'hiden_size', and its 'text_config' has none, did you mean "
                              "'hidden_size'?"),
      std::string::npos)
      << diagnostics.text();
}

TEST(Model, Rules) {
  EXPECT_EQ(axes(rule("tp")), Names{"tp"});
  EXPECT_EQ(rule("tp").scheme, "even");
  EXPECT_EQ(axes(rule("[dp, tp]")), (Names{"dp", "tp"}));
  EXPECT_EQ(axes(rule("{axis: [dp, tp], scheme: chunk}")), (Names{"dp", "tp"}));
  EXPECT_EQ(rule("{axis: tp, scheme: round_robin}").scheme, "round_robin");
  const ShardRule sizes = rule("{axis: pp, sizes: [10, 2 * x]}");
  EXPECT_EQ(sizes.scheme, "sizes");
  EXPECT_EQ(sizes.schemeAt.column, 12u);
  ASSERT_EQ(sizes.numbers.size(), 2u);
  EXPECT_EQ(sizes.numbers[1].text, "2 * x");
  EXPECT_EQ(rule("{axis: tp, stride: 3}").numbers.at(0).text, "3");
  EXPECT_EQ(rule("{axis: tp, cyclic: 3}").scheme, "cyclic");
  EXPECT_EQ(rule("{axis: tp, blocks: []}").numbers.size(), 0u);
  EXPECT_EQ(rule("{axis: ep, map: [[1, 0], []]}").lists.size(), 2u);
  const ShardRule heads = rule("{axis: tp, unit: head_dim, replicate: true}");
  EXPECT_EQ(heads.unit->text, "head_dim");
  EXPECT_TRUE(heads.replicate);
}

TEST(Model, Layouts) {
  const Model model = read(R"yaml(
dtype: bf16
index: {layer: 2, expert: 4}
tensors: {"l.{layer}.e.{expert}.up": [8, 8], "l.{layer}.e.{expert}.gate": [8, 8], w: [8]}
layouts:
  engine-1.0:
    axes: [tp, ep]
    place: {expert: {axis: ep, scheme: balanced}}
    switches: {fused: true, depth: 2 * tp}
    params:
      "l.{layer.local}.w13":
        concat: [gate, {permute: [1, 0], of: up}, {interleave: {groups: 2, of: [gate, {concat: {dim: 1, of: [up]}}]}}]
        stack: {index: expert, dim: 1}
        pad: {0: 128 * tp}
        shard: {0: tp}
        cut: joined
        at: {tp: [0, last], ep: first}
        when: fused
        dtype: bf16
      v: {holds: w, permute: [0]}
)yaml");
  ASSERT_EQ(model.layouts.size(), 1u);
  const LayoutDeclaration &layout = model.layouts[0];
  EXPECT_EQ(layout.name, "engine-1.0");
  EXPECT_EQ(layout.axes->size(), 2u);
  EXPECT_EQ(layout.placement.at("expert").scheme, "balanced");
  EXPECT_EQ(layout.switches.at("depth").text, "2 * tp");
  const ParamDeclaration &param = layout.params.at(0);
  EXPECT_EQ(param.name, "l.{layer.local}.w13");
  EXPECT_EQ(param.pack.kind, Pack::Kind::concat);
  ASSERT_EQ(param.pack.of.size(), 3u);
  EXPECT_EQ(param.pack.of[0].tensor, "gate");
  EXPECT_EQ(param.pack.of[1].tensor, "up");
  EXPECT_EQ(param.pack.of[1].permute, (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(param.pack.of[2].kind, Pack::Kind::interleave);
  EXPECT_EQ(param.pack.of[2].groups->text, "2");
  EXPECT_EQ(param.pack.of[2].of.at(1).dimension, 1);
  ASSERT_EQ(param.stacks.size(), 1u);
  EXPECT_EQ(param.stacks[0].variable, "expert");
  EXPECT_EQ(param.stacks[0].dimension, 1);
  EXPECT_EQ(param.pad.at(0).text, "128 * tp");
  EXPECT_TRUE(param.joined);
  ASSERT_EQ(param.presence.size(), 2u);
  ASSERT_EQ(param.presence[0].second.coordinates.size(), 2u);
  EXPECT_EQ(param.presence[0].second.coordinates[1].text, "last");
  EXPECT_EQ(param.presence[1].second.coordinates.at(0).text, "first");
  EXPECT_EQ(param.when->text, "fused");
  EXPECT_EQ(param.form.dtype->first, ir::DType::bf16);
  EXPECT_EQ(layout.params.at(1).pack.permute, std::vector<int64_t>{0});
}

TEST(Model, ErrorsDoNotCascade) {
  Diagnostics diagnostics;
  EXPECT_FALSE(read("dtype: bf16\nlet: {a: 1 / 0, b: a * 2, c: b + a}\nindex: {layer: c}\n"
                    "tensors: {\"w.{layer}\": {shape: [b, 8], where: {layer: 0..c}}}\n",
                    diagnostics));
  EXPECT_EQ(diagnostics.errors(), 1u) << diagnostics.text();
}

} // namespace
} // namespace reshard
