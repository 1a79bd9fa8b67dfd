"""GGUF files for octavo: one file that holds weights in blocks, the model's sizes, its tokenizer and its chat template.

`header` reads the file's front part, `model_config` and `tokenizer` turn it into what Hugging Face folders say, `reader`
presents the tensors, `blocks` holds the bits, `config` the checks, `goldens` a few layers written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo import hookimpl

if TYPE_CHECKING:
    from octavo import CheckpointReader, QuantConfig

octavo_api = (1, 0)


@hookimpl
def octavo_checkpoint_readers() -> Sequence[type[CheckpointReader]]:
    from octavo_gguf.reader import GGUFReader

    return [GGUFReader]


@hookimpl
def octavo_quant_configs() -> Sequence[type[QuantConfig]]:
    from octavo_gguf.config import GGUFConfig

    return [GGUFConfig]
