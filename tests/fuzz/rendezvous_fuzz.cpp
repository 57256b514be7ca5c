// SPDX-License-Identifier: Apache-2.0
// libFuzzer: what a client of a store sends, in any pieces, and what a store returns to a process. Any bytes are
// messages or are refused; a client that has not proven the secret changes nothing.

#include "executor/rendezvous/bytes.h"
#include "executor/rendezvous/records.h"
#include "executor/rendezvous/served_client.h"

#include <cstdlib>

using namespace reshard;

namespace {

void require(bool condition) {
  if (!condition)
    std::abort();
}

const Authenticator &secret() {
  static const Authenticator authenticator = *Authenticator::create("secret");
  return authenticator;
}

/// Feeds a client's bytes to a server in pieces, whose lengths are the first bytes. `handshaken`: its handshake is
/// complete.
void serve(std::string_view input, const Authenticator &authenticator, bool handshaken) {
  constexpr size_t kMaxBytes = 1 << 16;
  StoreContents contents(kMaxBytes);
  contents.set("known", "value");
  {
    ServedClient client(contents, authenticator, "fuzz", [] { return tcp::Verdict::accepted; });
    if (handshaken)
      client.receive(ByteWriter()
                         .raw(tcp::kMagic)
                         .number(tcp::kVersion)
                         .number(static_cast<uint8_t>(authenticator.hasSecret()))
                         .raw(std::string(tcp::kChallengeBytes, 'c'))
                         .take());
    while (!input.empty() && !client.closing()) {
      const size_t piece = 1 + static_cast<uint8_t>(input.front()) % 64;
      client.receive(input.substr(1, piece));
      input.remove_prefix(std::min(input.size(), 1 + piece));
      if (piece % 2) { // the client reads what it was sent
        client.output().clear();
        client.sent();
      }
      require(client.output().size() <= 2 * kMaxBytes);
    }
    require(!authenticator.hasSecret() || !client.joined());
  }
  const std::string *known = contents.find("known");
  require(known && (!authenticator.hasSecret() || *known == "value"));
  require(contents.reserve(kMaxBytes / 4) || !authenticator.hasSecret()); // all that the client sent is released
}

void decode(std::string_view input) {
  if (const auto unsealed = unseal(secret(), "key", input))
    require(!unsealed->problem.empty());
  const auto unsealed = unseal({}, "key", input);
  const std::string_view record = unsealed ? unsealed->record : input;
  if (const auto hello = Hello::decode(record); hello && hello->version == kRecordVersion)
    require(hello->encode() == record);
  if (const auto roster = Roster::decode(record))
    require(roster->encode() == record);
  if (const auto welcome = Welcome::decode(record))
    require(welcome->encode() == record);
  if (const auto conflict = Conflict::decode(record))
    require(conflict->encode() == record);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const std::string_view input(reinterpret_cast<const char *>(data), size);
  for (const bool handshaken : {false, true}) {
    serve(input, {}, handshaken);
    serve(input, secret(), handshaken);
  }
  decode(input);
  return 0;
}
