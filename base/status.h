// SPDX-License-Identifier: Apache-2.0
// The result of an operation that can fail. For the rooms that do not use LLVM: all but ir and compiler.
#pragma once

#include <cassert>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace reshard {

/// What a caller may decide on; the message is for people. The C API (include/reshard/reshard.h) has one status for
/// each kind but `negative`, which only commands have.
enum class ErrorKind : uint8_t {
  invalid,    ///< a wrong argument or order of calls
  badPlan,    ///< a plan file that is missing, damaged, inconsistent, or of a newer version
  badBinding, ///< memory of a param that is not bound or cannot be used
  failed,     ///< any other failure
  timedOut,   ///< the deadline passed
  negative,   ///< the answer is no: a plan is wrong, or what was asked for is not there
};

/// Success, or an error with a kind and a message. Messages begin in lower case, have no full stop, and state what was
/// found and what was expected.
class [[nodiscard]] Status {
public:
  Status() = default;
  /// An error; `message` must not be empty.
  Status(ErrorKind kind, std::string message) : error_(Error{kind, std::move(message)}) {
    assert(!error_->message.empty());
  }

  bool ok() const { return !error_; }
  /// The kind of an error; only if !ok().
  ErrorKind kind() const { return error().kind; }
  bool timedOut() const { return error_ && error_->kind == ErrorKind::timedOut; }
  /// Empty on success.
  const std::string &message() const {
    static const std::string kNone;
    return error_ ? error_->message : kNone;
  }
  /// The same error with a text before or after its message; success stays success.
  Status withPrefix(const std::string &prefix) && {
    if (error_)
      error_->message.insert(0, prefix);
    return std::move(*this);
  }
  Status withSuffix(const std::string &suffix) && {
    if (error_)
      error_->message += suffix;
    return std::move(*this);
  }

private:
  struct Error {
    ErrorKind kind;
    std::string message;
  };
  const Error &error() const {
    assert(error_);
    return *error_;
  }
  std::optional<Error> error_;
};

/// Errors by kind.
inline Status failed(std::string message) { return {ErrorKind::failed, std::move(message)}; }
inline Status timedOut(std::string message) { return {ErrorKind::timedOut, std::move(message)}; }
inline Status invalid(std::string message) { return {ErrorKind::invalid, std::move(message)}; }
inline Status badPlan(std::string message) { return {ErrorKind::badPlan, std::move(message)}; }
inline Status badBinding(std::string message) { return {ErrorKind::badBinding, std::move(message)}; }
inline Status negative(std::string message) { return {ErrorKind::negative, std::move(message)}; }

/// A value, or the error that prevented it.
template <class T> class [[nodiscard]] Result {
public:
  Result(T value) : value_(std::move(value)) {}
  /// `error` must be an error.
  Result(Status error) : status_(std::move(error)) { assert(!status_.ok()); }

  bool ok() const { return status_.ok(); }
  const Status &status() const { return status_; }
  /// Only of a success.
  T &operator*() {
    assert(value_);
    return *value_;
  }
  const T &operator*() const {
    assert(value_);
    return *value_;
  }
  T *operator->() { return &**this; }
  const T *operator->() const { return &**this; }

private:
  Status status_;
  std::optional<T> value_;
};

} // namespace reshard
