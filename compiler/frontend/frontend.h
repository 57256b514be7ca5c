// SPDX-License-Identifier: Apache-2.0
// The data structures of the frontend: the model and the job. Expressions with axes are not yet evaluated. model.cpp
// builds Models, job.cpp Jobs, from Nodes (base/yaml/node.h); compiler/resolve turns a Job into the layout IR.
#pragma once

#include "base/yaml/node.h"
#include "compiler/frontend/allowed.h"
#include "compiler/frontend/stored_tensors.h"
#include "ir/ir.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace reshard {

/// An expression of the YAML with its source location: integers, names, + - * / ( ), ceil(x, multiple), comparisons,
/// and, or, not.
struct Expression {
  std::string text;
  Location at;
};

/// The names an expression may use, with their values (booleans are 0 and 1).
using Environment = std::map<std::string, int64_t>;

/// The value of a name whose definition had an error. An expression that uses the name has no value either, and reports
/// no further error.
constexpr int64_t kUnknownValue = INT64_MIN;

/// Evaluates an expression. Errors go to `diagnostics`: an unknown name (with the nearest known one), a division by
/// zero or with a remainder, an overflow past 2^63, a syntax error (with the caret at the character). nullopt after an
/// error or if a name has kUnknownValue.
std::optional<int64_t> evaluate(const Expression &expression, const Environment &names, Diagnostics &diagnostics);
/// Checks the syntax of an expression; does not look up names. False after an error.
bool checkSyntax(const Expression &expression, Diagnostics &diagnostics);
/// Checks the syntax of an expression and that all its names are known; computes nothing. False after an error.
bool checkNames(const Expression &expression, const Environment &names, Diagnostics &diagnostics);

class Config;

/// One rule `axis`, `[axis, axis]` or `{axis: …, scheme…}` for a dimension or an index variable.
struct ShardRule {
  Location at;
  std::vector<std::pair<std::string, Location>> axes; // outermost first
  std::string scheme = "even";                        // a row of schemes.def
  Location schemeAt;
  std::vector<Expression> numbers;            // sizes, blocks: the list; stride, cyclic: the one number
  std::vector<std::vector<Expression>> lists; // map
  std::optional<Expression> unit;
  bool replicate = false;
  std::optional<Expression> when; // the rule is ignored if this is 0
  // Pipelines, allowed only in `place` (shard_rule.cpp, compiler/resolve/endpoint_context.cpp):
  std::optional<Expression> interleave;       // number of chunks per rank
  std::optional<Expression> first, last;      // number of values on the first and the last rank
  std::optional<Expression> embedding, loss;  // 1: the embedding (loss) counts as one value; 0: it does not
  std::optional<std::vector<int64_t>> stages; // number of values of each stage, from `stages` or `pattern`
  std::string stagesKey = "stages";           // the YAML key that `stages` was read from
};

/// A range of integers in `where` or `ranks`. Both ends are included.
struct IntegerRange {
  int64_t first = 0, last = 0;
};

/// A tensor pattern of the model. Its expressions use only `let` names and are already evaluated.
struct TensorDeclaration {
  std::string name; // with {variable} placeholders
  Location at;
  std::vector<std::string> variables; // in the order of the name
  std::vector<int64_t> shape;
  Location shapeAt;
  ir::DType dtype = ir::DType::bf16;
  std::map<std::string, std::vector<IntegerRange>>
      where;           // by variable; ranges sorted, disjoint, within the variable's size
  bool absent = false; // true if its `when` is 0
  bool opaque = false; // a block of bytes that is never split: a rank holds all of it or none
  bool buffer = false; // not trained: an optimizer has no state for it
  std::optional<std::pair<std::string, Location>> tied; // name or suffix of the other tensor, as written
  std::map<int64_t, ShardRule> shard;                   // used by endpoints without a layout
  std::string state; // the name of an optimizer's state, with which the name of the tensor ends; empty: a weight
};

/// One entry of `optimizer` of the model: a tensor for each tensor of the model.
struct OptimizerState {
  std::string name;
  ir::DType dtype = ir::DType::fp32;
  bool scalar = false;                         // else it has the shape of its weight
  std::optional<Location> tied = std::nullopt; // where `tied: true` is: the state has the elements of its weight
};

/// The content of a param: one tensor, or a pack. Packs may be nested.
struct Pack {
  enum class Kind { tensor, concat, interleave, flat, pieces };
  Kind kind = Kind::tensor;
  Location at;
  std::string tensor;               // for Kind::tensor: name or suffix, as written
  std::vector<int64_t> permute;     // dimension i of the param is dimension permute[i] of the tensor; empty: identity
  int64_t dimension = 0;            // concat, interleave
  std::optional<Expression> groups; // interleave
  std::optional<Expression> align;  // flat
  std::optional<Expression> when;   // for an entry of a flat buffer
  std::vector<Pack> of;
};

