#include "compiler/forms.h"

#include <algorithm>
#include <optional>

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

void settleForms(const std::vector<std::vector<Location>> &paramsAt, const std::vector<std::vector<StoredForm>> &forms,
                 ir::Layout &layout, Diagnostics &diagnostics) {
  std::vector<int> holder(layout.families.size(), -1); // a param of the source
  const ir::Endpoint &source = layout.endpoints[0];
  for (size_t p = 0; p < source.params.size(); ++p)
    for (const ir::Part &part : source.params[p].parts) {
      if (part.family < 0)
        continue;
      ir::Family &family = layout.families[part.family];
      int &first = holder[part.family];
      if (first < 0) {
        first = static_cast<int>(p);
        if (family.dtype != source.params[p].dtype && !(castable(family.dtype) && castable(source.params[p].dtype)))
          diagnostics.error(paramsAt[0][p], "source param '" + source.params[p].name + "' stores tensor '" +
                                                family.name + "' of " + ir::name(family.dtype) + " as " +
                                                ir::name(source.params[p].dtype) + ", expected " +
                                                ir::name(family.dtype));
        family.dtype = source.params[p].dtype;
      } else if (family.dtype != source.params[p].dtype) {
        diagnostics.error(paramsAt[0][p], "source param '" + source.params[p].name + "' stores tensor '" + family.name +
                                              "' as " + ir::name(source.params[p].dtype) + ", but '" +
                                              source.params[first].name + "' as " + ir::name(family.dtype) +
                                              ", expected one dtype");
      }
    }
  for (size_t e = 1; e < layout.endpoints.size(); ++e)
    for (size_t p = 0; p < layout.endpoints[e].params.size(); ++p) {
      ir::Endpoint &target = layout.endpoints[e];
      ir::Param &param = target.params[p];
      const StoredForm &form = forms[e][p];
      const Location at = form.dtype ? form.dtype->second : paramsAt[e][p];
      const std::string title = target.role + " param '" + param.name + "'";
      const DType stored = param.dtype;
      std::optional<DType> comes;
      for (const ir::Part &part : param.parts) {
        if (part.family < 0)
          continue;
        const ir::Family &family = layout.families[part.family];
        if (!comes)
          comes = family.dtype;
        else if (*comes != family.dtype)
          diagnostics.error(at, title + " holds tensors that the source stores as " + ir::name(*comes) + " and as " +
                                    ir::name(family.dtype) + ", expected one dtype");
      }
      if (!comes || *comes == stored)
        continue;
      if (form.transform || (form.quantize && form.quantize->format)) { // from what comes
        param.dtype = *comes;
        continue;
      }
      const std::string change = title + " is " + ir::name(stored) + " but its tensors come as " + ir::name(*comes);
      if (!castable(stored) || !castable(*comes))
        diagnostics.error(at, change + "; there is no cast between them, expected " + ir::name(*comes));
      else if (!widens(*comes, stored) && !form.rounds)
        diagnostics.error(at, change + ", which rounds: expected 'convert: rne' beside 'dtype'");
      param.dtype = *comes;
      param.stored = stored;
    }
}

} // namespace reshard
