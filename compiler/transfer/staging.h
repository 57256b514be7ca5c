// SPDX-License-Identifier: Apache-2.0
// The sizes of chunks and their alignment in the arena, which passes must agree on, and their common error.
#pragma once

#include "llvm/Support/Error.h"

#include <cstdint>
#include <string>
#include <utility>

namespace reshard {

/// Every chunk starts at a multiple of this in the arena (bytes): enough for vector instructions and network transfers.
constexpr int64_t kStagingAlignment = 256;

constexpr int64_t alignUp(int64_t bytes) {
  return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

constexpr int64_t kMinMessageBytes = 1 << 20,
                  kMaxMessageBytes = 64 << 20; // bytes; a staging limit can require smaller ones

/// The best chunk size in bytes for a port that moves `bytes` bytes with `partners` other ports, some of them over
/// `hops` hops after the first. `rate` in bytes per second, `latency` in nanoseconds.
///
/// Chunks of c bytes cost a port of L bytes and p partners about p * c / 2 / rate (the last chunk for each partner is
/// shorter, and other ports wait) and L / c * latency. The sum is least at c = sqrt(2 * L * latency * rate / p). With h
/// more hops, h * c / rate passes until the last hop is busy; that sum is least at c = sqrt(L * latency * rate / h).
/// The result is the smaller of both, within [kMinMessageBytes, kMaxMessageBytes].
int64_t bestChunkBytes(int64_t bytes, int64_t partners, int64_t hops, int64_t rate, int64_t latency);

/// The staging limit is too small for the job. This is an error of the job, not of the pass that found it: compileJob
/// reports it at options.staging.
class StagingLimitError : public llvm::ErrorInfo<StagingLimitError> {
public:
  inline static char ID = 0;
  /// `limit` and `needed` are bytes of a rank's arena. `use` names what needs them: "32 bytes of messages".
  StagingLimitError(int64_t limit, int64_t needed, std::string use)
      : limit_(limit), needed_(needed), use_(std::move(use)) {}
  int64_t limit() const { return limit_; }
  /// The least limit that has room for `use`.
  int64_t needed() const { return needed_; }

  void log(llvm::raw_ostream &out) const override;
  std::error_code convertToErrorCode() const override { return llvm::inconvertibleErrorCode(); }

private:
  int64_t limit_, needed_;
  std::string use_;
};

} // namespace reshard
