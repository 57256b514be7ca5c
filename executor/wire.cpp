#include "executor/wire.h"

#include "executor/module.h"

namespace reshard {

std::string openWire(const std::string &name, double seconds, std::unique_ptr<Wire> &wire, bool &timedOut) {
  void *function = nullptr;
  // Its symbols are global: MPI loads parts of its own that need them.
  if (std::string error = loadModule(name, "reshard_open_wire", kWireVersion, Symbols::global, function);
      !error.empty())
    return error;
  char error[512] = "";
  int late = 0;
  wire.reset(reinterpret_cast<OpenWire>(function)(seconds, error, sizeof error, &late));
  timedOut = late != 0;
  return wire ? std::string() : "backend '" + name + "': " + error;
}

} // namespace reshard
