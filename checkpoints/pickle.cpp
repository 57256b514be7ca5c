// SPDX-License-Identifier: Apache-2.0
// A stack machine whose opcodes build a table of values in place of Python objects. It refuses every opcode and every
// global that is not in its tables.
#include "checkpoints/pickle.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>

namespace reshard::checkpoints {

namespace {

/// The opcodes that pickles of protocols 2 to 5 of PyTorch and Megatron-Core use, by their names in Python's pickle.py.
enum Opcode : uint8_t {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersId = 'Q',
  kReduce = 'R',
  kBinUnicode = 'X',
  kShortBinBytes = 'C',
  kBinBytes = 'B',
  kBinFloat = 'G',
  kAppend = 'a',
  kAppends = 'e',
  kBuild = 'b',
  kGlobal = 'c',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kSetItems = 'u',
  kTuple = 't',
  kEmptyList = ']',
  kEmptyTuple = ')',
  kEmptyDict = '}',
  kProto = 0x80,
  kNewObj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
};

constexpr uint64_t kHighestProtocol = 5;
constexpr std::string_view kOrderedDict = "collections OrderedDict";
constexpr std::string_view kGetattr = "__builtin__ getattr";
constexpr uint64_t kMaxCount = std::numeric_limits<uint32_t>::max();

/// Whether a module has functions that act on the system, or is torch's, whose values may be or hold tensors.
bool acts(std::string_view module) {
  constexpr std::string_view kModules[] = {
      "__builtin__", "builtins",        "code",       "codecs", "commands", "ctypes", "importlib", "io",
      "marshal",     "multiprocessing", "nt",         "os",     "pickle",   "posix",  "pty",       "runpy",
      "shutil",      "socket",          "subprocess", "sys",    "torch",    "types",  "webbrowser"};
  module = module.substr(0, module.find('.'));
  return std::find(std::begin(kModules), std::end(kModules), module) != std::end(kModules);
}

std::string hex(uint8_t byte) {
  char text[8];
  std::snprintf(text, sizeof text, "0x%02x", byte);
  return text;
}

} // namespace

const Pickle::Value *Pickle::find(Value dictionary, std::string_view key) const {
  if (!is(dictionary, Kind::dictionary) || items(dictionary).size() > 2 * kMaxAttributes)
    return nullptr;
  const Items entries = items(dictionary);
  for (size_t i = entries.size(); i >= 2; i -= 2)
    if (is(entries[i - 2], Kind::text) && text(entries[i - 2]) == key)
      return &entries[i - 1];
  return nullptr;
}

bool Pickle::isObject(Value value, std::string_view global) const {
  return is(value, Kind::object) && is(items(value)[0], Kind::global) && text(items(value)[0]) == global;
}

const Pickle::Value *Pickle::state(Value object) const {
  return is(object, Kind::object) && items(object).size() > 2 ? &items(object)[2] : nullptr;
}

std::optional<std::vector<int64_t>> Pickle::integers(Value value) const {
  if (isObject(value, "torch Size") && items(items(value)[1]).size() == 1)
    value = items(items(value)[1])[0];
  if ((!is(value, Kind::tuple) && !is(value, Kind::list)) || items(value).size() > kMaxIntegers)
    return std::nullopt;
  std::vector<int64_t> found;
  for (const Value item : items(value)) {
    if (!is(item, Kind::integer))
      return std::nullopt;
    found.push_back(integer(item));
  }
  return found;
}

/// Reads one pickle. Every opcode makes at most one value, and the memo and the stack grow by at most one entry for
/// each opcode, so memory is bounded by the length of the pickle. A `.metadata` has millions of values: none has memory
/// of its own, and values that are often equal and never change are shared.
class PickleReader {
public:
  PickleReader(std::string_view bytes, std::span<const std::string_view> allowed, size_t most, Pickle::Others others)
      : bytes_(bytes), allowed_(allowed), others_(others),
        most_(std::min(most, Pickle::kMaxBytesPerByte * bytes.size() + Pickle::kFewBytes)),
        shared_(std::bit_ceil(std::clamp<size_t>(bytes.size() / 16, 1 << 4, 1 << 16)), kNoValue) {
    // Room that is not used takes no memory, but a vector that grows has its values twice.
    pickle_.nodes_.reserve(std::min(bytes.size(), most_ / sizeof(Node)));
    pickle_.items_.reserve(std::min(2 * bytes.size(), most_ / sizeof(Value)));
    memo_.reserve(std::min(bytes.size() / 2, most_ / sizeof(Value)));
  }

