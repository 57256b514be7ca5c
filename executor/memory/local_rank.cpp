// SPDX-License-Identifier: Apache-2.0
#include "executor/memory/local_rank.h"

#include "schema/manifest.h"

#include <algorithm>

namespace reshard {

using namespace schema;

size_t bufferRangeOf(const Segment &segment, uint32_t buffer) {
  const auto *list = segment.buffers();
  const auto after = std::upper_bound(list->begin(), list->end(), buffer,
                                      [](uint32_t b, const BufferRange *r) { return b < r->first(); });
  if (after == list->begin())
    return list->size();
  const auto range = static_cast<size_t>(after - list->begin()) - 1;
  return buffer - list->Get(static_cast<uint32_t>(range))->first() < list->Get(static_cast<uint32_t>(range))->count()
             ? range
             : list->size();
}

namespace {

/// The format of a dtype that can be cast (checkManifest).
kernels::NumberFormat formatOf(DType type) { return kernels::numberFormatNamed(dtypeName(type)).value(); }

} // namespace

std::byte *LocalRank::pointer(uint32_t buffer) const {
  if (buffer == 0)
    return arena;
  const size_t range = bufferRangeOf(*segment, buffer);
  return range < memory.size() ? memory[range][buffer - segment->buffers()->Get(static_cast<uint32_t>(range))->first()]
                               : nullptr;
}

kernels::StorageForm LocalRank::form(uint32_t buffer) const {
  if (forms.empty())
    return {};
  const size_t range = bufferRangeOf(*segment, buffer);
  return range < forms.size() ? forms[range] : kernels::StorageForm{};
}

const kernels::ViewBase *LocalRank::viewBase(uint32_t buffer) const {
  if (viewBases.empty())
    return nullptr;
  const size_t range = bufferRangeOf(*segment, buffer);
  return range < viewBases.size() && !viewBases[range].empty()
             ? &viewBases[range][buffer - segment->buffers()->Get(static_cast<uint32_t>(range))->first()]
             : nullptr;
}

kernels::StorageForm castOf(const Param &param) {
  return param.storage_dtype() ? kernels::castForm(formatOf(param.dtype()), formatOf(*param.storage_dtype()),
                                                   static_cast<reshard::OverflowRule>(param.overflow()))
                               : kernels::StorageForm();
}

std::vector<kernels::StorageForm> formsOf(const Plan &plan, const Segment &segment) {
  using kernels::StorageForm;
  std::vector<StorageForm> forms;
  bool any = false;
  for (const BufferRange *range : *segment.buffers()) {
    const auto &params = *plan.manifest().endpoints()->Get(range->endpoint())->params();
    const Param &param = *params.Get(range->param());
    const QuantizedView *view = param.view();
    StorageForm &form = forms.emplace_back();
    if (param.storage_dtype()) {
      form = castOf(param);
    } else if (view && view->kind() <= ViewKind::codes) {
      const bool elements = view->kind() == ViewKind::elements;
      const kernels::NumberFormat code = kernels::NumberFormat::fp8_e4m3,
                                  wide = formatOf((elements ? param : *params.Get(view->codes())).dtype());
      form = {elements ? StorageForm::Kind::elements : StorageForm::Kind::codes, elements ? wide : code,
              elements ? code : wide, 1};
      form.block = form.item() * (elements && range->endpoint() > 0 && !view->staged()
                                      ? static_cast<uint64_t>(schema::formatOf(*view).blockColumns)
                                      : 1);
    }
    any = any || form;
  }
  return any ? forms : std::vector<StorageForm>();
}

} // namespace reshard
