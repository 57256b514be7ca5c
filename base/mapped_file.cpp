// SPDX-License-Identifier: Apache-2.0
#include "base/mapped_file.h"

#include "base/system_error.h"

#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

namespace reshard {

namespace {

/// Closes a descriptor. A mapping of the file remains.
struct FileDescriptor {
  explicit FileDescriptor(int file) : file(file) {}
  ~FileDescriptor() {
    if (file >= 0)
      ::close(file);
  }
  FileDescriptor(const FileDescriptor &) = delete;
  FileDescriptor &operator=(const FileDescriptor &) = delete;
  const int file;
};

} // namespace

MappedFile::~MappedFile() {
  if (data_)
    ::munmap(data_, bytes_);
}

void MappedFile::swap(MappedFile &other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(writable_, other.writable_);
  std::swap(path_, other.path_);
  std::swap(status_, other.status_);
}

Result<MappedFile> MappedFile::open(const std::string &path, Access access) {
  const bool writes = access == Access::write;
  // Without O_NONBLOCK, opening a FIFO would block.
  const FileDescriptor file(
      uninterrupted([&] { return ::open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK); }));
  if (file.file < 0)
    return systemError("open", path);
  MappedFile result;
  if (::fstat(file.file, &result.status_) != 0)
    return systemError("read", path);
  if (!S_ISREG(result.status_.st_mode))
    return failed("'" + path + "' is not a regular file");
  result.path_ = path;
  result.writable_ = writes;
  result.bytes_ = static_cast<size_t>(result.status_.st_size);
  if (result.bytes_ == 0)
    return result;
  void *map = ::mmap(nullptr, result.bytes_, PROT_READ | (writes ? PROT_WRITE : 0), MAP_SHARED, file.file, 0);
  if (map == MAP_FAILED)
    return systemError("map", path);
  result.data_ = static_cast<std::byte *>(map);
  return result;
}

Result<MappedFile> MappedFile::create(const std::string &path, uint64_t bytes, const std::vector<Part> &parts) {
  const FileDescriptor file(
      uninterrupted([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644); }));
  if (file.file < 0)
    return systemError("create", path);
  int code = bytes > 0 ? EINTR : 0; // it is returned, not in errno; nothing can be reserved or mapped of an empty file
  while (code == EINTR)
    code = ::posix_fallocate(file.file, 0, static_cast<off_t>(bytes));
  if (code != 0)
    return failed("cannot reserve " + std::to_string(bytes) + " bytes for '" + path + "': " + std::strerror(code));
  // By system calls: the first store to a mapped page of a new file makes the kernel read up to 2 MiB around it, which
  // takes 0.1 s for the headers of 60 tensors.
  for (const Part &part : parts)
    if (!writeAll(file.file, part.bytes.data(), part.bytes.size(), part.offset))
      return systemError("write", path);
  MappedFile result;
  if (::fstat(file.file, &result.status_) != 0)
    return systemError("read", path);
  result.path_ = path;
  result.writable_ = true;
  if (bytes == 0)
    return result;
  void *map = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.file, 0);
  if (map == MAP_FAILED)
    return systemError("map", path);
  result.data_ = static_cast<std::byte *>(map);
  result.bytes_ = bytes;
  return result;
}

void MappedFile::release() const { ::madvise(data_, bytes_, MADV_DONTNEED); }

Status MappedFile::unchanged() const {
  struct stat now{};
  // A file that was replaced or removed is still mapped unchanged.
  if (writable_ || ::stat(path_.c_str(), &now) != 0 || now.st_dev != status_.st_dev || now.st_ino != status_.st_ino)
    return {};
  if (now.st_size != status_.st_size)
    return failed("'" + path_ + "' changed during the run: its size was " + std::to_string(status_.st_size) +
                  " bytes and is now " + std::to_string(now.st_size) + " bytes");
  if (now.st_mtim.tv_sec != status_.st_mtim.tv_sec || now.st_mtim.tv_nsec != status_.st_mtim.tv_nsec)
    return failed("'" + path_ + "' changed during the run: its modification time differs");
  return {};
}

} // namespace reshard
