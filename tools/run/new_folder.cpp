// SPDX-License-Identifier: Apache-2.0
// Fills a folder under a temporary name, removes or takes over those of ended processes, and handles signals.
#include "tools/run/new_folder.h"

#include "base/hash.h"
#include "command/common.h"
#include "tools/run/guarded_exit.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <sys/file.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace reshard::tools {

using namespace command;

namespace fs = std::filesystem;

namespace {

std::mutex mutex;
fs::path unfinished; // the folder that a signal removes
int pipeEnds[2] = {-1, -1};
std::atomic<const void *> unread = nullptr; // an address in a mapped file that could not be read

/// A signal handler may call few functions: it wakes a thread that does the work.
void handle(int number) {
  const auto byte = static_cast<char>(number);
  [[maybe_unused]] const ssize_t written = ::write(pipeEnds[1], &byte, 1);
}

void handlePage(int number, siginfo_t *info, void *) {
  unread = info->si_code > 0 ? info->si_addr : nullptr; // null if another process sent the signal
  handle(number);
  for (;;) // returning would raise the signal again
    pause();
}

/// The error text for an unreadable address in a mapped file; empty if no file is mapped there.
std::string unreadPage(const void *address) {
  std::string text;
  if (std::FILE *maps = std::fopen("/proc/self/maps", "re")) {
    char line[5000];
    while (text.empty() && std::fgets(line, sizeof line, maps)) {
      uint64_t begin = 0, end = 0, offset = 0;
      int name = 0;
      const auto at = reinterpret_cast<uint64_t>(address);
      if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %*s %" SCNx64 " %*s %*s %n", &begin, &end, &offset, &name) < 3 ||
          at < begin || at >= end || line[name] != '/')
        continue;
      line[std::strcspn(line, "\n")] = 0;
      struct stat status{};
      text = "'" + std::string(line + name) + "': byte " + std::to_string(at - begin + offset) + " cannot be read: ";
      if (::stat(line + name, &status) == 0 && static_cast<uint64_t>(status.st_size) <= at - begin + offset)
        text += "the file was truncated during the run and now has " + std::to_string(status.st_size) + " bytes";
      else
        text += "its device failed, or the file was truncated during the run";
    }
    std::fclose(maps);
  }
  return text;
}

/// flock on a folder: 0, or an error number.
int lockFolder(int folder, int how) { return folder < 0 ? EBADF : ::flock(folder, how) == 0 ? 0 : errno; }

/// Whether a path still names the file of an open descriptor.
bool stillNames(int folder, const fs::path &path) {
  struct stat open{}, there{};
  return ::fstat(folder, &open) == 0 && ::lstat(path.c_str(), &there) == 0 && open.st_dev == there.st_dev &&
         open.st_ino == there.st_ino;
}

int openFolder(const fs::path &path) { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }

/// The unfinished folders of `path`: beside it, with its name, ".partial-", a process number and a host's number.
std::vector<fs::path> unfinishedFolders(const fs::path &path) {
  constexpr size_t kHost = 9; // "-" and eight digits
  const std::string prefix = path.filename().string() + ".partial-";
  std::vector<fs::path> found;
  std::error_code error;
  const fs::path parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
  for (fs::directory_iterator each(parent, error), end; !error && each != end; each.increment(error)) {
    const std::string name = each->path().filename();
    if (name.starts_with(prefix) && name.size() > prefix.size() + kHost &&
        name.find_first_not_of("0123456789", prefix.size()) == name.size() - kHost &&
        name[name.size() - kHost] == '-' &&
        name.find_first_not_of("0123456789abcdef", name.size() - kHost + 1) == std::string::npos)
      found.push_back(each->path().lexically_normal());
  }
  std::sort(found.begin(), found.end());
  return found;
}

/// Removes unfinished folders that killed processes of this host left. A process that fills a folder holds a lock on
/// it, which the kernel releases when the process ends.
void removeStale(const fs::path &path, const std::string &host) {
  for (const fs::path &each : unfinishedFolders(path)) {
    if (!each.string().ends_with(host))
      continue;
    const int folder = openFolder(each);
    std::error_code ignored;
    if (lockFolder(folder, LOCK_EX | LOCK_NB) == 0 && stillNames(folder, each))
      fs::remove_all(each, ignored);
    if (folder >= 0)
      ::close(folder);
  }
}

