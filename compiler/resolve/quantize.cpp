// SPDX-License-Identifier: Apache-2.0
// Replaces each quantized param by params of codes and scales. If the source has a tensor in the target's format, its
// codes and scales are sent as they are; otherwise a view presents elements on the side that converts.
#include "compiler/resolve/steps.h"

#include "compiler/resolve/amax.h"
#include "compiler/resolve/blocks.h"

#include <algorithm>
#include <map>
#include <set>

namespace reshard {

using namespace ir;

namespace {

class Quantizer {
public:
  Quantizer(std::vector<std::vector<Location>> &paramsAt, std::vector<std::vector<StorageRule>> &forms, Layout &layout,
            Diagnostics &diagnostics)
      : paramsAt_(paramsAt), forms_(forms), layout_(layout), diagnostics_(diagnostics), blocks_(layout),
        amaxShards_(layout, [this](unsigned like, Param param) { append(0, like, std::move(param)); }) {}

  void run() {
    bool any = false;
    for (unsigned e = 0; e < layout_.endpoints.size(); ++e)
      for (unsigned p = 0; p < layout_.endpoints[e].params.size(); ++p)
        if (rule(e, p)) {
          any = true;
          check(e, p);
        }
    if (!any || !diagnostics_.ok())
      return;
    std::vector<unsigned> counts; // by endpoint: how many params are declared
    counts.reserve(layout_.endpoints.size());
    for (const Endpoint &endpoint : layout_.endpoints)
      counts.push_back(static_cast<unsigned>(endpoint.params.size()));
    for (unsigned p = 0; p < counts[0]; ++p)
      if (rule(0, p))
        addElementsView(0, p, false);
    findSourceParts();
    for (unsigned e = 1; e < counts.size(); ++e)
      for (unsigned p = 0; p < counts[e]; ++p)
        if (rule(e, p))
          target(e, p);
  }

private:
  const QuantizeRule *rule(unsigned e, unsigned p) const {
    const auto &quantize = forms_[e][p].quantize;
    return quantize && quantize->format ? &*quantize : nullptr;
  }
  Endpoint &endpoint(unsigned e) { return layout_.endpoints[e]; }
  Param &param(unsigned e, unsigned p) { return layout_.endpoints[e].params[p]; }
  std::string title(unsigned e, unsigned p) { return endpoint(e).role + " param '" + param(e, p).name + "'"; }

  void check(unsigned e, unsigned p) {
    const Param &param = this->param(e, p);
    const QuantizeRule rule = *this->rule(e, p); // a copy: forms_ grows
    const std::string what = title(e, p) + " is quantized as " + formatOf(*rule.format).name;
    if (param.shape.size() < 2)
      diagnostics_.error(rule.at, what + " but has one dimension, expected a matrix");
    else if (param.dtype != DType::fp32 && param.dtype != DType::bf16 && param.dtype != DType::fp16)
      diagnostics_.error(rule.at, what + " but is " + name(param.dtype) + ", expected fp32, bf16 or fp16");
    else if (e > 0 && !rule.shape.empty())
      diagnostics_.error(rule.at, what + " with 'shape', which only a source can have: nothing is sent to param '" +
                                      quantizedName(rule.shape, param.name) + "'");
    else if (const int64_t columns = formatOf(*rule.format).blockColumns; formatOf(*rule.format).blocksInRows())
      for (int64_t local : param.shape.back().at)
        if (local % columns != 0) {
          diagnostics_.error(rule.at, what + " but has " + std::to_string(local) +
                                          " columns on a rank, expected a multiple of " + std::to_string(columns));
          break;
        }
  }

  /// Appends a param with the location of param `like`.
  unsigned append(unsigned e, unsigned like, Param param) {
    param.refresh.clear();
    param.transform.clear();
    endpoint(e).params.push_back(std::move(param));
    paramsAt_[e].push_back(paramsAt_[e][like]);
    forms_[e].push_back({});
    return static_cast<unsigned>(endpoint(e).params.size() - 1);
  }

  struct Scales {
    unsigned scales = 0, tensorScale = 0;
  };

