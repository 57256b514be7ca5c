// SPDX-License-Identifier: Apache-2.0
#include "executor/interfaces/messenger.h"

#include "executor/interfaces/module.h"

namespace reshard {

Result<std::unique_ptr<Messenger>> openMessenger(const std::string &name) {
  const Result<void *> function = loadModule(name, "reshard_open_messenger", kMessengerVersion, Symbols::local);
  if (!function.ok())
    return function.status();
  Status error;
  std::unique_ptr<Messenger> messenger(reinterpret_cast<OpenMessenger>(*function)(error));
  if (!messenger)
    return std::move(error).withPrefix("backend '" + name + "': ");
  return messenger;
}

} // namespace reshard
