// SPDX-License-Identifier: Apache-2.0
// The textual form of the IR (.rir files): printing (text.cpp), parsing (parse.cpp) and verification (verify.cpp).
#pragma once

#include "ir/ir.h"

#include "llvm/Support/Error.h"

#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>

namespace reshard::ir {

/// Prints a module up to its level. parse() of the text gives an equal module.
void print(const Module &module, std::ostream &out);

/// The first syntax error of an IR text.
class SyntaxError : public llvm::ErrorInfo<SyntaxError> {
public:
  inline static char ID = 0;
  /// `line` and `column` begin at 1.
  SyntaxError(size_t line, size_t column, std::string description)
      : line_(line), column_(column), description_(std::move(description)) {}
  size_t line() const { return line_; }
  size_t column() const { return column_; }
  /// The error without its position: "expected …, found …".
  const std::string &description() const { return description_; }

  void log(llvm::raw_ostream &out) const override;
  std::error_code convertToErrorCode() const override { return llvm::inconvertibleErrorCode(); }

private:
  size_t line_, column_;
  std::string description_;
};

/// Parses the output of print(). Spacing is free; a comment runs from `//` to the end of the line. Every error is a
/// SyntaxError.
llvm::Expected<Module> parse(std::string_view text);

/// Checks the invariants of a module's level: every index is in range, relations lie within shapes, every target
/// element is covered exactly once, both ends of a message agree, rounds and buffers are in order, staging is within
/// the limit. The error describes the first violation. --verify-each calls it after each pass.
llvm::Error verify(const Module &module);

} // namespace reshard::ir
