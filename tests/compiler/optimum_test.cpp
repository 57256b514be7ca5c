// SPDX-License-Identifier: Apache-2.0
// Compares optimum() with its definition: the largest quotient over all sets of senders.

#include "compiler/transfer/optimum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

using namespace reshard;

namespace {

/// The bytes that only senders of a set can send, with their base.
int64_t bytesOf(uint32_t set, const std::vector<SendClass> &classes, const std::vector<int64_t> &base) {
  int64_t bytes = 0;
  for (size_t p = 0; p < base.size(); ++p)
    bytes += set >> p & 1 ? base[p] : 0;
  for (const SendClass &each : classes)
    if (std::all_of(each.senders.begin(), each.senders.end(), [&](int32_t p) { return set >> p & 1; }))
      bytes += each.bytes;
  return bytes;
}

/// The maximum over sets H of ceil((bytes of classes within H + base of H) / capacity of H). H contains only senders of
/// some class.
int64_t byDefinition(const std::vector<SendClass> &classes, const std::vector<int64_t> &base,
                     const std::vector<int64_t> &capacity) {
  uint32_t occur = 0;
  for (const SendClass &each : classes)
    for (int32_t sender : each.senders)
      occur |= 1u << sender;
  int64_t most = 0;
  for (uint32_t set = 1; set < 1u << base.size(); ++set) {
    if (set & ~occur)
      continue;
    int64_t size = 0;
    for (size_t p = 0; p < base.size(); ++p)
      size += set >> p & 1 ? capacity[p] : 0;
    most = std::max(most, (bytesOf(set, classes, base) + size - 1) / size);
  }
  return most;
}

TEST(Optimum, IsTheLargestQuotient) {
  std::mt19937_64 random(3);
  auto pick = [&](int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random); };
  for (int round = 0; round < 3000; ++round) {
    const int64_t senders = pick(1, 8);
    std::vector<int64_t> base(senders);
    if (pick(0, 1))
      for (int64_t &bytes : base)
        bytes = pick(0, 1) ? 0 : pick(0, 50);
    std::vector<SendClass> classes(pick(0, 7));
    for (SendClass &each : classes) {
      for (int32_t p = 0; p < senders; ++p)
        if (pick(0, 2) == 0)
          each.senders.push_back(p);
      if (each.senders.empty())
        each.senders.push_back(static_cast<int32_t>(pick(0, senders - 1)));
      each.bytes = pick(0, 1) ? pick(0, 20) : pick(0, 1'000'000'000'000);
    }
    std::vector<int64_t> capacity(senders, 1);
    const bool equal = pick(0, 1);
    for (int64_t &each : capacity)
      each = equal ? 1 : pick(0, 1) ? pick(1, 9) : int64_t{1} << pick(0, 40);
    const Optimum found = optimum(classes, base, equal ? std::vector<int64_t>() : capacity);
    ASSERT_EQ(found.load, byDefinition(classes, base, capacity)) << "round " << round;
    uint32_t busiest = 0;
    int64_t size = 0;
    for (int32_t sender : found.busiest) {
      busiest |= 1u << sender;
      size += capacity[sender];
    }
    ASSERT_LE(found.busiestBytes, bytesOf(busiest, classes, base)) << "round " << round;
    ASSERT_EQ(found.load, size == 0 ? 0 : (found.busiestBytes + size - 1) / size) << "round " << round;
    std::vector<int64_t> load(base);
    for (size_t c = 0; c < classes.size(); ++c) {
      int64_t sum = 0;
      for (size_t i = 0; i < classes[c].senders.size(); ++i) {
        ASSERT_GE(found.bytes[c][i], 0);
        sum += found.bytes[c][i];
        load[classes[c].senders[i]] += found.bytes[c][i];
      }
      ASSERT_EQ(sum, classes[c].bytes);
    }
    for (const SendClass &each : classes)
      for (int32_t sender : each.senders)
        ASSERT_LE(load[sender], static_cast<__int128>(found.load) * capacity[sender]);
  }
}

} // namespace
