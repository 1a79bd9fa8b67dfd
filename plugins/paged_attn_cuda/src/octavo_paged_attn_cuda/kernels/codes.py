"""Numbers to stored codes and back. Codes of 8 bits travel as uint8 or int8, so that chips without fp8 read them too.

E4M3: 0x7F and 0xFF are NaN, 448 is the largest number. E5M2: the upper half of an fp16. Source: OCP 8-bit floating point
specification 1.0.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)

FLOAT: tl.constexpr = tl.constexpr(0)
E4M3: tl.constexpr = tl.constexpr(1)
E5M2: tl.constexpr = tl.constexpr(2)
INT8: tl.constexpr = tl.constexpr(3)


@triton.jit
def narrowed(numbers, dtype: tl.constexpr):
    """fp32 as `dtype`, rounded to the nearest, ties to even. Triton's interpreter cuts bf16 off: there it is done by hand."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = numbers.to(tl.int32, bitcast=True)
        bits = tl.where(numbers != numbers, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        result = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = numbers.to(dtype)
    return result


@triton.jit
def decoded(codes, KIND: tl.constexpr, NATIVE: tl.constexpr, dtype: tl.constexpr):
    """Codes as numbers of a type that holds them all. NATIVE: the chip knows E4M3 (8.9 and newer)."""
    if KIND == E5M2:
        numbers = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif KIND == E4M3:
        if NATIVE:
            numbers = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
        else:
            wide = codes.to(tl.uint16)
            # four bits of exponent in the place of five: 2^8 too small, subnormals too
            half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
            numbers = tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0).to(dtype)
    elif KIND == INT8:
        numbers = codes.to(tl.float32).to(dtype)
    elif codes.dtype == tl.float32:
        numbers = narrowed(codes, dtype)
    else:
        numbers = codes.to(dtype)
    return numbers


@triton.jit
def rounded(numbers):
    """fp32 to whole fp32, ties to even, for magnitudes below 2^22."""
    return (numbers + 12582912.0) - 12582912.0


@triton.jit
def minifloat(numbers, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """fp32 within range to codes of sign, exponent and mantissa in 8 bits, ties to even; NaN to 0x7F with its sign."""
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    drop: tl.constexpr = 23 - MANTISSA
    half: tl.constexpr = (1 << (drop - 1)) - 1
    normal = ((size + half + ((size >> drop) & 1)) >> drop) - ((127 - BIAS) << MANTISSA)
    step: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)
    subnormal = rounded(tl.abs(numbers) * step)
    smallest: tl.constexpr = (128 - BIAS) << 23  # as fp32 bits, the smallest normal number
    small = size < smallest
    code = tl.where(small, tl.where(small, subnormal, 0.0).to(tl.int32), normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encoded(numbers, largest, KIND: tl.constexpr, CLAMPS: tl.constexpr, dtype: tl.constexpr):
    """fp32 as codes, or as floats of `dtype`; beyond `largest` as that. NaN stays NaN, for INT8 it is 0."""
    if CLAMPS:
        numbers = tl.where(numbers > largest, largest, tl.where(numbers < -largest, -largest, numbers))
    if KIND == E4M3:
        codes = minifloat(numbers, 3, 7)
    elif KIND == E5M2:
        codes = minifloat(numbers, 2, 15)
    elif KIND == INT8:
        codes = rounded(tl.where(numbers != numbers, 0.0, numbers)).to(tl.int8)
    else:
        codes = narrowed(numbers, dtype)
    return codes
