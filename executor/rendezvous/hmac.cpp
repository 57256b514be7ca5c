// SPDX-License-Identifier: Apache-2.0
#include "executor/rendezvous/hmac.h"

#include "base/libraries.h"

namespace reshard {

Result<Authenticator> Authenticator::create(const std::string &secret) {
  constexpr size_t kMaxSecret = 4096;
  if (secret.size() > kMaxSecret)
    return invalid("the secret has " + std::to_string(secret.size()) + " bytes, expected at most " +
                   std::to_string(kMaxSecret));
  Authenticator result;
  result.secret_ = secret;
  if (result.hasSecret())
    if (Status status = needLibcrypto("a secret"); !status.ok())
      return failed(status.message() + ", or give no secret");
  return result;
}

std::string Authenticator::mac(std::string_view message) const {
  return hasSecret() ? hmacSha256(secret_, message) : std::string();
}

bool Authenticator::verify(std::string_view message, std::string_view given) const {
  const std::string expected = mac(message);
  if (expected.size() != kMacBytes || given.size() != kMacBytes)
    return false;
  unsigned difference = 0;
  for (size_t i = 0; i < kMacBytes; ++i)
    difference |= static_cast<unsigned>(static_cast<unsigned char>(expected[i] ^ given[i]));
  return difference == 0;
}

} // namespace reshard
