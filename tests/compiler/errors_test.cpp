// SPDX-License-Identifier: Apache-2.0
// Complete error messages for invalid jobs. Each job in errors/ ends with its expected messages, one `# expect: ` per
// line, and may begin with `# set: a.b=c` lines. RESHARD_UPDATE=1 rewrites the expectations.

#include "compiler/frontend/frontend.h"
#include "compiler/resolve/steps.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace reshard {
namespace {

namespace fs = std::filesystem;
using tests::TemporaryFolder;

constexpr size_t kMinCases = 60; // the test fails if the folder errors/ is missing or incomplete
constexpr std::string_view kExpect = "# expect:", kSet = "# set: ";

void write(const fs::path &path, std::string_view text) {
  std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
}

std::string read(const fs::path &path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

/// The compiler's messages about a job, with paths relative to its folder. A job without an error fails the test.
std::string messages(const TemporaryFolder &folder, const std::string &name, const std::string &text,
                     const std::vector<std::string> &overrides = {}) {
  write(folder / name, text);
  Diagnostics diagnostics;
  if (const auto job = readJob(folder / name, overrides, diagnostics)) {
    EXPECT_FALSE(resolve(*job, diagnostics)) << name << ": no error";
  }
  EXPECT_GT(diagnostics.errors(), 0u) << name << ": no error";
  std::string result = diagnostics.text();
  const std::string prefix = folder / "";
  for (size_t at = result.find(prefix); at != std::string::npos; at = result.find(prefix, at))
    result.erase(at, prefix.size());
  return result;
}

struct Case {
  std::string job; // the text without the expected messages
  std::string expected;
  std::vector<std::string> overrides;
};

Case split(const std::string &text) {
  Case result;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(kSet))
      result.overrides.push_back(line.substr(kSet.size()));
    if (line.starts_with(kExpect))
      result.expected += (line.size() > kExpect.size() ? line.substr(kExpect.size() + 1) : "") + "\n";
    else
      result.job += line + "\n";
  }
  return result;
}

std::string commented(const std::string &message) {
  std::string result;
  std::istringstream lines(message);
  for (std::string line; std::getline(lines, line);)
    result += std::string(kExpect) + (line.empty() ? "" : " ") + line + "\n";
  return result;
}

TEST(Errors, CompleteMessages) {
  const fs::path errors = fs::path(RESHARD_SOURCE_DIR) / "tests/compiler/errors";
  const TemporaryFolder folder;
  fs::create_directory_symlink(errors / "Inputs", folder / "Inputs");
  std::vector<fs::path> paths;
  for (const fs::directory_entry &entry : fs::directory_iterator(errors))
    if (entry.path().extension() == ".yaml")
      paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  for (const fs::path &path : paths) {
    const Case test = split(read(path));
    const std::string actual = messages(folder, path.filename().string(), test.job, test.overrides);
    if (std::getenv("RESHARD_UPDATE"))
      write(path, test.job + commented(actual));
    else
      EXPECT_EQ(actual, test.expected) << path;
  }
  EXPECT_GE(paths.size(), kMinCases);
}

std::string repeat(std::string_view text, size_t times) {
  std::string result;
  for (size_t i = 0; i < times; ++i)
    result += text;
  return result;
}

