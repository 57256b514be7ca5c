# SPDX-License-Identifier: Apache-2.0
"""Compares the conversions of kernels/ at every level of this CPU with ml_dtypes and NumPy, bit for bit: casts of all
8- and 16-bit codes and of a dense sample of fp32, and quantized blocks with the definitions in formats_reference.py.
Usage: ml_dtypes_test.py; RESHARD_BIN is the build folder."""

import ctypes
import itertools
import sys

import ml_dtypes
import numpy as np

from commands import BIN
from formats_reference import (
    BF16,
    DTYPES,
    E2M1_VALUES,
    E4M3_VALUES,
    FP16,
    FP32,
    INFINITY,
    INT4_VALUES,
    SATURATE,
    bits,
    canonical,
    cast,
    decode,
    numpy_block_fp8,
    numpy_block_fp8_ue8m0,
    numpy_int4,
    numpy_mxfp4,
    numpy_mxfp8,
    numpy_nvfp4,
    nvfp4_tensor_scale,
    pack_nvfp4,
    pack_scales,
    swizzle,
)

WIDE = (FP32, BF16, FP16)
MXFP8, BLOCK_FP8, NVFP4, BLOCK_FP8_UE8M0, MXFP4, INT4 = range(6)  # Quantization
PLAIN, SWIZZLED, PACKED = range(3)  # ScaleLayout
library = ctypes.CDLL(str(BIN / "convert_library.so"))
library.convert_amax.restype = ctypes.c_float
library.convert_nvfp4_tensor_scale.restype = ctypes.c_float
library.convert_stored_scales.restype = ctypes.c_uint64
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
        sys.exit(
            f"{what}: {len(wrong)} of {len(ours)} differ, the first at index {first}: found {int(ours[first]):#x}, "
            f"expected {int(expected[first]):#x}"
        )


def every(format):
    """Returns all codes of an 8- or 16-bit format; for fp32 all exponents with both signs, and mantissas around the
    ties of each narrower format."""
    if format != FP32:
        return (
            np.arange(1 << (8 * DTYPES[format].itemsize), dtype=np.uint32)
            .astype(f"u{DTYPES[format].itemsize}")
            .view(DTYPES[format])
        )
    near = [m + d for drop in range(12, 24) for m in range(0, 1 << 23, 1 << drop) for d in (-1, 0, 1)][::7]
    near += [(k << drop) + d for drop in range(12, 24) for k in range(1 << min(23 - drop, 4)) for d in (-1, 0, 1)]
    mantissas = np.unique(np.concatenate([np.array(near) % (1 << 23), random.integers(0, 1 << 23, 200)])).astype(
        np.uint32
    )
    exponents = np.arange(512, dtype=np.uint32) << 23
    sample = (exponents[:, None] | mantissas[random.integers(0, len(mantissas), 3000)][None, :]).ravel()
    return np.concatenate([sample, random.integers(0, 1 << 32, 1 << 19).astype(np.uint32)]).view(np.float32)


