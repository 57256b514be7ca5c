#include "compiler/resolve/forms.h"
#include "compiler/resolve/mesh_ranks.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

namespace reshard {

using ir::DType;

namespace {

/// Of a float: bits behind the point, and of the exponent.
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

} // namespace

bool castable(DType type) { return floatOf(type).has_value(); }

bool widens(DType from, DType to) {
  const auto less = floatOf(from), more = floatOf(to);
  return less && more && less->mantissa <= more->mantissa && less->exponent <= more->exponent;
}

void resolveStorageForms(const std::vector<std::vector<Location>> &paramsAt,
                         const std::vector<std::vector<StorageForm>> &forms, ir::Layout &layout,
                         Diagnostics &diagnostics) {
  std::vector<int> holder(layout.tensorPatterns.size(), -1); // a param of the source
  const ir::Endpoint &source = layout.endpoints[0];
  for (size_t p = 0; p < source.params.size(); ++p)
    for (const ir::Part &part : source.params[p].parts) {
      if (part.pattern < 0)
        continue;
      ir::TensorPattern &pattern = layout.tensorPatterns[part.pattern];
      int &first = holder[part.pattern];
      if (first < 0) {
        first = static_cast<int>(p);
        if (pattern.dtype != source.params[p].dtype && !(castable(pattern.dtype) && castable(source.params[p].dtype)))
          diagnostics.error(paramsAt[0][p], "source param '" + source.params[p].name + "' stores tensor '" +
                                                pattern.name + "' of " + ir::name(pattern.dtype) + " as " +
                                                ir::name(source.params[p].dtype) + ", expected " +
                                                ir::name(pattern.dtype));
        pattern.dtype = source.params[p].dtype;
      } else if (pattern.dtype != source.params[p].dtype) {
        diagnostics.error(paramsAt[0][p], "source param '" + source.params[p].name + "' stores tensor '" +
                                              pattern.name + "' as " + ir::name(source.params[p].dtype) + ", but '" +
                                              source.params[first].name + "' as " + ir::name(pattern.dtype) +
                                              ", expected one dtype");
      }
    }
  for (size_t e = 1; e < layout.endpoints.size(); ++e)
    for (size_t p = 0; p < layout.endpoints[e].params.size(); ++p) {
      ir::Endpoint &target = layout.endpoints[e];
      ir::Param &param = target.params[p];
      const StorageForm &form = forms[e][p];
      const Location at = form.dtype ? form.dtype->second : paramsAt[e][p];
      const std::string title = target.role + " param '" + param.name + "'";
      const DType stored = param.dtype;
      std::optional<DType> sent;
      for (const ir::Part &part : param.parts) {
        if (part.pattern < 0)
          continue;
        const ir::TensorPattern &pattern = layout.tensorPatterns[part.pattern];
        if (!sent)
          sent = pattern.dtype;
        else if (*sent != pattern.dtype)
          diagnostics.error(at, title + " holds tensors that the source stores as " + ir::name(*sent) + " and as " +
                                    ir::name(pattern.dtype) + ", expected one dtype");
      }
      if (!sent || *sent == stored)
        continue;
      if (form.transform || (form.quantize && form.quantize->format)) { // from what comes
        param.dtype = *sent;
        continue;
      }
      const std::string change = title + " is " + ir::name(stored) + " but its tensors come as " + ir::name(*sent);
      if (!castable(stored) || !castable(*sent))
        diagnostics.error(at, change + "; there is no cast between them, expected " + ir::name(*sent));
      else if (!widens(*sent, stored) && !form.rounding)
        diagnostics.error(at, change + ", which rounds: expected 'convert: rne' beside 'dtype'");
      param.dtype = *sent;
      param.storageDtype = stored;
    }
}

using namespace ir;

namespace {

constexpr int64_t kMostPairs = 1 << 16; // of boxes that are compared for one pair of params

using ProductSet = std::vector<const IndexMap *>; // positions, by dimension

std::optional<Quantization> formatOf(const StorageForm &form) {
  return form.quantize ? form.quantize->format : std::nullopt;
}

std::string formText(const StorageForm &form) {
  const auto format = formatOf(form);
  return format ? std::string("quantised as ") + name(*format) : "as it is";
}

/// What places that may be read have of a part, each once.
std::vector<ProductSet> products(const Endpoint &source, const Param &param, const Part &part) {
  std::vector<unsigned> axes;
  for (const PartDimension &dimension : part.dimensions)
    axes.insert(axes.end(), source.shardings[dimension.sharding].axes.begin(),
                source.shardings[dimension.sharding].axes.end());
  for (const auto *rules : {&param.presence, &source.authority})
    for (const Presence &rule : *rules)
      axes.push_back(rule.axis);
  std::vector<ProductSet> result;
  for (int64_t meshRank : distinctMeshRanks(source, std::move(axes))) {
    if (!present(source, param, meshRank) || !mayRead(source, meshRank))
      continue;
    ProductSet &product = result.emplace_back();
    for (const PartDimension &dimension : part.dimensions) {
      const Sharding &sharding = source.shardings[dimension.sharding];
      product.push_back(&sharding.at[coordinate(source, sharding.axes, meshRank)]);
    }
  }
  return result;
}

/// Whether two parts of one tensor have an element in common on places that may be read.
bool meet(const Endpoint &source, const Param &one, const Part &part, const Param &other, const Part &otherPart) {
  const std::vector<ProductSet> mine = products(source, one, part), others = products(source, other, otherPart);
  int64_t pairs = 0;
  for (const ProductSet &a : mine)
    for (const ProductSet &b : others) {
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

void warnOnMixedForms(const std::vector<Location> &paramsAt, const std::vector<StorageForm> &forms,
                      const Layout &layout, Diagnostics &diagnostics) {
  const Endpoint &source = layout.endpoints[0];
  // By tensor and format: alike ones need not be compared.
  std::vector<std::map<std::optional<Quantization>, std::vector<std::pair<unsigned, const Part *>>>> holders(
      layout.tensorPatterns.size());
  std::set<std::pair<unsigned, unsigned>> said;
  for (unsigned p = 0; p < source.params.size(); ++p)
    for (const Part &part : source.params[p].parts) {
      if (part.pattern < 0)
        continue;
      std::vector<std::pair<unsigned, const Part *>> unlike;
      for (const auto &[format, list] : holders[part.pattern])
        if (format != formatOf(forms[p]))
          unlike.insert(unlike.end(), list.begin(), list.end());
      std::sort(unlike.begin(), unlike.end());
      for (const auto &[other, otherPart] : unlike) {
        if (said.contains({other, p}) || !meet(source, source.params[p], part, source.params[other], *otherPart))
          continue;
        said.insert({other, p});
        diagnostics.warning(paramsAt[p], "source param '" + source.params[p].name + "' holds tensor '" +
                                             layout.tensorPatterns[part.pattern].name + "' " + formText(forms[p]) +
                                             ", and '" + source.params[other].name + "' holds it " +
                                             formText(forms[other]) +
                                             ": their values differ in general, and ranks of a target may read either; "
                                             "'ignore' of the source leaves one out");
        diagnostics.note(paramsAt[other], "the other is here");
        break;
      }
      holders[part.pattern][formatOf(forms[p])].emplace_back(p, &part);
    }
}

} // namespace reshard
