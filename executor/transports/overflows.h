// SPDX-License-Identifier: Apache-2.0
// Values beyond the range of the dtype to which a run casts them.
#pragma once

#include "executor/transports/transport.h"

#include <vector>

namespace reshard {

/// Gives each param that is cast, and that must hold every value, the number in which its casts report a value beyond
/// the range. The memory of a device is the transport's.
Status watchOverflows(std::vector<LocalRank> &ranks, Transport &transport);

/// Forgets what the casts of earlier runs, and of those that the caller enqueued on a device, have reported.
Status clearOverflows(const std::vector<LocalRank> &ranks, Transport &transport);

/// Fails, after a run, if a value was beyond the range; names the params.
Status checkOverflows(const Plan &plan, const std::vector<LocalRank> &ranks, Transport &transport);

} // namespace reshard
