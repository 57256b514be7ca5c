// Backends are modules, libreshard_NAME.so, found beside this library, the program, or on the library path and loaded
// when they are asked for: so that one executor runs on machines with and without what they need.
#pragma once

#include <cstdint>
#include <string>

namespace reshard {

enum class Symbols { local, global };

/// Loads the module of a backend and finds `entry` in it, which stays loaded. `version`: what the module's uint32_t
/// `<entry>_version` must be. `symbols`: whether modules that it loads itself may use its. An error text says what is
/// missing; empty on success.
std::string loadModule(const std::string &name, const std::string &entry, uint32_t version, Symbols symbols,
                       void *&function);

} // namespace reshard
