// SPDX-License-Identifier: Apache-2.0
// Command options from a table: parsing, help, similar names.

#include "command/common.h"
#include "command/options.h"

#include <gtest/gtest.h>

using namespace reshard::command;

namespace {

struct Parsed {
  int code;
  std::string out, err, text, choice = "a";
  uint64_t number = 7;
  double seconds = 0;
  bool on = false;
  std::vector<std::string> arguments;
};

Parsed parse(std::vector<std::string> words) {
  Parsed p;
  Command command{"reshard-test",
                  "PLAN",
                  "Tests.",
                  {{"--text", "FILE", "some text", setText(p.text)},
                   {"-o", "FILE", "a short one", setText(p.text)},
                   {"--number", "N", "a number", setNumber(p.number, 1, 10)},
                   {"--seconds", "S", "seconds", setSeconds(p.seconds)},
                   {"--choice", "NAME", "a or b", setChoice(p.choice, {"a", "b"})},
                   {"--on", "", "a switch", setSwitch(p.on)}},
                  1};
  words.insert(words.begin(), "reshard-test");
  std::vector<char *> argv;
  for (std::string &word : words)
    argv.push_back(word.data());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  p.code = parseFlags(command, static_cast<int>(argv.size()), argv.data(), p.arguments);
  p.out = testing::internal::GetCapturedStdout();
  p.err = testing::internal::GetCapturedStderr();
  return p;
}

TEST(Flags, BothSpellingsSwitchesAndArguments) {
  for (const auto &words :
       {std::vector<std::string>{"--text=x", "plan", "--number=3", "--on", "--seconds=0.5", "--choice=b"},
        {"--text", "x", "--number", "3", "--on", "--seconds", "0.5", "--choice", "b", "plan"}}) {
    const Parsed p = parse(words);
    EXPECT_EQ(p.code, -1) << p.err;
    EXPECT_EQ(p.text, "x");
    EXPECT_EQ(p.number, 3u);
    EXPECT_EQ(p.seconds, 0.5);
    EXPECT_EQ(p.choice, "b");
    EXPECT_TRUE(p.on);
    EXPECT_EQ(p.arguments, std::vector<std::string>{"plan"});
  }
  for (const auto &words : {std::vector<std::string>{"-o", "x", "plan"}, {"-o=x", "plan"}, {"plan", "-ox"}})
    EXPECT_EQ(parse(words).text, "x");
  EXPECT_EQ(parse({"--text=a=b", "plan"}).text, "a=b");
  EXPECT_EQ(parse({"--", "--on"}).arguments, std::vector<std::string>{"--on"});
  EXPECT_EQ(parse({"-"}).arguments, std::vector<std::string>{"-"});
}

TEST(Flags, ValuesAreNotInterpreted) {
  for (const char *value : {"{}", "[a,b]", "-3", "--on", "--", "a b", "'a'", "%%", "=x"}) {
    const Parsed p = parse({"--text", value, "plan"});
    EXPECT_EQ(p.code, -1) << p.err;
    EXPECT_EQ(p.text, value);
    EXPECT_FALSE(p.on);
    EXPECT_EQ(parse({"plan", std::string("--text=") + value}).text, value);
  }
}

TEST(Flags, MayBeRepeated) {
  EXPECT_EQ(parse({"--text=a", "plan", "--text", "b", "-o", "c", "--on", "--on"}).text, "c");
  std::vector<std::string> values;
  const Command command{"reshard-test",
                        "",
                        "Tests.",
                        {{"--set", "V", "each",
                          [&](const std::string &value) {
                            values.push_back(value);
                            return std::string();
                          }}},
                        0};
  std::string words[] = {"reshard-test", "--set=a", "--set", "b", "--set=a"};
  char *argv[] = {words[0].data(), words[1].data(), words[2].data(), words[3].data(), words[4].data()};
  std::vector<std::string> arguments;
  EXPECT_EQ(parseFlags(command, 5, argv, arguments), -1);
  EXPECT_EQ(values, (std::vector<std::string>{"a", "b", "a"}));
}

TEST(Flags, WrongUsageExitsWith2AndOneMessage) {
  const struct {
    std::vector<std::string> words;
    std::string message;
  } cases[] = {
      {{"plan", "--txet=x"}, "unknown option '--txet', did you mean '--text'?"},
      {{"plan", "--hlep"}, "unknown option '--hlep', did you mean '--help'?"},
      {{"plan", "--completely-else"},
       "unknown option '--completely-else'; known here: --help, --version, --text, -o, --number, --seconds, --choice, "
       "--on"},
      {{"plan", "--text"}, "option '--text' needs a value: --text=FILE"},
      {{"plan", "--text="}, "option '--text': the value is empty"},
      {{"--text=", "plan"}, "option '--text': the value is empty"},
      {{"--text", "", "plan"}, "option '--text': the value is empty"},
      {{"plan", "-o"}, "option '-o' needs a value: -o=FILE"},
      {{"plan", "--on=1"}, "option '--on' takes no value"},
      {{"plan", "--number=0"}, "option '--number': found '0', expected a number from 1 to 10"},
      {{"plan", "--number=11"}, "option '--number': found '11', expected a number from 1 to 10"},
      {{"plan", "--number=3x"}, "option '--number': found '3x', expected a number from 1 to 10"},
      {{"plan", "--number=-3"}, "option '--number': found '-3', expected a number from 1 to 10"},
      {{"plan", "--number=99999999999999999999"},
       "option '--number': found '99999999999999999999', expected a number from 1 to 10"},
      {{"plan", "--seconds=nan"}, "option '--seconds': found 'nan', expected a number of seconds above 0"},
      {{"plan", "--seconds=0"}, "option '--seconds': found '0', expected a number of seconds above 0"},
      {{"plan", "--choice=c"}, "option '--choice': found 'c', expected one of a, b"},
      {{}, "found 0 positional arguments, expected 1: reshard-test PLAN"},
      {{"a", "b"}, "found 2 positional arguments, expected 1: reshard-test PLAN"},
  };
  for (const auto &[words, message] : cases) {
    const Parsed p = parse(words);
    EXPECT_EQ(p.code, kUsage) << message;
    EXPECT_EQ(p.err, "reshard-test: error: " + message + "\n");
    EXPECT_EQ(p.out, "");
  }
}

TEST(Flags, HelpAndVersionComeFromTheTable) {
  const Parsed help = parse({"--help"});
  EXPECT_EQ(help.code, kDone);
  for (const char *name : {"reshard-test PLAN", "--text=FILE", "-o=FILE", "--number=N", "--on ", "--help", "--version",
                           "exit codes: 0 success"})
    EXPECT_NE(help.out.find(name), std::string::npos) << name;
  EXPECT_EQ(help.err, "");
  EXPECT_EQ(parse({"--version"}).code, kDone);
}

} // namespace
