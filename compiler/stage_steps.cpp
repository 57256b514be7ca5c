#include "compiler/stage_steps.h"

#include <algorithm>

namespace reshard {

using namespace ir;

void StageSteps::append(int32_t rank, Step step, const Stage &stage) {
  std::vector<Step> &steps = module_.schedule.ranks[rank].steps;
  const auto number = static_cast<uint32_t>(steps.size());
  State &at = state_[rank];
  const Needs needs = this->needs(rank, step);
  if (needs.gathers && at.converted >= 0)
    step.after.push_back(static_cast<uint32_t>(at.converted));
  if (needs.tensorScales && at.reduced >= 0)
    step.after.push_back(static_cast<uint32_t>(at.reduced));
  if (needs.gathers)
    at.writers[stage].push_back(number);
  if (needs.largest)
    at.largest[stage.first].push_back(number);
  std::sort(step.after.begin(), step.after.end());
  step.after.erase(std::unique(step.after.begin(), step.after.end()), step.after.end());
  steps.push_back(std::move(step));
}

/// By what it writes.
StageSteps::Needs StageSteps::needs(int32_t rank, const Step &step) {
  Needs needs;
  const auto &runs = module_.schedule.ranks[rank].buffers;
  for (const Operand &operand : step.outputs) {
    needs.gathers = needs.gathers || operand.buffer == 0;
    if (operand.buffer == 0 || !state_[rank].any)
      continue;
    const BufferRun &run = *std::prev(std::upper_bound(runs.begin(), runs.end(), operand.buffer,
                                                       [](uint32_t b, const BufferRun &r) { return b < r.first; }));
    const Param &param = module_.layout.endpoints[run.endpoint].params[run.param];
    needs.largest = needs.largest || (param.face && param.face->kind == FaceKind::amax);
    needs.tensorScales = needs.tensorScales || bands_.phaseOf(param) > 0;
  }
  return needs;
}

void StageSteps::put(int32_t rank, Step step, uint32_t round, const std::vector<uint32_t> &after, int64_t &number) {
  if (step.inputs.empty())
    return;
  std::vector<Step> &steps = module_.schedule.ranks[rank].steps;
  step.round = round;
  step.after.assign(after.begin(), after.end());
  number = static_cast<int64_t>(steps.size());
  steps.push_back(std::move(step));
}

void StageSteps::finish(int32_t rank, const Stage &stage, uint32_t round) {
  const auto &endpoints = module_.layout.endpoints;
  State &at = state_[rank];
  auto whole = [&](int64_t bytes) { return shapes_[rank].intern({bytes, {}}); };
  std::map<std::pair<unsigned, int32_t>, uint32_t> firsts; // of a place, its first buffer
  Step reduce, convert;
  reduce.kind = StepKind::reduce;
  for (const BufferRun &run : module_.schedule.ranks[rank].buffers) {
    const uint32_t first = firsts.try_emplace({run.endpoint, run.place}, run.first).first->second;
    const auto &face = endpoints[run.endpoint].params[run.param].face;
    if (stage.second > 0 || run.endpoint == 0 || run.bytes == 0 || !face || face->kind != FaceKind::amax ||
        endpoints[run.endpoint].generation(run.place) != stage.first)
      continue;
    for (uint32_t i = 0; i < run.count; ++i)
      if (bands_.writer(run.endpoint, run.place, run.first + i - first) == rank) {
        reduce.inputs.push_back({run.first + i, whole(run.bytes), 0});
        reduce.bytes += run.bytes;
      }
  }
  put(rank, std::move(reduce), round, at.largest[stage.first], at.reduced);
  bool tensorScales = false;
  for (const Band &band : bands_.of(rank)) {
    if (band.phase != stage.second || endpoints[band.endpoint].generation(band.place) != stage.first)
      continue;
    const uint32_t shape = whole(band.end - band.begin);
    convert.inputs.push_back({0, shape, band.offset});
    convert.outputs.push_back({firsts.at({band.endpoint, band.place}) + band.instance, shape, band.begin});
    convert.bytes += band.end - band.begin;
    tensorScales =
        tensorScales ||
        bands_.phaseOf(endpoints[band.endpoint].params[bands_.paramOf(band.endpoint, band.place, band.instance)]) > 0;
  }
  std::vector<uint32_t> after = at.writers[stage];
  if (tensorScales && at.reduced >= 0)
    after.push_back(static_cast<uint32_t>(at.reduced));
  if (at.converted >= 0) // so that who waits for this one waits for all before
    after.push_back(static_cast<uint32_t>(at.converted));
  std::sort(after.begin(), after.end());
  put(rank, std::move(convert), round, after, at.converted);
}

} // namespace reshard
