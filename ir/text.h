// The textual form of the IR (.rir files): printing (text.cpp), parsing (parse.cpp) and verification (verify.cpp).
#pragma once

#include "ir/ir.h"

#include <iosfwd>
#include <string>
#include <string_view>

namespace reshard::ir {

/// Prints a module up to its level. parse() of the text gives an equal module.
void print(const Module &module, std::ostream &out);

/// Parses the output of print(). Spacing is free; a comment runs from `//` to the end of the line. On failure returns
/// false and sets `line` and `column` (both from 1) and `message` ("expected …, found …").
bool parse(std::string_view text, Module &module, size_t &line, size_t &column, std::string &message);

/// Checks the invariants of a module's level: every index is in range, relations lie within shapes, every target
/// element is covered exactly once, both ends of a message agree, rounds and buffers are in order, staging is within
/// the limit. Returns a description of the first violation; empty if there is none. --verify-each calls it after each
/// pass.
std::string verify(const Module &module);

} // namespace reshard::ir