  /// Empty on success.
  std::string run() {
    while (problem_.empty() && !done_) {
      opcodeAt_ = at_;
      const std::string_view opcode = take(1);
      if (problem_.empty())
        step(static_cast<uint8_t>(opcode[0]));
      if (bytesInUse() > most_)
        refuse("its values need more than " + std::to_string(most_) + " bytes");
    }
    return problem_.empty() ? "" : "byte " + std::to_string(opcodeAt_) + ": " + problem_;
  }
  Pickle result() { return std::move(pickle_); }
  /// Whether the problem is a global that is not allowed.
  bool unknownGlobal() const { return unknownGlobal_; }

private:
  using Value = Pickle::Value;
  using Kind = Pickle::Kind;
  using Node = Pickle::Node;
  using Items = Pickle::Items;

  size_t bytesInUse() const {
    constexpr size_t kRare = 64; // bytes of an entry of a map
    return pickle_.nodes_.size() * sizeof(Node) +
           (pickle_.items_.size() + stack_.size() + memo_.size()) * sizeof(Value) + rareMemo_.size() * kRare +
           marks_.size() * sizeof(uint32_t);
  }
  void refuse(const std::string &problem) {
    if (problem_.empty())
      problem_ = problem;
  }
  std::string_view take(uint64_t count) {
    if (count > bytes_.size() - at_) {
      refuse("the pickle ends within a value");
      return {};
    }
    at_ += count;
    return bytes_.substr(at_ - count, count);
  }
  /// An unsigned number of so many bytes, little-endian.
  uint64_t number(size_t width) {
    uint64_t found = 0;
    const std::string_view text = take(width);
    if (!text.empty())
      std::memcpy(&found, text.data(), text.size());
    return found;
  }
  std::string_view line() {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) {
      refuse("the pickle ends within a name");
      return {};
    }
    const std::string_view found = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return found;
  }

