// SPDX-License-Identifier: Apache-2.0
// TensorDigest: the same for every partition, and different after small changes.
#include "kernels/cpu/tensor_digest.h"

#include "kernels/tensor_digest_words.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>

namespace reshard::kernels {
namespace {

std::vector<std::byte> randomBytes(size_t bytes) {
  std::mt19937_64 random(1);
  std::vector<std::byte> data(bytes);
  for (std::byte &byte : data)
    byte = static_cast<std::byte>(random());
  return data;
}

/// All elements, by every level of this CPU.
TensorDigest whole(const std::vector<std::byte> &data, size_t item) {
  TensorDigest digest;
  digest.add(data.data(), item, static_cast<int64_t>(item), 0, data.size() / item);
  for (const CpuLevel level : {CpuLevel::Portable, CpuLevel::Sse2, CpuLevel::Avx2, CpuLevel::Avx512})
    if (level <= cpuLevel()) {
      TensorDigest again;
      again.add(data.data(), item, static_cast<int64_t>(item), 0, data.size() / item, level);
      EXPECT_EQ(again, digest) << item << " " << static_cast<int>(level);
    }
  return digest;
}

/// The definition, byte by byte.
TensorDigest defined(const std::vector<std::byte> &data) {
  auto mixed = [](uint64_t number) {
    number += 0x9e3779b97f4a7c15;
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9;
    number = (number ^ number >> 27) * 0x94d049bb133111eb;
    return number ^ number >> 31;
  };
  TensorDigest digest;
  for (uint64_t at = 0; at < data.size(); ++at) {
    const uint64_t word = at / 4, value = std::to_integer<uint64_t>(data[at]) << at % 4 * 8;
    const uint64_t keys = mixed(word % 1024);
    digest.sums[0] += value * (keys & 0xffffffff) * (mixed(~(word / 1024 * 2)) | 1);
    digest.sums[1] += value * (keys >> 32) * (mixed(~(word / 1024 * 2 + 1)) | 1);
  }
  return digest;
}

} // namespace

TEST(TensorDigest, IsThatOfItsDefinition) {
  for (const size_t bytes : {0, 8, 64, 4088, 4096, 4104, 3 * 4096 + 40})
    for (const size_t item : {1, 2, 4, 8}) {
      const std::vector<std::byte> data = randomBytes(bytes);
      EXPECT_EQ(whole(data, item), defined(data)) << bytes << " " << item;
    }
}

TEST(TensorDigest, IsTheSumOverAnyPartition) {
  const std::vector<std::byte> data = randomBytes(8 * 2503);
  std::mt19937_64 random(2);
  for (const CpuLevel level : {CpuLevel::Portable, CpuLevel::Avx2, CpuLevel::Avx512})
    for (const size_t item : {1, 2, 4, 8}) {
      if (level > cpuLevel())
        continue;
      const size_t count = data.size() / item;
      const auto step = static_cast<int64_t>(item);
      const TensorDigest wanted = whole(data, item);
      TensorDigest runs;
      for (size_t at = 0; at < count;) {
        const size_t length = std::min<size_t>(1 + random() % 97, count - at);
        runs.add(data.data() + at * item, item, step, at, length, level);
        at += length;
      }
      EXPECT_EQ(runs, wanted) << item;
      // A transposed matrix of 8 columns: the elements of a row of the tensor lie a column apart in memory.
      const size_t rows = count / 8;
      std::vector<std::byte> transposed(rows * 8 * item);
      for (size_t e = 0; e < rows * 8; ++e)
        std::memcpy(&transposed[(e % rows * 8 + e / rows) * item], &data[e * item], item);
      TensorDigest strided;
      for (size_t column = 0; column < 8; ++column)
        strided.add(&transposed[column * item], item, 8 * step, column * rows, rows, level);
      strided.add(&data[rows * 8 * item], item, step, rows * 8, count - rows * 8, level);
      EXPECT_EQ(strided, wanted) << item;
      TensorDigest tiles;
      tiles.add(transposed.data(), item, {.rows = 8, .columns = rows, .step = 8 * step, .first = 0, .rowIndices = rows},
                level);
      tiles.add(&data[rows * 8 * item], item, step, rows * 8, count - rows * 8, level);
      EXPECT_EQ(tiles, wanted) << item;
    }
}

// Tiles at the edges, other memory between the columns, and other elements between the rows.
TEST(TensorDigest, OfTransposedMatrices) {
  const std::vector<std::byte> data = randomBytes(1 << 20);
  for (const CpuLevel level : {CpuLevel::Portable, CpuLevel::Sse2, CpuLevel::Avx2, CpuLevel::Avx512})
    for (const uint64_t item : {1, 2, 4, 8})
      for (const uint64_t rows : {1, 63, 64, 65, 200})
        for (const uint64_t columns : {1, 7, 255, 257}) {
          if (level > cpuLevel())
            continue;
          const auto step = static_cast<int64_t>((rows + 3) * item);
          TensorDigest tiles, elements;
          tiles.add(data.data() + 1, item,
                    {.rows = rows, .columns = columns, .step = step, .first = 5, .rowIndices = columns + 9}, level);
          for (uint64_t row = 0; row < rows; ++row)
            elements.add(data.data() + 1 + row * item, item, step, 5 + row * (columns + 9), columns);
          EXPECT_EQ(tiles, elements) << item << " " << rows << " " << columns;
        }
}

TEST(TensorDigest, SmallChangesChangeIt) {
  std::vector<std::byte> data(64);
  for (const size_t item : {1, 2, 4, 8}) {
    std::set<std::string> seen = {whole(data, item).text()};
    for (size_t byte = 0; byte < data.size(); ++byte) // one bit; of zeros, and next to each other
      for (int bit = 0; bit < 8; ++bit) {
        data[byte] ^= static_cast<std::byte>(1 << bit);
        EXPECT_TRUE(seen.insert(whole(data, item).text()).second) << item << " " << byte << " " << bit;
        data[byte] ^= static_cast<std::byte>(1 << bit);
      }
  }
  // Two elements exchanged, an element added to another: sums of elements would not notice.
  std::vector<std::byte> values = randomBytes(256);
  const TensorDigest before = whole(values, 2);
  for (size_t i = 0; i + 4 <= values.size(); i += 4) {
    std::vector<std::byte> other = values;
    std::swap_ranges(other.begin() + static_cast<ptrdiff_t>(i), other.begin() + static_cast<ptrdiff_t>(i) + 2,
                     other.begin() + static_cast<ptrdiff_t>(i) + 2);
    EXPECT_NE(whole(other, 2), before) << i;
  }
}

TEST(TensorDigest, KeysOfPlacesDiffer) { // so that two exchanged words of a block change each sum
  for (const auto &keys : kPlaceKeys.of) {
    std::set<uint32_t> known(keys.begin(), keys.begin() + kBlockWords);
    EXPECT_EQ(known.size(), kBlockWords);
    EXPECT_FALSE(known.contains(0));
  }
}

TEST(TensorDigest, DoesNotChangeBetweenReleases) { // digests are compared across machines and days
  std::vector<std::byte> data(16);
  for (size_t i = 0; i < data.size(); ++i)
    data[i] = static_cast<std::byte>(i);
  for (const size_t item : {1, 2, 4, 8}) // of the bytes alone
    EXPECT_EQ(whole(data, item).text(), "23602b182b77d590681aebb45b372250");
}

} // namespace reshard::kernels
