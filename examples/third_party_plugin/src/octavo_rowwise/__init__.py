"""The door: which hooks this plugin fills. Classes are imported inside the functions, since every command loads this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo import hookimpl

if TYPE_CHECKING:
    from octavo import LinearMethod, Platform, QuantConfig

octavo_api = (1, 0)


@hookimpl
def octavo_quant_configs() -> Sequence[type[QuantConfig]]:
    from octavo_rowwise.rowwise import RowwiseConfig

    return [RowwiseConfig]


@hookimpl
def octavo_linear_methods(platform: Platform) -> Sequence[type[LinearMethod]]:
    from octavo_rowwise.rowwise import RowwiseMethod

    return [RowwiseMethod]