  Node &node(Value value) { return pickle_.nodes_[value]; }
  Value add(const Node &made) {
    pickle_.nodes_.push_back(made);
    return static_cast<Value>(pickle_.nodes_.size() - 1);
  }
  void push(Value value) { stack_.push_back(value); }
  void push(Kind kind, std::string_view text) {
    if (text.size() > kMaxCount)
      return refuse("a text of " + std::to_string(text.size()) + " bytes, expected at most " +
                    std::to_string(kMaxCount));
    Node made{kind, false, static_cast<uint32_t>(text.size()), {}};
    made.text = text.data();
    push(add(made));
  }
  /// A value without items or text. Those that are equal are often one value: shapes and offsets consist of them.
  void push(Kind kind, int64_t integer = 0) {
    const uint64_t hash = (static_cast<uint64_t>(integer) * 16 + static_cast<uint64_t>(kind)) * 0x9e3779b97f4a7c15;
    Value &last = shared_[(hash >> 32) % shared_.size()];
    if (last == kNoValue || node(last).kind != kind || node(last).integer != integer) {
      Node made{kind, false, 0, {}};
      made.integer = integer;
      last = add(made);
    }
    push(last);
  }
  /// The lowest position of the stack that an opcode may use: that after the last mark.
  size_t bottom() const { return marks_.empty() ? 0 : marks_.back(); }
  bool has(size_t count) {
    if (stack_.size() - bottom() < count)
      refuse("too few values on the stack");
    return problem_.empty();
  }
  Value pop() {
    const Value top = stack_.back();
    stack_.pop_back();
    return top;
  }
  void drop(size_t count) { stack_.resize(stack_.size() - count); }
  /// The values on top of the stack, which has so many; valid until it changes.
  Items top(size_t count) const { return Items(stack_).last(count); }
  /// Removes the last mark, and returns the number of values after it. `below`: how many values must lie under it.
  size_t unmark(size_t below = 0) {
    if (marks_.empty()) {
      refuse("no mark on the stack");
      return 0;
    }
    const size_t count = stack_.size() - marks_.back();
    marks_.pop_back();
    return has(count + below) ? count : 0;
  }
  /// A value with items, which is not on the stack yet.
  Value makeCollection(Kind kind, Items items) {
    const Value made = add({kind, false, 0, {}});
    extend(node(made), items);
    return made;
  }
  /// Replaces the values on top of the stack by a collection of them.
  void collect(Kind kind, size_t count) {
    if (!problem_.empty())
      return;
    const Value made = makeCollection(kind, top(count));
    drop(count);
    push(made);
  }
  /// Adds items to a node. The first ones get the room that they need; later there is room for the next power
  /// of two.
  void extend(Node &owner, Items items) {
    if (items.size() > kMaxCount - owner.count)
      return refuse("a collection of more than " + std::to_string(kMaxCount) + " items");
    std::vector<Value> &all = pickle_.items_;
    const uint64_t count = owner.count + items.size();
    const uint64_t room = owner.grown ? std::bit_ceil(uint64_t{owner.count}) : owner.count;
    if (count > room) {
      const uint64_t first = all.size();
      all.resize(first + (owner.count == 0 ? count : std::bit_ceil(count)));
      if (owner.count > 0)
        std::copy_n(all.begin() + static_cast<ptrdiff_t>(owner.first), owner.count,
                    all.begin() + static_cast<ptrdiff_t>(first));
      owner.grown = owner.count > 0;
      owner.first = first;
    }
    std::copy(items.begin(), items.end(), all.begin() + static_cast<ptrdiff_t>(owner.first + owner.count));
    owner.count = static_cast<uint32_t>(count);
  }

