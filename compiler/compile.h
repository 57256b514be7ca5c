// SPDX-License-Identifier: Apache-2.0
// The compiler as a library: a job file in, a module or plan bytes out.
#pragma once

#include "base/yaml/diagnostics.h"
#include "compiler/frontend/allowed.h"
#include "compiler/frontend/stored_tensors.h"
#include "compiler/pass.h"
#include "compiler/transfer/lower_bounds.h"
#include "ir/ir.h"

#include "llvm/Support/Error.h"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace reshard {

namespace schema {
struct JobInput;
}

/// Every manifest names the compiler that made it. The version is that of project() in CMakeLists.txt.
constexpr const char *kCompilerVersion = "reshard " RESHARD_VERSION;

/// An older plan whose transfers stay as they are (--keep): the epoch of each of its target ranks, by role and world
/// rank. Target ranks that it lacks join in epoch `next` and are planned after all earlier epochs, which then count as
/// load of the source.
struct Pinned {
  std::map<std::pair<std::string, int32_t>, uint32_t> epochs;
  uint32_t next = 0; // epoch of the ranks that join now
};

/// Whether copies of a job are planned as one (ir/copies.h). automatic: in jobs of kMinFoldedRanks ranks or more.
enum class FoldCopies : uint8_t { automatic, always, never };
/// Smaller jobs are compiled in a few milliseconds, and their IR is read by people.
constexpr int64_t kMinFoldedRanks = 1024;

/// Options of the command line.
struct CompileOptions {
  std::vector<std::string> overrides;            // --set a.b=c
  std::optional<Pinned> pinned;                  // --keep
  Allowed allowed;                               // --allow
  ReadStoredFiles readStoredFiles;               // reads what the files of a source contain
  std::vector<std::string> passes;               // --passes; empty: all, in the order of passes.def
  ir::Level stopAfter = ir::Level::schedule;     // --emit=layout stops early
  bool relabel = false;                          // --relabel-target
  bool megatron = false;                         // --algorithm=megatron
  FoldCopies foldCopies = FoldCopies::automatic; // --fold-copies
  bool verifyEach = false;                       // not with releaseIr
  /// Frees what is not needed to write a plan: the transfers, once they are descriptors. The module has no schedules of
  /// ranks then.
  bool releaseIr = false;
  unsigned jobs = 0; // threads; 0: all cores. The result does not depend on it
  /// Called after each pass that ran, with its name (for --print-ir-after).
  std::function<void(const std::string &pass, const ir::Module &module)> afterPass;
};

/// Time of one pass, in seconds.
struct PassTime {
  std::string pass;
  double seconds = 0;
};

/// Counts of the steps of all ranks: the bytes of the largest arena, and messages that need no staging.
struct StepCounts {
  int64_t stagingMax = 0, sendsInPlace = 0, receivesInPlace = 0;
  void add(const ir::RankSchedule &rank);
  void add(const StepCounts &other);
};

/// Counts for reports. Bytes are sums over the whole plan; a maximum is that of the busiest rank, and a bound is the
/// least that any plan could reach for it.
struct Statistics {
  int64_t tensors = 0, params = 0, transfers = 0, descriptorsBefore = 0, descriptors = 0, messages = 0, rounds = 0;
  int64_t messagesBefore = 0; // if each tensor were sent from rank to rank in a separate message
  StepCounts steps;           // with `releaseIr` counted by writePlan()
  int64_t targetBytes = 0, localBytes = 0, remoteBytes = 0, storageBytes = 0, paddingBytes = 0;
  int64_t internodeBytes = 0, forwardedBytes = 0; // parts of remoteBytes: between nodes; forwarded by target ranks
  int64_t egressMax = 0, egressBound = 0, egressWithoutRelays = 0, ingressMax = 0, ingressBound = 0;
  // Bytes of files that the busiest rank reads or writes: in this plan, at least, and with --algorithm=megatron.
  int64_t storageMax = 0, storageBound = 0, storageMegatron = 0;
  LowerBounds lowerBounds;
};

/// The job from which a plan was compiled. The plan holds it, so that it can be compiled again with changes.
struct JobInputs {
  /// Path and text: the job, then the files that it names. A path is the one by which the compiler looks for the file
  /// if the job is in the current folder.
  std::vector<std::pair<std::string, std::string>> files;
  std::vector<std::string> overrides; // --set
  Allowed allowed;
  bool relabel = false, megatron = false;
};

/// The inputs of a job that was read; `job` is its file in `diagnostics`. nullopt if a plan cannot hold them: they are
/// larger than schema/limits.h allows, two files have one path, or the plan also depends on --keep or --passes.
std::optional<JobInputs> inputsOf(const Diagnostics &diagnostics, uint32_t job, const CompileOptions &options);

/// The inputs that a plan holds; nullopt if it holds none.
std::optional<JobInputs> inputsOf(const schema::JobInput *stored);

struct CompileResult : Lowering {
  Statistics statistics;
  std::vector<PassTime> times;
  /// The files and options of a job (.yaml, .yml); nullopt if a plan cannot hold them.
  std::optional<JobInputs> inputs;
  /// The last pass that succeeded, and the one that failed (empty if none did).
  std::string lastGoodPass, failedPass;
};

/// Runs frontend, resolve and passes on a job (.yaml, .yml), or passes on IR text (.rir). Returns false after errors,
/// which are in `diagnostics`; `result.module` then holds the IR of `result.lastGoodPass`, with `releaseIr` in part.
bool compileJob(const std::string &path, const CompileOptions &options, CompileResult &result,
                Diagnostics &diagnostics);

/// Counts of a module. Those that its level does not have yet are 0.
Statistics statistics(const ir::Module &module);

/// The manifest (schema/plan.fbs, with a size prefix) of a module of any level, without counts: its layouts.
std::vector<std::byte> layoutManifest(const ir::Module &module);

struct WrittenPlan {
  std::string digest; // 32 hexadecimal digits
  int64_t bytes = 0;  // the length of the file
  StepCounts steps;
};

struct WriteOptions {
  unsigned jobs = 0;                 // threads; 0: all cores. The plan does not depend on it
  const JobInputs *inputs = nullptr; // the job, which the plan then holds
  bool compress = false;             // with zstd
  /// Called with a path at which the complete plan can be read before it is at its own; if it throws, there is no plan.
  std::function<void(const std::string &)> inspect;
};

/// Writes the plan of a schedule-level module, and of the schedules of its ranks, to `path`. After an error the file
/// does not exist.
llvm::Expected<WrittenPlan> writePlan(const ir::Module &module, RankSchedules &ranks, const Statistics &counts,
                                      const std::string &path, const WriteOptions &options = {});

} // namespace reshard
