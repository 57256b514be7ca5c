#include "compiler/resolve/blocks.h"

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
    // Tiles of 128 rows by 4 columns of scales, 512 bytes each.
    both.at.push_back(ceilDivide(length(rows), 128) *
                      ceilDivide(ceilDivide(length(columns), blockOf(format).columns), 4) * 512);
  }
  return shape;
}

std::pair<int, int> Blocks::quantizedPatterns(const Blocked &blocked) {
  const auto [at, added] = quantizedPatterns_.try_emplace(blocked);
  if (!added)
    return at->second;
  const BlockSize block = blockOf(blocked.format);
  // A tensor may be quantized along different dimensions for different params; these patterns need different names.
  const int last = static_cast<int>(layout_.tensorPatterns[blocked.pattern].shape.size()) - 1;
  std::string along;
  if (blocked.columns != last || (blocked.rows >= 0 && blocked.rows != last - 1))
    along = " along dimension " + std::to_string(blocked.columns) +
            (blocked.rows >= 0 ? " and " + std::to_string(blocked.rows) : "");
  for (const bool scales : {false, true}) {
    TensorPattern pattern = layout_.tensorPatterns[blocked.pattern];
    pattern.name += std::string(scales ? " (scales of " : " (codes of ") + name(blocked.format) + along + ")";
    pattern.dtype = scales ? scaleType(blocked.format) : codeType(blocked.format);
    int64_t &columns = pattern.shape[static_cast<size_t>(blocked.columns)];
    columns = ceilDivide(columns, scales ? block.columns : blocked.format == Quantization::nvfp4 ? 2 : 1);
    if (scales && blocked.rows >= 0)
      pattern.shape[static_cast<size_t>(blocked.rows)] =
          ceilDivide(pattern.shape[static_cast<size_t>(blocked.rows)], block.rows);
    (scales ? at->second.second : at->second.first) = static_cast<int>(layout_.tensorPatterns.size());
    layout_.tensorPatterns.push_back(std::move(pattern));
  }
  return at->second;
}

std::string Blocks::parts(unsigned e, unsigned p, unsigned q, Quantization format, std::vector<Part> &codes,
                          std::vector<Part> &scales) {
  const Param &param = layout_.endpoints[e].params[p];
  Part code = param.parts[q], scale = code;
  const int last = static_cast<int>(param.shape.size()) - 1;
  const BlockSize block = blockOf(format);
  if (code.pattern < 0) { // padding: only mxfp8 has scales of zero blocks that are zero bytes
    if (format != Quantization::mxfp8 || !divide(e, code.dimensions.back().sharding, block.columns, -1,
                                                 param.shape.back(), scale.dimensions.back().sharding))
      return layout_.endpoints[e].role + " param '" + param.name + "' is padded";
    codes.push_back(std::move(code));
    scales.push_back(std::move(scale));
    return {};
  }
  const std::vector<int64_t> shape = layout_.tensorPatterns[code.pattern].shape;
  const size_t variables = code.dimensions.size() - shape.size();
  const std::string title = layout_.endpoints[e].role + " param '" + param.name + "'",
                    tensor = "'" + layout_.tensorPatterns[code.pattern].name + "'";
  Blocked blocked{code.pattern, format, -1, -1};
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
      return title + " does not hold " + tensor + " as a matrix";
    const size_t d = variables + static_cast<size_t>(*along);
    const Extent &extent = param.shape[static_cast<size_t>(at)];
    if (!divide(e, code.dimensions[d].sharding, size, shape[static_cast<size_t>(*along)], extent,
                scale.dimensions[d].sharding))
      return title + " holds " + tensor + " in shards that split blocks of " + std::to_string(size) +
             (at == last ? " columns" : " rows");
    if (format == Quantization::nvfp4) // two in a byte
      divide(e, code.dimensions[d].sharding, 2, shape[static_cast<size_t>(*along)], extent,
             code.dimensions[d].sharding);
  }
  std::tie(code.pattern, scale.pattern) = quantizedPatterns(blocked);
  codes.push_back(std::move(code));
  scales.push_back(std::move(scale));
  return {};
}

Part Blocks::tensorScales(unsigned e, unsigned p, unsigned q) {
  Part part = layout_.endpoints[e].params[p].parts[q];
  const auto [at, added] = tensorScales_.try_emplace(part.pattern, static_cast<int>(layout_.tensorPatterns.size()));
  if (added) {
    TensorPattern pattern = layout_.tensorPatterns[part.pattern];
    pattern.name += " (tensor scale)";
    pattern.dtype = DType::fp32;
    pattern.shape.resize(pattern.shape.size() - 2);
    layout_.tensorPatterns.push_back(std::move(pattern));
  }
  part.pattern = at->second;
  part.dimensions.resize(part.dimensions.size() - 2);
  return part;
}

/// Converts a sharding of positions to one of blocks. For padding, where only local positions matter, `length` is -1.
/// False if a block is split.
bool Blocks::divide(unsigned e, unsigned number, int64_t block, int64_t length, const Extent &extent,
                    unsigned &divided) {
  Endpoint &endpoint = layout_.endpoints[e];
  Sharding sharding = endpoint.shardings[number];
  for (size_t c = 0; c < sharding.at.size(); ++c) {
    const int64_t local = extent.axes == sharding.axes ? extent.at[c] : extent.axes.empty() ? extent.at[0] : -1;
    for (IndexBlock &s : sharding.at[c]) {
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
    sharding.at[c] = normalize(std::move(sharding.at[c]));
  }
  sharding.unit = 1;
  const auto [at, added] =
      divided_.try_emplace({e, number, block, length}, static_cast<unsigned>(endpoint.shardings.size()));
  if (added)
    endpoint.shardings.push_back(std::move(sharding));
  divided = at->second;
  return true;
}

} // namespace reshard
