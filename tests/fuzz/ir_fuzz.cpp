// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any text is a module of the IR or gives an error. A module that the verifier accepts is printed and parsed
// again: the two texts are equal.

#include "ir/text.h"
#include "tests/fuzz/files.h"

#include <sstream>

using namespace reshard;

namespace {

std::string printed(const ir::Module &module) {
  std::ostringstream text;
  ir::print(module, text);
  return text.str();
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  llvm::Expected<ir::Module> module = ir::parse(tests::textOf(data, size));
  if (!module) {
    llvm::consumeError(module.takeError());
    return 0;
  }
  if (llvm::Error error = ir::verify(*module)) {
    llvm::consumeError(std::move(error));
    return 0;
  }
  const std::string text = printed(*module);
  llvm::Expected<ir::Module> again = ir::parse(text);
  if (!again || printed(*again) != text)
    std::abort();
  return 0;
}
