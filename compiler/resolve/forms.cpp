// SPDX-License-Identifier: Apache-2.0
// Determines the dtype in which each tensor is sent, which is the source's, and checks that each target may cast it to
// what it stores. Warns if the source holds a tensor in two forms.
#include "compiler/resolve/mesh_ranks.h"
#include "compiler/resolve/steps.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

namespace reshard {

using namespace ir;

namespace {

/// A float's bits of mantissa and exponent.
struct Float {
  int mantissa, exponent;
};

std::optional<Float> floatOf(DType type) {
  switch (type) {
  case DType::fp32:
    return Float{23, 8};
  case DType::bf16:
    return Float{7, 8};
  case DType::fp16:
    return Float{10, 5};
  case DType::fp8_e4m3:
    return Float{3, 4};
  case DType::fp8_e5m2:
    return Float{2, 5};
  default:
    return std::nullopt;
  }
}

constexpr int64_t kMaxPairs = 1 << 16; // how many position sets are compared for a pair of params

using PositionSets = std::vector<const IndexMap *>; // by dimension

std::optional<Quantization> formatOf(const StorageRule &form) {
  return form.quantize ? form.quantize->format : std::nullopt;
}

std::string formText(const StorageRule &form) {
  const auto format = formatOf(form);
  return format ? std::string("quantized as ") + formatOf(*format).name : "unquantized";
}

/// The positions of a part on mesh ranks that may be read, once for each combination of coordinates.
std::vector<PositionSets> positionSets(const Endpoint &source, const Param &param, const Part &part) {
  std::vector<unsigned> axes;
  for (const PartDimension &dimension : part.dimensions)
    axes.insert(axes.end(), source.shardings[dimension.sharding].axes.begin(),
                source.shardings[dimension.sharding].axes.end());
  for (const auto *rules : {&param.presence, &source.authority})
    for (const Presence &rule : *rules)
      axes.push_back(rule.axis);
  std::vector<PositionSets> result;
  for (int64_t meshRank : distinctMeshRanks(source, std::move(axes))) {
    if (!present(source, param, meshRank) || !mayRead(source, meshRank))
      continue;
    PositionSets &sets = result.emplace_back();
    for (const PartDimension &dimension : part.dimensions) {
      const Sharding &sharding = source.shardings[dimension.sharding];
      sets.push_back(&sharding.at[coordinate(source, sharding.axes, meshRank)]);
    }
  }
  return result;
}

/// Whether two parts of one tensor have a common element on mesh ranks that may be read.
bool haveCommonElement(const Endpoint &source, const Param &one, const Part &part, const Param &other,
                       const Part &otherPart) {
  const std::vector<PositionSets> mine = positionSets(source, one, part),
                                  others = positionSets(source, other, otherPart);
  int64_t pairs = 0;
  for (const PositionSets &a : mine)
    for (const PositionSets &b : others) {
      if (++pairs > kMaxPairs)
        return false; // too many to compare: no warning without certainty
      bool common = true;
      for (size_t d = 0; d < a.size() && common; ++d)
        common = !a[d]->empty() && !b[d]->empty() && !disjointFrom(*a[d], *b[d]);
      if (common)
        return true;
    }
  return false;
}

} // namespace

bool castable(DType type) { return floatOf(type).has_value(); }

bool widens(DType from, DType to) {
  const auto less = floatOf(from), more = floatOf(to);
  return less && more && less->mantissa <= more->mantissa && less->exponent <= more->exponent;
}

void resolveStorageForms(const std::vector<std::vector<Location>> &paramsAt,
                         const std::vector<std::vector<StorageRule>> &forms, Layout &layout, Diagnostics &diagnostics) {
  std::vector<int> firstParam(layout.tensorPatterns.size(), -1); // by pattern: the first source param that has it
  const Endpoint &source = layout.endpoints[0];
  for (size_t p = 0; p < source.params.size(); ++p)
    for (const Part &part : source.params[p].parts) {
      if (part.pattern < 0)
        continue;
      TensorPattern &pattern = layout.tensorPatterns[part.pattern];
      int &first = firstParam[part.pattern];
      if (first < 0) {
        first = static_cast<int>(p);
        if (pattern.dtype != source.params[p].dtype && !(castable(pattern.dtype) && castable(source.params[p].dtype)))
          diagnostics.error(paramsAt[0][p], "source param '" + source.params[p].name + "' stores tensor '" +
                                                pattern.name + "' of " + name(pattern.dtype) + " as " +
                                                name(source.params[p].dtype) + ", expected " + name(pattern.dtype));
        pattern.dtype = source.params[p].dtype;
      } else if (pattern.dtype != source.params[p].dtype) {
        diagnostics.error(paramsAt[0][p], "source param '" + source.params[p].name + "' stores tensor '" +
                                              pattern.name + "' as " + name(source.params[p].dtype) + ", but param '" +
                                              source.params[first].name + "' stores it as " + name(pattern.dtype) +
                                              ", expected one dtype");
      }
    }
  for (size_t e = 1; e < layout.endpoints.size(); ++e)
    for (size_t p = 0; p < layout.endpoints[e].params.size(); ++p) {
      Endpoint &target = layout.endpoints[e];
      Param &param = target.params[p];
      const StorageRule &form = forms[e][p];
      const Location at = form.dtype ? form.dtype->second : paramsAt[e][p];
      const std::string title = target.role + " param '" + param.name + "'";
      const DType stored = param.dtype;
      std::optional<DType> sent;
      for (const Part &part : param.parts) {
        if (part.pattern < 0)
          continue;
        const TensorPattern &pattern = layout.tensorPatterns[part.pattern];
        if (!sent)
          sent = pattern.dtype;
        else if (*sent != pattern.dtype)
          diagnostics.error(at, title + " holds tensors that the source stores as " + name(*sent) + " and as " +
                                    name(pattern.dtype) + ", expected one dtype");
      }
      if (!sent || *sent == stored)
        continue;
      if (form.transform || (form.quantize && form.quantize->format)) { // converted from the sent dtype
        param.dtype = *sent;
        continue;
      }
      const std::string change = title + " is " + name(stored) + " but its tensors are sent as " + name(*sent);
      if (!castable(stored) || !castable(*sent))
        diagnostics.error(at, change + "; no cast exists between them, expected " + name(*sent));
      else if (!widens(*sent, stored) && !form.convert)
        diagnostics.error(at, change + ", which needs rounding: expected 'convert: rne' beside 'dtype'");
      param.dtype = *sent;
      param.storageDtype = stored;
      if (!form.convert || widens(*sent, stored))
        continue;
      param.overflow = form.convert->first;
      if (param.overflow == OverflowRule::infinity && stored == DType::fp8_e4m3)
        diagnostics.error(form.convert->second,
                          title +
                              " is fp8_e4m3, which has no infinity: expected 'convert: rne' or 'convert: saturate'");
    }
}

void warnOnMixedForms(const std::vector<Location> &paramsAt, const std::vector<StorageRule> &forms,
                      const Layout &layout, Diagnostics &diagnostics) {
  const Endpoint &source = layout.endpoints[0];
  // By tensor and format: parts of the same format are not compared.
  std::vector<std::map<std::optional<Quantization>, std::vector<std::pair<unsigned, const Part *>>>> partsByFormat(
      layout.tensorPatterns.size());
  std::set<std::pair<unsigned, unsigned>> warned;
  for (unsigned p = 0; p < source.params.size(); ++p)
    for (const Part &part : source.params[p].parts) {
      if (part.pattern < 0)
        continue;
      std::vector<std::pair<unsigned, const Part *>> differing;
      for (const auto &[format, list] : partsByFormat[part.pattern])
        if (format != formatOf(forms[p]))
          differing.insert(differing.end(), list.begin(), list.end());
      std::sort(differing.begin(), differing.end());
      for (const auto &[other, otherPart] : differing) {
        if (warned.contains({other, p}) ||
            !haveCommonElement(source, source.params[p], part, source.params[other], *otherPart))
          continue;
        warned.insert({other, p});
        diagnostics.warning(paramsAt[p], "source param '" + source.params[p].name + "' holds tensor '" +
                                             layout.tensorPatterns[part.pattern].name + "' " + formText(forms[p]) +
                                             ", and '" + source.params[other].name + "' holds it " +
                                             formText(forms[other]) +
                                             ": their values differ in general, and a target rank may read either; "
                                             "'ignore' of the source omits one of them");
        diagnostics.note(paramsAt[other], "the other one is here");
        break;
      }
      partsByFormat[part.pattern][formatOf(forms[p])].emplace_back(p, &part);
    }
}

} // namespace reshard
