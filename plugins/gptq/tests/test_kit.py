"""The kit that octavo ships for formats and quantisers, run on these."""

from octavo.testing import QuantConfigSuite, QuantizerSuite
from octavo_gptq.config import GPTQConfig
from octavo_gptq.quantizer import GPTQQuantizer


class TestGPTQ(QuantConfigSuite):
    config = GPTQConfig


class TestGPTQQuantizer(QuantizerSuite):
    quantizer = GPTQQuantizer
