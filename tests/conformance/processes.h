// The processes of one launch, which go from plan to plan together: one of its own, or those of mpirun.
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
  /// `several`: as many as mpirun started.
  explicit Processes([[maybe_unused]] bool several) {
#ifdef RESHARD_MPI
    if (several) {
#ifdef __SANITIZE_ADDRESS__
      const __lsan::ScopedDisabler theirs; // what MPI keeps for good is no leak of ours
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
      __lsan_do_leak_check(); // ours, now: what MPI_Finalize leaves behind has no owner any more, and no module
#endif
#ifdef RESHARD_MPI
    if (several_ && !abandoned_)
      MPI_Finalize();
    else if (several_)
      MPI_Barrier(MPI_COMM_WORLD); // all have said what they have to say: the first one to leave ends the others
#endif
  }
  Processes(const Processes &) = delete;
  Processes &operator=(const Processes &) = delete;

  int rank() const { return rank_; }
  bool first() const { return rank_ == 0; }

  /// Of all processes; waits for all.
  uint64_t max(uint64_t mine) const { return reduce(mine, true); }
  uint64_t sum(uint64_t mine) const { return reduce(mine, false); }

  /// A run failed with messages on their way: MPI_Finalize might wait for them.
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
