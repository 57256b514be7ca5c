// SPDX-License-Identifier: Apache-2.0
// One suite for every transport and device: runs all plans of a folder, each with two seeds, and checks every target
// byte. Under mpirun all processes run the plans in step, even after one of them has failed.

#include "command/common.h"
#include "command/options.h"
#include "executor/interfaces/transport_traits.h"
#include "reshard/reshard.h"
#include "tests/conformance/allocations.h"
#include "tests/conformance/processes.h"
#include "tools/run/memory.h"
#include "verify/check/check.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <vector>

using namespace reshard;
using namespace reshard::command;
using namespace reshard::tools;
using namespace reshard::verify;
using namespace reshard::conformance;

namespace {

struct Options {
  std::string folder, transport = transports().front().name, device = transports().front().device, rendezvous;
  bool countAllocations = false, noLocalShortcut = false, privateMemory = false;
  uint64_t repeat = 0;
  double timeout = 60;
};

/// A plan in this process. The order of members matters: `memory` must outlive `executor`.
struct Subject {
  struct Close {
    void operator()(reshard_executor *executor) const { reshard_close(executor); }
  };

  std::string name;
  std::unique_ptr<Plan> plan;
  std::unique_ptr<Memory> memory;
  std::unique_ptr<reshard_executor, Close> executor;
};

/// What a process uses, which runs must not increase.
struct Usage {
  uint64_t bytes = 0, descriptors = 0;

  static Usage now() {
    return {rssBytes(), static_cast<uint64_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}))};
  }
  /// How much more this is than at an earlier time.
  Usage since(const Usage &before) const {
    return {bytes - std::min(bytes, before.bytes), descriptors - std::min(descriptors, before.descriptors)};
  }
};

class Conformance {
public:
  explicit Conformance(const Options &options)
      : options_(options), processes_(findTransport(options.transport)->processes) {}

  int run() {
    std::vector<std::string> paths;
    for (const auto &entry : std::filesystem::directory_iterator(options_.folder))
      if (entry.path().extension() == ".rplan")
        paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    for (const std::string &path : paths) {
      auto subject = std::make_unique<Subject>();
      if (!prepare(path, *subject))
        return kFailure;
      if (!examine(path, *subject))
        wrong_.push_back(std::move(subject));
    }
    const uint64_t right = processes_.sum(right_);
    if (processes_.first())
      std::printf("%zu plans, %llu bytes right, %zu wrong\n", paths.size(), static_cast<unsigned long long>(right),
                  wrong_.size());
    std::fflush(stdout);
    return wrong_.empty() ? kDone : kNegative;
  }

private:
  /// Whether no process has an error; each prints its own.
  bool agreed(const Subject &subject, const std::string &error) const {
    if (!error.empty()) {
      std::printf("%s: rank %d: %s\n", subject.name.c_str(), processes_.rank(), error.c_str());
      std::fflush(stdout);
    }
    return processes_.max(error.empty() ? 0 : 1) == 0;
  }

  /// Opens a plan, binds memory and prepares it; false if a process has an error. All processes complete a step before
  /// one of them starts the next, since some steps wait for the others.
  bool prepare(const std::string &path, Subject &subject) const {
    subject.name = std::filesystem::path(path).filename();
    return agreed(subject, Plan::open(path, subject.plan).message()) && agreed(subject, open(path, subject)) &&
           agreed(subject, allocate(subject)) && agreed(subject, bind(subject)) &&
           agreed(subject, said(subject, reshard_prepare(subject.executor.get())));
  }

  static std::string said(const Subject &subject, reshard_status status) {
    return status == RESHARD_OK ? "" : reshard_error(subject.executor.get());
  }

  std::string open(const std::string &path, Subject &subject) const {
    reshard_options options = RESHARD_OPTIONS_INITIALIZER;
    options.transport = options_.transport.c_str();
    options.device = options_.device.c_str();
    options.join_seconds = 60; // independent of --timeout
    options.no_local_shortcut = options_.noLocalShortcut;
    const bool meets = !options_.rendezvous.empty();
    options.rendezvous = meets ? options_.rendezvous.c_str() : nullptr;
    const auto rank = static_cast<uint32_t>(processes_.rank());
    reshard_executor *executor = nullptr;
    const reshard_status status = reshard_open(path.c_str(), meets ? &rank : nullptr, meets, &options, &executor);
    subject.executor.reset(executor);
    return said(subject, status);
  }

  /// The memory of this process's ranks, all endpoints.
  std::string allocate(Subject &subject) const {
    size_t count = 0;
    const uint32_t *ranks = reshard_ranks(subject.executor.get(), &count);
    subject.memory = std::make_unique<Memory>(*subject.plan, std::vector<uint32_t>(ranks, ranks + count));
    const bool shared = findTransport(options_.transport)->processes && !options_.privateMemory;
    for (uint32_t e = 0; e < subject.plan->manifest().endpoints()->size(); ++e)
      if (Status status = subject.memory->allocate(e, shared); !status.ok())
        return status.message();
    return {};
  }

