// Transport over a wire: the messages of one rank, as compiled. Chunks of staged messages are packed into the arena, sent, received and unpacked
// while others are on their way; messages in place go from memory to memory. A step begins its chunks in the order of the plan, after those
// before it in its direction that share a slot have begun theirs; a chunk begins when its slot is free and what it passes on is there. So the
// message that is first of all that are left can always go on, on both sides: no process waits for ever on another that is alive.

#include "executor/chunks.h"
#include "executor/copies.h"
#include "executor/packing.h"
#include "executor/transport.h"
#include "executor/wire.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <sched.h>

namespace reshard {
namespace {

using namespace schema;

/// Chunks on their way in one direction, and of one message; steps that may be under way beside the first unfinished one.
constexpr size_t kInFlight = 16, kOfOne = 4, kAhead = 8;
/// A rank begins at most two messages in a round and direction, one between nodes and one inside. Flights for the first two unfinished ones
/// are never given to others: so of the messages that began first of all that are left, each gets on at both ends.
constexpr size_t kReserved = 2 * kOfOne;

struct Message {
  const Step *step = nullptr;
  Packing packing;
  uint64_t chunks = 1;
  uint64_t begun = 0, done = 0;                    // in a run
  std::vector<uint32_t> sharing;                   // earlier steps of its direction that had its slots
  std::vector<std::pair<uint32_t, std::vector<uint64_t>>> brought; // of a send: step -> chunks of it that must be done before each chunk
};

/// A chunk on its way.
struct Flight {
  Message *message = nullptr; // null: free
  uint64_t chunk = 0;
  std::byte *begin = nullptr, *end = nullptr; // in the arena; null where in place
};

class MessageTransport : public Transport {
public:
  explicit MessageTransport(std::unique_ptr<Wire> wire) : wire_(std::move(wire)) {}
  ~MessageTransport() override { std::free(arena_); }

  std::string prepare(const Plan &plan, const std::vector<LocalRank> &ranks) override {
    if (ranks.size() != 1 || ranks[0].rank != wire_->rank())
      return "this process is rank " + std::to_string(wire_->rank()) + " of its wire and runs that rank alone";
    if (wire_->size() != plan.world())
      return "the plan has " + std::to_string(plan.world()) + " ranks, the wire " + std::to_string(wire_->size()) + " processes, expected as many";
    if (std::string error = agree(plan.digest()); !error.empty())
      return error;
    const LocalRank &rank = ranks[0];
    if (const uint64_t bytes = rank.segment->arena_bytes(); bytes > 0) {
      arena_ = static_cast<std::byte *>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
      if (!arena_)
        return "no memory for an arena of " + std::to_string(bytes) + " bytes";
      std::memset(arena_, 0, bytes); // touched now, not in the first run
    }
    const auto *steps = rank.segment->steps();
    where_.resize(steps ? steps->size() : 0);
    for (uint32_t s = 0; s < where_.size(); ++s)
      if (std::string error = addStep(rank, s); !error.empty())
        return error;
    for (const bool send : {false, true})
      for (size_t m = 0; m < messages_[send].size(); ++m)
        link(*rank.segment, send, messages_[send][m]);
    wire_->reserve(2 * kInFlight);
    return {};
  }

  std::string run(Deadline deadline, bool &timedOut) override {
    if (abandoned_)
      return "an earlier run failed with messages on their way, expected a new launch";
    for (auto &direction : messages_)
      for (Message &message : direction)
        message.begun = message.done = 0;
    first_ = {};
    copied_ = 0;
    for (uint64_t looks = 0;; ++looks) {
      bool any = false;
      if (std::string error = progress(any); !error.empty())
        return abandon(error);
      if (copied_ < copies_.size()) { // a part of the local copies and fills
        copies_.run(copied_++, false);
        any = true;
      }
      if (first_[0] == messages_[0].size() && first_[1] == messages_[1].size() && copied_ == copies_.size())
        return {};
      if (!any)
        sched_yield(); // there may be more processes than cores
      if (deadline && looks % 64 == 0 && std::chrono::steady_clock::now() >= *deadline) {
        timedOut = true;
        return abandon(late());
      }
    }
  }

  uint64_t bytes() const override { return bytes_; }

private:
  /// What is on its way cannot be told from what a later run would send.
  std::string abandon(std::string error) {
    abandoned_ = true;
    wire_->abandon();
    return error;
  }

