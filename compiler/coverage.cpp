// A place holds a box of a family: the product of its shares' positions along each dimension. Where a part's axes are
// independent of each other, its boxes over all places are together the product of the unions along each dimension, so
// one box stands for them; elsewhere (axes of different views, a presence rule on an axis that shares something) there
// is a box for each combination of coordinates. Boxes are taken from the whole until nothing, or a gap, is left. Exact,
// and never looks at rows or ranks one by one.

#include "compiler/coverage.h"
#include "compiler/boxes.h"
#include "compiler/places.h"

#include <algorithm>
#include <map>
#include <string>

namespace reshard {

using ir::Segment;
using ir::Segments;

namespace {

int64_t blocks(const Segments &segments) {
  int64_t total = 0;
  for (const Segment &s : segments)
    total += s.count;
  return total;
}

constexpr int64_t kMostWork = 1 << 20; // blocks looked at for one family

class SourceCheck {
public:
  SourceCheck(const ir::Layout &layout, const std::vector<Location> &declaredAt, bool gaps, Diagnostics &diagnostics)
      : layout_(layout), source_(layout.endpoints[0]), declaredAt_(declaredAt), gaps_(gaps), diagnostics_(diagnostics),
        positions_(source_.shares.size()), unions_(source_.shares.size()), tooLong_(source_.shares.size()) {}

  std::vector<bool> run() {
    std::vector<bool> held(layout_.families.size());
    std::vector<std::vector<std::pair<unsigned, unsigned>>> parts(layout_.families.size()); // param, part
    for (unsigned p = 0; p < source_.params.size(); ++p)
      for (unsigned q = 0; q < source_.params[p].parts.size(); ++q)
        if (const int family = source_.params[p].parts[q].family; family >= 0)
          parts[family].emplace_back(p, q);
    for (unsigned f = 0; f < parts.size(); ++f)
      held[f] = !parts[f].empty() && check(layout_.families[f], parts[f]);
    return held;
  }

private:
  /// Whether there is any element of the family.
  bool check(const ir::Family &family, const std::vector<std::pair<unsigned, unsigned>> &parts) {
    Box whole;
    for (const Segments &values : family.exists)
      whole.push_back(itself(values));
    for (int64_t length : family.shape)
      whole.push_back(ir::identity(length));
    if (isEmpty(whole))
      return false;

    std::vector<Box> rest = {whole};
    bool any = false;
    int64_t work = 0; // blocks of the boxes looked at
    tooMuch_ = false;
    auto take = [&](const Box &box) {
      if (isEmpty(box))
        return;
      any = true;
      std::vector<Box> left;
      for (const Segments &each : box)
        work += blocks(each);
      for (Box &piece : rest) {
        for (const Segments &each : piece)
          work += blocks(each);
        if (work <= kMostWork)
          subtract(std::move(piece), box, left);
        else
          left.push_back(std::move(piece));
      }
      rest = std::move(left);
    };
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto [p, q] = parts[i];
      const ir::Param &param = source_.params[p];
      const ir::Part &part = param.parts[q];
      if (productOverPlaces(param, part)) {
        Box box;
        for (size_t d = 0; d < part.dimensions.size(); ++d)
          box.push_back(unionOf(part.dimensions[d].share, whole[d]));
        take(box);
      } else {
        // All such parts of a param together, place by place: of a flat buffer little is left then in between.
        std::vector<const ir::Part *> together;
        std::vector<unsigned> all;
        for (; i < parts.size() && parts[i].first == p && !productOverPlaces(param, param.parts[parts[i].second]);
             ++i) {
          together.push_back(&param.parts[parts[i].second]);
          add(axes(param, *together.back()), all);
        }
        --i;
        for (int64_t place : distinctPlaces(source_, std::move(all))) {
          if (!present(source_, param, place) || !authorised(source_, place) || rest.empty() || work > kMostWork)
            continue;
          for (const ir::Part *each : together) {
            Box box;
            for (const ir::PartDimension &dimension : each->dimensions) {
              const ir::Share &share = source_.shares[dimension.share];
              box.push_back(positions(dimension.share, coordinate(source_, share.axes, place)));
            }
            take(box);
          }
        }
      }
      if (rest.empty())
        return true;
    }
    tooMuch_ = tooMuch_ || work > kMostWork;
    if (any || tooMuch_)
      report(family, whole, rest[0], parts);
    return any || tooMuch_;
  }

  static void add(const std::vector<unsigned> &more, std::vector<unsigned> &axes) {
    axes.insert(axes.end(), more.begin(), more.end());
  }

  std::vector<unsigned> axes(const ir::Param &param, const ir::Part &part) const {
    std::vector<unsigned> result;
    for (const ir::PartDimension &dimension : part.dimensions)
      add(source_.shares[dimension.share].axes, result);
    for (const auto *rules : {&param.presence, &source_.authority})
      for (const ir::Presence &rule : *rules)
        result.push_back(rule.axis);
    return result;
  }