  std::string bind(const Subject &subject) const {
    constexpr int kOld = 0xAB; // bytes of targets before the first run: their padding must become zero
    reshard_executor *executor = subject.executor.get();
    const schema::Manifest &manifest = subject.plan->manifest();
    for (const MeshRankMemory &rankMemory : subject.memory->rankMemories()) {
      const schema::Endpoint &endpoint = *manifest.endpoints()->Get(rankMemory.endpoint);
      for (uint32_t p = 0; p < rankMemory.params.size(); ++p) {
        for (const schema::ParamInstance &instance : schema::instances(manifest, endpoint, p, rankMemory.meshRank)) {
          std::byte *memory = rankMemory.params[p][instance.instance];
          const auto bytes = static_cast<uint64_t>(instance.bytes);
          if (!memory)
            continue; // of a param that is only derived
          if (rankMemory.endpoint > 0)
            std::memset(memory, kOld, bytes);
          const uint32_t rank = endpoint.ranks()->Get(rankMemory.meshRank);
          if (std::string error = said(
                  subject, reshard_bind(executor, rankMemory.endpoint, rank, instance.name.c_str(), memory, bytes));
              !error.empty())
            return error;
        }
        // There is no engine to refresh, so the hooks do nothing.
        if (const auto *refresh = endpoint.params()->Get(p)->refresh(); refresh && refresh->size() > 0)
          reshard_set_hook(executor, refresh->c_str(), [](void *, const char *, uint32_t) { return 0; }, nullptr);
      }
    }
    return {};
  }

  std::string once(const Subject &subject) const {
    return said(subject, reshard_run(subject.executor.get(), options_.timeout, nullptr));
  }

  /// A run that must pass the executor's own check, too.
  std::string checked(const Subject &subject) const {
    for (const schema::Endpoint *endpoint : *subject.plan->manifest().endpoints())
      if (endpoint->storage() && findTransport(options_.transport)->processes)
        return once(subject); // files have no digests there
    reshard_check check = RESHARD_CHECK_INITIALIZER;
    check.first_index = check.allow_undigested = 1;
    return said(subject, reshard_run(subject.executor.get(), options_.timeout, &check));
  }

  /// Runs a prepared plan. Returns whether all checks pass.
  bool examine(const std::string &path, const Subject &subject) {
    // Target bytes that a run does not write cannot be right with both seeds.
    for (const uint64_t seed : {1, 2})
      if (!exact(subject, seed, [&] { return seed == 1 ? once(subject) : checked(subject); }))
        return false;
    if (options_.countAllocations && !allocatesNothing(subject))
      return false;
    return options_.repeat == 0 || repeats(path, subject);
  }

  /// Whether `move` moves the values of a seed to their targets, in all processes.
  template <class Move> bool exact(const Subject &subject, uint64_t seed, Move move) {
    for (const MeshRankMemory &rankMemory : subject.memory->rankMemories())
      if (rankMemory.endpoint == 0)
        synthesize(*subject.plan, rankMemory, seed, 1);
    if (!agreed(subject, move())) {
      processes_.abandon();
      return false;
    }
    uint64_t mismatches = 0, bytes = 0;
    std::string first;
    for (const MeshRankMemory &rankMemory : subject.memory->rankMemories())
      if (rankMemory.endpoint > 0) {
        const CheckResult result = check(*subject.plan, rankMemory, seed, 1);
        mismatches += result.mismatches;
        bytes += result.checkedBytes;
        first = first.empty() ? result.first : first;
      }
    right_ += mismatches == 0 ? bytes : 0;
    return agreed(subject, mismatches == 0 ? ""
                                           : std::to_string(mismatches) + " elements WRONG with seed " +
                                                 std::to_string(seed) + "; " + first);
  }

  bool allocatesNothing(const Subject &subject) const {
    beginCounting();
    std::free(::strdup("seen")); // checks the counter itself
    if (!agreed(subject, endCounting().ours == 1 ? "" : "the allocation counter does not work"))
      return false;
    beginCounting();
    const std::string error = once(subject);
    const Allocations found = endCounting();
    const uint64_t libraries = processes_.sum(found.libraries);
    if (processes_.first())
      std::printf("%s: %llu allocations by libraries in a run\n", subject.name.c_str(),
                  static_cast<unsigned long long>(libraries));
    const bool none = !error.empty() || found.ours == 0;
    return agreed(subject,
                  none ? error : std::to_string(found.ours) + " allocations in a run, the first by " + found.first);
  }

