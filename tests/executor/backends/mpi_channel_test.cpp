// SPDX-License-Identifier: Apache-2.0
// The channel of transport `mpi` in one process that no launcher started: messages to itself.

#include "executor/interfaces/channel.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

using namespace reshard;

namespace {

/// Sends 3 bytes to itself where 5 are expected. Ends the process, with 0 if the receive fails as it must.
[[noreturn]] void receiveShortMessage() {
  const Result<std::unique_ptr<Channel>> opened = openChannel("mpi", {});
  std::string error = opened.status().message();
  if (opened.ok()) {
    Channel &channel = **opened;
    channel.reserve(2);
    std::byte sent[3] = {}, received[5] = {};
    Status status = channel.receive(0, channel.rank(), 1, received, sizeof received);
    if (status.ok())
      status = channel.send(1, channel.rank(), 1, sent, sizeof sent);
    bool done = false;
    for (int i = 0; i < 10'000 && status.ok() && !done; ++i) {
      const Result<bool> tested = channel.test(0);
      status = tested.status();
      done = tested.ok() && *tested;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    error = done ? "it was received" : status.message();
  }
  std::fprintf(stderr, "%s\n", error.c_str());
  std::_Exit(error == "received a message of 3 bytes, expected 5" ? 0 : 1);
}

} // namespace

TEST(MpiChannel, AMessageThatIsShorterThanItsReceiveIsAnError) {
#ifndef RESHARD_MPI
  GTEST_SKIP() << "built without MPI";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe"); // a process of its own
  EXPECT_EXIT(receiveShortMessage(), testing::ExitedWithCode(0), "received a message of 3 bytes, expected 5");
}
