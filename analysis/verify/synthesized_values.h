// Code that synthesis and check share: synthesized values, and a parallel loop over the instances of a mesh rank.
#pragma once

#include "analysis/parallel.h"
#include "analysis/verify/quantized_views.h"
#include "analysis/verify/synthesize.h"

#include <algorithm>

namespace reshard::analysis {

/// The synthesized values of a param's elements, as functions of the tensor's key and the element's index.
struct SynthesizedValues {
  const schema::Param *param;
  schema::DType sentDtype, storageDtype;
  uint64_t mask = ~uint64_t{0}, ones = 0; // bits of the sent code to keep, and to set

  /// For a param. In plans that cast, all floats are finite: the highest bit of the exponent is 0. In plans that
  /// quantize, they are also near 1, so that few elements of a block are rounded to 0: of the exponent's other bits all
  /// but the lowest four are 1.
  SynthesizedValues(const schema::Manifest &manifest, const schema::Param &of);
  bool plain() const { return sentDtype == storageDtype && mask == ~uint64_t{0}; }
  uint64_t operator()(uint64_t key, uint64_t element) const;
};

/// Writes the synthesized values of a run of a tensor with this key.
void fill(std::byte *memory, const ElementRun &run, uint64_t key, const SynthesizedValues &values);

/// Fills an instance of a param or of a quantized view through its parts; padding gets 0xAB.
void synthesizeInstance(const schema::Manifest &manifest, const schema::Endpoint &endpoint, uint32_t meshRank,
                        const schema::ParamInstance &instance, uint64_t seed, std::byte *memory);

/// Calls work(endpoint, instance) on several threads for every instance of a param with memory, and of a quantized view
/// whose base params have memory.
template <class Work>
void forEachInstance(const Plan &plan, const MeshRankMemory &memory, unsigned threads, Work work) {
  const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(memory.endpoint);
  std::vector<schema::ParamInstance> items;
  for (uint32_t p = 0; p < memory.params.size(); ++p) {
    const schema::QuantizedView *view = endpoint.params()->Get(p)->view();
    const std::vector<uint32_t> needed = view ? baseParams(*view) : std::vector<uint32_t>{p};
    for (schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, memory.meshRank))
      if (std::all_of(needed.begin(), needed.end(),
                      [&](uint32_t n) { return memory.params[n][instance.instance] != nullptr; }))
        items.push_back(std::move(instance));
  }
  parallelFor(items.size(), threads, [&](size_t i) { work(endpoint, items[i]); });
}

} // namespace reshard::analysis
