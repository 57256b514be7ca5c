// SPDX-License-Identifier: Apache-2.0
// Reads and resolves a job, for fuzzers of the files that a job consists of.
#pragma once

#include "compiler/frontend/frontend.h"
#include "compiler/resolve/steps.h"

#include <cstdlib>
#include <string>

namespace reshard::tests {

/// Aborts unless the file is a valid job or gives errors of less than 1 MiB.
inline void readAndResolve(const std::string &path) {
  Diagnostics diagnostics;
  const auto job = readJob(path, {}, diagnostics);
  if (job.has_value() != diagnostics.ok())
    std::abort();
  if (job)
    resolve(*job, diagnostics);
  if (diagnostics.text().size() > (size_t{1} << 20))
    std::abort();
}

} // namespace reshard::tests