  void pushGlobal(std::string_view module, std::string_view name) {
    constexpr size_t kMaxName = 1000; // many values may have one name, which is read for each of them
    if (module.size() + name.size() > kMaxName)
      return refuse("the name of a global has more than " + std::to_string(kMaxName) + " bytes");
    const std::string full = std::string(module) + " " + std::string(name);
    const auto known = std::find(allowed_.begin(), allowed_.end(), full);
    if (known != allowed_.end())
      return push(Kind::global, *known);
    if (others_ == Pickle::Others::kept && !acts(module))
      return push(Kind::global, std::string_view(*pickle_.others_.insert(full).first));
    unknownGlobal_ = true;
    refuse("the global '" + std::string(module) + "." + std::string(name) +
           "' is not one that this format uses; nothing was executed");
  }
  void stackGlobal() {
    if (!has(2))
      return;
    const Value name = pop(), module = pop();
    if (!pickle_.is(name, Kind::text) || !pickle_.is(module, Kind::text))
      return refuse("the name of a global is not a text");
    pushGlobal(pickle_.text(module), pickle_.text(name));
  }
  /// REDUCE and NEWOBJ: a call of a global with a tuple of arguments.
  void call() {
    if (!has(2))
      return;
    const Value arguments = pop(), callee = pop();
    if (!pickle_.is(callee, Kind::global) || !pickle_.is(arguments, Kind::tuple))
      return refuse("expected a global and a tuple of arguments");
    if (pickle_.text(callee) == kOrderedDict && pickle_.items(arguments).empty())
      return push(makeCollection(Kind::dictionary, {}));
    if (pickle_.text(callee) == kGetattr)
      return pushMember(pickle_.items(arguments));
    const Value items[] = {callee, arguments, kNoValue}; // with room for its state
    const Value object = makeCollection(Kind::object, items);
    node(object).count = 2;
    push(object);
  }
  /// Pickles of protocol 2 name a class within a class by a call of getattr: it is the global "module Outer.Inner".
  void pushMember(Items arguments) {
    if (arguments.size() != 2 || !pickle_.is(arguments[0], Kind::global) || !pickle_.is(arguments[1], Kind::text))
      return refuse("expected a global and a name as the arguments of getattr");
    const std::string_view outer = pickle_.text(arguments[0]);
    const size_t space = outer.find(' ');
    pushGlobal(outer.substr(0, space),
               std::string(outer.substr(space + 1)) + "." + std::string(pickle_.text(arguments[1])));
  }
  void build() {
    if (!has(2))
      return;
    const Value state = pop();
    Node &object = node(stack_.back());
    if (object.kind == Kind::dictionary) // attributes of an OrderedDict, such as the versions of modules
      return;
    if (object.kind != Kind::object || object.count != 2)
      return refuse("expected an instance without a state");
    pickle_.items_[object.first + object.count++] = state;
  }
  /// Moves the values on top of the stack into the list below them.
  void append(size_t count) {
    if (!problem_.empty())
      return;
    Node &list = node(top(count + 1)[0]);
    if (list.kind != Kind::list)
      return refuse("expected a list");
    extend(list, top(count));
    drop(count);
  }
  /// The same for keys and values, and a dictionary.
  void setItems(size_t count) {
    if (!problem_.empty())
      return;
    Node &dictionary = node(top(count + 1)[0]);
    if (dictionary.kind != Kind::dictionary || count % 2 != 0)
      return refuse("expected a dictionary, and a value for each key");
    extend(dictionary, top(count));
    drop(count);
  }
  void get(uint64_t index) {
    if (index < memo_.size())
      return push(memo_[index]);
    const auto found = rareMemo_.find(index);
    if (found == rareMemo_.end())
      return refuse("no value has the number " + std::to_string(index));
    push(found->second);
  }
  void put(uint64_t index) {
    if (!has(1))
      return;
    if (index > memo_.size()) {
      rareMemo_[index] = stack_.back();
      return;
    }
    if (index == memo_.size()) {
      memo_.push_back(0);
      rareMemo_.erase(index);
    }
    memo_[index] = stack_.back();
  }
  void longInteger(std::string_view digits) {
    if (digits.size() > 8)
      return refuse("an integer of " + std::to_string(digits.size()) + " bytes, expected at most 8");
    uint64_t bits = !digits.empty() && (digits.back() & 0x80) ? ~uint64_t{0} : 0;
    if (!digits.empty())
      std::memcpy(&bits, digits.data(), digits.size());
    push(Kind::integer, static_cast<int64_t>(bits));
  }
  void stop() {
    if (!has(1))
      return;
    if (stack_.size() != 1 || !marks_.empty())
      return refuse("the pickle ends with more than one value");
    pickle_.root_ = stack_[0];
    done_ = true;
  }

  void step(uint8_t opcode) {
    switch (opcode) {
    case kProto:
      if (const uint64_t protocol = number(1); protocol > kHighestProtocol)
        refuse("protocol " + std::to_string(protocol) + ", expected at most " + std::to_string(kHighestProtocol));
      return;
    case kFrame:
      number(8); // a hint for readers of streams
      return;
    case kStop:
      return stop();
    case kMark:
      return marks_.push_back(static_cast<uint32_t>(stack_.size()));
    case kPop:
      if (has(1))
        pop();
      return;
    case kPopMark:
      drop(unmark());
      return;
    default:
      return literal(opcode);
    }
  }

