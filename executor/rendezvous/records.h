// SPDX-License-Identifier: Apache-2.0
// What the processes of a job write into a store, as bytes. Values come from strangers as long as their seal has not
// been checked: every decoder accepts any bytes and fails on what it does not understand.
#pragma once

#include "base/libraries.h"
#include "base/status.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

constexpr size_t kMacBytes = kSha256Bytes;

/// Message authentication codes with the secret of a job: HMAC-SHA256.
class Authenticator {
public:
  /// Without a secret.
  Authenticator() = default;
  /// An empty text: without a secret. Fails if libcrypto cannot be loaded.
  static Result<Authenticator> create(const std::string &secret);

  bool hasSecret() const { return !secret_.empty(); }
  bool sameSecret(const Authenticator &other) const { return secret_ == other.secret_; }
  /// The code of a message, kMacBytes long; empty without a secret.
  std::string mac(std::string_view message) const;
  /// Whether `mac` is the code of `message`. Takes the same time wherever they differ. False without a secret.
  bool verify(std::string_view message, std::string_view mac) const;

private:
  std::string secret_;
};

/// A record with the code of its key and itself. Without a secret the code is empty.
std::string seal(const Authenticator &authenticator, const std::string &key, const std::string &record);

struct Unsealed {
  std::string record;
  std::string problem; // why the seal is not this process's: "was made with another secret"; empty if it is
};
/// No value: the bytes are no sealed record.
std::optional<Unsealed> unseal(const Authenticator &authenticator, const std::string &key, std::string_view value);

/// The version of all records here and of their meaning.
inline constexpr uint32_t kRecordVersion = 1;

/// What a process says about itself. Decodes the records of other versions up to `process`.
struct Hello {
  uint32_t version = kRecordVersion;
  std::string library; // its version
  uint64_t token = 0;  // a random number of this process, for this job
  std::string host;
  uint64_t process = 0;
  uint64_t previous = 0; // the token of the hello that this one replaced; 0: it replaced none
  std::string content;   // the transport's

  std::string encode() const;
  static std::optional<Hello> decode(std::string_view record);
  /// "process 12 on host a".
  std::string who() const;
};

/// The plan that a process has opened, and the number of its ranks: for processes that have opened another one.
struct Opened {
  std::string plan; // its digest
  uint64_t token = 0;
  uint32_t size = 1;

  std::string encode() const;
  static std::optional<Opened> decode(std::string_view record);
};

/// Rank 0 to a rank whose hello it has read, and the answer. Only a running process answers: a hello may be the rest of
/// an earlier attempt. An answer with session 0: the process has read the refusal.
struct Welcome {
  uint64_t session = 0, token = 0;

  std::string encode() const;
  static std::optional<Welcome> decode(std::string_view record);
  bool operator==(const Welcome &) const = default;
};

/// A process found that another one has taken its rank.
struct Conflict {
  uint64_t first = 0, second = 0; // their tokens
  std::string text;

  std::string encode() const;
  static std::optional<Conflict> decode(std::string_view record);
};

/// The end of a rendezvous, by rank 0. It concerns the processes whose tokens it has.
struct Roster {
  uint64_t session = 0;
  std::vector<uint64_t> tokens;  // by rank; 0: unknown
  std::optional<Status> refusal; // no value: the job is complete

  std::string encode() const;
  static std::optional<Roster> decode(std::string_view record);
};

} // namespace reshard
