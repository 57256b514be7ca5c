// SPDX-License-Identifier: Apache-2.0
// The processes of one launch, which run the same plans in step: this process alone, or those of mpirun.
#pragma once

#ifdef RESHARD_MPI
#include <mpi.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

#include <cstdint>

namespace reshard::conformance {

class Processes {
public:
  /// `several`: the processes that mpirun started; else this one alone.
  explicit Processes([[maybe_unused]] bool several) {
#ifdef RESHARD_MPI
    if (several) {
#ifdef __SANITIZE_ADDRESS__
      const __lsan::ScopedDisabler theirs; // ignore memory that MPI never frees
#endif
      MPI_Init(nullptr, nullptr);
      several_ = true;
      MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    }
#endif
  }
  ~Processes() {
#ifdef __SANITIZE_ADDRESS__
    if (several_)
      __lsan_do_leak_check(); // before MPI_Finalize, which unloads modules without freeing their memory
#endif
#ifdef RESHARD_MPI
    if (several_ && !abandoned_)
      MPI_Finalize();
    else if (several_)
      MPI_Barrier(MPI_COMM_WORLD); // all have printed: the first process that exits makes mpirun end the others
#endif
  }
  Processes(const Processes &) = delete;
  Processes &operator=(const Processes &) = delete;

  int rank() const { return rank_; }
  bool first() const { return rank_ == 0; }

  /// The maximum, or the sum, over all processes; each must call it.
  uint64_t max(uint64_t mine) const { return reduce(mine, true); }
  uint64_t sum(uint64_t mine) const { return reduce(mine, false); }

  /// A run failed with messages in flight: do not call MPI_Finalize, which might wait for them.
  void abandon() { abandoned_ = true; }

private:
  uint64_t reduce(uint64_t mine, [[maybe_unused]] bool max) const {
#ifdef RESHARD_MPI
    if (several_)
      MPI_Allreduce(MPI_IN_PLACE, &mine, 1, MPI_UINT64_T, max ? MPI_MAX : MPI_SUM, MPI_COMM_WORLD);
#endif
    return mine;
  }

  int rank_ = 0;
  [[maybe_unused]] bool several_ = false, abandoned_ = false;
};

} // namespace reshard::conformance
