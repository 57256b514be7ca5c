// SPDX-License-Identifier: Apache-2.0
// Decides, in pull mode, which replica pulls which version from whom. No I/O: the server of the source's mesh rank 0
// passes requests in and sends the answers.
//
// All ranks of a replica pull by one assignment: a version and a parent. The first rank that begins fixes it. It ends
// when all ranks have completed it, or when a rank fails it; the rank that begins next fixes another one.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

namespace reshard::pull {

/// The fleet, as the plan has it.
struct FleetShape {
  uint32_t sources = 1;      // ranks of the source
  uint32_t replicaRanks = 1; // ranks of one replica
};

/// A version that the sources have published. A trainer that starts again may publish a number again with other bytes,
/// so a version also has the incarnation of its youngest source process: the time at which that process began to serve,
/// in nanoseconds since the epoch. Later versions are greater.
struct Version {
  uint64_t incarnation = 0;
  uint64_t number = 0; // 0: none
  auto operator<=>(const Version &) const = default;
};

/// The parent of a replica that reads from the sources.
constexpr uint32_t kSources = UINT32_MAX;

/// A rank of a replica asks for an assignment.
struct BeginRequest {
  uint32_t replica = 0, meshRank = 0;
  uint64_t minVersion = 0;
  uint64_t call = 0;   // the number of the call of reshard_pull, not 0: a repeated request has the same one
  uint64_t failed = 0; // the assignment that this rank has failed; 0: none
};

/// An answer for a client.
struct CoordinatorAnswer {
  enum Kind {
    kAssign,    // pull `version` from `parent`
    kWaiting,   // no version serves the request yet: `version` is the newest published one (0: none), and `rank` the
                // first source rank that has published nothing, or kSources
    kCommitted, // all ranks of the replica have completed the assignment
    kRepeat,    // another rank has failed the assignment: begin again
    kReplaced,  // another client has begun as this rank
  };
  uint64_t client = 0;
  Kind kind = kAssign;
  uint64_t assignment = 0; // not for kWaiting and kReplaced
  Version version;
  uint32_t parent = kSources; // for kAssign
  uint32_t rank = kSources;   // for kWaiting
  uint64_t call = 0;          // for kAssign: the call that has asked
};

/// What the coordinator knows about a replica.
struct ReplicaInfo {
  enum State : uint8_t { kPulling, kComplete, kLost };
  uint32_t replica = 0;
  uint32_t ranks = 0; // how many are connected
  uint64_t version = 0;
  State state = kPulling;
};

class Coordinator {
public:
  using Clock = std::chrono::steady_clock;

  explicit Coordinator(const FleetShape &shape) : shape_(shape), published_(shape.sources) {}

  /// A source rank has published a version, or none: 0. Requests of mesh ranks that do not exist are ignored.
  void published(uint32_t meshRank, Version version);
  /// Answered by kAssign, at once or when there is a version; until then by kWaiting whenever the reason changes.
  void begin(uint64_t client, const BeginRequest &request, Clock::time_point until);
  /// Answered by kCommitted or kRepeat; by kRepeat, too, if the client has not begun: it has connected again meanwhile.
  /// The rank holds the version from then on.
  void complete(uint64_t client, uint64_t assignment);
  /// A rank that has completed an assignment, and has not begun again, has connected again. No effect unless this
  /// assignment is the replica's last one.
  void resume(uint64_t client, uint32_t replica, uint32_t meshRank, uint64_t assignment);
  /// A rank of a replica cannot read from its parent. The parent is assigned no child until seen() is called for one
  /// of its ranks.
  void parentFailed(uint64_t client, uint32_t parent);
  /// A frame of the client has arrived. A client that runs sends one at least every second.
  void seen(uint64_t client, Clock::time_point now);
  /// The client has ended.
  void lost(uint64_t client);
  /// Forgets requests whose clients do not wait any more.
  void expire(Clock::time_point now);

  /// The next answer to send.
  std::optional<CoordinatorAnswer> next();
  std::vector<ReplicaInfo> replicas(Clock::time_point now) const;

private:
  /// A rank of a replica.
  struct Rank {
    uint64_t client = 0; // 0: not connected
    bool ended = false;  // its last client has ended
    Clock::time_point lastSeen{};
    uint64_t call = 0;     // the call that has joined the assignment; 0: none
    bool complete = false; // it has completed the assignment
    bool asked = false;    // it has asked, and waits for the answer
  };
  struct Replica {
    std::vector<Rank> ranks;
    uint64_t assignment = 0; // 0: none yet
    Version version;
    uint32_t parent = kSources;
    bool open = false;         // not all ranks have completed the assignment
    bool committed = false;    // all had
    bool unresponsive = false; // a child could not read from it
  };
  struct Parked {
    BeginRequest request;
    Clock::time_point until;
    uint64_t sentVersion = UINT64_MAX; // the last kWaiting, which is not sent again
    uint32_t sentRank = 0;
  };

  bool assign(uint64_t client, const BeginRequest &request);
  bool joins(const Replica &replica, const BeginRequest &request) const;
  void open(uint32_t number, Replica &replica);
  void wait(uint64_t client, Parked &parked);
  void serveParked();
  uint32_t chooseParent(uint32_t child, const Version &version) const;
  /// The number of replicas between a replica and the one that holds its version; no value if `child` is one of them.
  std::optional<uint32_t> depth(uint32_t number, uint32_t child) const;
  static bool alive(const Replica &replica);
  Rank *rankOf(uint64_t client, Replica *&replica);

  const FleetShape shape_;
  std::vector<Version> published_; // by mesh rank of the source
  Version newest_;                 // the newest that all source ranks have published
  uint64_t assignments_ = 0;
  std::map<uint32_t, Replica> replicas_;
  std::map<uint64_t, std::pair<uint32_t, uint32_t>> clients_; // replica and mesh rank
  std::map<uint64_t, Parked> parked_;                         // by client
  std::deque<CoordinatorAnswer> answers_;
};

} // namespace reshard::pull
