// schedule: descriptors become what each rank does: zeros to fill, local copies, and rounds of messages, one for each pair and
// round. Without a staging limit there is one round. With one, descriptors are cut and dealt out so that what a rank packs
// and what it receives in a round stay within half the limit each; pairs are taken by distance (rank r sends to r+1, r+2, …)
// so that a round spreads over senders and receivers. Messages to targets that joined later (--keep) are dealt out and
// numbered after those before them, which so stay the same.

#include "compiler/interner.h"
#include "compiler/pass.h"
#include "compiler/staging.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

int64_t bytesOf(const Shape &shape) {
  int64_t bytes = shape.rowBytes;
  for (const Loop &loop : shape.loops)
    bytes *= loop.count;
  return bytes;
}

/// Cuts descriptors into pieces of at most `limit` bytes: along the outermost loop, else within each of its steps, else in the row.
class Cutter {
public:
  Cutter(Interner<Shape> &shapes, int64_t limit) : shapes_(shapes), limit_(limit) {}

  void cut(const Descriptor &descriptor, std::vector<Descriptor> &pieces) {
    cut(descriptor, shapes_[descriptor.shape], pieces);
  }

private:
  void put(Descriptor piece, Shape shape, std::vector<Descriptor> &pieces) {
    piece.shape = shapes_.intern(std::move(shape));
    pieces.push_back(piece);
  }

  void cut(const Descriptor &descriptor, const Shape shape, std::vector<Descriptor> &pieces) {
    const int64_t bytes = bytesOf(shape);
    if (bytes <= limit_)
      return put(descriptor, shape, pieces);
    if (shape.loops.empty()) {
      for (int64_t at = 0; at < bytes; at += limit_) {
        Descriptor piece = descriptor;
        piece.sourceOffset += at;
        piece.targetOffset += at;
        put(piece, {std::min(limit_, bytes - at), {}}, pieces);
      }
      return;
    }
    const Loop outer = shape.loops.front();
    const int64_t inner = bytes / outer.count, run = std::max<int64_t>(1, limit_ / inner);
    for (int64_t at = 0; at < outer.count; at += run) {
      const int64_t count = std::min(run, outer.count - at);
      Descriptor piece = descriptor;
      piece.sourceOffset += at * outer.sourceStride;
      piece.targetOffset += at * outer.targetStride;
      piece.sourceInstance += static_cast<uint32_t>(at * outer.sourceStep);
      piece.targetInstance += static_cast<uint32_t>(at * outer.targetStep);
      Shape part = shape;
      if (count == 1)
        part.loops.erase(part.loops.begin());
      else
        part.loops.front().count = count;
      if (inner > limit_)
        cut(piece, part, pieces);
      else
        put(piece, std::move(part), pieces);
    }
  }

  Interner<Shape> &shapes_;
  int64_t limit_;
};

struct Message {
  uint32_t generation, round;
  int32_t source, target; // world ranks
  size_t first, count;    // descriptors
  int64_t bytes;
};

/// How many staging bytes each rank has left in each round, one direction.
class Room {
public:
  Room(int64_t ranks, int64_t limit) : limit_(limit), used_(ranks), open_(ranks) {}
  uint32_t firstOpen(int32_t rank) const { return open_[rank]; }
  bool fits(int32_t rank, uint32_t round, int64_t bytes) {
    if (used_[rank].size() <= round)
      used_[rank].resize(round + 1);
    return used_[rank][round] + bytes <= limit_;
  }
  void take(int32_t rank, uint32_t round, int64_t bytes) {
    used_[rank][round] += bytes;
    while (open_[rank] < used_[rank].size() && used_[rank][open_[rank]] + kStagingAlignment > limit_)
      ++open_[rank];
  }

private:
  int64_t limit_;
  std::vector<std::vector<int64_t>> used_; // by rank and round
  std::vector<uint32_t> open_;             // rounds before it are full
};

class Scheduler {
public:
  explicit Scheduler(Module &module) : module_(module), layout_(module.layout) {
    for (const Shape &shape : module.transfers.shapes)
      shapes_.intern(shape);
    module_.schedule.ranks.resize(layout_.world);
    firstBuffer_.resize(layout_.world);
    operandShapes_.resize(layout_.world);
    operandNumbers_.resize(layout_.world);
    for (int32_t rank = 0; rank < layout_.world; ++rank) {
      RankSchedule &schedule = module_.schedule.ranks[rank];
      schedule.rank = rank;
      schedule.buffers = buffers(layout_, rank);
      for (const BufferRun &run : schedule.buffers)
        firstBuffer_[rank].try_emplace({static_cast<int64_t>(run.endpoint), run.place}, run.first);
    }
  }

