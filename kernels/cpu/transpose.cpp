// SPDX-License-Identifier: Apache-2.0
// Reads a tile of source lines into a buffer in target order, by shuffles of registers where the CPU has them, and
// writes the buffer as whole lines.
#include "kernels/cpu/transpose.h"

#include <algorithm>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace reshard::kernels {

namespace {

/// Bytes of a target row of a tile: several lines, so that each visit of a target page writes more than one line.
constexpr uint64_t kTileRow = 256;

/// A tile in target order, with as many rows as a source line has elements.
template <size_t Bytes> struct Tile {
  static constexpr uint64_t kRows = kLine / Bytes;
  alignas(kLine) std::byte bytes[kRows * kTileRow];
};

/// Returns whether elements are contiguous in the source for `along` and in the target for `across`.
bool walks(uint64_t elementBytes, const Loop &along, const Loop &across) {
  const auto element = static_cast<int64_t>(elementBytes);
  return along.sourceStride == element && across.targetStride == element;
}

template <size_t Bytes>
void copyElements(std::byte *target, const std::byte *source, const Loop &along, const Loop &across) {
  for (uint64_t a = 0; a < across.count; ++a)
    for (uint64_t i = 0; i < along.count; ++i)
      std::memcpy(target + a * Bytes + static_cast<int64_t>(i) * along.targetStride,
                  source + static_cast<int64_t>(a) * across.sourceStride + i * Bytes, Bytes);
}

#if defined(__x86_64__)

template <size_t Bytes, bool High> __m128i interleave(__m128i a, __m128i b) {
  switch (Bytes) {
  case 1:
    return High ? _mm_unpackhi_epi8(a, b) : _mm_unpacklo_epi8(a, b);
  case 2:
    return High ? _mm_unpackhi_epi16(a, b) : _mm_unpacklo_epi16(a, b);
  case 4:
    return High ? _mm_unpackhi_epi32(a, b) : _mm_unpacklo_epi32(a, b);
  default:
    return High ? _mm_unpackhi_epi64(a, b) : _mm_unpacklo_epi64(a, b);
  }
}

/// Transposes squares of 16 bytes a side in registers. A perfect shuffle of the registers' elements rotates the bits of
/// an element's index by one; log2(side) shuffles exchange row and column.
template <size_t Bytes>
void fillTileInRegisters(Tile<Bytes> &tile, const std::byte *source, int64_t stride, uint64_t count) {
  constexpr uint64_t kSide = 16 / Bytes;
  for (uint64_t row = 0; row < count; row += kSide, source += kSide * stride) {
    for (uint64_t i = 0; i < kSide; ++i)
      __builtin_prefetch(source + static_cast<int64_t>(i) * stride + kLine);
    for (uint64_t column = 0; column < kLine; column += 16) {
      __m128i square[kSide], shuffled[kSide];
      for (uint64_t i = 0; i < kSide; ++i)
        square[i] =
            _mm_loadu_si128(reinterpret_cast<const __m128i *>(source + static_cast<int64_t>(i) * stride + column));
      for (uint64_t round = 1; round < kSide; round *= 2) {
        for (uint64_t i = 0; i < kSide / 2; ++i) {
          shuffled[2 * i] = interleave<Bytes, false>(square[i], square[i + kSide / 2]);
          shuffled[2 * i + 1] = interleave<Bytes, true>(square[i], square[i + kSide / 2]);
        }
        std::copy(shuffled, shuffled + kSide, square);
      }
      for (uint64_t i = 0; i < kSide; ++i)
        _mm_store_si128(reinterpret_cast<__m128i *>(tile.bytes + (column / Bytes + i) * kTileRow + row * Bytes),
                        square[i]);
    }
  }
}

#endif

/// Copies one source line of each of `count` rows into the columns of the tile.
template <size_t Bytes>
void fillTile([[maybe_unused]] CpuLevel level, Tile<Bytes> &tile, const std::byte *source, int64_t stride,
              uint64_t count) {
#if defined(__x86_64__)
  if (level > CpuLevel::Portable)
    return fillTileInRegisters(tile, source, stride, count);
#endif
  copyElements<Bytes>(tile.bytes, source, {Tile<Bytes>::kRows, Bytes, kTileRow}, {count, stride, Bytes});
}

/// Elements that are contiguous in the source for `along` and in the target for `across`.
struct Walk {
  std::byte *target;
  const std::byte *source;
  Loop along, across;
};

template <size_t Bytes> void transposeTiles(CpuLevel level, StreamLines stream, const Walk &walk) {
  std::byte *target = walk.target;
  const std::byte *source = walk.source;
  const Loop along = walk.along;
  Loop across = walk.across;
  using Tile = kernels::Tile<Bytes>;
  Tile tile;
  const uint64_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  if (head % Bytes != 0 || along.targetStride % static_cast<int64_t>(kLine) != 0)
    stream = nullptr;
  auto skip = [&](uint64_t count) { // advances past `count` finished elements of `across`
    target += count * Bytes;
    source += static_cast<int64_t>(count) * across.sourceStride;
    across.count -= count;
  };
  auto elements = [&](uint64_t count) {
    copyElements<Bytes>(target, source, along, {count, across.sourceStride, across.targetStride});
    skip(count);
  };
  if (stream)
    elements(std::min(head / Bytes, across.count));
  while (across.count >= Tile::kRows) {
    const uint64_t count = std::min(kTileRow / Bytes, across.count / Tile::kRows * Tile::kRows);
    uint64_t at = 0;
    for (; at + Tile::kRows <= along.count; at += Tile::kRows) {
      fillTile<Bytes>(level, tile, source + at * Bytes, across.sourceStride, count);
      std::byte *to = target + static_cast<int64_t>(at) * along.targetStride;
      if (stream)
        stream({to, tile.bytes, Tile::kRows, count * Bytes / kLine, along.targetStride, kTileRow});
      else
        for (uint64_t i = 0; i < Tile::kRows; ++i)
          std::memcpy(to + static_cast<int64_t>(i) * along.targetStride, tile.bytes + i * kTileRow, count * Bytes);
    }
    copyElements<Bytes>(target + static_cast<int64_t>(at) * along.targetStride, source + at * Bytes,
                        {along.count - at, along.sourceStride, along.targetStride},
                        {count, across.sourceStride, across.targetStride});
    skip(count);
  }
  elements(across.count);
}

} // namespace

