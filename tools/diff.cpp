// SPDX-License-Identifier: Apache-2.0
// reshard-diff: shows what changed between two plans, for reviews and CI.

#include "command/common.h"
#include "command/options.h"
#include "report/diff/difference.h"

using namespace reshard::command;
using namespace reshard::report;

int main(int argc, char **argv) {
  ignoreFileSizeSignal();
  DifferenceOptions options;
  std::vector<std::string> arguments;
  Command command{"reshard-diff",
                  "A B",
                  "Shows what changed from plan A to plan B. Exits with 1 if they differ, or with --fail-on if its "
                  "expression holds.",
                  {{"--format", "FORMAT", "text (default), json or markdown",
                    setChoice(options.format, {"text", "json", "markdown"})},
                   {"--fail-on", "EXPR",
                    "exit with 1 only if EXPR holds; EXPR uses the names of the table, alone or with the suffix "
                    "_before, _delta or _ratio: "
                    "'remote_bytes_ratio > 1.05 or (world > 8 and messages_delta > 10)'",
                    setText(options.failOn)}},
                  2};
  if (const int code = parseFlags(command, argc, argv, arguments); code >= 0)
    return code;
  options.before = arguments[0];
  options.after = arguments[1];
  return runCommand(command.name, [&] { return valueOrThrow(difference(options), kUsage) ? kNegative : kDone; });
}
