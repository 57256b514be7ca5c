// SPDX-License-Identifier: Apache-2.0
// A table of strided copies, and the part of it that one thread of a launch copies. Plain structs and inline functions,
// so that a GPU and the host run the same code on the same table; tests run it thread by thread.
#pragma once

#include "kernels/host_device.h"

namespace reshard::kernels {

/// A loop of a shape. Strides are in bytes and may be negative.
struct TableLoop {
  int64_t sourceStride, targetStride;
  uint32_t count, reserved;
};

/// Loops [firstLoop, firstLoop + loopCount), outermost first, around rows of rowUnits units.
struct TableShape {
  uint32_t rowUnits, firstLoop, loopCount;
};

/// Units [first, first + units) of a shape, numbered along rows, the innermost loop fastest. The shape has fewer than
/// 2^32 units.
struct CopyEntry {
  uint64_t source, target; // addresses of the shape's first unit; source 0: zeros
  uint64_t slot;           // its first slot in the table
  uint32_t first, units;
  uint32_t shape;
  uint32_t width; // bytes of a unit, to which both sides are aligned: 16, 8, 4, 2 or 1
};

/// Work is divided into slots of kSlotBytes. Each entry begins a new slot, so a slot belongs to one entry.
constexpr uint32_t kSlotBytes = 16;

struct CopyTableView {
  const CopyEntry *entries; // entryCount of them, then a sentinel whose slot is `slots`
  const TableShape *shapes;
  const TableLoop *loops;
  uint64_t slots;
  uint32_t entryCount;
};

/// kBatch: units that a thread loads before it stores them. kTileSlots: slots that a warp takes at a time.
constexpr uint32_t kBatch = 4, kTileSlots = kWarpThreads * kBatch;

namespace detail {

struct alignas(16) Unit16 {
  uint32_t words[4];
};

/// Loads a value. Bytes that move once bypass the caches; `Again` keeps bytes that are read again.
template <class T, bool Again = false> RESHARD_HOST_DEVICE inline T load(uint64_t address) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 16) {
    const auto *at = pointerTo<const uint4>(address);
    const uint4 v = Again ? *at : __ldcs(at);
    return {{v.x, v.y, v.z, v.w}};
  } else {
    return Again ? *pointerTo<const T>(address) : __ldcs(pointerTo<const T>(address));
  }
#else
  T value;
  std::memcpy(&value, pointerTo<const void>(address), sizeof value);
  return value;
#endif
}

template <class T> RESHARD_HOST_DEVICE inline void store(uint64_t address, const T &value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 16)
    __stcs(pointerTo<uint4>(address), make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]));
  else
    __stcs(pointerTo<T>(address), value);
#else
  std::memcpy(pointerTo<void>(address), &value, sizeof value);
#endif
}

/// Advances both addresses from the first row of a shape to row `row`.
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

/// Returns the entry in [low, high) that contains `slot`.
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

/// Passes units begin, begin + step, … below `end` of an entry to the sink. A row's addresses are computed once per
/// row, so long rows need few divisions.
template <class T, class Sink>
RESHARD_HOST_DEVICE inline void moveUnits(const CopyTableView &table, const CopyEntry &entry, uint32_t begin,
                                          uint32_t end, uint32_t step, Sink &sink) {
  const TableShape shape = table.shapes[entry.shape];
  uint32_t within = shape.rowUnits; // the unit within its row; rowUnits: the row's addresses must be computed
  uint64_t source = 0, target = 0;  // the row's addresses
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
        sink.put(addresses[k], values[k]);
  }
}

/// Slots [begin, end) of an entry, counted from its first slot, of which a thread moves every step-th unit, starting at
/// `lane`.
struct SlotRange {
  uint64_t begin, end;
  uint32_t lane, step;
};

template <class Sink>
RESHARD_HOST_DEVICE inline void moveSlots(const CopyTableView &table, const CopyEntry &entry, const SlotRange &slots,
                                          Sink &sink) {
  const auto perSlot = kSlotBytes / entry.width;
  const uint32_t first = static_cast<uint32_t>(slots.begin * perSlot) + slots.lane, step = slots.step;
  const auto last = static_cast<uint32_t>(slots.end * perSlot < entry.units ? slots.end * perSlot : entry.units);
  switch (entry.width) {
  case 16:
    return moveUnits<Unit16>(table, entry, first, last, step, sink);
  case 8:
    return moveUnits<unsigned long long>(table, entry, first, last, step, sink);
  case 4:
    return moveUnits<unsigned>(table, entry, first, last, step, sink);
  case 2:
    return moveUnits<unsigned short>(table, entry, first, last, step, sink);
  default:
    return moveUnits<unsigned char>(table, entry, first, last, step, sink);
  }
}

} // namespace detail

/// Returns the first slot of a block. All blocks have equally many tiles, independent of entry boundaries.
RESHARD_HOST_DEVICE inline uint64_t firstSlot(uint64_t slots, uint32_t block, uint32_t blocks) {
  const uint64_t tiles = (slots + kTileSlots - 1) / kTileSlots;
  const uint64_t slot = (tiles / blocks * block + tiles % blocks * block / blocks) * kTileSlots;
  return slot < slots ? slot : slots;
}

/// The units of thread `thread` of block `block` of `blocks`, for a sink: begin(entry) before units of another entry,
/// and put(target address, value) for each. All threads of all blocks have every unit once. The warps of a block take
/// its tiles in turn. In a tile of one entry, adjacent threads have adjacent units; in a tile of several entries, each
/// thread has its own slots.
template <class Sink>
RESHARD_HOST_DEVICE inline void moveThread(const CopyTableView &table, uint32_t block, uint32_t blocks, uint32_t thread,
                                           Sink &sink) {
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
      const uint32_t number = together ? entry : detail::findEntry(table.entries, entry, after, slot);
      const CopyEntry &own = table.entries[number];
      sink.begin(number);
      detail::moveSlots(table, own,
                        {slot - own.slot, (together ? tileEnd : slot + 1) - own.slot, together ? lane : 0,
                         together ? kWarpThreads : 1},
                        sink);
    }
  }
}

/// A sink that stores each unit at its target.
struct StoredUnits {
  RESHARD_HOST_DEVICE void begin(uint32_t) {}
  template <class T> RESHARD_HOST_DEVICE void put(uint64_t address, const T &value) { detail::store(address, value); }
};

/// The copies of a thread.
RESHARD_HOST_DEVICE inline void copyThread(const CopyTableView &table, uint32_t block, uint32_t blocks,
                                           uint32_t thread) {
  StoredUnits sink;
  moveThread(table, block, blocks, thread, sink);
}

} // namespace reshard::kernels