  /// Many runs: neither memory, descriptors nor time may grow. At the end, runs alternate with runs of a newly opened
  /// executor. Runs have become slower if both the fastest and the median one have. Other load changes times tenfold:
  /// it changes both medians alike, but one run at a moment without load can be far faster than all others. If
  /// processes share cores, one of the two executors may be unlucky for a while, so more runs are made before they
  /// count as slower.
  bool repeats(const std::string &path, const Subject &subject) {
    constexpr uint64_t kWindow = 100, kWindows = 10, kMayGrow = 1 << 20, kMaySlow = 3;
    constexpr uint64_t kWake = 100'000; // ns: the time to wake a worker thread on a shared core
    uint64_t nanoseconds = 0;
    Usage before;
    const bool right = exact(subject, 3, [&] {
      std::string error;
      for (uint64_t n = 0; n < options_.repeat && error.empty(); ++n) {
        if (n == kWindow)
          before = Usage::now();
        error = together(subject, nanoseconds);
      }
      return error;
    });
    if (!right)
      return false;
    const Usage growth = Usage::now().since(before);
    const uint64_t most = processes_.max(growth.bytes);
    Subject newer;
    if (!prepare(path, newer))
      return false;
    std::vector<uint64_t> first, last; // nanoseconds of the newer executor's runs, and of the older one's
    auto fastest = [](std::vector<uint64_t> &times) { return *std::min_element(times.begin(), times.end()); };
    auto median = [](std::vector<uint64_t> &times) {
      const auto middle = times.begin() + static_cast<ptrdiff_t>(times.size() / 2);
      std::nth_element(times.begin(), middle, times.end());
      return *middle;
    };
    auto slower = [&] {
      return fastest(last) > kMaySlow * std::max(fastest(first), kWake) &&
             median(last) > kMaySlow * std::max(median(first), kWake);
    };
    for (uint64_t n = 0; n < 2 * kWindow || (n < kWindows * 2 * kWindow && slower()); ++n) {
      const bool old = n % 2 == 0;
      if (!agreed(subject, together(old ? subject : newer, nanoseconds)))
        return false;
      (old ? last : first).push_back(nanoseconds);
    }
    if (processes_.first())
      std::printf("%s: memory grew by %llu KiB in %llu runs, which took %.1f us when new, %.1f us at last\n",
                  subject.name.c_str(), static_cast<unsigned long long>(most >> 10),
                  static_cast<unsigned long long>(options_.repeat), static_cast<double>(fastest(first)) / 1e3,
                  static_cast<double>(fastest(last)) / 1e3);
    return agreed(subject, growth.descriptors > 0 ? std::to_string(growth.descriptors) + " descriptors were left open"
                           : !kAllocationsAreCounted ? ""
                           : growth.bytes > kMayGrow ? "memory grew by " + std::to_string(growth.bytes) + " bytes"
                           : slower()                ? "runs became slower"
                                                     : "");
  }

  /// A run, and the time of its slowest process. Processes wait for each other after each run: MPI sends small messages
  /// before they are received, so sources could otherwise be many runs ahead, and MPI would have to buffer their
  /// messages. Returns an error text if any process failed; empty on success.
  std::string together(const Subject &subject, uint64_t &nanoseconds) const {
    const double begin = now();
    std::string error = once(subject);
    nanoseconds = processes_.max(static_cast<uint64_t>((now() - begin) * 1e9));
    return processes_.max(error.empty() ? 0 : 1) > 0 && error.empty() ? "another process failed" : error;
  }
  const Options &options_;
  Processes processes_;
  uint64_t right_ = 0;                          // bytes, in this process
  std::vector<std::unique_ptr<Subject>> wrong_; // kept alive: after a failed run MPI may still write to its memory
};

} // namespace

int main(int argc, char **argv) {
  Options options;
  std::vector<std::string> arguments;
  Command command{
      "conformance",
      "FOLDER",
      "Runs every plan of a folder and checks every target byte.",
      {{"--transport", "NAME", "threads (default), or another one, under mpirun",
        setChoice(options.transport, transportNames())},
       {"--rendezvous", "URL", "where the processes of transport ucx find each other", setText(options.rendezvous)},
       {"--device", "NAME", "cpu (default), cuda", setChoice(options.device, transportDevices())},
       {"--count-allocations", "", "one more run, which must not allocate", setSwitch(options.countAllocations)},
       {"--repeat", "N", "N more runs, in which memory, descriptors and time must not grow",
        setNumber(options.repeat, 200, 1'000'000)},
       {"--no-local-shortcut", "", "send messages even if a peer's memory can be mapped",
        setSwitch(options.noLocalShortcut)},
       {"--private-memory", "", "memory that peers cannot map", setSwitch(options.privateMemory)},
       {"--timeout", "S", "deadline of a run in seconds (60)", setSeconds(options.timeout)}},
      1};
  if (const int code = parseFlags(command, argc, argv, arguments); code >= 0)
    return code;
  options.folder = arguments[0];
  if (options.countAllocations && !kAllocationsAreCounted) {
    printError("conformance", "--count-allocations needs a build without sanitizers");
    return kUsage;
  }
  try {
    return Conformance(options).run();
  } catch (const std::exception &exception) {
    printError("conformance", exception.what());
    return kFailure;
  }
}
