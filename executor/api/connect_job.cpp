// SPDX-License-Identifier: Apache-2.0
// Reads and checks the options of a rendezvous, and opens the store that they name.
#include "executor/api/connect_job.h"

#include "executor/api/struct_size.h"
#include "executor/rendezvous/launch.h"
#include "executor/rendezvous/store.h"
#include "executor/rendezvous/url.h"

#include <algorithm>
#include <cstdlib>

namespace reshard {

namespace {

/// The name of the transport that the options name.
std::string transportOf(const reshard_options &options) {
  return options.transport ? options.transport : transports().front().name;
}

/// After the deadline, for the look that explains what is missing.
constexpr std::chrono::milliseconds kGrace{200};

/// Asked before each call: the calls of a slow store must not outlast the deadline together.
Status inTime(const char *what, const std::string &key, const Deadline &deadline) {
  const bool late = deadline && std::chrono::steady_clock::now() >= *deadline + kGrace;
  return late || (deadline.interrupt && deadline.interrupt->ask())
             ? timedOut("timed out " + std::string(what) + " '" + key + "' of the caller's store")
             : Status();
}

/// The caller's store as a Store.
class CallbackStore : public Store {
public:
  explicit CallbackStore(const reshard_store &store) : store_(store) {}

  Status set(const std::string &key, std::string_view value, const Deadline &deadline) override {
    if (Status status = inTime("setting", key, deadline); !status.ok())
      return status;
    const reshard_status status = store_.set(store_.user, key.c_str(), value.data(), value.size());
    if (status == RESHARD_TIMEOUT)
      return timedOut("timed out setting '" + key + "' of the caller's store");
    return status == RESHARD_OK ? Status()
                                : failed("the caller's store could not set '" + key + "': its function returned " +
                                         std::to_string(status));
  }

