"""The kit that octavo ships for formats, run on this one."""

from octavo.testing import QuantConfigSuite
from octavo_gguf.config import GGUFConfig


class TestGGUF(QuantConfigSuite):
    config = GGUFConfig
