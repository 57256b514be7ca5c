// SPDX-License-Identifier: Apache-2.0
// Plans that no compiler writes: missing tables, sizes that overflow, requests for unlimited memory or work. Digests
// are correct, and the FlatBuffers are valid unless a test says otherwise.

#include "schema/limits.h"
#include "tests/schema/support.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::schema;
using namespace reshard::test;

namespace {

class Hostile : public testing::Test {
protected:
  std::string read(const Parts &parts) {
    pack(parts, path_);
    return readAll(path_);
  }
  std::string read(const std::string &manifest, const Parts &parts) {
    writeContainer(path_, manifest, serialized(parts.segments));
    return readAll(path_);
  }

  const TemporaryFolder folder_;
  const std::string path_ = folder_ / "plan";
  const std::string rankOne_ = "the segment of rank 1 is inconsistent: ";
};

/// The tiny plan with a transform of 16 instances of 2^60 bytes on rank 1, in place of the param that steps write.
Parts hugeTransform() {
  Parts parts = tinyParts();
  parts.manifest.variables[0]->size = 16;
  ParamT &param = parts.param(1);
  param.transform = "pack";
  param.parts.clear();
  for (auto &extent : param.shape)
    extent->at = {1};
  param.shape[0]->at = {int64_t{1} << 59}; // × 1 × 2 bytes
  for (size_t endpoint : {0, 1})
    for (auto &sharding : parts.manifest.endpoints[endpoint]->shardings)
      if (raw<RawIndexBlock>(sharding->blocks[0]).length == 2 && sharding->axes.empty())
        raw<RawIndexBlock>(sharding->blocks[0]).length = 16;
  return parts;
}

} // namespace

// 16 × 2^60 = 2^64, which is 0 in 64 bits.
TEST_F(Hostile, StagedBytesOverflow) {
  Parts parts = hugeTransform();
  for (SegmentT &segment : parts.segments)
    for (BufferRange &each : segment.buffers) {
      auto &range = raw<RawBufferRange>(each);
      range.count = 16;
      range.bytes = range.endpoint == 1 ? uint64_t{1} << 60 : range.bytes;
      range.first = range.endpoint == 1 && &each != segment.buffers.data() ? 17 : 1;
    }
  EXPECT_EQ(read(parts), rankOne_ + "buffer range 1: found 16 buffers of 1152921504606846976 bytes to stage, expected "
                                    "at most 1152921504606846976 bytes for all staged buffers");
}

// The executor uses all tables of a segment, so even an empty one must be present.
TEST_F(Hostile, MissingTables) {
  const Parts parts = tinyParts();
  std::vector<std::string> segments = serialized(parts.segments);
  const std::string idle = segments[3];
  const std::pair<const char *, uint16_t> fields[] = {
      {"buffers", Segment::VT_BUFFERS},   {"loops", Segment::VT_LOOPS}, {"shapes", Segment::VT_SHAPES},
      {"operands", Segment::VT_OPERANDS}, {"steps", Segment::VT_STEPS}, {"after", Segment::VT_AFTER}};
  for (const auto &[name, field] : fields) {
    segments[3] = idle;
    char *root = segments[3].data() +
                 (reinterpret_cast<const char *>(flatbuffers::GetSizePrefixedRoot<Segment>(idle.data())) - idle.data());
    int32_t back = 0;
    std::memcpy(&back, root, sizeof back);
    std::memset(root - back + field, 0, sizeof(uint16_t));
    writeContainer(path_, serialized(parts.manifest), segments);
    EXPECT_EQ(readAll(path_), std::string("the segment of rank 3 is inconsistent: table '") + name +
                                  "' is missing (an empty table is allowed)");
  }
}

// A plan may hold the job of which it was compiled, but not more of it than the compiler writes.
TEST_F(Hostile, FilesOfTheJob) {
  const auto found = [this](const std::vector<std::pair<std::string, std::string>> &files) {
    Parts parts = tinyParts();
    parts.manifest.input = std::make_unique<JobInputT>();
    for (const auto &[path, text] : files) {
      auto file = std::make_unique<InputFileT>();
      file->path = path;
      file->text = text;
      parts.manifest.input->files.push_back(std::move(file));
    }
    return read(parts);
  };
  EXPECT_EQ(found({{"job.yaml", "version: 1"}, {"empty.yaml", ""}}), "");
  EXPECT_NE(found({}).find("found 0 files of the job, expected 1 to 4096"), std::string::npos);
  EXPECT_NE(found(std::vector<std::pair<std::string, std::string>>(4097, {"a", ""})).find("found 4097 files"),
            std::string::npos);
  EXPECT_NE(found({{"", "x"}}).find("a file of the job without a path"), std::string::npos);
  EXPECT_NE(found({{"a", std::string(kMaxInputBytes, 'x')}}).find("found 16777217 bytes of the job"),
            std::string::npos);
}

