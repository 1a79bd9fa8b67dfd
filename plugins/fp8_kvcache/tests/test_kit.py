"""The kit that octavo ships for KV formats, run on these."""

from octavo.testing import KVFormatSuite
from octavo_fp8_kvcache.formats import E4M3KV, E5M2KV, E4M3PerTokenHeadKV, Int8PerTokenHeadKV


class TestE4M3(KVFormatSuite):
    format = E4M3KV


class TestE5M2(KVFormatSuite):
    format = E5M2KV


class TestE4M3PerTokenHead(KVFormatSuite):
    format = E4M3PerTokenHeadKV


class TestInt8PerTokenHead(KVFormatSuite):
    format = Int8PerTokenHeadKV
