// SPDX-License-Identifier: Apache-2.0
// chunksBefore: which chunks must have arrived before a chunk of a message that forwards them.

#include "executor/memory/chunks.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::schema;

namespace {

/// Shape 0 is a row of 1000 bytes, shape 1 is 4 rows of 256 bytes. Step 0 is the receive, step 1 the send.
class Chunks : public testing::Test {
protected:
  std::vector<uint64_t> before(std::vector<Operand> received, uint64_t receiveChunk, std::vector<Operand> sent,
                               uint64_t sendChunk) {
    SegmentT segment;
    segment.loops = {Loop(4, 512, 0)};
    segment.shapes = {Shape(1000, 0, 0), Shape(256, 0, 1)};
    auto step = [&](const std::vector<Operand> &operands, StepKind kind, uint64_t chunk) {
      const auto first = static_cast<uint32_t>(segment.operands.size()), count = static_cast<uint32_t>(operands.size());
      uint64_t bytes = 0;
      for (const Operand &operand : operands)
        bytes += operand.shape() == 0 ? 1000 : 1024;
      segment.operands.insert(segment.operands.end(), operands.begin(), operands.end());
      const bool send = kind == StepKind::send;
      segment.steps.push_back(Step(bytes, 0, first, send ? count : 0, first + (send ? count : 0), send ? 0 : count, 0,
                                   1, 0, 0, send, kind, 0, 0, chunk));
    };
    segment.buffers = {BufferRange(0, 0, 0, 1, 1, 0, 4096), BufferRange(1, 0, 0, 2, 2, 0, 4096)}; // a is in the source
    segment.after = {0};
    step(received, StepKind::recv, receiveChunk);
    step(sent, StepKind::send, sendChunk);
    flatbuffers::FlatBufferBuilder builder;
    builder.Finish(Segment::Pack(builder, &segment));
    const Segment &packed = *flatbuffers::GetRoot<Segment>(builder.GetBufferPointer());
    return chunksBefore(packed, *packed.steps()->Get(1))[0];
  }

  const Operand a{0, 1, 0}, b{0, 2, 1}, c{64, 3, 0};
};

TEST_F(Chunks, CountAndSize) {
  const Step whole(1000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, StepKind::send, 0, 0, 0),
      parts(1000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, StepKind::send, 0, 0, 256);
  EXPECT_EQ(chunkCount(whole), 1u);
  EXPECT_EQ(chunkBytes(whole, 0), 1000u);
  EXPECT_EQ(chunkCount(parts), 4u);
  EXPECT_EQ(chunkBytes(parts, 0), 256u);
  EXPECT_EQ(chunkBytes(parts, 3), 1000u - 3 * 256);
}

TEST_F(Chunks, ForwardedChunkByChunk) { EXPECT_EQ(before({b}, 256, {b}, 256), (std::vector<uint64_t>{1, 2, 3, 4})); }

TEST_F(Chunks, ForwardAPartOfALargerMessage) {
  // b is bytes 1000 to 2023 of the received message, in chunks of 512: its first 256 bytes need chunks up to byte 1255.
  EXPECT_EQ(before({a, b, c}, 512, {b}, 256), (std::vector<uint64_t>{3, 3, 4, 4}));
}

TEST_F(Chunks, SourceBytesNeedNothing) {
  // a is in the source: its 1000 bytes wait for nothing; the chunk in which b begins waits for b's first bytes.
  EXPECT_EQ(before({b}, 256, {a, b}, 512), (std::vector<uint64_t>{0, 1, 3, 4}));
}

TEST_F(Chunks, AnOperandThatWasNotReceivedWaitsForAllChunks) {
  const Operand part{256, 2, 0};
  EXPECT_EQ(before({b}, 256, {part}, 512), (std::vector<uint64_t>{4, 4}));
}

TEST_F(Chunks, WholeMessages) {
  EXPECT_EQ(before({a, b}, 0, {b}, 0), (std::vector<uint64_t>{1}));
  EXPECT_EQ(before({a, b}, 0, {b}, 512), (std::vector<uint64_t>{1, 1}));
}

} // namespace
