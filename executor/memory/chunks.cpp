// SPDX-License-Identifier: Apache-2.0
#include "executor/memory/chunks.h"

#include <algorithm>
#include <array>
#include <map>

namespace reshard {

using namespace schema;

namespace {

uint64_t bytesOf(const Segment &segment, const Operand &operand) {
  const Shape &shape = *segment.shapes()->Get(operand.shape());
  uint64_t bytes = shape.row_bytes();
  for (uint32_t l = 0; l < shape.loop_count(); ++l)
    bytes *= segment.loops()->Get(shape.first_loop() + l)->count();
  return bytes;
}

} // namespace

std::vector<std::vector<uint64_t>> chunksBefore(const Segment &segment, const Step &send) {
  struct Origin {
    uint32_t step;  // index in the send's `after`
    uint64_t begin; // byte of its message
  };
  std::map<std::array<uint64_t, 3>, Origin> written; // by operand
  const uint64_t chunks = chunkCount(send);
  std::vector<std::vector<uint64_t>> result(send.after_count(), std::vector<uint64_t>(chunks));
  auto earlier = [&](uint32_t i) -> const Step & {
    return *segment.steps()->Get(segment.after()->Get(send.first_after() + i));
  };
  for (uint32_t i = 0; i < send.after_count(); ++i) {
    const Step &step = earlier(i);
    if (step.kind() != StepKind::recv && step.kind() != StepKind::send)
      std::fill(result[i].begin(), result[i].end(), 1);
    uint64_t at = 0;
    for (uint32_t o = 0; o < step.output_count(); ++o) {
      const Operand &operand = *segment.operands()->Get(step.first_output() + o);
      written[{operand.buffer(), operand.shape(), operand.offset()}] = {i, at};
      at += bytesOf(segment, operand);
    }
  }
  auto isSource = [&](uint32_t buffer) {
    const auto *runs = segment.buffers();
    for (uint32_t r = 0; runs && r < runs->size(); ++r)
      if (buffer >= runs->Get(r)->first() && buffer - runs->Get(r)->first() < runs->Get(r)->count())
        return runs->Get(r)->endpoint() == 0;
    return false;
  };
  auto chunkOf = [](const Step &step, uint64_t byte) { return step.chunk() > 0 ? byte / step.chunk() : 0; };
  uint64_t at = 0;
  for (uint32_t n = 0; n < send.input_count(); ++n) {
    const Operand &operand = *segment.operands()->Get(send.first_input() + n);
    const uint64_t end = at + bytesOf(segment, operand);
    const auto known = written.find({operand.buffer(), operand.shape(), operand.offset()});
    for (uint64_t c = chunkOf(send, at); c <= chunkOf(send, end - 1); ++c) {
      if (known != written.end()) {
        // The operand's last byte in this chunk.
        const uint64_t last = send.chunk() > 0 ? std::min(end, (c + 1) * send.chunk()) - 1 : end - 1;
        uint64_t &count = result[known->second.step][c];
        count = std::max(count, chunkOf(earlier(known->second.step), known->second.begin + (last - at)) + 1);
      } else if (!isSource(operand.buffer())) {
        for (uint32_t i = 0; i < send.after_count(); ++i)
          if (earlier(i).kind() == StepKind::recv)
            result[i][c] = chunkCount(earlier(i));
      }
    }
    at = end;
  }
  return result;
}

} // namespace reshard