/// One piece of an explicit param: a box of a tensor, or zeros, at a box of the param. Lists are by dimension of the
/// param; an empty one stands for its default.
struct Piece {
  Location at;
  int tensor = -1;                 // the entry of the pack; -1: zeros
  std::vector<int64_t> from, step; // in the tensor: the first position and the distance of positions
  std::vector<int64_t> size, to;   // in the param
};

/// What some mesh ranks hold of an explicit param.
struct PieceGroup {
  Location at;
  std::vector<IntegerRange> ranks; // mesh ranks
  bool everywhere = false;         // no `ranks`: all mesh ranks that have the param
  std::vector<int64_t> shape;
  std::vector<Piece> pieces;
};

/// One entry `axis: coordinates` of `at` or `authority`.
struct AxisCoordinates {
  Location at;
  std::vector<Expression> coordinates; // may use the names `first` and `last`
};
using AxisRules = std::vector<std::pair<std::string, AxisCoordinates>>;

/// A name pattern: `*` matches any characters, `?` matches one.
struct Glob {
  std::string text;
  Location at;
};

/// The value of the key `quantize`.
struct QuantizeRule {
  Location at;
  std::optional<ir::Quantization> format; // nullopt: not quantized
  std::string codes, scale, tensorScale;  // name patterns; {name} is the name of the param
  std::string shape;       // name pattern of the param that holds the shape of the matrix; empty: no such param
  bool codeBlocks = false; // each block of codes is a row of its own: [.., columns / 32, bytes of a block]
  ir::ScaleLayout scaleLayout = ir::ScaleLayout::plain;
  enum class By { either, receiver, sender } by = By::either;
  std::vector<Glob> only, ignore; // endpoints only
};

/// Determines the storage form of one param or of all params of an endpoint: a `dtype` (with `convert` if rounding is
/// intended), a quantized format (`quantize`), or, for one param, a `transform` of the caller.
struct StorageRule {
  std::optional<std::pair<ir::DType, Location>> dtype;
  std::optional<Location> storedAt;                             // endpoints only: location of `dtype: stored`
  std::shared_ptr<const StoredTypes> stored;                    // the dtypes in its files, for `dtype: stored`
  std::optional<std::pair<ir::OverflowRule, Location>> convert; // values may be rounded
  std::optional<QuantizeRule> quantize;
  std::optional<std::pair<std::string, Location>> transform;
  std::string title; // for params that the compiler adds to a declared one: "the scales of param 'x'"
};

/// One entry of `stack`: the dimension of a param whose positions are the values of an index variable.
struct StackRule {
  std::string variable;
  Location at;
  int64_t dimension = 0; // the dimension of the param
};

struct ParamDeclaration {
  std::string name;   // with {x}, {x.local}, {x.chunk} placeholders
  std::string prefix; // prefix of the name, from `chunks` of the layout
  Location at;
  Pack pack;
  std::vector<PieceGroup> pieces; // Pack::Kind::pieces only; the entries of the pack are the tensors of the pieces
  bool joined = false;            // cut: joined
  std::vector<StackRule> stacks;
  std::map<int64_t, Expression> pad; // dimension -> multiple
  std::map<int64_t, ShardRule> shard;
  bool hasOwnSharding =
      false;          // true if the param has `shard`, even an empty one: the globs of the layout's `shard` are ignored
  AxisRules presence; // `at`
  std::optional<Expression> when;
  std::map<std::string, std::vector<IntegerRange>> where; // by index variable, as for a tensor
  std::string refresh;                                    // name of the hook that runs after the plan; empty: none
  StorageRule form;
};

/// `chunks` of a layout: each model chunk of a rank is a separate module, and its params' names begin with its number.
struct ModelChunkNames {
  std::string variable;
  std::string prefix; // contains {variable.chunk}
  Location at;
};

/// One entry of `rename` of a layout: the names of params that begin with `from` begin with `to` instead.
struct NameBeginning {
  std::string from, to;
  Location at;
};

/// `optimizer` of a layout: the names of weights and of an optimizer's states. Texts contain {param}, the name of the
/// weight's param, and `states` also {state}.
struct OptimizerNames {
  std::string weights = "{param}", states;
  std::optional<std::vector<std::string>> of; // the states that the layout has; nullopt: all
  Location at;
};

