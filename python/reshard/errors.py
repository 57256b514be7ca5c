# SPDX-License-Identifier: Apache-2.0
"""The exceptions of this package."""

from __future__ import annotations

import builtins


class Error(RuntimeError):
    """A call failed; the text is the complete error message."""


class PlanError(Error):
    """The plan file is missing, damaged, invalid, or of a newer version."""


class BindError(Error, ValueError):
    """A tensor is missing, is not in the plan, overlaps another, or does not match the plan in dtype, shape, strides or
    device."""


class RunError(Error):
    """A run failed. The targets are torn until a later run completes."""


class TimeoutError(Error, builtins.TimeoutError):
    """A run timed out. The targets are torn until a later run completes."""


class CompileError(Error):
    """The compiler rejected the job. The text contains every error with its position."""
