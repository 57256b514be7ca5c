#include "executor/transport.h"

#include "schema/manifest.h"

#include <algorithm>

namespace reshard {

using namespace schema;

size_t runOf(const Segment &segment, uint32_t buffer) {
  const auto *list = segment.buffers();
  const auto after = std::upper_bound(list->begin(), list->end(), buffer,
                                      [](uint32_t b, const BufferRun *r) { return b < r->first(); });
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
  const size_t run = runOf(*segment, buffer);
  return run < runs.size() ? runs[run][buffer - segment->buffers()->Get(static_cast<uint32_t>(run))->first()] : nullptr;
}

kernels::Form LocalRank::form(uint32_t buffer) const {
  if (forms.empty())
    return {};
  const size_t run = runOf(*segment, buffer);
  return run < forms.size() ? forms[run] : kernels::Form{};
}

const kernels::Shown *LocalRank::matrices(uint32_t buffer) const {
  if (shown.empty())
    return nullptr;
  const size_t run = runOf(*segment, buffer);
  return run < shown.size() && !shown[run].empty()
             ? &shown[run][buffer - segment->buffers()->Get(static_cast<uint32_t>(run))->first()]
             : nullptr;
}

std::vector<kernels::Form> formsOf(const Plan &plan, const Segment &segment) {
  using kernels::Form;
  std::vector<Form> forms;
  bool any = false;
  for (const BufferRun *run : *segment.buffers()) {
    const auto &params = *plan.manifest().endpoints()->Get(run->endpoint())->params();
    const Param &param = *params.Get(run->param());
    const Face *face = param.face();
    Form &form = forms.emplace_back();
    if (param.stored()) {
      form = kernels::castForm(formatOf(param.dtype()), formatOf(*param.stored()));
    } else if (face && face->kind() <= FaceKind::codes) {
      const bool elements = face->kind() == FaceKind::elements;
      const kernels::Format code = kernels::Format::fp8_e4m3,
                            wide = formatOf((elements ? param : *params.Get(face->codes())).dtype());
      form = {elements ? Form::Kind::elements : Form::Kind::codes, elements ? wide : code, elements ? code : wide, 1};
      form.block = form.item() * (elements && run->endpoint() > 0 && !face->gathered()
                                      ? kernels::blockShape(static_cast<kernels::Quantization>(face->format())).columns
                                      : 1);
    }
    any = any || form;
  }
  return any ? forms : std::vector<Form>();
}

} // namespace reshard
