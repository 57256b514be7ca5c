// Synthesised values, and every instance of a place for several threads to work through: what synthesis and check
// share.
#pragma once

#include "tools/parallel.h"
#include "tools/quantized_views.h"
#include "tools/synthesize.h"

#include <algorithm>

namespace reshard::tools {

/// What stands in an element, by its tensor's key and its number.
struct SynthesizedValues {
  const schema::Param *param;
  schema::DType sentDtype, storageDtype;
  uint64_t mask = ~uint64_t{0}, ones = 0; // of what comes

  /// Of a param. In plans that cast, all floats are finite: the highest bit of the exponent is 0. In plans that
  /// quantise they are near 1 as well, so that few of a block become 0: of the exponent's other bits all but the lowest
  /// four are 1.
  SynthesizedValues(const schema::Manifest &manifest, const schema::Param &of);
  bool plain() const { return sentDtype == storageDtype && mask == ~uint64_t{0}; }
  uint64_t operator()(uint64_t key, uint64_t element) const;
};

/// Synthesised values of a run of a tensor with this key.
void fill(std::byte *memory, const ElementRun &run, uint64_t key, const SynthesizedValues &values);

/// Fills an instance of a param, or of a face, through its parts; padding gets 0xAB.
void synthesizeInstance(const schema::Manifest &manifest, const schema::Endpoint &endpoint, uint32_t meshRank,
                        const schema::ParamInstance &instance, uint64_t seed, std::byte *memory);

/// Calls work(instance) for every instance that has memory, in several threads: of a param, or of a face that shows
/// only what has memory.
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

} // namespace reshard::tools