TEST_F(Hostile, ReducesASource) {
  Parts parts = tinyParts();
  RawStep &step = parts.step(0, 0); // was a send
  step.kind = static_cast<uint8_t>(StepKind::reduce);
  step.peer = UINT32_MAX;
  step.message = 0;
  step.staging = UINT64_MAX;
  EXPECT_EQ(read(parts),
            "the segment of rank 0 is inconsistent: step 0 operand 0: is reduced, expected a buffer of amax values");
}

// Loops that alternate between two buffers stay within both, but begin a new operand range at each change.
TEST_F(Hostile, TooManyOperandRanges) {
  for (const uint64_t count : {uint64_t{1} << 10, uint64_t{1} << 16}) {
    Parts parts = tinyParts();
    SegmentT &segment = parts.segments[1];
    const auto firstLoop = static_cast<uint32_t>(segment.loops.size());
    const std::vector<Loop> loops = {{count, 0, 0}, {count, 0, 0}, {2, 0, 1}};
    segment.loops.insert(segment.loops.end(), loops.begin(), loops.end());
    segment.shapes.push_back({uint64_t{1}, firstLoop, static_cast<uint32_t>(loops.size())});
    parts.operand(1, 4).shape = static_cast<uint32_t>(segment.shapes.size() - 1); // of the send of message 2
    parts.step(1, 3).bytes = 2 * count * count;
    parts.step(1, 3).staging = UINT64_MAX;
    const std::string error = read(parts);
    if (count == uint64_t{1} << 10)
      EXPECT_EQ(
          error,
          "message 2 from rank 1 to rank 2: found bytes 2097152 on the sender, 24 on the receiver, expected the same");
    else
      EXPECT_EQ(error, rankOne_ + "step 3 operand 4: the operands expand to more than " +
                           std::to_string(kMaxOperandRanges) + " strided ranges, the limit");
  }
}

// Chunks need no bytes in a plan, but an executor keeps a number for each.
TEST_F(Hostile, TooManyChunks) {
  for (const uint64_t count : {uint64_t{1} << 30, (uint64_t{1} << 32) + 256}) {
    Parts parts = tinyParts();
    SegmentT &segment = parts.segments[1];
    segment.loops.push_back({count, 0, 0});
    segment.shapes.push_back({uint64_t{1}, static_cast<uint32_t>(segment.loops.size() - 1), uint32_t{1}});
    parts.operand(1, 4).shape = static_cast<uint32_t>(segment.shapes.size() - 1); // of the send of message 2
    RawStep &step = parts.step(1, 3);
    step.bytes = count;
    step.chunk = 256;
    step.staging = UINT64_MAX;
    const std::string error = read(parts);
    if (count == uint64_t{1} << 30)
      EXPECT_EQ(error, "message 2 from rank 1 to rank 2: found bytes 1073741824 on the sender, 24 on the receiver, "
                       "expected the same");
    else
      EXPECT_EQ(error, rankOne_ + "step 3 messages have more than " + std::to_string(kMaxChunks) +
                           " chunks in all (each counted once more for each step that it waits for), which is the "
                           "limit");
  }
}

// Plans of models with very many tensors have more tables than the FlatBuffers verifier allows by default.
TEST_F(Hostile, AMillionTablesAreAllowed) {
  Parts parts = tinyParts();
  constexpr size_t kMany = 1'000'001;
  const size_t before = parts.manifest.variables.size();
  for (size_t v = before; v < kMany; ++v) {
    parts.manifest.variables.push_back(std::make_unique<VariableT>());
    parts.manifest.variables.back()->name = "v" + std::to_string(v);
    parts.manifest.variables.back()->size = 1;
  }
  for (auto &endpoint : parts.manifest.endpoints)
    endpoint->placement.resize(kMany, endpoint->placement[0]);
  EXPECT_EQ(read(parts), "");
}

// Offsets that share tables: a file of a few hundred kilobytes would have 2^32 tables to verify.
TEST_F(Hostile, SharedTables) {
  constexpr size_t kMany = 1 << 16;
  flatbuffers::FlatBufferBuilder builder;
  const auto sharding = CreateSharding(builder, 0, builder.CreateVector(std::vector<uint32_t>{0, 0}),
                                       builder.CreateVectorOfStructs(std::vector<schema::IndexBlock>()));
  const auto exists = builder.CreateVector(std::vector(kMany, sharding));
  const auto pattern = CreateTensorPattern(builder, builder.CreateString("w"), 0, exists);
  const auto tensorPatterns = builder.CreateVector(std::vector(kMany, pattern));
  const auto endpoints = builder.CreateVector(std::vector<flatbuffers::Offset<Endpoint>>());
  ManifestBuilder manifest(builder);
  manifest.add_tensor_patterns(tensorPatterns);
  manifest.add_endpoints(endpoints);
  builder.FinishSizePrefixed(manifest.Finish(), kManifestIdentifier);
  const std::string bytes(reinterpret_cast<const char *>(builder.GetBufferPointer()), builder.GetSize());
  EXPECT_EQ(read(bytes, tinyParts()), "damaged: the manifest is not a valid FlatBuffer");
}
