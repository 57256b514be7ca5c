// SPDX-License-Identifier: Apache-2.0
// Opens the objects of backends. Backends are modules, libreshard_NAME.so, searched beside this library, beside the
// program and on the library path. They are loaded on demand, so that one executor runs on machines with and without
// MPI, CUDA and NCCL.

#include "executor/interfaces/channel.h"
#include "executor/interfaces/communicator.h"
#include "executor/interfaces/device.h"
#include "executor/interfaces/messenger.h"
#include "executor/interfaces/transport_traits.h"

#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <link.h>
#include <map>
#include <mutex>
#include <unistd.h>
#include <utility>
#include <vector>

namespace reshard {
namespace {

/// The file of a library that this process has loaded; empty if it has not.
std::string loadedFile(const char *library) {
  void *const loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (!loaded)
    return "";
  link_map *map = nullptr;
  const std::string file = dlinfo(loaded, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
  dlclose(loaded);
  return file;
}

/// Fails if this process was forked from one that has used the backend: MPI, UCX and CUDA have threads and connections
/// that a forked process does not have.
Status checkForked(const std::string &name) {
  static std::mutex mutex;
  static std::map<std::string, pid_t> users; // the process that has loaded a backend first
  const std::lock_guard lock(mutex);
  const pid_t user = users.try_emplace(name, ::getpid()).first->second;
  if (user == ::getpid())
    return {};
  return failed("backend '" + name + "' was loaded by process " + std::to_string(user) + ", from which this process " +
                std::to_string(::getpid()) +
                " was forked: it cannot be used after that; start this process in another way (multiprocessing: "
                "'spawn'), or fork it before the first executor is opened");
}

/// The fix for an error of the loader that names a library outside reshard; empty for other errors.
std::string fixFor(const std::string &error) {
  for (const TransportTraits &each : transports())
    if (each.library && error.starts_with(each.library))
      return std::string("; ") + each.fix;
  return "";
}

enum class Symbols { local, global };

/// Loads the module of a backend, which is never unloaded, and finds its function `entry`. `version`: the required
/// value of the module's uint32_t `<entry>_version`. `symbols`: whether libraries that the module loads can use its
/// symbols.
Result<void *> loadModule(const std::string &name, const std::string &entry, uint32_t version, Symbols symbols) {
  if (Status status = checkForked(name); !status.ok())
    return status;
  if (const TransportTraits *transport = findTransport(name); transport && transport->beforeLoading)
    if (Status status = transport->beforeLoading(); !status.ok())
      return status;
  const std::string file = "libreshard_" + name + ".so";
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  Dl_info own{};
  dladdr(reinterpret_cast<const void *>(&loadModule), &own);
  const std::filesystem::path library = own.dli_fname ? own.dli_fname : ""; // with this function
  const auto beside = (library.has_parent_path() ? library : program).parent_path();
  std::string why;
  for (const std::string &path : std::vector<std::string>{beside / file, program.parent_path() / file,
                                                          program.parent_path().parent_path() / "lib" / file, file}) {
    if (path != file && !std::filesystem::exists(path, ignored))
      continue;
    void *module = dlopen(path.c_str(), RTLD_NOW | (symbols == Symbols::global ? RTLD_GLOBAL : RTLD_LOCAL));
    if (!module) {
      const char *error = dlerror();
      why = why.empty() ? error : why; // prefer the error of a file that exists
      continue;
    }
    void *const function = dlsym(module, entry.c_str());
    if (!function)
      return failed("'" + path + "' is not a backend of reshard: the function " + entry + " is missing");
    const auto found = static_cast<const uint32_t *>(dlsym(module, (entry + "_version").c_str()));
    if (!found || *found != version)
      return failed("'" + path + "': found version " + (found ? std::to_string(*found) : "none") + " of " + entry +
                    ", expected " + std::to_string(version) + "; install backends and library of the same release");
    return function;
  }
  return failed("backend '" + name + "' cannot be loaded: " + why + fixFor(why));
}

/// Opens an object by the function `opener` of the module of a backend.
template <class Object, class Open, class... Arguments>
Result<std::unique_ptr<Object>> openObject(const std::string &name, const Result<void *> &opener,
                                           const Arguments &...arguments) {
  if (!opener.ok())
    return opener.status();
  Status error;
  std::unique_ptr<Object> object(reinterpret_cast<Open>(*opener)(arguments..., error));
  if (!object)
    return std::move(error).withPrefix("backend '" + name + "': ");
  return object;
}

} // namespace

Result<std::unique_ptr<Channel>> openChannel(const std::string &name, const ChannelOptions &options) {
  // Global symbols: MPI loads plugins of its own that need them.
  return openObject<Channel, OpenChannel>(
      name, loadModule(name, "reshard_open_channel", kChannelVersion, Symbols::global), options);
}

Result<std::unique_ptr<Messenger>> openMessenger(const std::string &name) {
  return openObject<Messenger, OpenMessenger>(
      name, loadModule(name, "reshard_open_messenger", kMessengerVersion, Symbols::local));
}

Result<std::unique_ptr<Communicator>> openCommunicator(const std::string &name, const CommunicatorOptions &options) {
  return openObject<Communicator, OpenCommunicator>(
      name, loadModule(name, "reshard_open_communicator", kCommunicatorVersion, Symbols::local), options);
}

Result<std::unique_ptr<Device>> openDevice(const std::string &name, int number) {
  const Result<void *> function = loadModule(name, "reshard_open_device", kDeviceVersion, Symbols::local);
  Status error = function.status();
  std::unique_ptr<Device> device(function.ok() ? reinterpret_cast<OpenDevice>(*function)(number, error) : nullptr);
  if (!device)
    return std::move(error).withPrefix("no GPU: ");
  return device;
}

// The module needs libucp.so.0, and the loader uses the one that is loaded already. So if that is of another UCX, the
// variable would have no effect, or the two would be mixed.
Status loadOtherUcx() {
  const char *root = std::getenv("RESHARD_UCX_ROOT");
  if (!root || !*root)
    return {};
  const std::string folder = std::string(root) + "/lib/",
                    error = "backend 'ucx': RESHARD_UCX_ROOT=" + std::string(root);
  const char *const libraries[] = {"libucp.so.0", "libucs.so.0"};
  for (const char *library : libraries) {
    std::error_code ignored;
    const std::string wanted = folder + library, file = loadedFile(library);
    if (!file.empty() && std::filesystem::exists(wanted, ignored) &&
        !std::filesystem::equivalent(file, wanted, ignored))
      return failed(error + ": found '" + file + "', which this process has already loaded, expected '" + wanted +
                    "'; open the executor before other users of UCX, or unset the variable");
  }
  if (dlopen((folder + libraries[0]).c_str(), RTLD_NOW | RTLD_GLOBAL))
    return {};
  return failed(error + ": " + dlerror() + "; expected a folder with lib/libucp.so.0 of UCX 1.13 or a later 1.x");
}

} // namespace reshard
