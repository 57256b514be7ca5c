// What the processes of a run agree on over their wire: that they run one plan, who is on one host, that all are done.
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
  /// Uses requests [request, request + kRequests) and tags [0, kTags) of the wire, whatever the plan.
  Bootstrap(Channel &channel, size_t request) : channel_(channel), request_(request) {}

  /// Every process has a plan of this digest (32 characters), or an error text that names one that has another.
  /// `localPeers`: the invitations of the others on this host, by rank. All go through rank 0: N messages of a few
  /// bytes there and back.
  std::string exchangeAddresses(const std::string &digest, const PeerAddress &mine, const Transport::Deadline &deadline,
                                bool &timedOut, std::map<uint32_t, PeerAddress> &localPeers);

  /// Returns when every process has called it, with the least of what they say. In step k each tells the one 2^k
  /// further on (Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988): log2(N) steps. Allocates
  /// nothing.
  std::string allReduceMin(int64_t mine, int64_t &minimum, const Transport::Deadline &deadline, bool &timedOut);
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
  int64_t out_ = 0, in_ = 0; // of the barrier: no frame's, since one that failed leaves them on their way
};

} // namespace reshard
