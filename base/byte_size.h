// SPDX-License-Identifier: Apache-2.0
// Sizes in bytes, as people read and write them.
#pragma once

#include "base/status.h"

#include <cstdint>
#include <string>
#include <string_view>

namespace reshard {

/// "1.1 GiB", "512 B".
std::string humanBytes(double bytes);

/// Parses an integer, optionally with the unit KiB, MiB, GiB, KB, MB or GB: "512MiB", "64 KiB". The message of an error
/// is the text that was expected.
Result<int64_t> parseBytes(std::string_view text);

} // namespace reshard