  void literal(uint8_t opcode) {
    switch (opcode) {
    case kNone:
      return push(Kind::none);
    case kNewTrue:
      return push(Kind::boolean, 1);
    case kNewFalse:
      return push(Kind::boolean, 0);
    case kBinInt:
      return push(Kind::integer, static_cast<int32_t>(number(4)));
    case kBinInt1:
      return push(Kind::integer, static_cast<int64_t>(number(1)));
    case kBinInt2:
      return push(Kind::integer, static_cast<int64_t>(number(2)));
    case kLong1:
      return longInteger(take(number(1)));
    case kBinFloat:
      return push(Kind::real, take(8));
    case kShortBinUnicode:
      return push(Kind::text, take(number(1)));
    case kBinUnicode:
      return push(Kind::text, take(number(4)));
    case kBinUnicode8:
      return push(Kind::text, take(number(8)));
    case kShortBinBytes:
      return push(Kind::bytes, take(number(1)));
    case kBinBytes:
      return push(Kind::bytes, take(number(4)));
    case kBinBytes8:
      return push(Kind::bytes, take(number(8)));
    default:
      return collection(opcode);
    }
  }

  void collection(uint8_t opcode) {
    switch (opcode) {
    case kEmptyList:
      return push(makeCollection(Kind::list, {}));
    case kEmptyTuple:
      if (emptyTuple_ == kNoValue) // it never changes: one is enough
        emptyTuple_ = makeCollection(Kind::tuple, {});
      return push(emptyTuple_);
    case kEmptyDict:
      return push(makeCollection(Kind::dictionary, {}));
    case kTuple1:
    case kTuple2:
    case kTuple3:
      if (const size_t count = opcode - kTuple1 + 1; has(count))
        collect(Kind::tuple, count);
      return;
    case kTuple:
      return collect(Kind::tuple, unmark());
    case kAppend:
      if (has(2))
        append(1);
      return;
    case kAppends:
      return append(unmark(1));
    case kSetItem:
      if (has(3))
        setItems(2);
      return;
    case kSetItems:
      return setItems(unmark(1));
    default:
      return reference(opcode);
    }
  }

  void reference(uint8_t opcode) {
    switch (opcode) {
    case kBinGet:
      return get(number(1));
    case kLongBinGet:
      return get(number(4));
    case kBinPut:
      return put(number(1));
    case kLongBinPut:
      return put(number(4));
    case kMemoize:
      return put(memo_.size() + rareMemo_.size());
    case kGlobal: {
      const std::string_view module = line();
      return pushGlobal(module, line());
    }
    case kStackGlobal:
      return stackGlobal();
    case kReduce:
    case kNewObj:
      return call();
    case kBuild:
      return build();
    case kBinPersId:
      if (has(1))
        collect(Kind::persistent, 1);
      return;
    default:
      return refuse("the opcode " + hex(opcode) + " is not one that these formats use");
    }
  }

  std::string_view bytes_;
  std::span<const std::string_view> allowed_;
  const Pickle::Others others_;
  bool unknownGlobal_ = false;
  const size_t most_;
  size_t at_ = 0, opcodeAt_ = 0;
  bool done_ = false;
  std::string problem_;
  Pickle pickle_;
  std::vector<Value> stack_;
  std::vector<uint32_t> marks_;        // positions of the stack
  std::vector<Value> memo_;            // by number
  std::map<uint64_t, Value> rareMemo_; // by numbers that do not follow the numbers of memo_
  /// By a hash of kind and number, the last shared value. It does not grow, and a value is compared
  /// with one other: numbers of equal hashes take no time or memory.
  static constexpr Value kNoValue = ~Value{0};
  std::vector<Value> shared_;
  Value emptyTuple_ = kNoValue;
};

Result<Pickle> Pickle::read(std::string_view bytes, std::span<const std::string_view> allowed, const std::string &where,
                            size_t most, Others others) {
  PickleReader reader(bytes, allowed, most, others);
  if (const std::string problem = reader.run(); !problem.empty())
    return failed(where + (reader.unknownGlobal() ? ": " : ": damaged or hostile pickle: ") + problem);
  return reader.result();
}

} // namespace reshard::checkpoints
