// SPDX-License-Identifier: Apache-2.0
#include "compiler/transfer/staging.h"

#include "llvm/Support/raw_ostream.h"

#include <algorithm>

namespace reshard {

namespace {

/// The largest integer whose square is at most n, by Newton's method.
int64_t squareRoot(__int128 n) {
  __int128 root = n, next = (n + 1) / 2;
  while (next < root) {
    root = next;
    next = (root + n / root) / 2;
  }
  return static_cast<int64_t>(root);
}

} // namespace

int64_t bestChunkBytes(int64_t bytes, int64_t partners, int64_t hops, int64_t rate, int64_t latency) {
  const __int128 perMessage =
      static_cast<__int128>(rate) * latency / 1'000'000'000; // bytes that a port could send during the latency
  int64_t best = squareRoot(2 * bytes * perMessage / std::max<int64_t>(1, partners));
  if (hops > 0)
    best = std::min(best, squareRoot(bytes * perMessage / hops));
  return std::clamp(best, kMinMessageBytes, kMaxMessageBytes) / kStagingAlignment * kStagingAlignment;
}

void StagingLimitError::log(llvm::raw_ostream &out) const {
  out << "a staging limit of " << limit_ << " bytes is too small for " << use_ << ", expected at least " << needed_
      << " bytes";
}

} // namespace reshard
