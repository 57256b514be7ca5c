// SPDX-License-Identifier: Apache-2.0
// Pulls versions into the memory of a target rank, on the caller's thread. Asks the coordinator for an assignment, for
// a checked pull collects the sources' digests, transfers the bytes, compares digests, and completes the assignment
// together with the other ranks of the replica.
#pragma once

#include "executor/pull/transfer.h"

namespace reshard::pull {

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

/// What this rank asks of the coordinator.
class CoordinatorClient {
public:
  CoordinatorClient(const PullerOptions &options, ServerConnections &connections, PullCall &call)
      : options_(options), connections_(connections), call_(call) {}

  /// A call begins: this rank holds no version until hold().
  void start();
  /// Waits for an assignment. `failed`: the one that this rank cannot complete; 0: none.
  Result<Assignment> begin(uint64_t failed);
  /// Waits until all ranks of the replica have completed the assignment. Returns false if begin() must be called again.
  Result<bool> complete(const Assignment &assignment);
  /// The rank holds the version of an assignment, and says so whenever it connects again.
  void hold(const Assignment &assignment);
  /// Asks for the replicas.
  Result<std::vector<ReplicaInfo>> list();

  void welcomed(ServerConnection &connection);
  void arrived(const MessengerEvent &frame);
  /// Between calls: connects again and tells the coordinator that this process runs.
  void idle();

private:
  struct List {
    std::vector<ReplicaInfo> replicas;
    std::optional<size_t> count; // how many there are
    bool complete() const { return count && replicas.size() >= *count; }
  };
  void addListed(const MessengerEvent &frame);

  const PullerOptions &options_;
  ServerConnections &connections_;
  PullCall &call_;
  uint64_t held_ = 0, heldBy_ = 0; // the assignment that hold() was called for, and the coordinator's token; 0: none
  // Answers.
  std::optional<Assignment> assigned_;
  std::optional<uint64_t> committed_, repeated_; // assignments
  bool replaced_ = false; // the coordinator serves another process of this rank, until this one asks again
  int replacements_ = 0;  // how often, in this call
  std::string reason_;    // why there is no assignment yet
  List listed_;
};

/// The digests of the sources, against which this rank's memory is compared.
class DigestCheck {
public:
  DigestCheck(const PullerOptions &options, ServerConnections &connections, PullCall &call, const Version &version)
      : options_(options), connections_(connections), call_(call), version_(version) {}

  /// Asks all source ranks for their partial digests of the version, once. Returns false if another assignment is
  /// needed.
  Result<bool> collect();
  /// Compares the memory with them, until it has them. The connections stay alive meanwhile. Returns the names of the
  /// tensors that differ.
  Result<std::string> compare();
  void arrived(ServerConnection &source, const MessengerEvent &frame);

private:
  /// The partial digests that a source rank has sent for the buckets of the check.
  struct Partials {
    bool asked = false; // this rank waits for the answer about the buckets from digests.size() on
    std::vector<CountedDigest> digests;
  };
  void ask(ServerConnection &source, Partials &collected);
  /// Asks those that can be asked. Returns the first one that has not answered; null if there is none.
  const ServerConnection *askMissing();

  const PullerOptions &options_;
  ServerConnections &connections_;
  PullCall &call_;
  const Version version_;
  std::map<uint32_t, Partials> partials_;          // by world rank of the source, while collect() runs
  std::optional<std::vector<CountedDigest>> sums_; // the source's digests
  bool equal_ = false;                             // the memory has them
};

class Puller : ServerConnections::Listener {
public:
  Puller(std::unique_ptr<Messenger> messenger, PullerOptions options);

  /// On a target rank: returns the version.
  Result<uint64_t> pull(const PullRequest &request);
  /// The replicas, as the coordinator knows them.
  Result<std::vector<ReplicaInfo>> replicas(const Deadline &deadline);
  /// Keeps connections alive between calls; by any thread.
  void idle();

private:
  void welcomed(ServerConnection &connection) override { coordinator_.welcomed(connection); }
  void arrived(ServerConnection &connection, const MessengerEvent &frame) override;
  void received(ServerConnection &connection, const MessengerEvent &data) override {
    transfer_.received(connection, data);
  }
  void ended(ServerConnection &connection) override { transfer_.discard(connection); }

  void endCall();
  Result<uint64_t> attempts();
  /// Fetches and checks the version of an assignment. Returns false if another one is needed.
  Result<bool> fetch(const Assignment &assignment);
  Status compare();

  const PullerOptions options_;
  std::mutex mutex_; // idle() and the other functions
  PullCall call_;
  ServerConnections connections_;
  CoordinatorClient coordinator_;
  VersionTransfer transfer_;
  std::optional<DigestCheck> check_; // checks the version of the transfer
};

} // namespace reshard::pull
