"""FP8 one number at a time, with fractions and tables, written apart from the package.

Slow and plain. Values are Python floats (each an exact bf16 or fp32 number); bytes are integers.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise

Matrix = list[list[float]]


def fp32(number: float | Fraction) -> float:
    """Round to fp32, to nearest even; infinity beyond."""
    try:
        exact = struct.unpack("<f", struct.pack("<f", float(number)))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    if isinstance(number, float) or not math.isfinite(exact):
        return float(exact)
    # float(Fraction) has rounded once already: take the nearest of the neighbours, ties to even.
    bits = struct.unpack("<I", struct.pack("<f", exact))[0]
    near = [b for b in (bits - 1, bits, bits + 1) if b >= 0 and (b & 0x7F800000) != 0x7F800000]
    decoded = [(b, struct.unpack("<f", struct.pack("<I", b))[0]) for b in near]
    best = min(decoded, key=lambda pair: (abs(Fraction(pair[1]) - number), pair[0] & 1))
    return float(best[1])


def decode(byte: int) -> float:
    """The number of an E4M3 byte (finite variant: 0x7F and 0xFF are NaN)."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


POSITIVE = [Fraction(decode(byte)) for byte in range(0x7F)]
MIDDLES = [(low + high) / 2 for low, high in pairwise(POSITIVE)]


def encode(number: Fraction | float, negative: bool) -> int:
    """The E4M3 byte nearest to a number, ties to the even byte, saturating."""
    sign = 0x80 if negative else 0
    if isinstance(number, float):
        if math.isnan(number):
            return 0x7F
        if math.isinf(number):
            return sign | 0x7E
    size = abs(Fraction(number))
    byte = bisect_left(MIDDLES, size)
    if byte < len(MIDDLES) and MIDDLES[byte] == size:  # between two bytes: the even one
        byte += byte & 1
    return sign | byte


def largest(numbers: Iterable[float]) -> float:
    """The largest magnitude; NaN does not count."""
    return max((abs(n) for n in numbers if not math.isnan(n)), default=0.0)


def e8m0(amax: float) -> int:
    """The smallest code whose power of two is not below fp32(amax * fp32(1/448))."""
    if math.isinf(amax):
        return 254
    scale = fp32(Fraction(amax) * Fraction(fp32(Fraction(1, 448))))
    codes = (code for code in range(255) if 2.0 ** (code - 127) >= scale)
    return next(codes, 254)


def fp32_scale(amax: float, overflow: float, power_of_two: bool) -> float:
    """448 / amax in fp32, and what becomes of it where there is no such number."""
    if amax == 0 or not math.isfinite(amax):
        return 1.0
    scale = fp32(Fraction(448) / Fraction(amax))
    if math.isinf(scale):
        scale = overflow
    return 2.0 ** math.floor(math.log2(Fraction(scale))) if power_of_two else scale


def mx_byte(number: float, code: int) -> int:
    negative = math.copysign(1.0, number) < 0
    if not math.isfinite(number):
        return encode(number, negative)
    return encode(number * 2.0 ** (127 - code), negative)  # exact in the 11 exponent bits


def scaled_byte(number: float, scale: float) -> int:
    """The byte of fp32(number * scale)."""
    negative = math.copysign(1.0, number) < 0
    if not math.isfinite(number):
        return encode(number, negative)
    return encode(fp32(Fraction(number) * Fraction(scale)), negative)


def tiles(matrix: Matrix, high: int, wide: int) -> list[list[list[float]]]:
    """The numbers of each block, by row of blocks and column of blocks."""
    rows, cols = len(matrix), len(matrix[0])
    return [
        [
            [n for row in matrix[top : top + high] for n in row[left : left + wide]]
            for left in range(0, cols, wide)
        ]
        for top in range(0, rows, high)
    ]


def mx_plane(matrix: Matrix, high: int, wide: int) -> tuple[list[list[int]], list[list[int]]]:
    """Bytes and codes of one MXFP8 plane."""
    codes = [[e8m0(largest(block)) for block in row] for row in tiles(matrix, high, wide)]
    data = [
        [mx_byte(n, codes[i // high][j // wide]) for j, n in enumerate(row)]
        for i, row in enumerate(matrix)
    ]
    return data, codes


def block_plane(
    matrix: Matrix, high: int, wide: int, overflow: float, power_of_two: bool
) -> tuple[list[list[int]], list[list[float]]]:
    """Bytes and stored (inverse) scales of a plane with fp32 scales."""
    scales = [
        [fp32_scale(largest(block), overflow, power_of_two) for block in row]
        for row in tiles(matrix, high, wide)
    ]
    data = [
        [scaled_byte(n, scales[i // high][j // wide]) for j, n in enumerate(row)]
        for i, row in enumerate(matrix)
    ]
    return data, [[fp32(1 / Fraction(s)) for s in row] for row in scales]


def transposed(rows: list[list[int]] | list[list[float]]) -> list[list[float]]:
    return [list(column) for column in zip(*rows, strict=True)]
