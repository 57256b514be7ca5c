// Helpers of the frontend's readers: typed values of Nodes, and maps with a fixed set of keys.
// Each function reports its own errors and returns nullopt (or false, or an empty result) after one. `what` names the
// value in error messages: "'world'".
#pragma once

#include "compiler/frontend/frontend.h"

#include "llvm/Support/Error.h"

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

/// A map with a fixed set of keys. find() and require() add a key to the set; finish() reports all other keys.
class Fields {
public:
  /// `what`: the map in error messages: "the job", "tensor 'x'". A node that is not a map is an error.
  Fields(const Node &map, std::string what, Diagnostics &diagnostics);
  /// False if the node is not a map.
  bool isMap() const { return map_.kind == Node::Kind::map; }
  /// The value of a key, or nullptr.
  const Node *find(std::string_view key);
  /// The same; a missing key is an error.
  const Node *require(std::string_view key);
  /// Keys that are reserved for later versions; finish() reports them as unsupported.
  void unsupported(std::initializer_list<std::string_view> keys);
  /// Reports unknown keys with the nearest known one. Call it after all keys were read.
  void finish();

private:
  const Node &map_;
  std::string what_;
  Diagnostics &diagnostics_;
  std::vector<std::string> known_;
  std::vector<std::string_view> unsupported_;
};

/// The location of the character at `offset` of a scalar.
Location locationIn(const Node &node, size_t offset);
/// The node in error messages: "a map", "a list", "nothing", "'text'".
std::string describe(const Node &node);
/// Reports "expected WANTED for WHAT, found …", with a hint if an unquoted name with braces was parsed as a map.
void refuse(const Node &node, const std::string &wanted, const std::string &what, Diagnostics &diagnostics);
/// Reports "'x' is not supported in this version".
void refuseUnsupported(Location at, std::string_view what, Diagnostics &diagnostics);