/// The unfinished folder of `path` that has a journal; empty if there is none.
Result<fs::path> findResumable(const fs::path &path, const std::string &host) {
  fs::path found;
  for (const fs::path &each : unfinishedFolders(path)) {
    std::error_code error;
    if (!fs::exists(each / (kJournalPrefix + std::string("0")), error))
      continue;
    if (!each.string().ends_with(host))
      return invalid("'" + each.string() +
                     "' was begun on another host, where its process may still run; expected the same host for "
                     "--resume. If it does not run, rename the folder so that its name ends in '" +
                     host + "'");
    if (!found.empty())
      return invalid("'" + found.string() + "' and '" + each.string() +
                     "' could both be resumed, expected one unfinished folder; remove the other");
    found = each;
  }
  return found;
}

/// Renames unless the new name exists.
std::error_code renameNew(const fs::path &from, const fs::path &to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0)
    return {};
  if (errno != EINVAL && errno != ENOSYS)
    return {errno, std::generic_category()};
  std::error_code error; // the file system has no atomic RENAME_NOREPLACE
  if (fs::exists(fs::symlink_status(to, error)))
    return std::make_error_code(std::errc::file_exists);
  fs::rename(from, to, error);
  return error;
}

} // namespace

void watchSignals(const char *command) {
  static std::once_flag once;
  std::call_once(once, [command] {
    if (pipe2(pipeEnds, O_CLOEXEC) != 0)
      return;
    for (const int number : {SIGINT, SIGTERM})
      std::signal(number, handle);
    struct sigaction page{};
    page.sa_sigaction = handlePage;
    page.sa_flags = SA_SIGINFO;
    ::sigaction(SIGBUS, &page, nullptr);
    std::thread([command] {
      char number = 0;
      while (::read(pipeEnds[0], &number, 1) != 1) {
      }
      const std::string text = number == SIGBUS ? unreadPage(unread) : std::string();
      if (!text.empty())
        printError(command, text);
      const std::lock_guard lock(mutex); // never released: no folder is committed from here on
      std::error_code failed(EAGAIN, std::generic_category());
      for (int tries = 0; failed && tries < 100 && !unfinished.empty();
           ++tries) // other threads may still create files in it
        fs::remove_all(unfinished, failed);
      if (!text.empty())
        endProcess(kFailure);
      std::signal(number, SIG_DFL);
      kill(getpid(), number);
      pause();
    }).detach();
  });
}

Status checkOutside(const std::string &path, const std::string &folder) {
  std::error_code error;
  const fs::path own = fs::weakly_canonical(fs::absolute(path, error), error);
  for (fs::path each = own; !error; each = each.parent_path()) {
    std::error_code absent;
    if (fs::equivalent(each, folder, absent))
      return failed("'" + path + (each == own ? "' is the source '" : "' is inside the source '") + folder +
                    "', expected a new folder outside it");
    if (each == each.root_path())
      break;
  }
  return {};
}

int64_t NewFolder::ownNumber() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return static_cast<int64_t>(hashOf(host) >> 33 << 32) | getpid();
}

Result<std::unique_ptr<NewFolder>> NewFolder::open(const std::string &path, int64_t number, bool make, bool resume) {
  std::unique_ptr<NewFolder> folder(new NewFolder());
  folder->path_ = fs::path(path).lexically_normal();
  if (!folder->path_.has_filename())
    folder->path_ = folder->path_.parent_path();
  const std::string host = "-" + hexadecimal(static_cast<uint64_t>(number) >> 32, 8);
  folder->temporary_ = folder->path_;
  folder->temporary_ += ".partial-" + std::to_string(number & UINT32_MAX) + host;
  if (!make)
    return folder;
  watchSignals();
  std::error_code error;
  if (fs::exists(fs::symlink_status(folder->path_, error)))
    return invalid("'" + path + "' already exists; expected the name of a folder to create");
  if (Status status = folder->make(host, resume); !status.ok())
    return status;
  return folder;
}

