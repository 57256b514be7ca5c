// The size of a message that costs least on a link.
#pragma once

#include <cstdint>

namespace reshard {

constexpr int64_t kLeastMessage = 1 << 20, kMostMessage = 64 << 20; // bytes of a message, where no limit asks for less

/// Messages of c bytes cost a port of L bytes and p partners about p * c / 2 / rate (the last message to each partner
/// is shorter, and others wait) and L / c * latency: best is c = sqrt(2 * L * latency * rate / p). A stream over n hops
/// costs (n - 1) * c / rate until the last one is busy: there c = sqrt(L * latency * rate / (n - 1)). `bytes`: that a
/// port has to move with `partners` others, of which some go on over `hops` hops after the first; `rate` in bytes per
/// second, `latency` in nanoseconds. In bytes.
int64_t bestChunkBytes(int64_t bytes, int64_t partners, int64_t hops, int64_t rate, int64_t latency);

} // namespace reshard
