// The three levels of the reshard IR: layout, transfer, schedule. Plain data; text.cpp prints and parses it,
// verify.cpp says what holds at each level, passes (compiler/passes.def) lower one level to the next.
#pragma once

#include "ir/index_map.h"

#include "llvm/ADT/SmallVector.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace reshard::ir {

enum class DType : uint8_t {
  bf16,
  fp16,
  fp32,
  fp64,
  fp8_e4m3,
  fp8_e5m2,
  i8,
  i16,
  i32,
  i64,
  u8,
  u16,
  u32,
  u64,
  boolean
};
int64_t itemBytes(DType type);
const char *name(DType type);
std::optional<DType> parseDType(const std::string &text);

// ---------------------------------------------------------------------------------------------- layout level

/// A named mesh axis. The coordinate of place p is (p / stride) mod size. Axes of all views stand in one list.
struct Axis {
  std::string name;
  int64_t size = 1;
  int64_t stride = 1;
  bool operator==(const Axis &) const = default;
};

/// An index variable of the model: values 0 … size-1.
struct IndexVariable {
  std::string name;
  int64_t size = 0;
  bool operator==(const IndexVariable &) const = default;
};

/// All tensors of one name pattern: `model.layers.{layer}.mlp.up_proj.weight` for each layer for which it exists.
/// Its *dimensions* are its index variables first (in the order of the name), then the tensor's own.
struct TensorPattern {
  std::string name;                // with {variable} placeholders
  std::vector<unsigned> variables; // into Layout::variables
  std::vector<IndexMap> exists;    // per variable: the values for which it exists (from side; dense on the to side)
  std::vector<int64_t> shape;      // elements
  DType dtype = DType::bf16;
  size_t rank() const { return variables.size() + shape.size(); }
  bool operator==(const TensorPattern &) const = default;
};

/// How one dimension, or the values of an index variable, is shared out: for every coordinate of `axes` (several
/// count as one, outermost first) the relation from logical position to local position.
struct Sharding {
  std::vector<unsigned> axes; // into Endpoint::axes; empty: the same on every place
  std::vector<IndexMap> at;   // by coordinate; one entry where axes is empty
  int64_t unit = 1;           // logical positions [i * unit, (i + 1) * unit) stay together: no later pass cuts inside
  bool operator==(const Sharding &) const = default;
};

/// The local length of one param dimension, by coordinate of `axes`.
struct Extent {
  std::vector<unsigned> axes;
  std::vector<int64_t> at;
  bool operator==(const Extent &) const = default;
};

/// One dimension of a family inside a param. Where several stand on one param dimension (a flat buffer), a position
/// there is the sum of theirs.
struct PartDimension {
  unsigned sharding = 0; // into Endpoint::shares: logical -> local position along `param`
  int param = -1;        // the param's dimension; -1: an index variable in the param's name (local = instance, dense)
  bool operator==(const PartDimension &) const = default;
};

/// A tensor family, whole or sharded, inside a param; or, with family -1, zero padding: then there is one dimension
/// for each name variable and each param dimension, in that order, and only the `to` side means anything.
struct Part {
  int pattern = -1;
  std::vector<PartDimension> dimensions; // one for each dimension of the family
  bool operator==(const Part &) const = default;
};

/// Keeps a param to some coordinates of an axis (`at: {pp: first}`).
struct Presence {
  unsigned axis = 0;
  std::vector<int64_t> coordinates; // sorted
  bool operator==(const Presence &) const = default;
};

/// Formats of quantised matrices (kernels/convert.h), and what a face shows (schema/plan.fbs has both).
enum class Quantization : uint8_t { mxfp8, block_fp8, nvfp4 };
const char *name(Quantization format);
std::optional<Quantization> parseQuantization(const std::string &text);
enum class ViewKind : uint8_t { elements, codes, scales, plain_scales, amax };
const char *name(ViewKind kind);
std::optional<ViewKind> parseViewKind(const std::string &text);

