#include "executor/packing.h"

#include <algorithm>
#include <cstring>

namespace reshard {

using namespace schema;

namespace {

/// Where row `number` begins on the source side of a shape, relative to its first.
int64_t rowOffset(const kernels::Strided &shape, uint64_t number) {
  int64_t offset = 0;
  for (size_t l = shape.loopCount; l-- > 0; number /= shape.loops[l].count)
    offset += static_cast<int64_t>(number % shape.loops[l].count) * shape.loops[l].sourceStride;
  return offset;
}

} // namespace

std::string Packing::add(const LocalRank &rank, const Operand &operand) {
  const Shape &shape = *rank.segment->shapes()->Get(operand.shape());
  kernels::Strided strided;
  strided.rowBytes = shape.row_bytes();
  struct BufferLoop {
    uint64_t count;
    int64_t stride, step;
  } outer[kernels::kMaxLoops];
  size_t outerCount = 0;
  uint64_t repeats = 1;
  for (uint32_t l = 0; l < shape.loop_count(); ++l) {
    const Loop &loop = *rank.segment->loops()->Get(shape.first_loop() + l);
    // Loops over buffers are run here. The packed bytes are in the order of all loops, so those outside them are as well.
    if (loop.buffer_step() != 0) {
      for (size_t k = 0; k < strided.loopCount; ++k) {
        outer[outerCount++] = {strided.loops[k].count, strided.loops[k].sourceStride, 0};
        repeats *= strided.loops[k].count;
      }
      strided.loopCount = 0;
      outer[outerCount++] = {loop.count(), loop.stride(), loop.buffer_step()};
      repeats *= loop.count();
    } else {
      strided.loops[strided.loopCount++] = {loop.count(), loop.stride(), 0};
    }
  }
  auto packed = static_cast<int64_t>(strided.rowBytes);
  for (size_t l = strided.loopCount; l-- > 0; packed *= static_cast<int64_t>(strided.loops[l].count))
    strided.loops[l].targetStride = packed;
  kernels::simplify(strided);
  out_.push_back(strided);
  for (size_t l = 0; l < strided.loopCount; ++l)
    std::swap(strided.loops[l].sourceStride, strided.loops[l].targetStride);
  in_.push_back(strided);
  for (uint64_t n = 0; n < repeats; ++n) {
    int64_t buffer = operand.buffer(), offset = static_cast<int64_t>(operand.offset());
    uint64_t rest = n;
    for (size_t l = outerCount; l-- > 0; rest /= outer[l].count) {
      const auto i = static_cast<int64_t>(rest % outer[l].count);
      buffer += i * outer[l].step;
      offset += i * outer[l].stride;
    }
    std::byte *memory = rank.pointer(static_cast<uint32_t>(buffer));
    if (!memory)
      return "a buffer of rank " + std::to_string(rank.rank) + " is used but not bound";
    pieces_.push_back({memory + offset, bytes_, out_.size() - 1});
    bytes_ += strided.bytes();
  }
  return {};
}

std::byte *Packing::contiguous() const {
  return pieces_.size() == 1 && out_[pieces_[0].shape].loopCount == 0 ? pieces_[0].memory : nullptr;
}

/// row(piece, shape number, row, offset in it, bytes, place in the message) for parts of rows; rows(piece, shape number, first row, rows, place
/// in the message of the piece's first row).
template <class Row, class Rows> void Packing::walk(uint64_t begin, uint64_t end, Row row, Rows rows) const {
  auto piece = std::prev(std::upper_bound(pieces_.begin(), pieces_.end(), begin, [](uint64_t at, const Piece &p) { return at < p.begin; }));
  for (; piece != pieces_.end() && piece->begin < end; ++piece) {
    const kernels::Strided &shape = out_[piece->shape];
    uint64_t at = std::max(begin, piece->begin) - piece->begin;
    const uint64_t last = std::min(end - piece->begin, shape.bytes());
    if (const uint64_t within = at % shape.rowBytes; within > 0) {
      const uint64_t bytes = std::min(shape.rowBytes - within, last - at);
      row(*piece, at / shape.rowBytes, within, bytes, piece->begin + at);
      at += bytes;
    }
    if (const uint64_t whole = (last - at) / shape.rowBytes; whole > 0) {
      rows(*piece, at / shape.rowBytes, whole);
      at += whole * shape.rowBytes;
    }
    if (at < last)
      row(*piece, at / shape.rowBytes, 0, last - at, piece->begin + at);
  }
}

void Packing::pack(uint64_t begin, uint64_t end, std::byte *to) const {
  walk(
      begin, end,
      [&](const Piece &piece, uint64_t number, uint64_t within, uint64_t bytes, uint64_t at) {
        std::memcpy(to + (at - begin), piece.memory + rowOffset(out_[piece.shape], number) + within, bytes);
      },
      [&](const Piece &piece, uint64_t first, uint64_t count) {
        kernels::copyRows(to + static_cast<int64_t>(piece.begin - begin), piece.memory, out_[piece.shape], first, count);
      });
}

void Packing::unpack(uint64_t begin, uint64_t end, const std::byte *from) const {
  walk(
      begin, end,
      [&](const Piece &piece, uint64_t number, uint64_t within, uint64_t bytes, uint64_t at) {
        std::memcpy(piece.memory + rowOffset(out_[piece.shape], number) + within, from + (at - begin), bytes);
      },
      [&](const Piece &piece, uint64_t first, uint64_t count) {
        kernels::copyRows(piece.memory, from + static_cast<int64_t>(piece.begin - begin), in_[piece.shape], first, count);
      });
}

} // namespace reshard
