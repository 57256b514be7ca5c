// SPDX-License-Identifier: Apache-2.0
// Conversions compared with memcpy of their source bytes: one thread, 256 MiB of source, memory touched before, both
// alternately in one run. Quote the ratio, not the rates, which count source bytes. `NAME/LEVEL` runs at that level of
// the CPU; the values are distributed like weights, normal around 0.
//   bench-convert [--benchmark_filter=…]

#include "kernels/cpu/quantized.h"
#include "tests/lib/times.h"

#include <benchmark/benchmark.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

using namespace reshard;
using namespace reshard::kernels;
using reshard::tests::median;
using reshard::tests::now;

namespace {

constexpr uint64_t kSource = 256 << 20, kColumns = 8192; // bytes of the source; columns of the matrices of block FP8

/// The memory of a conversion. A target has at most twice the bytes of the source.
struct Memory {
  std::byte *source, *target, *scales;
};

std::byte *touched(uint64_t bytes) {
  constexpr uint64_t kPage = 4096;
  auto *memory = static_cast<std::byte *>(std::aligned_alloc(kPage, bytes));
  std::memset(memory, 1, bytes);
  return memory;
}

/// Fills memory with a normal distribution as wide as that of usual weights, in fp32 or bf16.
void fillWeights(std::byte *source, NumberFormat format) {
  constexpr uint64_t kPeriod = 1 << 20; // repeated, because drawing all values would take longer than the benchmark
  std::mt19937_64 random(1);
  std::normal_distribution<float> weight(0, 0.02f);
  const uint64_t bytes = kPeriod * itemBytes(format);
  for (uint64_t i = 0; i < kPeriod; ++i) {
    const uint32_t code = encode(format, weight(random), Overflow::saturate);
    std::memcpy(source + i * itemBytes(format), &code, itemBytes(format));
  }
  for (uint64_t at = bytes; at < kSource; at += bytes)
    std::memcpy(source + at, source, bytes);
}

struct Case {
  const char *name;
  NumberFormat source;
  std::function<void(const Memory &, uint64_t count, ConvertOptions)> convert;
};

/// Runs the conversion and memcpy alternately; one iteration is one of each.
void paired(benchmark::State &state, const Case &each, CpuLevel level) {
  static const Memory memory = {touched(kSource), touched(2 * kSource), touched(kSource / 16)};
  if (itemBytes(each.source) > 1)
    fillWeights(memory.source, each.source);
  else
    std::memset(memory.source, 0x31, kSource);
  std::memset(memory.scales, 0x70, kSource / 16); // 2^-15 in E8M0
  const uint64_t count = kSource / itemBytes(each.source);
  std::vector<double> ours, theirs;
  for (auto _ : state) {
    const double begin = now();
    each.convert(memory, count, {.stream = true, .level = level});
    benchmark::ClobberMemory();
    const double middle = now();
    std::memcpy(memory.target, memory.source, kSource);
    benchmark::ClobberMemory();
    ours.push_back(middle - begin);
    theirs.push_back(now() - middle);
  }
  const auto bytes = static_cast<double>(kSource);
  state.counters["GB/s"] = bytes / median(ours) / 1e9;
  state.counters["memcpy_GB/s"] = bytes / median(theirs) / 1e9;
  state.counters["ratio"] = median(theirs) / median(ours);
}

/// Codes and scales of a square matrix, or of one row if blocks have one row.
BlockMatrix matrix(Quantization format, const Memory &m, uint64_t count, bool quantizes) {
  const uint64_t columns = formatOf(format).blockRows > 1 ? kColumns : count;
  return {.format = format,
          .wide = NumberFormat::bf16,
          .rows = count / columns,
          .columns = columns,
          .wideStride = static_cast<int64_t>(columns * 2),
          .codeStride = static_cast<int64_t>(columns),
          .codes = quantizes ? m.target : m.source,
          .scales = m.scales};
}

/// Quantizes bf16 elements.
Case quantizing(const char *name, Quantization format) {
  return {name, NumberFormat::bf16, [format](const Memory &m, uint64_t count, ConvertOptions how) {
            BlockMatrix target = matrix(format, m, count, true);
            if (formatOf(format).rule == ScaleRule::tensorQuotient) // both passes: the amax, then the codes
              target.tensorScale = nvfp4TensorScale(amax(NumberFormat::bf16, m.source, {1, count, 0, 0}, how));
            quantize(target, m.source, how);
          }};
}

/// Dequantizes to bf16. A byte has one or two codes.
Case dequantizing(const char *name, Quantization format) {
  return {name, NumberFormat::fp8_e4m3, [format](const Memory &m, uint64_t count, ConvertOptions how) {
            dequantize(matrix(format, m, count, false), m.target, how);
          }};
}

Case casting(const char *name, NumberFormat from, NumberFormat to) {
  return {name, from, [from, to](const Memory &m, uint64_t count, ConvertOptions how) {
            cast({.to = to,
                  .target = m.target,
                  .from = from,
                  .source = m.source,
                  .count = count,
                  .overflow = Overflow::saturate},
                 how);
          }};
}

const std::vector<Case> &cases() {
  static const std::vector<Case> all = {
      quantizing("bf16-to-mxfp8", Quantization::mxfp8),
      casting("bf16-to-fp8_e4m3", NumberFormat::bf16, NumberFormat::fp8_e4m3),
      casting("fp32-to-bf16", NumberFormat::fp32, NumberFormat::bf16),
      dequantizing("mxfp8-to-bf16", Quantization::mxfp8),
      quantizing("bf16-to-block-fp8", Quantization::block_fp8),
      quantizing("bf16-to-block-fp8-ue8m0", Quantization::block_fp8_ue8m0),
      quantizing("bf16-to-nvfp4", Quantization::nvfp4),
      quantizing("bf16-to-mxfp4", Quantization::mxfp4),
  };
  return all;
}

} // namespace

int main(int argc, char **argv) {
  const std::pair<const char *, CpuLevel> levels[] = {
      {"portable", CpuLevel::Portable}, {"avx2", CpuLevel::Avx2}, {"avx512", CpuLevel::Avx512}};
  for (const Case &each : cases())
    for (const auto &[name, level] : levels)
      if (level <= cpuLevel())
        benchmark::RegisterBenchmark((std::string(each.name) + "/" + name).c_str(), paired, each, level)
            ->Iterations(level == CpuLevel::Portable ? 1 : 11)
            ->Unit(benchmark::kMillisecond);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv))
    return 1;
  benchmark::RunSpecifiedBenchmarks();
}
