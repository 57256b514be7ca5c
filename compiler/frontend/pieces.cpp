// SPDX-License-Identifier: Apache-2.0
// Reads the pieces of an explicit param. Their numbers use `let` names only and are evaluated here; what they mean for
// a mesh is checked in compiler/resolve/pieces.cpp.

#include "compiler/frontend/reading.h"

namespace reshard {

namespace {

constexpr int64_t kMaxPosition = int64_t{1} << 60;

class PieceReader {
public:
  PieceReader(const Model &model, ParamDeclaration &param, Diagnostics &diagnostics)
      : model_(model), param_(param), diagnostics_(diagnostics), title_("param '" + param.name + "'") {}

  void read(const Node &node) {
    if (node.kind != Node::Kind::sequence)
      return refuse(node, "a list of maps {ranks, shape, of}", "'pieces'", diagnostics_);
    const size_t before = diagnostics_.errors();
    size_t count = 0;
    for (const Node &item : node.items) {
      readGroup(item);
      count += param_.pieces.back().pieces.size();
    }
    if (node.items.empty())
      diagnostics_.error(node.at, "'pieces' is an empty list, expected at least one map {ranks, shape, of}");
    else if (count > kMaxPieces)
      diagnostics_.error(node.at, title_ + " has " + std::to_string(count) + " pieces, expected at most " +
                                      std::to_string(kMaxPieces));
    else if (param_.pack.of.empty() && diagnostics_.errors() == before)
      diagnostics_.error(node.at, title_ + " has no piece of a tensor, expected at least one");
  }

private:
  void readGroup(const Node &node) {
    PieceGroup &group = param_.pieces.emplace_back();
    group.at = node.at;
    Fields fields(node, "an entry of 'pieces'", diagnostics_);
    if (!fields.isMap())
      return;
    const Node *ranks = fields.find("ranks");
    group.everywhere = !ranks;
    if (ranks)
      for (const Node *item : valueOrItems(*ranks))
        if (const auto range = readIntegerRange(*item, "'ranks'", model_.let, kMaxWorld, diagnostics_))
          group.ranks.push_back(*range);
    if (const Node *shape = fields.require("shape"))
      group.shape = readNumbers(*shape, "'shape'", 0);
    if (group.shape.size() > kMaxDimensions)
      diagnostics_.error(node.at, title_ + " has " + std::to_string(group.shape.size()) +
                                      " dimensions, expected at most " + std::to_string(kMaxDimensions));
    if (const Node *of = fields.require("of")) {
      if (of->kind != Node::Kind::sequence)
        refuse(*of, "a list of pieces", "'of'", diagnostics_);
      for (const Node &piece : of->items)
        readPiece(piece, group);
    }
    fields.finish();
  }

  void readPiece(const Node &node, PieceGroup &group) {
    Piece &piece = group.pieces.emplace_back();
    piece.at = node.at;
    Fields fields(node, "a piece", diagnostics_);
    if (!fields.isMap())
      return;
    const Node *of = fields.find("of"), *permute = fields.find("permute"), *zeros = fields.find("zeros"),
               *from = fields.find("from"), *step = fields.find("step"), *size = fields.find("size"),
               *to = fields.find("to");
    if ((of != nullptr) == (zeros != nullptr)) {
      diagnostics_.error(node.at, std::string("a piece has ") + (of ? "both" : "none") +
                                      " of 'of' and 'zeros', expected exactly one");
    } else if (of) {
      piece.tensor = static_cast<int>(param_.pack.of.size());
      Pack &tensor = param_.pack.of.emplace_back();
      tensor.at = of->at;
      tensor.tensor = readText(withValues(*of, model_), "'of'", diagnostics_).value_or("");
      if (permute)
        readPermute(*permute, tensor, diagnostics_);
    } else {
      const auto value = readBoolean(*zeros, "'zeros'", diagnostics_);
      if (value && !*value)
        diagnostics_.error(zeros->at, "'zeros' is false, expected true, or 'of' in place of it");
      if (!size)
        diagnostics_.error(node.at, "a piece of zeros has no 'size'");
      for (const Node *other : {permute, from, step})
        if (other)
          diagnostics_.error(other->at, "'permute', 'from' and 'step' do not apply to a piece of zeros");
    }
    if (from)
      piece.from = readNumbers(*from, "'from'", 0);
    if (step)
      piece.step = readNumbers(*step, "'step'", 1);
    if (size)
      piece.size = readNumbers(*size, "'size'", 1);
    if (to)
      piece.to = readNumbers(*to, "'to'", 0);
    for (const auto &[list, key, written] :
         {std::tuple(&piece.from, "'from'", from), std::tuple(&piece.step, "'step'", step),
          std::tuple(&piece.size, "'size'", size), std::tuple(&piece.to, "'to'", to)})
      if (written && list->size() != group.shape.size())
        diagnostics_.error(written->at, std::string(key) + " has " + std::to_string(list->size()) +
                                            (list->size() == 1 ? " number" : " numbers") + ", expected " +
                                            std::to_string(group.shape.size()) + ", one for each dimension of 'shape'");
    fields.finish();
  }

  std::vector<int64_t> readNumbers(const Node &node, const std::string &what, int64_t least) {
    std::vector<int64_t> result;
    if (node.kind != Node::Kind::sequence) {
      refuse(node, "a list of numbers", what, diagnostics_);
      return result;
    }
    for (const Node &item : node.items)
      result.push_back(readValue(item, what, model_.let, {least, kMaxPosition}, diagnostics_).value_or(least));
    return result;
  }

  const Model &model_;
  ParamDeclaration &param_;
  Diagnostics &diagnostics_;
  const std::string title_;
};

} // namespace

void readPieces(const Node &node, const Model &model, ParamDeclaration &param, Diagnostics &diagnostics) {
  PieceReader(model, param, diagnostics).read(node);
}

} // namespace reshard
