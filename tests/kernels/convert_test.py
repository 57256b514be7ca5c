"""Compares the conversions of kernels/ at every level of this CPU with ml_dtypes and NumPy, bit for bit: casts of all
8- and 16-bit codes and of a dense sample of fp32, and quantized blocks with the definitions in formats_reference.py.
Usage: convert_test.py; RESHARD_BIN is the build folder."""

import ctypes
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from formats_reference import (  # noqa: E402
    BF16, DTYPES, FP16, FP32, INFINITY, SATURATE, amax, bits, canonical, cast, decode, nvfp4_tensor_scale, numpy_block_fp8, numpy_mxfp8, numpy_nvfp4,
    pack_nvfp4, swizzle)

WIDE = (FP32, BF16, FP16)
library = ctypes.CDLL(str(Path(os.environ.get("RESHARD_BIN", "build/release")) / "convert_library.so"))
library.convert_amax.restype = ctypes.c_float
library.convert_nvfp4_tensor_scale.restype = ctypes.c_float
library.convert_swizzled_bytes.restype = ctypes.c_uint64
LEVELS = range(library.convert_levels())
random = np.random.default_rng(1)
checks = 0


def call(name, *arguments):
    """Calls the library with arrays as pointers, floats as floats, and all other arguments as 64-bit integers (valid
    for narrower ones too)."""

    def argument(value):
        if isinstance(value, np.ndarray):
            return ctypes.c_void_p(value.ctypes.data)
        return ctypes.c_float(value) if isinstance(value, (float, np.float32)) else ctypes.c_int64(int(value))

    return getattr(library, "convert_" + name)(*map(argument, arguments))


def aligned(count, dtype, offset=0):
    """Returns elements with the bytes 0xA5 that begin `offset` bytes after a cache line boundary."""
    dtype = np.dtype(dtype)
    memory = np.full(count * dtype.itemsize + 128, 0xA5, np.uint8)
    first = -memory.ctypes.data % 64 + offset
    return memory[first : first + count * dtype.itemsize].view(dtype)


def equal(what, ours, expected):
    global checks
    checks += 1
    ours, expected = bits(ours).ravel(), bits(expected).ravel()
    wrong = np.nonzero(ours != expected)[0]
    if len(wrong):
        first = wrong[0]
        sys.exit(f"{what}: {len(wrong)} of {len(ours)} differ, the first at index {first}: found {int(ours[first]):#x}, expected {int(expected[first]):#x}")


def every(format):
    """Returns all codes of an 8- or 16-bit format; for fp32 all exponents with both signs, and mantissas around the
    ties of each narrower format."""
    if format != FP32:
        return np.arange(1 << (8 * DTYPES[format].itemsize), dtype=np.uint32).astype(f"u{DTYPES[format].itemsize}").view(DTYPES[format])
    near = [m + d for drop in range(12, 24) for m in range(0, 1 << 23, 1 << drop) for d in (-1, 0, 1)][:: 7]
    near += [(k << drop) + d for drop in range(12, 24) for k in range(1 << min(23 - drop, 4)) for d in (-1, 0, 1)]
    mantissas = np.unique(np.concatenate([np.array(near) % (1 << 23), random.integers(0, 1 << 23, 200)])).astype(np.uint32)
    exponents = np.arange(512, dtype=np.uint32) << 23
    sample = (exponents[:, None] | mantissas[random.integers(0, len(mantissas), 3000)][None, :]).ravel()
    return np.concatenate([sample, random.integers(0, 1 << 32, 1 << 19).astype(np.uint32)]).view(np.float32)


def test_casts():
    for source in range(5):
        values = aligned(len(every(source)), DTYPES[source])
        values[:] = every(source)
        for target in range(5):
            if source == target:
                continue
            for overflow in (SATURATE, INFINITY):
                expected = cast(values, target, overflow)
                for level in LEVELS:
                    ours = aligned(len(values), DTYPES[target])
                    call("cast", level, target, ours, source, values, len(values), overflow)
                    equal(f"cast {source} to {target}, overflow {overflow}, level {level}", ours, expected)


