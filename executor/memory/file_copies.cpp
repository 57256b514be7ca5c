// SPDX-License-Identifier: Apache-2.0
// Finds the file and the offset of memory that is mapped. Between two files, whole blocks are shared if the file system
// can, and the rest goes through a buffer; other memory is written.
#include "executor/memory/file_copies.h"

#include "base/system_error.h"

#include <algorithm>
#include <fcntl.h>
#include <linux/fs.h>
#include <memory>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

namespace reshard {

namespace {

Status fileError(const char *action, int file) {
  const int code = errno;
  char path[4096];
  const ssize_t length = ::readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path);
  errno = code;
  return systemError(action, length > 0 ? std::string(path, static_cast<size_t>(length)) : "a file of the run");
}

/// Reads a byte of each page. If the memory is a file that was truncated, this raises the signal that a copy through
/// the mapping raises, and its handler names the file.
void readPages(const std::byte *memory, uint64_t bytes) {
  constexpr uint64_t kPageBytes = 4096;
  for (uint64_t at = 0; at < bytes; at += kPageBytes)
    (void)*const_cast<const volatile std::byte *>(memory + at);
  (void)*const_cast<const volatile std::byte *>(memory + bytes - 1);
}

/// Half of the files that this process may have open: the other half is left to connections and other files.
uint64_t mostFiles() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur / 2 : 0;
}

constexpr uint64_t kBlockBytes = 4096;

} // namespace

FileCopies::FileCopies(const std::vector<const MappedFile *> &files, bool synced) : synced_(synced) {
  const uint64_t most = mostFiles();
  for (const MappedFile *mapped : files) {
    if (files_.size() == most)
      break;
    if (mapped->bytes() == 0)
      continue;
    const int flags = (mapped->writable() ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK;
    const int file = uninterrupted([&] { return ::open(mapped->path().c_str(), flags); });
    struct stat status{};
    if (file < 0)
      continue;
    if (::fstat(file, &status) == 0 && status.st_dev == mapped->status().st_dev &&
        status.st_ino == mapped->status().st_ino)
      files_.push_back({mapped->data(), mapped->bytes(), file});
    else
      ::close(file);
  }
  std::sort(files_.begin(), files_.end(),
            [](const Opened &a, const Opened &b) { return std::less<>()(a.data, b.data); });
}

FileCopies::~FileCopies() {
  for (const Opened &each : files_)
    ::close(each.file);
}

std::optional<FileCopies::Position> FileCopies::find(const std::byte *memory, uint64_t bytes) const {
  const auto after =
      std::upper_bound(files_.begin(), files_.end(), memory,
                       [](const std::byte *at, const Opened &file) { return std::less<>()(at, file.data); });
  if (after == files_.begin())
    return std::nullopt;
  const Opened &file = *std::prev(after);
  const auto offset = static_cast<uint64_t>(memory - file.data);
  if (offset >= file.bytes || bytes > file.bytes - offset)
    return std::nullopt;
  return Position{file.file, offset};
}

Status FileCopies::write(const Position &to, const std::byte *from, uint64_t bytes) {
  if (writeAll(to.file, from, bytes, to.offset))
    return {};
  if (errno == EFAULT)
    readPages(from, bytes);
  return fileError("write", to.file);
}

Status FileCopies::copyThroughBuffer(const Position &to, const Position &from, const std::byte *mapped,
                                     uint64_t bytes) {
  thread_local const auto buffer = std::make_unique<std::byte[]>(kBufferBytes);
  for (uint64_t done = 0; done < bytes;) {
    const auto offset = static_cast<off_t>(from.offset + done);
    const ssize_t some =
        uninterrupted([&] { return ::pread(from.file, buffer.get(), std::min(kBufferBytes, bytes - done), offset); });
    if (some < 0)
      return fileError("read", from.file);
    if (some == 0) // the file has become shorter: reading its mapping reports that
      return write({to.file, to.offset + done}, mapped + done, bytes - done);
    if (Status status = write({to.file, to.offset + done}, buffer.get(), static_cast<uint64_t>(some)); !status.ok())
      return status;
    done += static_cast<uint64_t>(some);
  }
  return {};
}

uint64_t FileCopies::shareBlocks(const Position &to, const Position &from, uint64_t bytes) const {
  const uint64_t whole = bytes / kBlockBytes * kBlockBytes;
  if (whole == 0)
    return 0;
  file_clone_range range{};
  range.src_fd = from.file;
  range.src_offset = from.offset;
  range.src_length = whole;
  range.dest_offset = to.offset;
  // Most file systems cannot do this, and those that can refuse some pairs of files.
  if (uninterrupted([&] { return ::ioctl(to.file, FICLONERANGE, &range); }) == 0)
    return whole;
  sharesBlocks_ = false;
  return 0;
}

Status FileCopies::copy(const Position &to, const std::byte *from, uint64_t bytes) const {
  const std::optional<Position> source = find(from, bytes);
  if (!source)
    return write(to, from, bytes);
  uint64_t done = 0;
  const auto copyPart = [&](uint64_t part) {
    Status status =
        copyThroughBuffer({to.file, to.offset + done}, {source->file, source->offset + done}, from + done, part);
    done += part;
    return status;
  };
  if (sharesBlocks_ && to.offset % kBlockBytes == source->offset % kBlockBytes) {
    if (Status status = copyPart(std::min(bytes, (kBlockBytes - to.offset % kBlockBytes) % kBlockBytes)); !status.ok())
      return status;
    done += shareBlocks({to.file, to.offset + done}, {source->file, source->offset + done}, bytes - done);
  }
  return copyPart(bytes - done);
}

void FileCopies::beginWriting(const Position &to, uint64_t bytes) const {
  constexpr uint64_t kMinBytes = 128 << 10;
  if (synced_ && bytes >= kMinBytes)
    ::sync_file_range(to.file, static_cast<off64_t>(to.offset), static_cast<off64_t>(bytes), SYNC_FILE_RANGE_WRITE);
}

} // namespace reshard