/// Of a param that is not bound itself but shows others of its endpoint in another form: see schema/plan.fbs. Params
/// are numbers into Endpoint::params.
struct QuantizedView {
  ViewKind kind = ViewKind::elements;
  Quantization format = Quantization::mxfp8;
  bool staged =
      false; // it has memory in the arena; of `elements`, what comes goes there first, rows of blocks at a time
  bool swizzled = false;       // the scales
  unsigned codes = 0;          // of `elements` the codes, of others the param that is shown
  unsigned scales = 0;         // of `elements` and `codes`
  unsigned tensorScale = 0;    // of `elements` of nvfp4
  unsigned part = 0;           // of `amax` of a source: of the param that is shown
  unsigned amaxDimensions = 0; // of `amax` of a source: the dimensions of the tensor that each number is over, bit i
                               // the last but i; 0: the last two
  bool operator==(const QuantizedView &) const = default;
};

/// All params of one name pattern at one endpoint. A place has one instance for each combination of the name
/// variables' values there (none where a presence rule excludes it), numbered with the last variable fastest.
struct Param {
  std::string name;                // with {x} and {x.local} placeholders
  std::vector<unsigned> variables; // name variables, in the order of the name, into Layout::variables
  std::vector<unsigned> instances; // per name variable, the Share: logical value -> instance (dense)
  std::vector<Presence> presence;
  std::vector<Extent> shape; // elements per dimension on a place
  DType dtype = DType::bf16; // in which its bytes come; of the source, in which they stand
  std::vector<Part> parts;
  std::string origin;  // "file:line" of its YAML, for explanations
  std::string refresh; // the engine's hook after each run; empty: none
  std::optional<DType>
      storageDtype; // of a target, in which its bytes stand where that is another: each element is cast when it comes
  std::optional<QuantizedView> view;
  bool derived = false;  // of a target: without parts, written by way of a face
  std::string transform; // the caller's conversion that it stands behind, in memory of the arena; empty: none
  /// Whether bytes change on their way into its memory, or out of it.
  bool converts() const { return storageDtype || (view && view->kind <= ViewKind::codes); }
  /// Whether its instances have memory of their own in the arena.
  bool inArena() const { return view ? view->staged && view->kind != ViewKind::elements : !transform.empty(); }
  bool operator==(const Param &) const = default;
};

/// Positions of an index variable's values on a place are numbered from c * kChunk on in chunk c (virtual pipeline
/// stages; 0 without them): `{x.local}` is the position modulo kChunk, `{x.chunk}` the position divided by it.
constexpr int64_t kChunkStride = int64_t{1} << 20;

/// One side of the job: where places are world ranks, or the files of a checkpoint.
struct Endpoint {
  std::string role;   // "source", "target", or with several pools "target.0", "target.1" …
  std::string layout; // its name, for people
  bool storage = false;
  std::string directory;   // a storage endpoint's folder, as written in the job
  bool checkpoint = false; // storage: one Hugging Face checkpoint, not a file per place
  std::vector<Axis> axes;
  std::vector<int32_t> ranks; // world rank of each place; for storage 0, 1, 2 … (file numbers)
  std::vector<Sharding> shardings;
  std::vector<unsigned> placement; // per index variable of the model: the Share value -> position on the place (kChunk)
  std::vector<Param> params;
  std::vector<Presence> authority; // of the source: the places that may be read; empty: all
  std::vector<uint32_t> epochs;    // of a target, by place: when it joined (--keep); empty: all at once
  uint32_t epoch(int64_t meshRank) const { return epochs.empty() ? 0 : epochs[meshRank]; }
  int64_t relabeled = 0; // bytes that are local since `relabel` chose the order of the ranks
  std::vector<std::string>
      omitted; // params of the layout that the endpoint does not have: only, ignore, --allow=missing
  int64_t meshRanks() const { return static_cast<int64_t>(ranks.size()); }
  bool operator==(const Endpoint &) const = default;
};

