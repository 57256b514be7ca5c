// SPDX-License-Identifier: Apache-2.0
// Walks through the values of data.pkl and names each tensor by its path of keys. A value of a class that is not known
// is an object, unless it holds tensors: then it is an error.
#include "checkpoints/torch_file.h"

#include "checkpoints/pickle.h"

#include <algorithm>
#include <optional>

namespace reshard::checkpoints {

namespace {

using Kind = Pickle::Kind;
using Value = Pickle::Value;

constexpr std::string_view kRebuildTensor = "torch._utils _rebuild_tensor_v2";
constexpr std::string_view kRebuildUntyped = "torch._utils _rebuild_tensor_v3"; // with a dtype
constexpr std::string_view kRebuildParameter = "torch._utils _rebuild_parameter";
constexpr std::string_view kRebuildParameterWithState = "torch._utils _rebuild_parameter_with_state"; // has attributes
constexpr std::string_view kTensorClass = "torch Tensor";
constexpr std::string_view kUntypedStorage = "torch.storage UntypedStorage";

struct TorchType {
  std::string_view global;
  std::string_view storage; // the global of its typed storage; empty: data is in an untyped storage
  schema::DType dtype;
};

constexpr TorchType kTypes[] = {
    {"torch bfloat16", "torch BFloat16Storage", schema::DType::bf16},
    {"torch float16", "torch HalfStorage", schema::DType::fp16},
    {"torch float32", "torch FloatStorage", schema::DType::fp32},
    {"torch float64", "torch DoubleStorage", schema::DType::fp64},
    {"torch float8_e4m3fn", "", schema::DType::fp8_e4m3},
    {"torch float8_e5m2", "", schema::DType::fp8_e5m2},
    {"torch int8", "torch CharStorage", schema::DType::i8},
    {"torch int16", "torch ShortStorage", schema::DType::i16},
    {"torch int32", "torch IntStorage", schema::DType::i32},
    {"torch int64", "torch LongStorage", schema::DType::i64},
    {"torch uint8", "torch ByteStorage", schema::DType::u8},
    {"torch uint16", "", schema::DType::u16},
    {"torch uint32", "", schema::DType::u32},
    {"torch uint64", "", schema::DType::u64},
    {"torch bool", "torch BoolStorage", schema::DType::boolean},
};

/// What torch.save writes for tensors, parameters and plain Python values. Distributed tensors need further globals;
/// tensors of other classes are refused.
constexpr std::string_view kTorchGlobals[] = {
    "collections OrderedDict",  kRebuildTensor,  kRebuildUntyped, kRebuildParameter,
    kRebuildParameterWithState, kUntypedStorage, "torch Size",    kTensorClass,
};

constexpr int kMaxDepth = 64;
constexpr size_t kMaxPickle = size_t{1} << 30;
/// About the bytes of memory that a value, a tensor and each of its dimensions take, besides their names.
constexpr uint64_t kValueBytes = 200, kTorchTensorBytes = 600, kTorchDimensionBytes = 64;

/// Finds the tensors of the pickle of an archive.
class TensorFinder {
public:
  TensorFinder(const Pickle &pickle, FilePart &archive, const StoredZip &members, std::string_view prefix,
               ReadBudget &budget)
      : pickle_(pickle), archive_(archive), members_(members), prefix_(prefix), budget_(budget) {}

  /// An error text; empty on success.
  std::string visit(Value value, const std::string &name, int depth) {
    if (depth > kMaxDepth)
      return "'" + name + "': values are nested too deeply";
    if (!budget_.take(kValueBytes + 3 * name.size()))
      return ReadBudget::problem();
    if (const std::string problem = unwrapParameter(value); !problem.empty())
      return "tensor '" + name + "': " + problem;
    if (pickle_.isOther(value))
      return addOther(value, name);
    if (isDistributed(pickle_, value))
      return addDistributed(value, name);
    if (pickle_.is(value, Kind::object))
      return addTensor(value, name);
    const std::string prefix = name.empty() ? "" : name + ".";
    const Pickle::Items items = pickle_.items(value);
    std::string problem;
    if (pickle_.is(value, Kind::dictionary)) {
      for (size_t i = 0; i + 1 < items.size() && problem.empty(); i += 2)
        if (const std::optional<std::string> key = keyOf(items[i]))
          problem = visit(items[i + 1], prefix + *key, depth + 1);
        else
          problem = "'" + name + "': a key is neither a text nor an integer";
    } else if (pickle_.is(value, Kind::list) || pickle_.is(value, Kind::tuple)) {
      for (size_t i = 0; i < items.size() && problem.empty(); ++i)
        problem = visit(items[i], prefix + std::to_string(i), depth + 1);
    } else {
      found.others.push_back(name);
    }
    return problem;
  }

