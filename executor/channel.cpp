// SPDX-License-Identifier: Apache-2.0
#include "executor/channel.h"

#include "executor/module.h"

#include <cstdlib>
#include <dlfcn.h>

namespace reshard {
namespace {

/// Loads the UCX of RESHARD_UCX_ROOT. The module needs libucp.so.0, and the loader takes the one that is loaded
/// already.
Status loadUcx() {
  const char *root = std::getenv("RESHARD_UCX_ROOT");
  if (!root || !*root)
    return {};
  const std::string path = std::string(root) + "/lib/libucp.so.0";
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL))
    return {};
  return failed("RESHARD_UCX_ROOT=" + std::string(root) + ": " + dlerror() +
                "; expected a folder with lib/libucp.so.0 of UCX 1.13 or a later 1.x");
}

} // namespace

Result<std::unique_ptr<Channel>> openChannel(const std::string &name, const ChannelOptions &options) {
  if (Status status = name == "ucx" ? loadUcx() : Status(); !status.ok())
    return std::move(status).withPrefix("backend 'ucx': ");
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
