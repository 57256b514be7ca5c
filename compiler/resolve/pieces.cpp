// SPDX-License-Identifier: Apache-2.0
// Explicit params: the YAML states which box of which tensor is at which box of the param on each mesh rank. Their
// shardings have a coordinate for each mesh rank. The b-th piece of each mesh rank that is of one tensor (in one order
// of dimensions) makes one part: on a mesh rank it is a product of one block of positions per dimension, or empty.

#include "compiler/resolve/params.h"

#include <algorithm>
#include <map>
#include <set>

namespace reshard {

using ir::IndexMap;

namespace {

constexpr size_t kMaxPieceEntries = 1 << 22; // parts of an explicit param times mesh ranks

/// The axes of the first view of the mesh, outermost first: their coordinate is the mesh rank.
std::vector<unsigned> meshAxes(const ir::Endpoint &endpoint) {
  std::vector<unsigned> result;
  int64_t size = 1;
  for (unsigned i = 0; i < endpoint.axes.size() && size < endpoint.meshRanks(); ++i)
    if (endpoint.axes[i].size > 1 && endpoint.axes[i].stride == size) {
      result.push_back(i);
      size *= endpoint.axes[i].size;
    }
  std::reverse(result.begin(), result.end());
  return result;
}

/// The positions from, from + step … (`size` of them), related to `to`, to + 1 ….
IndexMap positions(int64_t from, int64_t step, int64_t size, int64_t to) {
  if (step == 1 || size == 1)
    return {{from, to, size, 1, 0, 0}};
  return {{from, to, 1, size, step, 1}};
}

bool overlap(const ResolvedPiece &a, const ResolvedPiece &b) {
  for (size_t d = 0; d < a.to.size(); ++d)
    if (a.to[d] >= b.to[d] + b.size[d] || b.to[d] >= a.to[d] + a.size[d])
      return false;
  return true;
}

} // namespace

/// Resolves and checks the pieces of all groups, and makes the param's dimensions.
bool Params::readPieces(Building &building) const {
  const ParamDeclaration &declaration = building.declaration;
  const size_t rank = building.rank();
  if (rank == 0)
    return refuse(declaration.at, building.title() + " is a scalar, which has no pieces, expected 'holds'");
  bool ok = assignGroups(building);
  for (const PieceGroup &group : declaration.pieces) {
    auto &pieces = building.pieces.emplace_back();
    if (group.shape.size() != rank) {
      ok = refuse(group.at, "'shape' " + shapeText(group.shape) + " has " + std::to_string(group.shape.size()) +
                                (group.shape.size() == 1 ? " number" : " numbers") + ", but the tensors of " +
                                building.title() + " make " + std::to_string(rank) +
                                (rank == 1 ? " dimension" : " dimensions"));
      continue;
    }
    int64_t elements = 1;
    bool good = std::none_of(group.shape.begin(), group.shape.end(), [&](int64_t n) {
      return __builtin_mul_overflow(elements, std::max<int64_t>(n, 1), &elements) || elements > kMaxBytes;
    });
    if (!good)
      refuse(group.at, building.title() + " has more than 2^60 elements on a rank");
    for (const Piece &piece : group.pieces)
      good = readPiece(building, group, piece, pieces.emplace_back()) && good;
    ok = good && checkPieces(building, building.pieces.size() - 1) && ok;
  }
  if (!ok)
    return false;
  size_t most = 0;
  for (const auto &pieces : building.pieces)
    most = std::max(most, pieces.size());
  if (most * building.groups.size() > kMaxPieceEntries)
    return refuse(declaration.at, building.title() + " has up to " + std::to_string(most) + " pieces on each of " +
                                      std::to_string(building.groups.size()) +
                                      " mesh ranks, expected pieces times mesh ranks of at most " +
                                      std::to_string(kMaxPieceEntries));
  for (size_t d = 0; d < rank; ++d) {
    Dimension &dimension = building.dimensions.emplace_back();
    dimension.axes = meshAxes(endpoint_);
    for (int group : building.groups)
      dimension.shards.lengths.push_back(group < 0 ? 0 : declaration.pieces[group].shape[d]);
  }
  return true;
}

/// Finds the group of each mesh rank. A mesh rank that has the param is in exactly one, any other in none. A param in
/// several model chunks is built once for each: then a group may name mesh ranks that have another of its chunks.
bool Params::assignGroups(Building &building) const {
  const int64_t ranks = endpoint_.meshRanks();
  building.groups.assign(ranks, -1);
  std::vector<bool> has;
  has.reserve(ranks);
  for (int64_t r = 0; r < ranks; ++r)
    has.push_back(ir::instances(endpoint_, building.param, r) > 0);
  ir::Param anyChunk = building.param;
  if (const AxisRules &rules = building.inAnyChunk; !rules.empty()) {
    anyChunk.presence.clear();
    if (!context_.coordinates(rules, anyChunk.presence))
      return false;
  }
  const auto &groups = building.declaration.pieces;
  for (size_t g = 0; g < groups.size(); ++g) {
    auto assign = [&](int64_t r) {
      if (r < 0 || r >= ranks)
        return refuse(groups[g].at, "'ranks' lists mesh rank " + std::to_string(r) + ", but the " + endpoint_.role +
                                        " has " + std::to_string(ranks) + (ranks == 1 ? " mesh rank" : " mesh ranks"));
      if (!has[r] && ir::instances(endpoint_, anyChunk, r) > 0)
        return true;
      if (!has[r])
        return refuse(groups[g].at,
                      "'ranks' lists mesh rank " + std::to_string(r) + ", which does not have " + building.title());
      if (building.groups[r] >= 0)
        return refuse(groups[g].at, "the pieces of " + building.title() + " on mesh rank " + std::to_string(r) +
                                        " are stated twice, expected once");
      building.groups[r] = static_cast<int>(g);
      return true;
    };
    if (groups[g].everywhere) {
      for (int64_t r = 0; r < ranks; ++r)
        if (has[r] && !assign(r))
          return false;
    } else {
      for (const IntegerRange &range : groups[g].ranks)
        for (int64_t r = range.first; r <= range.last; ++r)
          if (!assign(r))
            return false;
    }
  }
  for (int64_t r = 0; r < ranks; ++r)
    if (has[r] && building.groups[r] < 0)
      return refuse(building.declaration.pack.at,
                    "mesh rank " + std::to_string(r) + " has " + building.title() +
                        ", but no pieces, expected the mesh rank in one 'ranks'; 'at' restricts where the param is");
  return true;
}

/// Replaces the defaults of a piece and checks that it lies in its tensor and in the param.
bool Params::readPiece(const Building &building, const PieceGroup &group, const Piece &piece,
                       ResolvedPiece &result) const {
  const size_t rank = group.shape.size();
  result = {piece.at, piece.tensor, piece.from, piece.step, piece.size, piece.to};
  result.from.resize(rank, 0);
  result.to.resize(rank, 0);
  result.step.resize(rank, 1);
  bool ok = true;
  for (size_t d = 0; d < rank; ++d) {
    int64_t last = 0; // the last position in the tensor
    const std::string dimension = "dimension " + std::to_string(static_cast<int64_t>(d));
    if (piece.tensor >= 0) {
      const PackTree &leaf = *building.leaves[piece.tensor];
      const int variable = building.stackAt(static_cast<int64_t>(d));
      const int64_t length =
          variable >= 0 ? model_.variables[variable].size : leaf.shape[building.inPack(static_cast<int64_t>(d))];
      const std::string has = "tensor '" + tensors_.name(leaf.tensor) + "' has " + std::to_string(length) +
                              (variable >= 0 ? " values of '" + model_.variables[variable].name + "'"
                               : length == 1 ? " position"
                                             : " positions");
      if (piece.size.empty())
        result.size.push_back(result.from[d] < length ? (length - 1 - result.from[d]) / result.step[d] + 1 : 0);
      if (__builtin_mul_overflow(result.size[d] - 1, result.step[d], &last) ||
          __builtin_add_overflow(last, result.from[d], &last) || last >= length || result.size[d] < 1) {
        ok = refuse(piece.at,
                    dimension + " of the piece begins at position " + std::to_string(result.from[d]) +
                        (piece.size.empty() ? "" : " and has " + std::to_string(result.size[d]) + " positions") +
                        (result.step[d] > 1 ? " with step " + std::to_string(result.step[d]) : "") + ", but " + has);
        continue;
      }
      const IndexMap values = positions(result.from[d], result.step[d], result.size[d], 0);
      if (variable >= 0 && positionCount(restrict(building.exists[variable], values)) < result.size[d])
        ok = refuse(piece.at, "the piece has values of '" + model_.variables[variable].name + "' for which tensor '" +
                                  tensors_.name(leaf.tensor) + "' does not exist");
    }
    if (result.to[d] > group.shape[d] - result.size[d])
      ok = refuse(piece.at, dimension + " of the piece ends at position " +
                                std::to_string(result.to[d] + result.size[d]) + " of " + building.title() +
                                ", whose shape is " + shapeText(group.shape));
  }
  return ok;
}

/// Checks that the pieces of a group hold each element of the param once.
bool Params::checkPieces(const Building &building, size_t group) const {
  const std::vector<ResolvedPiece> &pieces = building.pieces[group];
  const PieceGroup &declared = building.declaration.pieces[group];
  size_t along = 0, starts = 0; // the dimension with the most different begins, along which few pieces meet
  for (size_t d = 0; d < declared.shape.size(); ++d) {
    std::set<int64_t> begins;
    for (const ResolvedPiece &piece : pieces)
      begins.insert(piece.to[d]);
    if (begins.size() > starts) {
      along = d;
      starts = begins.size();
    }
  }
  std::vector<const ResolvedPiece *> sorted;
  sorted.reserve(pieces.size());
  for (const ResolvedPiece &piece : pieces)
    sorted.push_back(&piece);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](const ResolvedPiece *a, const ResolvedPiece *b) { return a->to[along] < b->to[along]; });
  for (size_t i = 0; i < sorted.size(); ++i)
    for (size_t j = i + 1; j < sorted.size() && sorted[j]->to[along] < sorted[i]->to[along] + sorted[i]->size[along];
         ++j)
      if (overlap(*sorted[i], *sorted[j])) {
        std::vector<int64_t> common;
        for (size_t d = 0; d < declared.shape.size(); ++d)
          common.push_back(std::max(sorted[i]->to[d], sorted[j]->to[d]));
        const auto [first, second] = std::minmax(sorted[i], sorted[j]); // both in `pieces`
        diagnostics_.error(second->at, "two pieces hold element " + shapeText(common) + " of " + building.title());
        diagnostics_.note(first->at, "the other one is here");
        return false;
      }
  int64_t elements = 1, held = 0;
  for (int64_t n : declared.shape)
    elements *= n;
  for (const ResolvedPiece &piece : pieces) {
    int64_t size = 1;
    for (int64_t n : piece.size)
      size *= n;
    held += size;
  }
  if (held == elements)
    return true;
  return refuse(declared.at, "the pieces hold " + std::to_string(held) + " of the " + std::to_string(elements) +
                                 " elements of " + building.title() + " of shape " + shapeText(declared.shape) +
                                 ", expected all; {zeros: true, size: […], to: […]} is a piece of zeros");
}

