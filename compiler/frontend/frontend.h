// What the YAML says, before anything is computed from it: the text tree (Node), the model and the job.
// yaml.cpp makes Nodes, model.cpp Models, job.cpp Jobs; resolve.cpp alone turns a Job into the layout IR.
#pragma once

#include "compiler/frontend/allowed.h"
#include "compiler/frontend/diagnostics.h"
#include "compiler/frontend/stored_types.h"
#include "ir/ir.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace reshard {

/// One YAML node with its place. Scalars keep their text; whether it is a number is the reader's question.
struct Node {
  enum class Kind { null, scalar, sequence, map };
  Kind kind = Kind::null;
  Location at;
  bool quoted = false;     // a quoted scalar is text, never a number, bool or null
  std::string text;        // scalar; of a map "same": `params` that extend `params: same`
  std::vector<Node> items; // sequence
  struct Entry;
  std::vector<Entry> entries; // map, in file order; keys are scalars, unique
  /// The value of a key, or nullptr.
  const Node *find(std::string_view key) const;
};
struct Node::Entry {
  Node key, value;
};

/// An expression of the YAML with its place: integers, names, + - * / ( ), ceil(x, multiple), comparisons, and, or,
/// not.
struct Expression {
  std::string text;
  Location at;
};

/// The names an expression may use, with their values (booleans are 0 and 1).
using Environment = std::map<std::string, int64_t>;

/// The value of a name whose own definition had an error: what uses it has no value either, and no further error.
constexpr int64_t kUnknownValue = INT64_MIN;

/// The value of an expression. Errors (unknown name with the nearest known, division that leaves a rest or by zero,
/// overflow past 2^63, syntax with the caret on the offending character) go to `diagnostics`.
std::optional<int64_t> evaluate(const Expression &expression, const Environment &names, Diagnostics &diagnostics);
/// Whether the text is a valid expression, without looking names up.
bool checkSyntax(const Expression &expression, Diagnostics &diagnostics);
/// Whether it is a valid expression whose names are all known, without computing anything.
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
  std::optional<Expression> when; // where it is 0 there is no such rule
  // Pipelines, in `place` alone (pipelines.cpp):
  std::optional<Expression> interleave;       // chunks of a rank
  std::optional<Expression> first, last;      // values of the first and the last rank
  std::optional<Expression> embedding, loss;  // 0 or 1 counted as a value
  std::optional<std::vector<int64_t>> stages; // values of each virtual rank, from `stages` or `pattern`
  std::string stagesKey = "stages";           // which of the two
};

/// A number range of `where` or `ranks`, both ends included.
struct IntegerRange {
  int64_t first = 0, last = 0;
};

/// A tensor pattern of the model; expressions are evaluated already (they use `let` names alone).
struct TensorDeclaration {
  std::string name; // with {variable} placeholders
  Location at;
  std::vector<std::string> variables; // in the order of the name
  std::vector<int64_t> shape;
  Location shapeAt;
  ir::DType dtype = ir::DType::bf16;
  std::map<std::string, std::vector<IntegerRange>>
      where;           // by variable; ranges sorted, disjoint, within the variable's size
  bool absent = false; // its `when` is 0
  bool opaque = false; // bytes in one piece: no rank holds or serves a part of it
  std::optional<std::pair<std::string, Location>> tied; // the other tensor's name or suffix, as written
  std::map<int64_t, ShardRule> shard;                   // where the endpoint has no layout
};

/// What a param is built of: one tensor, or packs of packs.
struct Pack {
  enum class Kind { tensor, concat, interleave, flat };
  Kind kind = Kind::tensor;
  Location at;
  std::string tensor;               // kind tensor: name or suffix as written
  std::vector<int64_t> permute;     // finished dimension i is the tensor's dimension permute[i]; empty: as it is
  int64_t dimension = 0;            // concat, interleave
  std::optional<Expression> groups; // interleave
  std::optional<Expression> align;  // flat
  std::optional<Expression> when;   // of an entry of a flat buffer
  std::vector<Pack> of;
};

/// `axis: coordinates` of `at` or `authority`.
struct AxisCoordinates {
  Location at;
  std::vector<Expression> coordinates; // which may use the names first and last
};
using AxisRules = std::vector<std::pair<std::string, AxisCoordinates>>;

/// A name in which `*` and `?` stand for others.
struct Glob {
  std::string text;
  Location at;
};

/// `quantize`.
struct QuantizeRule {
  Location at;
  std::optional<ir::Quantization> format; // none: not quantised
  std::string scale, tensorScale;         // names, with {name} for the param's
  bool swizzled = false;
  enum class By { either, receiver, sender } by = By::either;
  std::vector<Glob> only, ignore; // of an endpoint
};

/// How values stand in memory, of a param or of all of an endpoint's: `dtype`, and `convert: rne` where rounding is
/// meant; or `quantize`; or, of a param, as the caller's `transform` of a name has it.
struct StorageForm {
  std::optional<std::pair<ir::DType, Location>> dtype;
  std::optional<Location> storedAt;          // of an endpoint: `dtype: stored`
  std::shared_ptr<const StoredTypes> stored; // what its files say then
  bool rounding = false;
  std::optional<QuantizeRule> quantize;
  std::optional<std::pair<std::string, Location>> transform;
  std::string title; // of what stands beside a declared param: "the scales of param 'x'"
};

