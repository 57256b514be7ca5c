// SPDX-License-Identifier: Apache-2.0
// Reading of jobs: includes, --set, meshes, ranks, world, options, fingerprint. Errors are tested by errors/*.yaml.

#include "compiler/frontend/frontend.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace reshard {
namespace {

constexpr const char *kModel =
    "model: {dtype: bf16, let: {n: 4}, index: {layer: 2}, tensors: {\"l.{layer}.w\": [8]}}\n";

class JobTest : public testing::Test {
protected:
  void write(const std::string &name, const std::string &text) {
    std::filesystem::create_directories(std::filesystem::path(folder_ / name).parent_path());
    std::ofstream(folder_ / name) << text;
  }
  Job read(const std::vector<std::string> &overrides = {}) {
    Diagnostics diagnostics;
    auto job = readJob(folder_ / "job.yaml", overrides, diagnostics);
    EXPECT_TRUE(job) << diagnostics.text();
    EXPECT_TRUE(diagnostics.ok()) << diagnostics.text();
    return job ? std::move(*job) : Job();
  }
  Job read(const std::string &text, const std::vector<std::string> &overrides = {}) {
    write("job.yaml", "version: 1\n" + text);
    return read(overrides);
  }

  const tests::TemporaryFolder folder_;
};

std::string axes(const EndpointDeclaration &endpoint) {
  std::string text;
  for (const ir::Axis &axis : endpoint.axes)
    text += axis.name + "=" + std::to_string(axis.size) + "/" + std::to_string(axis.stride) + " ";
  return text;
}

TEST_F(JobTest, Meshes) {
  const Job job = read(
      kModel + std::string("source: {mesh: {tp: 2, dp: n, views: [{ep: 8}, {etp: 2, edp: 4}]}}\ntarget: {mesh: {}}\n"));
  EXPECT_EQ(axes(job.endpoints.at(0)), "tp=2/1 dp=4/2 ep=8/1 etp=2/1 edp=4/2 ");
  EXPECT_EQ(job.endpoints[0].meshSize, 8);
  EXPECT_EQ(job.endpoints.at(1).meshSize, 1);
  EXPECT_EQ(job.world, 8);
}

TEST_F(JobTest, SameAxisInSeveralViews) {
  const Job job = read(
      kModel +
      std::string(
          "source: {mesh: {tp: 2, dp: 4, instance: 2, views: [{ep: 8, instance: 2}]}}\ntarget: {mesh: {tp: 2}}\n"));
  EXPECT_EQ(axes(job.endpoints.at(0)), "tp=2/1 dp=4/2 instance=2/8 ep=8/1 ");
}

TEST_F(JobTest, Megatron) {
  // docs/yaml.md §3, for mesh rank p: tp = p mod 2, dp = p/2 mod 2, pp = p/4; ep = p mod 2, edp = p/2 mod 2, pp = p/4
  const Job job = read(kModel + std::string("source: {mesh: {megatron: {tp: 2, pp: 2, dp: 2, ep: 2}}}\n"
                                            "target: {mesh: {megatron: {tp: 2, pp: 2, dp: 2, order: pp-dp-tp}}}\n"));
  EXPECT_EQ(axes(job.endpoints.at(0)), "tp=2/1 cp=1/2 dp=2/2 pp=2/4 etp=1/1 ep=2/1 edp=2/2 ");
  EXPECT_EQ(axes(job.endpoints.at(1)), "pp=2/1 dp=2/2 tp=2/4 cp=1/8 edp=4/2 etp=1/8 ep=1/8 ");
}

TEST_F(JobTest, RanksWorldStorage) {
  const Job job =
      read(kModel + std::string("source: {storage: dir}\n"
                                "target:\n- {mesh: {tp: 4}, ranks: 8..11}\n- {mesh: {tp: 4}, ranks: [3, 0, 5..6]}\n"
                                "- {storage: out, mesh: {tp: 2}}\n"));
  EXPECT_TRUE(job.endpoints.at(0).storage);
  EXPECT_TRUE(job.endpoints[0].checkpoint);
  EXPECT_EQ(job.endpoints[0].directory, "dir");
  EXPECT_EQ(job.endpoints.at(1).role, "target.0");
  EXPECT_EQ(job.endpoints[1].ranks, (std::vector<int32_t>{8, 9, 10, 11}));
  EXPECT_EQ(job.endpoints.at(2).ranks, (std::vector<int32_t>{3, 0, 5, 6}));
  EXPECT_TRUE(job.endpoints.at(3).storage);
  EXPECT_FALSE(job.endpoints[3].checkpoint);
  EXPECT_EQ(job.endpoints[3].ranks, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(job.world, 12);
  EXPECT_EQ(read(kModel + std::string("source: {storage: a, mesh: {}}\ntarget: {storage: b, mesh: {tp: 4}}\n")).world,
            1);
  EXPECT_EQ(read(kModel + std::string("source: {mesh: {tp: 2}}\ntarget: {mesh: {}}\nworld: 64\n")).world, 64);
}

TEST_F(JobTest, Options) {
  const std::string ends = kModel + std::string("source: {mesh: {}}\ntarget: {mesh: {}}\n");
  EXPECT_EQ(read(ends).stagingLimit, 0);
  EXPECT_EQ(read(ends + "options: {staging: 1000}").stagingLimit, 1000);
  EXPECT_EQ(read(ends + "options: {staging: 512MiB}").stagingLimit, 512 << 20);
  EXPECT_EQ(read(ends + "options: {staging: 8 GiB}").stagingLimit, int64_t{8} << 30);
  EXPECT_EQ(read(ends + "options: {topology: {ranks_per_node: 8}}").topology.ranksPerNode, 8);
  write("t/h100.yaml", "ranks_per_node: 16\n");
  EXPECT_EQ(read(ends + "options: {topology: t/h100.yaml}").topology.ranksPerNode, 16);
  EXPECT_EQ(
      read(ends + "options: {topology: t/h100.yaml}", {"options.topology.ranks_per_node=4"}).topology.ranksPerNode, 4);
}

TEST_F(JobTest, LayoutsAndSwitches) {
  write("models/m.yaml",
        "dtype: bf16\nlet: {n: 4}\nindex: {layer: 2}\ntensors: {\"l.{layer}.w\": [8]}\n"
        "layouts: {train: {axes: [tp, pp], place: {layer: pp}, switches: {fused: n * tp * pp, deep: false},\n"
        "                  params: {\"d.{layer.local}\": {holds: w, when: fused}}}}\n");
  const Job job =
      read("model: models/m.yaml\nsource: {layout: train, mesh: {tp: 2}, place: {layer: {axis: pp, sizes: [2]}}}\n"
           "target: {layout: train, mesh: {tp: 4}, switches: {deep: 2 * n}}\n");
  EXPECT_EQ(job.model.path, folder_ / "models/m.yaml");
  EXPECT_EQ(job.endpoints.at(0).layoutDeclaration, &job.model.layouts.at(0));
  EXPECT_EQ(job.endpoints[0].placement.at("layer").scheme, "sizes");
  EXPECT_EQ(job.endpoints[0].switches, (std::map<std::string, int64_t>{{"fused", 8}, {"deep", 0}}));
  EXPECT_EQ(job.endpoints.at(1).switches, (std::map<std::string, int64_t>{{"fused", 16}, {"deep", 8}}));
}

TEST_F(JobTest, Overrides) {
  const std::string text = kModel + std::string("source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 4}}\n");
  EXPECT_EQ(read(text, {"target.mesh={tp: 2, dp: 2}"}).endpoints.at(1).axes.size(), 2u);
  EXPECT_EQ(read(text, {"target.mesh.tp=8"}).world, 8);
  EXPECT_EQ(read(text, {"world=16", "world=32"}).world, 32);
  EXPECT_EQ(read(text, {"options.staging=1KiB"}).stagingLimit, 1024); // keys are created
  EXPECT_EQ(read(text, {"model.let.n=2 * 3"}).model.let.at("n"), 6);
  EXPECT_EQ(read(text, {"model.tensors.l.{layer}.w=[16]"}).model.tensors.at(0).shape.at(0),
            16); // the longest existing key is used
  EXPECT_EQ(read(text, {"model.tensors.extra=[1, 2]"}).model.tensors.size(), 2u);
  write("m.yaml", "dtype: bf16\nlet: {n: 4}\ntensors: {w: [n]}\n");
  const std::string included = "model: m.yaml\nsource: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 4}}\n";
  EXPECT_EQ(read(included, {"model.let.n=5"}).model.tensors.at(0).shape.at(0), 5); // inside an included file
  EXPECT_EQ(read(included, {"model.let.n=5", "model={dtype: i8, tensors: {w: [7]}}"}).model.tensors.at(0).shape.at(0),
            7);
  EXPECT_EQ(read("model: none.yaml\nsource: {mesh: {}}\ntarget: {mesh: {}}\n", {"model=" + folder_ / "m.yaml"})
                .model.let.at("n"),
            4);
}

TEST_F(JobTest, FingerprintCoversContentsAndOverrides) {
  const std::string text = kModel + std::string("source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 4}}\n");
  const std::string one = read(text).fingerprint;
  EXPECT_EQ(one.size(), 32u);
  EXPECT_EQ(read(text).fingerprint, one);
  EXPECT_NE(read(text + "world: 5\n").fingerprint, one);
  EXPECT_NE(read(text, {"world=5"}).fingerprint, one);
  EXPECT_NE(read(text, {"world=5"}).fingerprint, read(text, {"world=6"}).fingerprint);
}

TEST_F(JobTest, PathsAreRelativeToTheNamingFile) {
  write("models/config.json", "{\"n\": 12}");
  write("models/m.yaml", "config: config.json\ndtype: bf16\nlet: {n: $n}\ntensors: {w: [n]}\n");
  EXPECT_EQ(read("model: models/m.yaml\nsource: {mesh: {}}\ntarget: {mesh: {}}\n").model.let.at("n"), 12);
}

} // namespace
} // namespace reshard
