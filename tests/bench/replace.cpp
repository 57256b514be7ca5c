// SPDX-License-Identifier: Apache-2.0
// bench-replace OLD NEW: the own time of one rank from reshard_replace to the end of prepare. Waits for other processes
// are not included: transport `threads` prepares all ranks in one process, and the time is divided by their number.
// Memory is reserved addresses, which nothing touches.

#include "reshard/reshard.hpp"

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <sys/mman.h>

namespace {

using Clock = std::chrono::steady_clock;

double millisecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// Binds the params of a rank to addresses from `next` on, and sets the hooks that they need.
void bind(reshard::Executor &executor, const reshard::PlanFile &plan, uint32_t rank, std::byte *&next) {
  for (uint32_t e = 0; e < plan.summary().endpoints; ++e) {
    const reshard_endpoint at = plan.endpoint(e);
    for (size_t i = 0; i < at.rank_count; ++i) {
      if (at.ranks[i] != rank)
        continue;
      for (const reshard_param &param : plan.params(e, rank)) {
        executor.bind(e, rank, param.name, next, param.bytes);
        next += (param.bytes + 4095) / 4096 * 4096;
        if (*param.refresh)
          executor.setHook(param.refresh, [](uint32_t) {});
      }
    }
  }
}

void measure(const char *before, const char *after, std::byte *next) {
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  options.threads = 1;
  for (int run = 0; run < 3; ++run) {
    reshard::Executor one(before, options, {0});
    Clock::time_point begin = Clock::now();
    one.replace(after, {0});
    std::printf("replace %.2f ms", millisecondsSince(begin));
    begin = Clock::now();
    const reshard::PlanFile plan(after);
    std::printf(", list of params %.2f ms", millisecondsSince(begin));
    reshard::Executor all(before, options);
    all.replace(after);
    const uint32_t world = plan.summary().world;
    begin = Clock::now();
    std::byte *memory = next;
    for (uint32_t rank = 0; rank < world; ++rank)
      bind(all, plan, rank, memory);
    std::printf(", bind %.2f ms", millisecondsSince(begin) / world);
    begin = Clock::now();
    all.prepare();
    std::printf(", prepare %.2f ms\n", millisecondsSince(begin) / world);
  }
}

} // namespace

int main(int count, char **arguments) {
  void *const memory = mmap(nullptr, size_t{1} << 45, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (count != 3 || memory == MAP_FAILED) {
    std::fprintf(stderr, "usage: bench-replace OLD.rplan NEW.rplan, with 32 TiB of address space\n");
    return 2;
  }
  try {
    measure(arguments[1], arguments[2], static_cast<std::byte *>(memory));
  } catch (const reshard::Error &error) {
    std::fprintf(stderr, "bench-replace: %s\n", error.what());
    return 1;
  }
  return 0;
}
