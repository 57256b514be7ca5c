// SPDX-License-Identifier: Apache-2.0
// Applies the placements of a DTensorSpec one after the other: each mesh dimension divides the positions that the
// dimensions before it have left, as torch.chunk does.
#include "checkpoints/distributed_tensor.h"

#include <algorithm>
#include <optional>

namespace reshard::checkpoints {

namespace {

using Kind = Pickle::Kind;
using Value = Pickle::Value;

constexpr std::string_view kSpec = "torch.distributed.tensor._dtensor_spec DTensorSpec";
constexpr std::string_view kMesh = "torch.distributed.device_mesh DeviceMesh";
constexpr std::string_view kMeshLayout = "torch.distributed._mesh_layout _MeshLayout";
constexpr std::string_view kFlatLayout = "torch.distributed._mesh_layout _FlatLayout";
constexpr std::string_view kShard = "torch.distributed.tensor.placement_types Shard";
constexpr std::string_view kStridedShard = "torch.distributed.tensor.placement_types _StridedShard";
constexpr std::string_view kReplicate = "torch.distributed.tensor.placement_types Replicate";
constexpr std::string_view kOrder = "torch.distributed.tensor._dtensor_spec ShardOrderEntry";

constexpr std::string_view kDTensorGlobals[] = {
    kDTensor, kSpec,         kMesh,      kMeshLayout, kFlatLayout,
    kShard,   kStridedShard, kReplicate, kOrder,      "torch.distributed.tensor._dtensor_spec TensorMeta",
};

constexpr int64_t kMaxSplit = 1 << 16; // the largest split factor of a _StridedShard
constexpr size_t kMaxIntervals = size_t{1} << 16;

using IndexRanges = std::vector<IndexRange>;

int64_t lengthOf(const IndexRanges &intervals) {
  int64_t length = 0;
  for (const IndexRange &each : intervals)
    length += each.length;
  return length;
}

/// A place in intervals: interval `next`, whose first local position is `at`.
struct Cursor {
  size_t next = 0;
  int64_t at = 0;
};

/// Appends the local positions [begin, end) of `from`. Moves the cursor to the interval of `end`: a later call may only
/// ask for later positions, so that all calls together visit each interval once.
void append(const IndexRanges &from, Cursor &cursor, int64_t begin, int64_t end, IndexRanges &to) {
  while (cursor.next < from.size() && cursor.at < end) {
    const IndexRange &each = from[cursor.next];
    const int64_t low = std::max(begin, cursor.at), high = std::min(end, cursor.at + each.length);
    if (low < high) {
      const int64_t first = each.begin + low - cursor.at;
      if (!to.empty() && to.back().begin + to.back().length == first)
        to.back().length += high - low;
      else
        to.push_back({first, high - low});
    }
    if (cursor.at + each.length > end) // a later call has the rest
      return;
    cursor.at += each.length;
    ++cursor.next;
  }
}

/// Chunk number `index` of torch.chunk: [begin, end) of so many positions.
std::pair<int64_t, int64_t> chunkOf(int64_t length, int64_t chunks, int64_t index) {
  const int64_t size = length / chunks + (length % chunks ? 1 : 0);
  if (size == 0 || index > length / size) // index * size might not fit
    return {length, length};
  return {index * size, std::min(length, (index + 1) * size)};
}

/// The positions of coordinate `index` of a mesh dimension. `split`: the split factor of a _StridedShard, whose pieces
/// are chunked one by one; 1 for Shard.
IndexRanges shardOf(const IndexRanges &from, int64_t split, int64_t chunks, int64_t index) {
  const int64_t length = lengthOf(from);
  IndexRanges result;
  Cursor cursor;
  for (int64_t piece = 0; piece < split; ++piece) {
    const auto [begin, end] = chunkOf(length, split, piece);
    if (begin == end)
      break;
    const auto [low, high] = chunkOf(end - begin, chunks, index);
    append(from, cursor, begin + low, begin + high, result);
  }
  return result;
}

/// Reads one DTensorSpec.
class SpecReader {
public:
  SpecReader(const Pickle &pickle, Value spec, LocalPart &part, ReadBudget &budget)
      : pickle_(pickle), spec_(spec), part_(part), budget_(budget) {}

  std::string read() {
    const Value *mesh = member(spec_, kSpec, "mesh"), *placements = member(spec_, kSpec, "placements");
    if (!mesh || !readMesh(*mesh))
      return "its device mesh has another form than that of PyTorch 2.13, of at most " +
             std::to_string(Pickle::kMaxIntegers) + " dimensions";
    if (!placements || !pickle_.is(*placements, Kind::tuple) || pickle_.items(*placements).size() != sizes_.size())
      return "it has no placement for each dimension of its mesh";
    if (!coordinates_) { // a rank that is not in the mesh
      for (IndexRanges &each : part_.positions)
        each.clear();
      return {};
    }
    if (!inOrder())
      return "its dimensions are not sharded in the order of the mesh (shard_order)";
    for (size_t d = 0; d < sizes_.size(); ++d)
      if (const std::string problem = apply(pickle_.items(*placements)[d], sizes_[d], (*coordinates_)[d]);
          !problem.empty())
        return problem;
    return {};
  }

private:
  const Value *member(Value object, std::string_view type, std::string_view name) const {
    const Value *state = pickle_.isObject(object, type) ? pickle_.state(object) : nullptr;
    return state ? pickle_.find(*state, name) : nullptr;
  }