/// Reports an error and returns false if the node is not a map.
bool checkMap(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// The items of a list, or the node itself.
std::vector<const Node *> valueOrItems(const Node &node);

/// Text that is not empty and has no control characters.
std::optional<std::string> readText(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// A name for use in expressions: letters, digits, `_`; not a reserved word of expressions.
std::optional<std::string> readIdentifier(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// A decimal integer in [least, most].
std::optional<int64_t> readInteger(const Node &node, const std::string &what, int64_t least, int64_t most,
                                   Diagnostics &diagnostics);
std::optional<bool> readBoolean(const Node &node, const std::string &what, Diagnostics &diagnostics);
std::optional<ir::DType> readDType(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// Reads `dtype`, `convert` and `quantize` of a param or an endpoint.
StorageForm readStorageForm(Fields &fields, bool endpoint, Diagnostics &diagnostics);
/// An expression with valid syntax, quoted or not.
std::optional<Expression> readExpression(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// The value of an expression, which must be in `range`.
std::optional<int64_t> readValue(const Node &node, const std::string &what, const Environment &names,
                                 const IntegerRange &range, Diagnostics &diagnostics);
/// `n` or `a..b`, whose ends are expressions; a..a-1 is the empty range. A range that is not empty must lie in [0,
/// size); this is not checked if `size` is kUnknownValue.
std::optional<IntegerRange> readIntegerRange(const Node &node, const std::string &what, const Environment &names,
                                             int64_t size, Diagnostics &diagnostics);

/// `{x}`, `{x.local}` or `{x.chunk}` in a name.
struct Placeholder {
  std::string variable;
  enum class Kind { value, local, chunk } kind = Kind::value;
};
/// The placeholders in the name of a tensor or param. They must be known index variables, each used once; `{x.chunk}`
/// also requires `{x}` or `{x.local}`. `local`: whether `{x.local}` and `{x.chunk}` are allowed.
std::optional<std::vector<Placeholder>> readPlaceholders(const Node &name,
                                                         const std::vector<ir::IndexVariable> &variables, bool local,
                                                         Diagnostics &diagnostics);
/// The name of a tensor or param with `{x}` replaced by its value if x is a `let` name and not an index variable.
Node withValues(Node name, const Model &model);
/// Reports an error and returns false if there is no index variable of that name.
bool checkVariable(const std::string &name, Location at, const std::vector<ir::IndexVariable> &variables,
                   Diagnostics &diagnostics);

/// Reads a rule of `shard`, or, if `model` is given, a rule of `place`, which may have pipeline keys.
std::optional<ShardRule> readShardRule(const Node &node, const Model *model, Diagnostics &diagnostics);
/// Reads `place: {variable: rule}` of a layout, an endpoint or a model.
std::map<std::string, ShardRule> readPlacement(const Node &node, const Model &model, Diagnostics &diagnostics);
/// Reads the pipeline keys of a rule of `place` into `rule` (read_pipeline.cpp). False after an error.
bool readPipeline(Fields &fields, const Node &node, const Model &model, ShardRule &rule, Diagnostics &diagnostics);

/// The kinds of layers, in order: one string or one character per layer, split into stages at `|`.
struct LayerPattern {
  bool array = false; // the kinds are strings, from an array in the config
  size_t keys = 0;    // number of config keys named as alternatives; 0: the pattern is text in the YAML
  std::vector<std::vector<std::string>> stages;
};
/// Reads a pattern: text, or `$key` or `$key or $key` of the config. Of text, only the characters before a `/` count,
/// and blanks are skipped.
std::optional<LayerPattern> readLayerPattern(const Node &node, const Model &model, Diagnostics &diagnostics);
/// Reads `where: {variable: values}` for some of `variables` (expression.cpp). `title`: "tensor 'x'".
std::map<std::string, std::vector<IntegerRange>> readWhere(const Node &where, const std::vector<std::string> &variables,
                                                           const std::string &title, const Model &model,
                                                           Diagnostics &diagnostics);

/// Reads `{axis: first | last | n | [..]}` of `at` or `authority`.
AxisRules readAxisRules(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// Reads a glob or a list of globs.
std::vector<Glob> readGlobs(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// Whether a glob matches a name. Time is at most proportional to the product of their lengths.
bool matchesGlob(const std::string &glob, const std::string &name);

/// Reads a key that is the number of a dimension. It may be quoted, because JSON, which is valid YAML, quotes all keys.
std::optional<int64_t> readDimensionKey(Node key, Diagnostics &diagnostics);

/// Reads `shard: {dimension: rule}`.
std::map<int64_t, ShardRule> readShard(const Node &node, Diagnostics &diagnostics);

class Config;
/// Evaluates the `let` map: expressions and `$key` values of the Hugging Face config (expression.cpp).
Environment readLet(const Node *let, const Config &config, Diagnostics &diagnostics);
/// Replaces `extend: FILE` of a model by the content of that file, with the model's own entries merged onto it
/// (extend.cpp). False after errors that leave no model.
bool extendModel(Node &model, Diagnostics &diagnostics);
/// Reads as much of a model as possible, despite errors, so that errors in the rest of the job are found too
/// (model.cpp).
Model readPartialModel(const Node &node, const std::string &folder, Diagnostics &diagnostics);
/// The param that holds one tensor under the tensor's own name (layouts.cpp).
ParamDeclaration paramOf(const TensorDeclaration &tensor);
/// Reads a layout (layouts.cpp). `let`, `index` and the previous layouts of `model` must already be read.
LayoutDeclaration readLayout(const Node &name, const Node &node, const Model &model, Diagnostics &diagnostics);
/// Reads the mesh and its views into `endpoint` (mesh.cpp). False after an error.
bool readMesh(const Node &node, const Environment &let, EndpointDeclaration &endpoint, Diagnostics &diagnostics);
/// Checks that all axes and all names in expressions exist, in layouts, endpoints and tensors (check_names.cpp).
void checkReferences(const Job &job, const Allowed &allowed, Diagnostics &diagnostics);

/// Applies `--set a.b=c` to the tree of a job (overrides.cpp). `include` replaces the path of an included file by the
/// map in that file; it returns false after an error.
using Include = std::function<bool(Node &node, std::string_view path)>;
void setOverride(Node &job, const std::string &assignment, const Include &include, Diagnostics &diagnostics);

/// Opens a file for reading and returns its descriptor. A named pipe is refused, because opening it blocks until it has
/// a writer; a pipe passed by the caller (/dev/stdin, or /dev/fd/63 of a shell's <(…)) is read.
llvm::Expected<int> openInput(const std::string &path);

/// Reads a file and adds its text to `diagnostics`; returns its number there. An error is reported at `at`.
std::optional<uint32_t> readFile(const std::string &path, Location at, Diagnostics &diagnostics);
/// "a/b" of "a/b/c.yaml"; empty if the path has no folder.
std::string folderOf(const std::string &path);
/// Resolves a path that is written in a file in `folder`.
std::string joinPath(const std::string &folder, const std::string &path);

} // namespace reshard
