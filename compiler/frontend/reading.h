// SPDX-License-Identifier: Apache-2.0
// Readers of the frontend: typed values of Nodes.
// Each function reports its own errors and returns nullopt (or false, or an empty result) after one. `what` names the
// value in error messages: "'world'".
#pragma once

#include "base/yaml/fields.h"
#include "compiler/frontend/frontend.h"

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

/// A name for use in expressions: letters, digits, `_`; not a reserved word of expressions.
std::optional<std::string> readIdentifier(const Node &node, const std::string &what, Diagnostics &diagnostics);
std::optional<bool> readBoolean(const Node &node, const std::string &what, Diagnostics &diagnostics);
std::optional<ir::DType> readDType(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// Reads `dtype`, `convert` and `quantize` of a param or an endpoint.
StorageRule readStorageRule(Fields &fields, bool endpoint, Diagnostics &diagnostics);
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
/// Reads `permute: [1, 0]` of a tensor.
void readPermute(const Node &node, Pack &tensor, Diagnostics &diagnostics);
/// Reads `pieces: [{ranks, shape, of: […]}, …]` of an explicit param: its groups, and their tensors as entries of its
/// pack (pieces.cpp).
void readPieces(const Node &node, const Model &model, ParamDeclaration &param, Diagnostics &diagnostics);
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
/// Reads a model from a node, a whole file or an inline map: as much as possible despite errors, so that errors in the
/// rest of the job are found too (model.cpp). `folder`: base of a relative `config:` path.
Model readModel(const Node &node, const std::string &folder, Diagnostics &diagnostics);
/// The param that holds one tensor under the tensor's own name (layouts.cpp).
ParamDeclaration paramOf(const TensorDeclaration &tensor);
/// Reads a layout (layouts.cpp). `let`, `index` and the previous layouts of `model` must already be read.
LayoutDeclaration readLayout(const Node &name, const Node &node, const Model &model, Diagnostics &diagnostics);
/// Reads the mesh and its views into `endpoint` (mesh.cpp). False after an error.
bool readMesh(const Node &node, const Environment &let, EndpointDeclaration &endpoint, Diagnostics &diagnostics);
/// Checks that all axes and all names in expressions exist, in layouts, endpoints and tensors (check_names.cpp).
void checkReferences(const Job &job, const Allowed &allowed, Diagnostics &diagnostics);

} // namespace reshard
