// SPDX-License-Identifier: Apache-2.0
// Parses the output of text.cpp, construct by construct in the same order. Memory is proportional to the text: no
// number in it determines the size of an allocation.

#include "ir/layout_parser.h"
#include "ir/text.h"

#include "llvm/Support/raw_ostream.h"

#include <algorithm>

namespace reshard::ir {

namespace {

class Parser : LayoutParser {
public:
  Parser(std::string_view text, Module &module) : LayoutParser(text, module.layout), module_(module) {}

  void run() {
    expect("module");
    layout_.model = string();
    const size_t at = position();
    const std::string level = word();
    if (level == "layout")
      module_.level = Level::layout;
    else if (level == "transfer")
      module_.level = Level::transfer;
    else if (level == "schedule")
      module_.level = Level::schedule;
    else
      fail(at, "expected layout, transfer or schedule, found '" + level + "'");
    layout_.world = after("world");
    layout_.stagingLimit = after("staging");
    layout_.topology.ranksPerNode = after("ranks-per-node");
    expect("fingerprint");
    module_.fingerprint = string();
    topology();
    files();
    layout();
    if (module_.level >= Level::transfer)
      transfers();
    if (module_.level >= Level::schedule)
      schedule();
    skip();
    if (at_ < text_.size())
      fail(at_, "expected the end or another item of this level, found '" + std::string(peek()) + "'");
  }

private:
  void transfers() {
    Transfers &t = module_.transfers;
    while (take("relation")) {
      expect("~");
      counted(t.relations.size(), "relation");
      t.relations.push_back(indexMap());
    }
    while (take("overlap"))
      overlap();
    while (take("route"))
      route();
    while (take("transfer"))
      transfer();
    while (take("shape"))
      shape();
    while (take("descriptor"))
      descriptor();
  }

  void overlap() {
    Transfers &t = module_.transfers;
    counted(t.overlaps.size(), "overlap");
    Overlap overlap;
    if (!take("zeros")) {
      expect("%");
      reference(overlap.pattern, layout_.tensorPatterns.size(), "tensor");
    }
    expect("->");
    expect("@");
    reference(overlap.endpoint, layout_.endpoints.size(), "endpoint");
    const Endpoint &target = layout_.endpoints[overlap.endpoint];
    expect("$");
    reference(overlap.param, target.params.size(), "param");
    expect(".");
    reference(overlap.part, target.params[overlap.param].parts.size(), "part");
    expect("on");
    overlap.targets = MeshRanks(llvm::ArrayRef(ranges()));
    expect(",");
    overlap.tensors = number();
    expect("x");
    overlap.bytes = number();
    expect("bytes");
    expect("from");
    do {
      ReplicaGroup replicaGroup;
      const Endpoint &source = layout_.endpoints[0];
      expect("$");
      reference(replicaGroup.param, overlap.pattern < 0 ? 1 : source.params.size(), "param");
      expect(".");
      reference(replicaGroup.part, overlap.pattern < 0 ? 1 : source.params[replicaGroup.param].parts.size(), "part");
      expect("on");
      replicaGroup.meshRanks = MeshRanks(llvm::ArrayRef(ranges()));
      expect("by");
      while (take("~"))
        reference(replicaGroup.relations.emplace_back(), t.relations.size(), "relation");
      overlap.replicaGroups.push_back(std::move(replicaGroup));
    } while (take("from"));
    t.overlaps.push_back(std::move(overlap));
  }

  void route() {
    Transfers &t = module_.transfers;
    counted(t.routes.size(), "route");
    Route route;
    do {
      Hop hop;
      bounded(hop.from);
      expect("->");
      bounded(hop.to);
      route.push_back(hop);
    } while (take(","));
    t.routes.push_back(std::move(route));
  }

  void transfer() {
    Transfers &t = module_.transfers;
    Transfer transfer;
    reference(transfer.overlap, t.overlaps.size(), "overlap");
    const Overlap &overlap = t.overlaps[transfer.overlap];
    expect("tensors");
    bounded(transfer.first);
    expect(":");
    const size_t at = position();
    uint32_t last = 0;
    bounded(last);
    if (last <= transfer.first || last > overlap.tensors)
      fail(at, "expected an ascending range of the overlap's " + std::to_string(overlap.tensors) + " tensors, found " +
                   std::to_string(transfer.first) + ":" + std::to_string(last));
    transfer.count = last - transfer.first;
    if (take("dimension")) {
      reference(transfer.dimension, overlap.replicaGroups[0].relations.size(), "dimension");
      transfer.begin = after("local");
      expect(":");
      transfer.end = number();
      if (transfer.begin < 0 || transfer.end <= transfer.begin)
        fail(position(), "expected an ascending range of local positions from 0 on, found " +
                             std::to_string(transfer.begin) + ":" + std::to_string(transfer.end));
    }
    if (take("replica-group")) {
      reference(transfer.replicaGroup, overlap.replicaGroups.size(), "replica group");
      expect("from");
      bounded(transfer.source);
    }
    expect("to");
    bounded(transfer.target);
    if (take("route"))
      reference(transfer.route, t.routes.size(), "route");
    t.transfers.push_back(transfer);
  }

