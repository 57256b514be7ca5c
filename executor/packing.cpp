#include "executor/packing.h"

#include <algorithm>
#include <cstring>

namespace reshard {

using namespace schema;

namespace {

struct Offsets {
  int64_t source = 0, target = 0;
};

/// Where row `number` of a shape begins, relative to its first.
Offsets rowOffsets(const kernels::Strided &shape, uint64_t number) {
  Offsets offsets;
  for (size_t l = shape.loopCount; l-- > 0; number /= shape.loops[l].count) {
    const auto i = static_cast<int64_t>(number % shape.loops[l].count);
    offsets.source += i * shape.loops[l].sourceStride;
    offsets.target += i * shape.loops[l].targetStride;
  }
  return offsets;
}

} // namespace

std::string Packing::add(const LocalRank &rank, const Operand &operand) {
  Expansion expansion;
  if (std::string error = expand({&rank, &operand}, {}, expansion); !error.empty())
    return error;
  for (const auto &at : expansion.at)
    if (!at.source)
      return "a buffer of rank " + std::to_string(rank.rank) + " is used but not bound";
  append(expansion);
  kernels::Strided &in = in_.back();
  for (size_t l = 0; l < in.loopCount; ++l)
    std::swap(in.loops[l].sourceStride, in.loops[l].targetStride);
  return {};
}

std::string Packing::add(const Side &source, const Side &target, bool &reached) {
  Expansion expansion;
  if (std::string error = expand(source, target, expansion); !error.empty())
    return error;
  reached = std::all_of(expansion.at.begin(), expansion.at.end(), [](const auto &at) { return at.source && at.target; });
  append(expansion);
  return {};
}

void Packing::append(const Expansion &expansion) {
  for (const auto &[source, target] : expansion.at) {
    pieces_.push_back({source, target, bytes_, out_.size()});
    bytes_ += expansion.shape.bytes();
  }
  out_.push_back(expansion.shape);
  in_.push_back(expansion.shape);
}

std::byte *Packing::contiguous() const {
  return pieces_.size() == 1 && out_[pieces_[0].shape].loopCount == 0 ? pieces_[0].source : nullptr;
}

void Packing::tabulate(uint64_t begin, uint64_t end, bool unpacks, std::byte *packed, kernels::Table &table) const {
  auto piece = std::prev(std::upper_bound(pieces_.begin(), pieces_.end(), begin, [](uint64_t at, const Piece &p) { return at < p.begin; }));
  for (; piece != pieces_.end() && piece->begin < end; ++piece) {
    const kernels::Strided &shape = (unpacks ? in_ : out_)[piece->shape];
    const uint64_t first = std::max(begin, piece->begin) - piece->begin, last = std::min(end - piece->begin, shape.bytes());
    const uint64_t memory = reinterpret_cast<uint64_t>(piece->source), side = reinterpret_cast<uint64_t>(packed) + piece->begin - begin;
    table.add(unpacks ? memory : side, unpacks ? side : memory, shape, first, last - first);
  }
}

/// A range begins and ends anywhere in a row: the parts of rows at its ends, and the whole rows between.
void Packing::move(uint64_t begin, uint64_t end, const std::byte *packed, std::byte *packing, bool stream) const {
  auto piece = std::prev(std::upper_bound(pieces_.begin(), pieces_.end(), begin, [](uint64_t at, const Piece &p) { return at < p.begin; }));
  for (; piece != pieces_.end() && piece->begin < end; ++piece) {
    const kernels::Strided &shape = packed ? in_[piece->shape] : out_[piece->shape];
    // Both pointers are to the piece's first byte, which may lie before the range.
    const auto before = static_cast<int64_t>(piece->begin - begin);
    const std::byte *source = packed ? packed + before : piece->source;
    std::byte *target = packing ? packing + before : packed ? piece->source : piece->target;
    auto part = [&](uint64_t at, uint64_t bytes) {
      const Offsets row = rowOffsets(shape, at / shape.rowBytes);
      const auto within = static_cast<int64_t>(at % shape.rowBytes);
      std::memcpy(target + row.target + within, source + row.source + within, bytes);
    };
    uint64_t at = std::max(begin, piece->begin) - piece->begin;
    const uint64_t last = std::min(end - piece->begin, shape.bytes());
    if (const uint64_t within = at % shape.rowBytes; within > 0) {
      const uint64_t bytes = std::min(shape.rowBytes - within, last - at);
      part(at, bytes);
      at += bytes;
    }
    if (const uint64_t whole = (last - at) / shape.rowBytes; whole > 0) {
      kernels::copyRows(target, source, shape, at / shape.rowBytes, whole, stream);
      at += whole * shape.rowBytes;
    }
    if (at < last)
      part(at, last - at);
  }
}

} // namespace reshard
