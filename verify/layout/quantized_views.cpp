// SPDX-License-Identifier: Apache-2.0
// Reads and writes quantized views, instance by instance.
#include "verify/layout/quantized_views.h"

#include "executor/memory/view_jobs.h"
#include "kernels/cpu/quantized.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace reshard::verify {

using namespace schema;

namespace {

/// Allocates the outputs of a quantization: codes, scales and tensor scales.
struct OutputBuffers {
  Bytes codes, scales, tensorScales;

  explicit OutputBuffers(kernels::Quantized &matrices)
      : codes(matrices.codeBytes()), scales(matrices.matrices * matrices.scaleBytes()),
        tensorScales(reshard::formatOf(matrices.format).tensorScale() ? matrices.matrices * sizeof(float) : 0) {
    matrices.codes = codes.data();
    matrices.scales = scales.data();
    matrices.tensorScales = tensorScales.data();
  }
};

/// The scales of a row of blocks in the plain layout.
uint64_t scaleRowBytes(const kernels::Quantized &matrices) {
  const QuantizedFormat &format = reshard::formatOf(matrices.format);
  return static_cast<uint64_t>(format.scaleBytes() * format.scaleColumns(static_cast<int64_t>(matrices.columns)));
}

void quantize(const kernels::Quantized &matrices, const std::byte *wide) {
  if (matrices.elements() > 0)
    kernels::quantizeRows(matrices, wide, 0, matrices.blockRows());
}

} // namespace

std::vector<uint32_t> baseParams(const QuantizedView &view) {
  if (view.kind() != ViewKind::elements)
    return {view.codes()};
  if (!formatOf(view).tensorScale())
    return {view.codes(), view.scales()};
  return {view.codes(), view.scales(), view.tensor_scale()};
}

std::vector<std::optional<BaseOf>> elementViews(const Endpoint &endpoint) {
  std::vector<std::optional<BaseOf>> result(orEmpty(endpoint.params()).size());
  for (uint32_t p = 0; p < result.size(); ++p)
    if (const QuantizedView *view = endpoint.params()->Get(p)->view(); view && view->kind() == ViewKind::elements) {
      const std::vector<uint32_t> params = baseParams(*view);
      for (uint32_t i = 0; i < params.size(); ++i)
        result[params[i]] = {p, i};
    }
  return result;
}

std::vector<bool> derivedParams(const Endpoint &endpoint) {
  std::vector<bool> result(orEmpty(endpoint.params()).size());
  for (const Param *param : orEmpty(endpoint.params()))
    if (const QuantizedView *view = param->view())
      for (const uint32_t derived : derivedParams(*view))
        result[derived] = true;
  return result;
}

std::vector<uint32_t> derivedParams(const QuantizedView &view) {
  switch (view.kind()) {
  case ViewKind::elements:
    return {view.codes(), view.scales()};
  case ViewKind::plain_scales:
    return {view.codes()};
  case ViewKind::amax:
    return {view.scales()};
  default:
    return {};
  }
}

ParamInstance sibling(const Endpoint &endpoint, const ParamInstance &instance, uint32_t number, int64_t meshRank) {
  const Param &param = *endpoint.params()->Get(number);
  ParamInstance other{number,
                      instance.instance,
                      instance.values,
                      instance.name,
                      localShape(endpoint, param, meshRank),
                      itemBytes(storageDtypeOf(param))};
  for (const int64_t length : other.shape)
    other.bytes *= length;
  return other;
}

int64_t matrixCount(const Endpoint &endpoint, uint32_t number, uint32_t meshRank) {
  return static_cast<int64_t>(ViewJobs::matricesOf(endpoint, number, meshRank).matrices);
}

Bytes readMatrix(const Endpoint &endpoint, uint32_t number, uint32_t meshRank,
                 const std::vector<const std::byte *> &memory, int64_t matrix) {
  const QuantizedView &view = *endpoint.params()->Get(number)->view();
  kernels::Quantized one = ViewJobs::matricesOf(endpoint, number, meshRank);
  one.matrices = 1;
  const auto at = [&](size_t i, uint64_t bytes) { // a base param has so many bytes for each matrix; only read
    return const_cast<std::byte *>(memory[i]) + static_cast<uint64_t>(matrix) * bytes;
  };
  switch (view.kind()) {
  case ViewKind::elements: {
    Bytes wide(one.elements() * kernels::itemBytes(one.wide));
    one.codes = at(0, one.codeBytes());
    one.scales = at(1, one.scaleBytes());
    one.tensorScales = memory.size() > 2 ? at(2, sizeof(float)) : nullptr;
    if (!wide.empty())
      kernels::decodeElements(one, {0, one.elements()}, wide.data());
    return wide;
  }
  case ViewKind::plain_scales: {
    Bytes plain(one.blockRows() * scaleRowBytes(one));
    one.scales = at(0, one.scaleBytes());
    if (!plain.empty())
      kernels::toPlainScales(one, plain.data());
    return plain;
  }
  default:
    break;
  }
  OutputBuffers output(one);
  quantize(one, at(0, one.elements() * kernels::itemBytes(one.wide)));
  return view.kind() == ViewKind::codes ? std::move(output.codes) : std::move(output.scales);
}

