// reshard-inspect: what a plan is, what one rank does, where a param comes from, and whether it is right.

#include "compiler/frontend/reading.h"
#include "compiler/frontend/topology.h"
#include "tools/inspection.h"
#include "tools/new_folder.h"

#include <cstdio>

using namespace reshard::tools;

int main(int argc, char **argv) {
  ignoreFileSizeSignal();
  InspectionOptions options;
  std::vector<std::string> arguments;
  auto rank = [&](const std::string &value) {
    uint64_t number = 0;
    const std::string error = setNumber(number, 0, UINT32_MAX - 1)(value);
    options.rank = static_cast<int64_t>(number);
    return error;
  };
  std::string topology;
  Command command{
      "reshard-inspect",
      "PLAN",
      "Prints what a plan holds; --verify proves it.",
      {{"--rank", "N", "every step of one rank, with names", rank},
       {"--param", "GLOB", "the target params whose names match: what they hold and where it comes from",
        setText(options.param)},
       {"--format", "FORMAT", "text or json", setChoice(options.format, {"text", "json"})},
       {"--verify", "", "prove that every target byte is written once, from the right source byte",
        setSwitch(options.verify)},
       {"--simulate", "TOPOLOGY", "predict the time on a topology file, beside the least that any plan could take",
        setText(topology)},
       {"--trace", "FILE", "write what is simulated for Perfetto", setText(options.trace)},
       {"--timeout", "S", "deadline in seconds of --verify, --param and --simulate (none)",
        setSeconds(options.timeout)}},
      1};
  if (const int code = parseFlags(command, argc, argv, arguments); code >= 0)
    return code;
  options.plan = arguments[0];
  if (const int asked = (options.rank >= 0) + !options.param.empty() + !topology.empty() + options.verify; asked > 1) {
    printError(command.name, "found " + std::to_string(asked) +
                                 " of --rank, --param, --simulate and --verify, expected one at a time");
    return kUsage;
  }
  options.fits = [&](const std::string &name) { return reshard::matchesGlob(options.param, name); };
  if (refuseOutput(command.name, "--trace", options.trace, {options.plan, topology}))
    return kUsage;
  if (!topology.empty()) {
    reshard::Diagnostics diagnostics;
    options.topology = reshard::readTopologyFile(topology, diagnostics);
    if (!options.topology) {
      std::fprintf(stderr, "%s", diagnostics.text().c_str());
      return kUsage;
    }
  } else if (!options.trace.empty()) {
    printError("reshard-inspect", "--trace writes what --simulate does, which is not asked for");
    return kUsage;
  }
  try {
    return inspect(options);
  } catch (const Failure &failure) {
    printError("reshard-inspect", failure.message);
    return failure.code;
  } catch (const std::exception &exception) {
    printError("reshard-inspect", explain(exception));
    return kFailure;
  }
}
