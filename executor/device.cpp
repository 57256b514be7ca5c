#include "executor/device.h"

#include "executor/module.h"

namespace reshard {

std::string openDevice(const std::string &name, int number, std::unique_ptr<Device> &device) {
  void *function = nullptr;
  if (std::string error = loadModule(name, "reshard_open_device", kDeviceVersion, Symbols::local, function);
      !error.empty())
    return "no GPU: " + error;
  char error[512] = "";
  device.reset(reinterpret_cast<OpenDevice>(function)(number, error, sizeof error));
  return device ? std::string() : std::string("no GPU: ") + error;
}

} // namespace reshard
