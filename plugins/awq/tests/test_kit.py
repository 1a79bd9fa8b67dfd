from octavo.testing import QuantConfigSuite, QuantizerSuite
from octavo_awq.config import AWQConfig
from octavo_awq.quantizer import AWQQuantizer


class TestAWQConfig(QuantConfigSuite):
    config = AWQConfig


class TestAWQQuantizer(QuantizerSuite):
    quantizer = AWQQuantizer
