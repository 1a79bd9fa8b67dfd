"""The kit that octavo ships for formats, run on this one."""

from octavo.testing import QuantConfigSuite
from octavo_gptq.config import GPTQConfig


class TestGPTQ(QuantConfigSuite):
    config = GPTQConfig
