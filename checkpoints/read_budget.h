// SPDX-License-Identifier: Apache-2.0
// What reading a checkpoint may take. The values of its files can refer to each other, so that a small file states many
// long names, large shapes and lists of chunks: without a bound it could take all memory.
#pragma once

#include <cstdint>
#include <string>

namespace reshard::checkpoints {

/// Memory and steps that are left, by the bytes of the files that were read. What valid checkpoints need is less than
/// half of it.
class ReadBudget {
public:
  /// Adds what a file or a part of one of so many bytes may take.
  void add(uint64_t inputBytes) {
    memory_ += kMemoryPerByte * static_cast<int64_t>(inputBytes);
    steps_ += kStepsPerByte * static_cast<int64_t>(inputBytes);
  }
  /// Takes bytes of memory and steps of a loop, of about a nanosecond each. False if there are not so many left.
  bool take(uint64_t bytes, uint64_t steps = 0) {
    constexpr auto kMaxTaken = uint64_t{1} << 62;
    memory_ -= static_cast<int64_t>(bytes < kMaxTaken ? bytes : kMaxTaken);
    steps_ -= static_cast<int64_t>(steps < kMaxTaken ? steps : kMaxTaken);
    return enough();
  }
  bool enough() const { return memory_ >= 0 && steps_ >= 0; }
  /// The end of an error if take() was false.
  static std::string problem() {
    return "its values refer to each other so often that they would take more than " + std::to_string(kMemoryPerByte) +
           " bytes of memory for each byte of the file and " + std::to_string(kMemory >> 20) +
           " MiB, or more than 1 s for each MiB";
  }

private:
  static constexpr int64_t kMemoryPerByte = 5, kMemory = 36 << 20; // the values of pickles need as much again
  static constexpr int64_t kStepsPerByte = 200, kSteps = 100'000'000;
  int64_t memory_ = kMemory, steps_ = kSteps;
};

} // namespace reshard::checkpoints
