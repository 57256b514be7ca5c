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
  expansion.target = expansion.source; // whichever it is
  for (auto &at : expansion.at)
    at.to = at.from;
  const size_t first = in_.size();
  append(expansion);
  for (size_t s = first; s < in_.size(); ++s)
    for (size_t l = 0; l < in_[s].loopCount; ++l)
      std::swap(in_[s].loops[l].sourceStride, in_[s].loops[l].targetStride);
  return {};
}

std::string Packing::add(const Side &source, const Side &target, bool &reached) {
  Expansion expansion;
  if (std::string error = expand(source, target, expansion); !error.empty())
    return error;
  reached =
      std::all_of(expansion.at.begin(), expansion.at.end(), [](const auto &at) { return at.source && at.target; });
  append(expansion);
  return {};
}

void Packing::append(const Expansion &expansion) {
  bool any = false;
  for (const auto &[source, target, from, to] : expansion.at) {
    const kernels::Change change{expansion.source, expansion.target, from, to};
    if (!any || !(changes_.back() == change)) {
      out_.push_back(expansion.shape);
      in_.push_back(expansion.shape);
      changes_.push_back(change);
      any = true;
    }
    pieces_.push_back({source, target, bytes_, out_.size() - 1});
    bytes_ += expansion.shape.bytes();
  }
  converts_ = converts_ || expansion.source || expansion.target;
}

std::byte *Packing::contiguous() const {
  return pieces_.size() == 1 && !converts_ && out_[pieces_[0].shape].loopCount == 0 ? pieces_[0].source : nullptr;
}

std::byte *Parted::at(const void *message, uint64_t byte) {
  const auto [known, added] = known_.try_emplace({message, byte}, left_ > 0 ? next_ : nullptr);
  if (added && left_ > 0) {
    next_ += kUnit;
    --left_;
  }
  return known->second;
}

/// As move(), which says what belongs to which range; but where a range parts a unit, all of it is kept in a place of
/// its own: of packed bytes until its last byte is there, of what is packed for the copies of its parts.
std::string Packing::tabulate(uint64_t begin, uint64_t end, bool unpacks, std::byte *packed, Parted &parted,
                              Tables &tables) const {
  auto address = [](const std::byte *pointer) { return reinterpret_cast<uint64_t>(pointer); };
  auto piece = std::prev(std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                                          [](uint64_t at, const Piece &p) { return at < p.begin; }));
  for (; piece != pieces_.end() && piece->begin < end; ++piece) {
    const kernels::Strided &shape = (unpacks ? in_ : out_)[piece->shape];
    uint64_t first = std::max(begin, piece->begin) - piece->begin, last = std::min(end - piece->begin, shape.bytes());
    const uint64_t memory = address(piece->source), side = address(packed) + piece->begin - begin;
    kernels::Change change = changes_[piece->shape];
    (unpacks ? change.read : change.write) = {};
    if (!change) {
      tables.copies.add(unpacks ? memory : side, unpacks ? side : memory, shape, first, last - first);
      continue;
    }
    const uint64_t unit = std::max(change.read.item(), change.write.block);
    // Bytes [from, to) of one unit.
    auto part = [&](uint64_t from, uint64_t to) {
      const uint64_t whole = from / unit * unit;
      std::byte *const kept = parted.at(this, piece->begin + whole);
      kernels::Strided bytes;
      bytes.rowBytes = to - from;
      if (!kept)
        return false;
      // Where byte 0 of the packed side would be, if the unit stood there.
      const uint64_t apart = address(kept) - whole;
      if (!unpacks) {
        tables.changes.add(apart, memory, shape, change, whole, unit);
        tables.rest.add(side + from, apart + from, bytes);
      } else {
        tables.copies.add(apart + from, side + from, bytes);
        if (to == whole + unit)
          tables.changes.add(memory, apart, shape, change, whole, unit);
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
      return "there is no room for what its chunks part";
    if (first < last)
      tables.changes.add(unpacks ? memory : side, unpacks ? side : memory, shape, change, first, last - first);
  }
  return {};
}

/// A range begins and ends anywhere in a row: the parts of rows at its ends, and the whole rows between. What is
/// written at once (an element, a block) and parted by two ranges belongs to the one that it ends in; of packed bytes
/// its beginning is kept until then. An element that is packed in two parts is made twice.
void Packing::move(uint64_t begin, uint64_t end, const std::byte *packed, std::byte *packing, bool stream) const {
  auto piece = std::prev(std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                                          [](uint64_t at, const Piece &p) { return at < p.begin; }));
  for (; piece != pieces_.end() && piece->begin < end; ++piece) {
    const kernels::Strided &shape = packed ? in_[piece->shape] : out_[piece->shape];
    kernels::Change change = changes_[piece->shape];
    if (packed)
      change.read = {};
    if (packing)
      change.write = {};
    // Both pointers are to the piece's first byte, which may lie before the range.
    const auto before = static_cast<int64_t>(piece->begin - begin);
    const std::byte *source = packed ? packed + before : piece->source;
    std::byte *target = packing ? packing + before : packed ? piece->source : piece->target;
    uint64_t at = std::max(begin, piece->begin) - piece->begin;
    uint64_t last = std::min(end - piece->begin, shape.bytes());
    // A part of one row; one side may be elsewhere.
    auto part = [&](uint64_t from, uint64_t bytes, const std::byte *otherSource = nullptr,
                    std::byte *otherTarget = nullptr) {
      const Offsets row = rowOffsets(shape, from / shape.rowBytes);
      const auto within = static_cast<int64_t>(from % shape.rowBytes);
      const std::byte *bytesAt = otherSource ? otherSource : source + row.source + change.read.scale(within);
      std::byte *to = otherTarget ? otherTarget : target + row.target + change.write.scale(within);
      if (change)
        kernels::changeRow(to, bytesAt, bytes, change, stream);
      else
        std::memcpy(to, bytesAt, bytes);
    };
    uint64_t left = 0;
    if (const uint64_t unit = change ? std::max(change.read.item(), change.write.block) : 1; unit > 1) {
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
        std::memcpy(kept_.data() + begun, source + at, some);
        if (begun + some < unit)
          return; // the block goes on in a later range
        part(at - begun, unit, kept_.data());
        at += some;
      } else {
        at -= begun;
      }
      if (packed && left > 0)
        std::memcpy(kept_.data(), source + last, left);
    }
    if (const uint64_t within = at % shape.rowBytes; within > 0 && at < last) {
      const uint64_t bytes = std::min(shape.rowBytes - within, last - at);
      part(at, bytes);
      at += bytes;
    }
    if (const uint64_t whole = at < last ? (last - at) / shape.rowBytes : 0; whole > 0) {
      if (change)
        kernels::changeRows(target, source, shape, at / shape.rowBytes, whole, change, stream);
      else
        kernels::copyRows(target, source, shape, at / shape.rowBytes, whole, stream);
      at += whole * shape.rowBytes;
    }
    if (at < last)
      part(at, last - at);
  }
}

} // namespace reshard
