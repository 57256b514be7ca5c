// SPDX-License-Identifier: Apache-2.0
// Keeps, for each replica, its ranks, its assignment and its parent, and a queue of answers. A request that no version
// serves yet is parked until a source publishes one.
#include "executor/pull/coordinator.h"

#include <algorithm>

namespace reshard::pull {

/// A process of which no frame has arrived for this time counts as lost. One that runs sends a frame at
/// least every second.
static constexpr std::chrono::seconds kLostAfter{5};

void Coordinator::published(uint32_t meshRank, Version version) {
  if (meshRank >= published_.size())
    return;
  published_[meshRank] = version;
  newest_ = {0, published_[0].number};
  for (const Version &each : published_) {
    newest_.incarnation = std::max(newest_.incarnation, each.incarnation);
    if (each.number != published_[0].number)
      newest_.number = 0;
  }
  serveParked();
}

void Coordinator::begin(uint64_t client, const BeginRequest &request, Clock::time_point until) {
  if (request.meshRank >= shape_.replicaRanks || request.call == 0)
    return;
  Replica &replica = replicas_[request.replica];
  replica.ranks.resize(shape_.replicaRanks);
  Rank &rank = replica.ranks[request.meshRank];
  if (rank.client != client && rank.client != 0) { // the process has started again, or there are two
    answers_.push_back({rank.client, CoordinatorAnswer::kReplaced, 0, {}});
    clients_.erase(rank.client);
    parked_.erase(rank.client);
  }
  if (rank.client != client) {
    rank.client = client;
    rank.ended = rank.complete = rank.asked = false;
    rank.lastSeen = {};
  }
  clients_[client] = {request.replica, request.meshRank};
  replica.unresponsive = false;
  parked_.erase(client);
  if (assign(client, request))
    return;
  Parked &parked = parked_[client];
  parked.request = request;
  parked.until = until;
  wait(client, parked);
}

/// Whether a rank that begins may join the replica's assignment.
bool Coordinator::joins(const Replica &replica, const BeginRequest &request) const {
  const Rank &rank = replica.ranks[request.meshRank];
  if (replica.committed) // this call has been answered already, and the answer was lost
    return rank.call == request.call && request.failed != replica.assignment;
  return replica.open && replica.version == newest_ && replica.version.number >= request.minVersion &&
         request.failed != replica.assignment;
}

/// Answers a request if a version serves it.
bool Coordinator::assign(uint64_t client, const BeginRequest &request) {
  Replica &replica = replicas_[request.replica];
  if (!joins(replica, request)) {
    if (newest_.number == 0 || newest_.number < request.minVersion)
      return false;
    open(request.replica, replica);
  }
  replica.ranks[request.meshRank].call = request.call;
  answers_.push_back({client, CoordinatorAnswer::kAssign, replica.assignment, replica.version, replica.parent, kSources,
                      request.call});
  return true;
}

/// Ends the assignment of a replica and fixes a new one.
void Coordinator::open(uint32_t number, Replica &replica) {
  for (Rank &rank : replica.ranks) {
    if (rank.asked && rank.client != 0)
      answers_.push_back({rank.client, CoordinatorAnswer::kRepeat, replica.assignment, replica.version});
    rank.asked = rank.complete = false;
    rank.call = 0;
  }
  replica.open = false;
  replica.committed = false;
  replica.parent = chooseParent(number, newest_);
  replica.version = newest_;
  replica.assignment = ++assignments_;
  replica.open = true;
}

void Coordinator::complete(uint64_t client, uint64_t assignment) {
  Replica *replica = nullptr;
  Rank *const rank = rankOf(client, replica);
  if (rank)
    replica->unresponsive = false;
  if (!rank || assignment == 0 || replica->assignment != assignment) {
    answers_.push_back({client, CoordinatorAnswer::kRepeat, assignment, {}});
    return;
  }
  rank->complete = true;
  if (replica->committed) { // the answer was lost
    answers_.push_back({client, CoordinatorAnswer::kCommitted, assignment, replica->version});
    return;
  }
  rank->asked = true;
  if (!std::all_of(replica->ranks.begin(), replica->ranks.end(), [](const Rank &each) { return each.complete; }))
    return;
  replica->open = false;
  replica->committed = true;
  for (Rank &each : replica->ranks) {
    if (each.asked && each.client != 0)
      answers_.push_back({each.client, CoordinatorAnswer::kCommitted, assignment, replica->version});
    each.asked = false;
  }
}

void Coordinator::resume(uint64_t client, uint32_t number, uint32_t meshRank, uint64_t assignment) {
  const auto found = replicas_.find(number);
  if (found == replicas_.end() || !found->second.committed || found->second.assignment != assignment ||
      meshRank >= found->second.ranks.size())
    return;
  Rank &rank = found->second.ranks[meshRank];
  clients_.erase(rank.client); // its end may be noticed later
  parked_.erase(rank.client);
  rank.client = client;
  rank.ended = rank.asked = false;
  rank.complete = true;
  rank.lastSeen = {};
  clients_[client] = {number, meshRank};
}

void Coordinator::parentFailed(uint64_t client, uint32_t parent) {
  Replica *replica = nullptr;
  if (!rankOf(client, replica) || replica->parent != parent)
    return;
  if (const auto found = replicas_.find(parent); found != replicas_.end())
    found->second.unresponsive = true;
  replica->parent = kSources;
}

void Coordinator::seen(uint64_t client, Clock::time_point now) {
  Replica *replica = nullptr;
  Rank *const rank = rankOf(client, replica);
  if (!rank)
    return;
  rank->lastSeen = now;
  replica->unresponsive = false;
}

void Coordinator::lost(uint64_t client) {
  Replica *replica = nullptr;
  if (Rank *const rank = rankOf(client, replica)) {
    rank->client = 0;
    rank->ended = true;
    rank->asked = rank->complete = false;
  }
  clients_.erase(client);
  parked_.erase(client);
}

void Coordinator::expire(Clock::time_point now) {
  std::erase_if(parked_, [&](const auto &each) { return each.second.until <= now; });
}

std::optional<CoordinatorAnswer> Coordinator::next() {
  if (answers_.empty())
    return {};
  const CoordinatorAnswer answer = answers_.front();
  answers_.pop_front();
  return answer;
}

std::vector<ReplicaInfo> Coordinator::replicas(Clock::time_point now) const {
  std::vector<ReplicaInfo> result;
  for (const auto &[number, replica] : replicas_) {
    ReplicaInfo info{number, 0, replica.version.number, ReplicaInfo::kPulling};
    info.state = replica.committed ? ReplicaInfo::kComplete : ReplicaInfo::kPulling;
    for (const Rank &rank : replica.ranks) {
      info.ranks += rank.client != 0;
      if (rank.ended || (rank.lastSeen != Clock::time_point() && now - rank.lastSeen > kLostAfter))
        info.state = ReplicaInfo::kLost;
    }
    result.push_back(info);
  }
  return result;
}

/// Sends a client that waits the reason, if it has changed.
void Coordinator::wait(uint64_t client, Parked &parked) {
  uint64_t version = 0;
  for (const Version &each : published_)
    version = std::max(version, each.number);
  uint32_t rank = kSources;
  for (uint32_t source = 0; source < published_.size() && rank == kSources; ++source)
    if (published_[source].number < version || version == 0)
      rank = source;
  if (parked.sentVersion == version && parked.sentRank == rank)
    return;
  parked.sentVersion = version;
  parked.sentRank = rank;
  answers_.push_back({client, CoordinatorAnswer::kWaiting, 0, {0, version}, kSources, rank});
}

void Coordinator::serveParked() {
  for (auto each = parked_.begin(); each != parked_.end();) {
    if (assign(each->first, each->second.request)) {
      each = parked_.erase(each);
      continue;
    }
    wait(each->first, each->second);
    ++each;
  }
}

bool Coordinator::alive(const Replica &replica) {
  return !replica.unresponsive &&
         std::none_of(replica.ranks.begin(), replica.ranks.end(), [](const Rank &rank) { return rank.ended; });
}

std::optional<uint32_t> Coordinator::depth(uint32_t number, uint32_t child) const {
  uint32_t depth = 0;
  for (uint32_t at = number; at != kSources; ++depth) {
    if (at == child || depth > replicas_.size())
      return {};
    const Replica &replica = replicas_.at(at);
    if (replica.committed)
      return depth;
    at = replica.parent;
  }
  return depth;
}

/// The sources, if no replica reads from them; else the end of the shortest chain of replicas that hold or pull the
/// version. Replicas that read the same messages in the same order would share one source's bandwidth.
uint32_t Coordinator::chooseParent(uint32_t child, const Version &version) const {
  bool head = false;
  std::map<uint32_t, uint32_t> children;
  for (const auto &[number, replica] : replicas_) {
    if (!replica.open || number == child || replica.version != version || !alive(replica))
      continue;
    head = head || replica.parent == kSources;
    ++children[replica.parent];
  }
  if (!head)
    return kSources;
  uint32_t parent = kSources;
  std::optional<uint32_t> least;
  for (const auto &[number, replica] : replicas_) {
    if (number == child || replica.version != version || !(replica.open || replica.committed) || !alive(replica) ||
        children.contains(number))
      continue;
    if (const std::optional<uint32_t> found = depth(number, child); found && (!least || *found < *least)) {
      least = found;
      parent = number;
    }
  }
  return parent;
}

Coordinator::Rank *Coordinator::rankOf(uint64_t client, Replica *&replica) {
  const auto found = clients_.find(client);
  if (found == clients_.end())
    return nullptr;
  replica = &replicas_.at(found->second.first);
  return &replica->ranks[found->second.second];
}

} // namespace reshard::pull
