// SPDX-License-Identifier: Apache-2.0
// Plans for tests: compiles YAML, unpacks a plan, and packs an altered plan with valid digests.
#pragma once

#include "compiler/compile.h"
#include "executor/load/load.h"
#include "tests/lib/folder.h"
#include "tools/run/memory.h"

#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace reshard::tests {

/// Tensors t0, t1, … of a model, which have different numbers of rows: so each is an operand of its own.
inline std::string tensorsOfRows(int count, int first, int step, int columns) {
  std::string tensors;
  for (int i = 0; i < count; ++i)
    tensors += (i ? ", t" : "t") + std::to_string(i) + ": [" + std::to_string(first + step * i) + ", " +
               std::to_string(columns) + "]";
  return tensors;
}

/// A plan as mutable objects.
struct UnpackedPlan {
  std::unique_ptr<schema::ManifestT> manifest;
  std::vector<std::unique_ptr<schema::SegmentT>> segments;
};

inline void compile(const std::string &yaml, const std::string &path) {
  std::ofstream(path + ".yaml") << yaml;
  CompileResult result;
  Diagnostics diagnostics;
  ASSERT_TRUE(compileJob(path + ".yaml", {}, result, diagnostics)) << diagnostics.text();
  ASSERT_EQ(toString(writePlan(result.module, *result.ranks, result.statistics, path).takeError()), "");
}

inline UnpackedPlan unpack(const std::string &path) {
  std::unique_ptr<Plan> plan;
  EXPECT_EQ(Plan::open(path, plan).message(), "");
  UnpackedPlan parts;
  parts.manifest.reset(plan->manifest().UnPack());
  for (uint32_t rank = 0; rank < plan->world(); ++rank) {
    std::shared_ptr<const schema::Segment> segment;
    EXPECT_EQ(plan->segment(rank, segment).message(), "");
    parts.segments.emplace_back(segment->UnPack());
  }
  return parts;
}

inline void pack(const UnpackedPlan &parts, const std::string &path) {
  auto bytes = [](const flatbuffers::FlatBufferBuilder &b) {
    return schema::Bytes(reinterpret_cast<const std::byte *>(b.GetBufferPointer()), b.GetSize());
  };
  schema::ContainerWriter writer;
  flatbuffers::FlatBufferBuilder builder;
  ASSERT_EQ(writer.create(path, static_cast<uint32_t>(parts.segments.size())).message(), "");
  builder.FinishSizePrefixed(schema::Manifest::Pack(builder, parts.manifest.get()), schema::kManifestIdentifier);
  ASSERT_EQ(writer.addManifest(bytes(builder)).message(), "");
  for (const auto &segment : parts.segments) {
    builder.Clear();
    builder.FinishSizePrefixed(schema::Segment::Pack(builder, segment.get()), schema::SegmentIdentifier());
    ASSERT_EQ(writer.addSegment(bytes(builder)).message(), "");
  }
  ASSERT_EQ(writer.finish().message(), "");
}

} // namespace reshard::tests
