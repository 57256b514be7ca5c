// SPDX-License-Identifier: Apache-2.0
// Backends are modules, libreshard_NAME.so, searched beside this library, beside the program and on the library path.
// They are loaded on demand, so that one executor runs on machines with and without MPI, CUDA and NCCL.
#pragma once

#include "base/status.h"

#include <cstdint>
#include <string>

namespace reshard {

enum class Symbols { local, global };

/// Loads the module of a backend, which is never unloaded, and finds its function `entry`. `version`: the required
/// value of the module's uint32_t `<entry>_version`. `symbols`: whether libraries that the module loads can use its
/// symbols.
Result<void *> loadModule(const std::string &name, const std::string &entry, uint32_t version, Symbols symbols);

/// Loads the UCX of the variable RESHARD_UCX_ROOT, if it is set, for backend `ucx`.
Status loadOtherUcx();

} // namespace reshard
