// SPDX-License-Identifier: Apache-2.0
// Sealed bytes begin with a number of their own, by which other bytes are refused. libcrypto computes the codes.
#include "executor/rendezvous/records.h"

#include "base/libraries.h"
#include "executor/rendezvous/bytes.h"

#include <algorithm>

namespace reshard {

namespace {

constexpr uint32_t kSealed = 0x64687372; // "rshd"
constexpr uint32_t kHello = 0x6f6c6568;  // "helo"

std::string signedText(const std::string &key, std::string_view record) {
  return ByteWriter().text("reshard record").text(key).text(record).take();
}

} // namespace

std::string seal(const Authenticator &authenticator, const std::string &key, const std::string &record) {
  return ByteWriter().number(kSealed).text(authenticator.mac(signedText(key, record))).raw(record).take();
}

std::optional<Unsealed> unseal(const Authenticator &authenticator, const std::string &key, std::string_view value) {
  ByteReader reader(value);
  const bool sealed = reader.number<uint32_t>() == kSealed;
  const std::string_view mac = reader.text();
  if (!reader.ok() || !sealed)
    return {};
  Unsealed result{std::string(reader.rest()), {}};
  if (mac.empty() && authenticator.hasSecret())
    result.problem = "was made without a secret";
  else if (!mac.empty() && !authenticator.hasSecret())
    result.problem = "was made with a secret";
  else if (authenticator.hasSecret() && !authenticator.verify(signedText(key, result.record), mac))
    result.problem = "was made with another secret";
  return result;
}

std::string Hello::encode() const {
  return ByteWriter()
      .number(kHello)
      .number(version)
      .text(library)
      .number(token)
      .text(host)
      .number(process)
      .number(previous)
      .raw(content)
      .take();
}

std::optional<Hello> Hello::decode(std::string_view record) {
  ByteReader reader(record);
  const uint32_t magic = reader.number<uint32_t>();
  Hello hello;
  hello.version = reader.number<uint32_t>();
  hello.library = reader.text();
  hello.token = reader.number<uint64_t>();
  hello.host = reader.text();
  hello.process = reader.number<uint64_t>();
  constexpr size_t kMaxText = 256; // they appear in error texts
  if (!reader.ok() || magic != kHello || hello.token == 0 || hello.library.size() > kMaxText ||
      hello.host.size() > kMaxText)
    return {};
  if (hello.version != kRecordVersion)
    return hello;
  hello.previous = reader.number<uint64_t>();
  hello.content = reader.rest();
  return reader.ok() ? std::optional(hello) : std::nullopt;
}

std::string Hello::who() const {
  std::string name = host;
  std::replace_if(name.begin(), name.end(), [](char each) { return each < ' ' || each > '~'; }, '?');
  return "process " + std::to_string(process) + " on host " + name;
}

std::string Opened::encode() const { return ByteWriter().number(token).number(size).raw(plan).take(); }

std::optional<Opened> Opened::decode(std::string_view record) {
  constexpr size_t kMaxDigest = 64;
  ByteReader reader(record);
  Opened opened;
  opened.token = reader.number<uint64_t>();
  opened.size = reader.number<uint32_t>();
  opened.plan = reader.rest();
  const bool digest = std::all_of(opened.plan.begin(), opened.plan.end(), [](char each) {
    return (each >= '0' && each <= '9') || (each >= 'a' && each <= 'z');
  });
  if (!reader.ok() || opened.plan.empty() || opened.plan.size() > kMaxDigest || !digest)
    return {};
  return opened;
}

std::string Welcome::encode() const { return ByteWriter().number(session).number(token).take(); }

std::optional<Welcome> Welcome::decode(std::string_view record) {
  ByteReader reader(record);
  Welcome welcome;
  welcome.session = reader.number<uint64_t>();
  welcome.token = reader.number<uint64_t>();
  return reader.done() ? std::optional(welcome) : std::nullopt;
}

std::string Conflict::encode() const { return ByteWriter().number(first).number(second).raw(text).take(); }

std::optional<Conflict> Conflict::decode(std::string_view record) {
  ByteReader reader(record);
  Conflict conflict;
  conflict.first = reader.number<uint64_t>();
  conflict.second = reader.number<uint64_t>();
  conflict.text = reader.rest();
  return reader.ok() && !conflict.text.empty() ? std::optional(conflict) : std::nullopt;
}

std::string Roster::encode() const {
  ByteWriter writer;
  writer.number(session).number(static_cast<uint8_t>(refusal ? 1 + static_cast<uint8_t>(refusal->kind()) : 0));
  writer.text(refusal ? refusal->message() : std::string()).number(static_cast<uint32_t>(tokens.size()));
  for (const uint64_t token : tokens)
    writer.number(token);
  return writer.take();
}

std::optional<Roster> Roster::decode(std::string_view record) {
  ByteReader reader(record);
  Roster roster;
  roster.session = reader.number<uint64_t>();
  const uint8_t kind = reader.number<uint8_t>();
  const std::string text(reader.text());
  const uint32_t count = reader.number<uint32_t>();
  if (!reader.ok() || reader.rest().size() != count * sizeof(uint64_t) ||
      kind > 1 + static_cast<uint8_t>(ErrorKind::timedOut) || (kind != 0) == text.empty())
    return {};
  if (kind != 0)
    roster.refusal = Status(static_cast<ErrorKind>(kind - 1), text);
  for (uint32_t rank = 0; rank < count; ++rank)
    roster.tokens.push_back(reader.number<uint64_t>());
  return roster;
}

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
