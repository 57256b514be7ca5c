// SPDX-License-Identifier: Apache-2.0
// Checks that the quantized views of an endpoint match their base params.
#pragma once

#include "base/status.h"
#include "schema/plan_generated.h"

#include <string>

namespace reshard::schema {

/// All other checks of the endpoint's params come first. Adds the effort to `work`.
Status checkViews(const Endpoint &endpoint, bool target, const std::string &role, int64_t &work);

} // namespace reshard::schema
