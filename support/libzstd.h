// SPDX-License-Identifier: Apache-2.0
// Compression by libzstd, which is loaded when it is first needed.
#pragma once

#include "support/status.h"

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace reshard {

/// One frame of zstd that states the number of bytes that it holds. An error if libzstd cannot be loaded or fails.
Result<std::vector<std::byte>> compressed(std::span<const std::byte> bytes);

/// The bytes of a frame, which must be `bytes` ones. An error if they are not, the frame is damaged, or libzstd cannot
/// be loaded.
Result<std::unique_ptr<std::byte[]>> decompressed(std::span<const std::byte> frame, size_t bytes);

} // namespace reshard
