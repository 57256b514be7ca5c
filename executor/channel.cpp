#include "executor/channel.h"

#include "executor/module.h"

namespace reshard {

std::string openChannel(const std::string &name, double seconds, std::unique_ptr<Channel> &channel, bool &timedOut) {
  void *function = nullptr;
  // Global symbols: MPI loads plugins of its own that need them.
  if (std::string error = loadModule(name, "reshard_open_channel", kChannelVersion, Symbols::global, function);
      !error.empty())
    return error;
  char error[512] = "";
  int late = 0;
  channel.reset(reinterpret_cast<OpenChannel>(function)(seconds, error, sizeof error, &late));
  timedOut = late != 0;
  return channel ? std::string() : "backend '" + name + "': " + error;
}

} // namespace reshard
