// Collectives of the processes of a run over their channel: compare plan digests and exchange addresses, all-reduce
// min, barrier.
#pragma once

#include "executor/channel.h"
#include "executor/local_peers.h"
#include "executor/transport.h"

#include <map>

namespace reshard {

class Bootstrap {
public:
  static constexpr size_t kRequests = 2;
  static constexpr uint32_t kTags = 64;
  /// Uses requests [request, request + kRequests) and tags [0, kTags) of the channel.
  Bootstrap(Channel &channel, size_t request) : channel_(channel), request_(request) {}

  /// Checks that every process has a plan of this digest (32 characters); else an error text names a rank with another
  /// one. `localPeers`: the addresses of the other processes of this host, by rank. All data passes rank 0: N small
  /// messages to it and N from it.
  std::string exchangeAddresses(const std::string &digest, const PeerAddress &mine, const Transport::Deadline &deadline,
                                bool &timedOut, std::map<uint32_t, PeerAddress> &localPeers);

  /// `result`: the least `value` of all processes, each of which must call it. In step k each rank sends to the rank
  /// that is 2^k higher (Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988): log2(N) steps.
  /// Allocates nothing.
  std::string allReduceMin(int64_t value, int64_t &result, const Transport::Deadline &deadline, bool &timedOut);
  std::string barrier(const Transport::Deadline &deadline, bool &timedOut) {
    int64_t ignored;
    return allReduceMin(0, ignored, deadline, timedOut);
  }

private:
  std::string wait(size_t request, uint32_t peer, const char *what, const Transport::Deadline &deadline,
                   bool &timedOut);
  std::string send(uint32_t peer, uint32_t tag, const void *data, size_t bytes, const char *what,
                   const Transport::Deadline &deadline, bool &timedOut);
  std::string receive(uint32_t peer, uint32_t tag, void *data, size_t bytes, const char *what,
                      const Transport::Deadline &deadline, bool &timedOut);

  Channel &channel_;
  const size_t request_;
  int64_t out_ = 0, in_ = 0; // of allReduceMin: members, since after a failure their messages are still in flight
};

} // namespace reshard
