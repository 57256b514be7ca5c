# SPDX-License-Identifier: Apache-2.0
"""Reference conversions, written from the definitions of the formats with NumPy and ml_dtypes on whole arrays. Shares
no code with kernels/."""

import ml_dtypes
import numpy as np

DTYPES = list(
    map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
)
FP32, BF16, FP16, E4M3, E5M2 = range(5)
CANONICAL_NAN = [0x7FC00000, 0x7FC0, 0x7E00, 0x7F, 0x7E]
LARGEST = {BF16: float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), FP16: 65504.0, E4M3: 448.0, E5M2: 57344.0}
SATURATE, INFINITY = 0, 1
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
E2M1_VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
INT4_VALUES = np.arange(16, dtype=np.float32) - 8
np.seterr(all="ignore")  # the tests overflow and compute with NaN on purpose


def bits(values):
    return values.view(f"u{values.itemsize}")


def canonical(values, of, format):
    """Returns `values` with each NaN replaced by the canonical NaN of `format`, with the sign of `of`."""
    sign = bits(of) >> (of.itemsize * 8 - 1) != 0
    width = values.itemsize * 8
    nan = CANONICAL_NAN[format] | sign.astype(np.uint64) << np.uint64(width - 1)
    is_nan = np.isnan(of.astype(np.float32)) | np.isnan(values.astype(np.float32))
    return np.where(is_nan, nan.astype(f"u{width // 8}"), bits(values)).view(values.dtype)


def cast(values, to, overflow):
    """Casts with ml_dtypes and NumPy. Saturation is clipping to the largest finite value, which does not change the
    rounding of other values."""
    wide = values.astype(np.float32)
    if overflow == SATURATE and to in LARGEST:
        wide = np.where(np.isnan(wide), wide, np.clip(wide, -LARGEST[to], LARGEST[to]))
    return canonical(wide.astype(DTYPES[to]), values, to)


def amax(blocks):
    """Returns the amax along the last axis; NaN if an element is not finite."""
    magnitudes = np.abs(blocks.astype(np.float32))
    return np.where(np.isfinite(magnitudes).all(-1), magnitudes.max(-1), np.float32(np.nan))


