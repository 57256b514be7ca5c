#include "schema/output.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace reshard::schema {

namespace fs = std::filesystem;

namespace {

constexpr int kMaxLinks = 40; // as in the Linux kernel

} // namespace

Output outputAt(const std::string &path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode))
    return {path, true};
  fs::path at = path;
  std::error_code error;
  for (int links = 0; links < kMaxLinks && fs::is_symlink(at, error); ++links) {
    const fs::path next = fs::read_symlink(at, error);
    if (error)
      break;
    at = at.parent_path() / next; // equals `next` if that is absolute
    // A link in /proc is an open file (/dev/stdout is one). Replacing it would detach the process that has it open.
    if (at.string().starts_with("/proc/"))
      return {path, true};
  }
  return {at.string(), false};
}

Status writeThrough(int file, const std::string &path) {
  auto failure = [&] { return failed("cannot write '" + path + "': " + std::strerror(errno)); };
  const int out = ::open(path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC);
  if (out < 0)
    return failure();
  Status status;
  std::vector<char> buffer(1 << 20);
  for (off_t at = 0; status.ok();) {
    const ssize_t bytes = ::pread(file, buffer.data(), buffer.size(), at);
    if (bytes < 0 && errno != EINTR)
      status = failure();
    if (bytes == 0)
      break;
    for (ssize_t done = 0; done < bytes && status.ok();) {
      const ssize_t n = ::write(out, buffer.data() + done, static_cast<size_t>(bytes - done));
      if (n >= 0)
        done += n;
      else if (errno != EINTR)
        status = failure();
    }
    at += std::max<ssize_t>(bytes, 0);
  }
  if (::close(out) != 0 && status.ok())
    status = failure();
  return status;
}

bool sameFile(const std::string &one, const std::string &other) {
  std::error_code error;
  return fs::is_regular_file(one, error) && fs::is_regular_file(other, error) && fs::equivalent(one, other, error) &&
         !error;
}

} // namespace reshard::schema