  /// Sets the sizes of the mesh, and the coordinates of the rank that saved it.
  bool readMesh(Value mesh) {
    const Value *layout = member(mesh, kMesh, "_layout"), *at = member(mesh, kMesh, "_coordinate_on_dim");
    const Value *axes = layout ? member(*layout, kMeshLayout, "axes") : nullptr;
    if (!at || !axes || !pickle_.is(*axes, Kind::tuple) || pickle_.items(*axes).size() > Pickle::kMaxIntegers)
      return false;
    for (const Value axis : pickle_.items(*axes)) {
      const Value *shape = member(axis, kFlatLayout, "shape");
      const auto factors = shape ? pickle_.integers(*shape) : std::nullopt;
      int64_t size = 1;
      for (const int64_t factor : factors.value_or(std::vector<int64_t>{0}))
        if (factor < 1 || __builtin_mul_overflow(size, factor, &size))
          return false;
      sizes_.push_back(size);
    }
    if (pickle_.is(*at, Kind::none))
      return true;
    coordinates_ = pickle_.integers(*at);
    if (!coordinates_ || coordinates_->size() != sizes_.size())
      return false;
    for (size_t d = 0; d < sizes_.size(); ++d)
      if ((*coordinates_)[d] < 0 || (*coordinates_)[d] >= sizes_[d])
        return false;
    return true;
  }

  /// Whether each dimension of the tensor is sharded over ascending dimensions of the mesh.
  bool inOrder() const {
    const Value *order = member(spec_, kSpec, "shard_order");
    if (!order || !pickle_.is(*order, Kind::tuple))
      return true; // _StridedShard states the order
    for (const Value entry : pickle_.items(*order)) {
      const bool known = pickle_.isObject(entry, kOrder) && pickle_.items(pickle_.items(entry)[1]).size() == 2;
      const auto axes = known ? pickle_.integers(pickle_.items(pickle_.items(entry)[1])[1]) : std::nullopt;
      if (!axes || !std::is_sorted(axes->begin(), axes->end()))
        return false;
    }
    return true;
  }

  std::string apply(Value placement, int64_t size, int64_t coordinate) {
    if (pickle_.isObject(placement, kReplicate))
      return {};
    const bool strided = pickle_.isObject(placement, kStridedShard);
    const std::string_view type = strided ? kStridedShard : kShard;
    const size_t known = 2 * (strided ? 2 : 1); // dim and split_factor, each with its name
    if (const Value *state = pickle_.state(placement); state && pickle_.items(*state).size() != known)
      return "a placement has other attributes than those of PyTorch 2.13";
    const Value *dim = member(placement, type, "dim");
    const Value *factor = strided ? member(placement, type, "split_factor") : nullptr;
    if (!dim || !pickle_.is(*dim, Kind::integer) || (strided && (!factor || !pickle_.is(*factor, Kind::integer))))
      return "a placement is none of Shard, _StridedShard and Replicate";
    const int64_t d = pickle_.integer(*dim), split = factor ? pickle_.integer(*factor) : 1;
    if (d < 0 || static_cast<size_t>(d) >= part_.positions.size())
      return "it is sharded in dimension " + std::to_string(d) + " of " + std::to_string(part_.positions.size());
    if (split < 1 || split > kMaxSplit)
      return "the split_factor of a _StridedShard is " + std::to_string(split);
    if (const auto steps = static_cast<uint64_t>(split) + part_.positions[d].size();
        !budget_.take(sizeof(IndexRange) * steps, 10 * steps))
      return ReadBudget::problem();
    part_.positions[d] = shardOf(part_.positions[d], split, size, coordinate);
    if (part_.positions[d].size() > kMaxIntervals)
      return "its positions are in more than " + std::to_string(kMaxIntervals) + " intervals";
    return {};
  }

  const Pickle &pickle_;
  Value spec_;
  LocalPart &part_;
  ReadBudget &budget_;
  std::vector<int64_t> sizes_;                      // the sizes of the mesh's dimensions
  std::optional<std::vector<int64_t>> coordinates_; // none: the rank is not in the mesh
};

} // namespace

std::span<const std::string_view> dtensorGlobals() { return kDTensorGlobals; }

std::string readDTensor(const Pickle &pickle, Value state, DistributedTensor &found, ReadBudget &budget) {
  // (None, attributes)
  const Pickle::Items items = pickle.items(state);
  const bool known = pickle.is(state, Kind::tuple) && items.size() == 2;
  const Value *local = known ? pickle.find(items[1], "_local_tensor") : nullptr;
  const Value *spec = known ? pickle.find(items[1], "_spec") : nullptr;
  if (!local || !spec)
    return "it is a DTensor without a local tensor or a specification";
  if (!onlyDescribes(pickle, state))
    return "its state sets more than attributes";
  found.local = *local;
  return SpecReader(pickle, *spec, found.part, budget).read();
}

} // namespace reshard::checkpoints
