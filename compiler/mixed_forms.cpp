// A tensor that the source holds in two forms, such as quantised in one param and as it is in another: each target rank
// reads one of them, and nothing says that all read the same.

#include "compiler/forms.h"
#include "compiler/places.h"

#include <algorithm>
#include <map>
#include <set>

namespace reshard {

using namespace ir;

namespace {

constexpr int64_t kMostPairs = 1 << 16; // of boxes that are compared for one pair of params

using Box = std::vector<const Segments *>; // positions, by dimension

std::optional<Quantization> formatOf(const StoredForm &form) {
  return form.quantize ? form.quantize->format : std::nullopt;
}

std::string formText(const StoredForm &form) {
  const auto format = formatOf(form);
  return format ? std::string("quantised as ") + name(*format) : "as it is";
}

/// What places that may be read have of a part, each once.
std::vector<Box> boxes(const Endpoint &source, const Param &param, const Part &part) {
  std::vector<unsigned> axes;
  for (const PartDimension &dimension : part.dimensions)
    axes.insert(axes.end(), source.shares[dimension.share].axes.begin(), source.shares[dimension.share].axes.end());
  for (const auto *rules : {&param.presence, &source.authority})
    for (const Presence &rule : *rules)
      axes.push_back(rule.axis);
  std::vector<Box> result;
  for (int64_t place : distinctPlaces(source, std::move(axes))) {
    if (!present(source, param, place) || !authorised(source, place))
      continue;
    Box &box = result.emplace_back();
    for (const PartDimension &dimension : part.dimensions) {
      const Share &share = source.shares[dimension.share];
      box.push_back(&share.at[coordinate(source, share.axes, place)]);
    }
  }
  return result;
}

/// Whether two parts of one tensor have an element in common on places that may be read.
bool meet(const Endpoint &source, const Param &one, const Part &part, const Param &other, const Part &otherPart) {
  const std::vector<Box> mine = boxes(source, one, part), others = boxes(source, other, otherPart);
  int64_t pairs = 0;
  for (const Box &a : mine)
    for (const Box &b : others) {
      if (++pairs > kMostPairs)
        return false; // not found among many: no warning on a guess
      bool common = true;
      for (size_t d = 0; d < a.size() && common; ++d)
        common = !a[d]->empty() && !b[d]->empty() && !disjointFrom(*a[d], *b[d]);
      if (common)
        return true;
    }
  return false;
}

} // namespace

void warnOfMixedForms(const std::vector<Location> &paramsAt, const std::vector<StoredForm> &forms, const Layout &layout,
                      Diagnostics &diagnostics) {
  const Endpoint &source = layout.endpoints[0];
  // By tensor and format: alike ones need not be compared.
  std::vector<std::map<std::optional<Quantization>, std::vector<std::pair<unsigned, const Part *>>>> holders(
      layout.families.size());
  std::set<std::pair<unsigned, unsigned>> said;
  for (unsigned p = 0; p < source.params.size(); ++p)
    for (const Part &part : source.params[p].parts) {
      if (part.family < 0)
        continue;
      std::vector<std::pair<unsigned, const Part *>> unlike;
      for (const auto &[format, list] : holders[part.family])
        if (format != formatOf(forms[p]))
          unlike.insert(unlike.end(), list.begin(), list.end());
      std::sort(unlike.begin(), unlike.end());
      for (const auto &[other, otherPart] : unlike) {
        if (said.contains({other, p}) || !meet(source, source.params[p], part, source.params[other], *otherPart))
          continue;
        said.insert({other, p});
        diagnostics.warning(paramsAt[p], "source param '" + source.params[p].name + "' holds tensor '" +
                                             layout.families[part.family].name + "' " + formText(forms[p]) + ", and '" +
                                             source.params[other].name + "' holds it " + formText(forms[other]) +
                                             ": their values differ in general, and ranks of a target may read either; "
                                             "'ignore' of the source leaves one out");
        diagnostics.note(paramsAt[other], "the other is here");
        break;
      }
      holders[part.family][formatOf(forms[p])].emplace_back(p, &part);
    }
}

} // namespace reshard
