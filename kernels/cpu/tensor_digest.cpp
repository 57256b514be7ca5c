// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/tensor_digest.h"

#include "kernels/cpu/transpose.h"
#include "kernels/tensor_digest_words.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

namespace reshard::kernels {

namespace {

static_assert(std::endian::native == std::endian::little, "words are little-endian");

constexpr uint64_t kWord = sizeof(uint32_t), kBlockBytes = kBlockWords * kWord;

SumWords sumWords(CpuLevel level) {
#if defined(__x86_64__)
  if (level >= CpuLevel::Avx2) // AVX-512 is faster in the caches, but not from memory
    return sumWordsAvx2;
#endif
  (void)level;
  return sumWordsPortable;
}

/// Adds a part of the word at a place: `count` bytes, the first of which is byte `before` of the word.
void addPart(WordSums &sums, uint64_t place, const std::byte *data, uint64_t before, uint64_t count) {
  uint32_t part = 0;
  for (uint64_t k = 0; k < count; ++k)
    part |= std::to_integer<uint32_t>(data[k]) << 8 * (before + k);
  sums.add(place, part);
}

uint32_t wordAt(const std::byte *data) {
  uint32_t word;
  std::memcpy(&word, data, kWord);
  return word;
}

/// Copies elements to adjacent memory.
template <size_t Item> void gather(std::byte *target, const std::byte *source, int64_t step, uint64_t count) {
  for (uint64_t k = 0; k < count; ++k)
    std::memcpy(target + k * Item, source + static_cast<int64_t>(k) * step, Item);
}

} // namespace

WordSums sumWordsPortable(const std::byte *data, uint64_t place, uint64_t count) {
  WordSums sums{};
  for (uint64_t k = 0; k < count; ++k)
    sums.add(place + k, wordAt(data + k * kWord));
  return sums;
}

void TensorDigest::addBytes(const std::byte *data, uint64_t begin, uint64_t bytes, CpuLevel level) {
  const SumWords sumWhole = sumWords(level);
  const bool anyWord = bytes >= kWord; // then parts of words are read as words that lie in the data
  for (const uint64_t end = begin + bytes; begin < end;) {
    const uint64_t block = begin / kBlockBytes, blockEnd = std::min(end, (block + 1) * kBlockBytes);
    WordSums sums{};
    const auto place = [&] { return begin / kWord % kBlockWords; };
    const auto skip = [&](uint64_t count) {
      begin += count;
      data += count;
    };
    if (const uint64_t before = begin % kWord; before > 0) {
      const uint64_t count = std::min(kWord - before, blockEnd - begin);
      if (anyWord && count == kWord - before)
        sums.add(place(), wordAt(data) << 8 * before);
      else
        addPart(sums, place(), data, before, count);
      skip(count);
    }
    if (const uint64_t words = (blockEnd - begin) / kWord; words > 0) {
      sums.add(sumWhole(data, place(), words));
      skip(words * kWord);
    }
    if (const uint64_t count = blockEnd - begin; count > 0) {
      if (anyWord)
        sums.add(place(), wordAt(data + count - kWord) >> 8 * (kWord - count));
      else
        addPart(sums, place(), data, 0, count);
      skip(count);
    }
    for (size_t s = 0; s < 2; ++s)
      this->sums[s] += sums.of[s] * blockKey(block, s);
  }
}

void TensorDigest::add(const std::byte *data, size_t item, int64_t step, uint64_t first, uint64_t count,
                       CpuLevel level) {
  if (step == static_cast<int64_t>(item) || count == 1)
    return addBytes(data, first * item, count * item, level);
  std::byte together[4096];
  const auto copy = item == 1 ? gather<1> : item == 2 ? gather<2> : item == 4 ? gather<4> : gather<8>;
  for (uint64_t done = 0; done < count;) {
    const uint64_t some = std::min<uint64_t>(count - done, sizeof together / item);
    copy(together, data + static_cast<int64_t>(done) * step, step, some);
    addBytes(together, (first + done) * item, some * item, level);
    done += some;
  }
}

void TensorDigest::add(const std::byte *data, size_t item, const Transposed &matrix, CpuLevel level) {
  // A tile has a cache line of each column of the matrix, and rows that are long enough for addBytes.
  constexpr uint64_t kTileRow = 1024;
  alignas(kLine) std::byte tile[kLine * kTileRow];
  const uint64_t tileRows = kLine / item, tileColumns = kTileRow / item;
  for (uint64_t column = 0; column < matrix.columns; column += tileColumns)
    for (uint64_t row = 0; row < matrix.rows; row += tileRows) {
      const uint64_t rows = std::min(tileRows, matrix.rows - row),
                     columns = std::min(tileColumns, matrix.columns - column);
      transposeBlock(level, nullptr,
                     {.target = tile,
                      .source = data + row * item + static_cast<int64_t>(column) * matrix.step,
                      .elementBytes = item,
                      .outer = {rows, static_cast<int64_t>(item), static_cast<int64_t>(kTileRow)},
                      .inner = {columns, matrix.step, static_cast<int64_t>(item)}});
      for (uint64_t r = 0; r < rows; ++r)
        addBytes(tile + r * kTileRow, (matrix.first + (row + r) * matrix.rowIndices + column) * item, columns * item,
                 level);
    }
}

std::string TensorDigest::text() const {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(sums[0]),
                static_cast<unsigned long long>(sums[1]));
  return text;
}

} // namespace reshard::kernels
