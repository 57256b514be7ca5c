// SPDX-License-Identifier: Apache-2.0
// A file is written without a name in the folder of its target, given a temporary name, and renamed. What goes to a
// device or a FIFO is kept in an unnamed file first, since these cannot seek.
#include "base/atomic_file.h"

#include "base/system_error.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace reshard {

namespace fs = std::filesystem;

namespace {

constexpr int kMaxLinks = 40; // as in the Linux kernel

/// Copies an open file to a device or a FIFO.
Status copyTo(const std::string &path, int file) {
  const int out = uninterrupted([&] { return ::open(path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC); });
  if (out < 0)
    return systemError("write", path);
  Status status;
  std::vector<char> buffer(1 << 20);
  for (off_t at = 0; status.ok();) {
    const ssize_t bytes = uninterrupted([&] { return ::pread(file, buffer.data(), buffer.size(), at); });
    if (bytes < 0)
      status = systemError("write", path);
    if (bytes <= 0)
      break;
    for (ssize_t done = 0; done < bytes && status.ok();) {
      const ssize_t n =
          uninterrupted([&] { return ::write(out, buffer.data() + done, static_cast<size_t>(bytes - done)); });
      if (n < 0)
        status = systemError("write", path);
      done += std::max<ssize_t>(n, 0);
    }
    at += bytes;
  }
  if (::close(out) != 0 && errno != EINTR && status.ok())
    status = systemError("write", path);
  return status;
}

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

bool sameFile(const std::string &one, const std::string &other) {
  std::error_code error;
  return fs::is_regular_file(one, error) && fs::is_regular_file(other, error) && fs::equivalent(one, other, error) &&
         !error;
}

AtomicFile::~AtomicFile() { abandon(); }

Result<AtomicFile> AtomicFile::create(const std::string &path) {
  AtomicFile result;
  result.path_ = path;
  result.output_ = outputAt(path);
  if (result.output_.direct) { // a pipe cannot seek: an unnamed file holds the bytes until commit()
    std::FILE *nameless = std::tmpfile();
    result.file_ = nameless ? ::fcntl(::fileno(nameless), F_DUPFD_CLOEXEC, 0) : -1;
    if (nameless)
      std::fclose(nameless);
  }
  // In the same folder, so that the rename is atomic. Without a name, so that a process that is killed leaves nothing
  // behind; file systems that cannot do that give it one now. Not by mkstemp, so that the umask determines the mode.
  if (!result.output_.direct) {
    const fs::path parent = fs::path(result.output_.path).parent_path();
    result.file_ = uninterrupted(
        [&] { return ::open(parent.empty() ? "." : parent.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0666); });
    if (result.file_ < 0)
      result.file_ = result.withTemporaryName(
          [](const char *name) { return ::open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666); });
  }
  if (result.file_ < 0)
    return systemError("create", path);
  return result;
}

int AtomicFile::withTemporaryName(const std::function<int(const char *)> &make) {
  static std::atomic<unsigned> serial{0};
  for (;;) {
    temporary_ = output_.path + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(serial++);
    const int made = uninterrupted([&] { return make(temporary_.c_str()); });
    if (made >= 0 || errno != EEXIST) {
      if (made < 0)
        temporary_.clear();
      return made;
    }
  }
}

void AtomicFile::swap(AtomicFile &other) noexcept {
  std::swap(path_, other.path_);
  std::swap(output_, other.output_);
  std::swap(temporary_, other.temporary_);
  std::swap(file_, other.file_);
}

void AtomicFile::abandon() {
  if (file_ >= 0)
    ::close(file_);
  file_ = -1;
  if (!temporary_.empty())
    ::unlink(temporary_.c_str());
  temporary_.clear();
}

Status AtomicFile::failure(const char *action) {
  Status status = systemError(action, path_);
  abandon();
  return status;
}

Status AtomicFile::write(const void *data, size_t bytes, uint64_t offset) {
  return writeAll(file_, data, bytes, offset) ? Status() : failure("write");
}

Result<std::string> AtomicFile::complete(uint64_t bytes) {
  if (uninterrupted([&] { return ::ftruncate(file_, static_cast<off_t>(bytes)); }) != 0)
    return failure("write");
  return temporary_.empty() ? "/proc/self/fd/" + std::to_string(file_) : temporary_;
}

Status AtomicFile::commit(uint64_t bytes) {
  const Result<std::string> at = complete(bytes);
  if (!at.ok())
    return at.status();
  if (output_.direct) {
    Status status = copyTo(output_.path, file_);
    abandon();
    return status;
  }
  if (temporary_.empty() && withTemporaryName([&](const char *name) {
                              return ::linkat(AT_FDCWD, at->c_str(), AT_FDCWD, name, AT_SYMLINK_FOLLOW);
                            }) != 0)
    return failure("write");
  const int closed = ::close(std::exchange(file_, -1)); // EINTR: it is closed
  if ((closed != 0 && errno != EINTR) || ::rename(temporary_.c_str(), output_.path.c_str()) != 0)
    return failure("write");
  temporary_.clear();
  return {};
}

Status writeFile(const std::string &path, std::string_view text) {
  Result<AtomicFile> file = AtomicFile::create(path);
  if (!file.ok())
    return file.status();
  if (Status status = file->write(text.data(), text.size(), 0); !status.ok())
    return status;
  return file->commit(text.size());
}

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
