// SPDX-License-Identifier: Apache-2.0
// Packs the ranges that clients fetch, or lets clients read the bound memory. A fetch whose bytes have not arrived is
// parked.
#include "executor/pull/range_server.h"

#include <algorithm>
#include <cstdio>
#include <sys/mman.h>
#include <utility>

namespace reshard::pull {

namespace {

bool allocate(Client::Slot &slot) {
  void *const memory = ::mmap(nullptr, kRangeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  slot.memory.reset(memory == MAP_FAILED ? nullptr : static_cast<std::byte *>(memory));
  return slot.memory != nullptr;
}

} // namespace

void Client::Unmap::operator()(std::byte *memory) const { ::munmap(memory, kRangeBytes); }

Client *Clients::find(uint32_t peer) {
  const auto found = clients_.find(peer);
  return found == clients_.end() ? nullptr : &found->second;
}

Client &Clients::add(uint32_t peer, uint32_t worldRank) {
  Client &client = clients_[peer];
  client.number = ++numbers_;
  client.worldRank = worldRank;
  byNumber_[client.number] = peer;
  return client;
}

std::optional<uint32_t> Clients::peerOf(uint64_t number) const {
  const auto found = byNumber_.find(number);
  return found == byNumber_.end() ? std::nullopt : std::optional(found->second);
}

bool Clients::send(uint32_t peer, const Frame &frame, std::string_view text) {
  if (messenger_.send(peer, frame, text).ok())
    return true;
  drop(peer);
  return false;
}

void Clients::drop(uint32_t peer) {
  messenger_.disconnect(peer);
  forget(peer);
}

void Clients::forget(uint32_t peer) {
  const Client *const client = find(peer);
  ended_(peer, client);
  if (!client)
    return;
  byNumber_.erase(client->number);
  clients_.erase(peer);
}

bool RangeServer::handle(uint32_t peer, Client &client, const Frame &frame) {
  const auto &words = frame.words;
  switch (kindOf(frame)) {
  case FrameKind::fetch: {
    if (words[5] >= kWindow || words[3] >= words[4] || words[4] - words[3] > kRangeBytes || words[1] == 0 ||
        words[2] > UINT32_MAX)
      return true;
    const Fetch asked{{words[7], words[1]}, words[2], words[3], words[4], static_cast<uint32_t>(words[5]),
                      words[6] != 0};
    Client::Slot &slot = client.slots[asked.slot];
    if (slot.sending) // the client has received its data, but poll() has not returned kSent yet
      slot.parked = asked;
    else
      fetch(peer, client, asked);
    return true;
  }
  case FrameKind::confirm: {
    const bool whole = words[1] == version_.number && words[2] == client.lease && client.lease != 0;
    clients_.send(peer, makeFrame(FrameKind::confirmed, {words[1], whole}));
    return true;
  }
  case FrameKind::leave:
    client.lease = 0;
    for (Client::Slot &slot : client.slots) {
      slot.parked.reset();
      if (!slot.sending)
        slot.memory.reset();
    }
    return true;
  default:
    return false;
  }
}

void RangeServer::sent(uint32_t peer, Client &client, uint64_t number) {
  if (number >= kWindow)
    return;
  Client::Slot &slot = client.slots[number];
  slot.sending = false;
  if (const std::optional<Fetch> parked = std::exchange(slot.parked, {}))
    fetch(peer, client, *parked);
}

/// Whether a range can be served now, perhaps later, or never.
RangeServer::Readiness RangeServer::readiness(const Client &client, const Fetch &fetch,
                                              const ServedMessage &served) const {
  if (options_.isSource()) { // a version that is older than this process has other bytes
    const bool same = fetch.version.number == version_.number && fetch.version.incarnation >= options_.incarnation;
    return same && (client.lease != 0 || !withdrawing_) ? Readiness::ready : Readiness::never;
  }
  if (fetch.version == version_ && MessageTable::ready(served, fetch.begin, fetch.end, progress_))
    return Readiness::ready;
  // A rank of the own replica may begin earlier than this one. A child of another replica exists only if this one
  // pulls.
  const bool own = options_.fleet.replicaOf(client.worldRank) == options_.fleet.replicaOf(options_.worldRank);
  return fetch.version >= version_ && (own || pulling_) ? Readiness::later : Readiness::never;
}

void RangeServer::fetch(uint32_t peer, Client &client, const Fetch &fetch) {
  ServedMessage served;
  const MessageTable::Serves serves = table_.find(static_cast<uint32_t>(fetch.message), client.worldRank, served);
  if (serves == MessageTable::Serves::askSender)
    return reply(peer, FrameKind::askSender, fetch);
  if (serves == MessageTable::Serves::no || fetch.end > served.packing->bytes())
    return; // not a request of a rank with this plan
  switch (readiness(client, fetch, served)) {
  case Readiness::ready:
    return answer(peer, client, fetch, served);
  case Readiness::later:
    client.slots[fetch.slot].parked = fetch;
    return;
  case Readiness::never:
    return reply(peer, FrameKind::gone, fetch);
  }
}

void RangeServer::reply(uint32_t peer, FrameKind kind, const Fetch &fetch) {
  clients_.send(peer, makeFrame(kind, {fetch.version.number, fetch.message, fetch.begin, fetch.end, fetch.slot}));
}

void RangeServer::answer(uint32_t peer, Client &client, const Fetch &fetch, const ServedMessage &served) {
  if (client.lease == 0) {
    client.lease = leases_;
    client.since = std::chrono::steady_clock::now();
  }
  Client::Slot &slot = client.slots[fetch.slot];
  const uint64_t bytes = fetch.end - fetch.begin;
  std::byte *data = served.packing->contiguous();
  slot.inPlace = data != nullptr;
  if (data) {
    data += fetch.begin;
  } else {
    if (!slot.memory && !allocate(slot))
      return clients_.drop(peer);
    data = slot.memory.get();
    served.packing->pack(fetch.begin, fetch.end, data);
  }
  const auto address = fetch.readable ? reinterpret_cast<uint64_t>(data) : 0;
  const Frame frame = makeFrame(FrameKind::data, {fetch.version.number, fetch.message, fetch.begin, fetch.end,
                                                  fetch.slot, address, client.lease});
  if (fetch.readable) {
    clients_.send(peer, frame);
    return;
  }
  slot.sending = true;
  if (!messenger_.sendData(peer, frame, data, bytes, fetch.slot).ok())
    clients_.drop(peer);
}

void RangeServer::serveParked() {
  if (options_.isSource())
    return;
  std::vector<std::pair<uint32_t, Fetch>> ready;
  for (auto &[peer, client] : clients_.all())
    for (Client::Slot &slot : client.slots) {
      ServedMessage served;
      if (slot.parked && !slot.sending &&
          table_.find(static_cast<uint32_t>(slot.parked->message), client.worldRank, served) ==
              MessageTable::Serves::yes &&
          readiness(client, *slot.parked, served) != Readiness::later)
        ready.emplace_back(peer, *std::exchange(slot.parked, {}));
    }
  for (const auto &[peer, parked] : ready)
    if (Client *const client = clients_.find(peer))
      fetch(peer, *client, parked);
}

void RangeServer::change(const Version &version) {
  ++leases_;
  std::vector<uint32_t> sending;
  for (auto &[peer, client] : clients_.all()) {
    client.lease = 0;
    if (std::any_of(client.slots.begin(), client.slots.end(),
                    [](const Client::Slot &slot) { return slot.sending && slot.inPlace; }))
      sending.push_back(peer);
  }
  for (const uint32_t peer : sending)
    clients_.drop(peer);
  progress_.reset();
  version_ = version;
}

size_t RangeServer::leases() const {
  const std::map<uint32_t, Client> &clients = clients_.all();
  return static_cast<size_t>(
      std::count_if(clients.begin(), clients.end(), [](const auto &each) { return each.second.lease != 0; }));
}

std::string RangeServer::leaseHolders() const {
  constexpr size_t kShown = 8;
  std::string text;
  size_t count = 0;
  for (const auto &[peer, client] : clients_.all())
    if (client.lease != 0 && ++count <= kShown) {
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, ", for %.1f s",
                    std::chrono::duration<double>(std::chrono::steady_clock::now() - client.since).count());
      text += (text.empty() ? "" : "; ") + options_.fleet.name(client.worldRank) + seconds;
    }
  return count > kShown ? text + "; and " + std::to_string(count - kShown) + " more" : text;
}

} // namespace reshard::pull
