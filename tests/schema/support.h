// SPDX-License-Identifier: Apache-2.0
// A plan small enough to check by hand, and functions that unpack a plan, and pack it again with correct digests after
// a test has altered it. Header only, because the fuzzer uses it, too.
#pragma once

#include "compiler/compile.h"
#include "executor/load/load.h"
#include "schema/container.h"
#include "schema/manifest.h"
#include "tests/lib/folder.h"
#include "tests/schema/raw_structs.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

namespace reshard::test {

using tests::TemporaryFolder;

// --------------------------------------------------------------------------------------------------------- files

inline std::string readFile(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void writeFile(const std::string &path, const std::string &content) {
  std::ofstream(path, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
}

inline schema::Bytes bytesOf(const std::string &text) { return std::as_bytes(std::span(text)); }

// --------------------------------------------------------------------------------------------------- the tiny plan

/// `w{layer}`, two layers of [4, 6] bf16, moves from rows over ranks 0 and 1 to columns over ranks 1 and 2, where each
/// column block of 3 is padded to 4; rank 3 is idle. In bytes (a row of 3 columns is 6, of 6 is 12, of 4 is 8):
///
///     source, rank 0: rows 0, 1      24 per instance     target, rank 1: columns 0 to 2 and a zero   32 per instance
///     source, rank 1: rows 2, 3      24                  target, rank 2: columns 3 to 5 and a zero   32
///
///     round 0: ranks 1, 2 fill column 3 (2 layers × 4 rows × 2 = 16 bytes);
///              rank 1 copies rows 2, 3 of columns 0 to 2 locally (2 × 2 × 6 = 24);
///              message 0 moves rows 0, 1 of columns 0 to 2 from rank 0 to rank 1 (24)
///     round 1: messages 1 and 2 move rows 0, 1 and 2, 3 of columns 3 to 5 from ranks 0 and 1 to rank 2 (24 each)
inline ir::Module tinyModule() {
  using namespace ir;
  Module module;
  module.level = Level::schedule;
  module.fingerprint = "0123456789abcdef";

  Layout &layout = module.layout;
  layout.model = "tiny";
  layout.world = 4;
  layout.stagingLimit = 64;
  layout.variables = {{"layer", 2}};
  layout.tensorPatterns = {{"w{layer}", {0}, {identity(2)}, {4, 6}, DType::bf16}};

  Endpoint source;
  source.role = "source";
  source.layout = "rows";
  source.axes = {{"tp", 2, 1}};
  source.ranks = {0, 1};
  source.shardings = {{{}, {identity(2)}}, {{0}, {{{0, 0, 2, 1, 0, 0}}, {{2, 0, 2, 1, 0, 0}}}}, {{}, {identity(6)}}};
  source.placement = {0};
  source.params = {{"weight{layer}",
                    {0},
                    {0},
                    {},
                    {{{}, {2}}, {{}, {6}}},
                    DType::bf16,
                    {{0, {{0, -1}, {1, 0}, {2, 1}}}},
                    "tiny.yaml:7",
                    {},
                    {},
                    OverflowRule::error,
                    {},
                    false,
                    {}}};

  Endpoint target = source;
  target.role = "target";
  target.layout = "columns";
  target.ranks = {1, 2};
  target.shardings = {{{}, {identity(2)}},
                      {{}, {identity(4)}},
                      {{0}, {{{0, 0, 3, 1, 0, 0}}, {{3, 0, 3, 1, 0, 0}}}},
                      {{}, {{{3, 3, 1, 1, 0, 0}}}}};
  target.params = {{"w.{layer}",
                    {0},
                    {0},
                    {},
                    {{{}, {4}}, {{}, {4}}},
                    DType::bf16,
                    {{0, {{0, -1}, {1, 0}, {2, 1}}}, {-1, {{0, -1}, {1, 0}, {3, 1}}}},
                    "tiny.yaml:9",
                    {},
                    {},
                    OverflowRule::error,
                    {},
                    false,
                    {}}};
  layout.endpoints = {source, target};

  const OperandShape sourceRows{6, {{2, 0, 1}, {2, 12, 0}}}, targetRows{6, {{2, 0, 1}, {2, 8, 0}}};
  const OperandShape padding{2, {{2, 0, 1}, {4, 8, 0}}};
  Schedule &schedule = module.schedule;
  schedule.rounds = 2;
  schedule.messages = 3;
  schedule.ranks.resize(4);
  for (int32_t rank = 0; rank < 4; ++rank)
    schedule.ranks[rank].rank = rank;

  RankSchedule &zero = schedule.ranks[0];
  zero.buffers = {{0, 0, 0, 1, 2, 24}};
  zero.shapes = {sourceRows};
  zero.arenaBytes = 24;
  zero.steps = {{StepKind::send, 0, 1, 0, 24, {{1, 0, 0}}, {}, 0, {}},
                {StepKind::send, 1, 2, 1, 24, {{1, 0, 6}}, {}, 0, {0}}};

  RankSchedule &one = schedule.ranks[1];
  one.buffers = {{0, 1, 0, 1, 2, 24}, {1, 0, 0, 3, 2, 32}};
  one.shapes = {padding, sourceRows, targetRows};
  one.arenaBytes = 24;
  one.steps = {{StepKind::fill, 0, -1, 0, 16, {}, {{3, 0, 6}}, -1, {}},
               {StepKind::copy, 0, -1, 0, 24, {{1, 1, 0}}, {{3, 2, 16}}, -1, {}},
               {StepKind::recv, 0, 0, 0, 24, {}, {{3, 2, 0}}, 0, {}},
               {StepKind::send, 1, 2, 2, 24, {{1, 1, 6}}, {}, 0, {1, 2}}};

  RankSchedule &two = schedule.ranks[2];
  two.buffers = {{1, 1, 0, 1, 2, 32}};
  two.shapes = {padding, targetRows};
  two.arenaBytes = 48;
  two.steps = {{StepKind::fill, 0, -1, 0, 16, {}, {{1, 0, 6}}, -1, {}},
               {StepKind::recv, 1, 1, 2, 24, {}, {{1, 1, 16}}, 0, {0}},
               {StepKind::recv, 1, 0, 1, 24, {}, {{1, 1, 0}}, 24, {}}};
  one.steps[3].level = two.steps[1].level = 1; // message 2 waits for steps 1 and 2 of rank 1
  return module;
}

/// Writes the plan of a module that has the schedules of its ranks.
inline llvm::Expected<WrittenPlan> writeModule(const ir::Module &module, const std::string &path, unsigned jobs = 1,
                                               bool compress = false) {
  StoredRanks ranks(module.schedule.ranks);
  return writePlan(module, ranks, statistics(module), path, {jobs, nullptr, compress, {}});
}

/// Writes the tiny plan; throws on failure, because every test depends on it.
inline void writeTiny(const std::string &path, bool compress = false) {
  if (llvm::Error error = writeModule(tinyModule(), path, 1, compress).takeError())
    throw std::runtime_error(toString(std::move(error)));
}

// ---------------------------------------------------------------------------------------------- unpacking and packing

/// An unpacked plan.
struct Parts {
  schema::ManifestT manifest;
  std::vector<schema::SegmentT> segments;

  RawStep &step(size_t rank, size_t number) { return raw<RawStep>(segments[rank].steps.at(number)); }
  RawOperand &operand(size_t rank, size_t number) { return raw<RawOperand>(segments[rank].operands.at(number)); }
  RawShape &shape(size_t rank, size_t number) { return raw<RawShape>(segments[rank].shapes.at(number)); }
  RawLoop &loop(size_t rank, size_t number) { return raw<RawLoop>(segments[rank].loops.at(number)); }
  RawBufferRange &buffers(size_t rank, size_t number) { return raw<RawBufferRange>(segments[rank].buffers.at(number)); }
  RawIndexBlock &block(size_t endpoint, size_t sharding, size_t number) {
    return raw<RawIndexBlock>(manifest.endpoints.at(endpoint)->shardings.at(sharding)->blocks.at(number));
  }
  schema::ParamT &param(size_t endpoint, size_t number = 0) {
    return *manifest.endpoints.at(endpoint)->params.at(number);
  }
  RawPartDimension &dimension(size_t endpoint, size_t part, size_t number) {
    return raw<RawPartDimension>(param(endpoint).parts.at(part)->dimensions.at(number));
  }
};

inline Parts unpack(const std::string &path) {
  std::unique_ptr<Plan> plan;
  if (const Status status = Plan::open(path, plan); !status.ok())
    throw std::runtime_error(status.message());
  Parts parts;
  plan->manifest().UnPackTo(&parts.manifest);
  parts.segments.resize(plan->world());
  for (uint32_t rank = 0; rank < plan->world(); ++rank) {
    std::shared_ptr<const schema::Segment> segment;
    if (const Status status = plan->segment(rank, segment); !status.ok())
      throw std::runtime_error(status.message());
    segment->UnPackTo(&parts.segments[rank]);
  }
  return parts;
}

inline Parts tinyParts() {
  const TemporaryFolder folder;
  writeTiny(folder / "plan");
  return unpack(folder / "plan");
}

inline std::string serialized(const schema::ManifestT &manifest) {
  flatbuffers::FlatBufferBuilder builder;
  builder.FinishSizePrefixed(schema::Manifest::Pack(builder, &manifest), schema::kManifestIdentifier);
  return {reinterpret_cast<const char *>(builder.GetBufferPointer()), builder.GetSize()};
}

inline std::string serialized(const schema::SegmentT &segment) {
  flatbuffers::FlatBufferBuilder builder;
  builder.FinishSizePrefixed(schema::Segment::Pack(builder, &segment), schema::SegmentIdentifier());
  return {reinterpret_cast<const char *>(builder.GetBufferPointer()), builder.GetSize()};
}

inline std::vector<std::string> serialized(const std::vector<schema::SegmentT> &segments) {
  std::vector<std::string> all;
  for (const schema::SegmentT &segment : segments)
    all.push_back(serialized(segment));
  return all;
}

/// Writes a container with correct digests around arbitrary bytes; throws on failure.
inline void writeContainer(const std::string &path, const std::string &manifest,
                           const std::vector<std::string> &segments, bool compressed = false) {
  schema::ContainerWriter writer;
  auto must = [](const Status &status) {
    if (!status.ok())
      throw std::runtime_error(status.message());
  };
  must(writer.create(path, static_cast<uint32_t>(segments.size())));
  must(writer.addManifest(bytesOf(manifest)));
  for (const std::string &segment : segments) {
    if (!compressed) {
      must(writer.addSegment(bytesOf(segment)));
      continue;
    }
    const Result<schema::CompressedSegment> frame = schema::compress(bytesOf(segment));
    must(frame.status());
    must(writer.addSegment(*frame));
  }
  must(writer.finish());
}

inline void pack(const Parts &parts, const std::string &path) {
  writeContainer(path, serialized(parts.manifest), serialized(parts.segments));
}

// -------------------------------------------------------------------------------------------------------- reading

/// Loads all of a plan, with every check of the loader, then reads all that a tool reads. Returns the first error,
/// without the path.
inline std::string readAll(const std::string &path) {
  std::unique_ptr<Plan> plan;
  Status status = Plan::open(path, plan);
  for (uint32_t rank = 0; status.ok() && rank < plan->world(); ++rank) {
    std::shared_ptr<const schema::Segment> segment;
    status = plan->segment(rank, segment);
  }
  if (status.ok())
    status = checkMessages(*plan);
  if (status.ok())
    for (const schema::Endpoint *endpoint : *plan->manifest().endpoints())
      for (uint32_t meshRank = 0; meshRank < endpoint->ranks()->size(); ++meshRank)
        for (uint32_t p = 0; p < (endpoint->params() ? endpoint->params()->size() : 0); ++p)
          for (const schema::ParamInstance &instance : schema::instances(plan->manifest(), *endpoint, p, meshRank))
            if (instance.bytes < 0)
              return "an instance has " + std::to_string(instance.bytes) + " bytes";
  const std::string &error = status.message(), prefix = "'" + path + "': ";
  return error.starts_with(prefix) ? error.substr(prefix.size()) : error;
}

} // namespace reshard::test
