// SPDX-License-Identifier: Apache-2.0
// Checks that the names in a manifest are unique: the names of tensors, and the names of params on each mesh rank.
#pragma once

#include "base/status.h"
#include "schema/plan_generated.h"

#include <cstdint>

namespace reshard::schema {

/// Fails if two names are equal. Tables by name (of tensors in the tools, of bound memory in the executor) rely on it.
/// All other checks of the manifest come first. Adds to `work`; if that exceeds `most`, the error is kTooMuch.
Status checkNames(const Manifest &manifest, int64_t &work, int64_t most);

inline constexpr const char *kTooMuch = "checking it would take too long: it has too many mesh ranks, params or index "
                                        "values";

} // namespace reshard::schema
