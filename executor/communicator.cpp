#include "executor/communicator.h"

#include "executor/module.h"

namespace reshard {

std::string openCommunicator(const std::string &name, const CommunicatorOptions &options,
                             std::unique_ptr<Communicator> &communicator, bool &timedOut) {
  void *function = nullptr;
  if (std::string error = loadModule(name, "reshard_open_communicator", kCommunicatorVersion, Symbols::local, function);
      !error.empty())
    return error;
  char error[512] = "";
  int late = 0;
  communicator.reset(reinterpret_cast<OpenCommunicator>(function)(options, error, sizeof error, &late));
  timedOut = late != 0;
  return communicator ? std::string() : "backend '" + name + "': " + error;
}

} // namespace reshard
