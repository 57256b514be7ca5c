#include "executor/transport.h"

#include "schema/manifest.h"

#include <algorithm>

namespace reshard {

using namespace schema;

namespace {

/// The run that has a buffer, or as many as there are.
size_t runOf(const Segment &segment, uint32_t buffer) {
  const auto *list = segment.buffers();
  const auto after = std::upper_bound(list->begin(), list->end(), buffer, [](uint32_t b, const BufferRun *r) { return b < r->first(); });
  if (after == list->begin())
    return list->size();
  const auto run = static_cast<size_t>(after - list->begin()) - 1;
  return buffer - list->Get(static_cast<uint32_t>(run))->first() < list->Get(static_cast<uint32_t>(run))->count() ? run : list->size();
}

/// Of a dtype that check_manifest lets be cast.
kernels::Format formatOf(DType type) { return kernels::formatNamed(dtypeName(type)).value(); }

} // namespace

std::byte *LocalRank::pointer(uint32_t buffer) const {
  const size_t run = runOf(*segment, buffer);
  return run < runs.size() ? runs[run][buffer - segment->buffers()->Get(static_cast<uint32_t>(run))->first()] : nullptr;
}

kernels::Cast LocalRank::cast(uint32_t buffer) const {
  if (casts.empty())
    return {};
  const size_t run = runOf(*segment, buffer);
  return run < casts.size() ? casts[run] : kernels::Cast{};
}

std::vector<kernels::Cast> castsOf(const Plan &plan, const Segment &segment) {
  std::vector<kernels::Cast> casts;
  bool any = false;
  for (const BufferRun *run : *segment.buffers()) {
    const Param &param = *plan.manifest().endpoints()->Get(run->endpoint())->params()->Get(run->param());
    casts.push_back(param.stored() ? kernels::Cast{formatOf(param.dtype()), formatOf(*param.stored())} : kernels::Cast{});
    any = any || casts.back();
  }
  return any ? casts : std::vector<kernels::Cast>();
}

} // namespace reshard