/// Adds the parts of all pieces.
void Params::addPieces(Building &building) const {
  const std::vector<unsigned> axes = meshAxes(endpoint_);
  for (const Dimension &dimension : building.dimensions)
    building.param.shape.push_back(extentOf(dimension));
  std::map<std::pair<int, std::vector<int64_t>>, size_t> numbers; // by pattern (-1: zeros) and order of dimensions
  std::vector<std::pair<int, std::vector<std::vector<const ResolvedPiece *>>>> parts; // a leaf of each; by mesh rank
  for (const std::vector<ResolvedPiece> &pieces : building.pieces)
    for (const ResolvedPiece &piece : pieces) {
      std::pair<int, std::vector<int64_t>> key{-1, {}};
      if (piece.leaf >= 0)
        key = {static_cast<int>(tensors_.all()[building.leaves[piece.leaf]->tensor].pattern),
               building.leaves[piece.leaf]->permute};
      if (numbers.emplace(key, parts.size()).second)
        parts.emplace_back(piece.leaf, std::vector<std::vector<const ResolvedPiece *>>(building.pieces.size()));
      parts[numbers[key]].second[&pieces - building.pieces.data()].push_back(&piece);
    }
  for (const auto &[leaf, byGroup] : parts) {
    size_t most = 0;
    for (const auto &list : byGroup)
      most = std::max(most, list.size());
    for (size_t b = 0; b < most; ++b) {
      std::vector<const ResolvedPiece *> byRank;
      byRank.reserve(building.groups.size());
      for (int group : building.groups)
        byRank.push_back(group >= 0 && b < byGroup[group].size() ? byGroup[group][b] : nullptr);
      building.param.parts.push_back(partOf(building, leaf, byRank, axes));
    }
  }
}