def weights(shape, format):
    """Returns rows of very different magnitudes, with zeros, values at the formats' limits, subnormal values, and some
    that are not finite."""
    values = random.normal(0, 1, shape) * np.exp2(random.integers(-12, 12, shape[:-1] + (1,)))
    values[random.random(shape) < 0.05] = 0
    values[random.random(shape[:-1]) < 0.1] *= 2.0**-120
    values[random.random(shape[:-1]) < 0.1] *= 2.0**110
    for level in (448.0, 6.0, 1.0):
        where = random.random(shape[:-1]) < 0.05
        values[where] = np.clip(values[where], -level, level)
    values = values.astype(np.float32)
    values[random.random(shape) < 0.0004] = np.nan
    values[random.random(shape) < 0.0004] = -np.inf
    values[..., :128][random.random(shape[:-1]) < 0.1] = -0.0
    values[random.random(shape[:-1]) < 0.05] = random.integers(0, 1 << 32, shape[-1]).astype(np.uint32).view(np.float32)
    return np.ascontiguousarray(values.astype(DTYPES[format]))


def test_mxfp8():
    for format in WIDE:
        for columns in (32, 64, 512, 1000, 1, 31, 33, 4096 + 17):
            values = weights((64, columns), format)
            codes, scales = numpy_mxfp8(values)
            e8m0 = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
            back = decode(codes.view(ml_dtypes.float8_e4m3fn), e8m0, 32, columns, format)
            for level in LEVELS:
                for row in range(len(values)):
                    ours, our_scales = aligned(columns, np.uint8, row % 2 * row), aligned(scales.shape[1], np.uint8)
                    call("quantize_mxfp8", level, ours, our_scales, format, values[row], columns)
                    equal(f"MXFP8 scales of {columns} columns of format {format}, row {row}, level {level}", our_scales, scales[row])
                    equal(f"MXFP8 codes of {columns} columns of format {format}, row {row}, level {level}", ours, codes[row])
                    wide = aligned(columns, DTYPES[format])
                    call("dequantize_mxfp8", level, format, wide, ours, our_scales, columns)
                    equal(f"MXFP8 dequantization of {columns} columns to format {format}, row {row}, level {level}", wide, back[row])


