// How much a round holds: what the staging limit allows, and the size of a message that the topology makes best.
#pragma once

#include "compiler/schedule/rounds.h"
#include "ir/ir.h"

#include <string>
#include <vector>

namespace reshard {

/// Messages of the best size of each tier, as far as the staging limit allows. The arena holds two rounds in each
/// direction, so that one is packed while the other is sent, or unpacked while the other is received. An error text
/// where the staging limit would make too many messages.
std::string roundLimits(const std::vector<Stream> &flows, const ir::Layout &layout, int64_t gathered,
                        RoundLimits &limits);

} // namespace reshard
