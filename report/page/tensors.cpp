// SPDX-License-Identifier: Apache-2.0
// Draws one tensor of each pattern: what each rank class holds, and the pieces that move. The boxes of all tensors
// share one limit, so that the page stays small.
#include "report/page/page.h"

#include "report/page/pieces.h"
#include "schema/flatbuffer_vectors.h"

#include <nlohmann/json.hpp>

#include <algorithm>

namespace reshard::report {

using namespace verify;

using Json = nlohmann::ordered_json;

namespace {

using namespace schema;

// The page of any plan has at most 5 MiB, so all tensors share these numbers equally.
constexpr size_t kAllBoxes = 48'000;  // for holdings: about 20 bytes each
constexpr size_t kAllPieces = 16'000; // about 100 bytes each
constexpr size_t kFewestPieces = 4;   // at least, for one tensor

/// The tensors that are drawn: of each pattern the one with the first values.
std::vector<DrawnTensor> drawn(const Manifest &manifest) {
  std::vector<DrawnTensor> tensors;
  for (uint32_t t = 0; t < orEmpty(manifest.tensor_patterns()).size(); ++t) {
    std::vector<int64_t> values;
    bool exists = true;
    for (const Sharding *sharding : orEmpty(manifest.tensor_patterns()->Get(t)->exists())) {
      const IndexMap map = indexMap(*manifest.endpoints()->Get(0), *sharding, 0);
      exists = exists && map.begin != map.end;
      values.push_back(exists ? map.begin->from() : 0);
    }
    if (exists)
      tensors.emplace_back(manifest, t, std::move(values));
  }
  return tensors;
}

class Pictures {
public:
  explicit Pictures(const Plan &plan)
      : manifest_(plan.manifest()), tensors_(drawn(manifest_)), pieces_(plan, tensors_),
        tensorCount_(std::max<size_t>(tensors_.size(), 1)) {}

  Result<Json> json() {
    if (Status status = pieces_.load(); !status.ok())
      return status;
    for (const DrawnTensor &tensor : tensors_) {
      sides_.emplace_back();
      for (const Endpoint *endpoint : *manifest_.endpoints())
        sides_.back().push_back(tensor.holdings(*endpoint));
      trim(sides_.back());
    }
    for (size_t t = 0; t < tensors_.size(); ++t)
      want(t);
    if (Status status = pieces_.find(); !status.ok())
      return status;
    Json result = Json::array();
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const DrawnTensor &tensor = tensors_[t];
      Json sides = Json::array();
      for (uint32_t e = 0; e < sides_[t].size(); ++e)
        sides.push_back(sideOf(*manifest_.endpoints()->Get(e), sides_[t][e]));
      auto [pieces, left] = piecesOf(t);
      result.push_back({{"name", tensor.pattern().name()->str()},
                        {"example", tensor.name()},
                        {"dtype", dtypeName(tensor.pattern().dtype())},
                        {"rows", tensor.matrix().rows},
                        {"columns", tensor.matrix().columns},
                        {"sides", std::move(sides)},
                        {"pieces", std::move(pieces)},
                        {"left", left || left_[t]}});
    }
    return result;
  }

private:
  /// Leaves out boxes, so that a tensor has its share of them at most.
  void trim(std::vector<DrawnHoldings> &sides) const {
    size_t boxes = 0, holdings = 0;
    for (const DrawnHoldings &side : sides)
      for (const DrawnHolding &holding : side.list) {
        boxes += holding.boxes.size();
        ++holdings;
      }
    for (DrawnHoldings &side : sides)
      for (DrawnHolding &holding : side.list)
        if (boxes > kAllBoxes / tensorCount_)
          holding.boxes.keep(std::max<size_t>(1, kAllBoxes / tensorCount_ / holdings));
  }

  /// Requests pieces for the first ranks of each group, within the limit per tensor.
  void want(size_t t) {
    size_t ranks = 0, left = std::max(kFewestPieces, kAllPieces / tensorCount_);
    for (const DrawnHoldings &side : sides_[t])
      for (const DrawnHolding &holding : side.list)
        ranks = std::max(ranks, holding.ranks.size());
    left_.push_back(false);
    for (size_t k = 0; k < ranks; ++k)
      for (uint32_t e = 1; e < sides_[t].size(); ++e)
        for (const DrawnHolding &holding : sides_[t][e].list)
          if (k < holding.ranks.size()) {
            left_[t] = left_[t] || left == 0;
            if (left > 0) {
              pieces_.want(t, {e, holding.ranks[k]});
              --left;
            }
          }
  }

  static Json sideOf(const Endpoint &endpoint, const DrawnHoldings &side) {
    Json holdings = Json::array();
    for (const DrawnHolding &holding : side.list)
      holdings.push_back({{"param", endpoint.params()->Get(holding.param)->name()->str()},
                          {"ranks", holding.ranks},
                          {"more", holding.more},
                          {"boxes", holding.boxes.json()},
                          {"cut", holding.boxes.cut()}});
    return {{"holders", std::move(holdings)}, {"left", side.left}};
  }

  /// The pieces of a tensor, and whether some are left out.
  std::pair<Json, bool> piecesOf(size_t t) const {
    Json result = Json::array();
    size_t left = std::max(kFewestPieces, kAllPieces / tensorCount_); // a piece counts as its boxes
    const auto number = [](uint32_t each) { return each == Move::kNone ? int64_t{-1} : int64_t{each}; };
    for (const auto &[route, piece] : pieces_.of(t)) {
      if (left < piece.boxes.size())
        return {std::move(result), true};
      left -= piece.boxes.size();
      const bool message = route.message != Move::kNone, relayed = route.relay != Move::kNone;
      result.push_back({{route.from.endpoint, route.from.number},
                        {route.to.endpoint, route.to.number},
                        route.sender,
                        route.receiver,
                        number(route.message),
                        message ? int64_t{pieces_.round(route.message)} : -1,
                        relayed ? Json{route.relay, route.relayMessage, pieces_.round(route.relayMessage)} : Json(),
                        piece.bytes,
                        piece.boxes.json(),
                        piece.boxes.cut()});
    }
    return {std::move(result), false};
  }

  const Manifest &manifest_;
  const std::vector<DrawnTensor> tensors_;
  DrawnPieces pieces_;
  const size_t tensorCount_;
  std::vector<std::vector<DrawnHoldings>> sides_; // by tensor and endpoint
  std::vector<bool> left_;                        // by tensor: ranks whose pieces are not wanted
};

} // namespace

Result<Json> tensorsOf(const Plan &plan) { return Pictures(plan).json(); }

} // namespace reshard::report
