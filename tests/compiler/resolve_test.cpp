// SPDX-License-Identifier: Apache-2.0
// resolve: packs, shards, placement and padding on shapes small enough to check by hand (most are in docs/yaml.md,
// section 6), and the errors of comparing both sides. A param is printed element by element: `q:3` is row 3 of tensor
// q, `z` is padding.
#include "compiler/frontend/frontend.h"
#include "compiler/resolve/steps.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>

namespace reshard {
namespace {

using ir::IndexMap;

struct Resolved {
  Diagnostics diagnostics;
  std::optional<ir::Layout> layout;
};

Resolved resolveFile(const std::string &path) {
  Resolved result;
  if (const auto job = readJob(path, {}, result.diagnostics))
    result.layout = resolve(*job, result.diagnostics);
  return result;
}

Resolved resolveText(const std::string &yaml) {
  const tests::TemporaryFolder folder;
  const std::string path = folder / "job.yaml";
  std::ofstream(path) << yaml;
  return resolveFile(path);
}

std::string replaced(std::string text, const std::string &from, const std::string &to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

const IndexMap &at(const ir::Endpoint &endpoint, unsigned sharding, int64_t meshRank) {
  return endpoint.shardings[sharding].at[coordinate(endpoint, endpoint.shardings[sharding].axes, meshRank)];
}

/// The elements of an instance, row-major, computed from the index maps only. `?`: no tensor, `!`: several.
std::string elementsText(const ir::Layout &layout, const ir::Endpoint &endpoint, const ir::Param &param,
                         int64_t meshRank, int64_t instance) {
  const std::vector<int64_t> shape = localShape(endpoint, param, meshRank);
  int64_t elements = 1;
  for (int64_t n : shape)
    elements *= n;
  std::vector<int64_t> instanceOf(param.variables.size()); // per name variable
  for (size_t i = param.variables.size(); i-- > 0;) {
    const int64_t count = positionCount(at(endpoint, param.instances[i], meshRank));
    instanceOf[i] = instance % count;
    instance /= count;
  }
  std::string text;
  for (int64_t e = 0; e < elements; ++e) {
    std::vector<int64_t> position(shape.size());
    for (size_t d = shape.size(), rest = e; d-- > 0; rest /= shape[d])
      position[d] = static_cast<int64_t>(rest) % shape[d];
    std::string label;
    for (const ir::Part &part : param.parts) {
      std::vector<int64_t> logical;
      for (size_t d = 0; d < part.dimensions.size(); ++d) {
        const ir::PartDimension &dimension = part.dimensions[d];
        int64_t local = 0;
        if (dimension.param >= 0)
          local = position[dimension.param];
        else if (part.pattern < 0)
          local = instanceOf[d];
        else
          local = instanceOf[std::find(param.variables.begin(), param.variables.end(),
                                       layout.tensorPatterns[part.pattern].variables[d]) -
                             param.variables.begin()];
        logical.push_back(map(inverse(at(endpoint, dimension.sharding, meshRank)), local));
      }
      if (std::find(logical.begin(), logical.end(), -1) != logical.end())
        continue;
      if (!label.empty()) {
        label = "!";
      } else if (part.pattern < 0) {
        label = "z";
      } else {
        const ir::TensorPattern &pattern = layout.tensorPatterns[part.pattern];
        label = pattern.name;
        for (size_t v = 0; v < pattern.variables.size(); ++v)
          label = replaced(label, "{" + layout.variables[pattern.variables[v]].name + "}", std::to_string(logical[v]));
        for (size_t d = pattern.variables.size(); d < logical.size(); ++d)
          label += (d == pattern.variables.size() ? ":" : ",") + std::to_string(logical[d]);
      }
    }
    text += (e ? " " : "") + (label.empty() ? "?" : label);
  }
  return text;
}

using Lines = std::vector<std::string>;

/// All params of a mesh rank: "name [shape] elements". A job with an error fails the test.
Lines contents(const Resolved &resolved, size_t endpointNumber, int64_t meshRank) {
  Lines lines;
  if (!resolved.layout) {
    ADD_FAILURE() << resolved.diagnostics.text();
    return lines;
  }
  const ir::Layout &layout = *resolved.layout;
  const ir::Endpoint &endpoint = layout.endpoints[endpointNumber];
  for (const ir::Param &param : endpoint.params)
    for (int64_t i = 0; i < instances(endpoint, param, meshRank); ++i) {
      std::string shape;
      for (int64_t n : localShape(endpoint, param, meshRank))
        shape += (shape.empty() ? "" : "x") + std::to_string(n);
      lines.push_back(instanceName(layout, endpoint, param, meshRank, i) + " [" + shape + "] " +
                      elementsText(layout, endpoint, param, meshRank, i));
    }
  return lines;
}

/// A job with the layout `cut` of these params and placement on the target; the source holds every tensor whole.
Resolved target(const std::string &tensors, const std::string &params, const std::string &mesh = "{tp: 2}",
                const std::string &placement = "{}", const std::string &index = "{}") {
  return resolveText("version: 1\nmodel:\n  dtype: bf16\n  index: " + index + "\n  tensors: " + tensors +
                     "\n  layouts:\n    cut: {place: " + placement + ", params: " + params +
                     "}\nsource: {mesh: {}}\ntarget: {layout: cut, mesh: " + mesh + "}\n");
}

/// The elements of the target's only param, by rank.
Lines elements(const Resolved &resolved) {
  Lines result;
  if (!resolved.layout) {
    ADD_FAILURE() << resolved.diagnostics.text();
    return result;
  }
  for (int64_t meshRank = 0; meshRank < resolved.layout->endpoints[1].meshRanks(); ++meshRank)
    for (const std::string &line : contents(resolved, 1, meshRank))
      result.push_back(line.substr(line.find(' ') + 1));
  return result;
}

void expectError(const Resolved &resolved, const std::string &text) {
  EXPECT_FALSE(resolved.layout);
  EXPECT_NE(resolved.diagnostics.text().find(text), std::string::npos)
      << "expected: " << text << "\nfound: " << resolved.diagnostics.text();
}

// ------------------------------------------------------------------------------------------------ packs and shards

TEST(Resolve, PadAtTheEnd) {
  EXPECT_EQ(elements(target("{t: [5]}", "{p: {holds: t, pad: {0: 4}, shard: {0: tp}}}")),
            (Lines{"[4] t:0 t:1 t:2 t:3", "[4] t:4 z z z"}));
}

TEST(Resolve,
     PadInTwoDimensions) { // 3 x 1 padded to 4 x 2: the padding of rows, then that of columns beside the tensor's rows
  EXPECT_EQ(elements(target("{t: [3, 1]}", "{p: {holds: t, pad: {0: 2, 1: 2}, shard: {0: tp}}}")),
            (Lines{"[2x2] t:0,0 z t:1,0 z", "[2x2] t:2,0 z z z"}));
}

TEST(Resolve, ConcatIsShardedByEntry) {
  EXPECT_EQ(elements(target("{g: [4], u: [4]}", "{p: {concat: [g, u], shard: {0: tp}}}")),
            (Lines{"[4] g:0 g:1 u:0 u:1", "[4] g:2 g:3 u:2 u:3"}));
  EXPECT_EQ(elements(target("{g: [4], u: [4]}", "{p: {concat: [g, u], cut: joined, shard: {0: tp}}}")),
            (Lines{"[4] g:0 g:1 g:2 g:3", "[4] u:0 u:1 u:2 u:3"}));
  EXPECT_EQ(elements(target("{a: [3], b: [2]}", "{p: {concat: [a, b], shard: {0: {axis: tp, scheme: chunk}}}}")),
            (Lines{"[3] a:0 a:1 b:0", "[2] a:2 b:1"}));
}

TEST(Resolve, InterleavedQkv) { // two groups of q q k v
  const std::string pack = "{p: {interleave: {groups: 2, of: [q, k, v]}, shard: {0: tp}}}";
  const std::string inside = "{p: {interleave: {groups: 2, of: [q, k, v]}, shard: {0: {axis: tp, unit: 1}}}}";
  EXPECT_EQ(elements(target("{q: [4], k: [2], v: [2]}", pack)), (Lines{"[4] q:0 q:1 k:0 v:0", "[4] q:2 q:3 k:1 v:1"}));
  EXPECT_EQ(elements(target("{q: [4], k: [2], v: [2]}", inside, "{tp: 4}")),
            (Lines{"[2] q:0 q:1", "[2] k:0 v:0", "[2] q:2 q:3", "[2] k:1 v:1"}));
  expectError(
      target("{q: [4], k: [2], v: [2]}", pack, "{tp: 4}"),
      "dimension 0 of param 'p' over tp: 'even' cannot shard 2 units of 4 rows over 4 ranks: 4 does not divide 2");
}

TEST(Resolve, PacksOfPacks) {
  EXPECT_EQ(elements(target("{q: [4], k: [2], b: [2]}",
                            "{p: {concat: [{interleave: {groups: 2, of: [q, k]}}, b], shard: {0: tp}}}")),
            (Lines{"[4] q:0 q:1 k:0 b:0", "[4] q:2 q:3 k:1 b:1"}));
  EXPECT_EQ(
      elements(target("{a: [2], b: [2], c: [2]}", "{p: {interleave: {groups: 2, of: [{concat: [a, b]}, c]}}}", "{}")),
      (Lines{"[6] a:0 a:1 c:0 b:0 b:1 c:1"}));
}

TEST(Resolve, ConcatAlongTheOtherDimension) {
  EXPECT_EQ(elements(target("{a: [2, 2], b: [2, 1]}", "{p: {concat: {dim: 1, of: [a, b]}, shard: {0: tp}}}")),
            (Lines{"[1x3] a:0,0 a:0,1 b:0,0", "[1x3] a:1,0 a:1,1 b:1,0"}));
  // Along dimension 0 the second entry is itself sharded by entry: rows 0 2 | 1 3, not 0 1 | 2 3 like the
  // first.
  const std::string params = "{p: {concat: {dim: 1, of: [a, {concat: [b, c]}]}, shard: {0: tp}CUT}}";
  const std::string tensors = "{a: [4, 1], b: [2, 1], c: [2, 1]}";
  expectError(target(tensors, replaced(params, "CUT", "")), "are sharded differently along dimension 0");
  EXPECT_EQ(elements(target(tensors, replaced(params, "CUT", ", cut: joined"))),
            (Lines{"[2x2] a:0,0 b:0,0 a:1,0 b:1,0", "[2x2] a:2,0 c:0,0 a:3,0 c:1,0"}));
}

TEST(Resolve, Permute) { // F[a, b] = T[b, a]
  EXPECT_EQ(elements(target("{t: [2, 4]}", "{p: {holds: t, permute: [1, 0], shard: {0: tp}}}")),
            (Lines{"[2x2] t:0,0 t:1,0 t:0,1 t:1,1", "[2x2] t:0,2 t:1,2 t:0,3 t:1,3"}));
}

// The source quantizes along the columns of its param, which are the rows of the target's.
TEST(Resolve, CodesOfAPermutedTensorAreMadeByTheReceiver) {
  const Resolved resolved = resolveText(R"(
version: 1
model:
  dtype: bf16
  tensors: {some.weight: [64, 64]}
  layouts: {there: {params: {w: {holds: some.weight, permute: [1, 0]}}}}
source: {layout: there, mesh: {}}
target: {mesh: {}, quantize: {format: mxfp8, by: sender}}
)");
  EXPECT_TRUE(resolved.layout) << resolved.diagnostics.text();
  EXPECT_NE(resolved.diagnostics.text().find("target param 'some.weight' is quantized by the receiver: the source has "
                                             "'some.weight' with its dimensions in another order"),
            std::string::npos)
      << resolved.diagnostics.text();
}

// Rows of blocks of the source and of the target begin at other positions.
TEST(Resolve, CodesOfOtherBlocksAreMadeAgain) {
  const Resolved resolved = resolveText(R"(
version: 1
model: {dtype: bf16, tensors: {w: {shape: [384, 128], shard: {0: tp}}}}
source: {mesh: {tp: 3}, quantize: block_fp8}
target: {mesh: {tp: 2}, quantize: block_fp8}
)");
  EXPECT_TRUE(resolved.layout) << resolved.diagnostics.text();
  EXPECT_NE(resolved.diagnostics.text().find("target param 'w': its codes are not those of the source, which has the "
                                             "same format: values are dequantized and quantized again, and may change"),
            std::string::npos)
      << resolved.diagnostics.text();
}

// Heads of 2 rows: 4 query heads, 2 key and value heads.
TEST(Resolve, GroupedQueriesWithMoreAndFewerRanksThanKeyHeads) {
  const std::string tensors = "{q: [8], k: [4], v: [4]}";
  const std::string params = "{p: {concat: [q, k, v], shard: {0: {axis: tp, unit: 2, replicate: true}}}}";
  EXPECT_EQ(elements(target(tensors, params, "{tp: 4}")),
            (Lines{"[6] q:0 q:1 k:0 k:1 v:0 v:1", "[6] q:2 q:3 k:0 k:1 v:0 v:1", "[6] q:4 q:5 k:2 k:3 v:2 v:3",
                   "[6] q:6 q:7 k:2 k:3 v:2 v:3"}));
  EXPECT_EQ(elements(target(tensors, params, "{tp: 2}")),
            (Lines{"[8] q:0 q:1 q:2 q:3 k:0 k:1 v:0 v:1", "[8] q:4 q:5 q:6 q:7 k:2 k:3 v:2 v:3"}));
}

TEST(Resolve, StackedExperts) { // w13: slots [g; u]
  const std::string tensors = "{\"e.{expert}.g\": [1], \"e.{expert}.u\": [1]}", index = "{expert: 5}";
  const std::string params = "{w13: {stack: expert, concat: [\"e.{expert}.g\", \"e.{expert}.u\"]}}";
  EXPECT_EQ(elements(target(tensors, params, "{ep: 2}", "{expert: {axis: ep, scheme: balanced}}", index)),
            (Lines{"[3x2] e.0.g:0 e.0.u:0 e.1.g:0 e.1.u:0 e.2.g:0 e.2.u:0", "[2x2] e.3.g:0 e.3.u:0 e.4.g:0 e.4.u:0"}));
  EXPECT_EQ(elements(target(tensors, params, "{ep: 2}", "{expert: {axis: ep, map: [[4, 0], [1, 2, 3]]}}", index)),
            (Lines{"[2x2] e.4.g:0 e.4.u:0 e.0.g:0 e.0.u:0", "[3x2] e.1.g:0 e.1.u:0 e.2.g:0 e.2.u:0 e.3.g:0 e.3.u:0"}));
  const std::string some = "{\"e.{expert}.g\": {shape: [1], where: {expert: 1..4}}}";
  EXPECT_EQ(elements(target(some, "{w: {stack: expert, holds: \"e.{expert}.g\"}}", "{ep: 2}",
                            "{expert: {axis: ep, map: [[4, 0], [1, 2, 3]]}}", index)),
            (Lines{"[1x1] e.4.g:0", "[3x1] e.1.g:0 e.2.g:0 e.3.g:0"}));
}

TEST(Resolve, AMapMayRepeatOnATarget) { // a hot expert twice on one rank, and a row twice
  EXPECT_EQ(elements(target("{\"e.{x}.g\": [1]}", "{w: {stack: x, holds: \"e.{x}.g\"}}", "{ep: 2}",
                            "{x: {axis: ep, map: [[1, 0, 1], [2, 2]]}}", "{x: 3}")),
            (Lines{"[3x1] e.1.g:0 e.0.g:0 e.1.g:0", "[2x1] e.2.g:0 e.2.g:0"}));
  EXPECT_EQ(elements(target("{t: [3]}", "{p: {holds: t, shard: {0: {axis: tp, map: [[2, 2, 0], [1, 0]]}}}}")),
            (Lines{"[3] t:2 t:2 t:0", "[2] t:1 t:0"}));
  expectError(target("{\"e.{x}.g\": [1]}", "{\"w{x}\": {holds: \"e.{x}.g\"}}", "{ep: 2}",
                     "{x: {axis: ep, map: [[1, 0, 1], [2, 2]]}}", "{x: 3}"),
              "the 'map' that places 'x' lists a value twice for a rank, which only a stack can hold");
}

TEST(Resolve, AStackWithoutPlacementIsPaddedAndSharded) {
  EXPECT_EQ(elements(target("{\"e.{x}.g\": [1]}",
                            "{w: {stack: {index: x, dim: 1}, holds: \"e.{x}.g\", pad: {1: 2}, shard: {1: tp}}}",
                            "{tp: 2}", "{}", "{x: 3}")),
            (Lines{"[1x2] e.0.g:0 e.1.g:0", "[1x2] e.2.g:0 z"}));
}

TEST(Resolve, SeveralStacks) { // dimension 0: layers, dimension 2: experts; dimension 1 is the tensors'
  const std::string tensors = "{\"l.{x}.{y}\": [2]}", index = "{x: 2, y: 2}";
  EXPECT_EQ(elements(target(tensors, "{w: {stack: [x, {index: y, dim: 2}], holds: \"l.{x}.{y}\", shard: {1: tp}}}",
                            "{tp: 2}", "{}", index)),
            (Lines{"[2x1x2] l.0.0:0 l.0.1:0 l.1.0:0 l.1.1:0", "[2x1x2] l.0.0:1 l.0.1:1 l.1.0:1 l.1.1:1"}));
  EXPECT_EQ(elements(target(tensors, "{w: {stack: [y, x], holds: \"l.{x}.{y}\"}}", "{ep: 2}", "{y: ep}", index)),
            (Lines{"[1x2x2] l.0.0:0 l.0.0:1 l.1.0:0 l.1.0:1", "[1x2x2] l.0.1:0 l.0.1:1 l.1.1:0 l.1.1:1"}));
}

TEST(Resolve, OptimizerStates) { // of a pack, of a tied tensor, of a layout that has only some of them
  const std::string job =
      "version: 1\n"
      "model:\n"
      "  dtype: bf16\n"
      "  index: {layer: 2}\n"
      "  optimizer: {m: fp32, step: {dtype: i64, shape: []}}\n"
      "  tensors: {\"l.{layer}.q\": [2], \"l.{layer}.k\": [1], embed: [2], head: {tied: embed}}\n"
      "  layouts:\n"
      "    plain: {params: same, optimizer: {weights: \"w.{param}\", states: \"{state}.{param}\"}}\n"
      "    fused:\n"
      "      params: {\"l.{layer}.qk\": {concat: [q, k], cut: joined, shard: {0: {axis: tp, scheme: chunk}}},\n"
      "               e: {holds: embed}}\n"
      "      optimizer: {states: \"{param}.{state}\", of: [m]}\n"
      "    weights: {params: same}\n"
      "source: {layout: plain, mesh: {}}\n"
      "target: [{layout: fused, mesh: {tp: 2}}, {layout: weights, mesh: {}}]\n";
  const Resolved resolved = resolveText(job);
  const auto &found = resolved.layout;
  ASSERT_TRUE(found) << resolved.diagnostics.text();
  auto names = [&](size_t endpoint) {
    Lines result;
    for (const ir::Param &param : found->endpoints[endpoint].params)
      result.push_back(param.name + " " + ir::name(param.dtype));
    return result;
  };
  EXPECT_EQ(names(0), (Lines{"w.l.{layer}.q bf16", "w.l.{layer}.k bf16", "w.embed bf16", "w.head bf16",
                             "m.l.{layer}.q fp32", "m.l.{layer}.k fp32", "m.embed fp32", "step.l.{layer}.q i64",
                             "step.l.{layer}.k i64", "step.embed i64"}));
  EXPECT_EQ(names(1), (Lines{"l.{layer}.qk bf16", "e bf16", "l.{layer}.qk.m fp32", "e.m fp32"}));
  EXPECT_EQ(names(2), (Lines{"l.{layer}.q bf16", "l.{layer}.k bf16", "embed bf16", "head bf16"}));
  EXPECT_EQ(contents(resolved, 1, 1),
            (Lines{"l.0.qk [1] l.0.k:0", "l.1.qk [1] l.1.k:0", "e [2] embed:0 embed:1", "l.0.qk.m [1] l.0.k.m:0",
                   "l.1.qk.m [1] l.1.k.m:0", "e.m [2] embed.m:0 embed.m:1"}));
}

TEST(Resolve, BuffersHaveNoStates) {
  const Resolved resolved = resolveText("version: 1\n"
                                        "model:\n"
                                        "  dtype: bf16\n"
                                        "  optimizer: {m: fp32, step: {dtype: i64, shape: []}}\n"
                                        "  tensors: {w: [2], bias: {shape: [3], buffer: true}}\n"
                                        "  layouts: {all: {params: same, optimizer: \"{param}.{state}\"}}\n"
                                        "source: {layout: all, mesh: {}}\n"
                                        "target: {layout: all, mesh: {}}\n");
  EXPECT_EQ(contents(resolved, 1, 0),
            (Lines{"w [2] w:0 w:1", "bias [3] bias:0 bias:1 bias:2", "w.m [2] w.m:0 w.m:1", "w.step [] w.step"}));
}

TEST(Resolve, ScalarStatesKeepTheirStacks) { // the stack is dimension 1 of the param, and 0 of its scalars
  const Resolved resolved =
      resolveText("version: 1\n"
                  "model:\n"
                  "  dtype: bf16\n"
                  "  index: {x: 4}\n"
                  "  optimizer: {m: fp32, step: {dtype: fp32, shape: []}}\n"
                  "  tensors: {\"w.{x}\": [2]}\n"
                  "  layouts:\n"
                  "    all: {params: {w: {stack: {index: x, dim: 1}, holds: \"w.{x}\", shard: {1: tp}}},\n"
                  "          optimizer: \"{param}.{state}\"}\n"
                  "source: {layout: all, mesh: {}}\n"
                  "target: [{layout: all, mesh: {tp: 2}}, {mesh: {tp: 1}, dtype: fp16, convert: rne}]\n");
  ASSERT_TRUE(resolved.layout) << resolved.diagnostics.text();
  EXPECT_EQ(contents(resolved, 1, 1),
            (Lines{"w [2x2] w.2:0 w.3:0 w.2:1 w.3:1", "w.m [2x2] w.2.m:0 w.3.m:0 w.2.m:1 w.3.m:1",
                   "w.step [2] w.2.step w.3.step"}));
  const ir::Endpoint &bare = resolved.layout->endpoints[2]; // an endpoint's dtype is for weights
  for (const ir::Param &param : bare.params)
    EXPECT_EQ(param.storageDtype.value_or(param.dtype), param.name == "w.{x}" ? ir::DType::fp16 : ir::DType::fp32)
        << param.name;
}

TEST(Resolve, TiedStatesAreTheirWeights) { // master weights: in their own dtype, from a source that has weights alone
  const Resolved resolved = resolveText(
      "version: 1\n"
      "model:\n"
      "  dtype: fp32\n"
      "  index: {x: 2}\n"
      "  optimizer: {master: {dtype: fp32, tied: true}, m: fp32}\n"
      "  tensors: {\"w.{x}\": {shape: [2], where: {x: [1]}}, head: [2], tail: {tied: head}}\n"
      "  layouts:\n"
      "    plain: {params: same, optimizer: {states: \"{state}.{param}\", of: [m]}}\n"
      "    stacked:\n"
      "      params: {w: {stack: x, holds: \"w.{x}\"}, both: {concat: [head, head]}, tail: {holds: tail}}\n"
      "      optimizer: \"{param}.{state}\"\n"
      "source: {layout: plain, mesh: {}}\n"
      "target: [{layout: stacked, mesh: {}, dtype: bf16, convert: rne}, {mesh: {}, dtype: bf16, convert: rne}]\n");
  ASSERT_TRUE(resolved.layout) << resolved.diagnostics.text();
  EXPECT_EQ(contents(resolved, 1, 0),
            (Lines{"w [1x2] w.1:0 w.1:1", "both [4] head:0 head:1 head:0 head:1", "tail [2] head:0 head:1",
                   "w.master [1x2] w.1:0 w.1:1", "both.master [4] head:0 head:1 head:0 head:1",
                   "w.m [1x2] w.1.m:0 w.1.m:1", "both.m [4] head.m:0 head.m:1 head.m:0 head.m:1"}));
  for (size_t target : {1, 2})
    for (const ir::Param &param : resolved.layout->endpoints[target].params)
      EXPECT_EQ(param.storageDtype.value_or(param.dtype),
                param.name.find(".m") == std::string::npos ? ir::DType::bf16 : ir::DType::fp32)
          << param.name;
}

TEST(Resolve, StagesBySizesAndLocalNames) { // docs/yaml.md: layers 0, 3 and 4 of 5 exist, stages of 2 and 3
  const Resolved resolved = target("{\"b.{layer}.w\": {shape: [1], where: {layer: [0, 3..4]}}}",
                                   "{\"b.{layer.local}.w\": {holds: \"b.{layer}.w\"}}", "{pp: 2}",
                                   "{layer: {axis: pp, sizes: [2, 3]}}", "{layer: 5}");
  EXPECT_EQ(contents(resolved, 1, 0), (Lines{"b.0.w [1] b.0.w:0"}));
  EXPECT_EQ(contents(resolved, 1, 1), (Lines{"b.1.w [1] b.3.w:0", "b.2.w [1] b.4.w:0"}));
}

TEST(Resolve, PresenceAndConditions) {
  const Resolved resolved =
      target("{t: [1], u: [1], v: [1]}",
             "{a: {holds: t, at: {pp: first}}, b: {holds: t, at: {pp: last}}, c: {holds: u, when: pp > 3}, "
             "d: {holds: u, at: {pp: [0, pp - 1]}}}",
             "{tp: 2, pp: 3}");
  ASSERT_TRUE(resolved.layout) << resolved.diagnostics.text();
  EXPECT_EQ(contents(resolved, 1, 1), (Lines{"a [1] t:0", "d [1] u:0"}));
  EXPECT_EQ(contents(resolved, 1, 2), Lines{});
  EXPECT_EQ(contents(resolved, 1, 5), (Lines{"b [1] t:0", "d [1] u:0"}));
  EXPECT_EQ(resolved.layout->unused, Lines{"v"});
  EXPECT_NE(resolved.diagnostics.text().find("no target uses 1 of the source's tensors: 'v'"), std::string::npos);
}

TEST(Resolve, SmallJobOfTheDocumentation) { // docs/yaml.md, section 8
  const Resolved resolved = resolveText(R"(version: 1
model:
  dtype: bf16
  index: {layer: 2}
  tensors:
    "l.{layer}.gate": [4, 1]
    "l.{layer}.up": [4, 1]
  layouts:
    train: {place: {layer: pp}, params: {"d.{layer.local}.fc1": {concat: [gate, up], shard: {0: tp}}}}
    serve: {params: {"m.{layer}.gate_up": {concat: [gate, up], cut: joined, shard: {0: tp}}}}
source: {layout: train, mesh: {tp: 2, pp: 2}}
target: {layout: serve, mesh: {tp: 2}, ranks: 4..5}
)");
  EXPECT_EQ(contents(resolved, 0, 3), (Lines{"d.0.fc1 [4x1] l.1.gate:2,0 l.1.gate:3,0 l.1.up:2,0 l.1.up:3,0"}));
  EXPECT_EQ(contents(resolved, 1, 1), (Lines{"m.0.gate_up [4x1] l.0.up:0,0 l.0.up:1,0 l.0.up:2,0 l.0.up:3,0",
                                             "m.1.gate_up [4x1] l.1.up:0,0 l.1.up:1,0 l.1.up:2,0 l.1.up:3,0"}));
}

TEST(Resolve, TensorRulesWithoutALayout) {
  const Resolved resolved = resolveText(R"(version: 1
model:
  dtype: bf16
  index: {layer: 2}
  place: {layer: pp}
  tensors:
    "l.{layer}.w": {shape: [4], shard: {0: tp}}
    e: {shape: [2], shard: {0: [pp, tp]}}
    head: {tied: e}
source: {mesh: {tp: 1, pp: 2}}
target: {mesh: {tp: 2}}
)");
  EXPECT_EQ(contents(resolved, 0, 1),
            (Lines{"l.1.w [4] l.1.w:0 l.1.w:1 l.1.w:2 l.1.w:3", "e [1] e:1", "head [1] e:1"}));
  EXPECT_EQ(contents(resolved, 1, 0),
            (Lines{"l.0.w [2] l.0.w:0 l.0.w:1", "l.1.w [2] l.1.w:0 l.1.w:1", "e [1] e:0", "head [1] e:0"}));
}

TEST(Resolve, EqualShardingsHaveOneNumber) {
  const Resolved resolved =
      target("{a: [4, 2], b: [4, 2]}", "{p: {holds: a, shard: {0: tp}}, q: {holds: b, shard: {0: tp}}}");
  ASSERT_TRUE(resolved.layout);
  const auto &params = resolved.layout->endpoints[1].params;
  EXPECT_EQ(params[0].parts[0].dimensions, params[1].parts[0].dimensions);
  EXPECT_EQ(resolved.layout->endpoints[1].shardings.size(), 2u); // rows over tp, two whole columns
}

// ------------------------------------------------------------------------------------------------ errors

TEST(Resolve, ErrorsOfNamesAndShapes) {
  expectError(target("{\"a.w\": [2], \"b.w\": [2]}", "{p: {holds: w}}"), "'w' matches several tensors: 'a.w', 'b.w'");
  expectError(target("{\"a.weight\": [2]}", "{p: {holds: wieght}}"), "unknown tensor 'wieght', did you mean 'weight'");
  expectError(
      target("{a: [4, 2], b: [4, 3]}", "{p: {concat: [a, b]}}"),
      "tensor 'b' of shape [4, 3] cannot be joined with tensor 'a' of shape [4, 2] along dimension 0: dimension 1 is "
      "3, expected 2");
  expectError(target("{a: [4], b: [3]}", "{p: {interleave: {groups: 2, of: [a, b]}}}"),
              "tensor 'b' of shape [3] cannot be interleaved in 2 groups: 2 does not divide 3, its dimension 0");
  expectError(target("{a: [4], b: {shape: [4], dtype: fp32}}", "{p: {concat: [a, b]}}"),
              "tensor 'b' is fp32, expected bf16 like tensor 'a' of the same param");
  expectError(target("{\"a.{x}.w\": [2]}", "{p: {holds: \"a.{x}.w\"}}", "{tp: 2}", "{}", "{x: 2}"),
              "tensor 'a.{x}.w' has the index variable 'x', which param 'p' lacks");
  expectError(target("{a: [2]}", "{\"p{x}\": {holds: a}}", "{tp: 2}", "{}", "{x: 2}"),
              "param 'p{x}' has the index variable 'x', which its tensor 'a' lacks");
  expectError(target("{\"a.{x}\": [2], \"b.{x}\": {shape: [2], where: {x: [0, 2]}}}",
                     "{\"p{x}\": {concat: [\"a.{x}\", \"b.{x}\"]}}", "{tp: 2}", "{}", "{x: 3}"),
              "for x 1, tensor 'a.{x}' exists, but not tensor 'b.{x}'");
  expectError(target("{a: [4, 4]}", "{p: {holds: a, shard: {0: tp, 1: tp}}}"),
              "axis 'tp' cannot shard dimension 1 of param 'p': it already shards dimension 0");
  expectError(
      target("{\"a.{x}\": [2]}", "{\"p{x}\": {holds: \"a.{x}\", shard: {0: tp}}}", "{tp: 2}", "{x: tp}", "{x: 2}"),
      "axis 'tp' cannot shard dimension 0 of param 'p{x}': it already places 'x'");
  expectError(target("{a: [4]}", "{p: {holds: a, shard: {1: tp}}}"),
              "'shard' of dimension 1, but param 'p' has 1 dimension");
  expectError(target("{a: [4], b: [3]}", "{p: {concat: [a, b], pad: {0: 4}, shard: {0: tp}}}"),
              "expected 'cut: joined'");
  expectError(target("{a: [4], b: [4]}", "{p: {concat: [a, b], shard: {0: {axis: tp, sizes: [1, 3]}}}}"),
              "expected 'cut: joined'");
}

TEST(Resolve, ParamsWithTheSameName) {
  const std::string tensors = "{\"a.{x}\": [1], b: [1]}", index = "{x: 4}";
  expectError(target(tensors, "{\"w{x.local}\": {holds: \"a.{x}\"}, w1: {holds: b}}", "{pp: 2}", "{x: pp}", index),
              "param 'w1' and param 'w{x.local}' both have the name 'w1' on rank 0");
  EXPECT_TRUE(
      target(tensors, "{\"w{x.local}\": {holds: \"a.{x}\"}, w2: {holds: b}}", "{pp: 2}", "{x: pp}", index).layout);
  expectError(
      target(tensors, "{\"w{x}\": {holds: \"a.{x}\"}, w2: {holds: b, at: {pp: last}}}", "{pp: 2}", "{x: pp}", index),
      "param 'w2' and param 'w{x}' both have the name 'w2' on rank 1");
  EXPECT_TRUE(
      target(tensors, "{\"w{x}\": {holds: \"a.{x}\"}, w2: {holds: b, at: {pp: first}}}", "{pp: 2}", "{x: pp}", index)
          .layout);
  expectError(target("{\"a.{x}.{y}\": [1]}", "{\"w{x}{y}\": {holds: \"a.{x}.{y}\"}}", "{}", "{}", "{x: 12, y: 12}"),
              "adjacent placeholders give '110' twice");
}

std::string sides(const std::string &source, const std::string &target, const std::string &meshes,
                  const std::string &more = "") {
  return "version: 1\nmodel:\n  dtype: bf16\n  index: {x: 4}\n  tensors: {a: [4], b: [4], \"c.{x}\": [2]}\n  "
         "layouts:\n    s: {params: " +
         source + more + "}\n    t: {params: " + target + "}\nsource: {layout: s, mesh: " + meshes +
         "}\ntarget: {layout: t, mesh: {tp: 2}}\n";
}

TEST(Resolve, IncompleteSource) {
  expectError(resolveText(sides("{a: {holds: a}}", "{a: {holds: a}, b: {holds: b}}", "{tp: 2}")),
              "target param 'b' holds tensor 'b', which no param of the source holds");
  expectError(resolveText(sides("{a: {holds: a, shard: {0: tp}, at: {tp: first}}}", "{a: {holds: a}}", "{tp: 2}")),
              "part of tensor 'a' is on no source rank: param 'a' omits row 2 of dimension 0");
  expectError(
      resolveText(sides("{a: {holds: a, shard: {0: {axis: tp, map: [[0, 3], [1]]}}}}", "{a: {holds: a}}", "{tp: 2}")),
      "omits row 2 of dimension 0");
  expectError(
      resolveText(sides("{\"c{x}\": {holds: \"c.{x}\", at: {pp: 0}}}", "{}", "{tp: 2, pp: 2}", ", place: {x: pp}")),
      "omits x 2");
  // two params hold half of the tensor each
  EXPECT_TRUE(
      resolveText(
          sides("{a: {holds: a, shard: {0: tp}, at: {tp: first}}, a2: {holds: a, shard: {0: tp}, at: {tp: last}}}",
                "{a: {holds: a}}", "{tp: 2}"))
          .layout);
  // Axes of different views: a rank has tp = ep mod 2, so that half of each value's rows are on no rank.
  expectError(resolveText(sides("{\"c{x}\": {holds: \"c.{x}\", shard: {0: tp}}}", "{}", "{tp: 2, views: [{ep: 2}]}",
                                ", place: {x: ep}")),
              "omits x 2, row 0 of dimension 0");
}

// ------------------------------------------------------------------------------------------------ params: same

/// A job in the folder of a model: layouts `same` and `cut` of base.yaml, joined by those of the job's model.
struct Same {
  const tests::TemporaryFolder folder;
  Resolved target(const std::string &layouts, const std::string &layout) const {
    std::ofstream(folder / "base.yaml")
        << "dtype: bf16\nindex: {x: 2}\n"
           "tensors: {\"l.{x}\": [3], norm: [2], scale: [], gone: {shape: [1], when: 0}}\n"
           "layouts: {same: {params: same},\n"
           "          cut: {params: same, shard: {\"*\": {0: {axis: tp, scheme: chunk}}}}}\n";
    std::ofstream(folder / "job.yaml") << "version: 1\nmodel: {extend: base.yaml, layouts: " + layouts +
                                              "}\nsource: {layout: same, mesh: {}}\ntarget: {layout: " + layout +
                                              ", mesh: {tp: 2}}\n";
    return resolveFile(folder / "job.yaml");
  }
};

TEST(Resolve, ShardGlobsDoNotMatchScalars) {
  const Same same;
  const Resolved cut = same.target("{}", "cut");
  EXPECT_EQ(contents(cut, 1, 1), (Lines{"l.0 [1] l.0:2", "l.1 [1] l.1:2", "norm [1] norm:1", "scale [] scale"}));
  expectError(same.target("{scalars: {params: same, shard: {\"sc*\": {0: tp}}}}", "scalars"),
              "'sc*' in 'shard' of layout 'scalars' matches only scalars, which have no dimension to shard");
  expectError(same.target("{scalar: {params: same, shard: {scale: {0: tp}}}}", "scalar"),
              "'shard' of dimension 0, but param 'scale' has 0 dimensions");
}

TEST(Resolve, AnEmptyShardReplacesGlobs) {
  const Same same;
  const Resolved whole = same.target("{mine: {extend: cut, params: {norm: {holds: norm, shard: {}}}}}", "mine");
  EXPECT_EQ(contents(whole, 1, 1),
            (Lines{"l.0 [1] l.0:2", "l.1 [1] l.1:2", "norm [2] norm:0 norm:1", "scale [] scale"}));
}

TEST(Resolve, ParamsBesideSame) {
  const Same same;
  const std::string params =
      "params: {scale: null, gone: null, norm: {holds: norm, pad: {0: 4}}, twice: {concat: [norm, norm]}}}}";
  const Lines expected{"l.0 [3] l.0:0 l.0:1 l.0:2", "l.1 [3] l.1:0 l.1:1 l.1:2", "norm [4] norm:0 norm:1 z z",
                       "twice [4] norm:0 norm:1 norm:0 norm:1"};
  // Extends another layout of the model, and the layout of the same name in the extended file.
  for (const std::string layout : {"mine: {extend: same, ", "same: {extend: same, "}) {
    const Resolved resolved = same.target("{" + layout + params, layout.substr(0, 4));
    EXPECT_EQ(contents(resolved, 1, 0), expected) << layout;
  }
  // The globs of the extended layout also shard the new params.
  const Resolved cut = same.target("{mine: {extend: cut, " + params, "mine");
  EXPECT_EQ(contents(cut, 1, 1), (Lines{"l.0 [1] l.0:2", "l.1 [1] l.1:2", "norm [2] z z", "twice [2] norm:1 norm:1"}));
  expectError(same.target("{mine: {extend: same, params: {nrom: null}}}", "mine"),
              "param 'nrom' is null, which removes it, but the extended layout has no param 'nrom'");
  expectError(same.target("{same: {extend: same, params: {nrom: null}}}", "same"),
              "param 'nrom' is null, which removes it, but the extended layout has no param 'nrom'");
}

/// A tensor with one row for each coordinate of each axis, sharded over all of them: a mesh rank has one element.
std::string shardedOver(const std::vector<std::pair<std::string, int>> &axes, const std::string &mesh) {
  std::string shape, shard;
  for (size_t d = 0; d < axes.size(); ++d) {
    shape += (d ? ", " : "") + std::to_string(axes[d].second);
    shard += (d ? ", " : "") + std::to_string(d) + ": " + axes[d].first;
  }
  return "version: 1\nmodel: {dtype: u8, tensors: {t: {shape: [" + shape + "], shard: {" + shard +
         "}}}}\nsource: {mesh: " + mesh + "}\ntarget: {mesh: {}}\n";
}

TEST(Resolve, AxesOfSeveralViews) {
  // Periods 2 and 3: the coordinates repeat after 6 mesh ranks, and mesh rank 5 has the last element.
  EXPECT_TRUE(resolveText(shardedOver({{"ep", 3}, {"tp", 2}}, "{tp: 2, dp: 3, views: [{ep: 3, edp: 2}]}")).layout);
  // tp = ep mod 2 everywhere
  expectError(resolveText(shardedOver({{"ep", 4}, {"tp", 2}}, "{tp: 2, dp: 2, views: [{ep: 4}]}")),
              "param 't' omits row 3 of dimension 0, row 0 of dimension 1");
}

TEST(Resolve, AxesOfSeveralViewsOnEachMeshRank) {
  std::mt19937 random(19);
  int whole = 0, gaps = 0;
  for (int i = 0; i < 400; ++i) {
    // one to three views of the same mesh ranks, each with its own order of factors
    std::vector<int> factors(2 + random() % 3);
    for (int &factor : factors)
      factor = std::array{2, 2, 3}[random() % 3];
    struct Axis {
      std::string name;
      int size, stride;
    };
    std::vector<Axis> axes;
    std::string mesh;
    int meshRanks = 1;
    const size_t views = 1 + random() % 3;
    for (size_t v = 0; v < views; ++v) {
      std::shuffle(factors.begin(), factors.end(), random);
      std::string text;
      meshRanks = 1;
      for (size_t f = 0; f < factors.size();) {
        int size = factors[f++];
        while (f < factors.size() && random() % 3 == 0)
          size *= factors[f++];
        axes.push_back({"v" + std::to_string(axes.size()), size, meshRanks});
        text += (text.empty() ? "" : ", ") + axes.back().name + ": " + std::to_string(size);
        meshRanks *= size;
      }
      mesh += v == 0 ? text : (v == 1 ? ", views: [" : ", ") + ("{" + text + "}");
    }
    mesh = "{" + mesh + (views > 1 ? "]}" : "}");
    std::shuffle(axes.begin(), axes.end(), random);
    axes.resize(std::min<size_t>(axes.size(), 1 + random() % 3));

    std::set<std::vector<int>> held;
    size_t elements = 1;
    for (const Axis &axis : axes)
      elements *= axis.size;
    for (int meshRank = 0; meshRank < meshRanks; ++meshRank) {
      std::vector<int> element;
      for (const Axis &axis : axes)
        element.push_back(meshRank / axis.stride % axis.size);
      held.insert(element);
    }
    std::vector<std::pair<std::string, int>> shardedAxes;
    for (const Axis &axis : axes)
      shardedAxes.emplace_back(axis.name, axis.size);
    const std::string job = shardedOver(shardedAxes, mesh);
    const Resolved resolved = resolveText(job);
    const std::string text = resolved.diagnostics.text();
    if (held.size() == elements) {
      ++whole;
      EXPECT_TRUE(resolved.layout) << job << text;
      continue;
    }
    ++gaps;
    ASSERT_FALSE(resolved.layout) << job;
    // The element that the message names is on no mesh rank. In a dimension that it does not name, this is true of all
    // rows.
    std::vector<int> named(axes.size());
    for (size_t d = 0; d < axes.size(); ++d)
      if (const size_t at = text.find(" of dimension " + std::to_string(d)); at != std::string::npos)
        named[d] = std::stoi(text.substr(text.rfind("row ", at) + 4));
    EXPECT_FALSE(held.count(named)) << job << text;
  }
  EXPECT_GT(whole, 50);
  EXPECT_GT(gaps, 50);
}

TEST(Resolve, Examples) {
  const char *folder = std::getenv("RESHARD_EXAMPLES");
  const std::filesystem::path examples = folder ? folder : "examples";
  if (!std::filesystem::exists(examples))
    GTEST_SKIP() << "no examples folder here";
  size_t count = 0;
  for (const auto &entry : std::filesystem::directory_iterator(examples)) {
    if (entry.path().extension() != ".yaml")
      continue;
    Diagnostics diagnostics;
    const auto job = readJob(entry.path(), {}, diagnostics);
    ASSERT_TRUE(job) << diagnostics.text();
    const auto start = std::chrono::steady_clock::now();
    const auto layout = resolve(*job, diagnostics);
    const auto milliseconds =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    EXPECT_TRUE(layout) << entry.path() << "\n" << diagnostics.text();
    std::cout << entry.path().filename() << " " << milliseconds << " ms"
              << (diagnostics.text().empty() ? "" : "\n" + diagnostics.text()) << "\n";
    ++count;
  }
  EXPECT_GE(count, 5u);
}

} // namespace
} // namespace reshard