  /// All processes run the same plan.
  std::string agree(const std::string &digest) {
    std::vector<std::byte> all(digest.size() * wire_->size());
    if (std::string error = wire_->gather(reinterpret_cast<const std::byte *>(digest.data()), digest.size(), all.data()); !error.empty())
      return error;
    for (uint32_t rank = 0; rank < wire_->size(); ++rank)
      if (std::memcmp(all.data() + rank * digest.size(), digest.data(), digest.size()) != 0)
        return "rank " + std::to_string(rank) + " runs plan " + std::string(reinterpret_cast<const char *>(all.data()) + rank * digest.size(), digest.size()) +
               ", rank " + std::to_string(wire_->rank()) + " plan " + digest + ", expected the same";
    return {};
  }

  std::string addStep(const LocalRank &rank, uint32_t number) {
    const Step &step = *rank.segment->steps()->Get(number);
    auto add = [&](uint32_t first, uint32_t count, Packing &packing) -> std::string {
      for (uint32_t i = 0; i < count; ++i)
        if (std::string error = packing.add(rank, *rank.segment->operands()->Get(first + i)); !error.empty())
          return error;
      return {};
    };
    if (step.kind() != StepKind::send && step.kind() != StepKind::recv) {
      bytes_ += step.bytes();
      for (uint32_t i = 0; i < step.output_count(); ++i) {
        const Operand *input = step.kind() == StepKind::copy ? rank.segment->operands()->Get(step.first_input() + i) : nullptr;
        if (std::string error = copies_.add(rank, input, rank, *rank.segment->operands()->Get(step.first_output() + i)); !error.empty())
          return error;
      }
      where_[number] = {2, copies_.size()}; // where its copies end
      return {};
    }
    const bool send = step.kind() == StepKind::send;
    Message message;
    message.step = &step;
    message.chunks = chunkCount(step);
    if (chunkBytes(step, 0) > kMaxWireBytes)
      return "step " + std::to_string(number) + " moves more than " + std::to_string(kMaxWireBytes) + " bytes at once";
    if (!send)
      bytes_ += step.bytes();
    if (std::string error = send ? add(step.first_input(), step.input_count(), message.packing) : add(step.first_output(), step.output_count(), message.packing);
        !error.empty())
      return error;
    if (step.staging() == UINT64_MAX && !message.packing.contiguous())
      return "step " + std::to_string(number) + " is in place, but its bytes do not stand side by side";
    where_[number] = {send, messages_[send].size()};
    messages_[send].push_back(std::move(message));
    return {};
  }

  void link(const Segment &segment, bool send, Message &message) {
    const std::vector<std::vector<uint64_t>> before = send ? chunksBefore(segment, *message.step) : std::vector<std::vector<uint64_t>>();
    for (uint32_t i = 0; i < message.step->after_count(); ++i) {
      const uint32_t earlier = segment.after()->Get(message.step->first_after() + i);
      if (where_[earlier].first == static_cast<int>(send))
        message.sharing.push_back(static_cast<uint32_t>(where_[earlier].second));
      else if (send)
        message.brought.emplace_back(earlier, before[i]);
      else
        message.brought.emplace_back(earlier, std::vector<uint64_t>(message.chunks, chunkCount(*segment.steps()->Get(earlier))));
    }
  }

  /// Of a step, the chunks that are done.
  uint64_t done(uint32_t step) const {
    const auto [kind, at] = where_[step];
    return kind == 2 ? copied_ >= at : messages_[kind][at].done;
  }

  /// The next chunk of a message, where it may begin.
  bool ready(bool send, const Message &message) const {
    if (message.begun == message.chunks || message.begun - message.done == kOfOne)
      return false;
    for (uint32_t earlier : message.sharing)
      if (messages_[send][earlier].begun < messages_[send][earlier].chunks)
        return false;
    for (const auto &[step, chunks] : message.brought)
      if (done(step) < chunks[message.begun])
        return false;
    return true;
  }

  /// Where the next chunk is packed, or received: its slot of the arena, or its memory.
  std::byte *place(const Message &message, std::byte *&end) const {
    const Step &step = *message.step;
    if (step.staging() == UINT64_MAX) {
      end = nullptr;
      return message.packing.contiguous() + message.begun * step.chunk();
    }
    std::byte *begin = arena_ + step.staging() + (step.slot() + message.begun) % 2 * step.chunk();
    end = begin + chunkBytes(step, message.begun);
    return begin;
  }