def test_mxfp8_codes():
    """Dequantizes every scale with every code, including combinations that quantization never gives."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    for format in WIDE:
        expected = decode(codes.view(ml_dtypes.float8_e4m3fn), scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), 32, 256, format)
        for level in LEVELS:
            wide = aligned(codes.size, DTYPES[format])
            call("dequantize_mxfp8", level, format, wide, codes, scales, codes.size)
            equal(f"MXFP8 dequantization of every code to format {format}, level {level}", wide, expected)


def test_block_fp8():
    for format in WIDE:
        for rows, columns in ((128, 128), (256, 384), (100, 70), (129, 300), (1, 1)):
            values = weights((rows, columns + 5), format)[:, :columns]  # rows with gaps
            if rows > 128:
                values[:128, :128] = 0
            codes, scales = numpy_block_fp8(values)
            back = decode(codes.view(ml_dtypes.float8_e4m3fn), np.repeat(scales, 128, 0)[:rows], 128, columns, format)
            for level in LEVELS:
                ours = aligned(rows * (columns + 64), np.uint8).reshape(rows, -1)
                our_scales = aligned(scales.size, np.float32).reshape(scales.shape)
                call("quantize_block_fp8", level, ours, our_scales, format, values, rows, columns, ours.strides[0], values.strides[0])
                what = f"of {rows} x {columns} of format {format}, level {level}"
                equal("scales " + what, np.where(np.isnan(our_scales), np.float32(np.nan), our_scales), scales)
                equal("block FP8 " + what, np.ascontiguousarray(ours[:, :columns]), codes)
                equal("bytes after the rows of block FP8 " + what, np.ascontiguousarray(ours[:, columns:]), np.full((rows, 64), 0xA5, np.uint8))
                wide = aligned(rows * columns, DTYPES[format]).reshape(rows, columns)
                call("dequantize_block_fp8", level, format, wide, ours, our_scales, rows, columns, wide.strides[0], ours.strides[0])
                equal("block FP8 dequantization " + what, wide, back)


def test_nvfp4():
    e2m1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    for format in WIDE:
        for columns in (16, 256, 1024, 1, 15, 17, 1000, 4096 + 7):
            values = weights((48, columns), format)
            finite = np.where(np.isfinite(values.astype(np.float32)), values, np.zeros_like(values)).reshape(1, -1)
            tensor_scale = np.float32(call("nvfp4_tensor_scale", call("amax", 0, format, finite, finite.size)))
            equal("tensor scale", tensor_scale[None], nvfp4_tensor_scale(finite)[None])
            # A scale smaller than the tensor's saturates.
            for scale in (tensor_scale, np.float32(tensor_scale / 64), np.float32(0.01)):
                codes, scales = numpy_nvfp4(values, scale)
                packed = pack_nvfp4(codes)[:, : -(-columns // 2)]
                factors = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
                back = decode(e2m1[codes[:, :columns]], factors, 16, columns, format)
                for level in LEVELS:
                    for row in range(len(values)):
                        ours, our_scales = aligned(packed.shape[1], np.uint8, row % 2 * row), aligned(scales.shape[1], np.uint8)
                        call("quantize_nvfp4", level, ours, our_scales, scale, format, values[row], columns)
                        what = f"of {columns} columns of format {format}, row {row}, level {level}"
                        equal("NVFP4 scales " + what, our_scales, scales[row])
                        equal("NVFP4 " + what, ours, packed[row])
                        wide = aligned(columns, DTYPES[format])
                        call("dequantize_nvfp4", level, format, wide, ours, our_scales, scale, columns)
                        equal("NVFP4 dequantization " + what, wide, back[row])


def test_amax():
    for format in WIDE:
        for count in (0, 1, 63, 64, 1000):
            for level in LEVELS:
                values = random.normal(0, 1, count).astype(DTYPES[format])
                expected = np.float32(np.abs(values.astype(np.float32)).max(initial=0))
                equal(f"amax of {count} elements of format {format}, level {level}", np.float32([call("amax", level, format, values, count)]), expected[None])
                for poison in (np.nan, np.inf):
                    if count:
                        values[random.integers(0, count)] = poison
                        assert np.isnan(call("amax", level, format, values, count))


def test_swizzle():
    for rows, columns in ((128, 4), (1, 1), (256, 8), (130, 5), (300, 13), (127, 12)):
        size = call("swizzled_bytes", rows, columns)
        plain = random.integers(1, 256, (rows, columns), np.uint8)
        expected = swizzle(plain)
        assert size == expected.size
        swizzled, back = aligned(size, np.uint8), aligned(rows * columns, np.uint8).reshape(rows, columns)
        call("clear_padding", swizzled, rows, columns)
        row_cuts = np.unique(np.concatenate([[0, rows], random.integers(0, rows + 1, 3)]))
        column_cuts = np.unique(np.concatenate([[0, columns], random.integers(0, columns + 1, 3)]))
        for r, next_r in zip(row_cuts, row_cuts[1:]):
            for c, next_c in zip(column_cuts, column_cuts[1:]):
                part = np.array([r, c, next_r - r, next_c - c], np.uint64)
                call("swizzle", swizzled, rows, columns, part, plain[r:, c:], plain.strides[0])
                call("unswizzle", back[r:, c:], back.strides[0], expected, rows, columns, part)
        equal(f"swizzled scales of {rows} x {columns}", swizzled, expected)
        equal(f"unswizzled scales of {rows} x {columns}", back, plain)


for name, test in list(globals().items()):
    if name.startswith("test_"):
        before = checks
        test()
        assert checks > before, f"{name} compared no arrays"
        print(f"{name}: {checks - before} arrays equal")
for level, name in enumerate(("portable code", "AVX2", "AVX-512")):
    if level not in LEVELS:
        # The format of unittest, which scripts/skips.py parses.
        print(f"{name} ... skipped '{name}: this CPU does not have it'")
print(f"{checks} arrays equal, levels {list(LEVELS)}")
