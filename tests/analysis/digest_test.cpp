// SPDX-License-Identifier: Apache-2.0
// TensorDigest: the same for every partition, and different after small changes.
#include "analysis/digest/digest.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>

namespace reshard::analysis {
namespace {

std::vector<std::byte> randomBytes(size_t bytes) {
  std::mt19937_64 random(1);
  std::vector<std::byte> data(bytes);
  for (std::byte &byte : data)
    byte = static_cast<std::byte>(random());
  return data;
}

TensorDigest whole(const std::vector<std::byte> &data, size_t item) {
  TensorDigest digest;
  digest.add(data.data(), item, 0, 1, data.size() / item);
  return digest;
}

} // namespace

TEST(TensorDigest, IsTheSumOverAnyPartition) {
  const std::vector<std::byte> data = randomBytes(8 * 1001);
  std::mt19937_64 random(2);
  for (const size_t item : {1, 2, 4, 8}) {
    const size_t count = data.size() / item;
    const TensorDigest wanted = whole(data, item);
    TensorDigest runs;
    for (size_t at = 0; at < count;) {
      const size_t length = std::min<size_t>(1 + random() % 37, count - at);
      runs.add(data.data() + at * item, item, at, 1, length);
      at += length;
    }
    EXPECT_EQ(runs, wanted) << item;
    // The elements 0, 3, 6, … next to each other, then 1, 4, …: a sharding with step 3.
    TensorDigest strided;
    for (size_t first = 0; first < 3; ++first) {
      std::vector<std::byte> local;
      for (size_t at = first; at < count; at += 3)
        local.insert(local.end(), data.begin() + static_cast<ptrdiff_t>(at * item),
                     data.begin() + static_cast<ptrdiff_t>((at + 1) * item));
      strided.add(local.data(), item, first, 3, local.size() / item);
    }
    EXPECT_EQ(strided, wanted) << item;
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

TEST(TensorDigest, DoesNotChangeBetweenReleases) { // digests are compared across machines and days
  std::vector<std::byte> data(16);
  for (size_t i = 0; i < data.size(); ++i)
    data[i] = static_cast<std::byte>(i);
  EXPECT_EQ(whole(data, 1).text(), "c59721fe52eb48de613d0cc49285921a");
  EXPECT_EQ(whole(data, 2).text(), "7bcca525ef7cd50c47cd2c8f1ad21677");
  EXPECT_EQ(whole(data, 8).text(), "0f16c613f66b4dff9cd530c290636b6b");
}

} // namespace reshard::analysis
