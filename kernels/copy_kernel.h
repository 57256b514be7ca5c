// A table of strided copies, and what one thread of a launch does of it. Plain structs and inline functions, so that a
// GPU and the host run the same code on the same table: tests run it thread by thread.
#pragma once

#include "kernels/host_device.h"

namespace reshard::kernels {

/// A loop of a shape; strides in bytes, may be negative.
struct TableLoop {
  int64_t sourceStride, targetStride;
  uint32_t count, reserved;
};

/// Loops [firstLoop, firstLoop + loopCount), outermost first, around rows of rowUnits units.
struct TableShape {
  uint32_t rowUnits, firstLoop, loopCount;
};

/// Units [first, first + units) of a shape (numbered along rows, the innermost loop fastest). The shape has fewer than
/// 2^32 units.
struct CopyEntry {
  uint64_t source, target; // addresses of the shape's first unit; source 0: zeros
  uint64_t slot;           // the first of the piece in the table
  uint32_t first, units;
  uint32_t shape;
  uint32_t width; // bytes of a unit, to which both sides are aligned: 16, 8, 4, 2 or 1
};

/// Work is dealt out in slots of kSlotBytes. A piece begins with a slot of its own, so a slot belongs to one piece.
constexpr uint32_t kSlotBytes = 16;

struct CopyTableView {
  const CopyEntry *entries; // and one more, whose slot is `slots`
  const TableShape *shapes;
  const TableLoop *loops;
  uint64_t slots;
  uint32_t entryCount;
};

/// What a warp takes at a time; units that a thread reads before it writes them.
constexpr uint32_t kBatch = 4, kTileSlots = kWarpThreads * kBatch;

namespace detail {

struct alignas(16) Unit16 {
  uint32_t words[4];
};

/// A byte that moves once shall not stay in the caches; one that is read again shall.
template <class T, bool Again = false> RESHARD_HOST_DEVICE inline T load(uint64_t address) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 16) {
    const auto *at = reinterpret_cast<const uint4 *>(address);
    const uint4 v = Again ? *at : __ldcs(at);
    return {{v.x, v.y, v.z, v.w}};
  } else {
    return Again ? *reinterpret_cast<const T *>(address) : __ldcs(reinterpret_cast<const T *>(address));
  }
#else
  T value;
  std::memcpy(&value, reinterpret_cast<const void *>(address), sizeof value);
  return value;
#endif
}

template <class T> RESHARD_HOST_DEVICE inline void store(uint64_t address, const T &value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 16)
    __stcs(reinterpret_cast<uint4 *>(address),
           make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]));
  else
    __stcs(reinterpret_cast<T *>(address), value);
#else
  std::memcpy(reinterpret_cast<void *>(address), &value, sizeof value);
#endif
}

/// Moves both addresses from the first row of a shape to row `row`.
RESHARD_HOST_DEVICE inline void addRow(const TableLoop *loops, const TableShape &shape, uint32_t row, uint64_t &source,
                                       uint64_t &target) {
  RESHARD_NO_UNROLL
  for (uint32_t l = shape.loopCount; l-- > 0;) {
    const TableLoop &loop = loops[shape.firstLoop + l];
    const uint32_t next = l > 0 ? row / loop.count : 0, i = row - next * loop.count;
    source += static_cast<uint64_t>(i * loop.sourceStride);
    target += static_cast<uint64_t>(i * loop.targetStride);
    row = next;
  }
}

