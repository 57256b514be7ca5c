// SPDX-License-Identifier: Apache-2.0
// The server of a source rank, asked by frames of a client that the test writes: what it serves, and what it confirms.

#include "executor/pull/server.h"
#include "tests/executor/local_messenger.h"
#include "tests/executor/ranks.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::pull;

namespace {

class PullServer : public testing::Test {
protected:
  static constexpr uint64_t kToken = 77;
  static constexpr uint32_t kSource = 0, kTarget = 1;
  static constexpr uint64_t kBytes = 1024; // of the one message

  void SetUp() override {
    plan_ = tests::compiledPlan("version: 1\nmodel: {dtype: bf16, tensors: {a: [64, 8]}}\nsource: {mesh: {tp: 1}}\n"
                                "target: {mesh: {tp: 1}, ranks: 1..1, replicas: 2}\n");
    const Result<Fleet> fleet = Fleet::of(*plan_);
    ASSERT_EQ(fleet.status().message(), "");
    memory_.emplace(*plan_, kSource);
    memory_->fill(5);
    ASSERT_EQ(table_.build(*plan_, *fleet, memory_->local, kSource).message(), "");
    tests::RankMemory receiver(*plan_, kTarget);
    MessageTable received;
    ASSERT_EQ(received.build(*plan_, *fleet, receiver.local, kTarget).message(), "");
    ASSERT_EQ(received.received().size(), 1u);
    message_ = received.received()[0].message;
    ASSERT_EQ(received.received()[0].packing.bytes(), kBytes);
    server_ =
        std::make_unique<Server>(network_.open(), table_, progress_,
                                 ServerOptions{.fleet = *fleet, .worldRank = kSource, .token = kToken, .idle = {}});
    server_->start();
    client_ = network_.open("other host");
    Result<uint32_t> peer = client_->connect(server_->address());
    ASSERT_EQ(peer.status().message(), "");
    peer_ = *peer;
    EXPECT_EQ(kindOf(ask(FrameKind::hello, {kToken, kTarget, kProtocol})), FrameKind::welcome);
  }

  /// Sends a frame and returns the answer; without words if none comes within 10 s.
  Frame ask(FrameKind kind, std::initializer_list<uint64_t> words, std::string_view text = {}) {
    EXPECT_EQ(client_->send(peer_, makeFrame(kind, words), text).message(), "");
    for (const Deadline deadline = deadlineIn(10); !passed(deadline);)
      if (std::optional<MessengerEvent> event = client_->poll(); event && event->kind == MessengerEvent::kArrived) {
        if (event->dataBytes > 0) {
          data_.resize(event->dataBytes);
          EXPECT_EQ(client_->receive(peer_, event->data, data_.data(), 1).message(), "");
        }
        text_ = event->text;
        return event->frame;
      }
    ADD_FAILURE() << "the server does not answer";
    return {};
  }
  /// The kind of the answer to a fetch of the whole message.
  Frame fetch(uint64_t version, uint64_t incarnation) {
    return ask(FrameKind::fetch, {version, message_, 0, kBytes, 0, 0, incarnation});
  }
  /// Whether the bytes that were read under a lease are confirmed.
  bool confirmed(uint64_t version, uint64_t lease) {
    const Frame answer = ask(FrameKind::confirm, {version, lease});
    EXPECT_EQ(kindOf(answer), FrameKind::confirmed);
    return answer.words[2] != 0;
  }

