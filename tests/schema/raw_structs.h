// SPDX-License-Identifier: Apache-2.0
// The structs of plan.fbs with writable members, for plans that tests alter.
#pragma once

#include "schema/plan_generated.h"

namespace reshard::test {

// tests/schema/structs_test.cpp has the same offsets.
struct [[gnu::may_alias]] RawIndexBlock {
  int64_t from, to, length, count, fromStep, toStep;
};
struct [[gnu::may_alias]] RawBufferRange {
  uint32_t endpoint, meshRank, param, first, count, reserved;
  uint64_t bytes;
};
struct [[gnu::may_alias]] RawLoop {
  uint64_t count;
  int64_t stride, bufferStep;
};
struct [[gnu::may_alias]] RawShape {
  uint64_t rowBytes;
  uint32_t firstLoop, loopCount;
};
struct [[gnu::may_alias]] RawOperand {
  uint64_t offset;
  uint32_t buffer, shape;
};
struct [[gnu::may_alias]] RawStep {
  uint64_t bytes, staging;
  uint32_t firstInput, inputCount, firstOutput, outputCount, round, peer, message, firstAfter, afterCount;
  uint8_t kind, slot;
  uint16_t level;
  uint64_t chunk;
};
struct [[gnu::may_alias]] RawPartDimension {
  uint32_t sharding;
  int32_t param;
};

template <class Raw, class Struct> Raw &raw(Struct &value) {
  static_assert(sizeof(Raw) == sizeof(Struct));
  return reinterpret_cast<Raw &>(value);
}
inline RawStep &raw(schema::Step &step) { return raw<RawStep>(step); }
inline RawOperand &raw(schema::Operand &operand) { return raw<RawOperand>(operand); }

} // namespace reshard::test
