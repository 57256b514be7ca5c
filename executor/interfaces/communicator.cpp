// SPDX-License-Identifier: Apache-2.0
#include "executor/interfaces/communicator.h"

#include "executor/interfaces/module.h"

namespace reshard {

Result<std::unique_ptr<Communicator>> openCommunicator(const std::string &name, const CommunicatorOptions &options) {
  const Result<void *> function = loadModule(name, "reshard_open_communicator", kCommunicatorVersion, Symbols::local);
  if (!function.ok())
    return function.status();
  Status error;
  std::unique_ptr<Communicator> communicator(reinterpret_cast<OpenCommunicator>(*function)(options, error));
  if (!communicator)
    return std::move(error).withPrefix("backend '" + name + "': ");
  return communicator;
}

} // namespace reshard
