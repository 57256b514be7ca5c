// SPDX-License-Identifier: Apache-2.0
#include "executor/interfaces/device.h"

#include "executor/interfaces/module.h"

namespace reshard {

Result<std::unique_ptr<Device>> openDevice(const std::string &name, int number) {
  const Result<void *> function = loadModule(name, "reshard_open_device", kDeviceVersion, Symbols::local);
  Status error = function.status();
  std::unique_ptr<Device> device(function.ok() ? reinterpret_cast<OpenDevice>(*function)(number, error) : nullptr);
  if (!device)
    return std::move(error).withPrefix("no GPU: ");
  return device;
}

} // namespace reshard
