// SPDX-License-Identifier: Apache-2.0
// Moves a range of a message entry by entry. A range that begins or ends within an element or block that is converted
// keeps the block in memory of its own until its last byte has arrived.
#include "executor/memory/packing.h"

#include <algorithm>
#include <cstring>

namespace reshard {

using namespace schema;

namespace {

struct Offsets {
  int64_t source = 0, target = 0;
};

/// The offsets of row `number` of a shape from its first row.
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

Status Packing::add(const LocalRank &rank, const Operand &operand) {
  Expansion expansion;
  if (Status status = expand({&rank, &operand}, {}, expansion); !status.ok())
    return status;
  for (const auto &at : expansion.at)
    if (!at.source)
      return failed("rank " + std::to_string(rank.rank) + " uses a buffer that was not bound");
  expansion.target = expansion.source; // for pack this memory is the source, for unpack the target
  for (auto &at : expansion.at)
    at.to = at.from;
  const size_t first = in_.size();
  append(expansion);
  for (size_t s = first; s < in_.size(); ++s)
    for (size_t l = 0; l < in_[s].loopCount; ++l)
      std::swap(in_[s].loops[l].sourceStride, in_[s].loops[l].targetStride);
  return {};
}

Result<bool> Packing::add(const Side &source, const Side &target) {
  Expansion expansion;
  if (Status status = expand(source, target, expansion); !status.ok())
    return status;
  append(expansion);
  return std::all_of(expansion.at.begin(), expansion.at.end(), [](const auto &at) { return at.source && at.target; });
}

void Packing::append(const Expansion &expansion) {
  bool any = false;
  for (const auto &[source, target, from, to] : expansion.at) {
    const kernels::Conversion conversion{expansion.source, expansion.target, from, to};
    if (!any || !(conversions_.back() == conversion)) {
      out_.push_back(expansion.shape);
      in_.push_back(expansion.shape);
      conversions_.push_back(conversion);
      any = true;
    }
    entries_.push_back({source, target, bytes_, out_.size() - 1});
    bytes_ += expansion.shape.bytes();
  }
  converts_ = converts_ || expansion.source || expansion.target;
}

std::byte *Packing::contiguous() const {
  return entries_.size() == 1 && !converts_ && out_[entries_[0].shape].loopCount == 0 ? entries_[0].source : nullptr;
}

std::byte *SplitBlocks::at(const void *message, uint64_t byte) {
  const auto [known, added] = known_.try_emplace({message, byte}, left_ > 0 ? next_ : nullptr);
  if (added && left_ > 0) {
    next_ += kBytes;
    --left_;
  }
  return known->second;
}

/// Like move(). But each block that a range splits gets memory of its own (splitBlocks): unpack collects its packed
/// bytes there until the last one has arrived; pack converts the whole block to there and copies the range's bytes of
/// it.
Status Packing::tabulate(const PackedRange &range, bool unpacks, SplitBlocks &splitBlocks, Tables &tables) const {
  const auto &[begin, end, packed] = range;
  auto address = [](const std::byte *pointer) { return reinterpret_cast<uint64_t>(pointer); };
  auto entry = std::prev(std::upper_bound(entries_.begin(), entries_.end(), range.begin,
                                          [](uint64_t at, const Entry &p) { return at < p.begin; }));
  for (; entry != entries_.end() && entry->begin < range.end; ++entry) {
    const kernels::Strided &shape = (unpacks ? in_ : out_)[entry->shape];
    uint64_t first = std::max(begin, entry->begin) - entry->begin, last = std::min(end - entry->begin, shape.bytes());
    const uint64_t memory = address(entry->source), side = address(packed) + entry->begin - begin;
    kernels::Conversion conversion = conversions_[entry->shape];
    (unpacks ? conversion.read : conversion.write) = {};
    if (!conversion) {
      tables.copies.add(unpacks ? memory : side, unpacks ? side : memory, shape, first, last - first);
      continue;
    }
    const uint64_t block = std::max(conversion.read.item(), conversion.write.block);
    // Adds bytes [from, to) of a split block; false if there is no memory for it.
    auto part = [&](uint64_t from, uint64_t to) {
      const uint64_t whole = from / block * block;
      std::byte *const blockMemory = splitBlocks.at(this, entry->begin + whole);
      kernels::Strided bytes;
      bytes.rowBytes = to - from;
      if (!blockMemory)
        return false;
      // The address of byte 0 of the packed side, such that the block is at blockMemory.
      const uint64_t apart = address(blockMemory) - whole;
      if (!unpacks) {
        tables.conversions.add(apart, memory, shape, conversion, {whole, block});
        tables.rest.add(side + from, apart + from, bytes);
      } else {
        tables.copies.add(apart + from, side + from, bytes);
        if (to == whole + block)
          tables.conversions.add(memory, apart, shape, conversion, {whole, block});
      }
      return true;
    };
    bool allocated = true;
    if (first % block > 0) {
      const uint64_t to = std::min(first / block * block + block, last);
      allocated = part(first, to);
      first = to;
    }
    if (first < last && last % block > 0) {
      allocated = part(last / block * block, last) && allocated;
      last = last / block * block;
    }
    if (!allocated)
      return failed("out of memory for elements or blocks that chunk boundaries split");
    if (first < last)
      tables.conversions.add(unpacks ? memory : side, unpacks ? side : memory, shape, conversion,
                             {first, last - first});
  }
  return {};
}

/// One entry of a Packing, between its memory and the packed bytes, or between both memories. Positions count bytes of
/// the entry as sent; `source` and `target` are the addresses of position 0, which may be before the moved range.
struct Packing::EntryMove {
  const kernels::Strided &shape;
  kernels::Conversion conversion;
  const std::byte *source;
  std::byte *target;
  bool stream;

