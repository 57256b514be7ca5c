// The textual form of the IR (.rir): print and parse stand together in text.cpp, so that they cannot drift.
#pragma once

#include "ir/ir.h"

#include <iosfwd>
#include <string>
#include <string_view>

namespace reshard::ir {

/// Prints a module up to its level. parse(print(m)) == m.
void print(const Module &module, std::ostream &out);

/// Reads what print() wrote; comments (`//` to the end of the line) and spacing are free. On failure returns false and
/// sets `line`, `column` (from 1) and `message` ("expected …, found …").
bool parse(std::string_view text, Module &module, size_t &line, size_t &column, std::string &message);

/// What holds at a module's level: every number refers to something, relations lie within shapes, every target element
/// is covered exactly once, both sides of a message agree, rounds and buffers are in order, staging is within the
/// limit. Returns the first violation, naming it; empty where all holds. Run between passes with --verify-each.
std::string verify(const Module &module);

} // namespace reshard::ir
