// SPDX-License-Identifier: Apache-2.0
#include "executor/rendezvous/launch.h"

#include "base/hash.h"
#include "executor/rendezvous/address.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace reshard {

namespace {

/// The variables of a launcher.
struct Launcher {
  const char *rank, *size, *localRank, *localSize;
  const char *known = nullptr; // a variable that must be set as well
};

// All values must be of one launcher, since one launcher may have started another: the innermost first. torchrun is
// recognized by TORCHELASTIC_RUN_ID, and torch.distributed's convention by MASTER_ADDR, since others set RANK, too.
constexpr Launcher kTorchrun{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"};
constexpr Launcher kTorch{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"};
constexpr Launcher kOpenMpi{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                            "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Launcher kPmi{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
constexpr Launcher kAny{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Launcher kSlurm{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr};
constexpr const Launcher *kLaunchers[] = {&kTorchrun, &kTorch, &kOpenMpi, &kPmi, &kAny, &kSlurm};

/// The value of a variable; empty if it is not set.
std::string valueOf(const char *name) {
  const char *value = name ? std::getenv(name) : nullptr;
  return value ? value : "";
}

std::optional<uint32_t> number(const char *name) {
  const std::string text = valueOf(name);
  uint32_t value = 0;
  if (text.empty() || std::from_chars(text.data(), text.data() + text.size(), value).ptr != text.data() + text.size())
    return {};
  return value;
}

/// The launcher whose rank counts; null: none.
const Launcher *findLauncher() {
  for (const Launcher *launcher : kLaunchers)
    if (number(launcher->rank) && (!launcher->known || std::getenv(launcher->known)))
      return launcher;
  return nullptr;
}

/// The first host of a list of Slurm: "gpu[003-006,9]-ib,login" is gpu003-ib.
std::string firstHost(const std::string &list) {
  std::string host;
  for (size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      host += list[at];
      continue;
    }
    const size_t end = std::min(list.find_first_of(",-]", at), list.size());
    host += list.substr(at + 1, end - at - 1);
    at = std::min(list.find(']', at), list.size());
  }
  return host;
}

/// "1234.0;tcp://10.0.0.1,172.17.0.1:4567" is 10.0.0.1.
std::string hostOfUri(const std::string &uri) {
  const size_t begin = uri.find("://");
  if (begin == std::string::npos)
    return {};
  const std::string host = uri.substr(begin + 3);
  return host.substr(0, host.find_first_of(",:"));
}

/// Where rank 0 runs; empty if the environment does not tell.
std::string hostOf(const Launcher &launcher, uint32_t size) {
  const bool slurm = &launcher == &kSlurm;
  const std::optional<uint32_t> hosts =
      std::getenv("SLURM_STEP_NUM_NODES") ? number("SLURM_STEP_NUM_NODES") : number("SLURM_NNODES");
  if (number(launcher.localSize) == size || (slurm && hosts == 1u))
    return "127.0.0.1";
  if (const std::string address = valueOf("MASTER_ADDR"); !address.empty())
    return address;
  if (slurm) {
    for (const char *name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"})
      if (const std::string host = firstHost(valueOf(name)); !host.empty())
        return host;
    return valueOf("SLURM_LAUNCH_NODE_IPADDR");
  }
  return &launcher == &kOpenMpi ? hostOfUri(valueOf("OMPI_MCA_orte_hnp_uri")) : "";
}

/// 0: the environment does not tell.
uint16_t portOf(const Launcher &launcher) {
  constexpr uint32_t kMaxPort = 65535;
  if (const std::optional<uint32_t> port = number("RESHARD_PORT"))
    return static_cast<uint16_t>(*port <= kMaxPort ? *port : 0);
  if (const std::optional<uint32_t> port = number("MASTER_PORT"))
    return static_cast<uint16_t>(*port < kMaxPort ? *port + 1 : 0);
  std::string job;
  if (&launcher == &kSlurm && std::getenv("SLURM_JOB_ID"))
    job = valueOf("SLURM_JOB_ID") + "." + valueOf("SLURM_STEP_ID");
  else if (&launcher == &kOpenMpi)
    job = valueOf(std::getenv("PMIX_NAMESPACE") ? "PMIX_NAMESPACE" : "OMPI_MCA_ess_base_jobid");
  return job.empty() ? 0 : static_cast<uint16_t>(20000 + hashOf(job) % 10000);
}

/// The error of a missing variable.
Status incomplete(const std::string &expected) {
  std::string found;
  for (const char *name :
       {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
        "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NODELIST", "SLURM_JOB_ID", "RESHARD_PORT"})
    if (const std::string value = valueOf(name); !value.empty())
      found += (found.empty() ? "" : ", ") + std::string(name) + "=" + value;
  return invalid("rendezvous 'env://': found " + (found.empty() ? "no variable of a launcher" : found) + ", expected " +
                 expected);
}

} // namespace

Launch findLaunch() {
  const Launcher *launcher = findLauncher();
  return launcher ? Launch{number(launcher->rank), number(launcher->size), number(launcher->localRank)} : Launch();
}

Result<LaunchedJob> findLaunchedJob() {
  const Launcher *launcher = findLauncher();
  if (!launcher)
    return incomplete("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or the variables of srun or mpirun");
  const std::optional<uint32_t> size = number(launcher->size);
  if (!size)
    return incomplete(std::string(launcher->size) + " beside " + launcher->rank);
  const HostPort where{hostOf(*launcher, *size), portOf(*launcher)};
  if (where.host.empty())
    return incomplete("MASTER_ADDR, the host of rank 0");
  if (where.port == 0)
    return incomplete("RESHARD_PORT, a free port on the host of rank 0, or MASTER_PORT, the port before it");
  return LaunchedJob{*number(launcher->rank), *size, "tcp://" + where.text()};
}

} // namespace reshard
