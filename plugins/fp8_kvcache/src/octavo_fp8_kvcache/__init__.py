"""K and V in 8 bits: fp8 with calibrated scales or none, fp8 and int8 with a scale for each token and head.

This plugin knows how numbers become bytes and back, and nothing of kernels: a backend that loads the storage type reads the
blocks as they are, any other gets them decoded. `codes` holds the casts, `formats` how the bytes lie in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo import hookimpl

if TYPE_CHECKING:
    from octavo import KVFormat, Platform

octavo_api = (1, 0)


@hookimpl
def octavo_kv_formats(platform: Platform) -> Sequence[type[KVFormat]]:
    from octavo_fp8_kvcache.formats import E4M3KV, E5M2KV, E4M3PerTokenHeadKV, Int8PerTokenHeadKV

    return [E4M3KV, E5M2KV, E4M3PerTokenHeadKV, Int8PerTokenHeadKV]
