// distribute: every tile to every target that wants it, with a source still to be chosen.

#include "compiler/pass.h"

namespace reshard {

using namespace ir;

std::string distribute(Module &module) {
  Transfers &transfers = module.transfers;
  for (uint32_t t = 0; t < transfers.tiles.size(); ++t)
    for (int32_t target : transfers.tiles[t].targets) {
      Transfer transfer;
      transfer.tile = t;
      transfer.count = static_cast<uint32_t>(transfers.tiles[t].tensors);
      transfer.target = target;
      transfers.transfers.push_back(transfer);
    }
  return {};
}

} // namespace reshard
