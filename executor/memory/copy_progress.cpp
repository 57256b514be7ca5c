// SPDX-License-Identifier: Apache-2.0
#include "executor/memory/copy_progress.h"

#include "executor/memory/chunked_copies.h"

#include <algorithm>
#include <chrono>

namespace reshard {

namespace {

constexpr double kSeconds = 0.02; // between two reports

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

} // namespace

Result<uint64_t> CopyReports::set(CopyWatch watch) {
  if (watch.done > copies_.size())
    return invalid("found " + std::to_string(watch.done) + " copies done, expected at most " +
                   std::to_string(copies_.size()));
  watch_ = std::move(watch);
  return copies_.size();
}

bool CopyReports::skips(size_t chunk) const { return chunk < watch_.done && !copies_.transient(chunk); }

void CopyReports::beginRun() {
  counted_ = 0;
  bytesDone_ = 0;
  report(std::min<uint64_t>(watch_.done, copies_.size()));
}

bool CopyReports::due() const { return wanted() && seconds() - last_ >= kSeconds; }

void CopyReports::report(size_t done) {
  if (!wanted())
    return;
  last_ = seconds();
  for (; counted_ < done; ++counted_)
    bytesDone_ += copies_.bytes(counted_);
  watch_.at(
      {done, copies_.size(), bytesDone_, copies_.bytes(), done < copies_.size() ? copies_.target(done) : nullptr});
}

} // namespace reshard