  /// The bytes that are converted at once: an element or a block; 1 without a conversion.
  uint64_t block() const { return conversion ? std::max(conversion.read.item(), conversion.write.block) : 1; }

  const std::byte *sourceAt(uint64_t position) const {
    return source + rowOffsets(shape, position / shape.rowBytes).source +
           conversion.read.scale(static_cast<int64_t>(position % shape.rowBytes));
  }
  std::byte *targetAt(uint64_t position) const {
    return target + rowOffsets(shape, position / shape.rowBytes).target +
           conversion.write.scale(static_cast<int64_t>(position % shape.rowBytes));
  }
  void bytes(std::byte *to, const std::byte *from, uint64_t count) const {
    if (conversion)
      kernels::convertRow(to, from, count, conversion, stream);
    else
      std::memcpy(to, from, count);
  }
  /// Moves a part of one row.
  void part(uint64_t position, uint64_t count) const { bytes(targetAt(position), sourceAt(position), count); }

  /// Moves a range without split blocks: a part of a row, whole rows, and another part of a row.
  void range(uint64_t at, uint64_t last) const {
    if (const uint64_t within = at % shape.rowBytes; within > 0 && at < last) {
      const uint64_t count = std::min(shape.rowBytes - within, last - at);
      part(at, count);
      at += count;
    }
    if (const uint64_t whole = at < last ? (last - at) / shape.rowBytes : 0; whole > 0) {
      if (conversion)
        kernels::convertRows({target, source, shape, at / shape.rowBytes, whole}, conversion, stream);
      else
        kernels::copyRows({target, source, shape, at / shape.rowBytes, whole}, stream);
      at += whole * shape.rowBytes;
    }
    if (at < last)
      part(at, last - at);
  }
};

/// A range may begin and end anywhere in a block (SplitBlocks). A block that two ranges split is written with the range
/// that has its last byte.
void Packing::move(uint64_t begin, uint64_t end, const std::byte *packed, std::byte *packing, bool stream) const {
  auto entry = std::prev(std::upper_bound(entries_.begin(), entries_.end(), begin,
                                          [](uint64_t at, const Entry &p) { return at < p.begin; }));
  for (; entry != entries_.end() && entry->begin < end; ++entry) {
    const auto before = static_cast<int64_t>(entry->begin - begin);
    EntryMove move{.shape = packed ? in_[entry->shape] : out_[entry->shape],
                   .conversion = conversions_[entry->shape],
                   .source = packed ? packed + before : entry->source,
                   .target = packing  ? packing + before
                             : packed ? entry->source
                                      : entry->target,
                   .stream = stream};
    if (packed)
      move.conversion.read = {};
    if (packing)
      move.conversion.write = {};
    uint64_t at = std::max(begin, entry->begin) - entry->begin;
    uint64_t last = std::min(end - entry->begin, move.shape.bytes());
    if (packing)
      packSplitBlocks(move, at, last);
    else if (packed)
      unpackSplitBlocks(move, at, last);
    else { // the range before left out the block that it splits with this one
      at -= at % move.block();
      last -= last % move.block();
    }
    move.range(at, last);
  }
}

/// Packs the blocks that a range splits: each is converted as a whole, and the range's bytes of it are copied. Removes
/// them from the range.
void Packing::packSplitBlocks(const EntryMove &move, uint64_t &at, uint64_t &last) {
  const uint64_t block = move.block(), begun = at % block, left = last % block, end = last;
  std::byte element[8];
  last -= left;
  if (begun > 0) {
    move.bytes(element, move.sourceAt(at - begun), block);
    std::memcpy(move.target + at, element + begun, std::min(block - begun, end - at));
    at += block - begun;
  }
  if (left > 0 && at <= last) {
    move.bytes(element, move.sourceAt(last), block);
    std::memcpy(move.target + last, element, left);
  }
}

/// Unpacks the block that the range before has begun, and keeps the first bytes of the one that it ends in, in
/// partialBlock_. Removes both from the range.
void Packing::unpackSplitBlocks(const EntryMove &move, uint64_t &at, uint64_t &last) const {
  const uint64_t block = move.block(), begun = at % block, left = last % block, end = last;
  last -= left;
  if (begun > 0) {
    const uint64_t some = std::min(block - begun, end - at);
    std::memcpy(partialBlock_.data() + begun, move.source + at, some);
    at += some;
    if (begun + some < block) { // a later range has the rest of the block
      last = at;
      return;
    }
    move.bytes(move.targetAt(at - block), partialBlock_.data(), block);
  }
  if (left > 0)
    std::memcpy(partialBlock_.data(), move.source + last, left);
}

} // namespace reshard
