// SPDX-License-Identifier: Apache-2.0
// The server's side of one connection to a store, without its socket: bytes in, bytes out. What a client sends changes
// nothing until the client has proven its secret, and never more than the limits allow.
#pragma once

#include "executor/rendezvous/hmac.h"
#include "executor/rendezvous/tcp_protocol.h"

#include <functional>
#include <map>
#include <optional>
#include <string>

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