  /// Whether the part's boxes over all places are a product: no axis serves twice and all are independent.
  bool productOverPlaces(const ir::Param &param, const ir::Part &part) const {
    std::vector<unsigned> all = axes(param, part);
    std::sort(all.begin(), all.end());
    return std::adjacent_find(all.begin(), all.end()) == all.end() && independent(source_, all);
  }

  /// A share's positions at a coordinate.
  const Segments &positions(unsigned share, int64_t coordinate) {
    auto &known = positions_[share];
    if (known.empty())
      for (const Segments &segments : source_.shares[share].at)
        known.push_back(itself(segments));
    return known[coordinate];
  }

  /// A share's positions over all coordinates; they lie in `domain`.
  const Segments &unionOf(unsigned share, const Segments &domain) {
    tooMuch_ = tooMuch_ || tooLong_[share];
    if (unions_[share])
      return *unions_[share];
    std::vector<const Segments *> sets; // neighbours differ; their `from` sides count
    int64_t many = 0, total = 0;
    for (const Segments &set : source_.shares[share].at) {
      if (!sets.empty() && *sets.back() == set)
        continue;
      sets.push_back(&set);
      total += size(set);
      many += blocks(set);
    }
    // Long periodic lists: parts that are disjoint and as large as the whole are the whole.
    constexpr int64_t kManyBlocks = 1 << 16;
    if (many > kManyBlocks && total == size(domain) && std::ssize(sets) * std::ssize(sets) <= kMostWork) {
      bool disjoint = true;
      for (size_t i = 0; i < sets.size() && disjoint; ++i)
        for (size_t j = 0; j < i && disjoint; ++j)
          disjoint = disjointFrom(*sets[i], *sets[j]);
      if (disjoint)
        return unions_[share].emplace(domain);
    }
    if (many > 4 * kMostWork) {
      tooMuch_ = tooLong_[share] = true;
      return unions_[share].emplace();
    }
    std::vector<std::pair<int64_t, int64_t>> intervals;
    for (const Segments *set : sets)
      for (const Segment &s : *set)
        for (int64_t i = 0; i < s.count; ++i)
          intervals.emplace_back(s.from + i * s.fromStep, s.from + i * s.fromStep + s.length);
    std::sort(intervals.begin(), intervals.end());
    Segments merged;
    for (const auto &[begin, end] : intervals) {
      if (merged.empty() || merged.back().from + merged.back().length < begin)
        merged.push_back({begin, begin, end - begin, 1, 0, 0});
      else if (Segment &last = merged.back(); last.from + last.length < end)
        last.length = end - last.from;
    }
    return unions_[share].emplace(ir::normalize(std::move(merged)));
  }

  void report(const ir::Family &family, const Box &whole, const Box &gap,
              const std::vector<std::pair<unsigned, unsigned>> &parts) {
    std::string where;
    for (size_t d = 0; d < gap.size(); ++d) {
      if (sameFrom(gap[d], whole[d]))
        continue;
      const bool variable = d < family.variables.size();
      where += (where.empty() ? " " : ", ") + (variable ? layout_.variables[family.variables[d]].name : "row") + " " +
               std::to_string(gap[d][0].from) +
               (variable ? "" : " of dimension " + std::to_string(d - family.variables.size()));
    }
    std::vector<unsigned> params;
    for (const auto &[p, q] : parts)
      if (params.empty() || params.back() != p)
        params.push_back(p);
    std::string holders = "param '" + source_.params[params[0]].name + "'";
    if (params.size() > 1)
      holders += " and " + std::to_string(params.size() - 1) + " more";
    const std::string nowhere = std::string(source_.storage ? "in no file" : "on no rank") +
                                (source_.authority.empty() ? "" : " that 'authority' lets serve");
    const std::string message =
        tooMuch_ ? "cannot tell whether the source holds all of tensor '" + family.name + "': " + holders +
                       (params.size() > 1 ? " cut" : " cuts") + " it into too many pieces"
                 : "the source leaves a part of tensor '" + family.name + "' " + nowhere + ": " + holders +
                       (params.size() > 1 ? " leave out" : " leaves out") + where;
    if (gaps_ && !tooMuch_)
      diagnostics_.warning(declaredAt_[params[0]], message);
    else
      diagnostics_.error(declaredAt_[params[0]], message);
  }

  const ir::Layout &layout_;
  const ir::Endpoint &source_;
  const std::vector<Location> &declaredAt_;
  bool gaps_;
  Diagnostics &diagnostics_;
  std::vector<std::vector<Segments>> positions_; // by share and coordinate
  std::vector<std::optional<Segments>> unions_;  // by share
  std::vector<bool> tooLong_;                    // shares whose union was not looked at
  bool tooMuch_ = false;                         // the family at hand is cut into more pieces than are looked at
};

} // namespace

std::vector<bool> checkSource(const ir::Layout &layout, const std::vector<Location> &declaredAt, bool gaps,
                              Diagnostics &diagnostics) {
  return SourceCheck(layout, declaredAt, gaps, diagnostics).run();
}

} // namespace reshard
