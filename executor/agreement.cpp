#include "executor/agreement.h"

#include <algorithm>
#include <cstring>
#include <sched.h>

namespace reshard {

namespace {

constexpr size_t kDigest = 32;

struct Hello {
  char digest[kDigest];
  Invitation invitation;
};

/// Of rank 0: all have one digest, or `rank` has another; how many invitations follow.
struct Verdict {
  uint32_t same, rank, near, reserved;
  char digest[kDigest];
};

struct Neighbour {
  Invitation invitation;
  uint64_t rank;
};

} // namespace

std::string unlikePlans(uint32_t rank, const std::string &digest, uint32_t own, const std::string &ownDigest) {
  return "rank " + std::to_string(rank) + " runs plan " + digest + ", rank " + std::to_string(own) + " plan " +
         ownDigest + ", expected the same";
}

std::string Agreement::wait(size_t request, uint32_t peer, const char *what, const Transport::Deadline &deadline,
                            bool &timedOut) {
  for (uint64_t looks = 0;; ++looks) {
    bool done = false;
    if (std::string error = wire_.test(request, done); !error.empty() || done)
      return error.empty() ? error : error + ": " + what + " of rank " + std::to_string(peer);
    if (deadline && looks % 64 == 0 && std::chrono::steady_clock::now() >= *deadline) {
      timedOut = true;
      return "the deadline passed: rank " + std::to_string(peer) + " is waited for, " + what;
    }
    sched_yield(); // and no more: MPI hears of what it waits for only once in many looks
  }
}

std::string Agreement::send(uint32_t peer, uint32_t tag, const void *data, size_t bytes, const char *what,
                            const Transport::Deadline &deadline, bool &timedOut) {
  const std::string error = wire_.send(request_, peer, tag, static_cast<const std::byte *>(data), bytes);
  return error.empty() ? wait(request_, peer, what, deadline, timedOut) : error;
}

std::string Agreement::receive(uint32_t peer, uint32_t tag, void *data, size_t bytes, const char *what,
                               const Transport::Deadline &deadline, bool &timedOut) {
  const std::string error = wire_.receive(request_ + 1, peer, tag, static_cast<std::byte *>(data), bytes);
  return error.empty() ? wait(request_ + 1, peer, what, deadline, timedOut) : error;
}

std::string Agreement::meet(const std::string &digest, const Invitation &mine, const Transport::Deadline &deadline,
                            bool &timedOut, std::map<uint32_t, Invitation> &near) {
  constexpr const char *kWhat = "in prepare";
  std::vector<Hello> all(wire_.rank() == 0 ? wire_.size() : 1);
  std::memcpy(all[0].digest, digest.data(), kDigest);
  all[0].invitation = mine;
  Verdict verdict{1, 0, 0, 0, {}};
  std::vector<Neighbour> list;
  if (wire_.rank() == 0) {
    for (uint32_t rank = 1; rank < wire_.size(); ++rank)
      if (std::string error = receive(rank, 0, &all[rank], sizeof(Hello), kWhat, deadline, timedOut); !error.empty())
        return error;
    for (uint32_t rank = 0; rank < wire_.size() && verdict.same; ++rank)
      if (std::memcmp(all[rank].digest, all[0].digest, kDigest) != 0) {
        verdict.same = 0;
        verdict.rank = rank;
        std::memcpy(verdict.digest, all[rank].digest, kDigest);
      }
    std::map<uint64_t, std::vector<Neighbour>> hosts;
    for (uint32_t rank = 0; rank < wire_.size(); ++rank)
      hosts[all[rank].invitation.host].push_back({all[rank].invitation, rank});
    for (uint32_t rank = wire_.size(); rank-- > 0;) {
      list = hosts[all[rank].invitation.host];
      verdict.near = static_cast<uint32_t>(list.size());
      Verdict one = verdict;
      if (!verdict.same && std::memcmp(all[rank].digest, verdict.digest, kDigest) == 0) { // it hears of rank 0
        one.rank = 0;
        std::memcpy(one.digest, all[0].digest, kDigest);
      }
      if (rank == 0)
        break;
      for (const auto &[data, bytes] :
           {std::pair<const void *, size_t>{&one, sizeof one}, {list.data(), list.size() * sizeof(Neighbour)}})
        if (std::string error = send(rank, 0, data, bytes, kWhat, deadline, timedOut); !error.empty())
          return error;
    }
  } else {
    if (std::string error = send(0, 0, all.data(), sizeof(Hello), kWhat, deadline, timedOut); !error.empty())
      return error;
    if (std::string error = receive(0, 0, &verdict, sizeof verdict, kWhat, deadline, timedOut); !error.empty())
      return error;
    list.resize(std::min(verdict.near, wire_.size()));
    if (std::string error = receive(0, 0, list.data(), list.size() * sizeof(Neighbour), kWhat, deadline, timedOut);
        !error.empty())
      return error;
  }
  if (!verdict.same)
    return unlikePlans(verdict.rank, std::string(verdict.digest, kDigest), wire_.rank(), digest);
  for (const Neighbour &each : list)
    if (each.rank != wire_.rank())
      near.emplace(static_cast<uint32_t>(each.rank), each.invitation);
  return {};
}

std::string Agreement::least(int64_t mine, int64_t &least, const Transport::Deadline &deadline, bool &timedOut) {
  constexpr const char *kWhat = "at the end";
  const uint32_t rank = wire_.rank(), size = wire_.size();
  out_ = mine;
  for (uint32_t step = 0, far = 1; far < size; ++step, far *= 2) {
    const uint32_t before = (rank + size - far) % size;
    if (std::string error =
            wire_.receive(request_ + 1, before, 1 + step, reinterpret_cast<std::byte *>(&in_), sizeof in_);
        !error.empty())
      return error;
    if (std::string error = send((rank + far) % size, 1 + step, &out_, sizeof out_, kWhat, deadline, timedOut);
        !error.empty())
      return error;
    if (std::string error = wait(request_ + 1, before, kWhat, deadline, timedOut); !error.empty())
      return error;
    out_ = std::min(out_, in_);
  }
  least = out_;
  return {};
}

} // namespace reshard