  Result<std::optional<std::string>> find(const std::string &key, const Deadline &deadline) override {
    std::string value(4096, '\0');
    while (true) { // until a value that grows with every call fits
      if (Status status = inTime("getting", key, deadline); !status.ok())
        return status;
      size_t bytes = 0;
      const reshard_status status = store_.get(store_.user, key.c_str(), value.data(), value.size(), &bytes);
      if (status == RESHARD_TIMEOUT)
        return std::optional<std::string>();
      if (status != RESHARD_OK)
        return failed("the caller's store could not get '" + key + "': its function returned " +
                      std::to_string(status));
      if (bytes > kMaxValueBytes)
        return failed("the caller's store has " + std::to_string(bytes) + " bytes at '" + key + "', expected at most " +
                      std::to_string(kMaxValueBytes));
      const bool fits = bytes <= value.size();
      value.resize(bytes);
      if (fits)
        return std::optional<std::string>(std::move(value));
    }
  }

private:
  const reshard_store store_;
};

} // namespace

Result<const TransportTraits *> checkOptions(const reshard_options &options) {
  const std::string name = transportOf(options);
  const std::string device = options.device ? options.device : transports().front().device;
  if (!findTransport(name))
    return invalid("unknown transport '" + name + "', expected " + oneOf(transportNames()));
  if (const std::vector<std::string> known = transportDevices();
      std::find(known.begin(), known.end(), device) == known.end())
    return invalid("unknown device '" + device + "', expected " + oneOf(known));
  const TransportTraits *const transport = findTransport(name, device);
  if (!transport)
    return invalid("transport '" + name + "' does not run on device '" + device + "', expected " +
                   oneOf(transportDevices([&](const TransportTraits &each) { return each.name == name; })));
  const bool given = options.rendezvous || options.store;
  if (options.rendezvous && options.store)
    return invalid("found a rendezvous '" + std::string(options.rendezvous) + "' and a store, expected one of them");
  if (given && !transport->rendezvous)
    return invalid("transport '" + name + "' has no rendezvous, expected transport " +
                   oneOf(transportNames(&TransportTraits::rendezvous)) + " with it");
  if (given && options.communicator)
    return invalid("found a communicator and a rendezvous, expected one of them");
  if (options.pull && !transport->pull)
    return invalid("pull mode needs transport " + oneOf(transportNames(&TransportTraits::pull)) + ", found '" + name +
                   "'");
  if (options.reserved != 0)
    return invalid("reshard_options.reserved: found " + std::to_string(options.reserved) + ", expected 0");
  if (!given && transport->needsRendezvous)
    return invalid("transport '" + name + "' needs a rendezvous: tcp://host:port, file:///folder, env://, or a store");
  return transport;
}

namespace {

/// The caller's store, if it gave one; else that of a URL.
Result<std::unique_ptr<Store>> storeOf(const reshard_options &options, const StoreOptions &place,
                                       const Deadline &deadline) {
  if (!options.store)
    return openStore(place, deadline);
  reshard_store own = RESHARD_STORE_INITIALIZER;
  if (Status status = readStruct(options.store, own); !status.ok())
    return status;
  if (!own.set || !own.get)
    return invalid(std::string("reshard_store.") + (own.set ? "get" : "set") + " is NULL, expected a function");
  return std::unique_ptr<Store>(std::make_unique<CallbackStore>(own));
}

/// Completes rank and URL from the environment, if env:// asks for it.
Status completeFromLauncher(JobProcess &process, std::string &url) {
  if (!url.starts_with("env://"))
    return process.rank ? Status()
                        : invalid("the rank of this process is unknown: pass exactly one rank to open, or use the "
                                  "rendezvous env://");
  if (url != "env://")
    return invalid("rendezvous '" + url + "': found text after env://, expected none");
  const Result<LaunchedJob> launched = findLaunchedJob();
  if (!launched.ok())
    return launched.status();
  if (process.size == 0)
    process.size = launched->size;
  if (launched->size != process.size && !process.pull)
    return invalid("the launch has " + std::to_string(launched->size) + " processes, expected " +
                   std::to_string(process.size) + ", one for each rank of the plan");
  process.rank = process.rank.value_or(launched->rank);
  url = launched->url;
  return {};
}

/// Proves the caller's secret, or the one in the environment.
Result<Authenticator> authenticatorOf(const reshard_options &options) {
  const char *environment = std::getenv("RESHARD_SECRET");
  const char *const secretText = options.secret ? options.secret : environment;
  if (secretText && !*secretText)
    return invalid(options.secret
                       ? "secret: found \"\", expected 1 to 4096 bytes, or NULL for the one in RESHARD_SECRET"
                       : "RESHARD_SECRET: found \"\", expected 1 to 4096 bytes; unset it for no secret");
  return Authenticator::create(secretText ? secretText : "");
}

} // namespace

Status checkRendezvous(const reshard_options &options, const Deadline &deadline) {
  if (!options.rendezvous && !options.store)
    return {};
  const Result<Authenticator> authenticator = authenticatorOf(options);
  if (!authenticator.ok() || options.store)
    return authenticator.status();
  JobProcess any{.plan = {}, .rank = 0, .size = 0};
  std::string url = options.rendezvous;
  if (Status status = completeFromLauncher(any, url); !status.ok())
    return status;
  return checkStore({url, false, *authenticator, options.insecure != 0}, launchDeadline(deadline));
}

Result<JobConnection> connectJob(const reshard_options &options, const std::string &given, const JobProcess &process,
                                 const Deadline &deadline, std::shared_ptr<Store> opened) {
  JobProcess completed = process;
  std::string url = given;
  if (Status status = completeFromLauncher(completed, url); !status.ok())
    return status;
  if (*completed.rank >= completed.size && completed.size != 0 && !completed.pull)
    return invalid("rank " + std::to_string(*completed.rank) + " is not in the plan, which has " +
                   std::to_string(completed.size) + " ranks");
  Result<Authenticator> authenticator = authenticatorOf(options);
  if (!authenticator.ok())
    return authenticator.status();
  const StoreOptions place{url, *completed.rank == 0, *authenticator, options.insecure != 0};
  JobOptions job{options.job ? options.job : "", completed.plan, *completed.rank, completed.size, *authenticator};
  if (!opened) {
    Result<std::unique_ptr<Store>> store = storeOf(options, place, deadline);
    if (!store.ok()) {
      if (place.serves && !options.store && !completed.pull)
        tellWhyNotServed(place, job, store.status(), deadline);
      return store.status();
    }
    opened = std::move(*store);
  }
  JobConnection connection{std::move(opened), nullptr, job};
  if (!completed.pull)
    connection.rendezvous = std::make_unique<StoreRendezvous>(*connection.store, std::move(job));
  return connection;
}

Status reportFailureToJob(const reshard_options &options, std::optional<uint32_t> rank, const Status &reason,
                          const Deadline &deadline) {
  const TransportTraits *const transport = findTransport(transportOf(options));
  const bool given = options.rendezvous || options.store;
  // Without a rendezvous of the caller, NCCL's ranks meet at env://, except where NCCL itself finds rank 0.
  const bool byDefault =
      transport && !transport->needsRendezvous && !options.communicator && !std::getenv("NCCL_COMM_ID");
  if (!transport || !transport->rendezvous || (!given && !byDefault))
    return invalid("found no rendezvous, or a transport without one, expected transport " +
                   oneOf(transportNames(&TransportTraits::rendezvous)) + " with it");
  if (options.pull)
    return {}; // no process waits for another
  if (Status status = checkOptions(options).status(); !status.ok())
    return status;
  const Deadline until = launchDeadline(deadline);
  const std::string url = options.rendezvous ? options.rendezvous : given ? "" : "env://";
  const Result<JobConnection> job = connectJob(options, url, {.plan = {}, .rank = rank, .size = 0}, until);
  if (job.ok())
    reportFailure(*job->store, job->job, reason, until);
  return job.status();
}

} // namespace reshard
