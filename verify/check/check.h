// SPDX-License-Identifier: Apache-2.0
// Checks of target memory against the layouts of the manifest: transfers are not read.
#pragma once

#include "verify/check/copy_room.h"
#include "verify/check/coverage.h"
#include "verify/check/reference.h"

#include <cstdint>
#include <functional>
#include <string>

namespace reshard::verify {

struct CheckResult {
  uint64_t checkedBytes = 0, mismatches = 0; // checkedBytes in bytes, mismatches in elements
  std::string first;                         // describes the first mismatch
  std::string ambiguity; // why the right values are unknown: the source has two values for one element; else empty

  /// Adds the result of a part of the work.
  void add(CheckResult &&part);
  /// Adds elements of an instance that no part of its layout covers.
  void addUncovered(const schema::ParamInstance &instance, const Coverage &coverage);
};

/// Compares every element of a target's mesh rank with the synthesized value that its layout requires. An element that
/// no part covers counts as a mismatch. Codes and scales are compared with the quantized form of the values received.
CheckResult check(const Plan &plan, const MeshRankMemory &memory, uint64_t seed, unsigned threads);

/// The same, with the source's values from a reference that all mesh ranks may share.
CheckResult check(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads);

/// Checks only the quantized params, through their views. Works with a source in memory too. `room`: for the values
/// that are in memory at a time. `accessed`, which may be empty, is called on any thread after accesses to about 1 MiB.
CheckResult checkViews(const Plan &plan, const MeshRankMemory &memory, Reference &reference, unsigned threads,
                       CopyRoom &room, const std::function<void()> &accessed);

} // namespace reshard::verify