  TorchFile found;

private:
  /// The member of the archive with the data of tensors.
  struct Storage {
    std::string_view type; // its class
    uint64_t begin = 0, bytes = 0;
  };

  /// A key of a dictionary as a part of a name.
  std::optional<std::string> keyOf(Value key) const {
    if (pickle_.is(key, Kind::text))
      return std::string(pickle_.text(key));
    return pickle_.is(key, Kind::integer) ? std::optional(std::to_string(pickle_.integer(key))) : std::nullopt;
  }

  /// Replaces a parameter by its tensor. An error text if one of its arguments is not understood.
  std::string unwrapParameter(Value &value) const {
    const bool attributes = pickle_.isObject(value, kRebuildParameterWithState);
    if (!attributes && !pickle_.isObject(value, kRebuildParameter))
      return {};
    const Pickle::Items arguments = pickle_.items(pickle_.items(value)[1]);
    const std::string function = nameOf(attributes ? kRebuildParameterWithState : kRebuildParameter);
    if (arguments.size() != (attributes ? 4 : 3) || pickle_.state(value))
      return "'" + function + "' does not have the arguments data, requires_grad, backward_hooks" +
             (attributes ? " and state" : "");
    if (std::string problem = trainingProblem(arguments, 1, function); !problem.empty())
      return problem;
    if (attributes && !onlyDescribes(pickle_, arguments[3]))
      return argument(3, function, "state") + " sets more than attributes";
    value = arguments[0];
    return {};
  }

  static std::string nameOf(std::string_view global) {
    std::string name(global);
    std::replace(name.begin(), name.end(), ' ', '.');
    return name;
  }

  static std::string argument(size_t number, const std::string &function, const char *name) {
    return "argument " + std::to_string(number + 1) + " of '" + function + "' (" + name + ")";
  }

  /// Whether requires_grad, at `number`, and backward_hooks behind it are as torch.save writes them: they do not change
  /// a value. An error text, empty if they are.
  std::string trainingProblem(Pickle::Items arguments, size_t number, const std::string &function) const {
    if (!pickle_.is(arguments[number], Kind::boolean))
      return argument(number, function, "requires_grad") + " is not a boolean";
    const Value hooks = arguments[number + 1];
    if (!pickle_.is(hooks, Kind::none) && (!pickle_.is(hooks, Kind::dictionary) || !pickle_.items(hooks).empty()))
      return argument(number + 1, function, "backward_hooks") + " is not an empty dictionary";
    return {};
  }

  /// The last argument, which PyTorch omits if it is empty: {'neg': True} for stored elements of the other sign, and
  /// {'conj': True} for conjugate ones. A copy of bytes cannot apply either.
  std::string metadataProblem(Value metadata, size_t number, const std::string &function) const {
    const std::string where = argument(number, function, "metadata");
    if (pickle_.is(metadata, Kind::none))
      return {};
    if (!pickle_.is(metadata, Kind::dictionary))
      return where + " is not a dictionary";
    const Pickle::Items entries = pickle_.items(metadata);
    for (size_t i = 0; i + 1 < entries.size(); i += 2) {
      const std::string key = pickle_.is(entries[i], Kind::text) ? std::string(pickle_.text(entries[i])) : "";
      if (key != "neg" && key != "conj")
        return where + " sets '" + key + "', which is not understood";
      if (!pickle_.is(entries[i + 1], Kind::boolean) || pickle_.integer(entries[i + 1]))
        return where + " sets '" + key + "': its elements are not stored themselves, but their " +
               (key == "neg" ? "negatives" : "conjugates") + "; save tensor.resolve_" + key + "()";
    }
    return {};
  }