  std::unique_ptr<Plan> plan_;
  std::optional<tests::RankMemory> memory_;
  MessageTable table_;
  PullProgress progress_{0};
  tests::LocalNetwork network_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Messenger> client_;
  uint32_t peer_ = 0;
  uint64_t message_ = 0;
  std::vector<std::byte> data_;
  std::string text_; // of the last answer
};

constexpr uint64_t kNow = UINT64_MAX; // an incarnation after that of every server

TEST_F(PullServer, OnlyThePublishedVersionIsServed) {
  EXPECT_EQ(kindOf(fetch(1, kNow)), FrameKind::gone); // none is published
  ASSERT_EQ(server_->publish(3).message(), "");
  EXPECT_EQ(kindOf(fetch(2, kNow)), FrameKind::gone);
  EXPECT_EQ(kindOf(fetch(4, kNow)), FrameKind::gone);
  EXPECT_EQ(kindOf(fetch(3, 1)), FrameKind::gone); // of a process that has ended
  EXPECT_EQ(kindOf(fetch(3, kNow)), FrameKind::data);
}

TEST_F(PullServer, OnlyBytesUnderTheLeaseOfThePublishedVersionAreConfirmed) {
  ASSERT_EQ(server_->publish(3).message(), "");
  EXPECT_FALSE(confirmed(3, 0)); // nothing was read
  const Frame data = fetch(3, kNow);
  ASSERT_EQ(kindOf(data), FrameKind::data);
  const uint64_t lease = data.words[7];
  EXPECT_NE(lease, 0u);
  EXPECT_TRUE(confirmed(3, lease));
  EXPECT_FALSE(confirmed(3, lease + 1));
  EXPECT_FALSE(confirmed(3, 0));
  EXPECT_FALSE(confirmed(2, lease));
  ASSERT_EQ(client_->send(peer_, makeFrame(FrameKind::leave, {3})).message(), "");
  EXPECT_FALSE(confirmed(3, lease));
}

TEST_F(PullServer, DigestsAreThoseOfTheVersionThatWasPublishedLast) {
  const std::string first("\1\0\0\0\0\0\0\0", 8); // buckets 1 and 0
  const auto answer = [&](uint64_t version, uint64_t incarnation, std::string_view buckets) {
    const Frame frame = ask(FrameKind::askDigests, {version, incarnation, 7}, buckets);
    EXPECT_EQ(kindOf(frame), FrameKind::digests);
    EXPECT_TRUE(frame.words[1] == version && frame.words[2] == incarnation && frame.words[3] == 7);
    return static_cast<DigestsAnswer>(frame.words[4]);
  };
  EXPECT_EQ(answer(3, kNow, first), DigestsAnswer::otherVersion); // none is published
  ASSERT_EQ(server_->publish(3, {{{{1, 2}}, 3}, {{{4, 5}}, 6}}).message(), "");
  EXPECT_EQ(answer(2, kNow, first), DigestsAnswer::otherVersion);
  EXPECT_EQ(answer(3, 1, first), DigestsAnswer::otherVersion); // of a process that has ended
  EXPECT_TRUE(text_.empty());
  EXPECT_EQ(answer(3, kNow, first), DigestsAnswer::given);
  ASSERT_EQ(text_.size(), 2 * kDigestBytes);
  for (size_t i = 0; i < 6; ++i)
    EXPECT_EQ(text_[8 * i], "\4\5\6\1\2\3"[i]);
  EXPECT_EQ(answer(3, kNow, {}), DigestsAnswer::given);
  // Requests that no rank with this plan makes are dropped: the answers are those to the next requests.
  for (const std::string &bad :
       {std::string("\2\0\0\0", 4), std::string("\0\0\0", 3), std::string(kMaxFrameText, '\0')})
    EXPECT_EQ(client_->send(peer_, makeFrame(FrameKind::askDigests, {3, kNow, 8}), bad).message(), "");
  EXPECT_EQ(answer(3, kNow, first), DigestsAnswer::given);
  EXPECT_EQ(server_->leases(), 0u);
  ASSERT_EQ(server_->release({}).message(), "");
  EXPECT_EQ(answer(3, kNow, first), DigestsAnswer::given); // of what a rank has pulled
  ASSERT_EQ(server_->publish(4).message(), "");
  EXPECT_EQ(answer(3, kNow, first), DigestsAnswer::otherVersion);
  EXPECT_EQ(answer(4, kNow, first), DigestsAnswer::without);
}

} // namespace
