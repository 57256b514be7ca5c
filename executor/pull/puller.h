// SPDX-License-Identifier: Apache-2.0
// Pulls versions into the memory of a target rank, on the caller's thread. Asks the coordinator for an assignment,
// fetches ranges of all messages, has their servers confirm them, compares digests if the caller wants it, and
// completes the assignment together with the other ranks of the replica.
#pragma once

#include "base/backoff.h"
#include "executor/pull/server.h"

#include <set>

namespace reshard::pull {

/// The rank that pulls, and the objects that the puller uses, which outlive it.
struct PullerOptions {
  Fleet fleet;
  uint32_t worldRank = 0;
  Directory *directory = nullptr;
  MessageTable *table = nullptr;
  PullProgress *progress = nullptr;
  Server *server = nullptr;
  uint64_t rangeBytes = kRangeBytes; // smaller in tests
};

/// How a pull is checked.
struct PullCheck {
  std::vector<uint32_t> buckets; // the buckets that this rank holds
  std::vector<uint32_t> sources; // world ranks whose partial digests add up to the digests of the buckets
  /// Called with the digests of the buckets before a byte of the version is written. An error ends the pull.
  std::function<Status(const std::vector<CountedDigest> &)> checkDigests;
  /// Called with them when all bytes have arrived, after the leases have ended. Returns the names of the tensors that
  /// differ, for an error text; then the memory counts as empty. Calls `poll` several times in a second.
  std::function<Result<std::string>(const std::vector<CountedDigest> &, const std::function<void()> &poll)> compare;
};

struct PullRequest {
  uint64_t minVersion = 0;
  Deadline deadline;
  std::function<Status()> beforeWriting; // called before the first byte of a version is written
  std::function<Status()> afterWriting;  // called when all bytes of a version have arrived, until it succeeds
  const PullCheck *check = nullptr;      // null: the pull is not checked
};

class Puller {
public:
  Puller(std::unique_ptr<Messenger> messenger, PullerOptions options);
  ~Puller();

  /// On a target rank: returns the version.
  Result<uint64_t> pull(const PullRequest &request);
  /// The replicas, as the coordinator knows them.
  Result<std::vector<ReplicaInfo>> replicas(const Deadline &deadline);
  /// Keeps connections alive between calls; by any thread.
  void idle();

private:
  using Clock = std::chrono::steady_clock;
  /// A range that is being fetched.
  struct Slot {
    enum State { free, asked, receiving, arrived } state = free;
    size_t message = 0;
    uint64_t begin = 0, end = 0;
    std::unique_ptr<std::byte[]> memory;
    bool direct = false; // received into the target's memory
  };
  /// Bytes of a message that were read, but not confirmed yet.
  struct Read {
    size_t message;
    uint64_t end;
  };
  struct Connection {
    uint32_t worldRank = 0;
    std::optional<uint32_t> peer;
    bool ready = false; // the server has welcomed this process
    Clock::time_point retryAt{}, lastSeen{}, pinged{};
    // The process of the last attempt to connect; the next attempt follows after `pause`.
    uint64_t token = 0;
    std::string address;
    Clock::time_point attempted{};
    std::chrono::milliseconds pause{};
    uint32_t fetches = 0; // how many are in flight
    std::array<Slot, kWindow> slots;
    std::deque<Read> unconfirmed;
    size_t confirming = 0; // how many of them, from the first, the server has been asked to confirm
    bool leased = false;   // a fetch was sent
    uint64_t lease = 0;    // its number, which the server has sent; 0: none yet
    std::string problem;   // why it is not ready
  };
  struct Message {
    uint64_t next = 0, landed = 0, confirmed = 0;
    Connection *server = nullptr; // serves the ranges in flight and the reads that are not confirmed
    std::deque<Slot *> inFlight;
    bool askSender = false;
  };
  /// The partial digests that a source rank has sent for the buckets of a check.
  struct SourceDigests {
    bool asked = false; // this rank waits for the answer about the buckets from digests.size() on
    std::vector<CountedDigest> digests;
  };
  /// The state of an assignment.
  struct Assignment {
    uint64_t number = 0;
    Version version;
    uint32_t parent = kSources;
  };
  enum class Outcome { done, again, failed };

