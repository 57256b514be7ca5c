// SPDX-License-Identifier: Apache-2.0
// Parses and checks URLs. A store in a folder replaces a file as a whole when it sets a key, and refuses files of other
// users.
#include "executor/rendezvous/url.h"

#include "base/atomic_file.h"
#include "base/hash.h"
#include "base/system_error.h"
#include "executor/rendezvous/bytes.h"
#include "executor/rendezvous/tcp_store.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>

namespace reshard {

namespace {

/// The store that a URL names.
struct StoreUrl {
  std::optional<TcpStoreConfig> tcp; // no value: a folder
  std::string folder;
};

Result<StoreUrl> parseUrl(const StoreOptions &options) {
  const std::string &url = options.url;
  const size_t colon = url.find("://");
  const std::string scheme = url.substr(0, colon == std::string::npos ? 0 : colon);
  const std::string rest = colon == std::string::npos ? url : url.substr(colon + 3);
  if (scheme == "tcp") {
    const Result<HostPort> where = hostPort(rest);
    if (!where.ok())
      return Status(where.status()).withPrefix("rendezvous '" + url + "': ");
    return StoreUrl{TcpStoreConfig{*where, options.authenticator, options.insecure}, {}};
  }
  if (scheme == "file" && rest.starts_with('/'))
    return StoreUrl{{}, rest};
  return invalid("rendezvous '" + url + "': found " +
                 (scheme.empty()     ? "no scheme"
                  : scheme == "file" ? "a relative path"
                                     : "the scheme '" + scheme + "'") +
                 ", expected tcp://host:port, file:///folder or env://");
}

std::unique_ptr<FileStore> folderOf(const StoreOptions &options, const StoreUrl &parsed) {
  return std::make_unique<FileStore>(parsed.folder, options.authenticator.hasSecret() || options.insecure);
}

} // namespace

Result<std::unique_ptr<Store>> openStore(const StoreOptions &options, const Deadline &deadline) {
  const Result<StoreUrl> parsed = parseUrl(options);
  if (!parsed.ok())
    return parsed.status();
  if (!parsed->tcp) {
    std::unique_ptr<FileStore> store = folderOf(options, *parsed);
    if (Status status = store->open(); !status.ok())
      return status;
    return std::unique_ptr<Store>(std::move(store));
  }
  std::shared_ptr<TcpServer> server;
  if (options.serves) {
    Result<std::shared_ptr<TcpServer>> served = TcpServer::shared(*parsed->tcp, deadline);
    if (!served.ok())
      return served.status();
    server = std::move(*served);
  }
  return TcpStore::connect(*parsed->tcp, std::move(server), deadline);
}

Status checkStore(const StoreOptions &options, const Deadline &deadline) {
  const Result<StoreUrl> parsed = parseUrl(options);
  if (!parsed.ok())
    return parsed.status();
  Status status = parsed->tcp ? parsed->tcp->check(deadline) : folderOf(options, *parsed)->open();
  return status.timedOut() ? Status() : status; // openStore may wait longer for the look-up of a host
}

void tellWhyNotServed(const StoreOptions &options, const JobOptions &job, const Status &reason,
                      const Deadline &deadline) {
  const Result<StoreUrl> named = parseUrl(options);
  if (!named.ok() || !named->tcp || reason.kind() == ErrorKind::invalid)
    return; // the others find the same
  const TcpStoreConfig &parsed = *named->tcp;
  const Deadline until = launchDeadline(deadline);
  // The store of another job of this user or with this secret lets the others in, and then they wait there.
  const Result<std::unique_ptr<Store>> other = TcpStore::connect(parsed, nullptr, deadlineIn(0.5));
  if (other.ok())
    refuseJob(**other, job, reason, until);
  else if (other.status().timedOut()) // else the others have the same error
    giveNotice(parsed, reason.message(), job.size == 0 ? SIZE_MAX : job.size - 1, until);
}

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
