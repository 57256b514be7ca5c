// Whether the faces of an endpoint fit what they show.
#pragma once

#include "schema/plan_generated.h"

#include <string>

namespace reshard::schema {

/// All else about the endpoint's params must hold. `work` counts what was looked at. An error text, empty where all is
/// well.
std::string checkViews(const Endpoint &endpoint, bool target, const std::string &role, int64_t &work);

} // namespace reshard::schema
