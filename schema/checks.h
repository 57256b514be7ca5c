// SPDX-License-Identifier: Apache-2.0
// The parts of the check of a manifest that have a file of their own: names, and quantized views.
#pragma once

#include "base/status.h"
#include "schema/plan_generated.h"

#include <cstdint>
#include <string>

namespace reshard::schema {

/// Fails if two names are equal. Tables by name (of tensors in the tools, of bound memory in the executor) rely on it.
/// All other checks of the manifest come first. Adds to `work`; if that exceeds `most`, the error is kTooMuch.
Status checkNames(const Manifest &manifest, int64_t &work, int64_t most);

inline constexpr const char *kTooMuch = "checking it would take too long: it has too many mesh ranks, params or index "
                                        "values";

/// All other checks of the endpoint's params come first. Adds the effort to `work`.
Status checkViews(const Endpoint &endpoint, bool target, const std::string &role, int64_t &work);

} // namespace reshard::schema
