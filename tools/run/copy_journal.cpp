// SPDX-License-Identifier: Apache-2.0
// Writes and reads the journal: a line with the run, then a line each time when more copies are on the device. A thread
// writes the files of the folder to the device before such a line.
#include "tools/run/copy_journal.h"

#include "base/atomic_file.h"
#include "base/hash.h"
#include "base/input_file.h"
#include "base/system_error.h"
#include "tools/run/new_folder.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace reshard::tools {

using Json = nlohmann::ordered_json;

namespace {

constexpr size_t kHash = 16; // digits before the space

JournalFile fileOf(const std::string &path, const struct stat &status) {
  return {std::filesystem::absolute(path).lexically_normal(), static_cast<uint64_t>(status.st_size),
          int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec};
}

Json jsonOf(const JournalRun &run) {
  Json files = Json::array();
  for (const JournalFile &file : run.files)
    files.push_back({file.path, file.bytes, file.modified});
  return {{"reshard", RESHARD_VERSION}, {"plan", run.plan}, {"transport", run.transport}, {"rank", run.rank},
          {"options", run.options},     {"files", files},   {"written", run.written}};
}

/// Names in files may be no UTF-8.
std::string textOf(const Json &json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

/// What a folder has and the run of its journal has not made, or the other way, as the end of an error; empty if
/// neither.
std::string entriesProblem(const Json &before, const Json &now) {
  const auto namesOf = [](const Json &run) {
    std::vector<std::string> names;
    if (run.contains("written") && run["written"].is_array())
      for (const Json &name : run["written"])
        names.push_back(name.is_string() ? name.get<std::string>() : std::string());
    std::sort(names.begin(), names.end());
    return names;
  };
  const std::vector<std::string> made = namesOf(before), found = namesOf(now);
  for (const std::string &name : found)
    if (!std::binary_search(made.begin(), made.end(), name))
      return "is of a run that did not make '" + name + "' in the same folder; move it elsewhere";
  for (const std::string &name : made)
    if (!std::binary_search(found.begin(), found.end(), name))
      return "is of a run that made '" + name + "', which is missing in the same folder";
  return {};
}

/// The first difference of the run of a journal from the present one, as the end of an error; empty if there is none.
std::string differenceOf(const Json &before, const Json &now) {
  if (!before.is_object())
    return "has no first line of a run";
  const auto text = [](const Json &json, const char *key) {
    return json.contains(key) ? textOf(json[key]) : "nothing";
  };
  for (const char *key : {"reshard", "plan", "transport", "rank", "options"})
    if (text(before, key) != text(now, key))
      return "is of another run: its '" + std::string(key) + "' is " + text(before, key) + ", expected " +
             text(now, key);
  if (!before.contains("files") || !before["files"].is_array() || before["files"].size() != now["files"].size())
    return "is of another run: it does not have the same number of files";
  for (size_t i = 0; i < now["files"].size(); ++i)
    if (before["files"][i] != now["files"][i])
      return "is of a run that read other files: '" + now["files"][i][0].get<std::string>() + "' has changed since";
  return entriesProblem(before, now);
}

constexpr const char *kAnew = "; without --resume a run begins anew";

} // namespace

std::vector<JournalFile> journalFiles(const Memory &memory) {
  std::vector<JournalFile> files;
  for (const MappedFile *file : memory.files())
    files.push_back(fileOf(file->path(), file->status()));
  return files;
}

Result<std::vector<std::string>> entriesOf(const std::string &folder) {
  namespace fs = std::filesystem;
  constexpr size_t kMaxFiles = size_t{1} << 20;
  std::vector<std::string> found;
  std::error_code error;
  for (fs::recursive_directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().lexically_relative(folder).string();
    if (name.starts_with(kJournalPrefix))
      continue;
    std::error_code lost;
    const fs::file_status status = at->symlink_status(lost);
    found.push_back(name + (fs::is_regular_file(status) || fs::is_directory(status) ? "" : " (no file of its own)"));
    if (found.size() > kMaxFiles)
      return failed("'" + folder + "' has more than " + std::to_string(kMaxFiles) + " files");
  }
  if (error)
    return failed("cannot list '" + folder + "': " + error.message());
  std::sort(found.begin(), found.end());
  return found;
}

Status CopyJournal::openFile(int flags) {
  file_ = uninterrupted([&] { return ::open(path_.c_str(), O_RDWR | O_CLOEXEC | flags, 0644); });
  return file_ < 0 ? systemError(flags & O_CREAT ? "create" : "open", path_) : Status();
}

Result<std::unique_ptr<CopyJournal>> CopyJournal::create(const std::string &path, const std::string &folder,
                                                         const JournalRun &run) {
  // It has its name when its first line is complete: a run that is killed before leaves no journal.
  std::unique_ptr<CopyJournal> journal(new CopyJournal(path + ".new", folder));
  Status status = syncFolder(folder); // first: a journal may only claim durable data
  if (status.ok())
    status = journal->openFile(O_CREAT | O_TRUNC);
  if (status.ok())
    status = journal->append(textOf(jsonOf(run)));
  if (status.ok() && ::rename(journal->path_.c_str(), path.c_str()) != 0)
    status = systemError("rename", journal->path_);
  journal->path_ = path;
  if (status.ok())
    status = syncFolder(folder); // now for the journal's name
  if (!status.ok())
    return status;
  journal->begin();
  return journal;
}

Result<std::unique_ptr<CopyJournal>> CopyJournal::open(const std::string &path, const std::string &folder,
                                                       const JournalRun &run) {
  std::unique_ptr<CopyJournal> journal(new CopyJournal(path, folder));
  Status status = journal->openFile(0);
  if (status.ok())
    status = journal->read(run);
  if (!status.ok())
    return status;
  journal->begin();
  return journal;
}

CopyJournal::~CopyJournal() {
  (void)finish();
  if (file_ >= 0)
    ::close(file_);
}

/// Reads all lines. What follows them is removed by the next append().
Status CopyJournal::read(const JournalRun &run) {
  constexpr uint64_t kMaxBytes = uint64_t{1} << 30;
  const Result<std::string> text = readWhole(path_, kMaxBytes);
  if (!text.ok())
    return text.status();
  for (size_t line = 1, next = 0; (next = text->find('\n', end_)) != std::string_view::npos; ++line) {
    const std::string_view all = std::string_view(*text).substr(end_, next - end_);
    const Json json = all.size() > kHash && all.substr(0, kHash) == hexadecimal(hashOf(all.substr(kHash + 1)), kHash)
                          ? Json::parse(all.substr(kHash + 1), nullptr, false)
                          : Json();
    if (line > 1 && json.is_array() && json.size() == 2 && json[0].is_number_unsigned() && json[1].is_number_unsigned())
      found_ = {json[0], json[1]};
    else if (line > 1 || !json.is_object())
      return failed("'" + path_ + "': line " + std::to_string(line) + " is damaged" + kAnew);
    else if (const std::string difference = differenceOf(json, jsonOf(run)); !difference.empty())
      return failed("'" + path_ + "' " + difference + kAnew);
    end_ = next + 1;
  }
  if (end_ == 0)
    return failed("'" + path_ + "' has no first line of a run" + kAnew);
  written_ = next_ = found_;
  return {};
}

Status CopyJournal::append(const std::string &json) {
  const std::string line = hexadecimal(hashOf(json), kHash) + " " + json + "\n";
  if (uninterrupted([&] { return ::ftruncate(file_, static_cast<off_t>(end_)); }) != 0)
    return systemError("write", path_);
  if (!writeAll(file_, line.data(), line.size(), end_))
    return systemError("write", path_);
  end_ += line.size();
  return syncFile(path_);
}

void CopyJournal::begin() {
  thread_ = std::thread([this] { work(); });
}

void CopyJournal::add(const JournalRecord &record) {
  const std::lock_guard lock(mutex_);
  if (record.done > next_.done)
    next_ = record;
  wake_.notify_one();
}

Status CopyJournal::finish() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable())
    thread_.join();
  return status_;
}

void CopyJournal::work() {
  std::unique_lock lock(mutex_);
  while (status_.ok()) {
    wake_.wait(lock, [this] { return stop_ || next_.done > written_.done; });
    if (next_.done == written_.done)
      return;
    const JournalRecord record = next_;
    lock.unlock();
    Status status = syncFolder(folder_);
    if (status.ok())
      status = append(textOf(Json::array({record.done, record.bytes})));
    lock.lock();
    written_ = record;
    status_ = std::move(status);
  }
}

} // namespace reshard::tools
