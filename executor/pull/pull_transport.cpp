// SPDX-License-Identifier: Apache-2.0
#include "executor/pull/pull_transport.h"

namespace reshard::pull {

PullTransport::~PullTransport() {
  if (server_)
    server_->stop(); // its thread uses the puller
  puller_.reset();
}

Status PullTransport::prepare(const Plan &plan, const std::vector<LocalRank> &ranks, Deadline deadline) {
  if (ranks.size() != 1)
    return failed("this process has " + std::to_string(ranks.size()) + " ranks, expected one in pull mode");
  viewJobs_ = ranks[0].viewJobs;
  if (Status status = table_.build(plan, options_.fleet, ranks[0], options_.worldRank); !status.ok())
    return status;
  progress_ = std::make_unique<PullProgress>(table_.received().size());
  for (const ReceivedMessage &message : table_.received())
    by_.messages += message.packing.bytes();
  by_.local = table_.copies().bytes();
  return start(deadline);
}

/// Starts the server and enters the store.
Status PullTransport::start(const Deadline &deadline) {
  const Fleet &fleet = options_.fleet;
  directory_ = std::make_unique<Directory>(*options_.store, options_.job);
  Result<std::unique_ptr<Messenger>> serving = options_.open(), pulling = options_.open();
  if (!serving.ok() || !pulling.ok())
    return serving.ok() ? pulling.status() : serving.status();
  server_ = std::make_unique<Server>(
      std::move(*serving), table_, *progress_,
      ServerOptions{fleet, options_.worldRank, directory_->token(), [this] { puller_->idle(); }});
  puller_ =
      std::make_unique<Puller>(std::move(*pulling), PullerOptions{fleet, options_.worldRank, directory_.get(), &table_,
                                                                  progress_.get(), server_.get(), options_.rangeBytes});
  server_->start();
  if (Status status = directory_->enter(server_->address(), deadline); !status.ok())
    return status;
  return isSource() ? findSources(deadline) : Status();
}

/// The coordinator and the other source ranks find each other in the store: the one that enters it later connects.
Status PullTransport::findSources(const Deadline &deadline) {
  const std::vector<uint32_t> &sources = options_.fleet.sources();
  const bool coordinates = options_.worldRank == sources[0];
  for (size_t s = coordinates ? 1 : 0; s < (coordinates ? sources.size() : 1); ++s) {
    const Result<std::optional<ServerAddress>> found = directory_->find(sources[s], deadline);
    if (!found.ok())
      return found.status();
    if (*found)
      server_->addPeer(**found);
  }
  return {};
}

Status PullTransport::runViewJobs(ViewJobs::JobSet set, const Deadline &deadline) const {
  for (size_t job = 0; viewJobs_ && job < viewJobs_->size(set); ++job) {
    if (passed(deadline))
      return timedOut("timed out in the conversions of quantized params");
    viewJobs_->run(set, job);
  }
  return {};
}

Status PullTransport::publish(uint64_t version, const std::function<Status()> &prepareSend,
                              const std::function<Result<std::vector<CountedDigest>>()> &digest) {
  if (Status status = server_->mayPublish(version); !status.ok())
    return status;
  if (Status status = prepareSend(); !status.ok())
    return status;
  if (Status status = runViewJobs(ViewJobs::kBefore, {}); !status.ok())
    return status;
  Result<std::vector<CountedDigest>> digests = digest ? digest() : std::vector<CountedDigest>();
  return digests.ok() ? server_->publish(version, std::move(*digests)) : digests.status();
}

Result<uint64_t> PullTransport::pull(PullRequest request) {
  const std::function<Status()> after = request.afterWriting;
  request.afterWriting = [&]() -> Status {
    Status status = runViewJobs(ViewJobs::kAfter, request.deadline);
    return status.ok() ? after() : status;
  };
  return puller_->pull(request);
}

} // namespace reshard::pull