def stored(number, codes, columns):
    """Returns codes, one in a byte, as they are stored."""
    if number in (NVFP4, MXFP4, INT4):
        return np.ascontiguousarray(pack_nvfp4(codes)[:, : -(-columns // 2)])
    return codes


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
    values = random.normal(0, 1, shape) * np.exp2(random.integers(-12, 12, (*shape[:-1], 1)))
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


def quantize(level, number, values, codes, scales, tensor_scale=1.0):
    """Quantizes rows of `values` into rows of `codes`; either may have gaps between its rows."""
    rows, columns = values.shape
    shape = np.array([rows, columns, values.strides[0], codes.strides[0]], np.int64)
    call("quantize", level, number, DTYPES.index(values.dtype), shape, codes, scales, np.float32(tensor_scale), values)


def dequantize(level, number, codes, scales, columns, wide, tensor_scale=1.0):
    """Returns the elements of `codes`, in a wide format."""
    target = aligned(len(codes) * columns, DTYPES[wide]).reshape(len(codes), columns)
    shape = np.array([len(codes), columns, target.strides[0], codes.strides[0]], np.int64)
    call("dequantize", level, number, wide, shape, codes, scales, np.float32(tensor_scale), target)
    return target


def rows_with_gaps(rows, row_bytes, gap=64):
    """Returns rows with the bytes 0xA5 and the same bytes between them."""
    return aligned(rows * (row_bytes + gap), np.uint8).reshape(rows, -1)


def compare(what, number, values, expected, tensor_scale=1.0):
    """Compares all levels with the expected codes (as stored), scales, and elements after dequantization."""
    codes, scales, back = expected
    wide, (rows, columns) = DTYPES.index(values.dtype), values.shape
    for level in LEVELS:
        here = f"{what}, level {level}"
        for gap in (0, 64, 5):
            ours = rows_with_gaps(rows, codes.shape[1], gap)
            our_scales = aligned(scales.size, scales.dtype).reshape(scales.shape)
            quantize(level, number, values, ours, our_scales, tensor_scale)
            equal(
                "scales of " + here,
                np.where(np.isnan(our_scales), np.float32(np.nan), our_scales)
                if scales.dtype == np.float32
                else our_scales,
                scales,
            )
            equal("codes of " + here, np.ascontiguousarray(ours[:, : codes.shape[1]]), codes)
            equal(
                "bytes after the rows of codes of " + here,
                np.ascontiguousarray(ours[:, codes.shape[1] :]),
                np.full((rows, gap), 0xA5, np.uint8),
            )
        equal(
            "dequantization of " + here, dequantize(level, number, ours, our_scales, columns, wide, tensor_scale), back
        )


def e8m0(codes):
    return codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def test_rows_of_e8m0_blocks():
    for number, reference, values_of in ((MXFP8, numpy_mxfp8, E4M3_VALUES), (MXFP4, numpy_mxfp4, E2M1_VALUES)):
        for format in WIDE:
            for columns in (32, 64, 512, 1000, 1, 31, 33, 4096 + 17):
                values = weights((64, columns), format)
                codes, scales = reference(values)
                back = decode(values_of[codes[:, :columns]], e8m0(scales), 32, columns, format)
                compare(
                    f"format {number}, {columns} columns of format {format}",
                    number,
                    values,
                    (stored(number, codes, columns), scales, back),
                )


def test_int4():
    for format in WIDE:
        for columns in (32, 64, 512, 1000, 1, 31, 33, 4096 + 17):
            values = weights((64, columns), format)
            codes, scales = numpy_int4(values)
            back = decode(INT4_VALUES[codes[:, :columns]], scales.astype(np.float32), 32, columns, format)
            compare(
                f"INT4, {columns} columns of format {format}",
                INT4,
                values,
                (stored(INT4, codes, columns), scales, back),
            )


def test_every_int4_code_with_every_scale():
    """Every bf16 number that is not NaN as scale, those with a sign too."""
    scales = np.arange(1 << 16, dtype=np.uint16)
    scales = np.ascontiguousarray(scales[scales & 0x7FFF <= 0x7F80].view(ml_dtypes.bfloat16)[:, None])
    codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (len(scales), 1))
    for format in WIDE:
        values = INT4_VALUES[codes] * scales.astype(np.float32)
        sign = np.signbit(INT4_VALUES[codes]) ^ np.signbit(scales.astype(np.float32))
        expected = canonical(values.astype(DTYPES[format]), np.where(sign, np.float32(-1), np.float32(1)), format)
        for level in LEVELS:
            equal(
                f"every INT4 code to format {format}, level {level}",
                dequantize(level, INT4, stored(INT4, codes, 32), scales, 32, format),
                expected,
            )


def test_every_code_with_every_e8m0_scale():
    """Including combinations that quantization never gives."""
    for number, values_of, count in (
        (MXFP8, E4M3_VALUES, 256),
        (MXFP4, E2M1_VALUES, 32),
        (BLOCK_FP8_UE8M0, E4M3_VALUES, 256),
    ):
        codes = np.tile((np.arange(count) % len(values_of)).astype(np.uint8), (256, 1))
        block = 128 if number == BLOCK_FP8_UE8M0 else 32
        scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], count // block, axis=1)
        for format in WIDE:
            expected = decode(values_of[codes], e8m0(scales), block, count, format)
            for level in LEVELS:
                packed = stored(number, codes, count)
                if block == 32:
                    equal(
                        f"every code of format {number} to format {format}, level {level}",
                        dequantize(level, number, packed, scales, count, format),
                        expected,
                    )
                else:  # a row of blocks has 128 rows
                    for row in range(256):
                        ours = dequantize(level, number, packed[row : row + 1], scales[row], count, format)
                        equal(
                            f"every code of format {number} to format {format}, level {level}, scale {row}",
                            ours,
                            expected[row : row + 1],
                        )


def test_blocks_of_several_rows():
    for number, reference in ((BLOCK_FP8, numpy_block_fp8), (BLOCK_FP8_UE8M0, numpy_block_fp8_ue8m0)):
        for format in WIDE:
            for rows, columns in ((128, 128), (256, 384), (100, 70), (129, 300), (1, 1), (257, 129)):
                values = weights((rows, columns + 5), format)[:, :columns]  # rows with gaps
                if rows > 128:
                    values[:128, :128] = 0
                codes, scales = reference(values)
                factors = e8m0(scales) if number == BLOCK_FP8_UE8M0 else scales
                back = decode(E4M3_VALUES[codes], np.repeat(factors, 128, 0)[:rows], 128, columns, format)
                compare(
                    f"format {number}, {rows} x {columns} of format {format}", number, values, (codes, scales, back)
                )


def test_nvfp4():
    for format in WIDE:
        for columns in (16, 256, 1024, 1, 15, 17, 1000, 4096 + 7):
            values = weights((48, columns), format)
            finite = np.where(np.isfinite(values.astype(np.float32)), values, np.zeros_like(values)).reshape(1, -1)
            tensor_scale = np.float32(call("nvfp4_tensor_scale", call("amax", 0, format, finite, finite.size)))
            equal("tensor scale", tensor_scale[None], nvfp4_tensor_scale(finite)[None])
            # A scale smaller than the tensor's saturates.
            for scale in (tensor_scale, np.float32(tensor_scale / 64), np.float32(0.01)):
                codes, scales = numpy_nvfp4(values, scale)
                factors = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
                back = decode(E2M1_VALUES[codes[:, :columns]], factors, 16, columns, format)
                compare(
                    f"NVFP4, {columns} columns of format {format}",
                    NVFP4,
                    values,
                    (stored(NVFP4, codes, columns), scales, back),
                    scale,
                )


def test_amax():
    for format in WIDE:
        for count in (0, 1, 63, 64, 1000):
            for level in LEVELS:
                values = random.normal(0, 1, count).astype(DTYPES[format])
                expected = np.float32(np.abs(values.astype(np.float32)).max(initial=0))
                equal(
                    f"amax of {count} elements of format {format}, level {level}",
                    np.float32([call("amax", level, format, values, count)]),
                    expected[None],
                )
                for poison in (np.nan, np.inf):
                    if count:
                        values[random.integers(0, count)] = poison
                        assert np.isnan(call("amax", level, format, values, count))


def test_scale_layouts():
    cases = [(SWIZZLED, shape, 1, swizzle) for shape in ((128, 4), (1, 1), (256, 8), (130, 5), (300, 13), (127, 12))]
    cases += [
        (PACKED, shape, 128, pack_scales) for shape in ((128, 4), (1, 1), (256, 8), (130, 5), (301, 13), (127, 12))
    ]
    cases += [(PACKED, shape, 1, pack_scales) for shape in ((128, 4), (1, 1), (131, 5))]
    for layout, (matrix_rows, columns), block_rows, reference in cases:
        rows = -(-matrix_rows // block_rows)
        shape = np.array([rows, columns, block_rows, matrix_rows], np.uint64)
        size = call("stored_scales", layout, shape)
        plain = random.integers(1, 256, (rows, columns), np.uint8)
        expected = reference(plain) if layout == SWIZZLED else reference(plain, block_rows, matrix_rows)
        assert size == expected.size
        ours, back = aligned(size, np.uint8), aligned(rows * columns, np.uint8).reshape(rows, columns)
        call("clear_padding", layout, shape, ours)
        row_cuts = np.unique(np.concatenate([[0, rows], random.integers(0, rows + 1, 3)]))
        column_cuts = np.unique(np.concatenate([[0, columns], random.integers(0, columns + 1, 3)]))
        for r, next_r in itertools.pairwise(row_cuts):
            for c, next_c in itertools.pairwise(column_cuts):
                part = np.array([r, c, next_r - r, next_c - c], np.uint64)
                call("write_scales", layout, shape, ours, part, plain[r:, c:], plain.strides[0])
                call("read_scales", layout, shape, expected, part, back[r:, c:], back.strides[0])
        equal(f"layout {layout} of {rows} x {columns} scales, written", ours, expected)
        equal(f"layout {layout} of {rows} x {columns} scales, read", back, plain)


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