  /// Turns a param into the param of its codes and appends the params of its scales, all without parts.
  Scales storeQuantized(unsigned e, unsigned p) {
    const QuantizeRule rule = *this->rule(e, p); // a copy: forms_ grows
    const QuantizedFormat &format = formatOf(*rule.format);
    Param scales = param(e, p), tensorScale = param(e, p);
    for (Param *each : {&scales, &tensorScale, &param(e, p)})
      each->parts.clear();
    const std::string name = tensorScale.name, title = " of param '" + name + "'";
    if (rule.codes != "{name}") {
      param(e, p).name = quantizedName(rule.codes, name);
      forms_[e][p].title = "the codes" + title;
    }
    scales.name = quantizedName(rule.scale, scales.name);
    scales.dtype = scaleType(format.number, rule.scaleLayout);
    scales.shape = scaleShape(endpoint(e), scales.shape, format.number, rule.scaleLayout);
    param(e, p).dtype = codeType(format.number);
    storeCodeShape(param(e, p), format, rule.codeBlocks);
    Scales result;
    result.scales = append(e, p, std::move(scales));
    forms_[e][result.scales].title = "the scales" + title;
    result.tensorScale = result.scales;
    if (!rule.shape.empty()) {
      Param shape = tensorScale;
      shape.name = quantizedName(rule.shape, name);
      shape.dtype = DType::i64;
      shape.shape = {{{}, {static_cast<int64_t>(shape.shape.size())}}};
      forms_[e][append(e, p, std::move(shape))].title = "the shape" + title;
    }
    if (format.tensorScale()) {
      tensorScale.name = quantizedName(rule.tensorScale, name);
      tensorScale.dtype = DType::fp32;
      tensorScale.shape.resize(tensorScale.shape.size() - 2);
      result.tensorScale = append(e, p, std::move(tensorScale));
      forms_[e][result.tensorScale].title = "the tensor scales" + title;
    }
    return result;
  }

  /// Changes the shape of elements to that of their codes.
  static void storeCodeShape(Param &codes, const QuantizedFormat &format, bool blocks) {
    Extent &columns = codes.shape.back();
    if (!blocks) {
      columns = mapped(columns, [&](int64_t n) { return n / format.codesPerNumber(); });
      return;
    }
    columns = mapped(columns, [&](int64_t n) { return n / format.blockColumns; });
    codes.shape.push_back({{}, {format.blockColumns / format.codesPerNumber()}});
  }

  /// Adds the view that presents a quantized param as elements, which are read (source) or written (target).
  unsigned addElementsView(unsigned e, unsigned p, bool staged) {
    const QuantizeRule rule = *this->rule(e, p); // a copy: forms_ grows
    Param elements = param(e, p);
    const Scales scales = storeQuantized(e, p);
    elements.name += " (elements)";
    elements.view =
        QuantizedView{ViewKind::elements, *rule.format, staged, rule.scaleLayout, p, scales.scales, scales.tensorScale};
    if (e > 0) {
      for (unsigned derived : {p, scales.scales, scales.tensorScale})
        param(e, derived).derived = true;
      for (Part &part : elements.parts) // no later pass may split a row, so that blocks stay complete
        for (PartDimension &dimension : part.dimensions)
          if (dimension.param + 1 == static_cast<int>(elements.shape.size()))
            dimension.sharding = wholeSharding(e, dimension.sharding);
    }
    const unsigned number = append(e, p, std::move(elements));
    elements_[{e, p}] = number;
    return number;
  }

  /// The sharding with one unit, which no later pass splits.
  unsigned wholeSharding(unsigned e, unsigned sharding) {
    const auto [at, added] = whole_.try_emplace({e, sharding}, static_cast<unsigned>(endpoint(e).shardings.size()));
    if (added) {
      endpoint(e).shardings.push_back(endpoint(e).shardings[sharding]);
      endpoint(e).shardings.back().unit = int64_t{1} << 60;
    }
    return at->second;
  }

  void findSourceParts() {
    for (unsigned p = 0; p < endpoint(0).params.size(); ++p)
      for (unsigned q = 0; q < param(0, p).parts.size(); ++q)
        if (const int pattern = param(0, p).parts[q].pattern; pattern >= 0)
          sourceParts_[pattern].push_back({p, q});
  }

  // ------------------------------------------------------------------------------------- targets

