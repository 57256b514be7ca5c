#include "executor/copies.h"

#include "schema/limits.h"

#include <algorithm>

namespace reshard {

using namespace schema;

namespace {

constexpr uint64_t kChunkBytes = 1 << 20;
static_assert(kernels::kMaxLoops > kMaxLoops, "a huge row adds a loop to those of the plan");

} // namespace

/// Loops over buffers are run here, loops over bytes stay loops.
std::string Copies::add(const LocalRank &from, const Operand *input, const LocalRank &to, const Operand &output) {
  const Shape &target = *to.segment->shapes()->Get(output.shape());
  const Shape &source = input ? *from.segment->shapes()->Get(input->shape()) : target;
  if (source.row_bytes() != target.row_bytes() || source.loop_count() != target.loop_count())
    return "an operand of rank " + std::to_string(from.rank) + " is unlike its partner on rank " + std::to_string(to.rank);
  kernels::Strided strided;
  strided.rowBytes = target.row_bytes();
  struct BufferLoop {
    uint64_t count;
    int64_t sourceStride, targetStride, sourceStep, targetStep;
  };
  BufferLoop outer[kernels::kMaxLoops];
  size_t outerCount = 0;
  uint64_t repeats = 1;
  for (uint32_t l = 0; l < target.loop_count(); ++l) {
    const Loop &t = *to.segment->loops()->Get(target.first_loop() + l);
    const Loop &s = input ? *from.segment->loops()->Get(source.first_loop() + l) : t;
    if (s.count() != t.count())
      return "an operand of rank " + std::to_string(from.rank) + " is unlike its partner on rank " + std::to_string(to.rank);
    const int64_t sourceStride = input ? s.stride() : 0, sourceStep = input ? s.buffer_step() : 0;
    if (sourceStep == 0 && t.buffer_step() == 0) {
      strided.loops[strided.loopCount++] = {t.count(), sourceStride, t.stride()};
    } else {
      outer[outerCount++] = {t.count(), sourceStride, t.stride(), sourceStep, t.buffer_step()};
      repeats *= t.count();
    }
  }
  if (!input)
    for (size_t l = 0; l < strided.loopCount; ++l)
      strided.loops[l].sourceStride = strided.loops[l].targetStride; // so that simplify() looks at the target alone
  kernels::simplify(strided);
  for (uint64_t n = 0; n < repeats; ++n) {
    uint64_t rest = n;
    int64_t sourceBuffer = input ? input->buffer() : 0, targetBuffer = output.buffer();
    int64_t sourceOffset = input ? static_cast<int64_t>(input->offset()) : 0, targetOffset = static_cast<int64_t>(output.offset());
    for (size_t l = outerCount; l-- > 0;) {
      const auto i = static_cast<int64_t>(rest % outer[l].count);
      rest /= outer[l].count;
      sourceBuffer += i * outer[l].sourceStep;
      targetBuffer += i * outer[l].targetStep;
      sourceOffset += i * outer[l].sourceStride;
      targetOffset += i * outer[l].targetStride;
    }
    std::byte *targetAt = to.pointer(static_cast<uint32_t>(targetBuffer));
    const std::byte *sourceAt = input ? from.pointer(static_cast<uint32_t>(sourceBuffer)) : nullptr;
    if (!targetAt || (input && !sourceAt))
      return "a buffer of rank " + std::to_string(targetAt ? from.rank : to.rank) + " is used but not bound";
    cut(strided, sourceAt ? sourceAt + sourceOffset : nullptr, targetAt + targetOffset);
  }
  return {};
}

uint32_t Copies::shapeNumber(const kernels::Strided &shape) {
  auto same = [&](const kernels::Strided &other) {
    return other.rowBytes == shape.rowBytes && other.loopCount == shape.loopCount &&
           std::equal(shape.loops, shape.loops + shape.loopCount, other.loops, [](const kernels::Loop &a, const kernels::Loop &b) {
             return a.count == b.count && a.sourceStride == b.sourceStride && a.targetStride == b.targetStride;
           });
  };
  if (shapes_.empty() || !same(shapes_.back()))
    shapes_.push_back(shape);
  return static_cast<uint32_t>(shapes_.size() - 1);
}

void Copies::cut(kernels::Strided shape, const std::byte *source, std::byte *target) {
  bytes_ += shape.bytes();
  if (shape.rowBytes >= 2 * kChunkBytes) { // a huge row is a loop of chunks and a rest
    kernels::Strided rest = shape;
    const uint64_t whole = shape.rowBytes / kChunkBytes;
    if (rest.rowBytes -= whole * kChunkBytes; rest.rowBytes > 0) {
      const uint32_t number = shapeNumber(rest);
      const uint64_t at = whole * kChunkBytes;
      chunks_.push_back({target + at, source ? source + at : nullptr, number, 0, rest.rows()});
    }
    shape.loops[shape.loopCount++] = {whole, static_cast<int64_t>(kChunkBytes), static_cast<int64_t>(kChunkBytes)};
    shape.rowBytes = kChunkBytes;
  }
  const uint32_t number = shapeNumber(shape);
  const uint64_t rows = shape.rows(), each = kernels::chunkRows(shape, kChunkBytes);
  for (uint64_t first = 0; first < rows; first += each)
    chunks_.push_back({target, source, number, first, std::min(each, rows - first)});
}

} // namespace reshard
