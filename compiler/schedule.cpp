// schedule: descriptors become what each rank does: zeros to fill, local copies, and rounds of messages (rounds.h), one
// for each pair and round. What goes the same way is a stream of bytes; rounds are dealt out over bytes, and
// descriptors are cut where the rounds say. Messages to targets that joined later (--keep) come in rounds after those
// before them, which so stay the same.

#include "compiler/cutter.h"
#include "compiler/interner.h"
#include "compiler/pass.h"
#include "compiler/round_limits.h"
#include "compiler/rounds.h"
#include "compiler/staging.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// Descriptors that go the same way.
struct Way {
  uint32_t generation = 0;
  int32_t source = 0, target = 0; // world ranks
  int32_t route = -1;
  bool operator==(const Way &) const = default;
  auto key() const { return std::tie(generation, source, target, route); }
};

/// Bytes [begin, end) of a stream, as cut by the rounds.
struct Piece {
  int64_t begin, end;
  Descriptor descriptor;
};

/// Streams are cut between rows where these are small, else at a multiple of the alignment, at least of an element.
class DescriptorCuts : public Cuts {
public:
  void add(int64_t bytes, int64_t row) {
    const int64_t begin = spans_.size() == firsts_.back() ? 0 : spans_.back().end;
    spans_.push_back({begin, begin + bytes, row});
  }
  void endStream() { firsts_.push_back(spans_.size()); }

  bool possible(uint32_t stream, int64_t at) const override {
    const Span &span = spanOf(stream, at);
    return (at - span.begin) % element(span) == 0;
  }

  int64_t best(uint32_t stream, int64_t from, int64_t to) const override {
    const Span &span = spanOf(stream, to);
    for (int64_t step : {span.row <= (to - from) / 8 ? span.row : kStagingAlignment, element(span)})
      if (const int64_t place = span.begin + (to - span.begin) / step * step; place > from)
        return place;
    return from;
  }

private:
  /// Bytes [begin, end) of one descriptor.
  struct Span {
    int64_t begin, end, row;
  };
  const Span &spanOf(uint32_t stream, int64_t at) const {
    return *std::lower_bound(spans_.begin() + static_cast<ptrdiff_t>(firsts_[stream]),
                             spans_.begin() + static_cast<ptrdiff_t>(firsts_[stream + 1]), at,
                             [](const Span &span, int64_t to) { return span.end < to; });
  }
  /// Rows are whole elements, of a power of two bytes.
  static int64_t element(const Span &span) { return std::min<int64_t>(span.row & -span.row, 16); }

  std::vector<Span> spans_; // stream after stream
  std::vector<size_t> firsts_ = {0};
};

class Scheduler {
public:
  explicit Scheduler(Module &module) : module_(module), layout_(module.layout), cutter_(shapes_) {
    for (const Shape &shape : module.transfers.shapes)
      shapes_.intern(shape);
    module_.schedule.ranks.resize(layout_.world);
    firstBuffer_.resize(layout_.world);
    operandShapes_.resize(layout_.world);
    operandNumbers_.resize(layout_.world);
    std::vector<std::vector<BufferRun>> all = buffers(layout_);
    for (int32_t rank = 0; rank < layout_.world; ++rank) {
      RankSchedule &schedule = module_.schedule.ranks[rank];
      schedule.rank = rank;
      schedule.buffers = std::move(all[rank]);
      for (const BufferRun &run : schedule.buffers)
        firstBuffer_[rank].try_emplace({static_cast<int64_t>(run.endpoint), run.place}, run.first);
    }
  }