  void target(unsigned e, unsigned p) {
    const QuantizeRule rule = *this->rule(e, p); // a copy: forms_ grows
    const QuantizedFormat &format = formatOf(*rule.format);
    std::string why;
    const bool sameFormat = sourceHasFormat(e, p),
               sends = rule.by == QuantizeRule::By::sender ||
                       (rule.by == QuantizeRule::By::either && format.senderQuantizes);
    if ((sameFormat || (sends && format.sendersCanQuantize())) && receiveCodes(e, p, sameFormat, why))
      return;
    if (format.tensorScale())
      why = std::string(format.name) + " needs the amax of the whole matrix, which no sender has";
    else if (!sameFormat && !format.sendersCanQuantize())
      why = "senders quantize only formats with one code in a byte";
    if (sameFormat || sourceIs(e, p, *rule.format))
      diagnostics_.warning(rule.at, title(e, p) +
                                        ": its codes are not those of the source, which has the same format: "
                                        "values are dequantized and quantized again, and may change" +
                                        (why.empty() ? "" : "; " + why));
    else if (rule.by == QuantizeRule::By::sender)
      diagnostics_.warning(rule.at, title(e, p) + " is quantized by the receiver: " + why);
    if (format.tensorScale() && !findAmax(e, p))
      return;
    const unsigned elements = addElementsView(e, p, !format.blocksInRows());
    if (const auto amax = amax_.find({e, p}); amax != amax_.end()) {
      param(e, amax->second).view->codes = elements;
      param(e, amax->second).view->scales = param(e, elements).view->tensorScale;
    }
  }

  /// Whether the source has all tensors of a target param quantized in the param's format, with codes in rows.
  bool sourceHasFormat(unsigned e, unsigned p) {
    if (!sourceIs(e, p, *rule(e, p)->format))
      return false;
    for (const Part &part : param(e, p).parts)
      if (part.pattern >= 0)
        for (const SourcePart &sourcePart : sourceParts_[part.pattern])
          if (rule(0, param(0, sourcePart.param).view->codes)->codeBlocks || rule(e, p)->codeBlocks)
            return false; // codes are sent as rows
    return !formatOf(*rule(e, p)->format).tensorScale() || sameMatrices(param(e, p));
  }

  /// Whether the source has all tensors of a target param quantized in a format.
  bool sourceIs(unsigned e, unsigned p, Quantization format) {
    for (const Part &part : param(e, p).parts)
      if (part.pattern >= 0)
        for (const SourcePart &sourcePart : sourceParts_[part.pattern])
          if (const auto &view = param(0, sourcePart.param).view;
              !view || view->kind != ViewKind::elements || view->format != format)
            return false;
    return true;
  }

  /// Whether a param and one param of the source hold the same tensors as matrices: then they have the same tensor
  /// scales.
  bool sameMatrices(const Param &target) {
    std::set<int> tensorPatterns;
    for (const Part &part : target.parts)
      tensorPatterns.insert(part.pattern);
    const SourcePart *first = nullptr;
    for (int pattern : tensorPatterns) {
      if (pattern < 0 || sourceParts_[pattern].size() != 1 || (first && sourceParts_[pattern][0].param != first->param))
        return false;
      first = &sourceParts_[pattern][0];
    }
    const Param &source = param(0, first->param);
    std::set<int> others;
    for (const Param *each : std::initializer_list<const Param *>{&target, &source})
      for (const Part &part : each->parts) {
        others.insert(part.pattern);
        if (!areMatrices(*each, part))
          return false;
      }
    others.erase(-1);
    return others == tensorPatterns;
  }

  /// Whether exactly the last two dimensions of a tensor are on the last two of the param.
  bool areMatrices(const Param &param, const Part &part) const {
    const int leading = static_cast<int>(param.shape.size()) - 2;
    const size_t outer = std::max<size_t>(part.dimensions.size(), 2) - 2;
    bool fits = part.pattern < 0 || layout_.tensorPatterns[part.pattern].shape.size() >= 2;
    for (size_t d = 0; d < part.dimensions.size() && part.pattern >= 0; ++d)
      fits = fits && (d < outer ? part.dimensions[d].param < leading : part.dimensions[d].param >= leading);
    return fits;
  }

  /// Whether the source has scales of a tensor of a target param in a layout other than plain.
  bool anyReordered(unsigned e, unsigned p) {
    for (const Part &part : param(e, p).parts)
      for (const SourcePart &sourcePart : part.pattern >= 0 ? sourceParts_[part.pattern] : std::vector<SourcePart>())
        if (const auto &view = param(0, sourcePart.param).view; view && view->scaleLayout != ScaleLayout::plain)
          return true;
    return false;
  }

