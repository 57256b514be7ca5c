#include "tools/quantize.h"

#include "executor/faces.h"
#include "kernels/quantized.h"
#include "kernels/scales.h"
#include "tools/synthesize.h"
#include "tools/vectors.h"

#include <cmath>
#include <cstring>

namespace reshard::tools {

using namespace schema;

namespace {

/// Makes room for what is not there yet: codes, scales and tensor scales.
struct Room {
  Bytes codes, scales, tensorScales;

  explicit Room(kernels::Quantized &matrices)
      : codes(matrices.codeBytes()), scales(matrices.matrices * matrices.scaleBytes()),
        tensorScales(matrices.format == kernels::Quantization::nvfp4 ? matrices.matrices * sizeof(float) : 0) {
    matrices.codes = codes.data();
    matrices.scales = scales.data();
    matrices.tensorScales = tensorScales.data();
  }
};

void quantize(const kernels::Quantized &matrices, const std::byte *wide) {
  if (matrices.elements() > 0)
    kernels::quantizeRows(matrices, wide, 0, matrices.blockRows());
}

} // namespace

std::vector<uint32_t> shownParams(const Face &face) {
  if (face.kind() != FaceKind::elements)
    return {face.codes()};
  if (face.format() != Quantization::nvfp4)
    return {face.codes(), face.scales()};
  return {face.codes(), face.scales(), face.tensor_scale()};
}

std::vector<std::optional<ShownBy>> shownAsElements(const Endpoint &endpoint) {
  std::vector<std::optional<ShownBy>> result(all(endpoint.params()).size());
  for (uint32_t p = 0; p < result.size(); ++p)
    if (const Face *face = endpoint.params()->Get(p)->face(); face && face->kind() == FaceKind::elements) {
      const std::vector<uint32_t> params = shownParams(*face);
      for (uint32_t i = 0; i < params.size(); ++i)
        result[params[i]] = {p, i};
    }
  return result;
}

std::vector<bool> madeByFaces(const Endpoint &endpoint) {
  std::vector<bool> result(all(endpoint.params()).size());
  for (const Param *param : all(endpoint.params()))
    if (const Face *face = param->face())
      for (const uint32_t made : madeParams(*face))
        result[made] = true;
  return result;
}

std::vector<uint32_t> madeParams(const Face &face) {
  switch (face.kind()) {
  case FaceKind::elements:
    return {face.codes(), face.scales()};
  case FaceKind::plain_scales:
    return {face.codes()};
  case FaceKind::amax:
    return {face.scales()};
  default:
    return {};
  }
}

ParamInstance sibling(const Endpoint &endpoint, const ParamInstance &instance, uint32_t number, int64_t place) {
  const Param &param = *endpoint.params()->Get(number);
  ParamInstance other{number,
                      instance.instance,
                      instance.values,
                      instance.name,
                      localShape(endpoint, param, place),
                      itemBytes(storedType(param))};
  for (const int64_t length : other.shape)
    other.bytes *= length;
  return other;
}

Bytes show(const Endpoint &endpoint, uint32_t number, uint32_t place, const std::vector<const std::byte *> &memory) {
  const Face &face = *endpoint.params()->Get(number)->face();
  kernels::Quantized matrices = FaceWork::matricesOf(endpoint, number, place);
  auto at = [&](size_t i) { return const_cast<std::byte *>(memory[i]); }; // only read
  switch (face.kind()) {
  case FaceKind::elements: {
    Bytes wide(matrices.elements() * kernels::itemBytes(matrices.wide));
    matrices.codes = at(0);
    matrices.scales = at(1);
    matrices.tensorScales = memory.size() > 2 ? at(2) : nullptr;
    if (!wide.empty())
      kernels::decodeElements(matrices, 0, wide.data(), matrices.elements());
    return wide;
  }
  case FaceKind::plain_scales: {
    const uint64_t columns = matrices.columns / kernels::blockShape(matrices.format).columns;
    Bytes plain(matrices.matrices * matrices.rows * columns);
    matrices.scales = at(0);
    if (!plain.empty())
      kernels::unswizzle(matrices, plain.data());
    return plain;
  }
  default:
    break;
  }
  Room room(matrices);
  quantize(matrices, memory[0]);
  return face.kind() == FaceKind::codes ? std::move(room.codes) : std::move(room.scales);
}

std::vector<Bytes> make(const Endpoint &endpoint, uint32_t number, uint32_t place, const std::byte *values,
                        const std::vector<float> &tensorScales) {
  const Face &face = *endpoint.params()->Get(number)->face();
  kernels::Quantized matrices = FaceWork::matricesOf(endpoint, number, place);
  if (face.kind() == FaceKind::plain_scales) {
    std::vector<Bytes> swizzled(1, Bytes(matrices.matrices * matrices.scaleBytes()));
    matrices.scales = swizzled[0].data();
    if (!swizzled[0].empty())
      kernels::swizzle(matrices, values);
    return swizzled;
  }
  Room room(matrices);
  if (!room.tensorScales.empty())
    std::memcpy(room.tensorScales.data(), tensorScales.data(), room.tensorScales.size());
  quantize(matrices, values);
  std::vector<Bytes> made;
  made.push_back(std::move(room.codes));
  made.push_back(std::move(room.scales));
  made.push_back(std::move(room.tensorScales));
  made.resize(shownParams(face).size());
  return made;
}

std::vector<float> synthesisedTensorScales(const Endpoint &endpoint, const ParamInstance &instance, uint32_t place) {
  const kernels::Quantized matrices = FaceWork::matricesOf(endpoint, instance.param, place);
  if (matrices.format != kernels::Quantization::nvfp4)
    return {};
  uint64_t hash = instance.param;
  for (const int64_t value : instance.values)
    hash = elementHash(hash, static_cast<uint64_t>(value));
  const float largest = 2 + static_cast<float>(elementHash(hash, 0) % 1024) / 512;
  return std::vector<float>(matrices.matrices, kernels::nvfp4TensorScale(largest));
}

float largestOf(DType type, const std::byte *elements, int64_t count) {
  return kernels::amax(kernels::formatNamed(dtypeName(type)).value(), elements,
                       {1, static_cast<uint64_t>(count), 0, 0});
}

float largerOf(float a, float b) { return std::isnan(a) || a > b ? a : b; }

float tensorScaleOf(float largest) { return kernels::nvfp4TensorScale(largest); }

} // namespace reshard::tools
