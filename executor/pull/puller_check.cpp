// SPDX-License-Identifier: Apache-2.0
// The check of a pull: the digests of the sources, bucket by bucket, against this rank's memory.
#include "executor/pull/puller.h"

#include "rendezvous/bytes.h"

#include <algorithm>

namespace reshard::pull {

/// The longest look into the store for a source rank.
static constexpr std::chrono::milliseconds kLook{2000};

/// Asks all source ranks for their shares at a time, and compares the sums.
Puller::Outcome Puller::check() {
  const PullCheck &check = *request_->check;
  failed_ = false;
  polled_ = Clock::now();
  shares_.clear();
  for (const uint32_t source : check.sources)
    shares_[source];
  while (true) {
    const bool any = handleEvents();
    if (!error_.ok())
      return Outcome::failed;
    if (failed_)
      return Outcome::again;
    const Connection *late = nullptr;
    for (auto &[rank, shares] : shares_) {
      if (shares.digests.size() == check.buckets.size())
        continue;
      Connection &source = connectionTo(rank);
      late = late ? late : &source;
      if (!ready(source, kLook))
        shares = {}; // another process may answer the next time
      else if (!shares.asked)
        askDigests(source, shares);
    }
    if (!late)
      break;
    if (passed(deadline_)) {
      error_ = timedOut("timed out: waited for the digests of version " + std::to_string(version_.number) + " from " +
                        options_.fleet.name(late->worldRank) + (late->ready ? "" : "; " + problemOf(*late)));
      return Outcome::failed;
    }
    wait(any);
  }
  std::vector<CountedDigest> sums(check.buckets.size());
  for (const auto &[rank, shares] : shares_)
    for (size_t i = 0; i < sums.size(); ++i)
      sums[i].add(shares.digests[i]);
  error_ = check.compare(version_.number, sums);
  if (error_.ok())
    return Outcome::done;
  if (error_.kind() != ErrorKind::failed) // nothing is known about the memory
    return Outcome::failed;
  // The next pull writes all bytes, and no replica reads wrong ones meanwhile.
  version_ = {};
  if (Status status = options_.server->serve({}); !status.ok())
    error_ = std::move(status);
  return Outcome::failed;
}

void Puller::askDigests(Connection &source, Shares &shares) {
  const std::vector<uint32_t> &buckets = request_->check->buckets;
  const size_t first = shares.digests.size();
  ByteWriter text;
  for (size_t i = first; i < std::min(buckets.size(), first + kDigests); ++i)
    text.number(buckets[i]);
  shares.asked = true;
  send(source, makeFrame(FrameKind::askDigests, {version_.number, version_.birth, first}), text.take());
}

void Puller::addShares(Connection &source, const MessengerEvent &event) {
  const auto &words = event.frame.words;
  const auto found = shares_.find(source.worldRank);
  if (!request_ || !request_->check || found == shares_.end() || !found->second.asked || words[1] != version_.number ||
      words[2] != version_.birth || words[3] != found->second.digests.size())
    return; // a late answer to an earlier call
  Shares &shares = found->second;
  const size_t count = std::min(request_->check->buckets.size() - shares.digests.size(), kDigests);
  shares.asked = false;
  switch (static_cast<DigestsAnswer>(words[4])) {
  case DigestsAnswer::given:
    break;
  case DigestsAnswer::without:
    error_ = failed("version " + std::to_string(version_.number) + " cannot be checked: " +
                    options_.fleet.name(source.worldRank) + " has published it without digests");
    return;
  case DigestsAnswer::otherVersion:
    failed_ = true;
    return;
  }
  if (event.text.size() != count * kDigestBytes) {
    source.problem = "found " + std::to_string(event.text.size()) + " bytes of digests from " +
                     options_.fleet.name(source.worldRank) + ", expected " + std::to_string(count * kDigestBytes);
    return disconnect(source);
  }
  for (ByteReader reader(event.text); !reader.rest().empty();) {
    CountedDigest &share = shares.digests.emplace_back();
    for (uint64_t &sum : share.digest.sums)
      sum = reader.number<uint64_t>();
    share.elements = reader.number<uint64_t>();
  }
}

} // namespace reshard::pull
