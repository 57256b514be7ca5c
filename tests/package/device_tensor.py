# SPDX-License-Identifier: Apache-2.0
"""A tensor in host memory that claims through DLPack to be on a GPU."""

import ctypes


class _Managed(ctypes.Structure):  # DLTensor, the first member of DLManagedTensor
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class DeviceTensor:
    """A tensor on cuda:1, according to DLPack; the memory is that of an fp32 NumPy array."""

    def __init__(self, array):
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.array, self.tensor = array, _Managed(array.ctypes.data, 2, 1, array.ndim, 2, 32, 1, shape, None, 0)

    def __dlpack__(self):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)
