// SPDX-License-Identifier: Apache-2.0
// A state machine: the handshake, the proof of the secret, then requests. It consumes whole messages from the bytes
// that have arrived.
#include "executor/rendezvous/served_client.h"

#include "base/random.h"
#include "executor/rendezvous/bytes.h"
#include "executor/rendezvous/store.h"

namespace reshard {

using tcp::Verdict;

bool StoreContents::reserve(size_t bytes) {
  if (bytes > maxBytes_ - bytes_)
    return false;
  bytes_ += bytes;
  return true;
}

bool StoreContents::set(const std::string &key, std::string_view value) {
  constexpr size_t kPerKey = 128; // what the map needs for an empty value
  const auto at = values_.find(key);
  if (at != values_.end()) {
    release(at->second.size());
    const bool fits = reserve(value.size());
    if (fits)
      at->second = value;
    else
      reserve(at->second.size());
    return fits;
  }
  if (!reserve(kPerKey + key.size() + value.size()))
    return false;
  values_.emplace(key, value);
  return true;
}

const std::string *StoreContents::find(const std::string &key) const {
  const auto at = values_.find(key);
  return at == values_.end() ? nullptr : &at->second;
}

void StoreContents::noteRefusal(const std::string &address) {
  ++refusals_;
  set(kRefusalsKey, "rank 0's store refused " + std::to_string(refusals_) + (refusals_ == 1 ? " client" : " clients") +
                        " that did not have its secret, the last from " + address);
}

ServedClient::ServedClient(StoreContents &contents, const Authenticator &authenticator, std::string address,
                           Decide decide)
    : contents_(contents), authenticator_(authenticator), address_(std::move(address)), decide_(std::move(decide)) {}

void ServedClient::receive(std::string_view bytes) {
  if (closing())
    return;
  if (!contents_.reserve(bytes.size())) {
    answer(tcp::Answer::full);
    state_ = State::closing;
    return;
  }
  input_ += bytes;
  proceed();
}

void ServedClient::consume(size_t bytes) {
  input_.erase(0, bytes);
  contents_.release(bytes);
}

/// Handles complete messages. A request waits until the client has read the answer to the last one, so that a client
/// that reads nothing occupies no more than one answer.
void ServedClient::proceed() {
  while (!closing()) {
    if (state_ == State::handshake) {
      // The first wrong byte is enough: a stranger is not waited for.
      if (std::string_view(input_).substr(0, tcp::kMagic.size()) != tcp::kMagic.substr(0, input_.size())) {
        state_ = State::closing;
        return;
      }
      if (input_.size() < tcp::kHandshakeBytes)
        return;
      handshake();
    } else if (state_ == State::proof) {
      if (input_.size() < kMacBytes)
        return;
      prove();
    } else {
      const uint32_t length = ByteReader(input_).number<uint32_t>();
      if (!output_.empty() || input_.size() < sizeof length)
        return;
      if (length > tcp::kMaxRequestBytes) {
        answer(tcp::Answer::bad);
        state_ = State::closing;
        return;
      }
      if (input_.size() - sizeof length < length)
        return;
      request(std::string_view(input_).substr(sizeof length, length));
      consume(sizeof length + length);
    }
  }
}

void ServedClient::handshake() {
  ByteReader reader(input_);
  reader.raw(tcp::kMagic.size());
  const bool sameVersion = reader.number<uint32_t>() == tcp::kVersion;
  const bool hasSecret = reader.number<uint8_t>() != 0;
  clientChallenge_ = reader.raw(tcp::kChallengeBytes);
  consume(tcp::kHandshakeBytes);
  serverChallenge_ = randomBytes(tcp::kChallengeBytes);
  std::optional<Verdict> decided = Verdict::accepted;
  if (hasSecret != authenticator_.hasSecret())
    decided = hasSecret ? Verdict::secretRefused : Verdict::secretExpected;
  else if (sameVersion)
    decided = decide_();
  if (!decided) { // it may try again
    state_ = State::closing;
    return;
  }
  const Verdict verdict = *decided;
  output_ += ByteWriter()
                 .raw(tcp::kMagic)
                 .number(tcp::kVersion)
                 .number(static_cast<uint8_t>(verdict))
                 .raw(serverChallenge_)
                 .take();
  if (verdict == Verdict::secretExpected && sameVersion)
    contents_.noteRefusal(address_);
  if (verdict != Verdict::accepted || !sameVersion)
    state_ = State::closing;
  else
    state_ = authenticator_.hasSecret() ? State::proof : State::requests;
}

void ServedClient::prove() {
  const bool proven = authenticator_.verify(tcp::clientProof(clientChallenge_, serverChallenge_),
                                            std::string_view(input_).substr(0, kMacBytes));
  consume(kMacBytes);
  const Verdict verdict = proven ? Verdict::accepted : Verdict::otherSecret;
  output_ += ByteWriter()
                 .number(static_cast<uint8_t>(verdict))
                 .raw(proven ? authenticator_.mac(tcp::serverProof(clientChallenge_, serverChallenge_))
                             : std::string(kMacBytes, '\0'))
                 .take();
  if (!proven)
    contents_.noteRefusal(address_);
  state_ = proven ? State::requests : State::closing;
}

void ServedClient::request(std::string_view body) {
  ByteReader reader(body);
  // NOLINTNEXTLINE(clang-analyzer-optin.core.EnumCastOutOfRange): `known` is false for other values
  const auto command = static_cast<tcp::StoreCommand>(reader.number<uint8_t>());
  const std::string key(reader.text());
  const std::string_view value = reader.rest();
  const bool known = command == tcp::StoreCommand::set || (command == tcp::StoreCommand::find && value.empty());
  if (!reader.ok() || !known || key.empty() || key.size() > kMaxKeyBytes || value.size() > kMaxValueBytes) {
    answer(tcp::Answer::bad);
    state_ = State::closing;
  } else if (command == tcp::StoreCommand::set) {
    answer(contents_.set(key, value) ? tcp::Answer::done : tcp::Answer::full);
  } else if (const std::string *found = contents_.find(key)) {
    answer(tcp::Answer::done, *found);
  } else {
    answer(tcp::Answer::notSet);
  }
}

void ServedClient::answer(tcp::Answer answer, std::string_view value) {
  output_ += ByteWriter()
                 .number(static_cast<uint32_t>(1 + value.size()))
                 .number(static_cast<uint8_t>(answer))
                 .raw(value)
                 .take();
}

} // namespace reshard
