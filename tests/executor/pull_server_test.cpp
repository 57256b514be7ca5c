// SPDX-License-Identifier: Apache-2.0
// The server of a source rank, asked by frames of a client that the test writes: what it serves, and what it confirms.

#include "executor/pull/server.h"
#include "tests/executor/local_messenger.h"
#include "tests/executor/ranks.h"
#include "tests/lib/folder.h"

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
    tests::compile("version: 1\nmodel: {dtype: bf16, tensors: {a: [64, 8]}}\nsource: {mesh: {tp: 1}}\ntarget: {mesh: "
                   "{tp: 1}, ranks: 1..1, replicas: 2}\n",
                   folder_ / "plan");
    ASSERT_EQ(Plan::open(folder_ / "plan", plan_).message(), "");
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
  Frame ask(FrameKind kind, std::initializer_list<uint64_t> words) {
    EXPECT_EQ(client_->send(peer_, makeFrame(kind, words)).message(), "");
    for (const Deadline deadline = deadlineIn(10); !passed(deadline);)
      if (std::optional<MessengerEvent> event = client_->poll(); event && event->kind == MessengerEvent::kArrived) {
        if (event->dataBytes > 0) {
          data_.resize(event->dataBytes);
          EXPECT_EQ(client_->receive(peer_, event->data, data_.data(), 1).message(), "");
        }
        return event->frame;
      }
    ADD_FAILURE() << "the server does not answer";
    return {};
  }
  /// The kind of the answer to a fetch of the whole message.
  Frame fetch(uint64_t version, uint64_t birth) {
    return ask(FrameKind::fetch, {version, message_, 0, kBytes, 0, 0, birth});
  }
  /// Whether the bytes that were read under a lease are confirmed.
  bool confirmed(uint64_t version, uint64_t lease) {
    const Frame answer = ask(FrameKind::confirm, {version, lease});
    EXPECT_EQ(kindOf(answer), FrameKind::confirmed);
    return answer.words[2] != 0;
  }

  const tests::TemporaryFolder folder_;
  std::unique_ptr<Plan> plan_;
  std::optional<tests::RankMemory> memory_;
  MessageTable table_;
  Progress progress_{0};
  tests::LocalNetwork network_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Messenger> client_;
  uint32_t peer_ = 0;
  uint64_t message_ = 0;
  std::vector<std::byte> data_;
};

constexpr uint64_t kNow = UINT64_MAX; // a birth after that of every server

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

} // namespace