  std::string run() {
    gather();
    if (std::string error = deal(); !error.empty())
      return error;
    localSteps();
    messageSteps();
    for (size_t rank = 0; rank < operandShapes_.size(); ++rank)
      module_.schedule.ranks[rank].shapes = std::move(operandShapes_[rank]).take();
    module_.schedule.messages = static_cast<uint32_t>(messages_.size());
    module_.schedule.rounds = rounds_;
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

  /// The way of a descriptor, from the rank that reads to the one that writes. A storage endpoint's side, and zeros,
  /// are on the other side's rank; where both sides are storage, files are dealt out over the ranks.
  Way way(const Descriptor &d) const {
    const int32_t source = d.source < 0 ? -1 : rankOf(0, d.source), target = rankOf(d.endpoint, d.target);
    const int32_t both = static_cast<int32_t>(d.target % layout_.world);
    Way result{layout_.endpoints[d.endpoint].generation(d.target), both, both, d.route};
    if (source >= 0 || target >= 0) {
      result.source = source < 0 ? target : source;
      result.target = target < 0 ? source : target;
    }
    return result;
  }

  /// Splits descriptors into local ones and streams.
  void gather() {
    std::vector<std::pair<Way, Descriptor>> remote;
    for (const Descriptor &d : module_.transfers.descriptors) {
      const Way at = way(d);
      if (at.source == at.target && d.route < 0)
        local_.push_back(d);
      else
        remote.emplace_back(at, d);
    }
    std::stable_sort(remote.begin(), remote.end(),
                     [](const auto &a, const auto &b) { return a.first.key() < b.first.key(); });
    for (const auto &[at, d] : remote) {
      if (ways_.empty() || ways_.back() != at) {
        ways_.push_back(at);
        firsts_.push_back(descriptors_.size());
        Stream &stream = streams_.emplace_back();
        if (at.source != at.target)
          stream.hops.push_back({at.source, at.target, -1});
        if (d.route >= 0)
          addRoute(module_.transfers.routes[d.route], d.endpoint, stream);
      }
      streams_.back().bytes += bytesOf(shapes_[d.shape]);
      descriptors_.push_back(d);
    }
    firsts_.push_back(descriptors_.size());
  }

  void addRoute(const Route &route, unsigned endpoint, Stream &stream) {
    for (const Hop &hop : route) {
      const int32_t from = rankOf(endpoint, hop.from), to = rankOf(endpoint, hop.to);
      auto after = static_cast<int32_t>(stream.hops.size()) - 1; // stays -1 for what the first rank read from files
      while (after >= 0 && stream.hops[after].to != from)
        --after;
      stream.hops.push_back({from, to, after});
    }
  }

  /// Rounds, generation after generation; then messages, and streams cut into pieces.
  std::string deal() {
    RoundLimits limits;
    if (std::string error = roundLimits(streams_, layout_, limits); !error.empty())
      return error;
    for (size_t first = 0; first < streams_.size();) {
      size_t last = first;
      while (last < streams_.size() && ways_[last].generation == ways_[first].generation)
        ++last;
      DescriptorCuts cuts;
      for (size_t s = first; s < last; ++s, cuts.endStream())
        for (size_t d = firsts_[s]; d < firsts_[s + 1]; ++d)
          cuts.add(bytesOf(shapes_[descriptors_[d].shape]), shapes_[descriptors_[d].shape].rowBytes);
      std::vector<Message> messages =
          dealRounds(llvm::ArrayRef(streams_).slice(first, last - first), layout_.topology, limits, cuts);
      uint32_t rounds = 0;
      for (Message &message : messages) {
        rounds = std::max(rounds, message.round + message.rounds);
        message.round += rounds_;
        for (Grant &grant : message.grants)
          grant.stream += static_cast<uint32_t>(first);
        messages_.push_back(std::move(message));
      }
      rounds_ += rounds;
      first = last;
    }
    cut();
    gatherMessages();
    return {};
  }

  /// Streams into pieces that no grant parts.
  void cut() {
    std::vector<llvm::SmallVector<int64_t, 1>> ends(streams_.size());
    for (const Message &message : messages_)
      for (const Grant &grant : message.grants)
        ends[grant.stream].push_back(grant.end);
    std::vector<Descriptor> stack, taken;
    for (size_t s = 0; s < streams_.size(); ++s) {
      firstPiece_.push_back(pieces_.size());
      std::sort(ends[s].begin(), ends[s].end());
      ends[s].erase(std::unique(ends[s].begin(), ends[s].end()), ends[s].end());
      stack.assign(descriptors_.rend() - static_cast<ptrdiff_t>(firsts_[s + 1]),
                   descriptors_.rend() - static_cast<ptrdiff_t>(firsts_[s]));
      int64_t at = 0;
      for (int64_t end : ends[s]) {
        taken.clear();
        cutter_.take(stack, end - at, taken);
        for (const Descriptor &d : taken) {
          const int64_t bytes = bytesOf(shapes_[d.shape]);
          pieces_.push_back({at, at + bytes, d});
          at += bytes;
        }
      }
    }
    firstPiece_.push_back(pieces_.size());
    descriptors_ = {};
  }

  llvm::ArrayRef<Piece> piecesOf(size_t stream) const {
    return llvm::ArrayRef(pieces_).slice(firstPiece_[stream], firstPiece_[stream + 1] - firstPiece_[stream]);
  }

  /// Notes which message brought what goes on.
  void gatherMessages() {
    brought_.resize(streams_.size());
    for (uint32_t m = 0; m < messages_.size(); ++m)
      for (const Grant &grant : messages_[m].grants)
        if (const size_t hops = streams_[grant.stream].hops.size(); hops > 1) {
          brought_[grant.stream].resize(hops);
          brought_[grant.stream][grant.hop].emplace_back(grant.end, m);
        }
  }

  /// One fill and one copy step a rank, and one for each stream that it reads from files to pass it on; all in the
  /// first round.
  void localSteps() {
    std::vector<Step> fills(layout_.world), copies(layout_.world);
    for (const Descriptor &d : local_) {
      const int32_t rank = way(d).target;
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
    readStep_.resize(streams_.size());
    for (size_t s = 0; s < streams_.size(); ++s) {
      if (!read(s))
        continue;
      std::vector<Step> &steps = module_.schedule.ranks[ways_[s].source].steps;
      readStep_[s] = static_cast<uint32_t>(steps.size());
      Step &step = steps.emplace_back();
      step.bytes = streams_[s].bytes;
      for (const Piece &piece : piecesOf(s)) {
        step.inputs.push_back(input(ways_[s].source, piece.descriptor));
        step.outputs.push_back(output(ways_[s].source, piece.descriptor));
      }
    }
  }

  /// Whether the first rank of a stream reads it from files, which is no message.
  bool read(size_t stream) const { return ways_[stream].source == ways_[stream].target; }

  /// A send and a receive for each message; within a round sends go to the next higher ranks first, receives come from
  /// the next lower ones first. A send of what a rank got itself waits for the receives that brought it.
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
      const int64_t distance = (message.to - message.from + layout_.world) % layout_.world;
      sides[message.from].push_back({message.round, false, distance, m});
      sides[message.to].push_back({message.round, true, distance, m});
    }
    std::vector<uint32_t> stepOf(messages_.size(), UINT32_MAX); // of the receive
    for (int32_t rank = 0; rank < layout_.world; ++rank) {
      std::vector<Step> &steps = module_.schedule.ranks[rank].steps;
      std::sort(sides[rank].begin(), sides[rank].end(), [](const Side &a, const Side &b) {
        return std::tie(a.round, a.receive, a.distance, a.message) <
               std::tie(b.round, b.receive, b.distance, b.message);
      });
      steps.reserve(steps.size() + sides[rank].size());
      for (const Side &side : sides[rank]) {
        const Message &message = messages_[side.message];
        Step &step = steps.emplace_back();
        step.kind = side.receive ? StepKind::recv : StepKind::send;
        step.round = message.round;
        step.peer = side.receive ? message.from : message.to;
        step.message = side.message;
        step.bytes = message.bytes;
        step.chunk = message.chunk;
        for (const Grant &grant : message.grants)
          addOperands(rank, grant, side.receive, stepOf, step);
        std::sort(step.after.begin(), step.after.end());
        step.after.erase(std::unique(step.after.begin(), step.after.end()), step.after.end());
        if (side.receive)
          stepOf[side.message] = static_cast<uint32_t>(steps.size() - 1);
      }
    }
  }