Status NewFolder::make(const std::string &host, bool resume) {
  const std::lock_guard lock(mutex);
  if (resume) {
    const Result<bool> taken = takeOver(host);
    if (!taken.ok() || *taken)
      return taken.status();
  }
  removeStale(path_, host);
  if (Status status = create(); !status.ok())
    return status;
  unfinished = temporary_;
  mine_ = true;
  return {};
}

/// Creates and locks the folder. Until it is locked, another process may remove it as stale: then creates it again.
Status NewFolder::create() {
  std::error_code error;
  for (int tries = 0; lock_ < 0; ++tries) {
    if (!fs::create_directory(temporary_, error))
      return invalid("cannot create '" + temporary_.string() +
                     "': " + (error ? error : std::make_error_code(std::errc::file_exists)).message());
    lock_ = openFolder(temporary_);
    lockFolder(lock_, LOCK_EX); // if the file system has no locks, stale folders are not removed
    if (lock_ >= 0 && !stillNames(lock_, temporary_) && tries < 100) {
      ::close(lock_);
      lock_ = -1;
      fs::remove(temporary_, error); // if only the comparison failed
    } else if (lock_ < 0) {
      break;
    }
  }
  return {};
}

/// Locks the folder that can be resumed, and gives it the name of this process. Returns whether there is one.
Result<bool> NewFolder::takeOver(const std::string &host) {
  const Result<fs::path> resumable = findResumable(path_, host);
  if (!resumable.ok() || resumable->empty())
    return resumable.ok() ? Result<bool>(false) : resumable.status();
  const fs::path &found = *resumable;
  lock_ = openFolder(found);
  if (const int code = lockFolder(lock_, LOCK_EX | LOCK_NB); code != 0 || !stillNames(lock_, found))
    return invalid("cannot resume '" + found.string() +
                   "': " + (code == 0 || code == EWOULDBLOCK ? "another process fills it" : std::strerror(code)));
  if (const std::error_code error = found == temporary_ ? std::error_code() : renameNew(found, temporary_); error)
    return failed("cannot rename '" + found.string() + "' to '" + temporary_.string() + "': " + error.message());
  return mine_ = kept_ = resumed_ = true;
}

NewFolder::~NewFolder() {
  const std::lock_guard lock(mutex);
  std::error_code ignored;
  if (mine_ && !done_ && !kept_)
    fs::remove_all(temporary_, ignored);
  if (mine_)
    unfinished.clear();
  if (lock_ >= 0)
    ::close(lock_);
}

void NewFolder::keep() {
  const std::lock_guard lock(mutex);
  kept_ = true;
  unfinished.clear();
}

void NewFolder::discard() {
  const std::lock_guard lock(mutex);
  kept_ = false;
  if (mine_ && !done_)
    unfinished = temporary_;
}

Status NewFolder::commit() {
  if (!mine_)
    return {};
  discard();
  const std::lock_guard lock(mutex);
  std::error_code error;
  for (fs::directory_iterator each(temporary_, error), end; !error && each != end; each.increment(error))
    if (each->path().filename().string().starts_with(kJournalPrefix) && !fs::remove(each->path(), error))
      break;
  if (error)
    return failed("cannot remove the journal in '" + temporary_.string() + "': " + error.message());
  if (error = renameNew(temporary_, path_); error)
    return failed("cannot rename the finished folder to '" + path_.string() + "': " + error.message());
  unfinished.clear();
  done_ = true;
  return {};
}

Status checkNotStored(const char *option, const std::string &output, const std::string &storage,
                      const std::string &owner) {
  std::error_code error;
  const fs::path file = fs::canonical(output, error); // fails for a new file, which overwrites nothing
  if (output.empty() || error || !fs::is_regular_file(file, error) ||
      !(fs::equivalent(file, storage, error) || fs::equivalent(file.parent_path(), storage, error)))
    return {};
  return failed("option '" + std::string(option) + "': '" + output + "' would overwrite a file of the " + owner +
                "'s storage '" + storage + "', expected another file");
}

} // namespace reshard::tools
