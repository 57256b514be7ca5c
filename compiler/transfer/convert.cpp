// SPDX-License-Identifier: Apache-2.0
// convert: decides when a target's quantized view quantizes the elements that it receives. It does so on arrival if
// every contiguous range that arrives consists of whole blocks. Otherwise (several senders have parts of one block) the
// elements are staged in the arena and quantized when all have arrived.

#include "compiler/pass.h"

namespace reshard {

using namespace ir;

namespace {

/// Whether the overlap consists of whole blocks, contiguous along the last dimension of the param on both sides.
bool wholeBlocks(const Module &module, const Overlap &overlap) {
  const Layout &layout = module.layout;
  const Param &target = layout.endpoints[overlap.endpoint].params[overlap.param];
  const int64_t block = formatOf(target.view->format).blockColumns;
  const int last = static_cast<int>(target.shape.size()) - 1;
  const std::vector<PartDimension> &dimensions = target.parts[overlap.part].dimensions;
  for (size_t d = 0; d < dimensions.size(); ++d) {
    if (dimensions[d].param != last)
      continue;
    if (d + 1 != dimensions.size()) // a row of the descriptor would be a single element
      return false;
    for (const ReplicaGroup &replicaGroup : overlap.replicaGroups) {
      if (overlap.pattern >= 0) {
        const Param &source = layout.endpoints[0].params[replicaGroup.param];
        if (source.parts[replicaGroup.part].dimensions[d].param != static_cast<int>(source.shape.size()) - 1)
          return false;
      }
      for (const IndexBlock &s : module.transfers.relations[replicaGroup.relations[d]])
        if (s.to % block != 0 || s.length % block != 0 || s.toStep % block != 0)
          return false;
    }
    return true;
  }
  return false;
}

} // namespace

llvm::Error convert(Module &module) {
  for (const Overlap &overlap : module.transfers.overlaps) {
    Endpoint &endpoint = module.layout.endpoints[overlap.endpoint];
    Param &param = endpoint.params[overlap.param];
    if (!param.view || param.view->staged || param.view->kind != ViewKind::elements || wholeBlocks(module, overlap))
      continue;
    param.view->staged = true;
  }
  return llvm::Error::success();
}

} // namespace reshard