  /// Adds the parts of codes and scales of a target param to `parts`. Returns why the source cannot send them; empty if
  /// it can.
  std::string partsOfCodes(unsigned e, unsigned p, Quantization format, bool sameFormat, QuantizedParts &parts) {
    std::string why;
    for (unsigned q = 0; q < param(e, p).parts.size(); ++q) {
      const Part &part = param(e, p).parts[q];
      if (why = blocks_.parts({e, p, q}, format, parts); !why.empty())
        return why;
      if (part.pattern < 0)
        continue;
      const std::string tensor = layout_.tensorPatterns[part.pattern].name; // a copy: blocks_ adds patterns
      QuantizedParts sent;
      for (const SourcePart &sourcePart : sourceParts_[part.pattern]) {
        const auto &view = param(0, sourcePart.param).view;
        if (!sameFormat && view)
          return "the source has '" + tensor + "' quantized as " + formatOf(view->format).name;
        if (why = blocks_.parts({0, sourcePart.param, sourcePart.part}, format, sent); !why.empty())
          return why;
        if (sent.codes.back().pattern != parts.codes.back().pattern)
          return "the source has '" + tensor + "' with its dimensions in another order";
      }
    }
    return why;
  }

  /// Makes a target param that receives codes and scales, which are tensors of their own, and the views of the source
  /// that provide them. Returns false if that is not possible, with the reason in `why`.
  bool receiveCodes(unsigned e, unsigned p, bool sameFormat, std::string &why) {
    const QuantizeRule rule = *this->rule(e, p); // a copy: forms_ grows
    const Quantization format = *rule.format;
    if (endpoint(0).storage && (!sameFormat || anyReordered(e, p))) {
      why = "the source is files, so that no sender can quantize values or reorder scales that are not plain";
      return false;
    }
    if (endpoint(e).storage && rule.scaleLayout != ScaleLayout::plain) {
      why = std::string("the target is files, and ") + name(rule.scaleLayout) +
            " scales in files are reordered by the rank that writes them";
      return false;
    }
    QuantizedParts parts;
    if (why = partsOfCodes(e, p, format, sameFormat, parts); !why.empty())
      return false;
    for (const Part &part : std::vector<Part>(param(e, p).parts))
      if (part.pattern >= 0)
        for (const SourcePart &sourcePart : sourceParts_[part.pattern])
          sendCodes(sourcePart, format);
    std::vector<Part> tensorScales;
    if (formatOf(format).tensorScale()) { // one tensor scale for all tensors of the matrix: sent as that of the first
      const unsigned from = sourceParts_[param(e, p).parts[0].pattern][0].param;
      const std::vector<Part> &all = param(e, p).parts;
      const auto same = std::find_if(all.begin(), all.end(),
                                     [&](const Part &part) { return part.pattern == param(0, from).parts[0].pattern; });
      tensorScales = {blocks_.tensorScales({e, p, static_cast<unsigned>(same - all.begin())})};
      param(0, param(0, from).view->tensorScale).parts = {blocks_.tensorScales({0, from, 0})};
    }
    const std::vector<Extent> wide = param(e, p).shape;
    const Scales stored = storeQuantized(e, p);
    param(e, stored.tensorScale).parts = tensorScales;
    param(e, p).parts = std::move(parts.codes);
    unsigned scales = stored.scales;
    param(e, scales).derived = rule.scaleLayout != ScaleLayout::plain;
    if (param(e, scales).derived)
      scales = append(
          e, p, plainScales(e, wide, {ViewKind::plain_scales, format, true, rule.scaleLayout, scales, scales, scales}));
    param(e, scales).parts = std::move(parts.scales);
    return true;
  }

  /// A view of kind plain_scales, of matrices of this shape.
  Param plainScales(unsigned e, const std::vector<Extent> &wide, const QuantizedView &view) {
    Param plain = param(e, view.codes);
    plain.derived = false;
    plain.name += " (plain)";
    plain.parts.clear();
    plain.dtype = scaleType(view.format);
    plain.shape = scaleShape(endpoint(e), wide, view.format);
    plain.view = view;
    return plain;
  }

