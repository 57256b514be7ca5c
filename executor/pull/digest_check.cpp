// SPDX-License-Identifier: Apache-2.0
// The check of a pull: the digests of the sources, bucket by bucket, against this rank's memory.
#include "executor/pull/puller.h"

#include "executor/rendezvous/bytes.h"

#include <algorithm>

namespace reshard::pull {

/// The most lookups in the store between two polls.
static constexpr int kMaxLookups = 16;

Result<bool> DigestCheck::collect() {
  if (sums_)
    return true;
  const PullCheck &check = *call_.request->check;
  call_.again = false;
  partials_.clear();
  for (const uint32_t source : check.sources)
    partials_[source];
  while (true) {
    const bool any = connections_.handleEvents();
    if (!call_.error.ok())
      return call_.error;
    if (call_.again)
      return false;
    const ServerConnection *const late = askMissing();
    if (!late)
      break;
    if (passed(connections_.deadline()))
      return timedOut("timed out: waited for the digests of version " + std::to_string(version_.number) + " from " +
                      options_.fleet.name(late->worldRank) + (late->ready ? "" : "; " + connections_.problemOf(*late)));
    connections_.wait(any);
  }
  std::vector<CountedDigest> sums(check.buckets.size());
  for (const auto &[rank, collected] : partials_)
    for (size_t i = 0; i < sums.size(); ++i)
      sums[i].add(collected.digests[i]);
  partials_.clear();
  if (Status status = check.checkDigests(sums); !status.ok())
    return status;
  sums_ = std::move(sums);
  return true;
}

const ServerConnection *DigestCheck::askMissing() {
  const ServerConnection *late = nullptr;
  int lookups = 0;
  for (auto &[rank, collected] : partials_) {
    if (collected.digests.size() == call_.request->check->buckets.size() || lookups == kMaxLookups)
      continue;
    ServerConnection &source = connections_.to(rank);
    late = late ? late : &source;
    if (!connections_.ready(source, ServerConnections::kShortLookup)) {
      collected = {}; // another process may answer the next time
      ++lookups;
    } else if (!collected.asked) {
      ask(source, collected);
    }
  }
  return late;
}

void DigestCheck::ask(ServerConnection &source, Partials &collected) {
  const std::vector<uint32_t> &buckets = call_.request->check->buckets;
  const size_t first = collected.digests.size();
  ByteWriter text;
  for (size_t i = first; i < std::min(buckets.size(), first + kDigests); ++i)
    text.number(buckets[i]);
  collected.asked = true;
  connections_.send(source, makeFrame(FrameKind::askDigests, {version_.number, version_.incarnation, first}),
                    text.take());
}

void DigestCheck::arrived(ServerConnection &source, const MessengerEvent &event) {
  const auto &words = event.frame.words;
  const auto found = partials_.find(source.worldRank);
  if (found == partials_.end() || !found->second.asked || words[1] != version_.number ||
      words[2] != version_.incarnation || words[3] != found->second.digests.size())
    return; // a late answer to an earlier call
  Partials &collected = found->second;
  const size_t count = std::min(call_.request->check->buckets.size() - collected.digests.size(), kDigests);
  collected.asked = false;
  switch (static_cast<DigestsAnswer>(words[4])) {
  case DigestsAnswer::given:
    break;
  case DigestsAnswer::without:
    call_.error = failed("version " + std::to_string(version_.number) + " cannot be checked: " +
                         options_.fleet.name(source.worldRank) + " has published it without digests");
    return;
  case DigestsAnswer::otherVersion:
    call_.again = true;
    return;
  }
  if (event.text.size() != count * kDigestBytes) {
    source.problem = "found " + std::to_string(event.text.size()) + " bytes of digests from " +
                     options_.fleet.name(source.worldRank) + ", expected " + std::to_string(count * kDigestBytes);
    return connections_.disconnect(source);
  }
  for (ByteReader reader(event.text); !reader.rest().empty();) {
    CountedDigest &partial = collected.digests.emplace_back();
    for (uint64_t &sum : partial.digest.sums)
      sum = reader.number<uint64_t>();
    partial.elements = reader.number<uint64_t>();
  }
}

Result<std::string> DigestCheck::compare() {
  if (equal_)
    return std::string();
  Result<std::string> wrong = call_.request->check->compare(*sums_, [&] {
    connections_.handleEvents();
    connections_.ping(connections_.coordinator());
  });
  equal_ = wrong.ok() && wrong->empty();
  return wrong;
}

} // namespace reshard::pull
