// SPDX-License-Identifier: Apache-2.0
// Tests of DensePairs against a plain matrix of pairs.

#include "compiler/schedule/dense_pairs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

using namespace reshard;

namespace {

TEST(DensePairs, VisitsUnmatchedPartnersWithBytesLeft) {
  std::mt19937_64 random(5);
  auto oneOf = [&](uint32_t n) { return std::uniform_int_distribution<uint32_t>(0, n - 1)(random); };
  for (const uint32_t size : {1u, 63u, 64u, 65u, 130u}) {
    // Senders and receivers alternate among the ports, so that their numbers differ from those of ports.
    std::vector<bool> sends;
    std::vector<std::pair<uint32_t, uint32_t>> pairs;
    for (uint32_t i = 0; i < size; ++i)
      sends.insert(sends.end(), {true, false});
    for (uint32_t s = 0; s < size; ++s)
      for (uint32_t r = 0; r < size; ++r)
        if (size < 3 || oneOf(3) > 0)
          pairs.emplace_back(2 * s, 2 * r + 1);
    DensePairs dense;
    dense.fill(sends, pairs);
    ASSERT_FALSE(dense.empty());
    std::vector<bool> idle(2 * size, true), left(pairs.size(), true);
    for (int change = 0; change < 200; ++change) {
      const uint32_t port = oneOf(2 * size), pair = oneOf(static_cast<uint32_t>(pairs.size()));
      dense.setIdle(port, idle[port] = !idle[port]);
      dense.setLeft(pairs[pair].first, pairs[pair].second, left[pair] = !left[pair]);

      const uint32_t from = oneOf(2 * size), begin = oneOf(size), stop = oneOf(4);
      std::vector<std::pair<uint32_t, uint32_t>> expected, found; // partner, pair
      for (uint32_t p = 0; p < pairs.size(); ++p) {
        const auto [out, in] = pairs[p];
        if (out != from && in != from)
          continue;
        const uint32_t partner = out == from ? in : out;
        EXPECT_EQ(dense.find(from, partner), left[p] ? p : DensePairs::kNone);
        if (left[p] && idle[partner])
          expected.emplace_back(partner, p);
      }
      std::sort(expected.begin(), expected.end(), [&](const auto &a, const auto &b) {
        return std::pair(a.first / 2 < begin, a.first) < std::pair(b.first / 2 < begin, b.first);
      });
      const bool stops = stop < expected.size();
      expected.resize(std::min<size_t>(expected.size(), stop + 1));
      const uint32_t next = dense.visit(from, begin, [&](uint32_t visited, uint32_t partner) {
        found.emplace_back(partner, visited);
        return found.size() == stop + 1;
      });
      EXPECT_EQ(found, expected);
      EXPECT_EQ(next, stops ? expected.back().first / 2 + 1 : begin);
    }
  }
}

TEST(DensePairs, IsEmptyIfPairsAreFew) {
  std::vector<bool> sends;
  std::vector<std::pair<uint32_t, uint32_t>> pairs; // of each sender with one receiver
  for (uint32_t i = 0; i < 100; ++i) {
    sends.insert(sends.end(), {true, false});
    pairs.emplace_back(2 * i, 2 * i + 1);
  }
  DensePairs dense;
  dense.fill(sends, pairs);
  EXPECT_TRUE(dense.empty());
}

} // namespace
