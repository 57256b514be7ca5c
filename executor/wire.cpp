#include "executor/wire.h"

#include <dlfcn.h>
#include <filesystem>
#include <vector>

namespace reshard {

std::string openWire(const std::string &name, double seconds, std::unique_ptr<Wire> &wire, bool &timedOut) {
  const std::string file = "libreshard_" + name + ".so";
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  Dl_info own{};
  dladdr(reinterpret_cast<const void *>(&openWire), &own);
  const std::filesystem::path library = own.dli_fname ? own.dli_fname : ""; // that this is part of
  const auto beside = (library.has_parent_path() ? library : program).parent_path();
  std::string why;
  for (const std::string &path : std::vector<std::string>{beside / file, program.parent_path() / file, program.parent_path().parent_path() / "lib" / file, file}) {
    if (path != file && !std::filesystem::exists(path, ignored))
      continue;
    // Its symbols are global: MPI loads parts of its own that need them.
    void *module = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (!module) {
      const char *error = dlerror();
      why = why.empty() ? error : why; // of the file that is there
      continue;
    }
    const auto open = reinterpret_cast<OpenWire>(dlsym(module, "reshard_open_wire"));
    if (!open)
      return "'" + path + "' is no backend: it lacks reshard_open_wire";
    char error[512] = "";
    int late = 0;
    wire.reset(open(seconds, error, sizeof error, &late)); // the module stays loaded
    timedOut = late != 0;
    return wire ? std::string() : "backend '" + name + "': " + error;
  }
  return "backend '" + name + "' cannot be loaded: " + why;
}

} // namespace reshard
