#include "tools/device_memory.h"

#include "tools/common.h"

#include <algorithm>

namespace reshard::tools {

std::string DeviceMemory::mirror(const Plan &plan, const Memory &host, Device &device) {
  constexpr uint64_t kAlignment = 256;
  device_ = &device;
  places_ = host.places();
  for (PlaceMemory &place : places_) {
    const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(place.endpoint);
    const size_t first = pieces_.size();
    uint64_t total = 0;
    for (uint32_t p = 0; p < place.params.size(); ++p)
      for (const schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, place.place))
        if (std::byte *at = place.params[p][instance.instance]) {
          pieces_.push_back({at, nullptr, static_cast<uint64_t>(instance.bytes)});
          total += (pieces_.back().bytes + kAlignment - 1) / kAlignment * kAlignment;
        }
    std::byte *next = nullptr;
    if (pieces_.size() > first) // what is there has an address, be it of no bytes
      if (std::string error = device.allocate(std::max(total, kAlignment), next); !error.empty())
        return "cannot allocate " + humanBytes(static_cast<double>(total)) + " of the device: " + error;
    size_t piece = first;
    for (auto &instances : place.params)
      for (std::byte *&at : instances)
        if (at) {
          pieces_[piece].there = at = next;
          next += (pieces_[piece++].bytes + kAlignment - 1) / kAlignment * kAlignment;
        }
  }
  return {};
}

std::string DeviceMemory::copy(bool toDevice) const {
  for (const Piece &piece : pieces_)
    if (piece.bytes > 0)
      if (std::string error = toDevice ? device_->copy(piece.there, piece.host, piece.bytes)
                                       : device_->copy(piece.host, piece.there, piece.bytes);
          !error.empty())
        return error;
  return {};
}

} // namespace reshard::tools