/// The piece of [low, high) that has a slot.
template <class Entry>
RESHARD_HOST_DEVICE inline uint32_t findEntry(const Entry *entries, uint32_t low, uint32_t high, uint64_t slot) {
  RESHARD_NO_UNROLL
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (entries[middle].slot <= slot)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/// Units begin, begin + step, … below `end` of a piece. A decoded place is good until the row ends: long rows are
/// decoded seldom.
template <class T>
RESHARD_HOST_DEVICE inline void copyUnits(const CopyTableView &table, const CopyEntry &entry, uint32_t begin,
                                          uint32_t end, uint32_t step) {
  const TableShape shape = table.shapes[entry.shape];
  uint32_t within = shape.rowUnits; // of its row; rowUnits: the place is not known
  uint64_t source = 0, target = 0;  // of the row
  RESHARD_NO_UNROLL
  for (uint32_t unit = begin; unit < end; unit += kBatch * step) {
    T values[kBatch];
    uint64_t addresses[kBatch];
    RESHARD_UNROLL
    for (uint32_t k = 0; k < kBatch; ++k) {
      const uint32_t at = unit + k * step;
      if (at < end) {
        if (within >= shape.rowUnits) {
          const uint32_t row = (entry.first + at) / shape.rowUnits;
          within = entry.first + at - row * shape.rowUnits;
          source = entry.source;
          target = entry.target;
          addRow(table.loops, shape, row, source, target);
        }
        const uint64_t offset = uint64_t{within} * sizeof(T);
        values[k] = entry.source ? load<T>(source + offset) : T{};
        addresses[k] = target + offset;
        within += step;
      }
    }
    RESHARD_UNROLL
    for (uint32_t k = 0; k < kBatch; ++k)
      if (unit + k * step < end)
        store<T>(addresses[k], values[k]);
  }
}

/// Slots [begin, end) of a piece, from its first: every step-th unit from `lane` on.
RESHARD_HOST_DEVICE inline void copySlots(const CopyTableView &table, const CopyEntry &entry, uint64_t begin,
                                          uint64_t end, uint32_t lane, uint32_t step) {
  const auto perSlot = kSlotBytes / entry.width;
  const auto first = static_cast<uint32_t>(begin * perSlot) + lane;
  const auto last = static_cast<uint32_t>(end * perSlot < entry.units ? end * perSlot : entry.units);
  switch (entry.width) {
  case 16:
    return copyUnits<Unit16>(table, entry, first, last, step);
  case 8:
    return copyUnits<unsigned long long>(table, entry, first, last, step);
  case 4:
    return copyUnits<unsigned>(table, entry, first, last, step);
  case 2:
    return copyUnits<unsigned short>(table, entry, first, last, step);
  default:
    return copyUnits<unsigned char>(table, entry, first, last, step);
  }
}

} // namespace detail

/// The first slot of a block: all have equally many tiles, whatever pieces they lie in.
RESHARD_HOST_DEVICE inline uint64_t firstSlot(uint64_t slots, uint32_t block, uint32_t blocks) {
  const uint64_t tiles = (slots + kTileSlots - 1) / kTileSlots;
  const uint64_t slot = (tiles / blocks * block + tiles % blocks * block / blocks) * kTileSlots;
  return slot < slots ? slot : slots;
}

/// What thread `thread` of block `block` of `blocks` copies; all threads of all blocks copy every byte once. The warps
/// of a block take its tiles in turn. In a tile of one piece neighbours copy neighbouring units; in one of several each
/// thread copies slots of its own.
RESHARD_HOST_DEVICE inline void copyThread(const CopyTableView &table, uint32_t block, uint32_t blocks,
                                           uint32_t thread) {
  const uint64_t begin = firstSlot(table.slots, block, blocks), end = firstSlot(table.slots, block + 1, blocks);
  if (begin == end)
    return;
  const uint32_t lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const uint32_t after = detail::findEntry(table.entries, 0, table.entryCount, end - 1) + 1;
  uint32_t entry = 0;
  RESHARD_NO_UNROLL
  for (uint64_t tile = begin + uint64_t{warp} * kTileSlots; tile < end;
       tile += kBlockThreads / kWarpThreads * kTileSlots) {
    const uint64_t tileEnd = tile + kTileSlots < end ? tile + kTileSlots : end;
    if (table.entries[entry + 1].slot <= tile)
      entry = detail::findEntry(table.entries, entry + 1, after, tile);
    const bool together = table.entries[entry + 1].slot >= tileEnd;
    RESHARD_NO_UNROLL
    for (uint64_t slot = together ? tile : tile + lane; slot < tileEnd; slot += together ? kTileSlots : kWarpThreads) {
      const CopyEntry &own = table.entries[together ? entry : detail::findEntry(table.entries, entry, after, slot)];
      detail::copySlots(table, own, slot - own.slot, (together ? tileEnd : slot + 1) - own.slot, together ? lane : 0,
                        together ? kWarpThreads : 1);
    }
  }
}

} // namespace reshard::kernels