  /// The function that makes a tensor and its arguments, without the attributes that FSDP1 and others give tensors.
  std::pair<Value, Value> plain(Value tensor) const {
    const Value function = pickle_.items(tensor)[0], tuple = pickle_.items(tensor)[1];
    const Pickle::Items arguments = pickle_.items(tuple); // function, class, its arguments, attributes
    return pickle_.isObject(tensor, kRebuildFromType) && arguments.size() == 4 &&
                   pickle_.is(arguments[0], Kind::global) && pickle_.is(arguments[1], Kind::global) &&
                   pickle_.text(arguments[1]) == kTensorClass && pickle_.is(arguments[2], Kind::tuple) &&
                   onlyDescribes(pickle_, arguments[3])
               ? std::pair(arguments[0], arguments[2])
               : std::pair(function, tuple);
  }

  /// A value of a class that is not known is an object, unless it has tensors.
  std::string addOther(Value value, const std::string &name) {
    std::vector<Value> left;
    plain_.resize(pickle_.size());
    const auto look = [&](Value item) {
      if (!plain_[item])
        left.push_back(item);
      plain_[item] = true;
    };
    look(value);
    while (!left.empty()) {
      const Value next = left.back();
      left.pop_back();
      if (pickle_.is(next, Kind::persistent)) {
        std::string global(pickle_.text(pickle_.is(value, Kind::object) ? pickle_.items(value)[0] : value));
        std::replace(global.begin(), global.end(), ' ', '.');
        return "'" + name + "': it is made by the global '" + global +
               "', which is not one that this format uses, and has tensors; save a dictionary of tensors";
      }
      for (const Value item : pickle_.items(next))
        look(item);
      if (!budget_.take(0, 100 * pickle_.items(next).size()))
        return ReadBudget::problem();
    }
    found.others.push_back(name);
    return {};
  }

  std::string addDistributed(Value value, const std::string &name) {
    const auto refuse = [&](const std::string &why) { return "tensor '" + name + "': " + why; };
    DistributedTensor read;
    if (const std::string problem = readDistributed(pickle_, value, read, budget_); !problem.empty())
      return refuse(problem);
    const std::vector<int64_t> shape = read.part.localShape();
    if (!read.local) {
      const std::optional<schema::DType> dtype = dtypeFromTorch(read.dtype);
      if (!dtype)
        return refuse("the dtype '" + std::string(read.dtype) + "' is not supported");
      TorchTensor none;
      none.dtype = *dtype;
      none.shape = none.strides = shape;
      if (!found.tensors.emplace(name, std::move(none)).second)
        return refuse("the name is repeated");
    } else if (!pickle_.is(*read.local, Kind::object)) {
      return refuse("its local tensor is not a tensor");
    } else if (std::string problem = addTensor(*read.local, name); !problem.empty()) {
      return problem;
    }
    TorchTensor &tensor = found.tensors.at(name);
    if (const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
        empty ? tensor.bytes != 0 : tensor.shape != shape)
      return refuse("its local tensor has another shape than its placements or offsets give");
    tensor.part = std::move(read.part);
    return {};
  }

