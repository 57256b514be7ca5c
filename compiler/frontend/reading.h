// What the readers of the frontend share: values of Nodes with their errors, and the maps whose keys are known.
// Every function reports its own errors and then gives nothing; `what` is how messages call the value ("'world'").
#pragma once

#include "compiler/frontend/frontend.h"

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

/// A map with known keys. Reading a key makes it known; finish() reports the others.
class Fields {
public:
  /// `what`: "the job", "tensor 'x'".
  Fields(const Node &map, std::string what, Diagnostics &diagnostics);
  /// Whether it is a map at all; an error was reported where it is not.
  bool isMap() const { return map_.kind == Node::Kind::map; }
  const Node *find(std::string_view key);
  const Node *require(std::string_view key);
  /// Keys that later versions have.
  void unsupported(std::initializer_list<std::string_view> keys);
  /// Reports unknown keys, with the nearest known one. Call it when all keys were asked for.
  void finish();

private:
  const Node &map_;
  std::string what_;
  Diagnostics &diagnostics_;
  std::vector<std::string> known_;
  std::vector<std::string_view> unsupported_;
};

/// The place of a character of a scalar.
Location locationIn(const Node &node, size_t offset);
/// "a map", "a list", "nothing", "'text'".
std::string describe(const Node &node);
/// "expected WANTED for WHAT, found …", with a hint where an unquoted name with braces was read as a map.
void refuse(const Node &node, const std::string &wanted, const std::string &what, Diagnostics &diagnostics);
/// "'x' is not supported in this version".
void refuseUnsupported(Location at, std::string_view what, Diagnostics &diagnostics);

