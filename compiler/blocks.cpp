#include "compiler/blocks.h"

#include <algorithm>

namespace reshard {

using namespace ir;

namespace {

int64_t ceilDivide(int64_t n, int64_t by) { return (n + by - 1) / by; }

} // namespace

BlockSize blockOf(Quantization format) {
  switch (format) {
  case Quantization::mxfp8:
    return {1, 32};
  case Quantization::block_fp8:
    return {128, 128};
  case Quantization::nvfp4:
    break;
  }
  return {1, 16};
}

DType codeType(Quantization format) { return format == Quantization::nvfp4 ? DType::u8 : DType::fp8_e4m3; }

DType scaleType(Quantization format) {
  return format == Quantization::mxfp8 ? DType::u8 : format == Quantization::block_fp8 ? DType::fp32 : DType::fp8_e4m3;
}

std::vector<Extent> scaleShape(std::vector<Extent> shape, Quantization format) {
  const BlockSize block = blockOf(format);
  shape.back() = mapped(shape.back(), [&](int64_t n) { return ceilDivide(n, block.columns); });
  Extent &rows = shape[shape.size() - 2];
  rows = mapped(rows, [&](int64_t n) { return ceilDivide(n, block.rows); });
  return shape;
}

std::vector<Extent> swizzledShape(const Endpoint &endpoint, std::vector<Extent> shape, Quantization format) {
  const Extent columns = shape.back(), rows = shape[shape.size() - 2];
  shape.pop_back();
  Extent &both = shape.back();
  for (unsigned axis : columns.axes)
    if (std::find(both.axes.begin(), both.axes.end(), axis) == both.axes.end())
      both.axes.push_back(axis);
  int64_t count = 1;
  for (unsigned axis : both.axes)
    count *= endpoint.axes[axis].size;
  both.at.clear();
  for (int64_t c = 0; c < count; ++c) {
    std::map<unsigned, int64_t> coordinates;
    int64_t rest = c;
    for (size_t a = both.axes.size(); a-- > 0; rest /= endpoint.axes[both.axes[a]].size)
      coordinates[both.axes[a]] = rest % endpoint.axes[both.axes[a]].size;
    auto length = [&](const Extent &extent) {
      int64_t at = 0;
      for (unsigned axis : extent.axes)
        at = at * endpoint.axes[axis].size + coordinates[axis];
      return extent.at[at];
    };
    // Tiles of 128 rows by 4 columns of scales.
    both.at.push_back(ceilDivide(length(rows), 128) *
                      ceilDivide(ceilDivide(length(columns), blockOf(format).columns), 4) * 512);
  }
  return shape;
}

std::pair<int, int> Blocks::families(const Blocked &blocked) {
  const auto [at, added] = families_.try_emplace(blocked);
  if (!added)
    return at->second;
  const BlockSize block = blockOf(blocked.format);
  // A tensor may be quantised along different dimensions for different params, and these families need different names.
  const int last = static_cast<int>(layout_.families[blocked.family].shape.size()) - 1;
  std::string along;
  if (blocked.columns != last || (blocked.rows >= 0 && blocked.rows != last - 1))
    along = " along dimension " + std::to_string(blocked.columns) +
            (blocked.rows >= 0 ? " and " + std::to_string(blocked.rows) : "");
  for (const bool scales : {false, true}) {
    Family family = layout_.families[blocked.family];
    family.name += std::string(scales ? " (scales of " : " (codes of ") + name(blocked.format) + along + ")";
    family.dtype = scales ? scaleType(blocked.format) : codeType(blocked.format);
    int64_t &columns = family.shape[static_cast<size_t>(blocked.columns)];
    columns = ceilDivide(columns, scales ? block.columns : blocked.format == Quantization::nvfp4 ? 2 : 1);
    if (scales && blocked.rows >= 0)
      family.shape[static_cast<size_t>(blocked.rows)] =
          ceilDivide(family.shape[static_cast<size_t>(blocked.rows)], block.rows);
    (scales ? at->second.second : at->second.first) = static_cast<int>(layout_.families.size());
    layout_.families.push_back(std::move(family));
  }
  return at->second;
}

std::string Blocks::parts(unsigned e, unsigned p, unsigned q, Quantization format, std::vector<Part> &codes,
                          std::vector<Part> &scales) {
  const Param &param = layout_.endpoints[e].params[p];
  Part code = param.parts[q], scale = code;
  const int last = static_cast<int>(param.shape.size()) - 1;
  const BlockSize block = blockOf(format);
  if (code.family < 0) { // zeros: a scale of them is zero bytes in mxfp8 alone
    if (format != Quantization::mxfp8 ||
        !divide(e, code.dimensions.back().share, block.columns, -1, param.shape.back(), scale.dimensions.back().share))
      return layout_.endpoints[e].role + " param '" + param.name + "' is padded";
    codes.push_back(std::move(code));
    scales.push_back(std::move(scale));
    return {};
  }
  const std::vector<int64_t> shape = layout_.families[code.family].shape;
  const size_t variables = code.dimensions.size() - shape.size();
  const std::string where =
      layout_.endpoints[e].role + " param '" + param.name + "' holds '" + layout_.families[code.family].name + "'";
  Blocked blocked{code.family, format, -1, -1};
  for (const auto &[at, size, along] :
       {std::tuple(last, block.columns, &blocked.columns), std::tuple(last - 1, block.rows, &blocked.rows)}) {
    if (size == 1)
      continue;
    size_t found = 0;
    for (size_t d = 0; d < code.dimensions.size(); ++d)
      if (code.dimensions[d].param == at) {
        *along = static_cast<int>(d) - static_cast<int>(variables);
        ++found;
      }
    if (found != 1 || *along < 0)
      return where + " not as a matrix";
    const size_t d = variables + static_cast<size_t>(*along);
    const Extent &extent = param.shape[static_cast<size_t>(at)];
    if (!divide(e, code.dimensions[d].share, size, shape[static_cast<size_t>(*along)], extent,
                scale.dimensions[d].share))
      return where + " in pieces that are not whole blocks of " + std::to_string(size) +
             (at == last ? " columns" : " rows");
    if (format == Quantization::nvfp4) // two in a byte
      divide(e, code.dimensions[d].share, 2, shape[static_cast<size_t>(*along)], extent, code.dimensions[d].share);
  }
  std::tie(code.family, scale.family) = families(blocked);
  codes.push_back(std::move(code));
  scales.push_back(std::move(scale));
  return {};
}

Part Blocks::tensorScales(unsigned e, unsigned p, unsigned q) {
  Part part = layout_.endpoints[e].params[p].parts[q];
  const auto [at, added] = tensorScales_.try_emplace(part.family, static_cast<int>(layout_.families.size()));
  if (added) {
    Family family = layout_.families[part.family];
    family.name += " (tensor scale)";
    family.dtype = DType::fp32;
    family.shape.resize(family.shape.size() - 2);
    layout_.families.push_back(std::move(family));
  }
  part.family = at->second;
  part.dimensions.resize(part.dimensions.size() - 2);
  return part;
}

/// A share of positions as one of blocks; of padding, of which the local positions alone mean anything, `length` is -1.
bool Blocks::divide(unsigned e, unsigned number, int64_t block, int64_t length, const Extent &extent,
                    unsigned &divided) {
  Endpoint &endpoint = layout_.endpoints[e];
  Share share = endpoint.shares[number];
  for (size_t c = 0; c < share.at.size(); ++c) {
    const int64_t local = extent.axes == share.axes ? extent.at[c] : extent.axes.empty() ? extent.at[0] : -1;
    for (Segment &s : share.at[c]) {
      if (length < 0) {
        s.from = s.to;
        s.fromStep = s.toStep;
      }
      const bool ends = s.count == 1 && s.from + s.length == length && s.to + s.length == local;
      if (s.from % block != 0 || s.to % block != 0 || s.fromStep % block != 0 || s.toStep % block != 0 ||
          (s.length % block != 0 && !ends))
        return false;
      s = {s.from / block, s.to / block, ceilDivide(s.length, block), s.count, s.fromStep / block, s.toStep / block};
    }
    share.at[c] = normalize(std::move(share.at[c]));
  }
  share.unit = 1;
  const auto [at, added] =
      divided_.try_emplace({e, number, block, length}, static_cast<unsigned>(endpoint.shares.size()));
  if (added)
    endpoint.shares.push_back(std::move(share));
  divided = at->second;
  return true;
}

} // namespace reshard
