// SPDX-License-Identifier: Apache-2.0
// The server's side of one connection to a store, without its socket: bytes in, bytes out. What a client sends changes
// nothing until the client has proven its secret, and never more than the limits allow.
#pragma once

#include "executor/rendezvous/records.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace reshard::tcp {

inline constexpr std::string_view kMagic = "RESHARDS";
inline constexpr uint32_t kVersion = 1;
inline constexpr size_t kChallengeBytes = 32;
inline constexpr size_t kHandshakeBytes = kMagic.size() + 4 + 1 + kChallengeBytes; // the first message of each side

enum class Verdict : uint8_t {
  accepted,
  secretExpected, ///< the client has no secret, the server has
  secretRefused,  ///< the client has a secret, the server has none
  otherSecret,
  otherUser, ///< without a secret: the client is no process of the server's user on its machine
  full,      ///< too many clients
};

/// A request is its length (u32, without itself), its command, the key (a text), and the value. An answer is its
/// length, an Answer, and a value.
enum class StoreCommand : uint8_t { set = 1, find = 2 };
enum class Answer : uint8_t {
  done,
  notSet,
  full, ///< the store has no room for the value
  bad,  ///< not a request
};
inline constexpr size_t kMaxRequestBytes = 1 + 4 + (size_t{16} << 20) + 4096;

/// What a side proves its secret with.
inline std::string clientProof(std::string_view clientChallenge, std::string_view serverChallenge) {
  return "reshard store client" + std::string(clientChallenge) + std::string(serverChallenge);
}
inline std::string serverProof(std::string_view clientChallenge, std::string_view serverChallenge) {
  return "reshard store server" + std::string(clientChallenge) + std::string(serverChallenge);
}

} // namespace reshard::tcp

namespace reshard {

/// What a server keeps, with the bytes that its clients have sent in part.
class StoreContents {
public:
  explicit StoreContents(size_t maxBytes) : maxBytes_(maxBytes) {}

  /// Returns false if there is no room.
  bool set(const std::string &key, std::string_view value);
  const std::string *find(const std::string &key) const;
  /// Room for bytes that are kept elsewhere; false: there is none.
  bool reserve(size_t bytes);
  void release(size_t bytes) { bytes_ -= bytes; }
  /// Sets the key that tells all clients how many were refused because of their secret.
  void noteRefusal(const std::string &address);

private:
  std::map<std::string, std::string> values_;
  size_t bytes_ = 0, refusals_ = 0;
  const size_t maxBytes_;
};

/// The key of noteRefusal.
inline constexpr const char *kRefusalsKey = "reshard/refused";

class ServedClient {
public:
  /// What the server decides on a client whose handshake has arrived; no value: the client has gone, or nothing is
  /// known.
  using Decide = std::function<std::optional<tcp::Verdict>()>;

  /// `address`: the client's, for texts. `decide` is called once at most, so that a client that says nothing costs
  /// nothing.
  ServedClient(StoreContents &contents, const Authenticator &authenticator, std::string address, Decide decide);
  ~ServedClient() { contents_.release(input_.size()); }
  ServedClient(const ServedClient &) = delete;
  ServedClient &operator=(const ServedClient &) = delete;

  /// Takes bytes that the client sent.
  void receive(std::string_view bytes);
  /// Bytes to send to the client; the sender removes what it has sent, and then calls sent().
  std::string &output() { return output_; }
  void sent() { proceed(); }
  /// The connection is to be closed once the output is sent.
  bool closing() const { return state_ == State::closing; }
  bool handshakeReceived() const { return state_ != State::handshake; }
  /// Whether the handshake is complete.
  bool joined() const { return state_ == State::requests; }

private:
  enum class State { handshake, proof, requests, closing };

  void proceed();
  void handshake();
  void prove();
  void request(std::string_view body);
  void answer(tcp::Answer answer, std::string_view value = {});
  void consume(size_t bytes);

  StoreContents &contents_;
  const Authenticator &authenticator_;
  const std::string address_;
  const Decide decide_;
  State state_ = State::handshake;
  std::string input_, output_, clientChallenge_, serverChallenge_;
};

} // namespace reshard
