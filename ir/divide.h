// SPDX-License-Identifier: Apache-2.0
// Integer division that rounds down or up, also of negative numbers.
#pragma once

#include <cstdint>

namespace reshard {

constexpr int64_t floorDivide(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
constexpr int64_t ceilDivide(int64_t a, int64_t b) { return -floorDivide(-a, b); }

} // namespace reshard
