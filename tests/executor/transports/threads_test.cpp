// SPDX-License-Identifier: Apache-2.0
// Transport `threads` while one of its threads is held back in a copy.

#include "tests/executor/ranks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <memory>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

using namespace reshard;
using namespace reshard::tests;

namespace {

using Clock = std::chrono::steady_clock;

void sleepABit() {
  const timespec millisecond{0, 1'000'000};
  nanosleep(&millisecond, nullptr);
}

/// Memory that no thread can read at first. The thread that makes the object waits at its first read until another one
/// reads, too, and that one waits for `seconds`. Each read makes its page readable. No thread reads the memory when the
/// object ends.
class HeldMemory {
public:
  HeldMemory(std::byte *memory, size_t bytes, double seconds) : memory_(memory), bytes_(bytes), seconds_(seconds) {
    self_ = this;
    struct sigaction action{};
    action.sa_sigaction = [](int, siginfo_t *info, void *) { self_->read(static_cast<std::byte *>(info->si_addr)); };
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    EXPECT_EQ(sigaction(SIGSEGV, &action, &before_), 0);
    EXPECT_EQ(mprotect(memory_, bytes_, PROT_NONE), 0);
  }
  ~HeldMemory() {
    EXPECT_EQ(mprotect(memory_, bytes_, PROT_READ | PROT_WRITE), 0);
    EXPECT_EQ(sigaction(SIGSEGV, &before_, nullptr), 0);
  }
  HeldMemory(const HeldMemory &) = delete;
  HeldMemory &operator=(const HeldMemory &) = delete;

  bool held() const { return held_; }

private:
  void read(std::byte *at) {
    if (at < memory_ || at >= memory_ + bytes_) { // a fault that is not ours
      sigaction(SIGSEGV, &before_, nullptr);
      return;
    }
    const auto since = [](Clock::time_point begin) {
      return std::chrono::duration<double>(Clock::now() - begin).count();
    };
    if (pthread_equal(pthread_self(), thread_))
      while (!held_ && since(made_) < kMaxSeconds)
        sleepABit();
    else if (!held_.exchange(true))
      for (const Clock::time_point begin = Clock::now(); since(begin) < seconds_;)
        sleepABit();
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    mprotect(reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(at) / page * page), page, PROT_READ | PROT_WRITE);
  }

  static constexpr double kMaxSeconds = 20;
  inline static HeldMemory *self_ = nullptr;

  std::byte *const memory_; // begins a page
  const size_t bytes_;
  const double seconds_;
  const pthread_t thread_ = pthread_self();
  const Clock::time_point made_ = Clock::now();
  std::atomic<bool> held_{false};
  struct sigaction before_{};
};

} // namespace

// The other thread does the rest of the level meanwhile. If it began the next level, it would forward bytes that have
// not arrived.
TEST(Threads, ALevelWaitsForTheLastCopyOfTheOneBefore) {
  const std::unique_ptr<Plan> plan = compiledPlan(kRelayJobs[2]); // each rank forwards what it receives
  const Ranks expected = copied(*plan, 1), ranks = fillRanks(*plan, 1);
  std::unique_ptr<Transport> transport = makeThreadsTransport(2);
  ASSERT_EQ(transport->prepare(*plan, locals(ranks), {}).message(), "");
  {
    const HeldMemory source(ranks[0]->local.memory[0][0], ranks[0]->bytes().size(), 0.2);
    EXPECT_EQ(transport->run({}).message(), "");
    EXPECT_TRUE(source.held());
    transport.reset(); // ends its threads, also after an error
  }
  expectSame(expected, ranks);
}