  void addOperands(int32_t rank, const Grant &grant, bool receive, const std::vector<uint32_t> &stepOf, Step &step) {
    const llvm::ArrayRef<Piece> pieces = piecesOf(grant.stream);
    const auto first = std::partition_point(pieces.begin(), pieces.end(),
                                            [&](const Piece &piece) { return piece.begin < grant.begin; });
    const int32_t after = streams_[grant.stream].hops[grant.hop].after;
    const bool onRoute = grant.hop > 0 || read(grant.stream);
    for (auto piece = first; piece != pieces.end() && piece->begin < grant.end; ++piece) {
      const Descriptor &d = piece->descriptor;
      if (receive)
        step.outputs.push_back(onRoute ? passed(rank, d, routeHop(grant).to) : output(rank, d));
      else
        step.inputs.push_back(onRoute ? passed(rank, d, routeHop(grant).from) : input(rank, d));
    }
    if (receive || !onRoute)
      return;
    if (after < 0) {
      step.after.push_back(readStep_[grant.stream]);
      return;
    }
    const auto &list = brought_[grant.stream][after]; // ascending ends
    auto bringing = std::upper_bound(list.begin(), list.end(), grant.begin,
                                     [](int64_t begin, const auto &each) { return begin < each.first; });
    for (; bringing != list.end(); ++bringing) {
      step.after.push_back(stepOf[bringing->second]);
      if (bringing->first >= grant.end)
        break;
    }
  }