QuantizedBands::QuantizedBands(const Endpoint &endpoint, uint32_t view, uint32_t meshRank,
                               std::vector<float> tensorScales)
    : endpoint_(endpoint), view_(view), meshRank_(meshRank), format_(formatOf(*endpoint.params()->Get(view)->view())),
      tensorScales_(std::move(tensorScales)) {
  const kernels::Quantized matrices = ViewJobs::matricesOf(endpoint, view, meshRank);
  plainScales_.resize(matrices.blockRows() * scaleRowBytes(matrices));
}

bool QuantizedBands::next(int64_t most) {
  const kernels::Quantized matrices = ViewJobs::matricesOf(endpoint_, view_, meshRank_);
  const uint64_t rows = matrices.scaleShape().rows;
  row_ = nextRow_;
  if (row_ == rows) {
    ++matrix_;
    row_ = 0;
  }
  if (matrix_ >= matrices.matrices || matrices.elements() == 0)
    return false;
  const auto blockRows = static_cast<uint64_t>(format_.blockRows);
  const uint64_t rowElements = blockRows * matrices.columns;
  nextRow_ = std::min(rows, row_ + std::max<uint64_t>(static_cast<uint64_t>(most) / rowElements, 1));
  const uint64_t matrixFirst = matrix_ * matrices.rows;
  first_ = static_cast<int64_t>((matrixFirst + row_ * blockRows) * matrices.columns);
  count_ =
      static_cast<int64_t>((matrixFirst + std::min(matrices.rows, nextRow_ * blockRows)) * matrices.columns) - first_;
  return true;
}

Bytes QuantizedBands::codes(const std::byte *values) {
  Bytes codes(static_cast<size_t>(codeBytes(count_)));
  float tensorScale = tensorScales_.empty() ? 0 : tensorScales_[matrix_];
  kernels::Quantized band = ViewJobs::matricesOf(endpoint_, view_, meshRank_);
  const uint64_t rowOfBlocks = matrix_ * band.scaleShape().rows + row_;
  band.layout = reshard::ScaleLayout::plain;
  band.matrices = 1;
  band.rows = static_cast<uint64_t>(count_) / band.columns;
  band.codes = codes.data();
  band.scales = plainScales_.data() + rowOfBlocks * scaleRowBytes(band);
  band.tensorScales = reinterpret_cast<std::byte *>(&tensorScale);
  kernels::quantizeRows(band, values, 0, band.blockRows());
  return codes;
}

Bytes QuantizedBands::scales() const {
  kernels::Quantized matrices = ViewJobs::matricesOf(endpoint_, view_, meshRank_);
  if (matrices.layout == reshard::ScaleLayout::plain)
    return plainScales_;
  Bytes stored(matrices.matrices * matrices.scaleBytes());
  matrices.scales = stored.data();
  if (!plainScales_.empty())
    kernels::fromPlainScales(matrices, plainScales_.data());
  return stored;
}

Bytes QuantizedBands::tensorScales() const {
  const uint64_t matrices = ViewJobs::matricesOf(endpoint_, view_, meshRank_).matrices;
  Bytes stored(format_.tensorScale() ? matrices * sizeof(float) : 0);
  if (!stored.empty())
    std::memcpy(stored.data(), tensorScales_.data(), stored.size());
  return stored;
}

int64_t QuantizedBands::codeBytes(int64_t elements) const { return elements / format_.codesPerByte(); }

std::vector<Bytes> writeView(const Endpoint &endpoint, uint32_t number, uint32_t meshRank, const std::byte *values,
                             const std::vector<float> &tensorScales) {
  const QuantizedView &view = *endpoint.params()->Get(number)->view();
  if (view.kind() == ViewKind::plain_scales) {
    kernels::Quantized matrices = ViewJobs::matricesOf(endpoint, number, meshRank);
    std::vector<Bytes> stored(1, Bytes(matrices.matrices * matrices.scaleBytes()));
    matrices.scales = stored[0].data();
    if (!stored[0].empty())
      kernels::fromPlainScales(matrices, values);
    return stored;
  }
  QuantizedBands bands(endpoint, number, meshRank, tensorScales);
  const auto item = static_cast<int64_t>(itemBytes(endpoint.params()->Get(number)->dtype()));
  Bytes codes;
  while (bands.next(std::numeric_limits<int64_t>::max())) {
    const Bytes band = bands.codes(values + bands.first() * item);
    codes.insert(codes.end(), band.begin(), band.end());
  }
  std::vector<Bytes> derived{std::move(codes), bands.scales(), bands.tensorScales()};
  derived.resize(baseParams(view).size());
  return derived;
}

float amaxOf(DType type, const std::byte *elements, int64_t count) {
  return kernels::amax(kernels::numberFormatNamed(dtypeName(type)).value(), elements,
                       {1, static_cast<uint64_t>(count), 0, 0});
}

float largerAmax(float a, float b) { return std::isnan(a) || a > b ? a : b; }

float tensorScaleOf(float amax) { return kernels::nvfp4TensorScale(amax); }

} // namespace reshard::verify
