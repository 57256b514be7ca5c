// SPDX-License-Identifier: Apache-2.0
// `extend: FILE` of models: overriding, removal, base folders of paths, and cyclic chains.

#include "base/text.h"
#include "compiler/frontend/reading.h"
#include "compiler/resolve/steps.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <unistd.h>

using namespace reshard;

namespace {

class ModelExtend : public testing::Test {
protected:
  void SetUp() override { std::filesystem::create_directories(folder_ / "bases"); }

  void write(const std::string &name, const std::string &text) { std::ofstream(folder_ / name) << text; }

  std::optional<ir::Layout> layout(const std::string &endpoints, const std::vector<std::string> &overrides = {}) {
    diagnostics_ = std::make_unique<Diagnostics>();
    write("job.yaml", "version: 1\nmodel: own.yaml\n" + endpoints);
    const auto job = readJob(folder_ / "job.yaml", overrides, *diagnostics_);
    return job ? resolve(*job, *diagnostics_) : std::nullopt;
  }
  std::string errors() const { return diagnostics_->text(); }

  const tests::TemporaryFolder folder_;
  std::unique_ptr<Diagnostics> diagnostics_;
};

std::vector<std::string> names(const ir::Endpoint &endpoint) {
  std::vector<std::string> result;
  for (const ir::Param &param : endpoint.params)
    result.push_back(param.name);
  return result;
}

} // namespace

TEST_F(ModelExtend, MergesEntryByEntry) {
  write("bases/numbers.json", R"({"width": 6, "deep": 3})");
  write("bases/base.yaml", "config: numbers.json\n" // relative to the folder of this file
                           "dtype: bf16\n"
                           "let: {width: $width, twice: 2 * width, deep: $deep}\n"
                           "index: {layer: deep}\n"
                           "tensors: {\"l.{layer}.a\": [width], b: [twice], c: [1]}\n"
                           "layouts:\n"
                           "  train: {params: {\"p.{layer}\": {holds: a}, q: {holds: b}, r: {holds: c}}}\n"
                           "  serve: {extend: train}\n");
  write("own.yaml", "extend: bases/base.yaml\n"
                    "let: {width: 4}\n"
                    "tensors: {c: null, d: [twice]}\n"
                    "layouts:\n"
                    "  train: {extend: train, params: {r: null, s: {holds: d}}}\n"
                    "  serve: {extend: serve, params: {q: {holds: d}}}\n");
  const auto good = layout("source: {layout: train, mesh: {}}\ntarget: {layout: serve, mesh: {}}\n");
  ASSERT_TRUE(good) << errors();
  EXPECT_EQ(names(good->endpoints[0]), (std::vector<std::string>{"p.{layer}", "q", "s"}));
  EXPECT_EQ(names(good->endpoints[1]), (std::vector<std::string>{"p.{layer}", "q", "s"}));
  EXPECT_EQ(good->variables[0].size, 3);
  EXPECT_EQ(good->tensorPatterns[0].shape, (std::vector<int64_t>{4}))
      << "expressions of the base file use the extending file's `let` values";
  EXPECT_EQ(good->tensorPatterns[good->endpoints[1].params[1].parts[0].pattern].name, "d");
}

TEST_F(ModelExtend, NullRemovesAnOptimizer) {
  write("bases/base.yaml", "dtype: bf16\n"
                           "optimizer: {m: fp32}\n"
                           "tensors: {a: [4]}\n"
                           "layouts:\n"
                           "  all: {params: same, optimizer: \"{param}.{state}\"}\n"
                           "  weights: {extend: all, optimizer: null}\n");
  const std::string endpoints = "source: {mesh: {}}\ntarget: [{layout: all, mesh: {}}, {layout: weights, mesh: {}}]\n";
  const auto params = [&](const std::string &own) {
    write("own.yaml", "extend: bases/base.yaml\n" + own);
    std::vector<std::vector<std::string>> result;
    if (const auto found = layout(endpoints))
      for (const ir::Endpoint &endpoint : found->endpoints)
        result.push_back(names(endpoint));
    return result;
  };
  using Names = std::vector<std::vector<std::string>>;
  EXPECT_EQ(params(""), (Names{{"a", "a.m"}, {"a", "a.m"}, {"a"}})) << errors();
  EXPECT_EQ(params("optimizer: null\n"), (Names{{"a"}, {"a"}, {"a"}})) << errors();
  EXPECT_EQ(params("layouts: {all: {extend: all, optimizer: null}}\noptimizer: {n: fp32}\n"),
            (Names{{"a", "a.m", "a.n"}, {"a"}, {"a"}}))
      << errors();
  write("bases/middle.yaml", "extend: base.yaml\noptimizer: null\n");
  write("own.yaml", "extend: bases/middle.yaml\noptimizer: {n: fp32}\n");
  const auto again = layout("source: {layout: all, mesh: {}}\ntarget: {layout: all, mesh: {}}\n");
  ASSERT_TRUE(again) << errors();
  EXPECT_EQ(names(again->endpoints[0]), (std::vector<std::string>{"a", "a.n"}));
}

