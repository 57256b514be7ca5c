#include "executor/group.h"

#include "executor/module.h"

namespace reshard {

std::string openGroup(const std::string &name, const GroupOptions &options, std::unique_ptr<Group> &group,
                      bool &timedOut) {
  void *function = nullptr;
  if (std::string error = loadModule(name, "reshard_open_group", kGroupVersion, Symbols::local, function);
      !error.empty())
    return error;
  char error[512] = "";
  int late = 0;
  group.reset(reinterpret_cast<OpenGroup>(function)(options, error, sizeof error, &late));
  timedOut = late != 0;
  return group ? std::string() : "backend '" + name + "': " + error;
}

} // namespace reshard