/// What the ranks are joined by. Rates are bytes per second and direction, times nanoseconds. The values are those of a
/// node of eight H100 with a 400 Gb/s NIC each (examples/topologies/h100x8.yaml says whence).
struct Topology {
  int64_t ranksPerNode = 0;                                // 0: all ranks on one node
  int64_t linkRate = 450'000'000'000, linkLatency = 3'000; // of a rank, inside its node
  int64_t nicsPerNode = 0;                                 // shared by the node's ranks, in order; 0: one for each rank
  int64_t nicRate = 50'000'000'000, nicLatency = 8'000;    // of a NIC, between nodes
  int64_t copyRate = 1'300'000'000'000;                    // of a rank: bytes copied, each read once and written once
  /// The node of a world rank.
  int64_t node(int64_t rank) const { return ranksPerNode > 0 ? rank / ranksPerNode : 0; }
  /// The NIC of a world rank, numbered over all nodes.
  int64_t nic(int64_t rank) const {
    return nicsPerNode == 0 || ranksPerNode == 0
               ? rank
               : node(rank) * nicsPerNode + rank % ranksPerNode * nicsPerNode / ranksPerNode;
  }
  /// The most ranks that share a NIC.
  int64_t ranksOfNic() const {
    return nicsPerNode == 0 || ranksPerNode == 0 ? 1 : (ranksPerNode + nicsPerNode - 1) / nicsPerNode;
  }
  bool operator==(const Topology &) const = default;
};

/// How ranks exchange what they read of files for each other. automatic: distribute chooses one of the others; nodes:
/// into each node once, on from node to node, and from one rank to the others inside; p2p: from the reader to each;
/// broadcast: along a binomial tree; gather_rounds: round a ring.
enum class Exchange : uint8_t { automatic, nodes, p2p, broadcast, gather_rounds };
const char *name(Exchange exchange);
std::optional<Exchange> parseExchange(const std::string &text);

/// How the work on files that every rank can reach is shared out.
struct FileDistribution {
  Exchange exchange = Exchange::automatic;
  bool megatron = false; // --algorithm=megatron: whole shards in Megatron-Core's order; else the fractional optimum
  std::vector<std::string> group; // axes: ranks that differ along these alone read for each other; empty: all do
  bool operator==(const FileDistribution &) const = default;
};

/// The layout level: what the YAML said, resolved. Endpoint 0 is the source.
struct Layout {
  std::string model;
  int64_t world = 0;
  int64_t stagingLimit = 0; // bytes per rank; 0: unlimited
  Topology topology;
  FileDistribution files;
  std::vector<IndexVariable> variables;
  std::vector<TensorPattern> tensorPatterns;
  std::vector<Endpoint> endpoints;
  std::vector<std::string> unused; // names (patterns) of source tensors that no target takes
  bool operator==(const Layout &) const = default;
};

/// The coordinate of `place` over `axes` (outermost first) of an endpoint.
int64_t coordinate(const Endpoint &endpoint, const std::vector<unsigned> &axes, int64_t meshRank);
/// Whether a place passes a param's presence rules. It may still have no instance of it.
bool present(const Endpoint &endpoint, const Param &param, int64_t meshRank);
/// Whether a source place may be read.
bool mayRead(const Endpoint &endpoint, int64_t meshRank);
/// Number of instances of a param on a place; 0 where it is absent.
int64_t instances(const Endpoint &endpoint, const Param &param, int64_t meshRank);
/// Local shape in elements; bytes of one instance.
std::vector<int64_t> localShape(const Endpoint &endpoint, const Param &param, int64_t meshRank);
int64_t localBytes(const Endpoint &endpoint, const Param &param, int64_t meshRank);
/// The name of instance `instance` of a param on a place.
std::string instanceName(const Layout &layout, const Endpoint &endpoint, const Param &param, int64_t meshRank,
                         int64_t instance);

// -------------------------------------------------------------------------------------------- transfer level

/// One alternative source of a tile: places that hold the same elements at the same local positions.
struct ReplicaGroup {
  unsigned param = 0, part = 0;    // of endpoint 0
  std::vector<int32_t> meshRanks;  // ascending
  std::vector<unsigned> relations; // per dimension of the target part, into Transfers::relations: source -> target
                                   // local; padding: itself -> target local
  bool operator==(const ReplicaGroup &) const = default;
};

