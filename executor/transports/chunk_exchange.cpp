// SPDX-License-Identifier: Apache-2.0
// Moves the chunks of messages over the channel and through slots. A chunk of a staged message is packed, sent,
// received and unpacked while others are in flight; a message in place is sent from and received into bound memory.
#include "executor/transports/chunk_exchange.h"

#include "executor/transports/bootstrap.h"

#include <algorithm>

namespace reshard {

using namespace schema;

namespace {

/// The maximum of chunks in flight of one message.
constexpr size_t kOfOne = 4;
/// In a round a rank starts at most two messages in each direction, one between nodes and one inside its node. The
/// first two unfinished messages have reserved places in flight, so that the earliest unfinished messages can always
/// progress on both sides.
constexpr size_t kReserved = 2 * kOfOne;
/// A chunk that local peers exchange through a slot moves in parts of kPartBytes, and uses kRingBytes of its slot again
/// and again: the receiver finds the bytes in the caches.
constexpr uint64_t kPartBytes = 128 << 10, kRingBytes = 4 * kPartBytes;

} // namespace

bool ChunkExchange::ready(Method send, const MessageState &message) const {
  if (message.begun == message.chunks || message.begun - message.done == kOfOne)
    return false;
  for (uint32_t earlier : message.sharing)
    if (steps_.messages[send][earlier].begun < steps_.messages[send][earlier].chunks)
      return false;
  return steps_.dependenciesDone(message);
}

std::byte *ChunkExchange::nextChunk(const MessageState &message, std::byte *&end) const {
  const Step &step = *message.step;
  if (step.staging() == UINT64_MAX) {
    end = nullptr;
    return message.packing.contiguous() + message.begun * step.chunk();
  }
  std::byte *begin = slots_.memory + (chunkStaging(step, message.begun) - slots_.headBytes);
  end = begin + chunkBytes(step, message.begun);
  return begin;
}

bool ChunkExchange::packPart(const ChunkInFlight &flight, bool &any) const {
  MessageState &message = *flight.message;
  const uint64_t before = steps_.runs * message.step->bytes(), begin = flight.chunk * message.step->chunk(),
                 end = message.end(flight.chunk),
                 taken = message.progress->taken.load(std::memory_order_acquire) - before;
  const uint64_t last = std::min(end, message.copied + kPartBytes);
  if (message.copied >= begin && message.copied < end && last <= std::max(begin, taken) + kRingBytes) {
    message.packing.pack(message.copied, last, flight.begin + (message.copied - begin) % kRingBytes);
    message.copied = last;
    message.progress->published.store(before + last, std::memory_order_release);
    any = true;
  }
  return taken >= end;
}

bool ChunkExchange::unpackPart(const ChunkInFlight &flight, bool &any) const {
  MessageState &message = *flight.message;
  const uint64_t before = steps_.runs * message.step->bytes(), begin = flight.chunk * message.step->chunk(),
                 end = message.end(flight.chunk),
                 published = message.progress->published.load(std::memory_order_acquire) - before;
  if (published > message.copied) {
    const uint64_t last = std::min({end, published, message.copied + kPartBytes});
    message.packing.unpack(message.copied, last,
                           message.peerSlots + (message.peerSlot + flight.chunk) % 2 * message.step->chunk() +
                               (message.copied - begin) % kRingBytes,
                           steps_.stream);
    message.copied = last;
    message.progress->taken.store(before + last, std::memory_order_release);
    any = true;
  }
  return message.copied == end;
}

Result<bool> ChunkExchange::advance(Method send, size_t number, bool &any) {
  const ChunkInFlight &flight = inFlight_[send][number];
  if (flight.message->progress)
    return send ? packPart(flight, any) : unpackPart(flight, any);
  const Result<bool> arrived = channel_.test(send * kInFlight + number);
  if (!arrived.ok())
    return Status(arrived.status()).withSuffix(messageText(send, *flight.message, flight.chunk));
  const MessageState &message = *flight.message;
  if (*arrived && !send && flight.begin)
    message.packing.unpack(flight.chunk * message.step->chunk(), message.end(flight.chunk), flight.begin,
                           steps_.stream);
  channelWaits_ = channelWaits_ || !*arrived;
  return arrived;
}

Status ChunkExchange::exchange(bool &any) {
  channelWaits_ = false;
  for (const Method send : {kReceive, kSend})
    for (size_t f = 0; f < kInFlight; ++f) {
      ChunkInFlight &flight = inFlight_[send][f];
      if (!flight.message || (flight.chunk != flight.message->done && !(send && flight.message->progress)))
        continue;
      const Result<bool> complete = advance(send, f, any);
      if (!complete.ok())
        return complete.status();
      // Chunks of one message are completed in order, since messages that forward them count them.
      if (!*complete || flight.chunk != flight.message->done)
        continue;
      any = true;
      ++flight.message->done;
      flight.message = nullptr;
    }
  for (const Method send : {kReceive, kSend}) {
    steps_.skipFinished(send);
    const std::span<MessageState> next = steps_.next(send);
    for (size_t m = 0; m < next.size(); ++m)
      while (ready(send, next[m])) {
        const Result<bool> begun = begin(send, next[m], m < 2 ? 0 : kReserved);
        if (!begun.ok())
          return begun.status();
        if (!*begun)
          break;
        any = true;
      }
  }
  return {};
}

Result<bool> ChunkExchange::begin(Method send, MessageState &message, size_t reserved) {
  std::byte *end = nullptr, *data = message.peerSlots ? nullptr : nextChunk(message, end);
  for (const auto &direction : inFlight_)
    for (const ChunkInFlight &flight : direction)
      if (flight.message && end && flight.begin && flight.begin < end && data < flight.end)
        return false; // the slot is in use
  const auto free = static_cast<size_t>(
      std::find_if(inFlight_[send].begin(), inFlight_[send].end(), [](const ChunkInFlight &f) { return !f.message; }) -
      inFlight_[send].begin());
  const auto left = static_cast<size_t>(
      std::count_if(inFlight_[send].begin(), inFlight_[send].end(), [](const ChunkInFlight &f) { return !f.message; }));
  if (left <= reserved)
    return false;
  const Step &step = *message.step;
  const uint64_t at = message.begun * step.chunk(), bytes = chunkBytes(step, message.begun);
  inFlight_[send][free] = {&message, message.begun, end ? data : nullptr, end};
  const uint64_t chunk = message.begun++;
  if (message.progress)
    return true;
  if (send && end)
    message.packing.pack(at, at + bytes, data);
  const size_t request = send * kInFlight + free;
  const uint32_t tag = Bootstrap::kTags + step.message();
  Status status = send ? channel_.send(request, step.peer(), tag, data, bytes)
                       : channel_.receive(request, step.peer(), tag, data, bytes);
  if (!status.ok())
    return std::move(status).withSuffix(messageText(send, message, chunk));
  return true;
}

Status ChunkExchange::checkPeers() const {
  for (const Method send : {kReceive, kSend})
    for (const ChunkInFlight &flight : inFlight_[send])
      if (flight.message && flight.message->progress)
        if (Status status = channel_.check(flight.message->step->peer()); !status.ok())
          return std::move(status).withSuffix(messageText(send, *flight.message, flight.chunk));
  return {};
}

} // namespace reshard