def blocks_of(values, block):
    """Reshapes [rows, columns] to [rows, blocks, block], zero-padded at the end."""
    padded = np.zeros((values.shape[0], -(-values.shape[1] // block) * block), values.dtype)
    padded[:, : values.shape[1]] = values
    return padded.reshape(len(values), -1, block)


def to_e4m3(scaled, values):
    """Returns the saturated E4M3 codes of `scaled`, with the signs of `values`."""
    magnitude = np.where(np.isnan(scaled), np.float32(np.nan), np.minimum(np.abs(scaled), np.float32(448)))
    code = np.where(np.isnan(magnitude), 0x7F, bits(magnitude.astype(ml_dtypes.float8_e4m3fn)))
    return (code | np.signbit(values.astype(np.float32)) * np.uint8(0x80)).astype(np.uint8)


def to_e2m1(scaled, values):
    """Returns the E2M1 codes of `scaled`, one in a byte: the nearest of the eight values, ties to the even code, the
    largest for values beyond it and for NaN; with the signs of `values`."""
    middles = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    magnitude = np.abs(scaled)
    code = np.where(
        np.isnan(magnitude), 7, (magnitude[..., None] > middles).sum(-1) + np.isin(magnitude, middles[1::2])
    )
    return (code | np.signbit(values.astype(np.float32)) * 8).astype(np.uint8)


def least_power_of_two(block_amax, largest):
    """Returns the codes of the least E8M0 scales with which nothing saturates, and the scales in double."""
    # Exact: log2 of a double is exact at powers of two, and fp32 values are far enough from them.
    exponent = np.ceil(np.log2(block_amax.astype(np.float64) / largest))
    code = np.where(np.isnan(block_amax), 255, np.clip(np.nan_to_num(exponent, nan=-127), -127, 127) + 127).astype(
        np.uint8
    )
    return code, np.where(code == 255, np.nan, np.exp2(code.astype(np.float64) - 127))


def numpy_mxfp8(values):
    blocks = blocks_of(values, 32)
    code, scale = least_power_of_two(amax(blocks), 448)
    scaled = (blocks.astype(np.float64) / scale[..., None]).astype(np.float32)
    return to_e4m3(scaled, blocks).reshape(len(values), -1)[:, : values.shape[1]], code


def numpy_mxfp4(values):
    """Returns one code in a byte, zero-padded to whole blocks."""
    blocks = blocks_of(values, 32)
    code, scale = least_power_of_two(amax(blocks), 6)
    scaled = (blocks.astype(np.float64) / scale[..., None]).astype(np.float32)
    codes = to_e2m1(scaled, blocks).reshape(len(values), -1)
    codes[:, values.shape[1] :] = 0
    return codes, code


def numpy_int4(values):
    """Returns codes, each an integer + 8 in a byte, zero-padded to whole blocks, and scales in bf16."""
    blocks = blocks_of(values, 32)
    scales = (amax(blocks) / np.float32(7.5)).astype(ml_dtypes.bfloat16)
    scales[scales == 0] = 1
    scales = canonical(scales, np.abs(scales), BF16)
    scaled = blocks.astype(np.float32) / scales.astype(np.float32)[..., None]
    scaled = np.where(
        np.isnan(scaled), np.where(np.signbit(blocks.astype(np.float32)), np.float32(-8), np.float32(7)), scaled
    )
    codes = (np.rint(np.clip(scaled, -8, 7)).astype(np.int8) + 8).astype(np.uint8).reshape(len(values), -1)
    codes[:, values.shape[1] :] = 0
    return codes, scales


def decode(codes, scales, block, columns, format):
    """Returns the codes' values times the scales of their blocks, cast to a wide format."""
    values = codes.astype(np.float32) * np.repeat(scales, block, axis=-1)[:, :columns]
    return canonical(values.astype(DTYPES[format]), codes.astype(np.float32), format)


def tiles_of(values):
    """Reshapes a matrix to [rows of blocks, blocks, 128, 128], zero-padded."""
    rows, columns = values.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-columns // 128) * 128), np.float32)
    padded[:rows, :columns] = values
    return padded.reshape(len(padded) // 128, 128, -1, 128).transpose(0, 2, 1, 3)


def from_tiles(codes, shape):
    return codes.transpose(0, 2, 1, 3).reshape(codes.shape[0] * 128, -1)[: shape[0], : shape[1]]


def numpy_block_fp8(values):
    blocks = tiles_of(values)
    scales = amax(blocks.reshape(*blocks.shape[:2], -1)) / np.float32(448)
    scales[scales == 0] = 1
    return from_tiles(to_e4m3(blocks / scales[..., None, None], blocks), values.shape), scales


def numpy_block_fp8_ue8m0(values):
    blocks = tiles_of(values)
    code, scale = least_power_of_two(amax(blocks.reshape(*blocks.shape[:2], -1)), 448)
    scaled = (blocks.astype(np.float64) / scale[..., None, None]).astype(np.float32)
    return from_tiles(to_e4m3(scaled, blocks), values.shape), code


def numpy_nvfp4(values, tensor_scale):
    blocks = blocks_of(values, 16)
    quotient = amax(blocks) / (np.float32(6) * tensor_scale)
    quotient[quotient == 0] = 1
    scales = to_e4m3(quotient, np.ones_like(quotient))
    factor = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * tensor_scale
    scaled = np.abs(blocks.astype(np.float32)) / np.where(factor == 0, np.float32(np.inf), factor)[..., None]
    code = to_e2m1(scaled, blocks).reshape(len(values), -1)
    code[:, values.shape[1] :] = 0
    return code, scales


def pack_nvfp4(codes):
    """Packs two codes into a byte, the first in the low bits."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_nvfp4(packed):
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def nvfp4_tensor_scale(values):
    """Returns the tensor scale of a matrix; NaN if an element is not finite."""
    scale = amax(values.reshape(1, -1))[0] / np.float32(2688) if values.size else np.float32(0)
    return np.float32(1) if scale == 0 else scale


def swizzle(scales):
    """Swizzles the scales of one matrix, [rows, columns] bytes.

    The axes (tile row, group of 32 rows, row, tile column, column) become (tile row, tile column, row, group,
    column)."""
    rows, columns = scales.shape
    tiles, tile_columns = -(-rows // 128), -(-columns // 4)
    padded = np.zeros((tiles * 128, tile_columns * 4), np.uint8)
    padded[:rows, :columns] = scales
    return np.ascontiguousarray(padded.reshape(tiles, 4, 32, tile_columns, 4).transpose(0, 3, 2, 1, 4)).ravel()


def unswizzle(swizzled, rows, columns):
    tiles, tile_columns = -(-rows // 128), -(-columns // 4)
    return (
        swizzled.reshape(tiles, tile_columns, 32, 4, 4)
        .transpose(0, 3, 2, 1, 4)
        .reshape(tiles * 128, tile_columns * 4)[:rows, :columns]
    )


def pack_scales(scales, block_rows, matrix_rows):
    """Packs the scales of one matrix, [rows of blocks, columns] bytes, as DeepGEMM's reference does: repeats each row
    of blocks for its rows of elements, up to a multiple of four rows (zeros for rows that are in no block), pads
    columns to a multiple of four, views four columns as an int32, and transposes. Returns bytes."""
    block = np.arange(-(-matrix_rows // 4) * 4) // block_rows
    repeated = np.where((block < len(scales))[:, None], scales[np.minimum(block, len(scales) - 1)], np.uint8(0))
    padded = np.zeros((len(repeated), -(-scales.shape[1] // 4) * 4), np.uint8)
    padded[:, : scales.shape[1]] = repeated
    return np.ascontiguousarray(padded.view("<u4").T).view(np.uint8).ravel()


def unpack_scales(packed, rows, columns, block_rows):
    """The reverse, of bytes; `rows` and `columns` are those of the scales."""
    groups = -(-columns // 4)
    by_row = np.ascontiguousarray(packed.view("<u4").reshape(groups, -1).T).view(np.uint8)
    return by_row[::block_rows][:rows, :columns]
