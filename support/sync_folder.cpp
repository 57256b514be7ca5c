// SPDX-License-Identifier: Apache-2.0
#include "support/sync_folder.h"

#include "support/system_error.h"

#include <fcntl.h>
#include <filesystem>
#include <unistd.h>

namespace reshard {

namespace fs = std::filesystem;

Status syncFile(const std::string &path) {
  const int file = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW); });
  if (file < 0)
    return systemError("open", path);
  const int code = uninterrupted([&] { return ::fsync(file); });
  Status status = code == 0 || errno == EINVAL ? Status() : systemError("write", path); // EINVAL: it cannot be synced
  ::close(file);
  return status;
}

Status syncFolder(const std::string &folder) {
  std::error_code error;
  for (fs::recursive_directory_iterator each(folder, error), end; !error && each != end; each.increment(error))
    if (each->is_regular_file() || each->is_directory())
      if (Status status = syncFile(each->path()); !status.ok())
        return status;
  if (error)
    return failed("cannot read '" + folder + "': " + error.message());
  return syncFile(folder);
}

} // namespace reshard
