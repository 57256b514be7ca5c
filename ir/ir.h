// SPDX-License-Identifier: Apache-2.0
// The three levels of the reshard IR: layout, transfer, schedule. Plain data: text.cpp prints it, parse.cpp reads it,
// verify.cpp checks its invariants, and the passes (compiler/passes.def) lower one level to the next.
#pragma once

#include "base/formats/quantized_formats.h"
#include "base/formats/storage_formats.h"
#include "base/topology.h"
#include "ir/index_map.h"

#include "llvm/ADT/ArrayRef.h"
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

/// A named mesh axis. The coordinate of mesh rank p is (p / stride) mod size. An endpoint's list of axes contains the
/// axes of all views of its mesh.
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
/// Its *dimensions* are its index variables (in the order of the name), followed by the dimensions of the tensor.
struct TensorPattern {
  std::string name;                // with {variable} placeholders
  std::vector<unsigned> variables; // into Layout::variables
  std::vector<IndexMap> exists;    // per variable: existing values (`from` side) -> 0, 1, 2 …
  std::vector<int64_t> shape;      // elements
  DType dtype = DType::bf16;
  size_t rank() const { return variables.size() + shape.size(); }
  bool operator==(const TensorPattern &) const = default;
};

/// The distribution of one dimension, or of the values of an index variable: for each coordinate over `axes`, the
/// relation from logical position to local position. Several axes form one coordinate, outermost first.
struct Sharding {
  std::vector<unsigned> axes; // into Endpoint::axes; empty: the same on every mesh rank
  std::vector<IndexMap> at;   // by coordinate; one entry if `axes` is empty
  int64_t unit = 1;           // no later pass cuts inside logical positions [i * unit, (i + 1) * unit)
  bool operator==(const Sharding &) const = default;
};

/// The local length of one param dimension, by coordinate of `axes`.
struct Extent {
  std::vector<unsigned> axes;
  std::vector<int64_t> at;
  bool operator==(const Extent &) const = default;
};

/// The location of one dimension of a tensor pattern inside a param. If several dimensions share one param dimension
/// (a flat buffer), the position in the param is the sum of their local positions.
struct PartDimension {
  unsigned sharding = 0; // into Endpoint::shardings: logical -> local position along `param`
  int param = -1;        // the param's dimension; -1: an index variable in the param's name (local = instance, dense)
  bool operator==(const PartDimension &) const = default;
};

/// A tensor pattern, whole or sharded, inside a param. Pattern -1 is zero padding: it has one dimension for each name
/// variable and each param dimension, in that order, and only the `to` sides of its shardings have a meaning.
struct Part {
  int pattern = -1;
  std::vector<PartDimension> dimensions; // one for each dimension of the pattern
  bool operator==(const Part &) const = default;
};

/// Restricts a param to some coordinates of an axis (`at: {pp: first}`).
struct Presence {
  unsigned axis = 0;
  std::vector<int64_t> coordinates; // sorted
  bool operator==(const Presence &) const = default;
};

using reshard::OverflowRule;
using reshard::Quantization;
using reshard::ScaleLayout;
using reshard::Topology;
/// Kinds of quantized views; schema/plan.fbs defines them.
enum class ViewKind : uint8_t { elements, codes, scales, plain_scales, amax };
const char *name(ViewKind kind);
std::optional<ViewKind> parseViewKind(const std::string &text);

/// Makes a param a view of other params of its endpoint in another form (schema/plan.fbs). Such a param is not bound.
/// `codes`, `scales` and `tensorScale` are indices into Endpoint::params.
struct QuantizedView {
  ViewKind kind = ViewKind::elements;
  Quantization format{};
  bool staged = false; // has memory in the arena; `elements` receive into it, some rows of blocks at a time
  ScaleLayout scaleLayout = ScaleLayout::plain;
  unsigned codes = 0;       // `elements`: the param of codes; other kinds: the base param
  unsigned scales = 0;      // `elements` and `codes`
  unsigned tensorScale = 0; // `elements` of a format with tensor scales
  unsigned part = 0;        // `amax` of a source: the part of the base param
  // `amax` of a source: the dimensions of the tensor over which each amax is taken; bit i is the dimension with i
  // dimensions after it; 0: the last two dimensions.
  unsigned amaxDimensions = 0;
  bool operator==(const QuantizedView &) const = default;
};

