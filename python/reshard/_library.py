# SPDX-License-Identifier: Apache-2.0
"""ctypes bindings of libreshard: the structs and functions of reshard.h and reshard_plan.h."""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from .errors import BindError, Error, PlanError, RunError, TimeoutError

#: The root of the installation, which contains this file: ``bin``, ``lib``, ``include``, ``share/reshard`` (models,
#: topologies).
PREFIX = Path(__file__).resolve().parent


class _Struct(ctypes.Structure):
    """A struct of the C API. Sets its first field, ``size``."""

    def __init__(self, **fields: Any):
        super().__init__(size=ctypes.sizeof(type(self)), **fields)


#: reshard_status set(void *user, const char *key, const void *value, size_t bytes)
STORE_SET = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, c_size_t)
#: reshard_status get(void *user, const char *key, void *buffer, size_t capacity, size_t *bytes)
STORE_GET = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, c_size_t, POINTER(c_size_t))


class Store(_Struct):
    """reshard_store."""

    _fields_ = [("size", c_size_t), ("user", c_void_p), ("set", STORE_SET), ("get", STORE_GET)]


#: int interrupted(void *user)
INTERRUPTED = ctypes.CFUNCTYPE(c_int, c_void_p)


class Options(_Struct):
    """reshard_options."""

    _fields_ = [
        ("size", c_size_t),
        ("transport", c_char_p),
        ("device", c_char_p),
        ("threads", c_uint32),
        ("join_seconds", c_double),
        ("no_local_shortcut", c_int),
        ("insecure", c_int),
        ("communicator", c_void_p),
        ("rendezvous", c_char_p),
        ("store", POINTER(Store)),
        ("job", c_char_p),
        ("secret", c_char_p),
        ("pull", c_int),
        ("reserved", c_int),
        ("interrupted", INTERRUPTED),
        ("interrupt_user", c_void_p),
    ]


class Summary(_Struct):
    """reshard_summary."""

    _fields_ = [
        ("size", c_size_t),
        ("digest", c_char_p),
        ("compiler", c_char_p),
        ("model", c_char_p),
        ("plan_bytes", c_uint64),
        ("world", c_uint32),
        ("endpoints", c_uint32),
        ("rounds", c_uint32),
        ("messages", c_uint64),
        ("transfers", c_uint64),
        ("target_bytes", c_uint64),
        ("local_bytes", c_uint64),
        ("remote_bytes", c_uint64),
        ("storage_bytes", c_uint64),
        ("arena_bytes", c_uint64),
    ]


class Endpoint(_Struct):
    """reshard_endpoint."""

    _fields_ = [
        ("size", c_size_t),
        ("role", c_char_p),
        ("layout", c_char_p),
        ("storage", c_int),
        ("ranks", POINTER(c_uint32)),
        ("rank_count", c_size_t),
    ]


class Param(_Struct):
    """reshard_param."""

    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("dtype", c_char_p),
        ("refresh", c_char_p),
        ("transform", c_char_p),
        ("shape", POINTER(c_int64)),
        ("dimensions", c_size_t),
        ("bytes", c_uint64),
    ]


class Transformed(_Struct):
    """reshard_transformed."""

    _fields_ = [
        ("size", c_size_t),
        ("transform", c_char_p),
        ("name", c_char_p),
        ("endpoint", c_uint32),
        ("rank", c_uint32),
        ("dtype", c_char_p),
        ("shape", POINTER(c_int64)),
        ("dimensions", c_size_t),
        ("memory", c_void_p),
        ("bytes", c_uint64),
        ("stream", c_void_p),
    ]


#: int hook(void *user, const reshard_transformed *param)
TRANSFORM_HOOK = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(Transformed))


class Transform(_Struct):
    """reshard_transform."""

    _fields_ = [
        ("size", c_size_t),
        ("prepare_send", TRANSFORM_HOOK),
        ("prepare_receive", TRANSFORM_HOOK),
        ("finalize", TRANSFORM_HOOK),
        ("user", c_void_p),
    ]


class Replica(_Struct):
    """reshard_replica."""

    _fields_ = [
        ("size", c_size_t),
        ("replica", c_uint32),
        ("ranks", c_uint32),
        ("version", c_uint64),
        ("state", c_int),
        ("reserved", c_uint32),
    ]


class TensorDigest(_Struct):
    """reshard_tensor_digest."""

    _fields_ = [
        ("size", c_size_t),
        ("tensor", c_char_p),
        ("dtype", c_char_p),
        ("shape", POINTER(c_int64)),
        ("dimensions", c_size_t),
        ("elements", c_uint64),
        ("digest", c_char_p),
    ]


class Check(_Struct):
    """reshard_check."""

    _fields_ = [
        ("size", c_size_t),
        ("first_index", c_int),
        ("changed", c_int),
        ("allow_undigested", c_int),
        ("reserved", c_int),
    ]


#: The structs by their names in the headers.
STRUCTS: dict[str, type[_Struct]] = {
    "reshard_store": Store,
    "reshard_options": Options,
    "reshard_summary": Summary,
    "reshard_endpoint": Endpoint,
    "reshard_param": Param,
    "reshard_transformed": Transformed,
    "reshard_transform": Transform,
    "reshard_replica": Replica,
    "reshard_check": Check,
    "reshard_tensor_digest": TensorDigest,
}


#: int hook(void *user, const char *name, uint32_t rank)
HOOK = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_uint32)

#: reshard_method
METHODS = ("local", "shared_memory", "messages", "messages_inside_host")

#: reshard_state
STATES = ("empty", "complete", "torn")

#: reshard_replica_state
REPLICA_STATES = ("pulling", "complete", "lost")

