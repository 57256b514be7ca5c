// SPDX-License-Identifier: Apache-2.0
// TensorDigest compared with reading the same memory (the sum of its words of 64 bits, by the widest vectors): one
// thread, 256 MiB, memory touched before, both alternately in one run. Quote the ratio, not the rates. `rows/N`:
// elements that are contiguous in N bytes at a time, like column shards; `transposed`: elements that are not.
//   bench-digest [--benchmark_filter=…]

#include "kernels/cpu/tensor_digest.h"
#include "tests/lib/times.h"

#include <benchmark/benchmark.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using namespace reshard::kernels;
using reshard::tests::median;
using reshard::tests::now;

namespace {

constexpr uint64_t kBytes = 256 << 20;

const std::byte *touched() {
  auto *memory = static_cast<std::byte *>(std::aligned_alloc(4096, kBytes));
  for (uint64_t at = 0; at < kBytes; ++at)
    memory[at] = static_cast<std::byte>(at * 31);
  return memory;
}

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t
readAll(const std::byte *memory) {
  constexpr size_t kAtOnce = 32; // independent sums, so that additions do not wait for each other
  uint64_t sums[kAtOnce] = {}, words[kAtOnce];
  for (uint64_t at = 0; at < kBytes; at += sizeof words) {
    std::memcpy(words, memory + at, sizeof words);
    for (size_t i = 0; i < kAtOnce; ++i)
      sums[i] += words[i];
  }
  uint64_t sum = 0;
  for (const uint64_t each : sums)
    sum += each;
  return sum;
}

/// One digest of all memory as elements of `item` bytes, in rows of `row` bytes whose elements are `step` bytes apart.
struct Case {
  uint64_t item, row;
  int64_t step;
  CpuLevel level;
};

/// Digests and reads alternately; one iteration is one of each.
void paired(benchmark::State &state, const Case &how) {
  static const std::byte *const memory = touched();
  const uint64_t apart = static_cast<uint64_t>(how.step) / how.item, perRow = how.row / how.item;
  std::vector<double> ours, theirs;
  for (auto _ : state) {
    const double begin = now();
    TensorDigest digest;
    uint64_t index = 1; // not at a word's boundary
    for (uint64_t at = 0; at < kBytes; at += how.row * apart)
      if (apart == 1) {
        digest.add(memory + at, how.item, how.step, index, perRow, how.level);
        index += 3 * perRow;
      } else {
        digest.add(memory + at, how.item, {apart, perRow, how.step, index, 3 * perRow}, how.level);
        index += 3 * perRow * apart;
      }
    benchmark::DoNotOptimize(digest);
    const double middle = now();
    benchmark::DoNotOptimize(readAll(memory));
    ours.push_back(middle - begin);
    theirs.push_back(now() - middle);
  }
  state.counters["GB/s"] = kBytes / median(ours) / 1e9;
  state.counters["read_GB/s"] = kBytes / median(theirs) / 1e9;
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.size(); ++i)
    ratios.push_back(theirs[i] / ours[i]);
  state.counters["ratio"] = median(ratios);
}

void add(const std::string &name, const Case &how) {
  benchmark::RegisterBenchmark(name.c_str(), paired, how)->Iterations(21)->Unit(benchmark::kMillisecond);
}

} // namespace

int main(int argc, char **argv) {
  const std::pair<const char *, CpuLevel> levels[] = {{"portable", CpuLevel::Portable}, {"avx2", CpuLevel::Avx2}};
  for (const auto &[name, level] : levels)
    if (level <= cpuLevel())
      for (const uint64_t item : {1, 2, 4})
        add(std::string("whole/") + name + "/" + std::to_string(item),
            {item, kBytes, static_cast<int64_t>(item), level});
  for (const uint64_t row : {128, 256, 1 << 10, 2 << 10, 4 << 10, 64 << 10})
    add("rows/" + std::to_string(row), {2, row, 2, cpuLevel()});
  add("transposed/128", {2, 4 << 10, 128, cpuLevel()}); // columns of 128 bytes in memory
  add("transposed/8192", {2, 16 << 10, 8 << 10, cpuLevel()});
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv))
    return 1;
  benchmark::RunSpecifiedBenchmarks();
}
