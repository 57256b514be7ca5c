// reshard-diff: what changed between two plans, for people and for CI.

#include "tools/difference.h"

using namespace reshard::tools;

int main(int argc, char **argv) {
  ignoreFileSizeSignal();
  DifferenceOptions options;
  std::vector<std::string> arguments;
  Command command{
      "reshard-diff",
      "A B",
      "Says what changed from plan A to plan B. Without --fail-on, 1 where they differ; with it, 1 where the "
      "expression holds.",
      {{"--format", "FORMAT", "text, json or markdown", setChoice(options.format, {"text", "json", "markdown"})},
       {"--fail-on", "EXPR",
        "over names of the table, e.g. 'remote_bytes_ratio > 1.05 or (world > 8 and messages_delta > 10)'",
        setText(options.failOn)}},
      2};
  if (const int code = parseFlags(command, argc, argv, arguments); code >= 0)
    return code;
  options.before = arguments[0];
  options.after = arguments[1];
  try {
    return difference(options);
  } catch (const std::exception &exception) {
    printError("reshard-diff", explain(exception));
    return kFailure;
  }
}
