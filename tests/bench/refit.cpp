// A whole run of a plan on the threads transport beside memcpy of the same bytes with as many threads. Both touch the same memory, touched
// beforehand, in turns within one run: quote the ratio, not the rates. `memcpy` moves each target param from a buffer of its size.
//   bench-refit [--benchmark_filter=…]

#include "tests/bench/prepared.h"

#include <benchmark/benchmark.h>

using namespace reshard::bench;

namespace {

/// Ours and memcpy in turns; one iteration is a pair.
void paired(benchmark::State &state, const char *job, const std::vector<std::string> &overrides) {
  Prepared ours(job, overrides);
  const Copy copy(ours.sources, ours.targets, bytesOf(ours.targets));
  ours.refit();
  copy.run();
  std::vector<double> refits, copies;
  for (auto _ : state) {
    refits.push_back(ours.refit());
    copies.push_back(copy.run());
  }
  const auto bytes = static_cast<double>(ours.bytes());
  state.counters["ours_GB/s"] = bytes / median(refits) / 1e9;
  state.counters["memcpy_GB/s"] = bytes / median(copies) / 1e9;
  state.counters["ratio"] = median(copies) / median(refits);
  state.counters["threads"] = threads();
}

} // namespace

// Rows alone: every move is contiguous on both sides.
BENCHMARK_CAPTURE(paired, contiguous, "tests/bench/contiguous.yaml", {})->Iterations(21)->Unit(benchmark::kMillisecond);
// Rows, columns, interleaved QKV and gate/up of a real model.
BENCHMARK_CAPTURE(paired, llama3_8b_4_layers, "examples/llama3-8b-16-to-8.yaml", {"model.let.layers=4"})->Iterations(11)->Unit(benchmark::kMillisecond);

BENCHMARK_MAIN();
