// SPDX-License-Identifier: Apache-2.0
// Parses the output of text.cpp, construct by construct in the same order. Memory is proportional to the text: no
// number in it determines the size of an allocation.

#include "ir/text.h"

#include "llvm/Support/raw_ostream.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::ir {

namespace {

/// The first syntax error.
struct ParseError {
  size_t offset; // bytes from the start of the text
  std::string message;
};

/// Consumes tokens from the front of a text; throws ParseError if the next token is not the expected one. It does not
/// recurse, and its memory is proportional to the text.
class Lexer {
public:
  explicit Lexer(std::string_view text) : text_(text) {}

  [[noreturn]] void fail(size_t at, const std::string &message) { throw ParseError{at, message}; }

  void skip() {
    while (at_ < text_.size()) {
      if (std::isspace(static_cast<unsigned char>(text_[at_])))
        ++at_;
      else if (text_.substr(at_, 2) == "//")
        at_ = std::min(text_.find('\n', at_), text_.size());
      else
        break;
    }
  }
  size_t position() {
    skip();
    return at_;
  }
  static bool isWordCharacter(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-'; }

  /// The next token, not consumed: a word or one character.
  std::string_view peek() {
    skip();
    if (at_ >= text_.size())
      return "the end";
    size_t end = at_;
    while (end < text_.size() && isWordCharacter(text_[end]))
      ++end;
    return text_.substr(at_, std::max<size_t>(end - at_, 1));
  }
  bool is(std::string_view token) {
    skip();
    if (text_.substr(at_, token.size()) != token)
      return false;
    return !isWordCharacter(token.back()) || at_ + token.size() >= text_.size() ||
           !isWordCharacter(text_[at_ + token.size()]);
  }
  bool take(std::string_view token) {
    if (!is(token))
      return false;
    at_ += token.size();
    return true;
  }
  void expect(std::string_view token) {
    if (!take(token))
      fail(position(), "expected '" + std::string(token) + "', found '" + std::string(peek()) + "'");
  }
  std::string word() {
    skip();
    const std::string_view token = peek();
    if (at_ >= text_.size() || !isWordCharacter(token[0]))
      fail(at_, "expected a word, found '" + std::string(token) + "'");
    at_ += token.size();
    return std::string(token);
  }
  int64_t number() {
    skip();
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc())
      fail(at_, "expected a number" + std::string(error == std::errc::result_out_of_range ? " below 2^63" : "") +
                    ", found '" + std::string(peek()) + "'");
    at_ = static_cast<size_t>(end - text_.data());
    return value;
  }
  int64_t after(std::string_view token) {
    expect(token);
    return number();
  }
  /// An index of one of `count` items; `what` names the item in the error.
  template <class Integer> void reference(Integer &value, size_t count, const char *what) {
    const size_t at = position();
    const int64_t n = number();
    if (n < 0 || static_cast<uint64_t>(n) >= count)
      fail(at, "expected the number of one of " + std::to_string(count) + " items of kind '" + what + "', found " +
                   std::to_string(n));
    value = static_cast<Integer>(n);
  }
  template <class Integer> void bounded(Integer &value) {
    const size_t at = position();
    const int64_t n = number();
    if (static_cast<int64_t>(static_cast<Integer>(n)) != n)
      fail(at, "expected a number from " + std::to_string(std::numeric_limits<Integer>::min()) + " to " +
                   std::to_string(std::numeric_limits<Integer>::max()) + ", found " + std::to_string(n));
    value = static_cast<Integer>(n);
  }
  std::string string() {
    expect("\"");
    std::string result;
    while (at_ < text_.size() && text_[at_] != '"') {
      char c = text_[at_++];
      if (c == '\\' && at_ < text_.size()) {
        c = text_[at_++];
        if (c == 'x' && at_ + 2 <= text_.size()) {
          unsigned value = 0;
          if (std::from_chars(text_.data() + at_, text_.data() + at_ + 2, value, 16).ptr != text_.data() + at_ + 2)
            fail(at_, "expected two hexadecimal digits after '\\x', found '" + std::string(text_.substr(at_, 2)) + "'");
          c = static_cast<char>(value);
          at_ += 2;
        }
      }
      result += c;
    }
    if (at_ >= text_.size())
      fail(at_, "expected '\"' at the end of the string, found the end of the text");
    ++at_;
    return result;
  }
  template <class Integer> std::vector<Integer> list() {
    std::vector<Integer> numbers;
    expect("[");
    while (!take("]")) {
      if (!numbers.empty())
        expect(",");
      bounded(numbers.emplace_back());
    }
    return numbers;
  }
  /// A list in which a:b means a, a+1 … b-1. Only here is the result larger than the text, so the sum of all ranges is
  /// limited.
  std::vector<int32_t> ranges() {
    constexpr int64_t kMaxTotal = int64_t{1} << 26;
    std::vector<int32_t> numbers;
    expect("[");
    while (!take("]")) {
      if (!numbers.empty())
        expect(",");
      const size_t at = position();
      int32_t first = 0;
      bounded(first);
      const int64_t last = take(":") ? number() : int64_t{first} + 1;
      if (last <= first || last - first > kMaxTotal - ranged_ || last > INT32_MAX)
        fail(at, "expected an ascending range below 2^31, all ranges of the text together at most " +
                     std::to_string(kMaxTotal) + " numbers, found " + std::to_string(first) + ":" +
                     std::to_string(last));
      ranged_ += last - first;
      for (int64_t n = first; n < last; ++n)
        numbers.push_back(static_cast<int32_t>(n));
    }
    return numbers;
  }

protected:
  std::string_view text_;
  size_t at_ = 0;

private:
  int64_t ranged_ = 0; // numbers in all ranges so far
};

/// Parses the layout level.
class LayoutParser : protected Lexer {
protected:
  LayoutParser(std::string_view text, Layout &layout) : Lexer(text), layout_(layout) {}

