// SPDX-License-Identifier: Apache-2.0
// Where each field of the structs of plan.fbs is among their bytes. Fields that moved would misread the plans of
// earlier releases, which gives wrong weights without an error. schema/structs.cpp asserts the sizes.

#include "schema/plan_generated.h"

#include <gtest/gtest.h>

#include <cstring>

using namespace reshard::schema;

namespace {

/// Whether a field is at an offset: its bytes there have a value, and all others are zero.
template <class Value, class Struct, class Get> void expectAt(size_t offset, const char *field, Get get) {
  const auto value = static_cast<Value>(0x8182838485868788);
  char bytes[sizeof(Struct)] = {};
  std::memcpy(bytes + offset, &value, sizeof value);
  Struct read;
  std::memcpy(static_cast<void *>(&read), bytes, sizeof bytes);
  EXPECT_EQ(static_cast<Value>(get(read)), value) << field;
}

} // namespace

TEST(Structs, FieldsAreWhereReleasedPlansHaveThem) {
#define FIELD(name, field, offset, type)                                                                               \
  expectAt<type, name>(offset, #name "." #field, [](const name &read) { return read.field(); })
  FIELD(IndexBlock, from, 0, int64_t);
  FIELD(IndexBlock, to, 8, int64_t);
  FIELD(IndexBlock, length, 16, int64_t);
  FIELD(IndexBlock, count, 24, int64_t);
  FIELD(IndexBlock, from_step, 32, int64_t);
  FIELD(IndexBlock, to_step, 40, int64_t);
  FIELD(PartDimension, sharding, 0, uint32_t);
  FIELD(PartDimension, param, 4, int32_t);
  FIELD(BufferRange, endpoint, 0, uint32_t);
  FIELD(BufferRange, mesh_rank, 4, uint32_t);
  FIELD(BufferRange, param, 8, uint32_t);
  FIELD(BufferRange, first, 12, uint32_t);
  FIELD(BufferRange, count, 16, uint32_t);
  FIELD(BufferRange, reserved, 20, uint32_t);
  FIELD(BufferRange, bytes, 24, uint64_t);
  FIELD(Loop, count, 0, uint64_t);
  FIELD(Loop, stride, 8, int64_t);
  FIELD(Loop, buffer_step, 16, int64_t);
  FIELD(Shape, row_bytes, 0, uint64_t);
  FIELD(Shape, first_loop, 8, uint32_t);
  FIELD(Shape, loop_count, 12, uint32_t);
  FIELD(Operand, offset, 0, uint64_t);
  FIELD(Operand, buffer, 8, uint32_t);
  FIELD(Operand, shape, 12, uint32_t);
  FIELD(Step, bytes, 0, uint64_t);
  FIELD(Step, staging, 8, uint64_t);
  FIELD(Step, first_input, 16, uint32_t);
  FIELD(Step, input_count, 20, uint32_t);
  FIELD(Step, first_output, 24, uint32_t);
  FIELD(Step, output_count, 28, uint32_t);
  FIELD(Step, round, 32, uint32_t);
  FIELD(Step, peer, 36, uint32_t);
  FIELD(Step, message, 40, uint32_t);
  FIELD(Step, first_after, 44, uint32_t);
  FIELD(Step, after_count, 48, uint32_t);
  FIELD(Step, kind, 52, uint8_t);
  FIELD(Step, slot, 53, uint8_t);
  FIELD(Step, level, 54, uint16_t);
  FIELD(Step, chunk, 56, uint64_t);
#undef FIELD
}
