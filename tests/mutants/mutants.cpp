// SPDX-License-Identifier: Apache-2.0
// Mutation test of plans: mutants FOLDER COUNT SEED [ONE]. Each mutant is a plan of FOLDER with one to three fields
// changed and all digests updated. It is determined by SEED and its number.
//
// For each mutant, the test compares the loader, the proof (reshard-inspect --verify) and the check (reshard-exec
// --synthesize --check). If the loader refuses a plan, reshard-exec must, too. If a plan is proven and runs, the check
// must succeed. The proof may refuse more than the check, which compares bytes only: dtypes, missing dependencies,
// wrong elements that are equal by chance.
//
// Mutants run in child processes with limited memory. If a child crashes or hangs, the test reports its current mutant
// and starts another child at the next one. ONE runs that mutant only, in this process.

#include "base/work_deadline.h"
#include "command/common.h"
#include "executor/load/load.h"
#include "report/inspect/inspection.h"
#include "schema/container.h"
#include "schema/flatbuffer_vectors.h"
#include "tests/mutants/fields.h"
#include "tests/schema/digests.h"
#include "tools/run/execution.h"
#include "verify/proof/plan_verifier.h"

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace reshard;
using namespace reshard::tests;
using namespace reshard::command;
using namespace reshard::report;
using namespace reshard::tools;
using namespace reshard::verify;
namespace fs = std::filesystem;

namespace {

constexpr double kDeadline = 10; // seconds for each of proof, synthesis, run and check
constexpr double kHang = 6 * kDeadline;
constexpr uint64_t kBatch = 500; // mutants per child
constexpr rlim_t kMemory = rlim_t{2} << 30;
// Bytes of params above which a plan is not run. Other tests cover plans that need more memory than the machine has.
constexpr double kMaxDeclared = 1 << 30;
constexpr uint64_t kMaxBytes = 1 << 17,
                   kMaxMoves = 4000; // limits of a base plan, so that a mutant takes milliseconds
constexpr uint64_t kEnough = 1000;   // with this many mutants, the test also requires a minimum of each outcome

[[noreturn]] void die(const std::string &why) {
  std::fprintf(stderr, "mutants: %s\n", why.c_str());
  std::exit(2);
}
void must(const Status &status) {
  if (!status.ok())
    die(status.message());
}

std::string readFile(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

uint64_t number(const std::string &file, size_t at) {
  uint64_t value = 0;
  std::memcpy(&value, file.data() + at, sizeof value);
  return value;
}

/// A valid plan whose bytes contain all fields, also those with default values, which the compiler omits.
struct Base {
  std::string name, bytes;
  Slots manifest;
  std::vector<Slots> segments;
};

/// The bytes of a plan with all fields written out.
std::string withDefaults(const Plan &plan, const std::string &path) {
  const std::string temporary = path + ".defaults";
  const uint64_t features = number(readFile(path), 16);
  auto bytes = [](const flatbuffers::FlatBufferBuilder &b) {
    return schema::Bytes(reinterpret_cast<const std::byte *>(b.GetBufferPointer()), b.GetSize());
  };
  schema::ContainerWriter writer;
  must(writer.create(temporary, plan.world(), features));
  flatbuffers::FlatBufferBuilder builder;
  builder.ForceDefaults(true);
  const std::unique_ptr<schema::ManifestT> manifest(plan.manifest().UnPack());
  builder.FinishSizePrefixed(schema::Manifest::Pack(builder, manifest.get()), schema::kManifestIdentifier);
  must(writer.addManifest(bytes(builder)));
  for (uint32_t rank = 0; rank < plan.world(); ++rank) {
    std::shared_ptr<const schema::Segment> segment;
    must(plan.segment(rank, segment));
    const std::unique_ptr<schema::SegmentT> object(segment->UnPack());
    builder.Clear();
    builder.FinishSizePrefixed(schema::Segment::Pack(builder, object.get()), schema::SegmentIdentifier());
    must(writer.addSegment(bytes(builder)));
  }
  must(writer.finish());
  const std::string result = readFile(temporary);
  fs::remove(temporary);
  return result;
}

double declaredBytes(const Plan &plan) {
  double bytes = 0;
  for (uint32_t rank = 0; rank < plan.world(); ++rank) {
    std::shared_ptr<const schema::Segment> segment;
    must(plan.segment(rank, segment));
    for (const schema::BufferRange *range : orEmpty(segment->buffers()))
      bytes += static_cast<double>(range->count()) * static_cast<double>(range->bytes());
  }
  return bytes;
}

std::vector<Base> readBases(const std::string &folder) {
  static const std::string schemaBytes = readFile(RESHARD_SCHEMA);
  const reflection::Schema &schema = *reflection::GetSchema(schemaBytes.data());
  std::vector<std::string> paths;
  for (const auto &entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".rplan")
      paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Base> bases;
  for (const std::string &path : paths) {
    std::unique_ptr<Plan> plan;
    must(Plan::open(path, plan));
    if (plan->manifest().bytes_target() > kMaxBytes)
      continue;
    const VerifyResult proof = verifyPlan(*plan, [](double) {});
    if (!proof.error.empty())
      die(proof.error);
    if (proof.moves > kMaxMoves)
      continue;
    Base &base = bases.emplace_back(
        Base{fs::path(path).filename(), withDefaults(*plan, path), {}, std::vector<Slots>(plan->world())});
    Fields(schema, base.bytes, base.manifest).root(number(base.bytes, 48), "reshard.schema.Manifest");
    for (uint32_t rank = 0; rank < plan->world(); ++rank)
      Fields(schema, base.bytes, base.segments[rank])
          .root(number(base.bytes, number(base.bytes, 40) + 32 * rank), "reshard.schema.Segment");
  }
  return bases;
}

struct Mutant {
  const Base *base;
  std::string bytes, changes;
};

Mutant mutant(const std::vector<Base> &bases, uint64_t seed, uint64_t n) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15u + n);
  const Base &base = bases[random() % bases.size()];
  Mutant result{&base, base.bytes, {}};
  for (uint64_t left = 1 + random() % 3; left > 0; --left) {
    const bool manifest = random() % 5 < 3;
    const size_t rank = random() % base.segments.size();
    result.changes += (manifest ? std::string("  manifest ") : "  segment of rank " + std::to_string(rank) + " ") +
                      alter(result.bytes, manifest ? base.manifest : base.segments[rank], random) + "\n";
  }
  test::updateDigests(result.bytes);
  return result;
}