  void files() {
    if (!take("files"))
      return;
    layout_.files.megatron = take("megatron");
    expect("exchange");
    const size_t at = position();
    const std::string text = string();
    const auto exchange = parseExchange(text);
    if (!exchange)
      fail(at, "expected auto, nodes, p2p, broadcast or gather-rounds, found '" + text + "'");
    layout_.files.exchange = *exchange;
    expect("group");
    while (is("\""))
      layout_.files.group.push_back(string());
  }

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
    const size_t at = position();
    const std::string text = word();
    const auto type = parseDType(text);
    if (!type)
      fail(at, "expected a dtype, found '" + text + "'");
    return *type;
  }
  unsigned variable() {
    const size_t at = position();
    const std::string text = word();
    for (unsigned v = 0; v < layout_.variables.size(); ++v)
      if (layout_.variables[v].name == text)
        return v;
    fail(at, "expected an index variable, found '" + text + "'");
  }
  unsigned axis(const Endpoint &endpoint) {
    const size_t at = position();
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
  IndexMap indexMap() {
    IndexMap result;
    if (take("none"))
      return result;
    while (take("[")) {
      IndexBlock s;
      const size_t at = position();
      s.from = number();
      expect(":");
      if (__builtin_sub_overflow(number(), s.from, &s.length) || s.length <= 0)
        fail(at, "expected a range that is not empty, found " + std::to_string(s.from) + ":…");
      const bool periodic = take("step");
      if (periodic) {
        s.fromStep = number();
        expect("x");
        s.count = number();
        if (s.count < 1)
          fail(at, "expected a count of at least 1, found " + std::to_string(s.count));
      }
      expect("->");
      s.to = number();
      if (periodic)
        s.toStep = after("step");
      expect("]");
      result.push_back(s);
    }
    if (result.empty())
      fail(position(), "expected index blocks '[…]' or 'none', found '" + std::string(peek()) + "'");
    return result;
  }
  /// Items of one kind are numbered from 0: reads the number of the next one.
  void counted(size_t have, const char *what) {
    const size_t at = position();
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
      counted(layout_.tensorPatterns.size(), "tensor");
      TensorPattern pattern;
      pattern.name = string();
      pattern.dtype = dtype();
      pattern.shape = list<int64_t>();
      while (take("for")) {
        pattern.variables.push_back(variable());
        pattern.exists.push_back(indexMap());
        expect(";");
      }
      layout_.tensorPatterns.push_back(std::move(pattern));
    }
    layout_.foldsCopies = take("fold-copies");
    while (take("unused"))
      layout_.unused.push_back(string());
    while (take("endpoint"))
      endpoint();
    if (layout_.endpoints.empty())
      fail(position(), "expected 'endpoint', found '" + std::string(peek()) + "'");
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
    if (take("format")) {
      const size_t at = position();
      const std::string text = string();
      const auto format = storageFormatNamed(text);
      if (!format)
        fail(at, "expected a storage format, found '" + text + "'");
      endpoint.format = *format;
    }
    if (take("replicas"))
      endpoint.replicas = number();
    while (take("axis")) {
      Axis axis;
      axis.name = word();
      axis.size = number();
      axis.stride = after("stride");
      endpoint.axes.push_back(axis);
    }
    while (take("sharding")) {
      expect("#");
      counted(endpoint.shardings.size(), "sharding");
      expect("over");
      Sharding sharding;
      sharding.axes = axes(endpoint);
      if (take("unit"))
        sharding.unit = number();
      while (take("|"))
        sharding.at.push_back(indexMap());
      endpoint.shardings.push_back(std::move(sharding));
    }
    while (take("placement")) {
      const size_t at = position();
      const unsigned number = variable();
      if (number != endpoint.placement.size())
        fail(at, "expected the placements in the order of the index variables, found that of number " +
                     std::to_string(number) + " after " + std::to_string(endpoint.placement.size()));
      expect("#");
      reference(endpoint.placement.emplace_back(), endpoint.shardings.size(), "sharding");
    }
    while (take("authority"))
      endpoint.authority.push_back(presence(endpoint));
    if (take("epochs"))
      endpoint.epochs = list<uint32_t>();
    if (take("relabeled")) {
      endpoint.relabeled = number();
      expect("bytes");
    }
    while (take("omitted"))
      endpoint.omitted.push_back(string());
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
    if (take("storage"))
      param.storageDtype = dtype();
    for (const OverflowRule rule : {OverflowRule::saturate, OverflowRule::infinity})
      if (take(kOverflowRuleNames[static_cast<size_t>(rule)]))
        param.overflow = rule;
    param.derived = take("derived");
    const bool staged = take("staged");
    if (take("view"))
      view(param, staged);
    else if (staged)
      fail(position(), "expected 'view', found '" + std::string(peek()) + "'");
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
      reference(param.instances.emplace_back(), endpoint.shardings.size(), "sharding");
    }
    while (take("at"))
      param.presence.push_back(presence(endpoint));
    if (take("refresh"))
      param.refresh = string();
    if (take("transform"))
      param.transform = string();
    if (take("from"))
      param.origin = string();
    while (is("holds") || is("zeros")) {
      Part part;
      if (take("holds")) {
        expect("%");
        reference(part.pattern, layout_.tensorPatterns.size(), "tensor");
      } else {
        expect("zeros");
      }
      while (take("#")) {
        PartDimension dimension;
        reference(dimension.sharding, endpoint.shardings.size(), "sharding");
        expect("->");
        if (!take("name"))
          reference(dimension.param, param.shape.size(), "dimension");
        part.dimensions.push_back(dimension);
      }
      param.parts.push_back(std::move(part));
    }
    endpoint.params.push_back(std::move(param));
  }

  void view(Param &param, bool staged) {
    QuantizedView view;
    view.staged = staged;
    size_t at = position();
    const std::string kindName = word();
    if (const auto kind = parseViewKind(kindName))
      view.kind = *kind;
    else
      fail(at, "expected elements, codes, scales, plain_scales or amax, found '" + kindName + "'");
    at = position();
    const std::string formatName = word();
    if (const auto format = quantizationNamed(formatName))
      view.format = *format;
    else
      fail(at, "expected " + formatNames() + ", found '" + formatName + "'");
    for (size_t layout = 1; layout < std::size(kScaleLayoutNames); ++layout)
      if (take(kScaleLayoutNames[layout]))
        view.scaleLayout = static_cast<ScaleLayout>(layout);
    expect("of");
    for (unsigned *number : {&view.codes, &view.scales, &view.tensorScale}) {
      expect("$");
      *number = static_cast<unsigned>(this->number());
    }
    if (take("part"))
      view.part = static_cast<unsigned>(number());
    if (take("over"))
      view.amaxDimensions = static_cast<unsigned>(number());
    param.view = view;
  }

  /// "a, b or c"
  static std::string formatNames() {
    std::string names;
    for (const QuantizedFormat &format : kQuantizedFormats)
      names += (names.empty()                                ? ""
                : &format == std::end(kQuantizedFormats) - 1 ? " or "
                                                             : ", ") +
               std::string(format.name);
    return names;
  }

  Layout &layout_;
};

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
