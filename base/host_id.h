// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace reshard {

/// Equal for processes that share memory and process ids (same host, boot and pid namespace).
uint64_t hostId();

} // namespace reshard
