// reshard-inspect: what a plan is, what one rank does, where a param comes from, and whether it is right.

#include "tools/inspection.h"

using namespace reshard::tools;

int main(int argc, char **argv) {
  InspectionOptions options;
  std::vector<std::string> arguments;
  auto rank = [&](const std::string &value) {
    uint64_t number = 0;
    const std::string error = setNumber(number, 0, UINT32_MAX - 1)(value);
    options.rank = static_cast<int64_t>(number);
    return error;
  };
  Command command{"reshard-inspect",
                  "PLAN",
                  "Prints what a plan holds; --verify proves it.",
                  {{"--rank", "N", "every step of one rank, with names", rank},
                   {"--param", "GLOB", "the target params whose names match: what they hold and where it comes from", setText(options.param)},
                   {"--format", "FORMAT", "text or json", setChoice(options.format, {"text", "json"})},
                   {"--verify", "", "prove that every target byte is written once, from the right source byte", setSwitch(options.verify)}},
                  1};
  if (const int code = parseFlags(command, argc, argv, arguments); code >= 0)
    return code;
  options.plan = arguments[0];
  try {
    return inspect(options);
  } catch (const std::exception &exception) {
    complain("reshard-inspect", exception.what());
    return kFailure;
  }
}
