// SPDX-License-Identifier: Apache-2.0
#include "executor/rendezvous/url.h"

#include "executor/rendezvous/file_store.h"
#include "executor/rendezvous/tcp_store.h"

#include <optional>
#include <string>
#include <string_view>

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

} // namespace reshard
