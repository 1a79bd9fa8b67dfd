"""The checks between a GGUF tensor and the layer that it is for. There are no settings: a tensor's type says everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from octavo import CheckpointError, Golden, LinearLayer, QuantConfig, QuantizedWeight, TensorInfo, WeightSpec
from octavo_gguf.blocks import BLOCK_TYPES, WRITABLE, BlockType, encode
from octavo_gguf.names import PLAIN_TYPES

_BY_NAME = tuple(kind.name.lower() for kind in GGMLQuantizationType if kind not in PLAIN_TYPES)
_HINT = f"convert the model to one of {', '.join(name.upper() for name in BLOCK_TYPES)}"


class GGUFConfig(QuantConfig):
    """Weights as GGUF files hold them: a tensor whose last name part is its block type, uint8 (out, bytes of a row)."""

    name = "gguf"
    suffixes: ClassVar[tuple[str, ...]] = (*_BY_NAME, "bias")

    @classmethod
    def goldens(cls) -> Sequence[Golden]:
        from octavo_gguf.goldens import goldens

        return goldens()

    def spec_for(self, layer: LinearLayer, stored: Mapping[str, TensorInfo]) -> WeightSpec | None:
        found = [name for name in _BY_NAME if name in stored]
        if not found:
            return None
        info = stored[found[0]]
        if len(found) > 1 or "weight" in stored:
            others = ", ".join([*found[1:], *(["weight"] if "weight" in stored else [])])
            raise CheckpointError(
                f"{layer.name}: the file holds the weight twice", file=info.file, tensor=info.name, found=others
            )
        block = BLOCK_TYPES.get(found[0])
        if block is None:
            raise CheckpointError(
                f"{layer.name}: blocks of type {found[0].upper()} are not read",
                file=info.file,
                tensor=info.name,
                hint=_HINT,
            )
        if layer.in_features % block.elements:
            raise CheckpointError(
                f"{layer.name}: {layer.in_features} inputs are no whole blocks of {block.name}",
                file=info.file,
                tensor=info.name,
                expected=f"a multiple of {block.elements}",
            )
        shape = (layer.out_features, layer.in_features // block.elements * block.num_bytes)
        if info.dtype != torch.uint8 or info.shape != shape:
            raise CheckpointError(
                f"{layer.name}: the tensor is not what {layer.in_features} inputs and {layer.out_features} outputs "
                f"in blocks of {block.name} imply",
                file=info.file,
                tensor=info.name,
                expected=f"{shape} of {torch.uint8}",
                found=f"{info.shape} of {info.dtype}",
            )
        return block.spec

    def canonicalise(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        block = next(BLOCK_TYPES[name] for name in tensors if name in BLOCK_TYPES)
        codes, scales, zeros = block.decode(tensors[block.name])
        return QuantizedWeight(block.spec, codes, scales, zeros, bias=tensors.get("bias"))

    def serialise(self, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Packs a weight as Q4_0, Q4_1 or Q8_0: what its numbers, which are kept exactly, allow."""
        weight.check(layer)
        block = _type_for(layer, weight)
        assert weight.scales is not None
        try:
            packed = encode(block.name, weight.codes, weight.scales, weight.zeros)
        except ValueError as error:
            raise CheckpointError(
                f"{layer.name}: GGUF {block.name.upper()}, the type for {weight.spec}, cannot hold this weight: {error}",
                hint="types whose scales are products, Q4_K among them, are read, never written",
            ) from None
        tensors = {block.name: packed}
        return tensors if weight.bias is None else tensors | {"bias": weight.bias}


def _type_for(layer: LinearLayer, weight: QuantizedWeight) -> BlockType:
    """The type to write a weight as; raises CheckpointError where none has its spec."""
    kinds = [BLOCK_TYPES[name] for name in WRITABLE if BLOCK_TYPES[name].spec == weight.spec]
    whole = layer.in_features % 32 == 0
    if not kinds or not whole:
        reason = f"it is {weight.spec}" if whole else f"{layer.in_features} inputs are no whole blocks of 32"
        raise CheckpointError(
            f"{layer.name}: no GGUF type that is written ({', '.join(WRITABLE)}) can hold this weight: {reason}",
            expected="uint4 with zeros, or int8 without, in groups of 32 inputs of one output",
        )
    if len(kinds) == 1:
        return kinds[0]
    plain, with_minima = kinds
    assert weight.zeros is not None
    symmetric = torch.equal(weight.zeros, torch.full_like(weight.zeros, float(plain.midpoint or 0)))
    return plain if symmetric else with_minima