struct LayoutDeclaration {
  std::string name;
  Location at;
  std::optional<std::vector<std::pair<std::string, Location>>> axes;
  std::map<std::string, ShardRule> placement; // index variable -> rule
  std::optional<ModelChunkNames> chunks;
  std::map<std::string, Expression> switches; // default values
  std::vector<ParamDeclaration> params;
  bool same = false;                 // params: same
  std::vector<NameBeginning> rename; // only the longest `from` with which a param's name begins applies
  std::optional<OptimizerNames> optimizer;
  std::vector<std::pair<Glob, std::map<int64_t, ShardRule>>>
      shard; // for `params: same`; the first matching glob applies
};

struct Model {
  std::string name;
  Location at;
  std::string path; // the model file; empty if the model is inline
  std::shared_ptr<const Config> config;
  Environment let;
  std::vector<ir::IndexVariable> variables;
  std::map<std::string, Location> variablesAt;
  std::vector<OptimizerState> states;         // what the optimizer keeps for each weight
  std::vector<TensorDeclaration> tensors;     // the weights, and after them their states
  std::map<std::string, ShardRule> placement; // index variable -> rule; used by endpoints without a layout
  std::vector<LayoutDeclaration> layouts;
  size_t layoutParams = 0; // number of params of all layouts read so far
};

struct EndpointDeclaration {
  std::string role; // source, target, target.0 …
  Location at;
  std::optional<std::pair<std::string, Location>> layout; // name and location
  const LayoutDeclaration *layoutDeclaration = nullptr;   // points into Model::layouts
  std::vector<ir::Axis> axes;                             // the axes of the mesh and of its views, without repetition
  int64_t meshSize = 1;
  Location meshAt;
  std::vector<int32_t> ranks; // world rank of each mesh rank; for storage 0, 1, …
  Location ranksAt;
  int64_t replicas = 0; // engine replicas of a target; 0: not given
  Location replicasAt;
  bool storage = false;
  bool checkpoint = false; // true for storage without a mesh: one checkpoint of `format`
  StorageFormat format = StorageFormat::safetensors;
  std::shared_ptr<const StoredFiles> files; // the tensors in the files of a source, if they have been read
  std::string directory;
  std::optional<int64_t> chunkBytes; // the largest chunk of a target, in a format of which reshard writes chunks
  Location storageAt;
  std::map<std::string, ShardRule> placement; // overrides `place` of the layout
  std::map<std::string, int64_t> switches;    // the layout's defaults with this endpoint's overrides
  std::vector<Glob> only, ignore;
  AxisRules authority; // source only
  StorageRule form;
};

struct Job {
  std::string path;
  Location at;
  Model model;
  std::vector<EndpointDeclaration> endpoints; // [0] is the source
  int64_t world = 0;
  int64_t stagingLimit = 0;
  Location stagingAt; // options.staging
  ir::Topology topology;
  std::vector<std::string> group;                  // options.group
  ir::Exchange exchange = ir::Exchange::automatic; // options.exchange
  std::string fingerprint; // hexadecimal XXH3-128 of all files read, in order, and of --set options
};

/// Limits on input; exceeding one is an error. kMaxBytes (of a tensor), kMaxInstances (of a param on a rank), and
/// kMaxReplicas and kMaxPoolRanks (of a pool) equal the limits of the plan loader, so that every emitted plan can be
/// loaded.
constexpr int64_t kMaxBytes = 1LL << 60, kMaxInstances = 1LL << 22;
constexpr int64_t kMaxIndexValues = 1 << 20, kMaxDimensions = 8;
constexpr size_t kMaxPieces = 1 << 12;            // in one explicit param
constexpr int64_t kMaxParamInstances = 1LL << 32; // for all params of a rank together
constexpr int64_t kMaxReplicas = 1 << 16, kMaxPoolRanks = 1LL << 31;
constexpr size_t kMaxGlobs = 1024; // in one list
constexpr size_t kMaxAxes = 1024;  // for a mesh with all its views; also for `axes` of a layout
constexpr size_t kMaxVariables = 1024, kMaxLayouts = 1024, kMaxOptimizerStates = 16;
constexpr size_t kMaxLayoutParams = 1 << 19; // for all layouts together, including inherited ones

/// Reads a job: the file, the files it includes (paths are relative to the including file), and overrides `a.b=c`.
/// nullopt after an error.
std::optional<Job> readJob(const std::string &path, const std::vector<std::string> &overrides, Diagnostics &diagnostics,
                           const Allowed &allowed = {}, const ReadStoredFiles &readStoredFiles = {});

} // namespace reshard