  std::string run() {
    if (std::string error = deal(); !error.empty())
      return error;
    std::sort(messages_.begin(), messages_.end(), [](const Message &a, const Message &b) {
      return std::tie(a.generation, a.round, a.source, a.target) < std::tie(b.generation, b.round, b.source, b.target);
    });
    localSteps();
    messageSteps();
    for (size_t rank = 0; rank < operandShapes_.size(); ++rank)
      module_.schedule.ranks[rank].shapes = std::move(operandShapes_[rank]).take();
    module_.schedule.messages = static_cast<uint32_t>(messages_.size());
    module_.schedule.rounds = 0;
    for (const Message &message : messages_)
      module_.schedule.rounds = std::max(module_.schedule.rounds, message.round + 1);
    for (const RankSchedule &rank : module_.schedule.ranks)
      if (!rank.steps.empty())
        module_.schedule.rounds = std::max(module_.schedule.rounds, 1u);
    module_.level = Level::schedule;
    return {};
  }

private:
  /// The world rank of a place; -1 for a storage endpoint's file.
  int32_t rankOf(unsigned endpoint, int32_t place) const {
    return layout_.endpoints[endpoint].storage ? -1 : layout_.endpoints[endpoint].ranks[place];
  }

  struct Ends {
    int32_t source, target;
  };
  /// The ranks that read and write a descriptor's bytes. A storage endpoint's side, and zeros, are on the other side's rank; where
  /// both sides are storage, files are dealt out over the ranks.
  Ends ends(const Descriptor &d) const {
    const int32_t source = d.source < 0 ? -1 : rankOf(0, d.source), target = rankOf(d.endpoint, d.target);
    const int32_t both = static_cast<int32_t>(d.target % layout_.world);
    if (source < 0 && target < 0)
      return {both, both};
    return {source < 0 ? target : source, target < 0 ? source : target};
  }

  uint32_t generationOf(const Descriptor &d) const { return layout_.endpoints[d.endpoint].generation(d.target); }

  /// Splits descriptors into local ones and messages with their rounds.
  std::string deal() {
    struct Pair {
      uint32_t generation;
      int32_t source, target;
      size_t first, count;
    };
    std::vector<Descriptor> remote;
    for (const Descriptor &d : module_.transfers.descriptors) {
      const Ends at = ends(d);
      (at.source == at.target ? local_ : remote).push_back(d);
    }
    auto key = [&](const Descriptor &d) {
      const Ends at = ends(d);
      const int64_t distance = (at.target - at.source + layout_.world) % layout_.world;
      return std::make_tuple(generationOf(d), distance, at.source);
    };
    std::stable_sort(remote.begin(), remote.end(),
                     [&](const Descriptor &a, const Descriptor &b) { return key(a) < key(b); });
    std::vector<Pair> pairs;
    for (size_t i = 0; i < remote.size(); ++i) {
      const Ends at = ends(remote[i]);
      if (pairs.empty() || pairs.back().generation != generationOf(remote[i]) || pairs.back().source != at.source ||
          pairs.back().target != at.target)
        pairs.push_back({generationOf(remote[i]), at.source, at.target, i, 0});
      ++pairs.back().count;
    }

    const int64_t limit = layout_.stagingLimit;
    if (limit == 0) {
      for (const Pair &pair : pairs) {
        Message message{pair.generation, 0, pair.source, pair.target, pair.first, pair.count, 0};
        for (size_t i = 0; i < pair.count; ++i)
          message.bytes += bytesOf(shapes_[remote[pair.first + i].shape]);
        messages_.push_back(message);
      }
      moved_ = std::move(remote);
      return {};
    }

    const int64_t piece = limit / 4 / kStagingAlignment * kStagingAlignment;
    int64_t total = 0;
    for (const Descriptor &d : remote)
      total += bytesOf(shapes_[d.shape]);
    if (piece == 0 || total / piece > kMaxPieces)
      return "a staging limit of " + std::to_string(limit) + " bytes is too small for " + std::to_string(total) +
             " bytes of messages, expected at least " +
             std::to_string(std::max<int64_t>(4 * kStagingAlignment, (total / kMaxPieces + kStagingAlignment) * 4)) + " bytes";
    Cutter cutter(shapes_, piece);
    Room sending(layout_.world, limit / 2), receiving(layout_.world, limit / 2);
    std::vector<Descriptor> pieces;
    for (const Pair &pair : pairs) {
      uint32_t round = std::max(sending.firstOpen(pair.source), receiving.firstOpen(pair.target));
      Message *open = nullptr;
      for (size_t i = 0; i < pair.count; ++i) {
        pieces.clear();
        cutter.cut(remote[pair.first + i], pieces);
        for (const Descriptor &d : pieces) {
          const int64_t bytes = bytesOf(shapes_[d.shape]);
          int64_t more = open ? staged(open->bytes + bytes) - staged(open->bytes) : staged(bytes);
          while (!sending.fits(pair.source, round, more) || !receiving.fits(pair.target, round, more)) {
            ++round;
            open = nullptr;
            more = staged(bytes);
          }
          if (!open) {
            messages_.push_back({pair.generation, round, pair.source, pair.target, moved_.size(), 0, 0});
            open = &messages_.back();
          }
          sending.take(pair.source, round, more);
          receiving.take(pair.target, round, more);
          moved_.push_back(d);
          ++open->count;
          open->bytes += bytes;
        }
      }
    }
    return {};
  }