/// What overlap makes: for one family and one set of elements of it (a product over its dimensions, index variables
/// included), who can give it and who wants it. It stands for one transfer for each tensor in it and each target place.
struct Overlap {
  int pattern = -1;                           // -1: zero padding of the target: one holder, with the one place -1
  unsigned endpoint = 1, param = 0, part = 0; // target
  std::vector<int32_t> targets; // places of the endpoint that want it, at the same local positions, ascending
  std::vector<ReplicaGroup> replicaGroups;
  int64_t tensors = 1; // product of the index dimensions' sizes
  int64_t bytes = 0;   // of one tensor's piece
  bool operator==(const Overlap &) const = default;
};

/// Who passes on what it got: `to` gets it from `from`, both places of one target endpoint; `from` is the transfer's
/// target or the `to` of an earlier hop.
struct Hop {
  int32_t from = 0, to = 0;
  bool operator==(const Hop &) const = default;
};
using Route = std::vector<Hop>;

/// Tensors [first, first + count) of the tile (numbered in the order of the target, the last index variable fastest)
/// from one place to one place, and on from there by a route.
struct Transfer {
  static constexpr int32_t kUnassigned = -2; // a source that balance has yet to choose
  uint32_t overlap = 0;
  uint32_t first = 0, count = 1;
  uint32_t replicaGroup = 0;
  int32_t source = kUnassigned; // place of endpoint 0; -1 for padding
  int32_t target = 0;           // place of the tile's endpoint
  int32_t route = -1;           // into Transfers::routes; -1: it ends at the target
  // One tensor may be cut: then only local positions [begin, end) of the target along `dimension` of the part.
  uint32_t dimension = 0;
  int64_t begin = 0, end = 0;
  bool cut() const { return end > 0; }
  bool operator==(const Transfer &) const = default;
};

/// One loop of a descriptor, outermost first. A step moves both the byte offset and the buffer (instances of a param
/// are numbered in a row, so that a repetition over layers or experts is a loop as well).
struct Loop {
  int64_t count = 1;
  int64_t sourceStride = 0, targetStride = 0; // bytes
  int64_t sourceStep = 0, targetStep = 0;     // buffers
  bool operator==(const Loop &) const = default;
};

/// Nested loops around a row of contiguous bytes.
struct Shape {
  int64_t rowBytes = 0;
  std::vector<Loop> loops;
  bool operator==(const Shape &) const = default;
};

/// Bytes that move from a source place to a target place: a start in one instance on each side and a shape.
/// Instances are numbered over all params of a place, in the order of Endpoint::params.
struct Descriptor {
  unsigned endpoint = 1;          // target endpoint
  int32_t source = 0, target = 0; // places; source -1: zeros
  uint32_t sourceInstance = 0, targetInstance = 0;
  int64_t sourceOffset = 0, targetOffset = 0; // bytes
  uint32_t shape = 0;                         // into Transfers::shapes
  int32_t route = -1;                         // as of a transfer
  bool operator==(const Descriptor &) const = default;
};

struct Transfers {
  std::vector<IndexMap> relations;     // interned
  std::vector<Overlap> overlaps;       // by overlap
  std::vector<Route> routes;           // by distribute
  std::vector<Transfer> transfers;     // by distribute, open; by balance: ordered by tile, target, first tensor
  std::vector<Shape> shapes;           // by coalesce, interned
  std::vector<Descriptor> descriptors; // by coalesce: ordered by (source, endpoint, target), then target position
  bool operator==(const Transfers &) const = default;
};

/// Bytes of a transfer, to its target alone.
int64_t bytes(const Transfers &transfers, const Transfer &transfer);

// -------------------------------------------------------------------------------------------- schedule level

/// One side's view of a shape.
struct OperandLoop {
  int64_t count = 1;
  int64_t stride = 0; // bytes
  int64_t bufferStep = 0;
  bool operator==(const OperandLoop &) const = default;
};
struct OperandShape {
  int64_t rowBytes = 0;
  llvm::SmallVector<OperandLoop, 3> loops; // outermost first
  bool operator==(const OperandShape &) const = default;
};