/// All params of one name pattern at one endpoint. A mesh rank has one instance for each combination of the values
/// that the name variables have on it, numbered with the last variable fastest. It has none if a presence rule
/// excludes it.
struct Param {
  std::string name;                // with {x} and {x.local} placeholders
  std::vector<unsigned> variables; // name variables, in the order of the name, into Layout::variables
  std::vector<unsigned> instances; // per name variable, the Sharding: logical value -> instance number, without gaps
  std::vector<Presence> presence;
  std::vector<Extent> shape; // elements per dimension on a mesh rank
  DType dtype = DType::bf16; // the dtype that is sent; for a source also the storage dtype
  std::vector<Part> parts;
  std::string origin;                // "file:line" of its YAML, for explanations
  std::string refresh;               // the engine's hook after each run; empty: none
  std::optional<DType> storageDtype; // target only, if it differs from `dtype`: each element is cast on arrival
  OverflowRule overflow = OverflowRule::error; // what these casts do beyond the range
  std::optional<QuantizedView> view;
  bool derived = false;  // target only: has no parts and is written through a quantized view only
  std::string transform; // the caller's conversion between its own memory and this param's arena memory; empty: none
  /// Whether elements are converted when they enter or leave its memory.
  bool converts() const { return storageDtype || (view && view->kind <= ViewKind::codes); }
  /// Whether each of its instances has its own memory in the arena.
  bool inArena() const { return view ? view->staged && view->kind != ViewKind::elements : !transform.empty(); }
  bool operator==(const Param &) const = default;
};

/// In model chunk c (a virtual pipeline stage; 0 without them) the positions of an index variable's values on a mesh
/// rank start at c * kModelChunkStride: `{x.local}` is the position modulo kModelChunkStride, `{x.chunk}` the quotient.
constexpr int64_t kModelChunkStride = int64_t{1} << 20;

/// One side of the job. Its mesh ranks are world ranks, or the files of a checkpoint.
struct Endpoint {
  std::string role;   // "source", "target", or with several targets "target.0", "target.1" …
  std::string layout; // the layout's name, for messages
  bool storage = false;
  std::string directory; // a storage endpoint's folder, as written in the job
  /// Storage: one checkpoint of `format` instead of a file per mesh rank. In a format with chunks, the mesh ranks that
  /// have a param have its chunks in the order of their offsets in the tensor.
  bool checkpoint = false;
  StorageFormat format = StorageFormat::safetensors;
  std::vector<Axis> axes;
  std::vector<int32_t> ranks; // world rank of each mesh rank; for storage 0, 1, 2 … (file numbers)
  std::vector<Sharding> shardings;
  std::vector<unsigned>
      placement; // per index variable of the model, the Sharding: value -> position (kModelChunkStride)
  std::vector<Param> params;
  std::vector<Presence> authority; // source only: the mesh ranks that may be read; empty: all
  std::vector<uint32_t> epochs;    // target only, by mesh rank: the epoch in which it joined (--keep); empty: all 0
  uint32_t epoch(int64_t meshRank) const { return epochs.empty() ? 0 : epochs[meshRank]; }
  int64_t replicas = 0;  // a single target only: engine replicas; `ranks` are replica 0's (plan.fbs); 0: no pool
  int64_t relabeled = 0; // bytes that became local because `relabel` chose the order of the ranks
  std::vector<std::string> omitted; // params of the layout that the endpoint lacks: only, ignore, --allow=missing
  int64_t meshRanks() const { return static_cast<int64_t>(ranks.size()); }
  bool operator==(const Endpoint &) const = default;
};

/// How a rank forwards the bytes that it read from files to the other ranks that need them.
/// automatic: the pass `distribute` chooses one of the others. nodes: each node receives the bytes once, forwards them
/// to the next node, and one rank forwards them inside the node. p2p: from the reader to each rank. broadcast: along a
/// binomial tree. gather_rounds: around a ring.
enum class Exchange : uint8_t { automatic, nodes, p2p, broadcast, gather_rounds };
const char *name(Exchange exchange);
std::optional<Exchange> parseExchange(const std::string &text);

/// How the reading and writing of files that every rank can open is distributed over the ranks.
struct FileDistribution {
  Exchange exchange = Exchange::automatic;
  bool megatron = false; // --algorithm=megatron: whole shards in Megatron-Core's order; false: the fractional optimum
  std::vector<std::string> group; // axes: only ranks that differ in no other axis read for each other; empty: all do
  bool operator==(const FileDistribution &) const = default;
};

/// The layout level: the resolved YAML. Endpoint 0 is the source.
struct Layout {
  std::string model;
  int64_t world = 0;
  int64_t stagingLimit = 0; // bytes per rank; 0: unlimited
  Topology topology;
  FileDistribution files;
  std::vector<IndexVariable> variables;
  std::vector<TensorPattern> tensorPatterns;
  std::vector<Endpoint> endpoints;
  std::vector<std::string> unused; // name patterns of source tensors that no target uses
  bool foldsCopies = false;        // the transfers are copy 0's, which all copies repeat (ir/copies.h)
  /// Whether the target is a pool: engine replicas pull, and source ranks only send.
  bool pool() const { return endpoints.back().replicas > 0; }
  bool operator==(const Layout &) const = default;
};

