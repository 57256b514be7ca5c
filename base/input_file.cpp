// SPDX-License-Identifier: Apache-2.0
#include "base/input_file.h"

#include "base/system_error.h"

#include <algorithm>
#include <fcntl.h>
#include <unistd.h>

namespace reshard {

InputFile::~InputFile() {
  if (file_ >= 0)
    ::close(file_);
}

Result<InputFile> InputFile::open(const std::string &path) {
  InputFile result;
  // Without O_NONBLOCK, opening a FIFO would block.
  result.file_ = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
  if (result.file_ < 0)
    return systemError("open", path);
  result.path_ = path;
  if (::fstat(result.file_, &result.status_) != 0)
    return systemError("read", path);
  if (!S_ISREG(result.status_.st_mode))
    return failed("'" + path + "' is not a regular file");
  return result;
}

Status InputFile::read(uint64_t begin, char *to, uint64_t bytes) const {
  for (uint64_t done = 0; done < bytes;) {
    const auto at = static_cast<off_t>(begin + done);
    const ssize_t some = uninterrupted([&] { return ::pread(file_, to + done, bytes - done, at); });
    if (some < 0)
      return systemError("read", path_);
    if (some == 0)
      return failed("'" + path_ + "' became shorter while it was read: it had " + std::to_string(this->bytes()) +
                    " bytes and now ends at byte " + std::to_string(begin + done));
    done += static_cast<uint64_t>(some);
  }
  return {};
}

Result<std::string> InputFile::read(uint64_t begin, uint64_t bytes) const {
  std::string text(bytes, '\0');
  Status status = read(begin, text.data(), bytes);
  return status.ok() ? Result<std::string>(std::move(text)) : Result<std::string>(std::move(status));
}

Status checkSame(const struct stat &read, const MappedFile &mapped) {
  const struct stat &now = mapped.status();
  const bool same = now.st_dev == read.st_dev && now.st_ino == read.st_ino && now.st_size == read.st_size &&
                    now.st_mtim.tv_sec == read.st_mtim.tv_sec && now.st_mtim.tv_nsec == read.st_mtim.tv_nsec;
  return same ? Status()
              : failed("'" + mapped.path() + "' changed while it was opened, expected a file that nobody writes to");
}

bool hasEntry(const std::string &path) {
  struct stat status{};
  return ::lstat(path.c_str(), &status) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

Result<std::string> readWhole(const std::string &path, uint64_t most) {
  const Result<InputFile> file = InputFile::open(path);
  if (!file.ok())
    return file.status();
  if (file->bytes() > most)
    return failed("'" + path + "': too large: " + std::to_string(file->bytes()) + " bytes, expected at most " +
                  std::to_string(most));
  return file->read(0, file->bytes());
}

Result<std::string_view> FilePart::read(uint64_t at, uint64_t count) {
  constexpr uint64_t kWindow = 4096;
  const uint64_t begin = std::min(at, bytes_), end = begin + std::min(count, bytes_ - begin);
  if (begin < windowAt_ || end > windowAt_ + window_.size()) {
    window_.resize(std::min(std::max(end - begin, kWindow), bytes_ - begin));
    windowAt_ = begin;
    if (Status status = file_.read(begin_ + begin, window_.data(), window_.size()); !status.ok())
      return status;
  }
  return std::string_view(window_).substr(begin - windowAt_, end - begin);
}

} // namespace reshard
