// SPDX-License-Identifier: Apache-2.0
// The rule of dependency levels (Step::level), shared by compiler and loader.
#pragma once

#include <cstdint>

namespace reshard::schema {

/// The number of levels of a plan: Step::level has 16 bits. Elements that are staged in phases of 32 MiB need two
/// levels for each phase; the limit is 1 TiB of them on one rank.
inline constexpr uint32_t kMaxLevels = 1 << 16;

/// Whether a step must have a greater dependency level than a step of its `after`. A transport that copies between the
/// ranks of one process runs level after level, without slots of the arena. So the level need not grow where `after`
/// only hands over a slot: between two sends, between two receives, and from a send to a local step. A receive that
/// waits for a send overwrites bytes that the send relays. `Kind`: StepKind of the plan or of the IR.
template <class Kind> constexpr bool raisesLevel(Kind before, Kind step) {
  return before == Kind::send ? step == Kind::recv : before != Kind::recv || step != Kind::recv;
}

} // namespace reshard::schema
