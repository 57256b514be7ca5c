// SPDX-License-Identifier: Apache-2.0
#include "executor/interfaces/transport_traits.h"

#include <algorithm>

namespace reshard {
namespace {

constexpr TransportTraits kTransports[] = {
    {.name = "threads", .device = "cpu", .about = "all ranks in this process", .replace = true},
    {.name = "threads", .device = "cuda", .about = "all ranks in this process"},
    {.name = "mpi",
     .device = "cpu",
     .about = "under mpirun",
     .processes = true,
     .library = "libmpi.so",
     .fix = "install the MPI that reshard was built with: Open MPI 4 for the wheel"},
    {.name = "ucx",
     .device = "cpu",
     .about = "with --rendezvous",
     .processes = true,
     .rendezvous = true,
     .needsRendezvous = true,
     .pull = true,
     .replace = true,
     .library = "libuc",
     .fix = "install UCX 1.13 or a later 1.x, or set RESHARD_UCX_ROOT to a folder with its lib/libucp.so.0",
     .beforeLoading = loadOtherUcx},
    {.name = "nccl",
     .device = "cuda",
     .about = "on GPUs",
     .processes = true,
     .rendezvous = true,
     .library = "libnccl.so.2",
     .fix = "install NCCL 2, or load it before, as `import torch` does"},
};

/// One column of the rows for which `which` holds, each value once.
std::vector<std::string> column(const char *TransportTraits::*value, const WhichTransports &which) {
  std::vector<std::string> found;
  for (const TransportTraits &each : kTransports)
    if (which(each) && std::find(found.begin(), found.end(), each.*value) == found.end())
      found.emplace_back(each.*value);
  return found;
}

} // namespace

std::span<const TransportTraits> transports() { return kTransports; }

const TransportTraits *findTransport(std::string_view name, std::string_view device) {
  for (const TransportTraits &each : kTransports)
    if (each.name == name && (device.empty() || each.device == device))
      return &each;
  return nullptr;
}

std::vector<std::string> transportNames(const WhichTransports &which) { return column(&TransportTraits::name, which); }

std::vector<std::string> transportDevices(const WhichTransports &which) {
  return column(&TransportTraits::device, which);
}

} // namespace reshard
