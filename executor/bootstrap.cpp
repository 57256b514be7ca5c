#include "executor/bootstrap.h"

#include <algorithm>
#include <cstring>
#include <sched.h>

namespace reshard {

namespace {

constexpr size_t kDigest = 32;

struct Hello {
  char digest[kDigest];
  PeerAddress address;
};

/// Rank 0's answer: all digests are equal (same = 1), or `rank` has another one; and the number of LocalPeers that
/// follow.
struct Verdict {
  uint32_t same, rank, localCount, reserved;
  char digest[kDigest];
};

struct LocalPeer {
  PeerAddress address;
  uint64_t rank;
};

} // namespace

std::string planMismatch(uint32_t rank, const std::string &digest, uint32_t own, const std::string &ownDigest) {
  return "plans differ: rank " + std::to_string(rank) + " runs plan " + digest + ", rank " + std::to_string(own) +
         " runs plan " + ownDigest + "; give the same plan file to all ranks";
}

std::string Bootstrap::wait(size_t request, uint32_t peer, const char *what, const Transport::Deadline &deadline,
                            bool &timedOut) {
  for (uint64_t polls = 0;; ++polls) {
    bool done = false;
    if (std::string error = channel_.test(request, done); !error.empty() || done)
      return error.empty() ? error : error + ": with rank " + std::to_string(peer) + " " + what;
    if (deadline && polls % 64 == 0 && std::chrono::steady_clock::now() >= *deadline) {
      timedOut = true;
      return "timed out waiting for rank " + std::to_string(peer) + " " + what;
    }
    sched_yield(); // no sleep: MPI needs many polls to complete one request
  }
}

std::string Bootstrap::send(uint32_t peer, uint32_t tag, const void *data, size_t bytes, const char *what,
                            const Transport::Deadline &deadline, bool &timedOut) {
  const std::string error = channel_.send(request_, peer, tag, static_cast<const std::byte *>(data), bytes);
  return error.empty() ? wait(request_, peer, what, deadline, timedOut) : error;
}

std::string Bootstrap::receive(uint32_t peer, uint32_t tag, void *data, size_t bytes, const char *what,
                               const Transport::Deadline &deadline, bool &timedOut) {
  const std::string error = channel_.receive(request_ + 1, peer, tag, static_cast<std::byte *>(data), bytes);
  return error.empty() ? wait(request_ + 1, peer, what, deadline, timedOut) : error;
}

std::string Bootstrap::exchangeAddresses(const std::string &digest, const PeerAddress &mine,
                                         const Transport::Deadline &deadline, bool &timedOut,
                                         std::map<uint32_t, PeerAddress> &localPeers) {
  constexpr const char *kWhat = "in prepare";
  std::vector<Hello> all(channel_.rank() == 0 ? channel_.size() : 1);
  std::memcpy(all[0].digest, digest.data(), kDigest);
  all[0].address = mine;
  Verdict verdict{1, 0, 0, 0, {}};
  std::vector<LocalPeer> list;
  if (channel_.rank() == 0) {
    for (uint32_t rank = 1; rank < channel_.size(); ++rank)
      if (std::string error = receive(rank, 0, &all[rank], sizeof(Hello), kWhat, deadline, timedOut); !error.empty())
        return error;
    for (uint32_t rank = 0; rank < channel_.size() && verdict.same; ++rank)
      if (std::memcmp(all[rank].digest, all[0].digest, kDigest) != 0) {
        verdict.same = 0;
        verdict.rank = rank;
        std::memcpy(verdict.digest, all[rank].digest, kDigest);
      }
    std::map<uint64_t, std::vector<LocalPeer>> hosts;
    for (uint32_t rank = 0; rank < channel_.size(); ++rank)
      hosts[all[rank].address.host].push_back({all[rank].address, rank});
    for (uint32_t rank = channel_.size(); rank-- > 0;) {
      list = hosts[all[rank].address.host];
      verdict.localCount = static_cast<uint32_t>(list.size());
      Verdict one = verdict;
      if (!verdict.same && std::memcmp(all[rank].digest, verdict.digest, kDigest) == 0) { // it differs from rank 0
        one.rank = 0;
        std::memcpy(one.digest, all[0].digest, kDigest);
      }
      if (rank == 0)
        break;
      for (const auto &[data, bytes] :
           {std::pair<const void *, size_t>{&one, sizeof one}, {list.data(), list.size() * sizeof(LocalPeer)}})
        if (std::string error = send(rank, 0, data, bytes, kWhat, deadline, timedOut); !error.empty())
          return error;
    }
  } else {
    if (std::string error = send(0, 0, all.data(), sizeof(Hello), kWhat, deadline, timedOut); !error.empty())
      return error;
    if (std::string error = receive(0, 0, &verdict, sizeof verdict, kWhat, deadline, timedOut); !error.empty())
      return error;
    list.resize(std::min(verdict.localCount, channel_.size()));
    if (std::string error = receive(0, 0, list.data(), list.size() * sizeof(LocalPeer), kWhat, deadline, timedOut);
        !error.empty())
      return error;
  }
  if (!verdict.same)
    return planMismatch(verdict.rank, std::string(verdict.digest, kDigest), channel_.rank(), digest);
  for (const LocalPeer &each : list)
    if (each.rank != channel_.rank())
      localPeers.emplace(static_cast<uint32_t>(each.rank), each.address);
  return {};
}

std::string Bootstrap::allReduceMin(int64_t value, int64_t &result, const Transport::Deadline &deadline,
                                    bool &timedOut) {
  constexpr const char *kWhat = "in an all-reduce (of open, prepare, or the end of a run)";
  const uint32_t rank = channel_.rank(), size = channel_.size();
  out_ = value;
  for (uint32_t step = 0, distance = 1; distance < size; ++step, distance *= 2) {
    const uint32_t before = (rank + size - distance) % size;
    if (std::string error =
            channel_.receive(request_ + 1, before, 1 + step, reinterpret_cast<std::byte *>(&in_), sizeof in_);
        !error.empty())
      return error;
    if (std::string error = send((rank + distance) % size, 1 + step, &out_, sizeof out_, kWhat, deadline, timedOut);
        !error.empty())
      return error;
    if (std::string error = wait(request_ + 1, before, kWhat, deadline, timedOut); !error.empty())
      return error;
    out_ = std::min(out_, in_);
  }
  result = out_;
  return {};
}

} // namespace reshard
