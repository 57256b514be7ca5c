// SPDX-License-Identifier: Apache-2.0
#include "base/sync_folder.h"

#include "base/system_error.h"

#include <fcntl.h>
#include <filesystem>
#include <unistd.h>

namespace reshard {

namespace fs = std::filesystem;

namespace {

/// syncFile(), but no error if `mayBeGone` and there is no such file.
Status sync(const std::string &path, bool mayBeGone) {
  const int file = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW); });
  if (file < 0)
    return mayBeGone && errno == ENOENT ? Status() : systemError("open", path);
  const int code = uninterrupted([&] { return ::fsync(file); });
  Status status = code == 0 || errno == EINVAL ? Status() : systemError("write", path); // EINVAL: it cannot be synced
  ::close(file);
  return status;
}

} // namespace

Status syncFile(const std::string &path) { return sync(path, false); }

Status syncFolder(const std::string &folder) {
  std::error_code error, unused;
  for (fs::recursive_directory_iterator each(folder, error), end; !error && each != end; each.increment(error))
    if (each->is_regular_file(unused) || each->is_directory(unused)) // both false if it is gone
      if (Status status = sync(each->path(), true); !status.ok())
        return status;
  if (error)
    return failed("cannot read '" + folder + "': " + error.message());
  return syncFile(folder);
}

} // namespace reshard
