"""The kit that octavo ships for formats, run on this one."""

from octavo.testing import QuantConfigSuite
from octavo_awq.config import AWQConfig


class TestAWQ(QuantConfigSuite):
    config = AWQConfig
