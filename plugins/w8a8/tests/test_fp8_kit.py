"""The kits that octavo ships, run on fp8 and w8a8_int8 checkpoints and on the int8 kernels."""

from octavo.testing import LinearMethodSuite, QuantConfigSuite
from octavo_w8a8.fp8 import FP8Config
from octavo_w8a8.int8 import W8A8Int8Config
from octavo_w8a8.methods import Int8Method, Int8WeightMethod


class TestFP8(QuantConfigSuite):
    config = FP8Config


class TestW8A8Int8(QuantConfigSuite):
    config = W8A8Int8Config


class TestInt8Method(LinearMethodSuite):
    method = Int8Method


class TestInt8MethodOnCuda(LinearMethodSuite):
    method = Int8Method
    device = "cuda"


class TestInt8WeightMethod(LinearMethodSuite):
    method = Int8WeightMethod
