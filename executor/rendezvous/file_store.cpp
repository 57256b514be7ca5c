// SPDX-License-Identifier: Apache-2.0
#include "executor/rendezvous/file_store.h"

#include "base/atomic_file.h"
#include "base/hash.h"
#include "base/system_error.h"
#include "executor/rendezvous/bytes.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>

namespace reshard {

namespace {

/// A file that is closed at the end of a scope.
struct OpenFile {
  int number;
  ~OpenFile() { ::close(number); }
};

} // namespace

Status FileStore::open() const {
  if (::mkdir(folder_.c_str(), 0777) != 0 && errno != EEXIST)
    return invalid("cannot make the folder '" + folder_ + "': " + std::strerror(errno) +
                   "; expected a folder that all processes of the job share, or one to be made in such a folder");
  std::error_code error;
  if (!std::filesystem::is_directory(folder_, error))
    return invalid("'" + folder_ + "' is not a folder, expected a folder that all processes of the job share");
  if (::access(folder_.c_str(), W_OK | X_OK) != 0)
    return systemError("write to the folder", folder_);
  return {};
}

std::string FileStore::path(const std::string &key) const {
  constexpr size_t kLongest = 200; // file names have at most 255 bytes, and a temporary file has a suffix
  std::string name = percentEncoded(key);
  // Encoded names have no '+', so a hashed one cannot equal them.
  if (name.size() > kLongest)
    name = "+" + hexadecimal(digestOf(key.data(), key.size()));
  return folder_ + "/" + name;
}

Status FileStore::set(const std::string &key, std::string_view value, const Deadline &) {
  return writeFile(path(key), value);
}

Result<std::optional<std::string>> FileStore::find(const std::string &key, const Deadline &) {
  const std::string from = path(key);
  const OpenFile file{::open(from.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.number < 0 && (errno == ENOENT || errno == ESTALE)) // ESTALE: replaced on another host of an NFS folder
    return std::optional<std::string>();
  struct stat info{};
  if (file.number < 0 || ::fstat(file.number, &info) != 0)
    return systemError("read", from);
  if (!S_ISREG(info.st_mode) || static_cast<size_t>(info.st_size) > kMaxValueBytes)
    return failed("'" + from + "' is not a file of at most " + std::to_string(kMaxValueBytes) + " bytes");
  if (!anyUser_ && info.st_uid != ::geteuid())
    return failed("'" + from + "' was written by user " + std::to_string(info.st_uid) + ", expected user " +
                  std::to_string(::geteuid()) +
                  ": give all processes the same secret (RESHARD_SECRET), or trust all users with 'insecure'");
  std::string value(static_cast<size_t>(info.st_size), '\0');
  for (size_t at = 0; at < value.size();) {
    const ssize_t bytes = ::pread(file.number, value.data() + at, value.size() - at, static_cast<off_t>(at));
    if (bytes < 0 && errno == EINTR)
      continue;
    if (bytes < 0 && errno == ESTALE)
      return std::optional<std::string>();
    if (bytes <= 0)
      return systemError("read", from);
    at += static_cast<size_t>(bytes);
  }
  return std::optional<std::string>(std::move(value));
}

} // namespace reshard
