// SPDX-License-Identifier: Apache-2.0
// What launchers leave in the environment: the rank of this process, and with env:// also a place to meet.
#pragma once

#include "base/status.h"

#include <cstdint>
#include <optional>
#include <string>

namespace reshard {

/// Rank and size of this process's launch, from the environment; no values if that does not have them. If several
/// launchers left variables, the first of these counts: torchrun (RANK with TORCHELASTIC_RUN_ID), any launcher that
/// follows torch.distributed (RANK with MASTER_ADDR), Open MPI, MPICH and other PMI launchers, any launcher that sets
/// RANK, Slurm. A launcher of this list may have been started by a later one: a batch script of Slurm has SLURM_PROCID,
/// which all processes of an mpirun inherit.
struct Launch {
  std::optional<uint32_t> rank, size;
  std::optional<uint32_t> localRank; // on its host
};
Launch findLaunch();

/// The store that env:// stands for.
struct LaunchedJob {
  uint32_t rank = 0, size = 1;
  std::string url; // tcp://host:port
};

/// Finds it in the variables of the launcher that findLaunch() selects.
/// Host: 127.0.0.1 if all processes are on this host (LOCAL_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_SIZE or MPI_LOCALNRANKS
/// is the size; SLURM_STEP_NUM_NODES or SLURM_NNODES is 1); else MASTER_ADDR; else under Slurm the first host of
/// SLURM_STEP_NODELIST or SLURM_JOB_NODELIST, where rank 0 runs, or SLURM_LAUNCH_NODE_IPADDR; else under Open MPI the
/// host of mpirun (OMPI_MCA_orte_hnp_uri), on which rank 0 must run.
/// Port: RESHARD_PORT; else MASTER_PORT + 1, since torchrun uses MASTER_PORT; else 20000 to 29999, by the number of the
/// job: SLURM_JOB_ID and SLURM_STEP_ID, PMIX_NAMESPACE, or OMPI_MCA_ess_base_jobid.
/// The error of a missing variable lists the variables that were found, and the variables that were expected.
Result<LaunchedJob> findLaunchedJob();

} // namespace reshard
