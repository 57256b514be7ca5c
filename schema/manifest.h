// What a manifest says about one place: coordinates, param names, shapes and where every logical element stands. Used
// by the executor to bind by name and by the tools to prove and check; shares no code with the planner.
#pragma once

#include "schema/plan_generated.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::schema {

/// The FlatBuffers identifier of a manifest; a segment's is the root type's, SegmentIdentifier().
inline constexpr const char *kManifestIdentifier = "RSMF";

/// Positions of index values on a place are numbered from c * kChunk on in chunk c (virtual pipeline stages).
inline constexpr int64_t kChunkStride = int64_t{1} << 20;

int64_t itemBytes(DType type);
/// Of a param's elements in memory; as they come they are of its dtype().
inline DType storageDtypeOf(const Param &param) {
  return param.storage_dtype() ? *param.storage_dtype() : param.dtype();
}
/// The name in YAML and reports ("bf16"), and in safetensors headers ("BF16").
const char *dtypeName(DType type);
const char *safetensorsName(DType type);
std::optional<DType> dtypeFromSafetensors(std::string_view name);

/// The coordinate of a place over mesh axes (numbers into Endpoint::axes), outermost first; 0 for no axes.
int64_t coordinate(const Endpoint &endpoint, const flatbuffers::Vector<uint32_t> *axes, int64_t meshRank);

/// The runs of a share at a place.
struct IndexMap {
  const IndexBlock *begin = nullptr, *end = nullptr;
  int64_t size() const; // positions related
  std::optional<int64_t> map(int64_t from) const;
};
IndexMap indexMap(const Endpoint &endpoint, const Sharding &sharding, int64_t meshRank);

/// Whether the caller's hooks fill it, or take it over.
inline bool transformed(const Param &param) { return param.transform() && param.transform()->size() > 0; }
/// Whether the caller binds it, or a file holds it.
inline bool bindable(const Param &param) { return !param.view() && !transformed(param); }
/// Whether its instances have memory of their own in the arena.
inline bool inArena(const Param &param) {
  return param.view() ? param.view()->staged() && param.view()->kind() != ViewKind::elements : transformed(param);
}
/// Bytes that such an instance takes there.
inline uint64_t stagedBytes(const BufferRange &run) { return (run.bytes() + 63) / 64 * 64; }

/// Whether the largest magnitudes of a face `amax` of a source are over dimension `d` of the part that it shows.
inline bool isAmaxDimension(const QuantizedView &view, const Part &part, uint32_t d) {
  const uint32_t fromLast = part.dimensions()->size() - 1 - d;
  return fromLast < 32 && ((view.amax_dimensions() == 0 ? 3u : view.amax_dimensions()) >> fromLast & 1) != 0;
}

/// One param instance on a place.
struct ParamInstance {
  uint32_t param = 0;          // into Endpoint::params
  uint32_t instance = 0;       // within the param on this place, last name variable fastest
  std::vector<int64_t> values; // logical value of each name variable
  std::string name;
  std::vector<int64_t> shape; // elements
  int64_t bytes = 0;          // in memory
};

bool present(const Endpoint &endpoint, const Param &param, int64_t meshRank);
int64_t instanceCount(const Endpoint &endpoint, const Param &param, int64_t meshRank);
std::vector<int64_t> localShape(const Endpoint &endpoint, const Param &param, int64_t meshRank);
/// Every instance of one param on a place, in instance order.
std::vector<ParamInstance> instances(const Manifest &manifest, const Endpoint &endpoint, uint32_t param,
                                     int64_t meshRank);

/// The name of a tensor of a family for given index values, placeholders filled in.
std::string tensorName(const Manifest &manifest, const TensorPattern &pattern, const std::vector<int64_t> &values);

/// Whether everything in the manifest refers to something that exists and every size is within bounds, so that the
/// functions above are safe on it, every run of a part stands inside tensor and param, and instances are numbered
/// without gaps; the error text otherwise (empty: good). Run by the loader before anything else is read.
/// check_manifest.cpp.
std::string checkManifest(const Manifest &manifest);

} // namespace reshard::schema
