// SPDX-License-Identifier: Apache-2.0
// A staging limit that is too small is an error of the job, at options.staging, and states the limit that is needed.
// With that limit the job compiles; with one byte less it does not.

#include "compiler/compile.h"
#include "compiler/pass.h"
#include "compiler/transfer/staging.h"
#include "tests/compiler/random_module.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::ir;

namespace {

llvm::Error lower(Module module, int64_t limit) {
  Lowering lowering{std::move(module), {}};
  lowering.module.layout.stagingLimit = limit;
  for (const PassInfo &pass : passes())
    if (llvm::Error error = pass.run(lowering))
      return error;
  return llvm::Error::success();
}

/// The limit that a job needs; 0 if `limit` is enough. Any other error fails the test.
int64_t needed(const Module &module, int64_t limit) {
  int64_t result = 0;
  llvm::handleAllErrors(
      lower(module, limit),
      [&](const StagingLimitError &error) {
        EXPECT_EQ(error.limit(), limit);
        EXPECT_GT(error.needed(), limit);
        EXPECT_NE(error.message().find("expected at least " + std::to_string(error.needed()) + " bytes"),
                  std::string::npos)
            << error.message();
        result = error.needed();
      },
      [&](const llvm::ErrorInfoBase &error) { ADD_FAILURE() << error.message(); });
  return result;
}

TEST(StagingLimit, StatesTheNeededLimit) {
  int tooSmall = 0;
  for (int seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Module module = RandomModule(seed).module();
    const int64_t limit = needed(module, 1);
    if (limit == 0) // nothing is staged
      continue;
    ++tooSmall;
    EXPECT_EQ(needed(module, limit), 0);
    EXPECT_EQ(needed(module, limit - 1), limit);
  }
  EXPECT_GT(tooSmall, 100);
}

TEST(StagingLimit, IsAnErrorOfTheJob) {
  for (const auto &[lesson, use] :
       {std::pair("failed_staging.yaml", "32 bytes of messages"),
        std::pair("quantized_in_the_arena.yaml",
                  "a row of blocks of param 'w' (128 bytes) and the other staged bytes of a rank")}) {
    SCOPED_TRACE(lesson);
    CompileOptions options;
    options.overrides = {"options.staging=512"};
    CompileResult result;
    Diagnostics diagnostics;
    EXPECT_FALSE(
        compileJob(std::string(RESHARD_SOURCE_DIR "/tests/compiler/lessons/") + lesson, options, result, diagnostics));
    EXPECT_TRUE(diagnostics.text().starts_with(
        std::string("--set:1:17: error: a staging limit of 512 bytes is too small for ") + use +
        ", expected at least "))
        << diagnostics.text();
    EXPECT_EQ(result.failedPass, "") << "the pass is not at fault";
    EXPECT_EQ(result.lastGoodPass, "coalesce");
    EXPECT_EQ(result.module.level, Level::transfer);
  }
}

} // namespace
