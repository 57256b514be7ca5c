// SPDX-License-Identifier: Apache-2.0
// The messages of a peer that have arrived over UCX are received in the order in which they were sent, in whatever
// order UCX passes them on.

#include "executor/backends/ucx_arrivals.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

namespace reshard::ucx {
namespace {

/// A message whose data are its number.
bool add(ArrivalQueue &queue, uint64_t number, uint32_t tag) {
  return queue.add({.header = {.number = number, .bytes = sizeof number, .tag = tag}}, &number, sizeof number);
}
uint64_t dataOf(const ArrivalQueue &queue, const Arrival &arrival) {
  uint64_t number = 0;
  std::memcpy(&number, queue.bytesOf(arrival), sizeof number);
  return number;
}

TEST(ArrivalQueue, AMessageThatOvertookAnotherOfItsTagWaitsForIt) {
  ArrivalQueue queue;
  ASSERT_TRUE(add(queue, 1, 7));
  EXPECT_FALSE(queue.match());
  EXPECT_EQ(queue.find(7), nullptr);
  ASSERT_TRUE(add(queue, 0, 7));
  EXPECT_FALSE(queue.match()); // no receive waits
  for (const uint64_t number : {0, 1}) {
    const Arrival *const found = queue.find(7);
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(dataOf(queue, *found), number);
    queue.free(*found);
    queue.remove(found);
  }
}

TEST(ArrivalQueue, AReceiveThatWaitsGetsTheFirstMessageOfItsTag) {
  ArrivalQueue queue;
  queue.wait(/*request=*/20, /*tag=*/5);
  queue.wait(21, 5);
  ASSERT_TRUE(add(queue, 2, 5));
  ASSERT_TRUE(add(queue, 1, 6));
  EXPECT_FALSE(queue.match());
  ASSERT_TRUE(add(queue, 0, 5));
  for (const auto &[request, number] : {std::pair<size_t, uint64_t>{20, 0}, {21, 2}}) {
    const std::optional<ArrivalQueue::Match> match = queue.match();
    ASSERT_TRUE(match);
    EXPECT_EQ(match->request, request);
    EXPECT_EQ(dataOf(queue, match->arrival), number);
  }
  EXPECT_FALSE(queue.match());
  ASSERT_NE(queue.find(6), nullptr);
  EXPECT_EQ(queue.admitted(), 3u);
}

/// By the definition: receive i of a tag gets message i of that tag.
TEST(ArrivalQueue, RandomOrders) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    std::vector<uint32_t> tags(1 + random() % kWindow);
    for (uint32_t &tag : tags)
      tag = random() % 3;
    std::vector<uint64_t> numbers(tags.size());
    std::vector<size_t> receives(tags.size());
    for (size_t i = 0; i < tags.size(); ++i)
      numbers[i] = receives[i] = i;
    std::shuffle(numbers.begin(), numbers.end(), random); // of arrival
    std::shuffle(receives.begin(), receives.end(), random);
    std::vector<uint64_t> got(tags.size(), ~uint64_t{0}); // by receive
    const auto take = [&](ArrivalQueue &queue, size_t receive, const Arrival &arrival) {
      got[receive] = dataOf(queue, arrival);
      queue.free(arrival);
    };
    ArrivalQueue queue;
    for (size_t arrived = 0, received = 0; arrived + received < 2 * tags.size();) {
      if (received == tags.size() || (arrived < tags.size() && random() % 2)) {
        const uint64_t number = numbers[arrived++];
        ASSERT_TRUE(add(queue, number, tags[number]));
        while (const auto match = queue.match())
          take(queue, match->request, match->arrival);
      } else {
        const size_t receive = receives[received++];
        if (const Arrival *const found = queue.find(tags[receive])) {
          const Arrival arrival = *found;
          queue.remove(found);
          take(queue, receive, arrival);
        } else {
          queue.wait(receive, tags[receive]);
        }
      }
    }
    for (uint32_t tag = 0; tag < 3; ++tag) {
      std::vector<uint64_t> sent, delivered;
      for (size_t i = 0; i < tags.size(); ++i)
        if (tags[i] == tag)
          sent.push_back(i);
      for (const size_t receive : receives)
        if (tags[receive] == tag)
          delivered.push_back(got[receive]);
      EXPECT_EQ(delivered, sent);
    }
  }
}

TEST(ArrivalQueue, RefusesWhatBreaksTheProtocol) {
  ArrivalQueue queue;
  const std::byte data[kEagerBytes + 1] = {};
  int descriptor = 0;
  ASSERT_TRUE(add(queue, 0, 1));
  EXPECT_FALSE(add(queue, 0, 1)); // its number is taken
  EXPECT_FALSE(queue.match());
  EXPECT_FALSE(add(queue, 0, 1)); // and was before
  EXPECT_FALSE(queue.add({.header = {.number = 1, .bytes = 8}}, data, 7));
  EXPECT_FALSE(queue.add({.header = {.number = 1, .bytes = sizeof data}}, data, sizeof data));
  EXPECT_FALSE(queue.add({.header = {.number = 1, .bytes = kMaxChannelBytes + 1}, .descriptor = &descriptor}, nullptr,
                         kMaxChannelBytes + 1));
  EXPECT_FALSE(queue.add({.header = {.number = 1, .bytes = 8}, .descriptor = &descriptor}, nullptr, 9));
  EXPECT_FALSE(queue.add({.header = {.number = 1, .bytes = 8, .id = kReadMe}}, data, 8));
  for (uint64_t number = 1; number < kWindow; ++number)
    ASSERT_TRUE(add(queue, number, 1));
  EXPECT_FALSE(add(queue, kWindow, 1)); // the inbox is full
  EXPECT_TRUE(
      queue.add({.header = {.number = kWindow, .bytes = 1 << 20}, .descriptor = &descriptor}, nullptr, 1 << 20));
  EXPECT_EQ(queue.takeAll().back().descriptor, &descriptor);
  EXPECT_FALSE(queue.match());
}

} // namespace
} // namespace reshard::ucx