/// The coordinate of a mesh rank over `axes` (outermost first) of an endpoint.
int64_t coordinate(const Endpoint &endpoint, const std::vector<unsigned> &axes, int64_t meshRank);
/// Whether a mesh rank satisfies a param's presence rules. It may still have no instance of the param.
bool present(const Endpoint &endpoint, const Param &param, int64_t meshRank);
/// Whether the authority rules allow reading a source mesh rank.
bool mayRead(const Endpoint &endpoint, int64_t meshRank);
/// Number of instances of a param on a mesh rank; 0 if it is absent.
int64_t instances(const Endpoint &endpoint, const Param &param, int64_t meshRank);
/// Shape of one instance on a mesh rank, in elements.
std::vector<int64_t> localShape(const Endpoint &endpoint, const Param &param, int64_t meshRank);
/// Bytes of one instance on a mesh rank, in the dtype that is sent.
int64_t localBytes(const Endpoint &endpoint, const Param &param, int64_t meshRank);
/// The name of one instance of a param on a mesh rank, with all placeholders replaced.
std::string instanceName(const Layout &layout, const Endpoint &endpoint, const Param &param, int64_t meshRank,
                         int64_t instance);

// -------------------------------------------------------------------------------------------- transfer level

// A large job has a million overlaps, most of them of two dimensions between two mesh ranks: short lists lie inside
// their owners.
using MeshRanks = llvm::SmallVector<int32_t, 2>;
using IndexMapNumbers = llvm::SmallVector<unsigned, 2>; // per dimension: into a table of index maps

/// One alternative source of an overlap: mesh ranks that hold the same elements at the same local positions.
struct ReplicaGroup {
  unsigned param = 0, part = 0; // numbers in endpoint 0
  MeshRanks meshRanks;          // ascending
  IndexMapNumbers relations;    // per dimension of the target part, into Transfers::relations: local position in
                                // the source (for padding: in the target) -> local position in the target
  bool operator==(const ReplicaGroup &) const = default;
};

/// The elements that one source part and one target part have in common (a product of one index set per dimension,
/// index variables included), the mesh ranks that hold them and the mesh ranks that need them. It requires one
/// transfer for each of its tensors and each target mesh rank.
struct Overlap {
  int pattern = -1; // -1: zero padding of the target; then one replica group with the one mesh rank -1
  unsigned endpoint = 1, param = 0, part = 0; // target
  MeshRanks targets; // mesh ranks of the endpoint that need it, at the same local positions, ascending
  std::vector<ReplicaGroup> replicaGroups;
  int64_t tensors = 1; // product of the index dimensions' sizes
  int64_t bytes = 0;   // the elements of one tensor
  bool operator==(const Overlap &) const = default;
};

/// One step of forwarding: `from` sends to `to`, both mesh ranks of one target endpoint. `from` is the transfer's
/// target or the `to` of an earlier hop.
struct Hop {
  int32_t from = 0, to = 0;
  bool operator==(const Hop &) const = default;
};
using Route = std::vector<Hop>;

/// Moves tensors [first, first + count) of an overlap from one mesh rank to another, which may forward them along a
/// route. Tensors are numbered in the order of the target, the last index variable fastest.
struct Transfer {
  static constexpr int32_t kUnassigned = -2; // the pass `balance` has not chosen the source yet
  uint32_t overlap = 0;
  uint32_t first = 0, count = 1;
  uint32_t replicaGroup = 0;
  int32_t source = kUnassigned; // mesh rank of endpoint 0; -1 for padding
  int32_t target = 0;           // mesh rank of the overlap's endpoint
  int32_t route = -1;           // into Transfers::routes; -1: not forwarded
  // A transfer of one tensor may be cut: it covers local positions [begin, end) of the target along `dimension`.
  uint32_t dimension = 0;
  int64_t begin = 0, end = 0;
  bool cut() const { return end > 0; }
  bool operator==(const Transfer &) const = default;
};

/// One loop of a descriptor. An iteration advances the byte offset and the buffer. Instances of a param are numbered
/// consecutively, so that a repetition over layers or experts is a loop, too.
struct Loop {
  int64_t count = 1;
  int64_t sourceStride = 0, targetStride = 0; // bytes
  int64_t sourceStep = 0, targetStep = 0;     // buffers
  bool operator==(const Loop &) const = default;
};

/// Nested loops, outermost first, around a row of contiguous bytes.
struct Shape {
  int64_t rowBytes = 0;
  std::vector<Loop> loops;
  bool operator==(const Shape &) const = default;
};

