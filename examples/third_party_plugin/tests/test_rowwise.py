"""All that a plugin's tests need: the kit that octavo ships, once for each class."""

from octavo_rowwise.rowwise import RowwiseConfig, RowwiseMethod

from octavo.testing import LinearMethodSuite, QuantConfigSuite


class TestRowwiseConfig(QuantConfigSuite):
    config = RowwiseConfig


class TestRowwiseMethod(LinearMethodSuite):
    method = RowwiseMethod
