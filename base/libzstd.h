// SPDX-License-Identifier: Apache-2.0
// Compression by libzstd, which is loaded when it is first needed.
#pragma once

#include "base/status.h"

#include <cstddef>
#include <span>
#include <vector>

namespace reshard {

/// An error if libzstd cannot be loaded.
Status needLibzstd();

/// One frame of zstd. An error if libzstd cannot be loaded or fails.
Result<std::vector<std::byte>> compressed(std::span<const std::byte> bytes);

/// Fills `to` with the bytes of a frame. An error if the frame is damaged or has another number of bytes, or if libzstd
/// cannot be loaded.
Status decompress(std::span<const std::byte> frame, std::span<std::byte> to);

} // namespace reshard
