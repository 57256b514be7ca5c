// SPDX-License-Identifier: Apache-2.0
// The bytes of a version on their way into the memory of a target rank: fetches ranges of all messages, unpacks them,
// has their servers confirm them, and runs the local steps in between.
#pragma once

#include "executor/pull/connections.h"

#include <set>

namespace reshard::pull {

struct PullCheck; // puller.h

struct PullRequest {
  uint64_t minVersion = 0;
  Deadline deadline;
  std::function<Status()> beforeWriting; // called before the first byte of a version is written
  std::function<Status()> afterWriting;  // called when all bytes of a version have arrived, until it succeeds
  const PullCheck *check = nullptr;      // null: the pull is not checked
};

/// The call that runs, and what the frames that arrive say about it.
struct PullCall {
  const PullRequest *request = nullptr; // null: none runs
  uint64_t number = 0;                  // the call's; 0: none runs
  bool again = false;                   // the assignment cannot be completed: another one is needed
  Status error;                         // why the call fails
};

/// A version to pull, and the replica to read it from.
struct Assignment {
  uint64_t number = 0;
  Version version;
  uint32_t parent = kSources;
};

/// How much of each message of a version is asked for, has arrived, and is confirmed.
class MessageReads {
public:
  explicit MessageReads(const PullerOptions &options) : options_(options) {}

  /// Nothing is read.
  void restart();
  /// Whether all messages are confirmed as a whole.
  bool complete() const { return open_ == 0; }
  /// The messages, [first, second), whose ranges are fetched next.
  std::pair<size_t, size_t> window();
  /// Whether its next range can be fetched: from this server.
  bool canFetch(size_t message) const;
  bool canFetch(size_t message, const ServerConnection &from) const {
    return !messages_[message].server || messages_[message].server == &from;
  }
  /// Sets a slot of the server to the next range.
  void fetch(size_t message, ServerConnection &server, FetchedRange &slot);
  /// Unpacks the ranges that have arrived, in the order of each message's bytes. Returns whether there were any.
  bool unpack();
  /// The server does not give the range of a slot, or any of its message: the message's sender does.
  void askSender(ServerConnection &server, FetchedRange &slot);
  bool asksSender(size_t message) const { return messages_[message].askSender; }
  /// The server has confirmed a read.
  void confirm(const ServerReads::Read &read);
  /// Drops the fetches in flight from a server, and what it has not confirmed.
  void discard(ServerConnection &server);
  /// The first message that is not complete, and the number of its bytes that are confirmed; no value: there is none.
  std::optional<ServerReads::Read> missing() const;

private:
  struct Message {
    uint64_t next = 0, landed = 0, confirmed = 0;
    ServerConnection *server = nullptr; // serves the ranges in flight and the reads that are not confirmed
    std::deque<FetchedRange *> inFlight;
    bool askSender = false;
  };
  const Packing &packing(size_t message) const { return options_.table->received()[message].packing; }

  const PullerOptions &options_;
  std::vector<Message> messages_;
  size_t first_ = 0;           // messages before it are fetched
  size_t open_ = 0;            // messages that are not confirmed as a whole
  std::set<size_t> receiving_; // messages with ranges in flight
};

class VersionTransfer {
public:
  VersionTransfer(const PullerOptions &options, ServerConnections &connections, PullCall &call)
      : options_(options), connections_(connections), call_(call), reads_(options) {}

  /// The version that the memory holds, or receives.
  const Version &version() const { return version_; }
  /// Begins with a version, of which the memory has nothing yet.
  Status start(const Version &version);
  /// Fetches what is missing of it. Returns false if another assignment is needed.
  Result<bool> run(const Assignment &assignment);
  /// Calls afterWriting, unless it has succeeded for this version.
  Status finish();
  /// The replica that the bytes were read from.
  uint32_t parent() const { return assignment_.parent; }
  /// Ends all transfers in flight: nothing writes the memory afterwards.
  void endFetches();
  /// Ends the leases.
  void leaveServers();

  void arrived(ServerConnection &server, const MessengerEvent &frame);
  void received(ServerConnection &server, const MessengerEvent &data);
  /// Drops the fetches in flight. Bytes that the server has not confirmed are fetched again.
  void discard(ServerConnection &server) { reads_.discard(server); }

private:
  bool finished() const;
  uint32_t serverOf(size_t message) const;
  void fetchMore();
  bool fetchOne(size_t message);
  /// Calls beforeWriting before the first byte is written. Returns false, and sets the call's error, if it fails.
  bool mayWrite();
  bool runLocalSteps();
  void confirmReads();

  FetchedRange *find(ServerConnection &server, const Frame &frame);
  void read(ServerConnection &server, FetchedRange &slot, const MessengerEvent &frame);
  void confirmed(ServerConnection &server, bool valid);
  void refused(ServerConnection &server);
  /// The world rank of the parent that this one reads from.
  uint32_t parentRank() const;
  void checkParent();
  void leaveParent();
  std::string waitsFor();

  const PullerOptions &options_;
  ServerConnections &connections_;
  PullCall &call_;
  Assignment assignment_;
  Version version_;
  bool written_ = false; // a byte of it was written
  bool whole_ = false;   // all of them were, and afterWriting has succeeded
  MessageReads reads_;
  size_t copies_ = 0; // local copies that have run
};

} // namespace reshard::pull
