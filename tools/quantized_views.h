// Params that stand quantised, instance by instance: what a face (schema/plan.fbs) shows of them, and what must stand
// there once it is written.
#pragma once

#include "schema/manifest.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace reshard::tools {

using Bytes = std::vector<std::byte>;

/// The params that a face shows: of `elements` codes, scales and, of nvfp4, tensor scales; of others the one that is
/// shown.
std::vector<uint32_t> baseParams(const schema::QuantizedView &view);

/// For each param of an endpoint that stands quantised and is shown as elements, the face that does, and which of its
/// shownParams it is.
struct BaseOf {
  uint32_t view, number;
};
std::vector<std::optional<BaseOf>> elementViews(const schema::Endpoint &endpoint);

/// The params of a target that writing a face makes: one of elements codes and scales, one of plain scales the swizzled
/// ones, one of largest magnitudes the tensor scales.
std::vector<uint32_t> derivedParams(const schema::QuantizedView &view);
/// For each param of a target, whether some face does.
std::vector<bool> derivedParams(const schema::Endpoint &endpoint);

/// An instance of another param, of which a place has as many: of a face, or of what a face shows.
schema::ParamInstance sibling(const schema::Endpoint &endpoint, const schema::ParamInstance &instance, uint32_t param,
                              int64_t meshRank);

/// What an instance of a face on a source shows; `memory[i]` is where the instance of shownParams(face)[i] stands.
Bytes readView(const schema::Endpoint &endpoint, uint32_t view, uint32_t meshRank,
               const std::vector<const std::byte *> &memory);

/// What the shown params of an instance, by shownParams(face), must hold where the face, of elements or plain scales,
/// has these values; padding of swizzled scales is zero. Of nvfp4 with these tensor scales, one for each matrix.
std::vector<Bytes> writeView(const schema::Endpoint &endpoint, uint32_t view, uint32_t meshRank,
                             const std::byte *values, const std::vector<float> &tensorScales);

/// The tensor scales of an instance of elements as --synthesize makes them: like those of matrices with a largest
/// magnitude of 2 to 4, which is above all that is synthesised; the same for all parts of a matrix. None where the
/// format has none.
std::vector<float> synthesizedTensorScales(const schema::Endpoint &endpoint, const schema::ParamInstance &instance,
                                           uint32_t meshRank);

/// The largest magnitude of elements side by side: 0 of none, NaN where one is not finite.
float amaxOf(schema::DType type, const std::byte *elements, int64_t count);
/// The larger one, or NaN where one is; the tensor scale that follows from it.
float largerAmax(float a, float b);
float tensorScaleOf(float amax);

} // namespace reshard::tools