  /// Adds codes and scales of a part of a source param: the stored ones, or a view that quantizes the elements.
  void sendCodes(const SourcePart &sourcePart, Quantization format) {
    if (!sent_.insert({{sourcePart.param, sourcePart.part}, format}).second)
      return;
    auto [at, added] = senders_.try_emplace({sourcePart.param, format});
    auto &[codes, scales] = at->second;
    if (added) {
      if (const auto view = param(0, sourcePart.param).view) { // stored quantized
        codes = view->codes;
        scales = view->scales;
        if (view->scaleLayout != ScaleLayout::plain)
          scales =
              append(0, sourcePart.param,
                     plainScales(0, param(0, sourcePart.param).shape,
                                 {ViewKind::plain_scales, format, true, view->scaleLayout, scales, scales, scales}));
      } else {
        Param codesView = param(0, sourcePart.param), scale = codesView;
        codesView.parts.clear();
        scale.parts.clear();
        codesView.name += std::string(" (codes of ") + formatOf(format).name + ")";
        codesView.dtype = codeType(format);
        scale.name += std::string(" (scales of ") + formatOf(format).name + ")";
        scale.dtype = scaleType(format);
        scale.shape = scaleShape(endpoint(0), scale.shape, format);
        scale.view = QuantizedView{.kind = ViewKind::scales,
                                   .format = format,
                                   .staged = true,
                                   .codes = sourcePart.param,
                                   .scales = sourcePart.param,
                                   .tensorScale = sourcePart.param};
        scales = append(0, sourcePart.param, std::move(scale));
        codesView.view = QuantizedView{.kind = ViewKind::codes,
                                       .format = format,
                                       .codes = sourcePart.param,
                                       .scales = scales,
                                       .tensorScale = scales};
        codes = append(0, sourcePart.param, std::move(codesView));
      }
    }
    QuantizedParts parts;
    blocks_.parts({0, sourcePart.param, sourcePart.part}, format, parts);
    param(0, codes).parts.push_back(std::move(parts.codes.back()));
    param(0, scales).parts.push_back(std::move(parts.scales.back()));
  }

  /// Adds the param of the amax that a target param with tensor scales needs, of each matrix over all ranks: each
  /// source rank that holds a shard of a tensor in it sends the amax of the shard, and the receiver computes their
  /// maximum.
  bool findAmax(unsigned e, unsigned p) {
    Param amax = param(e, p);
    const size_t leading = amax.shape.size() - 2;
    const Quantization format = *rule(e, p)->format;
    AmaxSlots slots{format, static_cast<int>(leading)};
    for (const Part &part : std::vector<Part>(std::move(amax.parts))) {
      if (part.pattern < 0 || sourceParts_[part.pattern].empty()) // a tensor without elements
        continue;
      if (!amaxShards_.add(e, part, sourceParts_[part.pattern], slots)) {
        diagnostics_.error(rule(e, p)->at,
                           title(e, p) + " cannot be quantized as " + formatOf(format).name +
                               ": a dimension of tensor '" + layout_.tensorPatterns[part.pattern].name +
                               "' numbers matrices here, but a source param joins it with other dimensions");
        return false;
      }
    }
    amax.name += " (amax)";
    amax.dtype = DType::fp32;
    amax.shape.resize(leading);
    amax.shape.push_back(
        {{}, {std::max<int64_t>(slots.count, 1)}}); // at least one: a matrix without elements has a scale, too
    amax.parts = std::move(slots.parts);
    // target() replaces codes and scales when the elements view exists.
    amax.view = QuantizedView{
        .kind = ViewKind::amax, .format = format, .staged = true, .codes = p, .scales = p, .tensorScale = p};
    amax_[{e, p}] = append(e, p, std::move(amax));
    return true;
  }

  std::vector<std::vector<Location>> &paramsAt_;
  std::vector<std::vector<StorageRule>> &forms_;
  Layout &layout_;
  Diagnostics &diagnostics_;
  Blocks blocks_;
  std::map<int, std::vector<SourcePart>> sourceParts_;                        // by tensor
  std::map<std::pair<unsigned, unsigned>, unsigned> elements_, whole_, amax_; // by endpoint, and param or sharding
  AmaxShards amaxShards_;
  std::map<std::pair<unsigned, Quantization>, std::pair<unsigned, unsigned>> senders_; // source param -> codes, scales
  std::set<std::pair<std::pair<unsigned, unsigned>, Quantization>> sent_;              // parts of source params
};

} // namespace

std::string quantizedName(const std::string &pattern, const std::string &name) {
  constexpr std::string_view kName = "{name}";
  std::string result = pattern;
  for (size_t at = 0; (at = result.find(kName, at)) != std::string::npos; at += name.size())
    result.replace(at, kName.size(), name);
  return result;
}

void quantizeParams(std::vector<std::vector<Location>> &paramsAt, std::vector<std::vector<StorageRule>> &forms,
                    Layout &layout, Diagnostics &diagnostics) {
  Quantizer(paramsAt, forms, layout, diagnostics).run();
}

} // namespace reshard
