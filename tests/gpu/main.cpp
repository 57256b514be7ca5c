// SPDX-License-Identifier: Apache-2.0
// gpu-test COMMAND PLAN…: the program that tests/gpu/run.sh runs. Exit codes: 0 all right, 1 failed, 2 usage, 3 no GPU.

#include "tests/gpu/plan_on_gpu.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>

using namespace reshard;
using namespace reshard::gpu;

namespace {

/// Checks every target byte under two seeds, after one run and after two.
void checkPlan(const std::string &path, const char *transport) {
  PlanOnGpu plan(path, transport);
  plan.setHook([](void *, const char *, uint32_t) { return 0; }, nullptr);
  plan.prepare();
  uint64_t checked = 0;
  for (const uint64_t seed : {1, 2}) {
    plan.fill(seed);
    for (uint64_t run = 0; run < seed; ++run)
      plan.run();
    if (const uint64_t wrong = plan.mismatches(seed, checked); wrong > 0)
      throw std::runtime_error(std::to_string(wrong) + " elements are wrong under seed " + std::to_string(seed) +
                               ", expected none");
  }
  if (checked == 0)
    throw std::runtime_error("no bytes were checked");
  std::printf("  %-60s %s %12llu bytes right\n", path.c_str(), transport, static_cast<unsigned long long>(checked));
}

} // namespace

int main(int argc, char **argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (argc < 3 ||
      (command != "check" && command != "self" && command != "ranks" && command != "graph" && command != "bench")) {
    std::fprintf(stderr, "usage: gpu-test check|self|ranks|graph|bench PLAN...\n");
    return 2;
  }
  bool right = true;
  for (int i = 2; i < argc; ++i)
    try {
      if (command == "check")
        checkPlan(argv[i], "threads");
      else if (command == "self")
        checkPlan(argv[i], "nccl");
      else if (command == "ranks")
        testRanks(argv[i]);
      else if (command == "bench")
        right = bench(argv[i]) && right;
      else {
        testConsumer(argv[i]);
        testRefresh(argv[i]);
        testEnqueue(argv[i]);
        testRefusals(argv[i]);
        testDigests(argv[i]);
      }
    } catch (const std::exception &exception) {
      std::fprintf(stderr, "gpu-test: %s: %s\n", argv[i], exception.what());
      if (std::strncmp(exception.what(), "no GPU: ", 8) == 0)
        return 3;
      right = false;
    }
  return right ? 0 : 1;
}
