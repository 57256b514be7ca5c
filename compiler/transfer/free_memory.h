// SPDX-License-Identifier: Apache-2.0
// Frees lists that are not needed any more before their owner ends.
#pragma once

namespace reshard {

/// Empties a container and frees its memory, which assigning {} to a vector keeps.
template <class Container> void freeMemory(Container &container) { Container().swap(container); }

} // namespace reshard
