// SPDX-License-Identifier: Apache-2.0
// The check of a pull: the digests of the sources, bucket by bucket, against this rank's memory.
#include "executor/pull/puller.h"

#include "executor/rendezvous/bytes.h"

#include <algorithm>

namespace reshard::pull {

/// The longest lookup of a source rank in the store, and the most lookups between two polls.
static constexpr std::chrono::milliseconds kLookup{100};
static constexpr int kMaxLookups = 16;

/// Asks all source ranks for their partial digests of the version. Sets sums_.
Puller::Outcome Puller::collectDigests() {
  const PullCheck &check = *request_->check;
  failed_ = false;
  polled_ = Clock::now();
  sourceDigests_.clear();
  for (const uint32_t source : check.sources)
    sourceDigests_[source];
  while (true) {
    const bool any = handleEvents();
    if (!error_.ok())
      return Outcome::failed;
    if (failed_)
      return Outcome::again;
    const Connection *late = nullptr;
    int lookups = 0;
    for (auto &[rank, collected] : sourceDigests_) {
      if (collected.digests.size() == check.buckets.size() || lookups == kMaxLookups)
        continue;
      Connection &source = connectionTo(rank);
      late = late ? late : &source;
      if (!ready(source, kLookup)) {
        collected = {}; // another process may answer the next time
        ++lookups;
      } else if (!collected.asked) {
        askDigests(source, collected);
      }
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
  for (const auto &[rank, collected] : sourceDigests_)
    for (size_t i = 0; i < sums.size(); ++i)
      sums[i].add(collected.digests[i]);
  sourceDigests_.clear();
  error_ = check.checkDigests(sums);
  sums_ = std::move(sums);
  return error_.ok() ? Outcome::done : Outcome::failed;
}

void Puller::askDigests(Connection &source, SourceDigests &collected) {
  const std::vector<uint32_t> &buckets = request_->check->buckets;
  const size_t first = collected.digests.size();
  ByteWriter text;
  for (size_t i = first; i < std::min(buckets.size(), first + kDigests); ++i)
    text.number(buckets[i]);
  collected.asked = true;
  send(source, makeFrame(FrameKind::askDigests, {version_.number, version_.incarnation, first}), text.take());
}

void Puller::addDigests(Connection &source, const MessengerEvent &event) {
  const auto &words = event.frame.words;
  const auto found = sourceDigests_.find(source.worldRank);
  if (found == sourceDigests_.end() || !found->second.asked || words[1] != version_.number ||
      words[2] != version_.incarnation || words[3] != found->second.digests.size())
    return; // a late answer to an earlier call
  SourceDigests &collected = found->second;
  const size_t count = std::min(request_->check->buckets.size() - collected.digests.size(), kDigests);
  collected.asked = false;
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
    CountedDigest &partial = collected.digests.emplace_back();
    for (uint64_t &sum : partial.digest.sums)
      sum = reader.number<uint64_t>();
    partial.elements = reader.number<uint64_t>();
  }
}

/// Compares the memory with the digests, once in a call. The connections stay alive meanwhile.
Puller::Outcome Puller::compare() {
  const Result<std::string> wrong = request_->check->compare(*sums_, [&] {
    handleEvents();
    ping(connectionTo(options_.fleet.sources()[0]));
  });
  if (!wrong.ok()) {
    error_ = wrong.status();
    return Outcome::failed;
  }
  compared_ = wrong->empty();
  if (compared_)
    return Outcome::done;
  error_ = failed("the memory of " + options_.fleet.name(options_.worldRank) + " differs from version " +
                  std::to_string(version_.number) + " of the source: wrong are the tensors " + *wrong);
  if (assignment_.parent != kSources) { // the bytes may have been wrong there: the next pull reads from the sources
    error_ = std::move(error_).withSuffix("; it has read from replica " + std::to_string(assignment_.parent));
    send(connectionTo(options_.fleet.sources()[0]), makeFrame(FrameKind::parentFailed, {assignment_.parent}));
  }
  // The next pull writes all bytes, and no replica reads wrong ones meanwhile.
  version_ = {};
  if (Status status = options_.server->serve({}); !status.ok())
    error_ = std::move(status);
  return Outcome::failed;
}

} // namespace reshard::pull