  std::string addTensor(Value value, const std::string &name) {
    const auto refuse = [&](const std::string &why) { return "tensor '" + name + "': " + why; };
    const auto [callable, tuple] = plain(value);
    const std::string_view callee = pickle_.text(callable);
    const std::string function = nameOf(callee);
    const Pickle::Items arguments = pickle_.items(tuple);
    const bool untyped = callee == kRebuildUntyped;
    const size_t least = untyped ? 7 : 6; // arguments; metadata may follow
    if ((!untyped && callee != kRebuildTensor) || arguments.size() < least || arguments.size() > least + 1 ||
        pickle_.state(value) || !pickle_.is(arguments[0], Kind::persistent) || !pickle_.is(arguments[1], Kind::integer))
      return refuse("'" + function + "' does not make a plain tensor");
    if (const std::string problem = trainingProblem(arguments, 4, function); !problem.empty())
      return refuse(problem);
    if (arguments.size() > least)
      if (const std::string problem = metadataProblem(arguments[least], least, function); !problem.empty())
        return refuse(problem);
    const auto shape = pickle_.integers(arguments[2]), strides = pickle_.integers(arguments[3]);
    if (!shape || !strides || shape->size() != strides->size())
      return refuse("its shape and strides are not lists of equal length of at most " +
                    std::to_string(Pickle::kMaxIntegers) + " integers");
    if (!budget_.take(kTorchTensorBytes + kTorchDimensionBytes * shape->size()))
      return ReadBudget::problem();
    Storage storage;
    std::string_view type;
    if (const std::string problem = readStorage(arguments[0], storage, type); !problem.empty())
      return refuse(problem);
    if (untyped && (type != kUntypedStorage || !pickle_.is(arguments[6], Kind::global)))
      return refuse(argument(6, function, "dtype") + " or its storage '" + nameOf(type) + "' has another form");
    if (untyped)
      type = pickle_.text(arguments[6]);
    TorchTensor tensor;
    tensor.shape = *shape;
    tensor.strides = *strides;
    const TorchType *known = nullptr;
    for (const TorchType &each : kTypes)
      if (type == (untyped ? each.global : each.storage))
        known = &each;
    if (!known)
      return refuse("the dtype of '" + nameOf(type) + "' is not supported");
    tensor.dtype = known->dtype;
    if (!dataOf(tensor, storage, pickle_.integer(arguments[1])))
      return refuse("it lies outside its storage of " + std::to_string(storage.bytes) + " bytes");
    if (!found.tensors.emplace(name, std::move(tensor)).second)
      return refuse("the name is repeated");
    return {};
  }

  /// A reference is ('storage', class, key, device, elements). All references to a storage state the same one.
  std::string readStorage(Value reference, Storage &storage, std::string_view &type) {
    const Value parts = pickle_.items(reference)[0];
    const Pickle::Items items = pickle_.items(parts);
    if (!pickle_.is(parts, Kind::tuple) || items.size() != 5 || !pickle_.is(items[0], Kind::text) ||
        pickle_.text(items[0]) != "storage" || !pickle_.is(items[1], Kind::global) ||
        !pickle_.is(items[2], Kind::text) || !pickle_.is(items[3], Kind::text) || !pickle_.is(items[4], Kind::integer))
      return "its storage is not a reference of torch.save";
    if (pickle_.text(items[3]) == "meta")
      return "it is on the device 'meta' and has no data";
    const std::string member = std::string(prefix_) + "data/" + std::string(pickle_.text(items[2]));
    const StoredZip::Member *data = members_.find(member);
    if (!data)
      return "its storage '" + member + "' is missing";
    type = pickle_.text(items[1]);
    const auto [known, added] = storages_.try_emplace(data);
    if (added) {
      const Result<uint64_t> begin = StoredZip::dataAt(archive_, *data, "its storage");
      if (!begin.ok())
        return begin.status().message();
      known->second = {type, *begin, data->bytes};
    }
    storage = known->second;
    return storage.type == type ? ""
                                : "its storage '" + member + "' is a '" + nameOf(type) + "' here and a '" +
                                      nameOf(storage.type) + "' elsewhere";
  }

  /// Sets the data from the first to the last element.
  static bool dataOf(TorchTensor &tensor, const Storage &storage, int64_t offset) {
    int64_t last = offset, begin = 0, end = 0;
    bool empty = false;
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      int64_t steps = 0;
      if (tensor.shape[i] < 0 || tensor.strides[i] < 0 ||
          __builtin_mul_overflow(std::max<int64_t>(tensor.shape[i] - 1, 0), tensor.strides[i], &steps) ||
          __builtin_add_overflow(last, steps, &last))
        return false;
      empty = empty || tensor.shape[i] == 0;
    }
    const int64_t item = schema::itemBytes(tensor.dtype);
    if (offset < 0 || __builtin_mul_overflow(offset, item, &begin) || __builtin_mul_overflow(last, item, &end) ||
        __builtin_add_overflow(end, item, &end))
      return false;
    if (empty)
      return true;
    if (static_cast<uint64_t>(end) > storage.bytes)
      return false;
    tensor.begin = storage.begin + static_cast<uint64_t>(begin);
    tensor.bytes = static_cast<uint64_t>(end - begin);
    return true;
  }

