#include "executor/packing.h"

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

std::byte *SplitUnits::at(const void *message, uint64_t byte) {
  const auto [known, added] = known_.try_emplace({message, byte}, left_ > 0 ? next_ : nullptr);
  if (added && left_ > 0) {
    next_ += kUnit;
    --left_;
  }
  return known->second;
}

/// Like move(). But each unit that a range splits gets memory of its own (splitUnits): unpack collects its packed bytes
/// there until the last one has arrived; pack converts the whole unit to there and copies the range's bytes of it.
Status Packing::tabulate(const PackedRange &range, bool unpacks, SplitUnits &splitUnits, Tables &tables) const {
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
    const uint64_t unit = std::max(conversion.read.item(), conversion.write.block);
    // Handles bytes [from, to) of a split unit; false if there is no memory for it.
    auto part = [&](uint64_t from, uint64_t to) {
      const uint64_t whole = from / unit * unit;
      std::byte *const unitMemory = splitUnits.at(this, entry->begin + whole);
      kernels::Strided bytes;
      bytes.rowBytes = to - from;
      if (!unitMemory)
        return false;
      // The address of byte 0 of the packed side, such that the unit is at unitMemory.
      const uint64_t apart = address(unitMemory) - whole;
      if (!unpacks) {
        tables.conversions.add(apart, memory, shape, conversion, whole, unit);
        tables.rest.add(side + from, apart + from, bytes);
      } else {
        tables.copies.add(apart + from, side + from, bytes);
        if (to == whole + unit)
          tables.conversions.add(memory, apart, shape, conversion, whole, unit);
      }
      return true;
    };
    bool room = true;
    if (first % unit > 0) {
      const uint64_t to = std::min(first / unit * unit + unit, last);
      room = part(first, to);
      first = to;
    }
    if (first < last && last % unit > 0) {
      room = part(last / unit * unit, last) && room;
      last = last / unit * unit;
    }
    if (!room)
      return failed("out of memory for units that chunk boundaries split");
    if (first < last)
      tables.conversions.add(unpacks ? memory : side, unpacks ? side : memory, shape, conversion, first, last - first);
  }
  return {};
}

/// A range may begin and end anywhere in a row: it is a part of a row, whole rows, and another part of a row. A unit
/// (an element, a block) that two ranges split is written with the range that has its last byte; unpack keeps its first
/// bytes in partialBlock_ until then. pack converts a split unit twice, once for each range.
void Packing::move(uint64_t begin, uint64_t end, const std::byte *packed, std::byte *packing, bool stream) const {
  auto entry = std::prev(std::upper_bound(entries_.begin(), entries_.end(), begin,
                                          [](uint64_t at, const Entry &p) { return at < p.begin; }));
  for (; entry != entries_.end() && entry->begin < end; ++entry) {
    const kernels::Strided &shape = packed ? in_[entry->shape] : out_[entry->shape];
    kernels::Conversion conversion = conversions_[entry->shape];
    if (packed)
      conversion.read = {};
    if (packing)
      conversion.write = {};
    // Both pointers point to the piece's first byte, which may be before the range.
    const auto before = static_cast<int64_t>(entry->begin - begin);
    const std::byte *source = packed ? packed + before : entry->source;
    std::byte *target = packing ? packing + before : packed ? entry->source : entry->target;
    uint64_t at = std::max(begin, entry->begin) - entry->begin;
    uint64_t last = std::min(end - entry->begin, shape.bytes());
    // Moves a part of one row; otherSource or otherTarget replaces one side.
    auto part = [&](uint64_t from, uint64_t bytes, const std::byte *otherSource = nullptr,
                    std::byte *otherTarget = nullptr) {
      const Offsets row = rowOffsets(shape, from / shape.rowBytes);
      const auto within = static_cast<int64_t>(from % shape.rowBytes);
      const std::byte *bytesAt = otherSource ? otherSource : source + row.source + conversion.read.scale(within);
      std::byte *to = otherTarget ? otherTarget : target + row.target + conversion.write.scale(within);
      if (conversion)
        kernels::convertRow(to, bytesAt, bytes, conversion, stream);
      else
        std::memcpy(to, bytesAt, bytes);
    };
    uint64_t left = 0;
    if (const uint64_t unit = conversion ? std::max(conversion.read.item(), conversion.write.block) : 1; unit > 1) {
      const uint64_t begun = at % unit;
      left = last % unit;
      last -= left;
      std::byte element[8];
      if (packing) {
        if (begun > 0) {
          const uint64_t some = std::min(unit - begun, last + left - at);
          part(at - begun, unit, nullptr, element);
          std::memcpy(target + at, element + begun, some);
          at += unit - begun;
        }
        if (left > 0 && at <= last) {
          part(last, unit, nullptr, element);
          std::memcpy(target + last, element, left);
        }
      } else if (packed && begun > 0) {
        const uint64_t some = std::min(unit - begun, last + left - at);
        std::memcpy(partialBlock_.data() + begun, source + at, some);
        if (begun + some < unit)
          return; // a later range has the rest of the block
        part(at - begun, unit, partialBlock_.data());
        at += some;
      } else {
        at -= begun;
      }
      if (packed && left > 0)
        std::memcpy(partialBlock_.data(), source + last, left);
    }
    if (const uint64_t within = at % shape.rowBytes; within > 0 && at < last) {
      const uint64_t bytes = std::min(shape.rowBytes - within, last - at);
      part(at, bytes);
      at += bytes;
    }
    if (const uint64_t whole = at < last ? (last - at) / shape.rowBytes : 0; whole > 0) {
      if (conversion)
        kernels::convertRows(target, source, shape, at / shape.rowBytes, whole, conversion, stream);
      else
        kernels::copyRows(target, source, shape, at / shape.rowBytes, whole, stream);
      at += whole * shape.rowBytes;
    }
    if (at < last)
      part(at, last - at);
  }
}

} // namespace reshard
