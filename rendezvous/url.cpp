// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/url.h"

#include "rendezvous/file_store.h"
#include "rendezvous/tcp_store.h"

namespace reshard {

namespace {

Result<std::unique_ptr<Store>> openTcp(const StoreOptions &options, const std::string &text, const Deadline &deadline) {
  const Result<HostPort> where = hostPort(text);
  if (!where.ok())
    return Status(where.status()).withPrefix("rendezvous '" + options.url + "': ");
  const TcpPlace place{*where, options.authenticator, options.insecure};
  std::shared_ptr<TcpServer> server;
  if (options.serves) {
    Result<std::shared_ptr<TcpServer>> served = TcpServer::shared(place, deadline);
    if (!served.ok())
      return served.status();
    server = std::move(*served);
  }
  return TcpStore::connect(place, std::move(server), deadline);
}

} // namespace

Result<std::unique_ptr<Store>> openStore(const StoreOptions &options, const Deadline &deadline) {
  const std::string &url = options.url;
  const size_t colon = url.find("://");
  const std::string scheme = url.substr(0, colon == std::string::npos ? 0 : colon);
  const std::string rest = colon == std::string::npos ? url : url.substr(colon + 3);
  if (scheme == "tcp")
    return openTcp(options, rest, deadline);
  if (scheme == "file" && rest.starts_with('/')) {
    auto store = std::make_unique<FileStore>(rest, options.authenticator.hasSecret() || options.insecure);
    if (Status status = store->open(); !status.ok())
      return status;
    return std::unique_ptr<Store>(std::move(store));
  }
  return invalid("rendezvous '" + url + "': found " +
                 (scheme.empty()     ? "no scheme"
                  : scheme == "file" ? "a relative path"
                                     : "the scheme '" + scheme + "'") +
                 ", expected tcp://host:port, file:///folder or env://");
}

void tellWhyNotServed(const StoreOptions &options, const JobOptions &job, const Status &reason,
                      const Deadline &deadline) {
  constexpr std::string_view kScheme = "tcp://";
  const Result<HostPort> where = hostPort(options.url.substr(std::min(kScheme.size(), options.url.size())));
  if (!options.url.starts_with(kScheme) || !where.ok() || reason.kind() == ErrorKind::invalid)
    return; // the others find the same
  const TcpPlace place{*where, options.authenticator, options.insecure};
  const Deadline until = launchDeadline(deadline);
  // The store of another job of this user or with this secret lets the others in, and then they wait there.
  const Result<std::unique_ptr<Store>> other = TcpStore::connect(place, nullptr, deadlineIn(0.5));
  if (other.ok())
    refuseJob(**other, job, reason, until);
  else if (other.status().timedOut()) // else the others have the same error
    giveNotice(place, reason.message(), job.size == 0 ? SIZE_MAX : job.size - 1, until);
}

} // namespace reshard