bool transposes(const Strided &shape) {
  if (shape.loopCount < 2 || shape.rowBytes > 16 || (shape.rowBytes & (shape.rowBytes - 1)) != 0)
    return false;
  const Loop &outer = shape.loops[shape.loopCount - 2], &inner = shape.loops[shape.loopCount - 1];
  return walks(shape.rowBytes, inner, outer) || walks(shape.rowBytes, outer, inner);
}

uint64_t chunkRows(const Strided &shape, uint64_t bytes) {
  const uint64_t rows = std::max<uint64_t>(1, bytes / shape.rowBytes);
  if (!transposes(shape))
    return rows;
  const uint64_t tiles = kLine / shape.rowBytes * shape.loops[shape.loopCount - 1].count;
  return std::max<uint64_t>(1, rows / tiles) * tiles;
}

void transposeBlock(CpuLevel level, StreamLines stream, const TransposedBlock &block) {
  const bool sourceOrder = walks(block.elementBytes, block.inner, block.outer);
  const Walk walk = {.target = block.target,
                     .source = block.source,
                     .along = sourceOrder ? block.inner : block.outer,
                     .across = sourceOrder ? block.outer : block.inner};
  switch (block.elementBytes) {
  case 1:
    return transposeTiles<1>(level, stream, walk);
  case 2:
    return transposeTiles<2>(level, stream, walk);
  case 4:
    return transposeTiles<4>(level, stream, walk);
  case 8:
    return transposeTiles<8>(level, stream, walk);
  default:
    return transposeTiles<16>(level, stream, walk);
  }
}

} // namespace reshard::kernels
