// SPDX-License-Identifier: Apache-2.0
// The chunk size with the least cost on a link.
#pragma once

#include <cstdint>

namespace reshard {

constexpr int64_t kMinMessageBytes = 1 << 20,
                  kMaxMessageBytes = 64 << 20; // bytes; a staging limit can require smaller ones

/// The best chunk size in bytes for a port that moves `bytes` bytes with `partners` other ports, some of them over
/// `hops` hops after the first. `rate` in bytes per second, `latency` in nanoseconds.
///
/// Chunks of c bytes cost a port of L bytes and p partners about p * c / 2 / rate (the last chunk for each partner is
/// shorter, and other ports wait) and L / c * latency. The sum is least at c = sqrt(2 * L * latency * rate / p). With h
/// more hops, h * c / rate passes until the last hop is busy; that sum is least at c = sqrt(L * latency * rate / h).
/// The result is the smaller of both, within [kMinMessageBytes, kMaxMessageBytes].
int64_t bestChunkBytes(int64_t bytes, int64_t partners, int64_t hops, int64_t rate, int64_t latency);

} // namespace reshard
