// SPDX-License-Identifier: Apache-2.0
// Collectives in small messages: rank 0 compares the plans and tells each process its local peers; sums and minima pass
// through trees.
#include "executor/transports/bootstrap.h"

#include "base/backoff.h"

#include <algorithm>
#include <cstring>

namespace reshard {

namespace {

constexpr size_t kDigest = 32;
constexpr uint64_t kSpins = 1000; // MPI needs many polls to complete one request
constexpr uint32_t kSumTag = 40;  // above those of the steps of allReduceMin
constexpr const char *kPrepare = "in prepare";
constexpr const char *kAllReduce = "in an all-reduce (of open, prepare, a digest, or the end of a run)";

} // namespace

struct Bootstrap::PeerInfo {
  char digest[kDigest];
  PeerAddress address;
};

/// Whether all digests are equal (same = 1), or else a `rank` with another one; and the number of LocalPeers that
/// follow.
struct Bootstrap::Verdict {
  uint32_t same, rank, localCount, reserved;
  char digest[kDigest];
};

struct Bootstrap::LocalPeer {
  PeerAddress address;
  uint64_t rank;
};

struct Bootstrap::Answer {
  Verdict verdict{1, 0, 0, 0, {}};
  std::vector<LocalPeer> localPeers; // with the asking rank itself
};

Status planMismatch(uint32_t rank, const std::string &digest, uint32_t own, const std::string &ownDigest) {
  return failed("plans differ: rank " + std::to_string(rank) + " runs plan " + digest + ", rank " +
                std::to_string(own) + " runs plan " + ownDigest + "; give the same plan file to all ranks");
}

/// A peer's failure is found when the message is posted, or while it is awaited: the text is the same.
Status Bootstrap::named(const Status &failure, const Exchange &exchange) {
  return Status(failure).withSuffix(": with rank " + std::to_string(exchange.peer) + " " + exchange.collective);
}

Status Bootstrap::wait(size_t request, const Exchange &exchange, const Deadline &deadline) {
  Backoff backoff(kSpins);
  for (uint64_t polls = 0;; ++polls) {
    const Result<bool> done = channel_.test(request);
    if (!done.ok())
      return named(done.status(), exchange);
    if (*done)
      return {};
    if (polls % 64 == 0 && passed(deadline))
      return timedOut("timed out waiting for rank " + std::to_string(exchange.peer) + " " + exchange.collective);
    backoff.wait();
  }
}

Status Bootstrap::send(const Exchange &exchange, const void *data, const Deadline &deadline) {
  Status status =
      channel_.send(request_, exchange.peer, exchange.tag, static_cast<const std::byte *>(data), exchange.bytes);
  return status.ok() ? wait(request_, exchange, deadline) : named(status, exchange);
}

Status Bootstrap::receive(const Exchange &exchange, void *data, const Deadline &deadline) {
  Status status =
      channel_.receive(request_ + 1, exchange.peer, exchange.tag, static_cast<std::byte *>(data), exchange.bytes);
  return status.ok() ? wait(request_ + 1, exchange, deadline) : named(status, exchange);
}

Result<Bootstrap::Answer> Bootstrap::answerAll(const PeerInfo &mine, const Deadline &deadline) {
  std::vector<PeerInfo> all(channel_.size(), mine);
  for (uint32_t rank = 1; rank < channel_.size(); ++rank)
    if (Status status =
            receive({.peer = rank, .bytes = sizeof(PeerInfo), .collective = kPrepare}, &all[rank], deadline);
        !status.ok())
      return status;
  Verdict verdict = Answer().verdict;
  for (uint32_t rank = 0; rank < channel_.size() && verdict.same; ++rank)
    if (std::memcmp(all[rank].digest, all[0].digest, kDigest) != 0) {
      verdict.same = 0;
      verdict.rank = rank;
      std::memcpy(verdict.digest, all[rank].digest, kDigest);
    }
  std::map<uint64_t, std::vector<LocalPeer>> hosts;
  for (uint32_t rank = 0; rank < channel_.size(); ++rank)
    hosts[all[rank].address.host].push_back({all[rank].address, rank});
  auto answerTo = [&](uint32_t rank) {
    Answer answer{verdict, hosts[all[rank].address.host]};
    answer.verdict.localCount = static_cast<uint32_t>(answer.localPeers.size());
    if (!verdict.same && std::memcmp(all[rank].digest, verdict.digest, kDigest) == 0) { // it differs from rank 0
      answer.verdict.rank = 0;
      std::memcpy(answer.verdict.digest, all[0].digest, kDigest);
    }
    return answer;
  };
  for (uint32_t rank = channel_.size(); rank-- > 1;) {
    const Answer answer = answerTo(rank);
    for (const auto &[data, bytes] : {std::pair<const void *, size_t>{&answer.verdict, sizeof answer.verdict},
                                      {answer.localPeers.data(), answer.localPeers.size() * sizeof(LocalPeer)}})
      if (Status status = send({.peer = rank, .bytes = bytes, .collective = kPrepare}, data, deadline); !status.ok())
        return status;
  }
  return answerTo(0);
}

Result<Bootstrap::Answer> Bootstrap::askRankZero(const PeerInfo &mine, const Deadline &deadline) {
  Answer answer;
  if (Status status = send({.peer = 0, .bytes = sizeof mine, .collective = kPrepare}, &mine, deadline); !status.ok())
    return status;
  if (Status status =
          receive({.peer = 0, .bytes = sizeof answer.verdict, .collective = kPrepare}, &answer.verdict, deadline);
      !status.ok())
    return status;
  answer.localPeers.resize(std::min(answer.verdict.localCount, channel_.size()));
  if (Status status =
          receive({.peer = 0, .bytes = answer.localPeers.size() * sizeof(LocalPeer), .collective = kPrepare},
                  answer.localPeers.data(), deadline);
      !status.ok())
    return status;
  return answer;
}

Result<std::map<uint32_t, PeerAddress>> Bootstrap::exchangeAddresses(const std::string &digest, const PeerAddress &mine,
                                                                     const Deadline &deadline) {
  PeerInfo info{};
  std::memcpy(info.digest, digest.data(), kDigest);
  info.address = mine;
  const Result<Answer> answer = channel_.rank() == 0 ? answerAll(info, deadline) : askRankZero(info, deadline);
  if (!answer.ok())
    return answer.status();
  const Verdict &verdict = answer->verdict;
  if (!verdict.same)
    return planMismatch(verdict.rank, std::string(verdict.digest, kDigest), channel_.rank(), digest);
  std::map<uint32_t, PeerAddress> localPeers;
  for (const LocalPeer &each : answer->localPeers)
    if (each.rank != channel_.rank())
      localPeers.emplace(static_cast<uint32_t>(each.rank), each.address);
  return localPeers;
}

Result<int64_t> Bootstrap::allReduceMin(int64_t value, const Deadline &deadline) {
  const uint32_t rank = channel_.rank(), size = channel_.size();
  out_ = value;
  for (uint32_t step = 0, distance = 1; distance < size; ++step, distance *= 2) {
    const Exchange from{
        .peer = (rank + size - distance) % size, .tag = 1 + step, .bytes = sizeof in_, .collective = kAllReduce};
    Exchange to = from;
    to.peer = (rank + distance) % size;
    if (Status status =
            channel_.receive(request_ + 1, from.peer, from.tag, reinterpret_cast<std::byte *>(&in_), from.bytes);
        !status.ok())
      return status;
    if (Status status = send(to, &out_, deadline); !status.ok())
      return status;
    if (Status status = wait(request_ + 1, from, deadline); !status.ok())
      return status;
    out_ = std::min(out_, in_);
  }
  return out_;
}

Status Bootstrap::exchangeNumbers(uint32_t peer, bool sends, std::vector<uint64_t> &numbers, const Deadline &deadline) {
  constexpr size_t kAtOnce = kMaxChannelBytes / sizeof(uint64_t);
  for (size_t at = 0; at < numbers.size(); at += kAtOnce) {
    const Exchange part{.peer = peer,
                        .tag = kSumTag,
                        .bytes = std::min(kAtOnce, numbers.size() - at) * sizeof(uint64_t),
                        .collective = kAllReduce};
    if (Status status = sends ? send(part, &numbers[at], deadline) : receive(part, &numbers[at], deadline);
        !status.ok())
      return status;
  }
  return {};
}

Result<std::vector<uint64_t>> Bootstrap::allReduceSum(std::vector<uint64_t> values, const Deadline &deadline) {
  const uint32_t rank = channel_.rank(), size = channel_.size();
  sums_ = std::move(values);
  others_.resize(sums_.size());
  uint32_t distance = 1; // up: each rank sends once, to the rank without its lowest bit
  for (; distance < size && rank % (2 * distance) == 0; distance *= 2) {
    if (rank + distance >= size)
      continue;
    if (Status status = exchangeNumbers(rank + distance, false, others_, deadline); !status.ok())
      return status;
    for (size_t i = 0; i < sums_.size(); ++i)
      sums_[i] += others_[i];
  }
  if (rank > 0) {
    if (Status status = exchangeNumbers(rank - distance, true, sums_, deadline); !status.ok())
      return status;
    if (Status status = exchangeNumbers(rank - distance, false, sums_, deadline); !status.ok())
      return status;
  }
  while (distance > 1) { // down, to the same ranks
    distance /= 2;
    if (rank + distance < size)
      if (Status status = exchangeNumbers(rank + distance, true, sums_, deadline); !status.ok())
        return status;
  }
  return sums_;
}

} // namespace reshard
