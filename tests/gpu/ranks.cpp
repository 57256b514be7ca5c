// All ranks of a plan, each a thread with a GPU of its own, over NCCL: exact, and over at the deadline where one of
// them does not come.

#include "tests/gpu/plan_on_gpu.h"

#include <cuda_runtime_api.h>

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <thread>

namespace reshard::gpu {

namespace {

/// Seconds: of a run, and of open and prepare, that one rank stays away from.
constexpr double kRunDeadline = 1, kJoinDeadline = 10;
/// Open and prepare are tried with so many ranks at most: what they show does not depend on it, and each takes the
/// deadline's time.
constexpr uint32_t kMostThatJoin = 4;

/// Where the late rank stays away.
enum class Stage { open, prepare, run };

/// A rank's part of the test.
struct Part {
  std::string problem, waiting; // what went wrong; what was said of who did not come
  uint64_t checked = 0;
};

void runRank(const std::string &path, uint32_t rank, Stage stage, bool late, const std::string &idFile,
             std::barrier<> &together, Part &part) {
  try {
    if (cudaSetDevice(static_cast<int>(rank)) != cudaSuccess)
      throw std::runtime_error("cannot use device " + std::to_string(rank));
    std::unique_ptr<PlanOnGpu> plan;
    auto open = [&] {
      plan = std::make_unique<PlanOnGpu>(path, rank, idFile, stage == Stage::run ? 60 : kJoinDeadline);
      plan->setHook([](void *, const char *, uint32_t) { return 0; }, nullptr);
    };
    reshard_status status = RESHARD_OK;
    if (stage == Stage::open) {
      together.arrive_and_wait();
      try {
        if (!late)
          open();
      } catch (const std::runtime_error &error) { // of reshard_open
        status = RESHARD_TIMEOUT;
        part.waiting = error.what();
      }
    } else {
      open();
      if (stage == Stage::run) {
        plan->prepare();
        for (const uint64_t seed : {1, 2, 3}) {
          plan->fill(seed);
          plan->run();
          if (const uint64_t wrong = plan->mismatches(seed, part.checked); wrong > 0)
            throw std::runtime_error(std::to_string(wrong) + " elements are wrong under seed " + std::to_string(seed));
        }
      }
      together.arrive_and_wait();
      if (!late) {
        status = stage == Stage::run ? reshard_run(plan->executor(), kRunDeadline) : reshard_prepare(plan->executor());
        part.waiting = reshard_error(plan->executor());
        if (reshard_run(plan->executor(), kRunDeadline) == RESHARD_OK)
          throw std::runtime_error("a run after what failed was done");
      }
    }
    if (!late && status != RESHARD_TIMEOUT && status != RESHARD_FAILED)
      throw std::runtime_error("without a rank it ended with status " + std::to_string(status) + ": " + part.waiting);
    together.arrive_and_wait();
  } catch (const std::exception &exception) {
    part.problem = exception.what();
    together.arrive_and_drop();
  }
}

/// All ranks as far as a stage, which the late one stays away from.
std::vector<Part> runRanks(const std::string &path, uint32_t world, Stage stage, uint32_t late) {
  std::string folder = std::filesystem::temp_directory_path() / "reshard-ranks-XXXXXX";
  if (!mkdtemp(folder.data()))
    throw std::runtime_error("cannot make '" + folder + "'");
  std::barrier together(static_cast<std::ptrdiff_t>(world));
  std::vector<Part> parts(world);
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < world; ++rank)
    ranks.emplace_back([&, rank] { runRank(path, rank, stage, rank == late, folder + "/id", together, parts[rank]); });
  for (std::thread &rank : ranks)
    rank.join();
  std::filesystem::remove_all(folder);
  for (uint32_t rank = 0; rank < world; ++rank)
    if (!parts[rank].problem.empty())
      throw std::runtime_error("rank " + std::to_string(rank) + ": " + parts[rank].problem);
  return parts;
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
  // The one that stays away: whom another rank sends to.
  uint32_t late = world;
  for (uint32_t rank = 0; rank < world && late == world; ++rank) {
    const schema::Segment *segment = nullptr;
    need(plan->segment(rank, segment));
    for (const schema::Step *step : *segment->steps())
      if (step->kind() == schema::StepKind::send)
        late = step->peer();
  }
  if (late == world)
    throw std::runtime_error("a plan without messages");
  uint64_t checked = 0, named = 0;
  std::string text;
  for (const Part &part : runRanks(path, world, Stage::run, late)) {
    checked += part.checked;
    if (part.waiting.find(" rank " + std::to_string(late)) == std::string::npos)
      continue;
    ++named;
    text = part.waiting;
  }
  if (checked == 0)
    throw std::runtime_error("nothing was checked");
  if (named == 0)
    throw std::runtime_error("nobody named rank " + std::to_string(late) + ", which did not come");
  std::printf("  %-60s nccl %12llu bytes right; %llu of %u ranks name the late one: %s\n", path.c_str(),
              static_cast<unsigned long long>(checked), static_cast<unsigned long long>(named), world, text.c_str());
  if (world > kMostThatJoin)
    return;
  for (const auto &[stage, name] : {std::pair(Stage::open, "open"), std::pair(Stage::prepare, "prepare")}) {
    const std::string waiting = runRanks(path, world, stage, late)[late > 0 ? 0 : 1].waiting;
    // Without rank 0 nobody gets as far as NCCL: there is no file with its id.
    const char *expected = stage == Stage::open && late == 0 ? "/id', which rank 0 writes"
                                                             : "timed out: not all ranks have joined";
    if (waiting.find(expected) == std::string::npos)
      throw std::runtime_error(std::string(name) + " without rank " + std::to_string(late) + ": " + waiting);
    std::printf("  %s without it: %s\n", name, waiting.c_str());
  }
}

} // namespace reshard::gpu