TEST_F(ModelExtend, NullRemovesWhatTwoFilesDeclare) {
  write("bases/base.yaml", "dtype: bf16\n"
                           "tensors: {a: [4], b: [4]}\n"
                           "layouts:\n"
                           "  hf: {params: same}\n"
                           "  train: {params: {p: {holds: a}, q: {holds: b}}}\n"
                           "  serve: {extend: train, rename: {p: x}}\n");
  write("bases/middle.yaml", "extend: base.yaml\n"
                             "layouts:\n"
                             "  hf: {extend: hf, params: {a: {holds: a, shard: {}}, b: null, both: {concat: [a, b]}}}\n"
                             "  serve: {extend: serve, rename: {p: y}, params: {p: {holds: b}, r: {holds: a}}}\n");
  write("own.yaml", "extend: bases/middle.yaml\n"
                    "layouts:\n"
                    "  hf: {extend: hf, params: {a: null, b: null}}\n"
                    "  serve: {extend: serve, rename: {p: null}, params: {p: null, r: null}}\n");
  const auto found = layout("source: {layout: hf, mesh: {}}\ntarget: {layout: serve, mesh: {}}\n");
  ASSERT_TRUE(found) << errors();
  EXPECT_EQ(names(found->endpoints[0]), (std::vector<std::string>{"both"}));
  EXPECT_EQ(names(found->endpoints[1]), (std::vector<std::string>{"q"}));
}

TEST_F(ModelExtend, NullOfTwoFilesMayFindNothing) {
  write("bases/base.yaml",
        "dtype: bf16\ntensors: {a: [4]}\nlayouts: {train: {params: {p: {holds: a}, q: {holds: a}}}}\n");
  write("bases/middle.yaml", "extend: base.yaml\nlayouts: {serve: {extend: train, params: {p: null}}}\n");
  write("own.yaml",
        "extend: bases/middle.yaml\n"
        "layouts: {train: {extend: train, params: {p: null}}, serve: {extend: serve, params: {p: null}}}\n");
  const auto found = layout("source: {mesh: {}}\ntarget: {layout: serve, mesh: {}}\n");
  ASSERT_TRUE(found) << errors();
  EXPECT_EQ(names(found->endpoints[1]), (std::vector<std::string>{"q"}));
}

TEST_F(ModelExtend, NullRemovesOtherKeysOfLayouts) {
  write("bases/base.yaml", "dtype: bf16\ntensors: {w: [4], n: [4]}\n"
                           "layouts:\n"
                           "  plain: {params: same}\n"
                           "  cut: {extend: plain, switches: {a: 1, b: 2}, shard: {w: {0: tp}, \"n*\": {0: tp}}}\n");
  write("own.yaml", "extend: bases/base.yaml\n"
                    "layouts: {cut: {extend: cut, switches: {a: null}, shard: {\"n*\": null}}}\n");
  EXPECT_TRUE(layout("source: {layout: plain, mesh: {}}\ntarget: {layout: cut, mesh: {tp: 2}}\n")) << errors();
}

TEST_F(ModelExtend, OverridesApplyToTheBase) {
  write("bases/base.yaml", "dtype: bf16\nlet: {width: 6}\ntensors: {a: [width]}\n");
  write("own.yaml", "extend: bases/base.yaml\n");
  const auto found = layout("source: {mesh: {}}\ntarget: {mesh: {}}\n", {"model.let.width=10"});
  ASSERT_TRUE(found) << errors();
  EXPECT_EQ(found->tensorPatterns[0].shape, (std::vector<int64_t>{10}));
}

TEST_F(ModelExtend, RefusesCyclesMissingFilesAndMissingEntries) {
  write("own.yaml", "extend: own.yaml\n");
  EXPECT_FALSE(layout("source: {mesh: {}}\ntarget: {mesh: {}}\n"));
  EXPECT_NE(errors().find("'extend' is nested more than 16 files deep"), std::string::npos) << errors();
  write("own.yaml", "extend: nowhere.yaml\n");
  EXPECT_FALSE(layout("source: {mesh: {}}\ntarget: {mesh: {}}\n"));
  EXPECT_NE(errors().find("cannot read"), std::string::npos) << errors();
  write("bases/base.yaml", "dtype: bf16\ntensors: {a: [4]}\n");
  write("own.yaml", "extend: bases/base.yaml\ntensors: {b: null}\n");
  EXPECT_FALSE(layout("source: {mesh: {}}\ntarget: {mesh: {}}\n"));
  EXPECT_NE(errors().find("'b' is null, which removes it from 'tensors', but 'tensors' has no 'b'"), std::string::npos)
      << errors();
}

TEST_F(ModelExtend, RenamesAfterMerging) {
  write("bases/base.yaml",
        "dtype: bf16\nindex: {layer: 2}\n"
        "tensors: {\"m.{layer}.a\": [4], m.norm: [4], head: [4]}\n"
        "layouts:\n"
        "  hf: {params: same, rename: {m.: model.}}\n"
        "  serve: {place: {layer: {axis: pp, interleave: 2}}, chunks: \"{layer.chunk}.\",\n"
        "          params: {\"l.{layer.local}\": {holds: a}, head: {holds: head, at: {pp: last}}}}\n");
  write("own.yaml", "extend: bases/base.yaml\n"
                    "tensors: {vision: [4]}\n"
                    "layouts:\n"
                    "  hf: {extend: hf, rename: {\"\": text.}, params: {m.norm: null, vision: {holds: vision}},\n"
                    "       shard: {\"m.*\": {0: tp}, \"*\": {}}}\n"
                    "  plain: {extend: hf, rename: {m.: null}}\n"
                    "  serve: {extend: serve, rename: {l.: layers., head: text.head}}\n");
  const auto found =
      layout("source: {layout: hf, mesh: {tp: 2}, ignore: text.vision}\n"
             "target: [{layout: plain, mesh: {}, only: \"text.m.*\"}, {layout: serve, mesh: {pp: 1}}]\n");
  ASSERT_TRUE(found) << errors();
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(found->endpoints[0]), (Names{"model.{layer}.a", "text.head"}));
  EXPECT_EQ(names(found->endpoints[1]), (Names{"text.m.{layer}.a"}));
  EXPECT_EQ(names(found->endpoints[2]), (Names{"{layer.chunk}.layers.{layer.local}", "1.text.head"}));
}
