// SPDX-License-Identifier: Apache-2.0
// All ranks of a plan over NCCL, each a thread with its own GPU: the results must be exact, and each call must end at
// its deadline if one rank is missing.

#include "tests/gpu/plan_on_gpu.h"
#include "tests/lib/folder.h"

#include <cuda_runtime_api.h>

#include <barrier>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace reshard::gpu {

namespace {

/// Deadlines in seconds: of a run, and of open and prepare, with one rank missing.
constexpr double kRunDeadline = 1, kJoinDeadline = 10;
/// Maximum number of ranks for the tests of open and prepare: their result does not depend on it, and each waits for
/// the deadline.
constexpr uint32_t kMaxJoinRanks = 4;

/// The call that the late rank does not make.
enum class MissedCall { open, prepare, run };

/// The results of one rank.
struct RankResult {
  std::string problem, waiting; // the failure of the test; the executor's error about the missing rank
  uint64_t checked = 0;
};

void runRank(const std::string &path, uint32_t rank, MissedCall missed, bool late, const std::string &rendezvous,
             std::barrier<> &together, RankResult &result) {
  try {
    if (cudaSetDevice(static_cast<int>(rank)) != cudaSuccess)
      throw std::runtime_error("cannot use device " + std::to_string(rank));
    std::unique_ptr<PlanOnGpu> plan;
    auto open = [&] {
      plan = std::make_unique<PlanOnGpu>(path, rank, rendezvous, missed == MissedCall::run ? 60 : kJoinDeadline);
      plan->setHook([](void *, const char *, uint32_t) { return 0; }, nullptr);
    };
    reshard_status status = RESHARD_OK;
    if (missed == MissedCall::open) {
      together.arrive_and_wait();
      try {
        if (!late)
          open();
      } catch (const std::runtime_error &error) { // from reshard_open
        status = RESHARD_TIMEOUT;
        result.waiting = error.what();
      }
    } else {
      open();
      if (missed == MissedCall::run) {
        plan->prepare();
        for (const uint64_t seed : {1, 2, 3}) {
          plan->fill(seed);
          plan->run();
          if (const uint64_t wrong = plan->mismatches(seed, result.checked); wrong > 0)
            throw std::runtime_error(std::to_string(wrong) + " elements are wrong under seed " + std::to_string(seed));
        }
      }
      together.arrive_and_wait();
      if (!late) {
        status = missed == MissedCall::run ? reshard_run(plan->executor(), kRunDeadline, nullptr)
                                           : reshard_prepare(plan->executor());
        result.waiting = reshard_error(plan->executor());
        if (reshard_run(plan->executor(), kRunDeadline, nullptr) == RESHARD_OK)
          throw std::runtime_error("a run after a failed call succeeded, expected an error");
      }
    }
    if (!late && status != RESHARD_TIMEOUT && status != RESHARD_FAILED)
      throw std::runtime_error("with a rank missing, found status " + std::to_string(status) +
                               ", expected a timeout or a failure: " + result.waiting);
    together.arrive_and_wait();
  } catch (const std::exception &exception) {
    result.problem = exception.what();
    together.arrive_and_drop();
  }
}

/// Runs all ranks up to a call, which the late rank does not make.
std::vector<RankResult> runRanks(const std::string &path, uint32_t world, MissedCall missed, uint32_t late) {
  const tests::TemporaryFolder folder;
  std::barrier together(static_cast<std::ptrdiff_t>(world));
  std::vector<RankResult> results(world);
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < world; ++rank)
    ranks.emplace_back(
        [&, rank] { runRank(path, rank, missed, rank == late, "file://" + folder.path(), together, results[rank]); });
  for (std::thread &rank : ranks)
    rank.join();
  for (uint32_t rank = 0; rank < world; ++rank)
    if (!results[rank].problem.empty())
      throw std::runtime_error("rank " + std::to_string(rank) + ": " + results[rank].problem);
  return results;
}

} // namespace

void testRanks(const std::string &path) {
  std::unique_ptr<Plan> plan;
  need(Plan::open(path, plan));
  const uint32_t world = plan->world();
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess)
    throw std::runtime_error(std::string("no GPU: ") + cudaGetErrorString(error));
  if (static_cast<uint32_t>(devices) < world) {
    std::printf("  %-60s nccl SKIPPED: %u ranks need as many GPUs, found %d\n", path.c_str(), world, devices);
    return;
  }
  // The late rank must be one that another rank sends to.
  uint32_t late = world;
  for (uint32_t rank = 0; rank < world && late == world; ++rank) {
    std::shared_ptr<const schema::Segment> segment;
    need(plan->segment(rank, segment));
    for (const schema::Step *step : *segment->steps())
      if (step->kind() == schema::StepKind::send)
        late = step->peer();
  }
  if (late == world)
    throw std::runtime_error("the plan has no messages, expected some");
  uint64_t checked = 0, named = 0;
  std::string text;
  for (const RankResult &result : runRanks(path, world, MissedCall::run, late)) {
    checked += result.checked;
    if (result.waiting.find(" rank " + std::to_string(late)) == std::string::npos)
      continue;
    ++named;
    text = result.waiting;
  }
  if (checked == 0)
    throw std::runtime_error("no bytes were checked");
  if (named == 0)
    throw std::runtime_error("no rank's error names rank " + std::to_string(late) + ", which was missing");
  std::printf("  %-60s nccl %12llu bytes right; %llu of %u ranks name the missing one: %s\n", path.c_str(),
              static_cast<unsigned long long>(checked), static_cast<unsigned long long>(named), world, text.c_str());
  if (world > kMaxJoinRanks)
    return;
  for (const auto &[missed, name] : {std::pair(MissedCall::open, "open"), std::pair(MissedCall::prepare, "prepare")}) {
    const std::string waiting = runRanks(path, world, missed, late)[late > 0 ? 0 : 1].waiting;
    const std::string expected = missed == MissedCall::prepare ? "timed out: not all ranks have reached prepare"
                                                               : "rank " + std::to_string(late) + " has not joined";
    if (waiting.find(expected) == std::string::npos)
      throw std::runtime_error(std::string(name) + " without rank " + std::to_string(late) + ": expected \"" +
                               expected + "\", found: " + waiting);
    std::printf("  %s without the missing rank: %s\n", name, waiting.c_str());
  }
}

} // namespace reshard::gpu