  void shape() {
    Transfers &t = module_.transfers;
    expect("^");
    counted(t.shapes.size(), "shape");
    Shape shape;
    shape.rowBytes = after("row");
    while (take("x")) {
      Loop loop;
      loop.count = number();
      loop.sourceStride = after("bytes");
      loop.targetStride = after("->");
      loop.sourceStep = after("instances");
      loop.targetStep = after("->");
      shape.loops.push_back(loop);
    }
    t.shapes.push_back(std::move(shape));
  }

  void descriptor() {
    Transfers &t = module_.transfers;
    Descriptor d;
    expect("^");
    reference(d.shape, t.shapes.size(), "shape");
    expect("from");
    bounded(d.source);
    expect("instance");
    bounded(d.sourceInstance);
    d.sourceOffset = after("+");
    expect("to");
    expect("@");
    reference(d.endpoint, layout_.endpoints.size(), "endpoint");
    bounded(d.target);
    expect("instance");
    bounded(d.targetInstance);
    d.targetOffset = after("+");
    if (take("route"))
      reference(d.route, t.routes.size(), "route");
    t.descriptors.push_back(d);
  }

  void schedule() {
    Schedule &s = module_.schedule;
    expect("schedule");
    bounded(s.rounds);
    expect("rounds");
    expect(",");
    bounded(s.messages);
    expect("messages");
    while (take("rank")) {
      counted(s.ranks.size(), "rank");
      RankSchedule rank;
      rank.rank = static_cast<int32_t>(s.ranks.size());
      rank.arenaBytes = after("arena");
      while (take("buffers")) {
        BufferRange range;
        buffer(range.first);
        expect("x");
        bounded(range.count);
        range.bytes = after("of");
        expect("bytes");
        expect("@");
        reference(range.endpoint, layout_.endpoints.size(), "endpoint");
        reference(range.meshRank, layout_.endpoints[range.endpoint].ranks.size(), "mesh rank");
        expect("$");
        reference(range.param, layout_.endpoints[range.endpoint].params.size(), "param");
        rank.buffers.push_back(range);
      }
      while (take("shape")) {
        expect("^");
        counted(rank.shapes.size(), "shape");
        OperandShape shape;
        shape.rowBytes = after("row");
        while (take("x")) {
          OperandLoop loop;
          loop.count = number();
          loop.stride = after("bytes");
          loop.bufferStep = after("buffers");
          shape.loops.push_back(loop);
        }
        rank.shapes.push_back(std::move(shape));
      }
      while (step(rank)) {
      }
      s.ranks.push_back(std::move(rank));
    }
  }

  bool step(RankSchedule &rank) {
    Step step;
    bool found = false;
    for (int kind = 0; kind <= static_cast<int>(StepKind::reduce) && !found; ++kind)
      if (take(name(static_cast<StepKind>(kind)))) {
        step.kind = static_cast<StepKind>(kind);
        found = true;
      }
    if (!found)
      return false;
    expect("round");
    bounded(step.round);
    step.bytes = number();
    expect("bytes");
    if (take("as")) {
      expect("chunks");
      step.chunk = after("of");
    }
    if (take("message")) {
      bounded(step.message);
      expect("peer");
      bounded(step.peer);
    }
    if (take("staging"))
      step.staging = number();
    if (take("slot"))
      bounded(step.slot);
    if (take("level"))
      bounded(step.level);
    if (take("after")) {
      const auto after = list<uint32_t>();
      step.after.assign(after.begin(), after.end());
    }
    operands(rank, "in", step.inputs);
    operands(rank, "out", step.outputs);
    rank.steps.push_back(std::move(step));
    return true;
  }

  /// A buffer: the letter b and its number.
  void buffer(uint32_t &number) {
    const size_t at = position();
    if (text_.substr(at, 1) != "b")
      fail(at, "expected a buffer ('b' and its number), found '" + std::string(peek()) + "'");
    ++at_;
    bounded(number);
  }

  void operands(const RankSchedule &rank, const char *what, Operands &list) {
    while (take(what)) {
      Operand operand;
      buffer(operand.buffer);
      operand.offset = after("+");
      expect("^");
      reference(operand.shape, rank.shapes.size(), "shape");
      list.push_back(operand);
    }
  }

  Module &module_;
};

} // namespace

void SyntaxError::log(llvm::raw_ostream &out) const { out << line_ << ":" << column_ << ": " << description_; }

llvm::Expected<Module> parse(std::string_view text) {
  Module module;
  try {
    Parser(text, module).run();
  } catch (const ParseError &error) {
    const std::string_view before = text.substr(0, error.offset);
    const auto line = static_cast<size_t>(std::count(before.begin(), before.end(), '\n')) + 1;
    const size_t start = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
    return llvm::make_error<SyntaxError>(line, error.offset - start + 1, error.message);
  }
  return module;
}

} // namespace reshard::ir