/// Bytes that move from a source mesh rank to a target mesh rank: a start in one instance on each side and a shape.
/// Instances are numbered over all params of a mesh rank, in the order of Endpoint::params.
struct Descriptor {
  unsigned endpoint = 1;          // target endpoint
  int32_t source = 0, target = 0; // mesh ranks; source -1: zeros
  uint32_t sourceInstance = 0, targetInstance = 0;
  int64_t sourceOffset = 0, targetOffset = 0; // bytes
  uint32_t shape = 0;                         // into Transfers::shapes
  int32_t route = -1;                         // as in Transfer
  bool operator==(const Descriptor &) const = default;
};

struct Transfers {
  std::vector<IndexMap> relations;     // each once
  std::vector<Overlap> overlaps;       // made by the pass `overlap`
  std::vector<Route> routes;           // made by `distribute`
  std::vector<Transfer> transfers;     // made by `distribute` without sources; completed by `balance`, which orders
                                       // them by overlap, target, first tensor
  std::vector<Shape> shapes;           // made by `coalesce`, each once
  std::vector<Descriptor> descriptors; // made by `coalesce`: by (source, endpoint, target), then by target position
  bool operator==(const Transfers &) const = default;
};

/// Bytes of a transfer from its source to its target, without forwarding.
int64_t bytes(const Transfers &transfers, const Transfer &transfer);

// -------------------------------------------------------------------------------------------- schedule level

/// One loop of an operand. An iteration advances the byte offset by `stride` and the buffer by `bufferStep`.
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

/// One side of a descriptor. Buffer 0 is the rank's arena; the others are the instances of its params, endpoint by
/// endpoint (see buffers() below).
struct Operand {
  uint32_t buffer = 0;
  uint32_t shape = 0; // into RankSchedule::shapes
  int64_t offset = 0; // bytes
  bool operator==(const Operand &) const = default;
};

/// Operands of a step; most steps have one or two.
using Operands = llvm::SmallVector<Operand, 2>;

/// convert, barrier and hook are reserved: verify() refuses them.
enum class StepKind : uint8_t { copy, send, recv, fill, reduce };
const char *name(StepKind kind);

/// One action of a rank.
/// copy: inputs[i] -> outputs[i]; from the arena (buffer 0) it quantizes staged elements. send: inputs, packed in
/// order, to the peer. recv: the same bytes to outputs. fill: zeros to outputs. reduce: inputs, the amax of parts
/// (views of kind `amax`), to the tensor scales that use them.
/// A message of several chunks uses two slots of the arena, `chunk` bytes each, alternately: one chunk is packed or
/// unpacked while another is in transit.
struct Step {
  StepKind kind = StepKind::copy;
  uint32_t round = 0;
  int32_t peer = -1;    // send, recv: world rank
  uint32_t message = 0; // send, recv: the same number on both sides, unique in the plan
  int64_t bytes = 0;
  Operands inputs, outputs;
  int64_t staging = -1;                 // send, recv: offset of the packed bytes in the arena; -1: in place
  llvm::SmallVector<uint32_t, 2> after; // steps of this rank that must be complete first
  int64_t chunk = 0;                    // send, recv: bytes of each chunk but the last; 0: the message has one chunk
  uint8_t slot = 0;                     // the slot of the first of several chunks; slot s begins at staging + s * chunk
  uint16_t level = 0;                   // dependency level: the same on both sides of a message (schema/step_rules.h)
  /// Bytes of the arena that it uses from `staging` on.
  int64_t stagingBytes() const { return chunk > 0 ? 2 * chunk : bytes; }
  bool operator==(const Step &) const = default;
};

/// Consecutive buffers of one rank: all instances of one param on one mesh rank of one endpoint.
struct BufferRange {
  unsigned endpoint = 0;
  int32_t meshRank = 0;
  unsigned param = 0;
  uint32_t first = 0; // number of the first buffer
  uint32_t count = 0;
  int64_t bytes = 0; // the length of each buffer
  bool operator==(const BufferRange &) const = default;
};

/// The steps of one rank, ordered by round.
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

/// The unit that passes transform. The members beyond `level` are empty.
struct Module {
  Level level = Level::layout;
  Layout layout;
  Transfers transfers;
  Schedule schedule;
  std::string fingerprint; // identifies the input, hexadecimal
  bool operator==(const Module &) const = default;
};

/// Bytes at the end of a rank's arena that hold the instances with memory there (Param::inArena). Each begins at a
/// multiple of 64 bytes.
int64_t stagedBytes(const Layout &layout, const std::vector<BufferRange> &buffers);

/// The buffers of each world rank, endpoint by endpoint: its own mesh rank's, or the buffers of all files of a storage
/// endpoint. Buffer numbers start at 1 (0 is the arena). A param without instances has no range.
std::vector<std::vector<BufferRange>> buffers(const Layout &layout);

} // namespace reshard::ir
