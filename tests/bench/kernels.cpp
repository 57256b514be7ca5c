// SPDX-License-Identifier: Apache-2.0
// copyRows compared with a loop of memcpy over the same rows: one thread, 256 MiB of payload, memory touched before,
// both alternately in one run. Quote the ratio, not the rates. A stride is four rows, like column shards of four ranks.
// The transposed shapes are nearly square with powers of two as sides, like weights. `…-shifted` begins 16 bytes after
// a cache line boundary; `pack-LEVEL` is pack at each level of the CPU.
//   bench-kernels [--benchmark_filter=…]

#include "kernels/kernels.h"
#include "kernels/cpu/streaming_stores.h"
#include "tests/lib/times.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace reshard::kernels;
using reshard::tests::median;
using reshard::tests::now;

namespace {

constexpr uint64_t kPayload = 256 << 20, kGap = 4, kShift = 16;

/// Rows with strides of `sourceGap` and `targetGap` rows; 1 means contiguous.
Strided apart(uint64_t rowBytes, uint64_t sourceGap, uint64_t targetGap) {
  Strided shape;
  shape.rowBytes = rowBytes;
  shape.loopCount = 1;
  shape.loops[0] = {kPayload / rowBytes, static_cast<int64_t>(sourceGap * rowBytes),
                    static_cast<int64_t>(targetGap * rowBytes)};
  return shape;
}

/// The transposition of a matrix of elements of rowBytes, in the order of the source.
Strided transposed(uint64_t rowBytes) {
  uint64_t columns = 1;
  while (columns * columns * rowBytes < kPayload)
    columns *= 2;
  const auto row = static_cast<int64_t>(rowBytes);
  const uint64_t lines = kPayload / rowBytes / columns;
  Strided shape;
  shape.rowBytes = rowBytes;
  shape.loopCount = 2;
  shape.loops[0] = {lines, static_cast<int64_t>(columns) * row, row};
  shape.loops[1] = {columns, row, static_cast<int64_t>(lines) * row};
  return shape;
}

/// The copy that a program without kernels would use: two loops and memcpy.
void memcpyRows(std::byte *target, const std::byte *source, const Strided &shape) {
  const Loop outer = shape.loopCount > 1 ? shape.loops[0] : Loop{1, 0, 0}, inner = shape.loops[shape.loopCount - 1];
  for (uint64_t i = 0; i < outer.count; ++i)
    for (uint64_t k = 0; k < inner.count; ++k)
      std::memcpy(target + static_cast<int64_t>(i) * outer.targetStride + static_cast<int64_t>(k) * inner.targetStride,
                  source + static_cast<int64_t>(i) * outer.sourceStride + static_cast<int64_t>(k) * inner.sourceStride,
                  shape.rowBytes);
}

/// Memory for the largest shape, page-aligned as large tensors are.
std::byte *touched(int value) {
  constexpr uint64_t kPage = 4096;
  auto *memory = static_cast<std::byte *>(std::aligned_alloc(kPage, kPayload * kGap + kPage));
  std::memset(memory, value, kPayload * kGap + kPage);
  return memory;
}

/// Runs the kernel and memcpy alternately; one iteration is one of each.
void paired(benchmark::State &state, const Strided &shape, CpuLevel level, uint64_t shift) {
  static std::byte *const sourceMemory = touched(1), *const targetMemory = touched(2);
  std::byte *source = sourceMemory + shift, *target = targetMemory + shift;
  Strided simple = shape;
  simplify(simple);
  std::vector<double> ours, theirs;
  for (auto _ : state) {
    const double begin = now();
    copyRowsAt(level, {target, source, simple, 0, simple.rows()}, /*stream=*/true);
    benchmark::ClobberMemory();
    const double middle = now();
    memcpyRows(target, source, shape);
    benchmark::ClobberMemory();
    ours.push_back(middle - begin);
    theirs.push_back(now() - middle);
  }
  const auto bytes = static_cast<double>(shape.bytes());
  state.counters["GB/s"] = bytes / median(ours) / 1e9;
  state.counters["memcpy_GB/s"] = bytes / median(theirs) / 1e9;
  state.counters["ratio"] = median(theirs) / median(ours);
}

void add(const std::string &name, const Strided &shape, CpuLevel level = cpuLevel(), uint64_t shift = 0) {
  benchmark::RegisterBenchmark((name + "/" + std::to_string(shape.rowBytes)).c_str(), paired, shape, level, shift)
      ->Iterations(11)
      ->Unit(benchmark::kMillisecond);
}

} // namespace

int main(int argc, char **argv) {
  const std::vector<uint64_t> rows = {16, 64, 256, 1 << 10, 4 << 10, 64 << 10, 1 << 20};
  for (const uint64_t row : rows)
    add("contiguous", apart(row, 1, 1));
  for (const uint64_t row : rows)
    add("pack", apart(row, kGap, 1));
  for (const uint64_t row : rows)
    add("unpack", apart(row, 1, kGap));
  for (const uint64_t row : rows)
    add("strided", apart(row, kGap, kGap));
  for (const uint64_t row : {2, 4, 8, 16, 64, 256})
    add("transposed", transposed(row));
  for (const uint64_t row : {64, 256, 1 << 10, 4 << 10}) {
    add("pack-shifted", apart(row, kGap, 1), cpuLevel(), kShift);
    add("strided-shifted", apart(row, kGap, kGap), cpuLevel(), kShift);
  }
  const char *levels[] = {"portable", "sse2", "avx2"}; // higher levels copy with AVX2
  for (int level = 0; level <= static_cast<int>(std::min(cpuLevel(), CpuLevel::Avx2)); ++level)
    for (const uint64_t row : {64, 256, 4 << 10})
      add(std::string("pack-") + levels[level], apart(row, kGap, 1), static_cast<CpuLevel>(level));
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv))
    return 1;
  benchmark::RunSpecifiedBenchmarks();
}
