// SPDX-License-Identifier: Apache-2.0
// At every level, parsing the printed text gives an equal module, and printing that gives the same text. A syntax error
// is reported at its line and column.

#include "ir/text.h"

#include "compiler/compile.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>

using namespace reshard;
using namespace reshard::ir;

namespace {

std::string printed(const Module &module) {
  std::ostringstream out;
  print(module, out);
  return out.str();
}

void checkRoundTrip(const Module &module) {
  const std::string text = printed(module);
  llvm::Expected<Module> again = parse(text);
  ASSERT_TRUE(static_cast<bool>(again)) << toString(again.takeError());
  EXPECT_TRUE(*again == module);
  EXPECT_EQ(printed(*again), text);
  EXPECT_EQ(toString(verify(module)), "");
}

/// The lessons that compile and the smaller examples.
std::vector<std::string> jobs() {
  std::vector<std::string> paths = {"examples/quickstart.yaml", "examples/qwen3-0.6b-8-to-4.yaml",
                                    "examples/qwen3-30b-a3b-32-to-16.yaml"};
  for (const auto &entry : std::filesystem::directory_iterator(RESHARD_SOURCE_DIR "/tests/compiler/lessons"))
    if (const std::string name = entry.path().filename(); !name.starts_with("failed"))
      paths.push_back("tests/compiler/lessons/" + name);
  return paths;
}

/// The position and message of the first syntax error, or "good".
std::string parseError(const std::string &text) {
  llvm::Expected<Module> module = parse(text);
  return module ? "good" : toString(module.takeError());
}

Module lesson(const std::string &name) {
  CompileResult result;
  Diagnostics diagnostics;
  EXPECT_TRUE(compileJob(RESHARD_SOURCE_DIR "/tests/compiler/lessons/" + name, {}, result, diagnostics))
      << diagnostics.text();
  return std::move(result.module);
}

const std::string kHeader = "module \"m\" layout world 1 staging 0 ranks-per-node 0 fingerprint \"\"\n";
const std::string kTwoEndpoints =
    "endpoint \"source\" layout \"\" ranks [0]\nendpoint \"target\" layout \"\" ranks [0]\n";

} // namespace

TEST(Text, RoundTripAfterEveryPass) {
  size_t modules = 0;
  for (const std::string &job : jobs()) {
    SCOPED_TRACE(job);
    CompileOptions options;
    options.afterPass = [&](const std::string &pass, const Module &module) {
      SCOPED_TRACE(pass);
      checkRoundTrip(module);
      ++modules;
    };
    CompileResult result;
    Diagnostics diagnostics;
    EXPECT_TRUE(compileJob(RESHARD_SOURCE_DIR "/" + job, options, result, diagnostics)) << diagnostics.text();
  }
  EXPECT_GT(modules, 60u);
}

TEST(Text, NamesAreQuoted) {
  Module module;
  module.layout.model = "a \"b\" \\ \n\x01 µ";
  module.layout.world = 1;
  module.layout.endpoints.resize(2);
  module.layout.endpoints[0].role = "s";
  module.layout.endpoints[1].role = "t";
  module.layout.endpoints[1].storage = true;
  module.layout.endpoints[1].directory = "// no comment";
  llvm::Expected<Module> again = parse(printed(module));
  ASSERT_TRUE(static_cast<bool>(again)) << toString(again.takeError());
  EXPECT_TRUE(*again == module);
}

TEST(Text, NamesInCommentsAreEscaped) { // a line break would end the comment
  Module module = lesson("even_tp.yaml");
  module.layout.tensorPatterns[0].name = "w\nunused \"x\"";
  for (Endpoint &endpoint : module.layout.endpoints) {
    endpoint.role += "\nrank 0";
    endpoint.params[0].name = "p\n  send";
  }
  checkRoundTrip(module);
}

TEST(Text, ReportsSyntaxErrorsWithTheirPosition) {
  EXPECT_EQ(parseError(kHeader + kTwoEndpoints), "good");
  EXPECT_EQ(parseError(""), "1:1: expected 'module', found 'the end'");
  EXPECT_EQ(parseError("module \"m\" lay"), "1:12: expected layout, transfer or schedule, found 'lay'");
  EXPECT_EQ(parseError(kHeader), "2:1: expected 'endpoint', found 'the end'");
  EXPECT_EQ(parseError(kHeader + kTwoEndpoints + "nonsense"),
            "4:1: expected the end or another item of this level, found 'nonsense'");
  EXPECT_EQ(parseError(kHeader + "tensor %1 \"t\" bf16 [1]"), "2:9: expected tensor 0, found 1");
  EXPECT_EQ(parseError(kHeader + "tensor %0 \"t\" bf17 [1]"), "2:15: expected a dtype, found 'bf17'");
  EXPECT_EQ(parseError(kHeader + "endpoint \"s\" layout \"\" ranks [0:99999999999]"),
            "2:31: expected an ascending range below 2^31, all ranges of the text together at most 67108864 numbers, "
            "found 0:99999999999");
  EXPECT_EQ(parseError(kHeader + "endpoint \"s\" layout \"\" ranks [0] placement x #0"),
            "2:44: expected an index variable, found 'x'");
  EXPECT_EQ(parseError(kHeader + "endpoint \"s\" layout \"\" ranks [0] param $0 \"p\" bf16 [1] holds %0"),
            "2:63: expected the number of one of 0 items of kind 'tensor', found 0");
}

TEST(Text, AnOverlapHasAReplicaGroup) { // a transfer reads the first one
  std::string text = printed(lesson("columns.yaml"));
  const size_t group = text.find("  from $");
  text.erase(group, text.find('\n', group) - group);
  EXPECT_NE(parseError(text).find("expected 'from', found"), std::string::npos) << parseError(text);
}

TEST(Text, EveryTruncationFailsToParseOrToVerify) {
  const std::string text = printed(lesson("columns.yaml"));
  const size_t last = text.find_last_of("0123456789");
  for (size_t n = 0; n < last; ++n) {
    llvm::Expected<Module> module = parse(std::string_view(text).substr(0, n));
    if (module) {
      EXPECT_NE(toString(verify(*module)), "") << "cut at " << n;
    } else {
      consumeError(module.takeError());
    }
  }
}