  Operand input(int32_t rank, const Descriptor &d) {
    return {firstBuffer_[rank].at({0, d.source}) + d.sourceInstance, shape(rank, d.shape, false), d.sourceOffset};
  }
  Operand output(int32_t rank, const Descriptor &d) {
    return {firstBuffer_[rank].at({d.endpoint, d.target}) + d.targetInstance, shape(rank, d.shape, true),
            d.targetOffset};
  }
  /// The hop of a grant that is on the stream's route.
  const Hop &routeHop(const Grant &grant) const {
    return module_.transfers.routes[ways_[grant.stream].route][grant.hop - (read(grant.stream) ? 0 : 1)];
  }
  /// The target's operand on another place of the route: the same positions of the same param.
  Operand passed(int32_t rank, const Descriptor &d, int32_t place) {
    if (place == d.target)
      return output(rank, d);
    const BufferRun &run = runOf(rankOf(d.endpoint, d.target), d);
    const auto &runs = module_.schedule.ranks[rank].buffers;
    const auto same = std::find_if(runs.begin(), runs.end(), [&](const BufferRun &r) {
      return r.endpoint == d.endpoint && r.place == place && r.param == run.param;
    });
    const uint32_t instance =
        firstBuffer_[rankOf(d.endpoint, d.target)].at({d.endpoint, d.target}) + d.targetInstance - run.first;
    return {same->first + instance, shape(rank, d.shape, true), d.targetOffset};
  }
  const BufferRun &runOf(int32_t rank, const Descriptor &d) const {
    const uint32_t buffer = firstBuffer_[rank].at({d.endpoint, d.target}) + d.targetInstance;
    const auto &runs = module_.schedule.ranks[rank].buffers;
    return *std::prev(
        std::upper_bound(runs.begin(), runs.end(), buffer, [](uint32_t b, const BufferRun &r) { return b < r.first; }));
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

  Module &module_;
  const Layout &layout_;
  Interner<Shape> shapes_;
  Cutter cutter_;
  std::vector<Descriptor> local_;
  std::vector<Way> ways_;          // by stream
  std::vector<uint32_t> readStep_; // by stream: the step that reads it from files
  std::vector<Stream> streams_;
  std::vector<Descriptor> descriptors_;                                         // stream after stream
  std::vector<size_t> firsts_;                                                  // of each stream
  std::vector<Piece> pieces_;                                                   // stream after stream
  std::vector<size_t> firstPiece_;                                              // of each stream
  std::vector<std::vector<std::vector<std::pair<int64_t, uint32_t>>>> brought_; // by stream and hop: end, message
  std::vector<Message> messages_;
  uint32_t rounds_ = 0;
  std::vector<std::map<std::pair<int64_t, int64_t>, uint32_t>> firstBuffer_; // by rank: (endpoint, place) -> buffer
  std::vector<Interner<OperandShape>> operandShapes_;
  std::vector<std::unordered_map<uint32_t, uint32_t>>
      operandNumbers_; // by rank: descriptor shape and side -> operand shape
};

} // namespace

std::string schedule(Module &module) { return Scheduler(module).run(); }

} // namespace reshard
