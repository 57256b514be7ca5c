# SPDX-License-Identifier: Apache-2.0
"""The required contents of files for endpoints or params with `quantize` (docs/yaml.md, section 12), computed from the
labels of the oracle. A table maps each label to its value in fp32 (which represents all of bf16 and fp16); label 0
is padding, which is 0."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import ml_dtypes
import numpy as np

import formats_reference as formats
from inherit import fits
from oracle import Endpoint, Held, Param, Tensor

BLOCK = {
    "mxfp8": (1, 32),
    "block_fp8": (128, 128),
    "nvfp4": (1, 16),
    "block_fp8_ue8m0": (128, 128),
    "mxfp4": (1, 32),
    "int4": (1, 32),
}
SCALES = {"block_fp8": "fp32", "nvfp4": "fp8_e4m3", "int4": "bf16"}  # dtypes of scales; others: u8
PAIRS = ("nvfp4", "mxfp4", "int4")  # two codes in a byte
WIDE = {"fp32": formats.FP32, "bf16": formats.BF16, "fp16": formats.FP16}


@dataclass(frozen=True)
class Quantize:
    """One `quantize` of the YAML."""

    format: str
    by: str
    layout: str  # of the scales
    codes: str
    blocks: bool  # codes_shape
    scale: str
    tensor_scale: str

    @staticmethod
    def read(node: object) -> Quantize | None:
        node = node if isinstance(node, dict) else {"format": node}
        if node["format"] == "none":
            return None
        scale = node.get(
            "scale", "{name}_scale_inv" if node["format"] in ("block_fp8", "block_fp8_ue8m0") else "{name}_scale"
        )
        codes = node.get("codes", "{name}_packed" if node["format"] == "int4" else "{name}")
        return Quantize(
            node["format"],
            node.get("by", ""),
            node.get("scale_layout", "plain"),
            codes,
            node.get("codes_shape") == "blocks",
            scale,
            node.get("tensor_scale", "{name}_scale_2"),
        )

    def __str__(self) -> str:
        return f"{self.format} by {self.by or 'default'}{'' if self.layout == 'plain' else ', ' + self.layout}"

    @property
    def short_blocks(self) -> bool:
        """Whether the last blocks of a matrix may be short."""
        return BLOCK[self.format][0] > 1

    @property
    def scale_type(self) -> np.dtype:
        """The dtype of the scales of a matrix here; E4M3 and E8M0 are integers."""
        return np.dtype({"block_fp8": np.float32, "int4": ml_dtypes.bfloat16}.get(self.format, np.uint8))


@dataclass
class LocalParam:
    """A param of one mesh rank, as the oracle has it, and its storage form."""

    name: str
    declared: str
    held: Held
    quantize: Quantize | None

    @property
    def fits(self) -> bool:
        """Whether the local columns of a param can be quantized."""
        return (
            not self.quantize
            or self.quantize.short_blocks
            or self.held.labels.shape[-1] % BLOCK[self.quantize.format][1] == 0
        )


@lru_cache(maxsize=16)  # a job has up to four endpoints, which a test asks for several times
def params_of(endpoint: Endpoint) -> list[dict[str, LocalParam]]:
    """All params by mesh rank and name. The endpoint must not change afterwards."""
    globs = endpoint.node.get("quantize", {})
    globs = (
        {key: [value] if isinstance(value, str) else value for key, value in globs.items() if key in ("only", "ignore")}
        if isinstance(globs, dict)
        else {}
    )
    mesh_ranks: list[dict[str, LocalParam]] = [{} for _ in range(endpoint.mesh_ranks)]
    for declared, node in endpoint.declared().items():
        chosen = (not globs.get("only") or any(fits(glob, declared) for glob in globs["only"])) and not any(
            fits(glob, declared) for glob in globs.get("ignore", [])
        )
        own = Quantize.read(node["quantize"]) if "quantize" in node else None
        common = (
            Quantize.read(endpoint.node["quantize"])
            if "quantize" in endpoint.node and "quantize" not in node and "dtype" not in node and chosen
            else None
        )
        for mesh_rank in range(endpoint.mesh_ranks):
            for name, held in Param(endpoint, declared, node).at(mesh_rank).items():
                one = own or (common if held.labels.ndim >= 2 and held.dtype in WIDE else None)
                mesh_ranks[mesh_rank][name] = LocalParam(name, declared, held, one)
    return mesh_ranks


def stored(placed: LocalParam, table: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
    """The file entries of a quantized param by name: dtype and content."""
    how, labels = placed.quantize, placed.held.labels
    lead, rows, columns = labels.shape[:-2], *labels.shape[-2:]
    whole = placed.held.whole.reshape(prod(lead), *placed.held.whole.shape[-2:])
    tensor_scales = np.array(
        [formats.nvfp4_tensor_scale(table[matrix]) for matrix in whole] if how.format == "nvfp4" else [], np.float32
    )
    return quantized(placed, table[labels].reshape(prod(lead), rows, columns), tensor_scales)


def quantized(placed: LocalParam, values: np.ndarray, tensor_scales: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
    """The same, for the given local matrices."""
    scale_shape = scales_of(placed)
    codes, scales = [], []
    for number, matrix in enumerate(values):
        if matrix.size == 0:
            one = np.zeros(matrix.shape, np.uint8), np.zeros(scale_shape, placed.quantize.scale_type)
        elif placed.quantize.format == "nvfp4":
            one = formats.numpy_nvfp4(matrix, tensor_scales[number])
        else:
            one = getattr(formats, "numpy_" + placed.quantize.format)(matrix)
        codes.append(one[0])
        scales.append(one[1])
    stack = lambda arrays, shape: np.stack(arrays) if arrays else np.zeros((0, *shape))
    return entries(placed, stack(codes, values.shape[1:]), stack(scales, scale_shape), tensor_scales)


def scales_of(placed: LocalParam) -> tuple[int, int]:
    """The rows and columns of a matrix's scales."""
    rows, columns = placed.held.labels.shape[-2:]
    block = BLOCK[placed.quantize.format]
    return -(-rows // block[0]), -(-columns // block[1])


def entries(
    placed: LocalParam, codes: np.ndarray, scales: np.ndarray, tensor_scales: np.ndarray
) -> dict[str, tuple[str, np.ndarray]]:
    """Converts codes (one per element) and scales of a param's matrices to the form in its files."""
    how, name, shape = placed.quantize, placed.name, placed.held.labels.shape
    lead, rows = shape[:-2], shape[-2]
    names = [text.replace("{name}", name) for text in (how.scale, how.tensor_scale, how.codes)]
    scales, dtype = scales.astype(how.scale_type), SCALES.get(how.format, "u8")
    groups = -(-scales_of(placed)[1] // 4)  # of four columns
    if how.layout == "swizzled":
        scales = np.array([formats.swizzle(matrix) for matrix in scales], np.uint8).reshape(
            *lead, -(-rows // 128) * 128 * groups * 4
        )
    elif how.layout == "packed":
        scales, dtype = (
            np.array([formats.pack_scales(matrix, 128, rows) for matrix in scales], np.uint8)
            .view("<i4")
            .reshape(*lead, groups, -(-rows // 4) * 4),
            "i32",
        )
    else:
        scales = scales.reshape(*lead, *scales_of(placed))
    codes = codes.astype(np.uint8).reshape(shape)
    if how.format in PAIRS:
        codes = formats.pack_nvfp4(codes)
    if how.blocks:
        codes = codes.reshape(*shape[:-1], shape[-1] // BLOCK[how.format][1], BLOCK[how.format][1] // 2)
    code = (
        ("i32", np.ascontiguousarray(codes).view("<i4"))
        if how.format == "int4"
        else ("u8" if how.format in PAIRS else "fp8_e4m3", codes)
    )
    result = {names[2]: code, names[0]: (dtype, scales)}
    return result | (
        {names[1]: ("fp32", tensor_scales.astype(np.float32).reshape(lead))} if how.format == "nvfp4" else {}
    )


@dataclass
class Codes:
    """The contents of a quantized param's entries, by matrix: one code per element, plain scales."""

    codes: np.ndarray
    scales: np.ndarray
    tensor_scales: np.ndarray


def read_codes(placed: LocalParam, found: dict[str, tuple[str, list[int], bytes]]) -> Codes:
    """Reads the codes from the entries of a file, by name."""
    how, shape = placed.quantize, placed.held.labels.shape
    count, (rows, columns) = prod(shape[:-2]), shape[-2:]
    codes = np.frombuffer(found[how.codes.replace("{name}", placed.name)][2], np.uint8)
    if how.format in PAIRS:
        codes = formats.unpack_nvfp4(codes.reshape(count, rows, columns // 2))
    scales = np.frombuffer(found[how.scale.replace("{name}", placed.name)][2], how.scale_type)
    if how.layout == "swizzled" and scales.size:
        scales = np.array([formats.unswizzle(matrix, *scales_of(placed)) for matrix in scales.reshape(count, -1)])
    elif how.layout == "packed" and scales.size:
        scales = np.array(
            [formats.unpack_scales(matrix, *scales_of(placed), 128) for matrix in scales.reshape(count, -1)]
        )
    tensor_scales = (
        np.frombuffer(found[how.tensor_scale.replace("{name}", placed.name)][2], np.float32)
        if how.format == "nvfp4"
        else np.zeros(0, np.float32)
    )
    return Codes(codes.reshape(count, rows, columns), scales.reshape(count, *scales_of(placed)), tensor_scales)


def dequantized(placed: LocalParam, codes: Codes) -> np.ndarray:
    """The fp32 products of codes and scales, rounded to the tensor's dtype, as fp32 in the param's local shape."""
    how, shape = placed.quantize, placed.held.labels.shape
    rows, columns = shape[-2:]
    matrices = []
    for number, (code, scale) in enumerate(zip(codes.codes, codes.scales)):
        if how.format == "nvfp4":
            code, scale = (
                code.view(ml_dtypes.float4_e2m1fn),
                scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * codes.tensor_scales[number],
            )
            code = code.astype(np.float32)
        else:
            if how.format == "int4":
                code, scale = code.astype(np.float32) - 8, scale.astype(np.float32)
            else:
                code = (
                    code.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
                    if how.format in PAIRS
                    else code.view(ml_dtypes.float8_e4m3fn)
                )
                scale = scale if how.format == "block_fp8" else scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
            scale = np.repeat(scale, BLOCK[how.format][0], 0)[:rows]
        matrices.append(
            formats.decode(code, scale, BLOCK[how.format][1], columns, WIDE[placed.held.dtype]).astype(np.float32)
        )
    return np.array(matrices, np.float32).reshape(shape)


def differs(dtype: str, found: bytes, expected: np.ndarray) -> bool:
    """Whether two contents differ in any bit; all NaNs are equal."""
    if len(found) != expected.nbytes:
        return True
    one, other = np.frombuffer(found, expected.dtype), expected.ravel()
    unlike = formats.bits(one) != formats.bits(other)
    if dtype == "fp8_e4m3":
        unlike &= ~((one & 0x7F == 0x7F) & (other & 0x7F == 0x7F))
    elif dtype in ("fp32", "bf16"):
        unlike &= ~(np.isnan(one) & np.isnan(other))
    return bool(unlike.any())


def matrices_of(placed: LocalParam) -> set[bytes]:
    """The labels of the whole matrices of a param, each in any order."""
    whole = placed.held.whole
    return {np.sort(matrix).tobytes() for matrix in whole.reshape(prod(whole.shape[:-2]), -1)}


def plain(placed: LocalParam) -> bool:
    """Whether the columns of each block of a param are adjacent in a tensor, without padding."""
    labels = placed.held.labels
    wide = BLOCK[placed.quantize.format][1]
    side = np.diff(labels, axis=-1) == 1
    side[..., wide - 1 :: wide] = True
    return bool(side.all() and (labels != 0).all())


def on_grid(placed: LocalParam, tensors: Iterable[Tensor]) -> bool:
    """Whether blocks of several rows begin at multiples of their lengths in their tensors and are short at the ends of
    these only."""
    high, wide = BLOCK[placed.quantize.format]
    if high == 1:
        return True
    labels = placed.held.labels.reshape(prod(placed.held.labels.shape[:-2]), *placed.held.labels.shape[-2:])
    shapes = sorted(
        (int(base), tensor.shape) for tensor in tensors for base in tensor.base.values() if len(tensor.shape) > 1
    )
    for matrix, row, column in product(
        range(len(labels)), range(0, labels.shape[1], high), range(0, labels.shape[2], wide)
    ):
        base, shape = shapes[bisect_right(shapes, int(labels[matrix, row, column]), key=lambda one: one[0]) - 1]
        down, right = divmod((int(labels[matrix, row, column]) - base) % prod(shape[-2:]), shape[-1])
        rows, columns = (
            min(block, length - at)
            for block, length, at in ((high, labels.shape[1], row), (wide, labels.shape[2], column))
        )
        if (
            down % high
            or right % wide
            or rows != min(high, shape[-2] - down)
            or columns != min(wide, shape[-1] - right)
        ):
            return False
    return True


class Passed:
    """Codes and scales of a quantized source by label, for targets with the same `quantize` and the same blocks."""

    def __init__(self, labels: int) -> None:
        self.block = np.zeros(labels, np.int64)  # number of the block; 0: none
        self.position = np.zeros(labels, np.int64)  # position in the block
        self.format = np.zeros(labels, np.int64)  # rows and columns of the block, as in BLOCK
        self.code = np.zeros(labels, np.uint8)
        self.scale = np.zeros(labels, np.float32)  # bits of E4M3 and E8M0 as an integer
        self.tensor_scale = np.zeros(labels, np.float32)
        self.elements = np.zeros(1, np.int64)  # by block, without padding

    @staticmethod
    def grid(placed: LocalParam) -> tuple[np.ndarray, np.ndarray]:
        """For each element of [matrices, rows, columns]: the number of its block, from 0, and its position in the
        block."""
        count, (rows, columns) = prod(placed.held.labels.shape[:-2]), placed.held.labels.shape[-2:]
        matrix, row, column = np.ogrid[:count, :rows, :columns]
        high, wide = BLOCK[placed.quantize.format]
        number = (matrix * scales_of(placed)[0] + row // high) * scales_of(placed)[1] + column // wide
        return number, row % high * wide + column % wide + 0 * matrix

    def add(self, placed: LocalParam, codes: Codes) -> None:
        number, position = self.grid(placed)
        labels = placed.held.labels.reshape(number.shape)
        there = labels != 0
        first, blocks = len(self.elements), codes.scales.size
        self.elements = np.concatenate([self.elements, np.bincount(number[there], minlength=blocks)])
        at = labels[there]
        self.block[at], self.position[at], self.code[at] = first + number[there], position[there], codes.codes[there]
        self.format[at] = list(BLOCK).index(placed.quantize.format)
        self.scale[at] = codes.scales.ravel()[number[there]]
        if len(codes.tensor_scales):
            self.tensor_scale[at] = codes.tensor_scales[np.nonzero(there)[0]]

    def same_blocks(self, placed: LocalParam) -> np.ndarray:
        """For each block of a target, in the order of its scales: whether it is a block of the
        source or only padding."""
        number, position = self.grid(placed)
        labels = placed.held.labels.reshape(number.shape)
        blocks = prod(placed.held.labels.shape[:-2]) * prod(scales_of(placed))
        there = labels != 0
        of, at = self.block[labels[there]], number[there]
        elements = np.bincount(at, minlength=blocks)
        first = np.zeros(blocks, np.int64)
        first[at[::-1]] = of[::-1]
        other = self.format[labels[there]] != list(BLOCK).index(placed.quantize.format)
        wrong = np.bincount(
            at,
            weights=(of != first[at]) | (of == 0) | other | (self.position[labels[there]] != position[there]),
            minlength=blocks,
        )
        return (elements == 0) | (wrong == 0) & (elements == self.elements[first])

    def take(self, placed: LocalParam, anew: Codes, same: np.ndarray) -> Codes:
        """`anew`, with the codes and scales of the source's blocks where the blocks are the same."""
        number, _ = self.grid(placed)
        labels = placed.held.labels.reshape(number.shape)
        old = same[number] & (labels != 0) if number.size else np.zeros(number.shape, bool)
        codes = np.where(old, self.code[labels], anew.codes)
        scales = anew.scales.ravel().copy()
        scales[number[old]] = self.scale[labels[old]]
        tensor_scales = anew.tensor_scales.copy()
        if len(tensor_scales):
            tensor_scales[np.nonzero(old)[0]] = self.tensor_scale[labels[old]]
        return Codes(codes, scales.reshape(anew.scales.shape), tensor_scales)
