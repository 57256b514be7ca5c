#include "tools/new_folder.h"

#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <mutex>
#include <thread>
#include <unistd.h>

namespace reshard::tools {

namespace fs = std::filesystem;

namespace {

std::mutex mutex;
fs::path unfinished; // what a signal removes
int pipeEnds[2] = {-1, -1};

/// A handler may do next to nothing: a thread does the rest.
void handle(int number) {
  const auto byte = static_cast<char>(number);
  [[maybe_unused]] const ssize_t written = write(pipeEnds[1], &byte, 1);
}

/// Once, for the whole process: what ends it ends it after the folder is gone.
void watchSignals() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (pipe2(pipeEnds, O_CLOEXEC) != 0)
      return;
    for (const int number : {SIGINT, SIGTERM})
      std::signal(number, handle);
    std::thread([] {
      char number = 0;
      while (read(pipeEnds[0], &number, 1) != 1) {
      }
      const std::lock_guard lock(mutex); // kept: nothing is committed any more
      std::error_code failed(EAGAIN, std::generic_category());
      for (int tries = 0; failed && tries < 100 && !unfinished.empty(); ++tries) // files may still be made in it
        fs::remove_all(unfinished, failed);
      std::signal(number, SIG_DFL);
      kill(getpid(), number);
      pause();
    }).detach();
  });
}

} // namespace

NewFolder::NewFolder(const std::string &path, int64_t number, bool make) : path_(fs::path(path).lexically_normal()), mine_(make) {
  if (!path_.has_filename())
    path_ = path_.parent_path();
  std::error_code error;
  temporary_ = path_;
  temporary_ += ".partial-" + std::to_string(number);
  if (!make)
    return;
  watchSignals();
  const std::lock_guard lock(mutex);
  if (fs::exists(fs::symlink_status(path_, error)))
    throw Failure{kUsage, "'" + path + "' exists already; a target folder is made, not changed"};
  if (!fs::create_directory(temporary_, error))
    throw Failure{kUsage, "cannot create '" + temporary_.string() + "': " + error.message()};
  unfinished = temporary_;
}

NewFolder::~NewFolder() {
  const std::lock_guard lock(mutex);
  std::error_code ignored;
  if (mine_ && !done_)
    fs::remove_all(temporary_, ignored);
  if (mine_)
    unfinished.clear();
}

void NewFolder::commit() {
  if (!mine_)
    return;
  const std::lock_guard lock(mutex);
  std::error_code error;
  if (!fs::exists(path_, error))
    fs::rename(temporary_, path_, error);
  else
    error = std::make_error_code(std::errc::file_exists);
  if (error)
    throw Failure{kFailure, "cannot finish '" + path_.string() + "': " + error.message()};
  unfinished.clear();
  done_ = true;
}

} // namespace reshard::tools
