"""The kit that octavo ships for formats, run on compressed-tensors."""

from octavo.testing import QuantConfigSuite
from octavo_w8a8.compressed_tensors import CompressedTensorsConfig


class TestCompressedTensors(QuantConfigSuite):
    config = CompressedTensorsConfig