  /// One fill and one copy step a rank; both in the first round.
  void localSteps() {
    std::vector<Step> fills(layout_.world), copies(layout_.world);
    for (const Descriptor &d : local_) {
      const int32_t rank = ends(d).target;
      Step &step = d.source < 0 ? fills[rank] : copies[rank];
      if (d.source >= 0)
        step.inputs.push_back(input(rank, d));
      step.outputs.push_back(output(rank, d));
      step.bytes += bytesOf(shapes_[d.shape]);
    }
    for (int32_t rank = 0; rank < layout_.world; ++rank)
      for (Step *step : {&fills[rank], &copies[rank]})
        if (!step->outputs.empty()) {
          step->kind = step == &fills[rank] ? StepKind::fill : StepKind::copy;
          module_.schedule.ranks[rank].steps.push_back(std::move(*step));
        }
  }

  /// A send and a receive for each message; within a round sends go to the next higher ranks first, receives come from the next
  /// lower ones first.
  void messageSteps() {
    struct Side {
      uint32_t round;
      bool receive;
      int64_t distance;
      uint32_t message;
    };
    std::vector<std::vector<Side>> sides(layout_.world);
    for (uint32_t m = 0; m < messages_.size(); ++m) {
      const Message &message = messages_[m];
      const int64_t distance = (message.target - message.source + layout_.world) % layout_.world;
      sides[message.source].push_back({message.round, false, distance, m});
      sides[message.target].push_back({message.round, true, distance, m});
    }
    for (int32_t rank = 0; rank < layout_.world; ++rank) {
      std::sort(sides[rank].begin(), sides[rank].end(), [](const Side &a, const Side &b) {
        return std::tie(a.round, a.receive, a.distance, a.message) < std::tie(b.round, b.receive, b.distance, b.message);
      });
      for (const Side &side : sides[rank]) {
        const Message &message = messages_[side.message];
        Step step;
        step.kind = side.receive ? StepKind::recv : StepKind::send;
        step.round = message.round;
        step.peer = side.receive ? message.source : message.target;
        step.message = side.message;
        step.bytes = message.bytes;
        for (size_t i = message.first; i < message.first + message.count; ++i) {
          if (side.receive)
            step.outputs.push_back(output(rank, moved_[i]));
          else
            step.inputs.push_back(input(rank, moved_[i]));
        }
        module_.schedule.ranks[rank].steps.push_back(std::move(step));
      }
    }
  }

  Operand input(int32_t rank, const Descriptor &d) {
    return {firstBuffer_[rank].at({0, d.source}) + d.sourceInstance, shape(rank, d.shape, false), d.sourceOffset};
  }
  Operand output(int32_t rank, const Descriptor &d) {
    return {firstBuffer_[rank].at({d.endpoint, d.target}) + d.targetInstance, shape(rank, d.shape, true), d.targetOffset};
  }

  uint32_t shape(int32_t rank, uint32_t number, bool target) {
    auto [at, added] = operandNumbers_[rank].try_emplace(number * 2 + target);
    if (added) {
      const Shape &shape = shapes_[number];
      OperandShape operand{shape.rowBytes, {}};
      for (const Loop &loop : shape.loops)
        operand.loops.push_back(target ? OperandLoop{loop.count, loop.targetStride, loop.targetStep}
                                       : OperandLoop{loop.count, loop.sourceStride, loop.sourceStep});
      at->second = operandShapes_[rank].intern(std::move(operand));
    }
    return at->second;
  }

  static constexpr int64_t kMaxPieces = 1 << 24;

  Module &module_;
  const Layout &layout_;
  Interner<Shape> shapes_;
  std::vector<Descriptor> local_, moved_;
  std::vector<Message> messages_; // over moved_
  std::vector<std::map<std::pair<int64_t, int64_t>, uint32_t>> firstBuffer_; // by rank: (endpoint, place) -> buffer
  std::vector<Interner<OperandShape>> operandShapes_;
  std::vector<std::unordered_map<uint32_t, uint32_t>> operandNumbers_; // by rank: descriptor shape and side -> operand shape
};

} // namespace

std::string schedule(Module &module) { return Scheduler(module).run(); }

} // namespace reshard