struct ParamDeclaration {
  std::string name;   // with {x}, {x.local}, {x.chunk} placeholders
  std::string prefix; // of the name, for `chunks` of the layout
  Location at;
  Pack pack;
  bool joined = false;                                   // cut: joined
  std::optional<std::pair<std::string, Location>> stack; // index variable
  int64_t stackDimension = 0;
  std::map<int64_t, Expression> pad; // dimension -> multiple
  std::map<int64_t, ShardRule> shard;
  bool hasOwnSharding = false; // `shard` is stated, be it empty: no glob counts
  AxisRules presence;          // at
  std::optional<Expression> when;
  std::map<std::string, std::vector<IntegerRange>> where; // by variable, as of a tensor
  std::string refresh;                                    // the engine's hook after a run; empty: none
  StorageForm form;
};

/// `chunks` of a layout: each chunk of a rank is a module of its own, whose params' names begin with its number.
struct ChunkNames {
  std::string variable;
  std::string prefix; // with {variable.chunk}
  Location at;
};

struct LayoutDeclaration {
  std::string name;
  Location at;
  std::optional<std::vector<std::pair<std::string, Location>>> axes;
  std::map<std::string, ShardRule> placement; // index variable -> rule
  std::optional<ChunkNames> chunks;
  std::map<std::string, Expression> switches; // defaults
  std::vector<ParamDeclaration> params;
  bool same = false;                                                // params: same
  std::vector<std::pair<Glob, std::map<int64_t, ShardRule>>> shard; // of `params: same`, in order
};

struct Model {
  std::string name;
  Location at;
  std::string path; // the file, or empty where inline
  std::shared_ptr<const Config> config;
  Environment let;
  std::vector<ir::IndexVariable> variables;
  std::map<std::string, Location> variablesAt;
  std::vector<TensorDeclaration> tensors;
  std::map<std::string, ShardRule> placement; // index variable -> rule, where the endpoint has no layout
  std::vector<LayoutDeclaration> layouts;
  size_t layoutParams = 0; // of all layouts so far
};

struct EndpointDeclaration {
  std::string role; // source, target, target.0 …
  Location at;
  std::optional<std::pair<std::string, Location>> layout; // a name that the model has
  const LayoutDeclaration *layoutDeclaration = nullptr;   // into Model::layouts
  std::vector<ir::Axis> axes;                             // mesh and its views; strides computed, coordinates agree
  int64_t meshSize = 1;
  Location meshAt;
  std::vector<int32_t> ranks; // by place; storage: 0, 1, …
  Location ranksAt;
  bool storage = false;
  bool checkpoint = false; // storage without a mesh: a Hugging Face checkpoint
  std::string directory;
  std::map<std::string, ShardRule> placement; // overrides the layout's
  std::map<std::string, int64_t> switches;    // defaults of the layout, overridden
  std::vector<Glob> only, ignore;
  AxisRules authority; // of the source
  StorageForm form;
};

struct Job {
  std::string path;
  Location at;
  Model model;
  std::vector<EndpointDeclaration> endpoints; // 0 is the source
  int64_t world = 0;
  int64_t stagingLimit = 0;
  Location stagingAt; // options.staging
  ir::Topology topology;
  std::vector<std::string> group;                  // options.group
  ir::Exchange exchange = ir::Exchange::automatic; // options.exchange
  std::string fingerprint;                         // hexadecimal XXH3-128 of all files read, in order, and of --set
};

/// Limits on input; past them an error says so. No plan holds more bytes of a tensor, or instances of a param on a
/// rank, than its loader takes (emit.cpp sees to it).
constexpr int64_t kMaxBytes = 1LL << 60, kMaxInstances = 1LL << 22;
constexpr int64_t kMaxWorld = 1 << 20, kMaxIndexValues = 1 << 20, kMaxDimensions = 8, kMaxFileBytes = 256 << 20;
constexpr int64_t kMaxParamInstances = 1LL << 32; // of all params of a rank
constexpr size_t kMaxGlobs = 1024;                // of one list
constexpr size_t kMaxAxes = 1024;                 // of a mesh, in all its views together; that a layout lists
constexpr size_t kMaxVariables = 1024, kMaxLayouts = 1024;
constexpr size_t kMaxLayoutParams = 1 << 19; // of all layouts together, inherited ones included

/// The text of a YAML file, from byte `begin` of its first line on, as a tree. YAML 1.2 core; duplicate keys, anchors
/// and aliases, tags, further documents, invalid UTF-8, non-scalar keys, nesting past 64 and files past kMaxFileBytes
/// are errors with their place. After errors that leave a whole tree (a duplicate key, an anchor, a tag) it is given
/// all the same, so that the rest can be looked at; else nullptr.
std::unique_ptr<Node> parseYaml(uint32_t file, Diagnostics &diagnostics, size_t begin = 0);

/// The model of a node (the whole file, or the inline map). `folder`: where its `config:` path starts.
std::optional<Model> readModel(const Node &node, const std::string &folder, Diagnostics &diagnostics);

/// The whole job: the file, what it includes by path (relative to the including file), and overrides `a.b=c`.
std::optional<Job> readJob(const std::string &path, const std::vector<std::string> &overrides, Diagnostics &diagnostics,
                           const Allowed &allowed = {}, const ReadStoredTensors &readStoredTensors = {});

/// The job's layouts, placed and packed: families, shares, params. Errors name both sides where two do not agree.
std::optional<ir::Layout> resolve(const Job &job, Diagnostics &diagnostics, const Allowed &allowed = {});

} // namespace reshard
