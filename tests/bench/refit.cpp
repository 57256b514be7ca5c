// A whole run of a plan on the threads transport beside memcpy of the same bytes with as many threads. Both touch the same memory, touched
// beforehand, in turns within one run: quote the ratio, not the rates. `memcpy` moves each target param from a buffer of its size.
//   bench-refit [--benchmark_filter=…]

#include "compiler/compile.h"
#include "executor/reshard.h"
#include "tools/common.h"
#include "tools/memory.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>
#include <unistd.h>

using namespace reshard;
using namespace reshard::tools;

namespace {

struct Bench {
  Bench(const char *job, const std::vector<std::string> &overrides) {
    const std::string path = std::filesystem::temp_directory_path() / ("reshard-bench-" + std::to_string(getpid()) + ".rplan");
    CompileOptions options;
    options.overrides = overrides;
    CompileResult result;
    Diagnostics diagnostics;
    std::string digest;
    int64_t bytes = 0;
    if (!compileJob(std::string(RESHARD_SOURCE_DIR "/") + job, options, result, diagnostics) || !writePlan(result.module, result.statistics, path, 0, digest, bytes).empty() ||
        !Plan::open(path, plan).empty())
      fail(diagnostics.text());
    memory = std::make_unique<Memory>(*plan);
    for (uint32_t e : {0u, 1u})
      if (const std::string error = memory->allocate(e); !error.empty())
        fail(error);
    threads = std::max(1u, std::thread::hardware_concurrency());
    if (reshard_open(path.c_str(), nullptr, 0, nullptr, &executor) != RESHARD_OK)
      fail(reshard_error(executor));
    for (const PlaceMemory &place : memory->places()) {
      const schema::Endpoint &endpoint = *plan->manifest().endpoints()->Get(place.endpoint);
      for (uint32_t p = 0; p < place.params.size(); ++p)
        for (const schema::ParamInstance &instance : schema::instances(plan->manifest(), endpoint, p, place.place)) {
          std::byte *at = place.params[p][instance.instance];
          if (reshard_bind(executor, place.endpoint, endpoint.ranks()->Get(place.place), instance.name.c_str(), at, static_cast<uint64_t>(instance.bytes)) != RESHARD_OK)
            fail(reshard_error(executor));
          (place.endpoint == 0 ? sources : targets).push_back({at, static_cast<size_t>(instance.bytes)});
        }
    }
    if (reshard_prepare(executor) != RESHARD_OK)
      fail(reshard_error(executor));
    std::filesystem::remove(path);
  }
  ~Bench() { reshard_close(executor); }
  [[noreturn]] static void fail(const std::string &why) {
    std::fprintf(stderr, "bench-refit: %s\n", why.c_str());
    std::exit(1);
  }

  double refit() {
    const double begin = now();
    if (reshard_run(executor, 0) != RESHARD_OK)
      fail(reshard_error(executor));
    return now() - begin;
  }

  /// The same bytes into the same targets, 1 MiB at a time, from consecutive source memory.
  double copy() {
    if (chunks_.empty()) {
      size_t source = 0, at = 0;
      for (const auto &[memory, bytes] : targets)
        for (size_t done = 0; done < bytes;) {
          if (at >= sources[source].second) {
            source = (source + 1) % sources.size();
            at = 0;
          }
          const size_t n = std::min({bytes - done, sources[source].second - at, size_t{1} << 20});
          chunks_.push_back({memory + done, sources[source].first + at, n});
          done += n;
          at += n;
        }
    }
    const double begin = now();
    std::atomic<size_t> next{0};
    auto work = [&] {
      for (size_t i = next++; i < chunks_.size(); i = next++)
        std::memcpy(chunks_[i].to, chunks_[i].from, chunks_[i].bytes);
    };
    std::vector<std::thread> helpers;
    for (unsigned t = 1; t < threads; ++t)
      helpers.emplace_back(work);
    work();
    for (std::thread &helper : helpers)
      helper.join();
    return now() - begin;
  }

  std::unique_ptr<Plan> plan;
  std::unique_ptr<Memory> memory;
  reshard_executor *executor = nullptr;
  unsigned threads = 1;
  std::vector<std::pair<std::byte *, size_t>> sources, targets;

private:
  struct Piece {
    std::byte *to;
    const std::byte *from;
    size_t bytes;
  };
  std::vector<Piece> chunks_;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// Ours and memcpy in turns; one iteration is a pair.
void paired(benchmark::State &state, const char *job, const std::vector<std::string> &overrides) {
  Bench bench(job, overrides);
  bench.refit();
  bench.copy();
  std::vector<double> ours, theirs;
  for (auto _ : state) {
    ours.push_back(bench.refit());
    theirs.push_back(bench.copy());
  }
  const auto bytes = static_cast<double>(reshard_bytes(bench.executor));
  state.counters["ours_GB/s"] = bytes / median(ours) / 1e9;
  state.counters["memcpy_GB/s"] = bytes / median(theirs) / 1e9;
  state.counters["ratio"] = median(theirs) / median(ours);
  state.counters["threads"] = bench.threads;
}

} // namespace

// Rows alone: every move is contiguous on both sides.
BENCHMARK_CAPTURE(paired, contiguous, "tests/bench/contiguous.yaml", {})->Iterations(21)->Unit(benchmark::kMillisecond);
// Rows, columns, interleaved QKV and gate/up of a real model.
BENCHMARK_CAPTURE(paired, llama3_8b_4_layers, "examples/llama3-8b-16-to-8.yaml", {"model.let.layers=4"})->Iterations(11)->Unit(benchmark::kMillisecond);

BENCHMARK_MAIN();
