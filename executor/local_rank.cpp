#include "executor/transport.h"

#include "schema/manifest.h"

#include <algorithm>

namespace reshard {

using namespace schema;

size_t bufferRunOf(const Segment &segment, uint32_t buffer) {
  const auto *list = segment.buffers();
  const auto after = std::upper_bound(list->begin(), list->end(), buffer,
                                      [](uint32_t b, const BufferRange *r) { return b < r->first(); });
  if (after == list->begin())
    return list->size();
  const auto run = static_cast<size_t>(after - list->begin()) - 1;
  return buffer - list->Get(static_cast<uint32_t>(run))->first() < list->Get(static_cast<uint32_t>(run))->count()
             ? run
             : list->size();
}

namespace {

/// Of a dtype that check_manifest lets be cast.
kernels::Format formatOf(DType type) { return kernels::formatNamed(dtypeName(type)).value(); }

} // namespace

std::byte *LocalRank::pointer(uint32_t buffer) const {
  if (buffer == 0)
    return arena;
  const size_t run = bufferRunOf(*segment, buffer);
  return run < runs.size() ? runs[run][buffer - segment->buffers()->Get(static_cast<uint32_t>(run))->first()] : nullptr;
}

kernels::StorageForm LocalRank::form(uint32_t buffer) const {
  if (forms.empty())
    return {};
  const size_t run = bufferRunOf(*segment, buffer);
  return run < forms.size() ? forms[run] : kernels::StorageForm{};
}

const kernels::ViewBase *LocalRank::viewBase(uint32_t buffer) const {
  if (viewBases.empty())
    return nullptr;
  const size_t run = bufferRunOf(*segment, buffer);
  return run < viewBases.size() && !viewBases[run].empty()
             ? &viewBases[run][buffer - segment->buffers()->Get(static_cast<uint32_t>(run))->first()]
             : nullptr;
}

std::vector<kernels::StorageForm> formsOf(const Plan &plan, const Segment &segment) {
  using kernels::StorageForm;
  std::vector<StorageForm> forms;
  bool any = false;
  for (const BufferRange *run : *segment.buffers()) {
    const auto &params = *plan.manifest().endpoints()->Get(run->endpoint())->params();
    const Param &param = *params.Get(run->param());
    const QuantizedView *view = param.view();
    StorageForm &form = forms.emplace_back();
    if (param.storage_dtype()) {
      form = kernels::castForm(formatOf(param.dtype()), formatOf(*param.storage_dtype()));
    } else if (view && view->kind() <= ViewKind::codes) {
      const bool elements = view->kind() == ViewKind::elements;
      const kernels::Format code = kernels::Format::fp8_e4m3,
                            wide = formatOf((elements ? param : *params.Get(view->codes())).dtype());
      form = {elements ? StorageForm::Kind::elements : StorageForm::Kind::codes, elements ? wide : code,
              elements ? code : wide, 1};
      form.block = form.item() * (elements && run->endpoint() > 0 && !view->staged()
                                      ? kernels::blockShape(static_cast<kernels::Quantization>(view->format())).columns
                                      : 1);
    }
    any = any || form;
  }
  return any ? forms : std::vector<StorageForm>();
}

} // namespace reshard
