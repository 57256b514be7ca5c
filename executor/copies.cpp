#include "executor/copies.h"

#include "executor/operands.h"
#include "schema/limits.h"

#include <algorithm>

namespace reshard {

using namespace schema;

namespace {

constexpr uint64_t kChunkBytes = 1 << 20;
static_assert(kernels::kMaxLoops > kMaxLoops, "a huge row adds a loop to those of the plan");

} // namespace

std::string Copies::add(const LocalRank &from, const Operand *input, const LocalRank &to, const Operand &output) {
  Expansion expansion;
  if (std::string error = expand({&from, input}, {&to, &output}, expansion); !error.empty())
    return error;
  if (!input && expansion.cast) { // zeros are zeros in every format
    expansion.shape.rowBytes = static_cast<uint64_t>(expansion.cast.scale(static_cast<int64_t>(expansion.shape.rowBytes)));
    expansion.cast = {};
  }
  for (const auto &[source, target] : expansion.at) {
    if (!target || (input && !source))
      return "a buffer of rank " + std::to_string(target ? from.rank : to.rank) + " is used but not bound";
    cut(expansion.shape, expansion.cast, input ? source : nullptr, target);
  }
  return {};
}

uint32_t Copies::shapeNumber(const kernels::Strided &shape, const kernels::Cast &cast) {
  auto same = [&](const std::pair<kernels::Strided, kernels::Cast> &last) {
    const kernels::Strided &other = last.first;
    return last.second == cast && other.rowBytes == shape.rowBytes && other.loopCount == shape.loopCount &&
           std::equal(shape.loops, shape.loops + shape.loopCount, other.loops, [](const kernels::Loop &a, const kernels::Loop &b) {
             return a.count == b.count && a.sourceStride == b.sourceStride && a.targetStride == b.targetStride;
           });
  };
  if (shapes_.empty() || !same(shapes_.back()))
    shapes_.emplace_back(shape, cast);
  return static_cast<uint32_t>(shapes_.size() - 1);
}

void Copies::cut(kernels::Strided shape, const kernels::Cast &cast, const std::byte *source, std::byte *target) {
  bytes_ += shape.bytes();
  if (shape.rowBytes >= 2 * kChunkBytes) { // a huge row is a loop of chunks and a rest
    kernels::Strided rest = shape;
    const uint64_t whole = shape.rowBytes / kChunkBytes;
    if (rest.rowBytes -= whole * kChunkBytes; rest.rowBytes > 0) {
      const uint32_t number = shapeNumber(rest, cast);
      const uint64_t at = whole * kChunkBytes;
      chunks_.push_back({target + (cast ? static_cast<uint64_t>(cast.scale(static_cast<int64_t>(at))) : at), source ? source + at : nullptr, number, 0, rest.rows()});
    }
    shape.loops[shape.loopCount++] = {whole, static_cast<int64_t>(kChunkBytes), cast ? cast.scale(kChunkBytes) : static_cast<int64_t>(kChunkBytes)};
    shape.rowBytes = kChunkBytes;
  }
  const uint32_t number = shapeNumber(shape, cast);
  const uint64_t rows = shape.rows(), each = kernels::chunkRows(shape, kChunkBytes);
  for (uint64_t first = 0; first < rows; first += each)
    chunks_.push_back({target, source, number, first, std::min(each, rows - first)});
}

} // namespace reshard
