// SPDX-License-Identifier: Apache-2.0
// Collectives of the processes of a run over their channel: compare plan digests and exchange addresses, all-reduce
// min and sum, barrier.
#pragma once

#include "executor/interfaces/channel.h"
#include "executor/transports/local_peers.h"
#include "executor/transports/transport.h"

#include <map>
#include <vector>

namespace reshard {

class Bootstrap {
public:
  static constexpr size_t kRequests = 2;
  static constexpr uint32_t kTags = 64;
  /// Uses requests [request, request + kRequests) and tags [0, kTags) of the channel.
  Bootstrap(Channel &channel, size_t request) : channel_(channel), request_(request) {}

  /// Checks that every process has a plan of this digest (32 characters); else the error names a rank with another one.
  /// Returns the addresses of the other processes of this host, by rank. All data passes rank 0: N small messages to it
  /// and N from it.
  Result<std::map<uint32_t, PeerAddress>> exchangeAddresses(const std::string &digest, const PeerAddress &mine,
                                                            const Deadline &deadline);

  /// The least `value` of all processes, each of which must call it. In step k each rank sends to the rank that is 2^k
  /// higher (Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988): log2(N) steps. Allocates
  /// nothing.
  Result<int64_t> allReduceMin(int64_t value, const Deadline &deadline);
  /// The sums, modulo 2^64, of the values of all processes, each of which must call it with as many. The sums go up a
  /// binomial tree to rank 0, and down again: 2 * log2(N) steps.
  Result<std::vector<uint64_t>> allReduceSum(std::vector<uint64_t> values, const Deadline &deadline);
  Status barrier(const Deadline &deadline) { return allReduceMin(0, deadline).status(); }

private:
  struct PeerInfo;
  struct Verdict;
  struct LocalPeer;
  struct Answer;
  /// As rank 0: receives the PeerInfo of every other rank and answers each. Returns the answer to itself.
  Result<Answer> answerAll(const PeerInfo &mine, const Deadline &deadline);
  /// As another rank: sends `mine` to rank 0. Returns its answer.
  Result<Answer> askRankZero(const PeerInfo &mine, const Deadline &deadline);
  /// A message of a collective, sent to or received from a peer.
  struct Exchange {
    uint32_t peer, tag = 0;
    size_t bytes;
    const char *collective; // for error texts: "in prepare"
  };
  static Status named(const Status &failure, const Exchange &exchange);
  Status wait(size_t request, const Exchange &exchange, const Deadline &deadline);
  Status send(const Exchange &exchange, const void *data, const Deadline &deadline);
  Status receive(const Exchange &exchange, void *data, const Deadline &deadline);
  /// Sends or receives numbers, in messages that the channel allows.
  Status exchangeNumbers(uint32_t peer, bool sends, std::vector<uint64_t> &numbers, const Deadline &deadline);

  Channel &channel_;
  const size_t request_;
  // Members, since after a failure their messages are still in flight.
  int64_t out_ = 0, in_ = 0;            // the values of allReduceMin
  std::vector<uint64_t> sums_, others_; // the values of allReduceSum
};

} // namespace reshard