/// The part of one piece on each mesh rank, all of one tensor pattern, or zeros. nullptr: the mesh rank has none.
ir::Part Params::partOf(const Building &building, int leaf, const std::vector<const ResolvedPiece *> &byRank,
                        const std::vector<unsigned> &axes) const {
  ir::Part part;
  auto add = [&](size_t d, bool zeros) { // along dimension d of the param
    ir::Sharding sharding{axes, {}};
    for (const ResolvedPiece *piece : byRank)
      sharding.at.push_back(!piece  ? IndexMap()
                            : zeros ? positions(piece->to[d], 1, piece->size[d], piece->to[d])
                                    : positions(piece->from[d], piece->step[d], piece->size[d], piece->to[d]));
    part.dimensions.push_back({context_.intern(std::move(sharding)), static_cast<int>(d)});
  };
  if (leaf < 0) {
    for (unsigned sharding : building.param.instances)
      part.dimensions.push_back({sharding, -1});
    for (size_t d = 0; d < building.dimensions.size(); ++d)
      add(d, true);
    return part;
  }
  const PackTree &tensor = *building.leaves[leaf];
  part.pattern = static_cast<int>(tensors_.all()[tensor.tensor].pattern);
  const ir::TensorPattern &pattern = tensors_.tensorPatterns()[part.pattern];
  for (unsigned variable : pattern.variables)
    if (const int64_t d = building.stackDimension(variable); d >= 0)
      add(static_cast<size_t>(d), false);
    else
      part.dimensions.push_back({context_.instanceSharding(variable, building.exists[variable]), -1});
  for (size_t t = 0; t < pattern.shape.size(); ++t) {
    const int64_t packed =
        std::find(tensor.permute.begin(), tensor.permute.end(), static_cast<int64_t>(t)) - tensor.permute.begin();
    add(static_cast<size_t>(building.inParam(packed)), false);
  }
  return part;
}

} // namespace reshard
