// SPDX-License-Identifier: Apache-2.0
// A whole run of a plan on the threads transport, compared with memcpy of the same bytes and with a plain strided copy,
// each with the same number of threads, on the same memory, touched before, alternately in one run. Quote the ratios,
// not the rates. `memcpy` copies each target param from a buffer of its size. `strided` is a hand-written copy: one
// memcpy for each row of the plan, listed before in the order of the targets.
//   bench-refit [--benchmark_filter=…]

#include "tests/bench/prepared.h"

#include <benchmark/benchmark.h>

using namespace reshard;
using namespace reshard::bench;

namespace {

/// Copies every row of a plan with memcpy, about 1 MiB of rows at a time.
class Rows {
public:
  explicit Rows(const Prepared &prepared) {
    const verify::PairedPlan paired = prepared.paired();
    for (uint32_t rank = 0; rank < prepared.plan().world(); ++rank)
      for (uint32_t step = 0; step < paired.segment(rank).steps()->size(); ++step)
        if (const Status status =
                paired.forEachMove(rank, step,
                                   [&](const verify::Move &move) {
                                     forEachRow(move, [&](const verify::Move &row) { add(prepared, rank, row); });
                                   });
            !status.ok())
          fail(status.message());
    std::sort(rows_.begin(), rows_.end(), [](const Row &a, const Row &b) { return a.to < b.to; });
    for (size_t i = 0, bytes = 0; i < rows_.size(); ++i)
      if (bytes += rows_[i].bytes; bytes >= size_t{1} << 20 || i + 1 == rows_.size()) {
        ends_.push_back(i + 1);
        bytes = 0;
      }
  }
  /// Runs the copies; returns the seconds.
  double run() const {
    const double begin = command::now();
    parallelFor(ends_.size(), threads(), [&](size_t i) {
      for (size_t r = i == 0 ? 0 : ends_[i - 1]; r < ends_[i]; ++r)
        std::memcpy(rows_[r].to, rows_[r].from, rows_[r].bytes);
    });
    return command::now() - begin;
  }

private:
  struct Row {
    std::byte *to;
    const std::byte *from;
    size_t bytes;
  };
  void add(const Prepared &prepared, uint32_t rank, const verify::Move &row) {
    constexpr uint64_t kMaxBytes = 1 << 20; // longer rows are split between threads
    std::byte *to = prepared.memory(rank, row.targetBuffer) + row.targetOffset;
    const std::byte *from = prepared.memory(row.sourceRank, row.sourceBuffer) + row.sourceOffset;
    for (uint64_t at = 0; at < row.rowBytes; at += kMaxBytes)
      rows_.push_back({to + at, from + at, std::min(kMaxBytes, row.rowBytes - at)});
  }

  std::vector<Row> rows_;
  std::vector<size_t> ends_;
};

/// Runs reshard, memcpy and the strided copy alternately; one iteration is one of each.
void paired(benchmark::State &state, const char *job, const std::vector<std::string> &overrides) {
  Prepared ours(job, overrides);
  const Copy copy(ours.sources, ours.targets, bytesOf(ours.targets));
  const Rows strided(ours);
  ours.refit();
  copy.run();
  strided.run();
  std::vector<double> refits, copies, rows;
  for (auto _ : state) {
    refits.push_back(ours.refit());
    copies.push_back(copy.run());
    rows.push_back(strided.run());
  }
  const auto bytes = static_cast<double>(ours.bytes());
  state.counters["ours_GB/s"] = bytes / median(refits) / 1e9;
  state.counters["memcpy_GB/s"] = bytes / median(copies) / 1e9;
  state.counters["strided_GB/s"] = bytes / median(rows) / 1e9;
  state.counters["ratio"] = median(copies) / median(refits);
  state.counters["to_strided"] = median(rows) / median(refits);
  state.counters["threads"] = threads();
}

} // namespace

// Only rows are sharded: every move is contiguous on both sides.
BENCHMARK_CAPTURE(paired, contiguous, "tests/bench/contiguous.yaml", {})->Iterations(21)->Unit(benchmark::kMillisecond);
// Rows, columns, interleaved QKV, and gate and up of a real model.
BENCHMARK_CAPTURE(paired, llama3_8b_4_layers, "examples/llama3-8b-16-to-8.yaml", {"model.let.layers=4"})
    ->Iterations(11)
    ->Unit(benchmark::kMillisecond);

BENCHMARK_MAIN();
