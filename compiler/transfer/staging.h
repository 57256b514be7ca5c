// SPDX-License-Identifier: Apache-2.0
// The alignment of messages in the arena, which the passes schedule and assign-staging must agree on, and their common
// error.
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
