// How much a round holds: what the staging limit allows, and the size of a message that the topology makes best.
#pragma once

#include "compiler/rounds.h"
#include "ir/ir.h"

#include <string>
#include <vector>

namespace reshard {

/// Messages of c bytes cost a port of L bytes and p partners about p * c / 2 / rate (the last message to each partner
/// is shorter, and others wait) and L / c * latency: best is c = sqrt(2 * L * latency * rate / p). A stream over n hops
/// costs (n - 1) * c / rate until the last one is busy: there c = sqrt(L * latency * rate / (n - 1)). `bytes`: that a
/// port has to move with `partners` others, of which some go on over `hops` hops after the first; `rate` in bytes per
/// second, `latency` in nanoseconds. In bytes.
int64_t bestMessage(int64_t bytes, int64_t partners, int64_t hops, int64_t rate, int64_t latency);

/// Messages of the best size of each tier, as far as the staging limit allows. The arena holds two rounds in each
/// direction, so that one is packed while the other is sent, or unpacked while the other is received. An error text
/// where the staging limit would make too many messages.
std::string roundLimits(const std::vector<Stream> &streams, const ir::Layout &layout, int64_t gathered, RoundLimits &limits);

} // namespace reshard
