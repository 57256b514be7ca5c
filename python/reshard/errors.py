"""What failures raise."""

from __future__ import annotations

import builtins


class Error(RuntimeError):
    """A call that failed, with the whole text of why."""


class PlanError(Error):
    """The plan file is absent, damaged, newer, or does not mean anything."""


class BindError(Error, ValueError):
    """Memory is missing, unknown, overlaps other memory, or is not what the plan says: dtype, shape, strides, device."""


class RunError(Error):
    """A failure at run time: the targets are torn until a later run completes."""


class TimeoutError(Error, builtins.TimeoutError):
    """The deadline passed: the targets are torn until a later run completes."""


class CompileError(Error):
    """The compiler refused the job: its whole message, with every error and the place of each."""