#: Values of reshard_status that functions of a reshard_store return.
OK, FAILED, TIMEOUT = 0, 4, 5

#: The exceptions of the values of reshard_status, in order, starting at RESHARD_INVALID.
_ERRORS = (Error, PlanError, BindError, RunError, TimeoutError)

_COUNT = POINTER(c_size_t)
_FUNCTIONS = {
    "reshard_struct_size": (c_size_t, c_char_p),
    "reshard_open": (c_int, c_char_p, POINTER(c_uint32), c_size_t, POINTER(Options), POINTER(c_void_p)),
    "reshard_replace": (c_int, c_void_p, c_char_p, POINTER(c_uint32), c_size_t, c_char_p),
    "reshard_ranks": (POINTER(c_uint32), c_void_p, _COUNT),
    "reshard_opened_digest": (c_char_p, c_void_p),
    "reshard_bind": (c_int, c_void_p, c_uint32, c_uint32, c_char_p, c_void_p, c_uint64),
    "reshard_set_hook": (c_int, c_void_p, c_char_p, HOOK, c_void_p),
    "reshard_set_transform": (c_int, c_void_p, c_char_p, POINTER(Transform)),
    "reshard_prepare": (c_int, c_void_p),
    "reshard_run": (c_int, c_void_p, c_double, POINTER(Check)),
    "reshard_digest": (c_int, c_void_p, c_uint32, c_int, c_double, c_size_t, POINTER(POINTER(TensorDigest)), _COUNT),
    "reshard_undigested": (POINTER(c_char_p), c_void_p, _COUNT),
    "reshard_enqueue": (c_int, c_void_p, c_void_p),
    "reshard_all_reduce_min": (c_int, c_void_p, c_int64, POINTER(c_int64)),
    "reshard_publish": (c_int, c_void_p, c_uint64, c_int),
    "reshard_release": (c_int, c_void_p, c_double),
    "reshard_pull": (c_int, c_void_p, c_uint64, c_double, POINTER(Check), POINTER(c_uint64)),
    "reshard_replicas": (c_int, c_void_p, POINTER(Replica), c_size_t, c_size_t, _COUNT),
    "reshard_target_state": (c_int, c_void_p),
    "reshard_version": (c_uint64, c_void_p),
    "reshard_pulls": (c_uint64, c_void_p),
    "reshard_error": (c_char_p, c_void_p),
    "reshard_bytes": (c_uint64, c_void_p),
    "reshard_bytes_by": (c_uint64, c_void_p, c_int),
    "reshard_fail": (c_int, c_void_p, c_char_p),
    "reshard_check_options": (c_int, POINTER(Options), c_char_p, c_size_t),
    "reshard_transport": (c_char_p, c_char_p, c_size_t),
    "reshard_fail_open": (c_int, POINTER(c_uint32), POINTER(Options), c_char_p),
    "reshard_close": (None, c_void_p),
    "reshard_plan_open": (c_int, c_char_p, POINTER(c_void_p)),
    "reshard_plan_error": (c_char_p, c_void_p),
    "reshard_plan_summary": (c_int, c_void_p, POINTER(Summary)),
    "reshard_plan_endpoint": (c_int, c_void_p, c_uint32, POINTER(Endpoint)),
    "reshard_plan_params": (c_int, c_void_p, c_uint32, c_uint32, c_size_t, POINTER(POINTER(Param)), _COUNT),
    "reshard_plan_close": (None, c_void_p),
}


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(PREFIX / "lib" / "libreshard.so"))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    check_sizes(library, STRUCTS)
    return library


def check_sizes(library: ctypes.CDLL, structs: Mapping[str, type[ctypes.Structure]]) -> None:
    """Raises ImportError unless each struct has the size that it has in the library."""
    for name, struct in structs.items():
        found, expected = ctypes.sizeof(struct), library.reshard_struct_size(name.encode())
        if found != expected:
            raise ImportError(
                f"{name}: found {found} bytes in the Python module, expected {expected} as in libreshard: "
                f"their versions differ; install the package again, which replaces {PREFIX}"
            )


#: The loaded library. CDLL releases the global interpreter lock during calls.
library = _load()


def text_for(value: str | bytes | os.PathLike[str], what: str) -> bytes:
    """Returns a text or a path for the library, which ends texts at a NUL."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise Error(f"{what}: found {type(value).__name__}, expected a text")
    try:
        found = (
            os.fsencode(value)
            if isinstance(value, os.PathLike)
            else value.encode()
            if isinstance(value, str)
            else value
        )
    except UnicodeEncodeError as wrong:
        raise Error(f"{what}: found {value!r}, expected a text that can be encoded: {wrong}") from None
    if b"\0" in found:
        raise Error(f"{what}: found {value!r}, expected a text without NUL characters")
    return found


def number_for(value: Any, what: str, least: int, most: int) -> int:
    """Returns a number for the library. ctypes would pass its last bits, whatever its size."""
    try:
        found = operator.index(value)
    except TypeError:
        raise Error(f"{what}: found {value!r}, expected a whole number") from None
    if not least <= found <= most:
        raise Error(f"{what}: found {found}, expected {'-2^63' if least else 0} to 2^{most.bit_length()} - 1")
    return found


def flag_for(value: Any, what: str) -> bool:
    """Returns a truth value for the library."""
    if value not in (True, False):
        raise Error(f"{what}: found {value!r}, expected True or False")
    return bool(value)


def error_of(status: int, text: bytes) -> Error:
    """Returns the exception for a status other than RESHARD_OK."""
    return _ERRORS[status - 1](text.decode())
