#include "executor/chunks.h"

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

std::vector<uint64_t> chunksBefore(const Segment &segment, const Step &send, const Step &receive) {
  std::map<std::array<uint64_t, 3>, uint64_t> begins; // of the receive's operands, in bytes of the message
  uint64_t at = 0;
  for (uint32_t i = 0; i < receive.output_count(); ++i) {
    const Operand &operand = *segment.operands()->Get(receive.first_output() + i);
    begins[{operand.buffer(), operand.shape(), operand.offset()}] = at;
    at += bytesOf(segment, operand);
  }
  auto chunkOf = [](const Step &step, uint64_t byte) { return step.chunk() > 0 ? byte / step.chunk() : 0; };
  std::vector<uint64_t> before(chunkCount(send));
  bool any = false;
  at = 0;
  for (uint32_t i = 0; i < send.input_count(); ++i) {
    const Operand &operand = *segment.operands()->Get(send.first_input() + i);
    const uint64_t end = at + bytesOf(segment, operand);
    if (const auto known = begins.find({operand.buffer(), operand.shape(), operand.offset()}); known != begins.end()) {
      any = true;
      for (uint64_t c = chunkOf(send, at); c <= chunkOf(send, end - 1); ++c) {
        const uint64_t last =
            send.chunk() > 0 ? std::min(end, (c + 1) * send.chunk()) - 1 : end - 1; // of its bytes in this chunk
        before[c] = std::max(before[c], chunkOf(receive, known->second + (last - at)) + 1);
      }
    }
    at = end;
  }
  if (!any)
    std::fill(before.begin(), before.end(), chunkCount(receive));
  return before;
}

} // namespace reshard
