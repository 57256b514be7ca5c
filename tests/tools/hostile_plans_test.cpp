// Plans whose numbers ask the tools for more than there is, digests good: they are right, or end soon with a message that says why.

#include "tests/tools/support.h"
#include "tools/coverage.h"
#include "tools/deadline.h"
#include "tools/execution.h"
#include "tools/new_folder.h"
#include "tools/parallel.h"
#include "tools/synthesize.h"

#include <gmock/gmock.h>

using namespace reshard;
using namespace reshard::tests;
using namespace reshard::tools;
namespace fbs = reshard::schema;
using testing::HasSubstr;

namespace {

class HostilePlans : public testing::Test {
protected:
  Parts read(const std::string &yaml) {
    compile(yaml, path_);
    return takeApart(path_);
  }

  /// What `reshard-exec --synthesize --check` says on stderr, and its exit code.
  std::pair<int, std::string> run(const Parts &parts, double timeout) {
    putTogether(parts, path_);
    ExecutionOptions options;
    options.plan = path_;
    options.synthesize = options.check = true;
    options.threads = 3;
    options.timeout = timeout;
    testing::internal::CaptureStderr();
    testing::internal::CaptureStdout();
    const int code = execute(options);
    said_ = testing::internal::GetCapturedStdout();
    return {code, testing::internal::GetCapturedStderr()};
  }

  fbs::FamilyT &family(const Parts &parts, const std::string &name) {
    for (const auto &family : parts.manifest->families)
      if (family->name == name)
        return *family;
    throw std::runtime_error("no tensor '" + name + "'");
  }

  const Folder folder_;
  const std::string path_ = folder_ / "plan";
  std::string said_; // on stdout
};

} // namespace

// Rows of 2^31 - 1 columns, of which the source holds 256: what they say of an element's number is far apart, and no memory is taken for what nobody holds.
TEST_F(HostilePlans, ATensorMuchWiderThanWhatIsHeldOfIt) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the sanitizer keeps records of all addresses";
#endif
  const Parts parts = read(R"({version: 1, model: {dtype: bf16, tensors: {w: [256, 256]}}, source: {mesh: {}, quantize: block_fp8}, target: {mesh: {tp: 2}, ranks: 1..2}})");
  family(parts, "w").shape[1] = INT32_MAX;
  EXPECT_EQ(run(parts, 60), std::pair(kDone, std::string()));
  EXPECT_THAT(said_, HasSubstr("bytes right"));
}

TEST_F(HostilePlans, ATensorThatHasNoAddresses) {
  const Parts parts = read(R"({version: 1, model: {dtype: bf16, tensors: {w: [256, 256]}}, source: {mesh: {}, quantize: block_fp8}, target: {mesh: {tp: 2}, ranks: 1..2}})");
  family(parts, "w").shape[1] = uint64_t{1} << 50;
  const auto [code, said] = run(parts, 60);
  EXPECT_EQ(code, kFailure);
  EXPECT_THAT(said, HasSubstr("cannot put a tensor together from what the source holds: no addresses for"));
}

// The largest magnitude of a matrix is taken of what the source holds, however large the matrix is said to be.
TEST_F(HostilePlans, AMatrixMuchTallerThanWhatIsHeldOfIt) {
  const Parts parts = read(R"({version: 1, model: {dtype: bf16, tensors: {w: [64, 64]}}, source: {mesh: {tp: 2}}, target: {mesh: {}, ranks: 2..2, quantize: nvfp4}})");
  for (const auto &family : parts.manifest->families)
    if (family->name == "w")
      family->shape[0] = uint64_t{1} << 50;
  EXPECT_EQ(run(parts, 60), std::pair(kDone, std::string()));
  EXPECT_THAT(said_, HasSubstr("bytes right"));
}

TEST_F(HostilePlans, LongWorkHasADeadline) {
  const Parts parts = read(R"({version: 1, model: {dtype: bf16, tensors: {w: {shape: [65536, 2048], shard: {1: tp}}}}, source: {mesh: {tp: 2}}, target: {mesh: {}, ranks: 2..2}})");
  const auto [code, said] = run(parts, 0.02);
  EXPECT_EQ(code, kFailure);
  EXPECT_THAT(said, HasSubstr("the synthesis was not finished at the deadline of 0.02 s (--timeout)"));
}

TEST(Deadlines, EndLoopsOfAllThreads) {
  const Deadline deadline("the check", 0.01);
  try {
    parallelFor(4, 4, [](size_t) {
      for (;;)
        Deadline::spend(1000);
    });
    FAIL() << "the loops ended";
  } catch (const Failure &failure) {
    EXPECT_EQ(failure.code, kFailure);
    EXPECT_EQ(failure.message, "the check was not finished at the deadline of 0.01 s (--timeout)");
  }
}

TEST_F(HostilePlans, ParamsThatTheMachineCannotHold) {
  const Parts parts = read(R"({version: 1, model: {dtype: bf16, tensors: {w: [64, 64]}}, source: {mesh: {}}, target: {mesh: {}, ranks: 1..1}})");
  for (const int endpoint : {0, 1})
    parts.manifest->endpoints[endpoint]->params[0]->shape[0]->at[0] = int64_t{1} << 40;
  for (const auto &segment : parts.segments)
    for (fbs::BufferRun &run : segment->buffers)
      run = fbs::BufferRun(run.endpoint(), run.place(), run.param(), run.first(), run.count(), 0, uint64_t{1} << 47);
  const auto [code, said] = run(parts, 60);
  EXPECT_EQ(code, kFailure);
  EXPECT_THAT(said, HasSubstr("cannot allocate the params of source: those up to rank 0 take 128.0 TiB, and this machine has"));
}