/// (buffer, offset, shape): buffer 0 is the rank's arena, the others the instances of its params, endpoint by endpoint
/// (see buffers() below).
struct Operand {
  uint32_t buffer = 0;
  uint32_t shape = 0; // into RankSchedule::shapes
  int64_t offset = 0; // bytes
  bool operator==(const Operand &) const = default;
};

/// Most steps have one or two.
using Operands = llvm::SmallVector<Operand, 2>;

/// convert, barrier and hook are reserved for later passes; the verifier refuses them until then.
enum class StepKind : uint8_t { copy, send, recv, fill, convert, reduce, barrier, hook };
const char *name(StepKind kind);

/// One thing a rank does. copy: inputs[i] -> outputs[i]; send: inputs, packed in order, to the peer; recv: the same
/// bytes to outputs; fill: zeros to outputs; reduce: inputs, largest magnitudes of parts (a face `amax`), to the tensor
/// scales that they are for. A copy from the arena (buffer 0) quantises what was gathered there. A message of several
/// chunks takes two slots of the arena, `chunk` bytes each, in turn; so that one chunk is packed, or unpacked, while
/// another is on its way.
struct Step {
  StepKind kind = StepKind::copy;
  uint32_t round = 0;
  int32_t peer = -1;    // send, recv: world rank
  uint32_t message = 0; // send, recv: the same number on both sides, unique in the plan
  int64_t bytes = 0;
  Operands inputs, outputs;
  int64_t staging = -1;                 // send, recv: offset in the arena where the packed bytes stand; -1: in place
  llvm::SmallVector<uint32_t, 2> after; // steps of this rank that must be done first
  int64_t chunk =
      0; // send, recv: of a message that goes in several chunks, the bytes of each but the last; 0: it goes in one
  uint8_t slot = 0; // of its first chunk, where there are several: 0 at `staging`, 1 a chunk behind
  /// Of the arena, from `staging` on.
  int64_t stagingBytes() const { return chunk > 0 ? 2 * chunk : bytes; }
  bool operator==(const Step &) const = default;
};

/// A run of buffers of one rank: all instances of one param at one place of one endpoint.
struct BufferRange {
  unsigned endpoint = 0;
  int32_t meshRank = 0;
  unsigned param = 0;
  uint32_t first = 0; // number of the first buffer
  uint32_t count = 0;
  int64_t bytes = 0; // of each
  bool operator==(const BufferRange &) const = default;
};

/// What one rank does, in order; rounds ascend.
struct RankSchedule {
  int32_t rank = 0;
  std::vector<BufferRange> buffers;
  std::vector<OperandShape> shapes;
  std::vector<Step> steps;
  int64_t arenaBytes = 0;
  bool operator==(const RankSchedule &) const = default;
};

struct Schedule {
  uint32_t rounds = 0;
  uint32_t messages = 0;
  std::vector<RankSchedule> ranks; // one for each world rank, in order
  bool operator==(const Schedule &) const = default;
};

enum class Level : uint8_t { layout, transfer, schedule };

/// The unit that passes work on. `level` says how far it is lowered; what lies beyond is empty.
struct Module {
  Level level = Level::layout;
  Layout layout;
  Transfers transfers;
  Schedule schedule;
  std::string fingerprint; // of the input, hexadecimal
  bool operator==(const Module &) const = default;
};

/// Bytes that the instances among a rank's buffers that stand in its arena (Param::inArena) take there, at its end,
/// each from a multiple of 64 on.
int64_t stagedBytes(const Layout &layout, const std::vector<BufferRange> &buffers);

/// The buffers of every world rank: its places in every endpoint, then the storage endpoints' places that its steps may
/// use. Buffer numbers start at 1 (0 is the arena). A run is listed only where it has instances.
std::vector<std::vector<BufferRange>> buffers(const Layout &layout);

} // namespace reshard::ir
