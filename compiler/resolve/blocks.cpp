// SPDX-License-Identifier: Apache-2.0
// Derives the parts of codes and of scales from the part of the elements: each sharding of positions becomes one of
// blocks. A sharding that splits a block is an error.
#include "compiler/resolve/blocks.h"

#include "ir/index_map.h"

#include <algorithm>

namespace reshard {

using namespace ir;

DType codeType(Quantization format) { return *parseDType(std::string(formatOf(format).codeType())); }

DType scaleType(Quantization format, ScaleLayout layout) {
  return *parseDType(std::string(formatOf(format).scaleType(layout)));
}

std::vector<Extent> scaleShape(const Endpoint &endpoint, std::vector<Extent> shape, Quantization number,
                               ScaleLayout layout) {
  const QuantizedFormat &format = formatOf(number);
  const Extent columns = shape.back(), rows = shape[shape.size() - 2];
  if (layout == ScaleLayout::plain) { // each length depends on the axes of one dimension only
    shape.back() = mapped(columns, [&](int64_t n) { return format.scaleColumns(n); });
    shape[shape.size() - 2] = mapped(rows, [&](int64_t n) { return format.scaleRows(n); });
    return shape;
  }
  shape.resize(shape.size() - 2);
  std::vector<unsigned> axes = rows.axes;
  for (unsigned axis : columns.axes)
    if (std::find(axes.begin(), axes.end(), axis) == axes.end())
      axes.push_back(axis);
  int64_t count = 1;
  for (unsigned axis : axes)
    count *= endpoint.axes[axis].size;
  std::vector<Extent> stored;
  for (int64_t c = 0; c < count; ++c) {
    std::map<unsigned, int64_t> coordinates;
    int64_t rest = c;
    for (size_t a = axes.size(); a-- > 0; rest /= endpoint.axes[axes[a]].size)
      coordinates[axes[a]] = rest % endpoint.axes[axes[a]].size;
    auto length = [&](const Extent &extent) {
      int64_t at = 0;
      for (unsigned axis : extent.axes)
        at = at * endpoint.axes[axis].size + coordinates[axis];
      return extent.at[at];
    };
    const ScaleLengths lengths =
        scaleLengths(layout, length(rows), format.scaleRows(length(rows)), format.scaleColumns(length(columns)));
    stored.resize(lengths.count, Extent{axes, {}});
    for (size_t d = 0; d < lengths.count; ++d)
      stored[d].at.push_back(lengths.at[d]);
  }
  shape.insert(shape.end(), stored.begin(), stored.end());
  return shape;
}

std::pair<int, int> Blocks::quantizedPatterns(const Blocked &blocked) {
  const auto [at, added] = quantizedPatterns_.try_emplace(blocked);
  if (!added)
    return at->second;
  const QuantizedFormat &format = formatOf(blocked.format);
  // A tensor may be quantized along different dimensions for different params; these patterns need different names.
  const int last = static_cast<int>(layout_.tensorPatterns[blocked.pattern].shape.size()) - 1;
  std::string along;
  if (blocked.columns != last || (blocked.rows >= 0 && blocked.rows != last - 1))
    along = " along dimension " + std::to_string(blocked.columns) +
            (blocked.rows >= 0 ? " and " + std::to_string(blocked.rows) : "");
  for (const bool scales : {false, true}) {
    TensorPattern pattern = layout_.tensorPatterns[blocked.pattern];
    pattern.name += std::string(scales ? " (scales of " : " (codes of ") + format.name + along + ")";
    pattern.dtype = scales ? scaleType(blocked.format) : codeType(blocked.format);
    int64_t &columns = pattern.shape[static_cast<size_t>(blocked.columns)];
    columns = ceilDivide(columns, scales ? format.blockColumns : format.codesPerNumber());
    if (int64_t *const rows = scales && blocked.rows >= 0 ? &pattern.shape[static_cast<size_t>(blocked.rows)] : nullptr)
      *rows = format.scaleRows(*rows);
    (scales ? at->second.second : at->second.first) = static_cast<int>(layout_.tensorPatterns.size());
    layout_.tensorPatterns.push_back(std::move(pattern));
  }
  return at->second;
}

/// The parts of padding, which is zeros: its codes and scales must be zero bytes of whole blocks.
std::string Blocks::padding(const PartNumber &of, const QuantizedFormat &format, QuantizedParts &quantized) {
  const Param &param = layout_.endpoints[of.endpoint].params[of.param];
  Part code = param.parts[of.part], scale = code;
  std::string error = layout_.endpoints[of.endpoint].role + " param '" + param.name + "' is padded";
  if (!format.zerosAreZeroBytes())
    return error;
  for (const auto &[fromLast, block, codes] : {std::tuple(size_t{1}, format.blockColumns, format.codesPerNumber()),
                                               std::tuple(size_t{2}, format.blockRows, int64_t{1})}) {
    const size_t d = code.dimensions.size() - fromLast;
    const Extent &extent = param.shape[param.shape.size() - fromLast];
    for (const auto &[size, part] : {std::pair(block, &scale), std::pair(codes, &code)})
      if (size > 1) {
        const auto divided = divide({of.endpoint, code.dimensions[d].sharding, size, -1, extent});
        if (!divided)
          return error;
        part->dimensions[d].sharding = *divided;
      }
  }
  quantized.codes.push_back(std::move(code));
  quantized.scales.push_back(std::move(scale));
  return {};
}

std::string Blocks::parts(const PartNumber &of, Quantization number, QuantizedParts &quantized) {
  const QuantizedFormat &format = formatOf(number);
  const Param &param = layout_.endpoints[of.endpoint].params[of.param];
  Part code = param.parts[of.part], scale = code;
  if (code.pattern < 0)
    return padding(of, format, quantized);
  const int last = static_cast<int>(param.shape.size()) - 1;
  const std::vector<int64_t> shape = layout_.tensorPatterns[code.pattern].shape;
  const size_t variables = code.dimensions.size() - shape.size();
  const std::string title = layout_.endpoints[of.endpoint].role + " param '" + param.name + "'",
                    tensor = "'" + layout_.tensorPatterns[code.pattern].name + "'";
  Blocked blocked{code.pattern, number, -1, -1};
  for (const auto &[at, size, along] : {std::tuple(last, format.blockColumns, &blocked.columns),
                                        std::tuple(last - 1, format.blockRows, &blocked.rows)}) {
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
    Division division{of.endpoint, code.dimensions[d].sharding, size, shape[static_cast<size_t>(*along)],
                      param.shape[static_cast<size_t>(at)]};
    const auto divided = divide(division);
    if (!divided)
      return title + " holds " + tensor + " in shards that split blocks of " + std::to_string(size) +
             (at == last ? " columns" : " rows");
    scale.dimensions[d].sharding = *divided;
    if (division.block = format.codesPerNumber(); at == last && division.block > 1)
      code.dimensions[d].sharding = *divide(division); // a block has whole numbers of codes
  }
  std::tie(code.pattern, scale.pattern) = quantizedPatterns(blocked);
  quantized.codes.push_back(std::move(code));
  quantized.scales.push_back(std::move(scale));
  return {};
}

Part Blocks::tensorScales(const PartNumber &of) {
  Part part = layout_.endpoints[of.endpoint].params[of.param].parts[of.part];
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

/// Converts a sharding of positions to one of blocks; nullopt if a block is split.
std::optional<unsigned> Blocks::divide(const Division &division) {
  const auto &[e, number, block, length, extent] = division;
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
        return std::nullopt;
      s = {s.from / block, s.to / block, ceilDivide(s.length, block), s.count, s.fromStep / block, s.toStep / block};
    }
    sharding.at[c] = normalize(std::move(sharding.at[c]));
  }
  sharding.unit = 1;
  const auto [at, added] =
      divided_.try_emplace({e, number, block, length}, static_cast<unsigned>(endpoint.shardings.size()));
  if (added)
    endpoint.shardings.push_back(std::move(sharding));
  return at->second;
}

} // namespace reshard