  const Pickle &pickle_;
  FilePart &archive_;
  const StoredZip &members_;
  std::string_view prefix_;
  ReadBudget &budget_;
  std::map<const StoredZip::Member *, Storage> storages_;
  std::vector<bool> plain_; // by value: addOther() has looked at it; many values may share one
};

/// The contents of a small member.
Result<std::string> contentsOf(FilePart &archive, const StoredZip::Member &member, const std::string &where) {
  const Result<uint64_t> begin = StoredZip::dataAt(archive, member, where);
  if (!begin.ok())
    return begin.status();
  const Result<std::string_view> read = archive.read(*begin, member.bytes);
  return read.ok() ? Result(std::string(*read)) : Result<std::string>(read.status());
}

} // namespace

bool TorchTensor::contiguous() const {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end())
    return true;
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] > 1 && strides[i] != stride)
      return false;
    if (__builtin_mul_overflow(stride, shape[i], &stride))
      return false;
  }
  return true;
}

std::optional<schema::DType> dtypeFromTorch(std::string_view global) {
  for (const TorchType &type : kTypes)
    if (global == type.global)
      return type.dtype;
  return std::nullopt;
}

std::pair<std::string_view, std::string_view> torchGlobals(schema::DType dtype) {
  constexpr std::string_view kModule = "torch ";
  for (const TorchType &type : kTypes)
    if (type.dtype == dtype)
      return {type.global.substr(kModule.size()), type.storage.empty() ? "" : type.storage.substr(kModule.size())};
  return {};
}

std::vector<std::string_view> withDtypes(std::span<const std::string_view> globals) {
  std::vector<std::string_view> all(globals.begin(), globals.end());
  for (const TorchType &type : kTypes) {
    all.push_back(type.global);
    if (!type.storage.empty())
      all.push_back(type.storage);
  }
  return all;
}

Result<TorchFile> readTorchFile(FilePart &archive, const std::string &where, ReadBudget &budget) {
  const Result<StoredZip> members = StoredZip::read(archive, where);
  if (!members.ok())
    return members.status();
  constexpr std::string_view kPickle = "data.pkl", kInFolder = "/data.pkl";
  const StoredZip::Member *pickled = nullptr;
  for (const StoredZip::Member &member : members->members()) {
    if (member.name != kPickle && !member.name.ends_with(kInFolder))
      continue;
    if (pickled)
      return failed(where + ": has two pickles, '" + std::string(pickled->name) + "' and '" + std::string(member.name) +
                    "', expected one: which of them holds the tensors is not stated");
    pickled = &member;
  }
  if (!pickled || pickled->name == kPickle)
    return failed(where + ": no file of torch.save: 'data.pkl' is missing");
  const std::string_view prefix = pickled->name.substr(0, pickled->name.size() - kPickle.size());
  if (const StoredZip::Member *member = members->find(std::string(prefix) + "byteorder")) {
    const Result<uint64_t> begin = StoredZip::dataAt(archive, *member, where);
    const Result<std::string_view> order =
        begin.ok() ? archive.read(*begin, std::min<uint64_t>(member->bytes, 16)) : begin.status();
    if (!order.ok())
      return order.status();
    if (*order != "little" || member->bytes != order->size())
      return failed(where + ": its byte order is '" + std::string(*order) + "', expected 'little'");
  }
  if (pickled->bytes > kMaxPickle)
    return failed(where + ": its pickle has " + std::to_string(pickled->bytes) + " bytes, expected at most " +
                  std::to_string(kMaxPickle));
  const Result<std::string> text = contentsOf(archive, *pickled, where);
  if (!text.ok())
    return text.status();
  std::vector<std::string_view> globals = withDtypes(kTorchGlobals);
  const std::vector<std::string_view> distributed = distributedGlobals();
  globals.insert(globals.end(), distributed.begin(), distributed.end());
  const Result<Pickle> pickle = Pickle::read(*text, globals, where, Pickle::kMaxBytes, Pickle::Others::kept);
  if (!pickle.ok())
    return pickle.status();
  TensorFinder finder(*pickle, archive, *members, prefix, budget);
  if (const std::string problem = finder.visit(pickle->root(), "", 0); !problem.empty())
    return failed(where + ": " + problem);
  for (const std::string &name : finder.found.others)
    if (finder.found.tensors.contains(name))
      return failed(where + ": tensor '" + name + "': the name is repeated");
  return std::move(finder.found);
}

} // namespace reshard::checkpoints
