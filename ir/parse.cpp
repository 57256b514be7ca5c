// Reading what text.cpp prints, construct by construct in the same order. Memory grows with the text alone: no number in it makes
// anything be allocated.

#include "ir/lexer.h"
#include "ir/text.h"

#include <algorithm>

namespace reshard::ir {

namespace {

class Parser : Lexer {
public:
  Parser(std::string_view text, Module &module) : Lexer(text), module_(module), layout_(module.layout) {}

  void run() {
    expect("module");
    layout_.model = string();
    const size_t at = place();
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
  void topology() {
    if (!take("topology"))
      return;
    Topology &t = layout_.topology;
    t.linkRate = after("link");
    t.linkLatency = after("latency");
    t.nicsPerNode = after("nics");
    t.nicRate = after("rate");
    t.nicLatency = after("latency");
    t.copyRate = after("copy");
  }

  DType dtype() {
    const size_t at = place();
    const std::string text = word();
    const auto type = parseDType(text);
    if (!type)
      fail(at, "expected a dtype, found '" + text + "'");
    return *type;
  }
  unsigned variable() {
    const size_t at = place();
    const std::string text = word();
    for (unsigned v = 0; v < layout_.variables.size(); ++v)
      if (layout_.variables[v].name == text)
        return v;
    fail(at, "expected an index variable, found '" + text + "'");
  }
  unsigned axis(const Endpoint &endpoint) {
    const size_t at = place();
    const std::string text = word();
    for (unsigned a = 0; a < endpoint.axes.size(); ++a)
      if (endpoint.axes[a].name == text)
        return a;
    fail(at, "expected an axis of this endpoint, found '" + text + "'");
  }
  std::vector<unsigned> axes(const Endpoint &endpoint) {
    std::vector<unsigned> result;
    expect("(");
    while (!take(")")) {
      if (!result.empty())
        expect(",");
      result.push_back(axis(endpoint));
    }
    return result;
  }
  Segments segments() {
    Segments result;
    if (take("none"))
      return result;
    while (take("[")) {
      Segment s;
      const size_t at = place();
      s.from = number();
      expect(":");
      if (__builtin_sub_overflow(number(), s.from, &s.length) || s.length <= 0)
        fail(at, "expected a range that is not empty");
      const bool periodic = take("step");
      if (periodic) {
        s.fromStep = number();
        expect("x");
        s.count = number();
        if (s.count < 1)
          fail(at, "expected a count of at least 1");
      }
      expect("->");
      s.to = number();
      if (periodic)
        s.toStep = after("step");
      expect("]");
      result.push_back(s);
    }
    if (result.empty())
      fail(place(), "expected segments or 'none', found '" + std::string(peek()) + "'");
    return result;
  }
  void counted(size_t have, const char *what) {
    const size_t at = place();
    const int64_t n = number();
    if (n != static_cast<int64_t>(have))
      fail(at, "expected " + std::string(what) + " " + std::to_string(have) + ", found " + std::to_string(n));
  }

  void layout() {
    while (take("index")) {
      IndexVariable variable;
      variable.name = word();
      variable.size = number();
      layout_.variables.push_back(variable);
    }
    while (take("tensor")) {
      expect("%");
      counted(layout_.families.size(), "tensor");
      Family family;
      family.name = string();
      family.dtype = dtype();
      family.shape = list<int64_t>();
      while (take("for")) {
        family.variables.push_back(variable());
        family.exists.push_back(segments());
        expect(";");
      }
      layout_.families.push_back(std::move(family));
    }
    while (take("untaken"))
      layout_.untaken.push_back(string());
    while (take("endpoint"))
      endpoint();
    if (layout_.endpoints.empty())
      fail(place(), "expected 'endpoint', found '" + std::string(peek()) + "'");
  }

  void endpoint() {
    Endpoint endpoint;
    endpoint.role = string();
    expect("layout");
    endpoint.layout = string();
    endpoint.checkpoint = take("checkpoint");
    endpoint.storage = endpoint.checkpoint || take("files");
    if (!endpoint.storage)
      expect("ranks");
    endpoint.ranks = ranges();
    if (endpoint.storage) {
      expect("in");
      endpoint.directory = string();
    }
    while (take("axis")) {
      Axis axis;
      axis.name = word();
      axis.size = number();
      axis.stride = after("stride");
      endpoint.axes.push_back(axis);
    }
    while (take("share")) {
      expect("#");
      counted(endpoint.shares.size(), "share");
      expect("over");
      Share share;
      share.axes = axes(endpoint);
      if (take("unit"))
        share.unit = number();
      while (take("|"))
        share.at.push_back(segments());
      endpoint.shares.push_back(std::move(share));
    }
    while (take("place")) {
      const size_t at = place();
      if (variable() != endpoint.placement.size())
        fail(at, "expected the index variables in order");
      expect("#");
      reference(endpoint.placement.emplace_back(), endpoint.shares.size(), "share");
    }
    while (take("authority"))
      endpoint.authority.push_back(presence(endpoint));
    if (take("generations"))
      endpoint.generations = list<uint32_t>();
    while (take("without"))
      endpoint.leftOut.push_back(string());
    while (take("param"))
      param(endpoint);
    layout_.endpoints.push_back(std::move(endpoint));
  }

  Presence presence(const Endpoint &endpoint) {
    Presence rule;
    rule.axis = axis(endpoint);
    rule.coordinates = list<int64_t>();
    return rule;
  }

  void param(Endpoint &endpoint) {
    expect("$");
    counted(endpoint.params.size(), "param");
    Param param;
    param.name = string();
    param.dtype = dtype();
    expect("[");
    while (!take("]")) {
      if (!param.shape.empty())
        expect(",");
      Extent extent;
      if (is("(")) {
        extent.axes = axes(endpoint);
        extent.at = list<int64_t>();
      } else {
        extent.at = {number()};
      }
      param.shape.push_back(std::move(extent));
    }
    while (take("for")) {
      param.variables.push_back(variable());
      expect("#");
      reference(param.instances.emplace_back(), endpoint.shares.size(), "share");
    }
    while (take("at"))
      param.presence.push_back(presence(endpoint));
    if (take("refresh"))
      param.refresh = string();
    if (take("from"))
      param.origin = string();
    while (is("holds") || is("zeros")) {
      Part part;
      if (take("holds")) {
        expect("%");
        reference(part.family, layout_.families.size(), "tensor");
      } else {
        expect("zeros");
      }
      while (take("#")) {
        PartDimension dimension;
        reference(dimension.share, endpoint.shares.size(), "share");
        expect("->");
        if (!take("name"))
          reference(dimension.param, param.shape.size(), "dimension");
        part.dimensions.push_back(dimension);
      }
      param.parts.push_back(std::move(part));
    }
    endpoint.params.push_back(std::move(param));
  }

  void transfers() {
    Transfers &t = module_.transfers;
    while (take("relation")) {
      expect("~");
      counted(t.relations.size(), "relation");
      t.relations.push_back(segments());
    }
    while (take("tile"))
      tile();
    while (take("transfer")) {
      Transfer transfer;
      reference(transfer.tile, t.tiles.size(), "tile");
      expect("tensors");
      bounded(transfer.first);
      expect(":");
      const size_t at = place();
      uint32_t last = 0;
      bounded(last);
      if (last <= transfer.first || last > t.tiles[transfer.tile].tensors)
        fail(at, "expected tensors of the tile, of which there are " + std::to_string(t.tiles[transfer.tile].tensors));
      transfer.count = last - transfer.first;
      expect("holder");
      reference(transfer.holder, t.tiles[transfer.tile].holders.size(), "holder");
      expect("from");
      bounded(transfer.source);
      expect("to");
      bounded(transfer.target);
      t.transfers.push_back(transfer);
    }
    while (take("shape")) {
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
    while (take("move")) {
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
      t.descriptors.push_back(d);
    }
  }

  void tile() {
    Transfers &t = module_.transfers;
    counted(t.tiles.size(), "tile");
    Tile tile;
    if (!take("zeros")) {
      expect("%");
      reference(tile.family, layout_.families.size(), "tensor");
    }
    expect("->");
    expect("@");
    reference(tile.endpoint, layout_.endpoints.size(), "endpoint");
    const Endpoint &target = layout_.endpoints[tile.endpoint];
    expect("$");
    reference(tile.param, target.params.size(), "param");
    expect(".");
    reference(tile.part, target.params[tile.param].parts.size(), "part");
    expect("on");
    tile.targets = ranges();
    expect(",");
    tile.tensors = number();
    expect("x");
    tile.bytes = number();
    expect("bytes");
    while (take("from")) {
      Holder holder;
      const Endpoint &source = layout_.endpoints[0];
      expect("$");
      reference(holder.param, tile.family < 0 ? 1 : source.params.size(), "param");
      expect(".");
      reference(holder.part, tile.family < 0 ? 1 : source.params[holder.param].parts.size(), "part");
      expect("on");
      holder.places = ranges();
      expect("by");
      while (take("~"))
        reference(holder.relations.emplace_back(), t.relations.size(), "relation");
      tile.holders.push_back(std::move(holder));
    }
    t.tiles.push_back(std::move(tile));
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
        BufferRun run;
        const size_t at = place();
        if (text_.substr(at, 1) != "b")
          fail(at, "expected a buffer");
        ++at_;
        bounded(run.first);
        expect("x");
        bounded(run.count);
        run.bytes = after("of");
        expect("bytes");
        expect("@");
        reference(run.endpoint, layout_.endpoints.size(), "endpoint");
        reference(run.place, layout_.endpoints[run.endpoint].ranks.size(), "place");
        expect("$");
        reference(run.param, layout_.endpoints[run.endpoint].params.size(), "param");
        rank.buffers.push_back(run);
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
    for (int kind = 0; kind <= static_cast<int>(StepKind::hook) && !found; ++kind)
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
    if (take("message")) {
      bounded(step.message);
      expect("peer");
      bounded(step.peer);
    }
    if (take("staging"))
      step.staging = number();
    if (take("after"))
      step.after = list<uint32_t>();
    operands(rank, "in", step.inputs);
    operands(rank, "out", step.outputs);
    rank.steps.push_back(std::move(step));
    return true;
  }

  void operands(const RankSchedule &rank, const char *what, std::vector<Operand> &list) {
    while (take(what)) {
      Operand operand;
      const size_t at = place();
      if (text_.substr(at, 1) != "b")
        fail(at, "expected a buffer");
      ++at_;
      bounded(operand.buffer);
      operand.offset = after("+");
      expect("^");
      reference(operand.shape, rank.shapes.size(), "shape");
      list.push_back(operand);
    }
  }

  Module &module_;
  Layout &layout_;
};

} // namespace

bool parse(std::string_view text, Module &module, size_t &line, size_t &column, std::string &message) {
  module = {};
  try {
    Parser(text, module).run();
    return true;
  } catch (const ParseError &error) {
    const std::string_view before = text.substr(0, error.offset);
    line = static_cast<size_t>(std::count(before.begin(), before.end(), '\n')) + 1;
    column = error.offset - (before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1) + 1;
    message = error.message;
    module = {};
    return false;
  }
}

} // namespace reshard::ir
