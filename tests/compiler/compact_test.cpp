// SPDX-License-Identifier: Apache-2.0
// Tests that the size of a plan does not grow with the number of repetitions of a periodic layout.

#include "compiler/compile.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <fstream>

using namespace reshard;

namespace {

CompileResult compiled(const std::string &text) {
  const tests::TemporaryFolder folder;
  const std::string path = folder / "job.yaml";
  std::ofstream(path) << text;
  CompileOptions options;
  options.verifyEach = true;
  CompileResult result;
  Diagnostics diagnostics;
  EXPECT_TRUE(compileJob(path, options, result, diagnostics)) << diagnostics.text();
  return result;
}

} // namespace

TEST(Compact, AMillionBlocksAreAFewDescriptors) {
  // 1,048,576 blocks of 12 rows, moved to blocks of 8: each pair of ranks has one period of overlaps, which repeats.
  const CompileResult result = compiled("version: 1\n"
                                        "model:\n"
                                        "  dtype: bf16\n"
                                        "  tensors: {a: [12582912, 4]}\n"
                                        "  layouts:\n"
                                        "    train: {params: {a: {holds: a, shard: {0: {axis: tp, cyclic: 12}}}}}\n"
                                        "    serve: {params: {a: {holds: a, shard: {0: {axis: tp, cyclic: 8}}}}}\n"
                                        "source: {layout: train, mesh: {tp: 4}}\n"
                                        "target: {layout: serve, mesh: {tp: 6}, ranks: 4..9}\n");
  EXPECT_EQ(result.statistics.targetBytes, 12582912 * 8);
  EXPECT_LE(result.statistics.descriptors, 100);
  size_t loops = 0;
  for (const ir::Descriptor &descriptor : result.module.transfers.descriptors)
    loops = std::max(loops, result.module.transfers.shapes[descriptor.shape].loops.size());
  EXPECT_GE(loops, 1u) << "periodic overlaps must be loops";
}

TEST(Compact, FlatBufferToABlockCyclicDimension) {
  const CompileResult result =
      compiled("version: 1\n"
               "model:\n"
               "  dtype: bf16\n"
               "  tensors: {a: [1048576, 3]}\n"
               "  layouts:\n"
               "    train: {params: {f: {flat: [a], shard: {0: {axis: fsdp, scheme: chunk}}}}}\n"
               "    serve: {params: {a: {holds: a, shard: {0: {axis: tp, scheme: round_robin}}}}}\n"
               "source: {layout: train, mesh: {fsdp: 7}}\n"
               "target: {layout: serve, mesh: {tp: 4}}\n");
  EXPECT_EQ(result.statistics.targetBytes, 1048576 * 6);
  EXPECT_LE(result.statistics.descriptors, 200);
}
