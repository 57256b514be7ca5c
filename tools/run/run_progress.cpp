// SPDX-License-Identifier: Apache-2.0
#include "tools/run/run_progress.h"

#include "base/text.h"

#include <cmath>

namespace reshard::tools {

using namespace command;
using namespace verify;

std::string progressText(uint64_t done, uint64_t all, uint64_t moved, double seconds) {
  std::string text = humanBytes(static_cast<double>(done)) + " of " + humanBytes(static_cast<double>(all));
  if (moved == 0 || seconds <= 0)
    return text;
  const double rate = static_cast<double>(moved) / seconds;
  const auto left = static_cast<uint64_t>(std::ceil(static_cast<double>(all - done) / rate));
  return text + ", " + humanBytes(rate) + "/s, " +
         (left < 100 ? std::to_string(left) + " s" : std::to_string((left + 59) / 60) + " min") + " left";
}

RunProgress::RunProgress(const Plan &plan, const Memory &target) {
  for (const MeshRankMemory &memory : target.rankMemories()) {
    const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(memory.endpoint);
    for (uint32_t p = 0; p < memory.params.size(); ++p)
      for (const schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, memory.meshRank))
        if (const std::byte *begin = memory.params[p][instance.instance])
          tensors_[begin] = instance.name;
  }
}

void RunProgress::at(const CopyProgress &progress) {
  if (!begun_ || progress.bytesDone < last_) { // a run begins; what an earlier process has done is skipped at once
    begun_ = true;
    first_ = progress.bytesDone;
    begin_ = now();
  }
  last_ = progress.bytesDone;
  const auto tensor = tensors_.upper_bound(progress.next);
  std::string text = progressText(progress.bytesDone, progress.bytes, progress.bytesDone - first_, now() - begin_);
  if (progress.next && tensor != tensors_.begin())
    text += ", " + printable(std::prev(tensor)->second);
  line_.at(progress.bytes ? static_cast<double>(progress.bytesDone) / static_cast<double>(progress.bytes) : 1, text);
}

} // namespace reshard::tools