/// Whether the node is a map; else an error.
bool checkMap(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// A single value or the items of a list.
std::vector<const Node *> valueOrItems(const Node &node);

/// Text, not empty and without control characters.
std::optional<std::string> readText(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// A name that expressions can use: letters, digits, `_`; no word of theirs.
std::optional<std::string> readIdentifier(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// A plain decimal integer of [least, most].
std::optional<int64_t> readInteger(const Node &node, const std::string &what, int64_t least, int64_t most,
                                   Diagnostics &diagnostics);
std::optional<bool> readBoolean(const Node &node, const std::string &what, Diagnostics &diagnostics);
std::optional<ir::DType> readDType(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// `dtype`, `convert` and `quantize` of a param or an endpoint.
StorageForm readStorageForm(Fields &fields, bool endpoint, Diagnostics &diagnostics);
/// An expression, quoted or not, of valid syntax.
std::optional<Expression> readExpression(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// An expression's value, of [least, most].
std::optional<int64_t> readValue(const Node &node, const std::string &what, const Environment &names, int64_t least,
                                 int64_t most, Diagnostics &diagnostics);
/// `n` or `a..b`, ends being expressions; a..a-1 is the empty range. Within [0, size) where it is not empty; `size` may
/// be kUnknownValue.
std::optional<IntegerRange> readIntegerRange(const Node &node, const std::string &what, const Environment &names,
                                             int64_t size, Diagnostics &diagnostics);

/// `{x}`, `{x.local}` or `{x.chunk}` in a name.
struct Placeholder {
  std::string variable;
  enum class Kind { value, local, chunk } kind = Kind::value;
};
/// The placeholders of a tensor's or param's name, for known index variables, each once, `{x.chunk}` beside another.
/// `local`: `{x.local}` and `{x.chunk}` are allowed.
std::optional<std::vector<Placeholder>> readPlaceholders(const Node &name,
                                                         const std::vector<ir::IndexVariable> &variables, bool local,
                                                         Diagnostics &diagnostics);
/// A name of a tensor or param with `{x}` replaced by the value wherever x is a `let` name and no index variable.
Node withValues(Node name, const Model &model);
/// An index variable's name; unknown ones are errors.
bool checkVariable(const std::string &name, Location at, const std::vector<ir::IndexVariable> &variables,
                   Diagnostics &diagnostics);

/// A rule of `shard`. With `model`, a rule of `place`, which may be a pipeline's.
std::optional<ShardRule> readShardRule(const Node &node, const Model *model, Diagnostics &diagnostics);
/// `{variable: rule}` of a layout, an endpoint or a model.
std::map<std::string, ShardRule> readPlacement(const Node &node, const Model &model, Diagnostics &diagnostics);
/// What a rule of `place` says of pipelines (pipelines.cpp); false after errors.
bool readPipeline(Fields &fields, const Node &node, const Model &model, ShardRule &rule, Diagnostics &diagnostics);

/// A pattern of layers: texts, or one character each, in stages where it is parted by `|`.
struct LayerPattern {
  bool array = false; // of texts, from the config
  size_t keys = 0;    // of the config, of which it is the value of one; 0: a text
  std::vector<std::vector<std::string>> stages;
};
/// A text, or `$key` or `$key or $key` of the config. A text's characters up to a `/`, without blanks.
std::optional<LayerPattern> readLayerPattern(const Node &node, const Model &model, Diagnostics &diagnostics);
/// `{variable: values}` for some of `variables` (where.cpp). `title`: "tensor 'x'".
std::map<std::string, std::vector<IntegerRange>> readWhere(const Node &where, const std::vector<std::string> &variables,
                                                           const std::string &title, const Model &model,
                                                           Diagnostics &diagnostics);

/// `{axis: first | last | n | [..]}` of `at` or `authority`.
AxisRules readAxisRules(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// A glob or a list of globs.
std::vector<Glob> readGlobs(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// Whether a glob fits a name. Takes time proportional to their product at most.
bool matchesGlob(const std::string &glob, const std::string &name);

/// A key that is the number of a dimension. Keys are text, so that quoting it changes nothing (JSON is YAML too).
std::optional<int64_t> readDimensionKey(Node key, Diagnostics &diagnostics);

/// `{dimension: rule}`.
std::map<int64_t, ShardRule> readShard(const Node &node, Diagnostics &diagnostics);

class Config;
/// The `let` map: expressions, and values of the Hugging Face config.
Environment readLet(const Node *let, const Config &config, Diagnostics &diagnostics);
/// Replaces `extend: FILE` of a model by what that file says, joined with what this one says (extend.cpp); false after
/// errors that leave no model.
bool extendModel(Node &model, Diagnostics &diagnostics);
/// What can be read of a model, with or without errors, so that the rest of the job can be looked at too (model.cpp).
Model readPartialModel(const Node &node, const std::string &folder, Diagnostics &diagnostics);
/// A tensor as a param of its own name (layouts.cpp).
ParamDeclaration paramOf(const TensorDeclaration &tensor);
/// One layout (layouts.cpp). `model`: its `let` and variables are read.
LayoutDeclaration readLayout(const Node &name, const Node &node, const Model &model, Diagnostics &diagnostics);
/// The mesh and its views (mesh.cpp), onto `endpoint`; false after errors.
bool readMesh(const Node &node, const Environment &let, EndpointDeclaration &endpoint, Diagnostics &diagnostics);
/// Axes, variables, switches and names in expressions, as far as layouts and endpoints name them (check_names.cpp).
void checkReferences(const Job &job, const Allowed &allowed, Diagnostics &diagnostics);

/// Sets `a.b=c` in the tree of a job (overrides.cpp). `include` replaces a path that stands for a map by that map.
using Include = std::function<bool(Node &node, std::string_view path)>;
void setOverride(Node &job, const std::string &assignment, const Include &include, Diagnostics &diagnostics);

/// Opens a file for reading: its descriptor, or -1 and why there is none. A pipe in a folder is refused, since it may
/// never have a writer, for whom opening it would wait; one that the caller hands over (/dev/stdin, or /dev/fd/63 of a
/// shell's <(…)) is read.
int openInput(const std::string &path, std::string &why);

/// The text of a file as a new file of `diagnostics`, or an error at `at`.
std::optional<uint32_t> readFile(const std::string &path, Location at, Diagnostics &diagnostics);
/// "a/b" of "a/b/c.yaml", empty where there is no folder.
std::string folderOf(const std::string &path);
/// A path as written in a file of `folder`.
std::string joinPath(const std::string &folder, const std::string &path);

} // namespace reshard