  // Connections.
  Connection &connectionTo(uint32_t worldRank);
  /// Connects if need be. Returns whether the connection is ready. `lookup`: the longest
  /// lookup in the store.
  bool ready(Connection &connection, std::chrono::milliseconds lookup);
  /// Whether it is time for an attempt to connect. Ends the last attempt if the process has not answered it.
  bool isDue(Connection &connection);
  /// Begins to connect, unless the last attempt to connect to the same process was just now.
  void connect(Connection &connection, const ServerAddress &process);
  void disconnect(Connection &connection);
  /// Drops the fetches in flight. Bytes that the server has not confirmed are fetched again.
  void discard(Connection &connection);
  bool handleEvents();
  void handle(Connection &connection, const MessengerEvent &event);
  void handleFrame(Connection &connection, const MessengerEvent &event);
  void handleAnswer(const MessengerEvent &event);
  void arrived(Connection &connection, const MessengerEvent &event);
  void confirmed(Connection &connection, bool valid);
  void send(Connection &connection, const Frame &frame, std::string_view text = {});
  void ping(Connection &connection);
  void wait(bool any);
  void release(Slot &slot);
  Slot *find(Connection &connection, const Frame &frame);
  void endTransfers();
  void refused(Connection &connection);

  // The phases of a pull.
  Result<uint64_t> attempts();
  void endCall();
  Status begin(uint64_t failed);
  Status startVersion(const Version &version);
  Outcome transfer();
  Outcome complete();
  void leaveServers();

  // The check.
  Outcome collectDigests();
  Outcome compare();
  void askDigests(Connection &source, SourceDigests &collected);
  void addDigests(Connection &source, const MessengerEvent &event);

  // The transfer.
  uint32_t serverOf(size_t message) const;
  void fetchMore();
  bool fetchOne(size_t message);
  bool unpack();
  /// Calls the hook before the first byte is written. Returns false, and sets error_, if it fails.
  bool mayWrite();
  bool runLocalSteps();
  void confirmReads();
  std::string problemOf(const Connection &connection) const;
  bool isParent(const Connection &connection) const;
  void checkParent();
  void leaveParent();
  bool finished() const;
  std::string waitsFor() const;

  std::unique_ptr<Messenger> messenger_;
  const PullerOptions options_;
  std::mutex mutex_; // idle() and the other functions
  std::map<uint32_t, Connection> connections_;
  std::map<uint32_t, Connection *> byPeer_;
  Backoff sleep_;
  std::vector<Message> messages_;
  size_t first_ = 0; // messages before it are fetched
  size_t inFlight_ = 0;
  size_t copies_ = 0; // local copies that have run
  Assignment assignment_;
  Version version_;      // the version that the memory holds, or receives
  bool written_ = false; // a byte of it was written
  bool whole_ = false;   // all of them were, and afterWriting has succeeded
  bool failed_ = false;  // the assignment cannot be completed
  Status error_;         // why the call fails
  const PullRequest *request_ = nullptr;
  std::map<uint32_t, SourceDigests> sourceDigests_; // by world rank, while collectDigests() runs
  std::optional<std::vector<CountedDigest>> sums_;  // the source's digests of version_, once in a call
  bool compared_ = false;                           // the memory has the digests sums_
  size_t open_ = 0;                                 // messages that are not confirmed as a whole
  std::set<size_t> receiving_;                      // messages with ranges in flight
  Clock::time_point polled_{};
  Deadline deadline_; // when the call ends with an error
  uint64_t call_ = 0; // the number of the call; 0: no pull runs
  // The last assignment that was committed, and the token of its coordinator; 0 while a pull runs.
  uint64_t held_ = 0, heldBy_ = 0;
  // Answers of the coordinator.
  std::optional<Assignment> assigned_;
  std::optional<uint64_t> committed_, repeated_; // assignments
  bool replaced_ = false; // the coordinator serves another process of this rank, until this one asks again
  int replacements_ = 0;  // how often, in this call
  std::string reason_;    // why there is no assignment yet
  std::vector<ReplicaInfo> listed_;
  std::optional<size_t> listedCount_;
};

} // namespace reshard::pull