  std::string progress(bool &any) {
    for (const bool send : {false, true})
      for (size_t f = 0; f < kInFlight; ++f) {
        Flight &flight = flights_[send][f];
        // Chunks of one message are done in their order: who passes them on counts them.
        if (!flight.message || flight.chunk != flight.message->done)
          continue;
        bool arrived = false;
        if (std::string error = wire_->test(send * kInFlight + f, arrived); !error.empty())
          return error + named(send, *flight.message, flight.chunk);
        if (!arrived)
          continue;
        any = true;
        Message &message = *flight.message;
        if (!send && flight.begin)
          message.packing.unpack(flight.chunk * message.step->chunk(), flight.chunk * message.step->chunk() + chunkBytes(*message.step, flight.chunk), flight.begin);
        flight.message = nullptr;
        ++message.done;
      }
    for (const bool send : {false, true}) {
      auto &all = messages_[send];
      while (first_[send] < all.size() && all[first_[send]].done == all[first_[send]].chunks)
        ++first_[send];
      for (size_t m = first_[send]; m < std::min(all.size(), first_[send] + kAhead); ++m)
        while (ready(send, all[m])) {
          bool begun = false;
          if (std::string error = begin(send, all[m], m - first_[send] < 2 ? 0 : kReserved, begun); !error.empty())
            return error;
          if (!begun)
            break;
          any = true;
        }
    }
    return {};
  }

  /// Begins the next chunk, unless its slot is taken, or no more than `reserved` flights are left.
  std::string begin(bool send, Message &message, size_t reserved, bool &begun) {
    std::byte *end = nullptr, *data = place(message, end);
    for (const auto &direction : flights_)
      for (const Flight &flight : direction)
        if (flight.message && end && flight.begin && flight.begin < end && data < flight.end)
          return {}; // the slot is taken
    const auto free = static_cast<size_t>(std::find_if(flights_[send].begin(), flights_[send].end(), [](const Flight &f) { return !f.message; }) - flights_[send].begin());
    const auto left = static_cast<size_t>(std::count_if(flights_[send].begin(), flights_[send].end(), [](const Flight &f) { return !f.message; }));
    if (left <= reserved)
      return {};
    const Step &step = *message.step;
    const uint64_t at = message.begun * step.chunk(), bytes = chunkBytes(step, message.begun);
    if (send && end)
      message.packing.pack(at, at + bytes, data);
    flights_[send][free] = {&message, message.begun, end ? data : nullptr, end};
    begun = true;
    const size_t request = send * kInFlight + free;
    const uint64_t chunk = message.begun++;
    std::string error = send ? wire_->send(request, step.peer(), step.message(), data, bytes) : wire_->receive(request, step.peer(), step.message(), data, bytes);
    return error.empty() ? error : error + named(send, message, chunk);
  }

  static std::string named(bool send, const Message &message, uint64_t chunk) {
    return std::string(": message ") + std::to_string(message.step->message()) + " of round " + std::to_string(message.step->round()) + (send ? " to rank " : " from rank ") +
           std::to_string(message.step->peer()) + ", chunk " + std::to_string(chunk) + " of " + std::to_string(message.chunks);
  }

  /// Who is waited for.
  std::string late() const {
    for (const bool send : {false, true})
      for (size_t m = first_[send]; m < messages_[send].size(); ++m)
        if (const Message &message = messages_[send][m]; message.begun > message.done)
          return "the deadline passed" + named(send, message, message.done);
    return "the deadline passed with steps that could not begin";
  }

  std::unique_ptr<Wire> wire_;
  std::byte *arena_ = nullptr;
  std::array<std::vector<Message>, 2> messages_; // receives, sends; in the order of the plan
  Copies copies_;                                // of local steps, step after step
  std::vector<std::pair<int, size_t>> where_;    // by step: 0, 1 into messages_, 2 into copies_
  std::array<size_t, 2> first_{};                // unfinished
  std::array<std::array<Flight, kInFlight>, 2> flights_;
  size_t copied_ = 0;
  bool abandoned_ = false;
  uint64_t bytes_ = 0;
};

} // namespace

std::unique_ptr<Transport> makeMessageTransport(std::unique_ptr<Wire> wire) { return std::make_unique<MessageTransport>(std::move(wire)); }

} // namespace reshard