enum Outcome { right, wrong, stricter, ambiguous, refused, refusedLater, undone, disagrees, kOutcomes };
constexpr const char *kNames[] = {"proven and correct",
                                  "refused by proof and check",
                                  "refused by the proof only",
                                  "ambiguous",
                                  "refused by the loader",
                                  "proven, refused or failed when run",
                                  "not finished",
                                  "DISAGREEMENT"};

struct Verdict {
  Outcome outcome;
  std::string why;
};

/// An anonymous file in memory.
class MemoryFile {
public:
  explicit MemoryFile(const char *name) : file_(::memfd_create(name, 0)) {
    if (file_ < 0)
      die("cannot create a file in memory");
  }
  ~MemoryFile() { ::close(file_); }
  int file() const { return file_; }
  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }
  void put(const std::string &bytes) {
    if (::ftruncate(file_, 0) != 0 ||
        ::pwrite(file_, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
      die("cannot write a file in memory");
  }
  std::string take() {
    std::string text(static_cast<size_t>(::lseek(file_, 0, SEEK_END)), ' ');
    if (::pread(file_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()) ||
        ::ftruncate(file_, 0) != 0 || ::lseek(file_, 0, SEEK_SET) != 0)
      die("cannot read a file in memory");
    return text;
  }

private:
  int file_;
};

Status loaded(const std::string &path, std::unique_ptr<Plan> &plan) {
  Status status = Plan::open(path, plan);
  for (uint32_t rank = 0; status.ok() && rank < plan->world(); ++rank) {
    std::shared_ptr<const schema::Segment> segment;
    status = plan->segment(rank, segment);
  }
  return status.ok() ? checkMessages(*plan) : status;
}

/// The exit code of reshard-exec --synthesize --check.
int executed(const std::string &path) {
  ExecutionOptions options;
  options.plan = path;
  options.synthesize = options.check = true;
  options.threads = 1;
  options.timeout = kDeadline;
  int code = kFailure;
  try {
    code = execute(options);
  } catch (const std::exception &exception) { // as main() of the command does
    printError("reshard-exec", explain(exception));
  }
  std::fflush(stdout);
  return code;
}

/// Runs the other outputs of reshard-inspect. They must end; the result is ignored.
void inspectAll(const std::string &path) {
  for (const char *param : {"", "*"}) {
    InspectionOptions options;
    options.plan = path;
    options.param = param;
    options.format = "text";
    options.timeout = kDeadline;
    try {
      [[maybe_unused]] const Status status = inspect(options);
    } catch (const std::exception &) { // main() of the command reports these
    }
  }
}

Verdict verdictOf(const std::string &path, MemoryFile *output) {
  std::unique_ptr<Plan> plan;
  if (const Status status = loaded(path, plan); !status.ok()) {
    const int code = executed(path);
    return {code == kUsage ? refused : disagrees,
            "the loader: " + status.message() + "; reshard-exec: exit " + std::to_string(code)};
  }
  std::string proof;
  try {
    const Status inTime = WorkDeadline::run("the proof", kDeadline, [&] {
      proof = verifyPlan(*plan, [](double) {}).error;
      return Status();
    });
    if (!inTime.ok())
      return {undone, "the proof: " + inTime.message()};
  } catch (const std::exception &exception) {
    return {undone, "the proof: " + explain(exception)};
  }
  inspectAll(path);
  if (declaredBytes(*plan) > kMaxDeclared)
    return {undone, "not run: its params need too much memory"};
  const int code = executed(path);
  const std::string printed = output ? output->take() : "";
  if (!proof.empty())
    return {code == kDone ? stricter : wrong, proof};
  if (code == kDone)
    return {right, ""};
  if (code == kNegative)
    return {printed.find("cannot be checked") != std::string::npos ? ambiguous : disagrees,
            "proven, but the check fails: " + printed};
  for (const char *text : {"did not finish within", "not enough memory", "cannot assemble a tensor"})
    if (printed.find(text) != std::string::npos)
      return {undone, printed};
  return {refusedLater, printed};
}

/// Memory shared by the parent and its child.
struct Shared {
  volatile uint64_t at;  // number of the current mutant
  volatile double began; // when it began
  volatile uint64_t counts[kOutcomes];
};

class Run {
public:
  Run(const std::string &folder, uint64_t seed) : folder_(folder), seed_(seed), bases_(readBases(folder)) {
    if (bases_.empty())
      die("no plan in '" + folder + "' is small enough");
    void *memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
      die("no memory");
    shared_ = new (memory) Shared{};
  }

  int all(uint64_t count) {
    const double begin = now();
    for (uint64_t next = 0; next < count;) {
      shared_->at = next;
      shared_->began = now();
      std::fflush(nullptr);
      const pid_t child = ::fork();
      if (child < 0)
        die("cannot fork");
      if (child == 0)
        batch(next, std::min(count, next + kBatch));
      next = wait(child) ? std::min(count, next + kBatch) : shared_->at + 1;
    }
    std::printf("%zu plans, seed %llu, %.1f s:", bases_.size(), static_cast<unsigned long long>(seed_), now() - begin);
    for (int o = 0; o < kOutcomes; ++o)
      std::printf(" %llu %s,", static_cast<unsigned long long>(shared_->counts[o]), kNames[o]);
    std::printf("\n%llu mutants: %llu crashes, %llu hangs, %llu disagreements\n",
                static_cast<unsigned long long>(count), static_cast<unsigned long long>(crashes_),
                static_cast<unsigned long long>(hangs_), static_cast<unsigned long long>(shared_->counts[disagrees]));
    if (crashes_ + hangs_ + shared_->counts[disagrees] > 0)
      return 1;
    // If the loader refuses all mutants (because of wrong digests, for example), the test compares nothing.
    const uint64_t late = shared_->counts[undone] + shared_->counts[refusedLater];
    if (count < kEnough || (shared_->counts[right] >= count / 20 && shared_->counts[wrong] > 0 && late <= count / 50))
      return 0;
    std::printf(
        "too few mutants were compared: expected at least %llu proven and correct, 1 refused by proof and check, "
        "and at most %llu not finished or failed when run\n",
        static_cast<unsigned long long>(count / 20), static_cast<unsigned long long>(count / 50));
    return 1;
  }

  int one(uint64_t n) {
    const Mutant m = mutant(bases_, seed_, n);
    keep(n, m, "");
    MemoryFile file("plan");
    file.put(m.bytes);
    const Verdict verdict = verdictOf(file.path(), nullptr);
    std::printf("%s %s\n", kNames[verdict.outcome], verdict.why.c_str());
    return verdict.outcome == disagrees;
  }

private:
  [[noreturn]] void batch(uint64_t first, uint64_t end) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    const rlimit memory{kMemory, kMemory};
    ::setrlimit(RLIMIT_AS, &memory);
#endif
    const int out = ::dup(1);
    MemoryFile plan("plan"), output("output");
    ::dup2(output.file(), 1);
    ::dup2(output.file(), 2);
    for (uint64_t n = first; n < end; ++n) {
      shared_->at = n;
      shared_->began = now();
      const Mutant m = mutant(bases_, seed_, n);
      plan.put(m.bytes);
      const Verdict verdict = verdictOf(plan.path(), &output);
      output.take();
      shared_->counts[verdict.outcome] = shared_->counts[verdict.outcome] + 1;
      if (verdict.outcome == disagrees || verbose_) {
        ::dup2(out, 1);
        if (verdict.outcome == disagrees)
          keep(n, m, verdict.why);
        else
          std::printf("%llu %s: %s\n%s", static_cast<unsigned long long>(n), kNames[verdict.outcome],
                      verdict.why.c_str(), m.changes.c_str());
        std::fflush(stdout);
        ::dup2(output.file(), 1);
      }
    }
    ::_exit(0);
  }

  /// Waits for a child. If it crashes or hangs, counts and reports that with its current mutant, and returns false.
  bool wait(pid_t child) {
    int status = 0;
    while (::waitpid(child, &status, WNOHANG) == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (now() - shared_->began < kHang)
        continue;
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      ++hangs_;
      keep(shared_->at, mutant(bases_, seed_, shared_->at), "hangs");
      return false;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
      return true;
    ++crashes_;
    keep(shared_->at, mutant(bases_, seed_, shared_->at),
         WIFSIGNALED(status) ? "killed by signal " + std::to_string(WTERMSIG(status))
                             : "exit " + std::to_string(WEXITSTATUS(status)));
    return false;
  }

  /// Writes a mutant beside the plans, and prints how to reproduce it.
  void keep(uint64_t n, const Mutant &m, const std::string &why) const {
    const std::string path = folder_ + "/mutant-" + std::to_string(seed_) + "-" + std::to_string(n) + ".bad";
    std::ofstream(path, std::ios::binary) << m.bytes;
    std::printf("mutant %llu of seed %llu, of %s: %s\n%s  to reproduce: mutants %s 0 %llu %llu, or reshard-inspect "
                "--verify and "
                "reshard-exec --synthesize --check of %s\n",
                static_cast<unsigned long long>(n), static_cast<unsigned long long>(seed_), m.base->name.c_str(),
                why.c_str(), m.changes.c_str(), folder_.c_str(), static_cast<unsigned long long>(seed_),
                static_cast<unsigned long long>(n), path.c_str());
    std::fflush(stdout);
  }

  const std::string folder_;
  const uint64_t seed_;
  const std::vector<Base> bases_;
  const bool verbose_ = std::getenv("MUTANTS_VERBOSE"); // report every mutant
  Shared *shared_;
  uint64_t crashes_ = 0, hangs_ = 0;
};

} // namespace

int main(int argc, char **argv) {
  if (argc < 4)
    die("expected FOLDER COUNT SEED [ONE]");
  auto parsed = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
  Run run(argv[1], parsed(3));
  return argc > 4 ? run.one(parsed(4)) : run.all(parsed(2));
}
