// SPDX-License-Identifier: Apache-2.0
// The messages between the server of a store and its clients.
//
// A client begins the handshake: magic, version, whether it has a secret, a random challenge. The server answers:
// magic, version, a verdict, its own challenge. With a secret, the client proves next that it has the secret, and then
// the server does: each sends the code of both challenges. The client proves first, so that a stranger obtains no code
// of a server, with which it could search for the secret at its leisure. Then the client sends requests, and the server
// answers each.
#pragma once

#include <cstddef>
#include <cstdint>
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
