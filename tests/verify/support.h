// SPDX-License-Identifier: Apache-2.0
// Plans for tests: compiles YAML, opens and unpacks a plan, packs and proves an altered plan; the params of its ranks.
#pragma once

#include "compiler/compile.h"
#include "executor/load/load.h"
#include "reshard/reshard.h"
#include "tests/lib/folder.h"
#include "tests/schema/raw_structs.h"
#include "tests/verify/bound.h"
#include "tools/run/memory.h"
#include "verify/proof/plan_verifier.h"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
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

using test::raw;

/// A plan as mutable objects.
struct UnpackedPlan {
  std::unique_ptr<schema::ManifestT> manifest;
  std::vector<std::unique_ptr<schema::SegmentT>> segments;
};

/// Compiles the job in a file to a plan.
inline void compileFile(const std::string &job, const std::string &path,
                        const std::vector<std::string> &overrides = {}) {
  CompileOptions options;
  options.overrides = overrides;
  CompileResult result;
  Diagnostics diagnostics;
  ASSERT_TRUE(compileJob(job, options, result, diagnostics)) << diagnostics.text();
  ASSERT_EQ(toString(writePlan(result.module, *result.ranks, result.statistics, path).takeError()), "");
}

inline void compile(const std::string &yaml, const std::string &path) {
  std::ofstream(path + ".yaml") << yaml;
  compileFile(path + ".yaml", path);
}

/// Opens a plan; throws std::runtime_error if that fails.
inline std::unique_ptr<Plan> openPlan(const std::string &path) {
  std::unique_ptr<Plan> plan;
  if (const Status status = Plan::open(path, plan); !status.ok())
    throw std::runtime_error(status.message());
  return plan;
}

/// The plan of a job. Its file has no name any more.
inline std::unique_ptr<Plan> compiledPlan(const std::string &yaml) {
  const TemporaryFolder folder;
  compile(yaml, folder / "plan");
  return openPlan(folder / "plan");
}

inline UnpackedPlan unpack(const std::string &path) {
  const std::unique_ptr<Plan> plan = openPlan(path);
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

/// The plan of a job as mutable objects.
inline UnpackedPlan compiledParts(const std::string &yaml) {
  const TemporaryFolder folder;
  compile(yaml, folder / "plan");
  return unpack(folder / "plan");
}

/// The proof of an altered plan. If the loader refuses it, the error is the loader's.
inline verify::VerifyResult proofOf(const UnpackedPlan &parts) {
  const TemporaryFolder folder;
  pack(parts, folder / "altered.rplan");
  std::unique_ptr<Plan> plan;
  verify::VerifyResult result;
  result.error = Plan::open(folder / "altered.rplan", plan).message();
  return result.error.empty() ? verify::verifyPlan(*plan, [](double) {}) : result;
}

/// Binds the params of a mesh rank that `chosen` names.
inline void bindAll(
    reshard_executor *executor, const Plan &plan, const verify::MeshRankMemory &of,
    const std::function<bool(const std::string &name)> &chosen = [](const std::string &) { return true; }) {
  const uint32_t rank = plan.manifest().endpoints()->Get(of.endpoint)->ranks()->Get(of.meshRank);
  forEachBound(plan, of, [&](const schema::ParamInstance &instance, std::byte *memory) {
    if (chosen(instance.name)) {
      EXPECT_EQ(reshard_bind(executor, of.endpoint, rank, instance.name.c_str(), memory,
                             static_cast<uint64_t>(instance.bytes)),
                RESHARD_OK)
          << reshard_error(executor);
    }
  });
}

} // namespace reshard::tests
