// SPDX-License-Identifier: Apache-2.0
#include "executor/interfaces/channel.h"

#include "executor/interfaces/module.h"

namespace reshard {
Result<std::unique_ptr<Channel>> openChannel(const std::string &name, const ChannelOptions &options) {
  // Global symbols: MPI loads plugins of its own that need them.
  const Result<void *> function = loadModule(name, "reshard_open_channel", kChannelVersion, Symbols::global);
  if (!function.ok())
    return function.status();
  Status error;
  std::unique_ptr<Channel> channel(reinterpret_cast<OpenChannel>(*function)(options, error));
  if (!channel)
    return std::move(error).withPrefix("backend '" + name + "': ");
  return channel;
}

} // namespace reshard