/// Jobs that could exhaust memory, time or the stack: each must be refused within a second.
TEST(Errors, HostileJobs) {
  const std::string model = "model: {dtype: bf16, tensors: {w: {shape: [8], shard: {0: tp}}}}\n";
  const std::string deep = "lists and maps nested more than 64 deep";
  std::string bomb = "version: 1\na0: &a0 [x, x]\n";
  for (int i = 1; i < 30; ++i)
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [*a" + std::to_string(i - 1) + ", *a" +
            std::to_string(i - 1) + "]\n";
  std::string stairs;
  for (int i = 0; i < 2000; ++i)
    stairs += std::string(i, ' ') + "a:\n";
  std::string wide = "version: 1\n";
  for (int i = 0; i < 200000; ++i)
    wide += "k" + std::to_string(i) + ": 1\n";
  std::string ranks = "version: 1\n" + model + "source: {mesh: {tp: 4}, ranks: [" + repeat("0..1048575, ", 20000) +
                      "0]}\ntarget: {mesh: {tp: 8}}\n";
  std::string pieces;
  for (int i = 0; i < 5000; ++i)
    pieces += "{of: w, from: [0], size: [1], to: [" + std::to_string(i) + "]}, ";
  const std::string binary("\x7f"
                           "ELF\x02\x01\x01\0\0\0\xde\xad\xbe\xef",
                           14);
  const struct {
    const char *name;
    std::string text, message;
  } cases[] = {
      {"empty", "", "hostile.yaml:1:1: error: expected a map for the job, found nothing"},
      {"comment", "# nothing\n", "expected a map for the job, found nothing"},
      {"lists", repeat("[", 100000), deep},
      {"maps", repeat("{a: ", 100000), deep},
      {"dashes", repeat("- ", 100000), deep},
      {"keys", repeat("? ", 100000), deep},
      {"stairs", stairs, deep},
      {"deep tensors", "version: 1\nmodel: {tensors: {w: " + repeat("[", 100000), deep},
      {"aliases", bomb, "aliases are not supported"},
      {"many keys", wide, "unknown key 'k0' in the job"},
      {"binary", binary, "hostile.yaml:1:"},
      {"latin-1",
       "version: 1\nmodel: gr\xf6\xdf"
       "er.yaml\n",
       "hostile.yaml:2:10: error: invalid UTF-8"},
      {"surrogate", "a: \xed\xa0\x80\n", "invalid UTF-8"},
      {"UTF-16", std::string("v\0e\0r\0", 6), "control character 0"},
      {"long line", "version: 1\nmodel: " + std::string(4 << 20, 'x') + "\n", "cannot read '"},
      {"ranks", "version: 1\n" + model + "source: {mesh: {tp: 1000000000000}}\ntarget: {mesh: {tp: 8}}\n",
       "the size of axis 'tp' is 1000000000000, expected 1 to 1048576"},
      {"axes",
       "version: 1\n" + model +
           "source: {mesh: {a: 1000000, b: 1000000, c: 1000000, d: 1000000, e: 1000000}}\ntarget: {mesh: {tp: 8}}\n",
       "the mesh has more than 1048576 ranks"},
      {"rank ranges", ranks, "expected 4, the size of the mesh"},
      {"shape",
       "version: 1\nmodel: {dtype: bf16, tensors: {w: [4294967296, 4294967296]}}\nsource: {mesh: {}}\ntarget: {mesh: "
       "{}}\n",
       "tensor 'w' has more than 2^60 bytes"},
      {"layers",
       "version: 1\nmodel: {dtype: bf16, index: {layer: 1000000, expert: 1000000}, tensors: {\"w.{layer}.{expert}\": "
       "[8]}}\n"
       "source: {mesh: {}}\ntarget: {mesh: {}}\n",
       "instances on a rank, expected at most"},
      {"number",
       "version: 1\n" + model + "source: {mesh: {tp: " + repeat("9", 100000) + "}}\ntarget: {mesh: {tp: 8}}\n",
       "the expression has 100000"},
      {"parentheses",
       "version: 1\n" + model + "source: {mesh: {tp: " + repeat("(", 4000) + "}}\ntarget: {mesh: {tp: 8}}\n",
       "nested more than 64"},
      {"packs",
       "version: 1\nmodel: {dtype: bf16, tensors: {w: [8]}, layouts: {l: {params: {p: {concat: " +
           repeat("[{concat: ", 20) + "[w]" + repeat("}]", 20) +
           "}}}}}\nsource: {layout: l, mesh: {}}\ntarget: {mesh: {}}\n",
       "packs nested more than 16 deep"},
      {"pieces",
       "version: 1\nmodel: {dtype: bf16, tensors: {w: [8]}, layouts: {l: {params: {p: {pieces: [{shape: [5000], of: [" +
           pieces + "]}]}}}}}\nsource: {layout: l, mesh: {}}\ntarget: {layout: l, mesh: {}}\n",
       "param 'p' has 5000 pieces, expected at most 4096"},
      {"pieces of many ranks",
       "version: 1\nmodel: {dtype: bf16, tensors: {w: [8]}, layouts: {l: {params: {p: {pieces: [{shape: [8], of: "
       "[{of: w, from: [0], size: [4]}, {of: w, from: [0], size: [2], to: [4]}, {of: w, from: [0], size: [1], to: "
       "[6]}, "
       "{of: w, from: [0], size: [1], to: [7]}, {zeros: true, size: [1], to: [8]}]}]}}}}}\n"
       "source: {layout: l, mesh: {tp: 1048576}}\ntarget: {layout: l, mesh: {}}\n",
       "dimension 0 of the piece ends at position 9 of param 'p', whose shape is [8]"},
      {"pieces times ranks",
       "version: 1\nmodel: {dtype: bf16, tensors: {w: [8]}, layouts: {l: {params: {p: {pieces: [{shape: [8], of: "
       "[{of: w, from: [0], size: [4]}, {of: w, from: [0], size: [1], to: [4]}, {of: w, from: [0], size: [1], to: "
       "[5]}, "
       "{of: w, from: [0], size: [1], to: [6]}, {of: w, from: [0], size: [1], to: [7]}]}]}}}}}\n"
       "source: {layout: l, mesh: {tp: 1048576}}\ntarget: {layout: l, mesh: {}}\n",
       "has up to 5 pieces on each of 1048576 mesh ranks, expected pieces times mesh ranks of at most 4194304"},
  };
  const TemporaryFolder folder;
  for (const auto &hostile : cases) {
    // CPU time, because other tests run at the same time; the minimum of three runs, because they also compete for
    // memory bandwidth.
    std::string text;
    double seconds = 1e9;
    for (int attempt = 0; attempt < 3 && seconds >= 0.7; ++attempt) {
      const std::clock_t begin = std::clock();
      text = messages(folder, "hostile.yaml", hostile.text);
      seconds = std::min(seconds, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
    }
    EXPECT_NE(text.find(hostile.message), std::string::npos) << hostile.name << ":\n" << text;
    EXPECT_LT(text.size(), 100000u) << hostile.name;
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    EXPECT_LT(seconds, 1.0) << hostile.name;
#else
    EXPECT_LT(seconds, 30.0) << hostile.name;
#endif
  }
}

TEST(Errors, HostileConfigs) {
  const TemporaryFolder folder;
  const std::string job = "version: 1\nmodel: {config: c.json, let: {h: $hidden}, dtype: bf16, tensors: {w: "
                          "[h]}}\nsource: {mesh: {}}\ntarget: {mesh: {}}\n";
  const struct {
    std::string text, message;
  } cases[] = {
      {repeat("[", 100000), "nested more than 64 deep"},
      {"", "c.json:1:1: error: not JSON: unexpected end of input"},
      {"{\"hidden\": 8,\n \"a\": tru}", "c.json:2:10: error: not JSON: invalid literal"},
      {"{\"hidden\": 8} 9", "c.json:1:15: error: not JSON: unexpected number literal; expected end of input"},
      {"{\"hidden\": 8,\n}", "c.json:2:1: error: not JSON: unexpected '}'; expected string literal"},
      {"{true: 8}", "c.json:1:2: error: not JSON: unexpected true literal; expected string literal"},
      {R"({"a\"": 1, "": 2, "a\"": 3, "": 4})", "c.json:1:19: error: duplicate key 'a\"'"},
      {R"({"a\"": 1, "": 2, "a\"": 3, "": 4})", "c.json:1:29: error: duplicate key ''"},
      {R"({"b\\": 1, "b\\": 2})", "c.json:1:12: error: duplicate key 'b\\'"},
      {"[]", "expected a JSON object for a config"},
      {"{\"hidden\": 1e400}", "not JSON: number overflow parsing '1e400'"},
      {"{\"hidden\": 99999999999999999999}", "a number with a fraction or past 2^63"},
      {"{\"hidden\": \"\xff\"}", "not JSON"},
      {std::string("\0\0", 2), "not JSON"},
      {"{\"hidden\": 8, \"t\": {\"hidden\": [{\"hidden\": 1}, \"hidden\"]},\n \"a\": \"\\\"hidden\\\": 1\", "
       "\"hi\\u0064den\": 9}",
       "c.json:2:24: error: duplicate key 'hidden'"},
      {"{\"hidden\": 8, \"t\": [[{\"a\": 1, \"b\": 2, \"a\": 3}]]}", "c.json:1:39: error: duplicate key 'a'"},
  };
  for (const auto &hostile : cases) {
    write(folder / "c.json", hostile.text);
    const std::string text = messages(folder, "job.yaml", job);
    EXPECT_NE(text.find(hostile.message), std::string::npos) << text;
  }
}

} // namespace
} // namespace reshard
