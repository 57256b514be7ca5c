// SPDX-License-Identifier: Apache-2.0
// Makes params of the layout IR from a layout's declarations: name, instances, presence, local shape, parts.
#pragma once

#include "compiler/resolve/endpoint_context.h"
#include "compiler/resolve/flat_part.h"
#include "compiler/resolve/packs.h"
#include "compiler/resolve/tensors.h"

#include <map>
#include <string>
#include <vector>

namespace reshard {

/// A piece of an explicit param on some mesh ranks, with its defaults replaced. Lists are by dimension of the param.
struct ResolvedPiece {
  Location at;
  int leaf = -1; // tensor; -1: zeros
  std::vector<int64_t> from, step, size, to;
};

/// Adds params to an endpoint, in order.
class Params {
public:
  Params(const Model &model, const Tensors &tensors, EndpointContext &context, Diagnostics &diagnostics)
      : model_(model), tensors_(tensors), context_(context), form_(context.declaration().form),
        endpoint_(context.endpoint()), diagnostics_(diagnostics) {}

  /// Adds a param. Adds nothing if its `when` is 0, if its tensors are absent, or after errors.
  void add(const ParamDeclaration &declaration);
  /// Adds a tensor as a param of its own name with its own rules, for an endpoint without a layout.
  void add(const TensorDeclaration &declaration);

  /// The declaration of each param of the endpoint.
  const std::vector<Location> &locations() const { return locations_; }
  /// The storage rule of each param of the endpoint.
  const std::vector<StorageRule> &forms() const { return forms_; }

private:
  /// One dimension of the param.
  struct Dimension {
    int64_t rows = 0, padded = 0;        // the length of the joined array, without and with padding
    std::vector<ir::IndexMap> indexMaps; // by tensor: its position -> joined position; of a stack: one, value -> slot
    std::vector<unsigned> axes;
    DimensionShards shards; // joined position -> local position
    int64_t unit = 1;       // rows of the joined array that no sharding separates
    int stack = -1;         // a stack's index variable
  };
  /// A param under construction.
  struct Building {
    const ParamDeclaration &declaration;
    const AxisRules &inAnyChunk; // a param in several model chunks: where any of them has it; else empty
    ir::Param param;
    StorageRule form; // its own, or the endpoint's
    PackTree pack;
    std::vector<const PackTree *> leaves;
    std::vector<unsigned> stacks;      // index variable of each of the declaration's stacks
    std::vector<ir::IndexMap> exists;  // by index variable of the model, where the tensors have it
    std::vector<Dimension> dimensions; // the param's dimensions, in order
    // An explicit param: the pieces of each group, and the group of each mesh rank (-1: it lacks the param).
    std::vector<std::vector<ResolvedPiece>> pieces;
    std::vector<int> groups;
    std::string title() const { return "param '" + declaration.name + "'"; }
    /// The index variables of the name and of the stacks.
    std::vector<unsigned> variables() const {
      std::vector<unsigned> result = param.variables;
      result.insert(result.end(), stacks.begin(), stacks.end());
      return result;
    }
    /// The number of dimensions.
    size_t rank() const { return pack.shape.size() + stacks.size(); }
    /// The index variable that dimension `d` stacks; -1: none.
    int stackAt(int64_t d) const;
    /// The dimension of the param that stacks an index variable; -1: none.
    int64_t stackDimension(unsigned variable) const;
    /// The dimension of the pack that is dimension `d` of the param, which is no stack.
    int64_t inPack(int64_t d) const;
    /// The dimension of the param that is dimension `d` of the pack.
    int64_t inParam(int64_t d) const;
  };

  /// Reports an error and returns false.
  bool refuse(Location at, const std::string &message) const {
    diagnostics_.error(at, message);
    return false;
  }
  // params.cpp: presence, name, tensors, storage rule
  bool absent(const Pack &tensor) const;
  bool allAbsent(const ParamDeclaration &declaration) const;
  void checkAbsent(const ParamDeclaration &declaration) const;
  void buildByModelChunk(const ParamDeclaration &declaration);
  void build(const ParamDeclaration &declaration, const AxisRules &inAnyChunk = {});
  bool readName(Building &building) const;
  StorageRule formOf(const Building &building) const;
  bool checkTensors(Building &building) const;
  bool checkTensor(Building &building, size_t number) const;
  bool setForm(Building &building) const;
  bool checkQuantizedNames(const Building &building) const;
  // params.cpp: dimensions, and the parts that they make
  bool checkDimensions(const Building &building) const;
  bool shardDimension(Building &building, int64_t d) const;
  bool padDimension(const Expression &multiple, Dimension &dimension) const;
  bool shardByRule(const PackTree &pack, const DimensionSharding &sharding, const ResolvedRule &rule,
                   const std::string &title, Dimension &dimension) const;
  bool shardPlacedStack(Building &building, Dimension &dimension) const;
  bool checkAxes(const Building &building) const;
  bool checkSize(const Building &building) const;
  /// Local lengths by coordinate; one length if all are equal.
  static ir::Extent extentOf(const Dimension &dimension);
  bool addParts(Building &building) const;
  void addPadding(Building &building) const;
  // flat.cpp: the parts of a flat buffer
  bool addFlatParts(Building &building) const;
  void addEntry(Building &building, const PackTree &tensor, const std::vector<int64_t> &shape, int64_t start,
                const std::vector<ir::IndexMap> &indexMaps, const std::vector<FlatInterval> &ranges) const;
  void addGaps(Building &building, const std::vector<FlatInterval> &ranges) const;
  // pieces.cpp: explicit params
  bool readPieces(Building &building) const;
  bool assignGroups(Building &building) const;
  bool readPiece(const Building &building, const PieceGroup &group, const Piece &piece, ResolvedPiece &result) const;
  bool checkPieces(const Building &building, size_t group) const;
  void addPieces(Building &building) const;
  ir::Part partOf(const Building &building, int leaf, const std::vector<const ResolvedPiece *> &byRank,
                  const std::vector<unsigned> &axes) const;

  const Model &model_;
  const Tensors &tensors_;
  EndpointContext &context_;
  const StorageRule &form_; // the endpoint's rule, for params without their own
  ir::Endpoint &endpoint_;
  Diagnostics &diagnostics_;
  std::vector<Location> locations_;
  std::vector<StorageRule> forms_;
};

} // namespace reshard
