"""The conformance suite of quantizers: what is announced is made, always finite, and the same on any number of threads."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from octavo.quant.calibration import InputStatistics, InputSums, one_thread
from octavo.quant.quantizer import CalibratedGroup, QuantizedGroup, Quantizer
from octavo.quant.weight import LinearLayer
from octavo.testing.suite import Suite, expect_none_wrong, same_bits

_INPUTS, _OUTPUTS = 256, (64, 32)
_KINDS = ("plain", "dead channels", "zero groups", "all weights zero", "few tokens", "inputs all zero", "no tokens")
_PARTS = ("codes", "scales", "zeros", "group_index", "input_scale", "input_zero")


class QuantizerSuite(Suite):
    """Set `quantizer` to the `Quantizer` under test; it is run with the defaults of its options."""

    quantizer: ClassVar[type[Quantizer]]
    _subject = "quantizer"

    def test_names(self) -> None:
        for name in (self.quantizer.name, self.quantizer.target):
            assert name == name.strip().lower() != "", f"'{name}' must be lower case, without spaces around"
        mute = [name for name, field in self.quantizer.Options.model_fields.items() if not field.description]
        assert not mute, f"options {', '.join(mute)} have no description, which is their help"
        self.quantizer.Options.model_validate({})  # all of them have defaults

    def test_makes_what_it_announces(self) -> None:
        wrong = []
        for kind in _KINDS:
            group = self._group(kind)
            made = self._made(group)
            method = self._method(group)
            if len(made.weights) != len(group.layers):
                wrong.append(f"{kind}: {len(made.weights)} weights for {len(group.layers)} layers")
                continue
            for layer, weight in zip(group.layers, made.weights, strict=True):
                if weight.spec != method.spec(layer):
                    wrong.append(f"{kind}: {weight.spec} instead of {method.spec(layer)}")
                if weight.bias is not None:
                    wrong.append(f"{kind}: a bias, which is the driver's")
                if weight.scales is not None and weight.scales.dtype != method.scale_dtype:
                    wrong.append(f"{kind}: scales of {weight.scales.dtype} instead of {method.scale_dtype}")
                try:
                    weight.check(layer)
                except Exception as error:
                    wrong.append(f"{kind}: {error}")
        expect_none_wrong(wrong, len(_KINDS))

    def test_is_finite_and_better_than_nothing(self) -> None:
        wrong = []
        for kind in _KINDS:
            group = self._group(kind)
            found, weight = self._effective(self._made(group)), torch.cat(group.weights)
            if not bool(torch.isfinite(found).all()):
                wrong.append(f"{kind}: numbers that are not finite")
            elif kind != "inputs all zero" and float((found - weight).norm()) > 0.5 * float(weight.norm()):
                wrong.append(f"{kind}: more than half of the weight is lost")
        expect_none_wrong(wrong, len(_KINDS))

    def test_divisors_are_positive_and_shared_as_they_must_be(self) -> None:
        for kind in _KINDS:
            group = self._group(kind)
            divisor = self._made(group).divisor
            if divisor is None:
                continue
            assert divisor.shape == (_INPUTS,), f"{kind}: a divisor of shape {tuple(divisor.shape)}"
            assert bool((torch.isfinite(divisor) & (divisor > 0)).all()), f"{kind}: a divisor is not a positive number"
            halves = divisor.view(2, -1)
            assert torch.equal(halves[0], halves[1]), f"{kind}: channels of one producer are divided by two numbers"
        free = self._group("plain", absorbed=False)
        assert self._made(free).divisor is None, "the input is divided where nothing can absorb that"

    def test_threads_change_no_bit(self) -> None:
        before, made = torch.get_num_threads(), []
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                with one_thread():
                    made.append(self._made(self._group("plain")))
        finally:
            torch.set_num_threads(before)
        for one, other in zip(made[0].weights, made[1].weights, strict=True):
            for part in _PARTS:
                left, right = getattr(one, part), getattr(other, part)
                assert (left is None) == (right is None), part
                assert left is None or same_bits(left, right), f"{part} differ between one thread and three"

    def test_leaves_its_input_alone(self) -> None:
        group = self._group("plain")
        weights = [weight.clone() for weight in group.weights]
        gram = None if group.inputs is None or group.inputs.gram is None else group.inputs.gram.clone()
        self._made(group)
        assert all(torch.equal(*pair) for pair in zip(weights, group.weights, strict=True)), "a weight was changed"
        if gram is not None and group.inputs is not None and group.inputs.gram is not None:
            assert torch.equal(gram, group.inputs.gram), "the Gram matrix was changed"

    # --- what it is given

    def _method(self, group: CalibratedGroup) -> Quantizer:
        return self.quantizer(self.quantizer.Options.model_validate({}), group.layers)

    def _made(self, group: CalibratedGroup) -> QuantizedGroup:
        return self._method(group).quantize(group)

    @staticmethod
    def _effective(made: QuantizedGroup) -> Tensor:
        whole = torch.cat([weight.dequantize() for weight in made.weights])
        return whole if made.divisor is None else whole / made.divisor

    def _group(self, kind: str, absorbed: bool = True) -> CalibratedGroup:
        """Two layers that share an input whose channels differ in size; the halves of the input have one producer."""
        if self.device == "cuda":
            pytest.skip("quantizers are checked on the CPU")
        generator = torch.Generator().manual_seed(0)
        sizes = torch.rand(_INPUTS, generator=generator).add(0.1).pow(-1)
        inputs = torch.randn(32 if kind == "few tokens" else 600, _INPUTS, generator=generator) * sizes
        weight = torch.randn(sum(_OUTPUTS), _INPUTS, generator=generator) * _INPUTS**-0.5
        if kind == "dead channels":
            inputs[:, 5:9] = 0
        if kind == "inputs all zero":
            inputs.zero_()
        if kind == "zero groups":
            weight[:40, :128] = 0
        if kind == "all weights zero":
            weight.zero_()
        needs = frozenset({"gram", "cross", "sample"})
        statistics = InputStatistics.of(inputs) if kind != "no tokens" else InputSums(_INPUTS, needs).statistics()
        names = zip(("q_proj", "k_proj"), _OUTPUTS, strict=True)
        layers = tuple(LinearLayer(f"layers.0.self_attn.{name}", _INPUTS, size) for name, size in names)
        producers = torch.arange(_INPUTS) % (_INPUTS // 2) if absorbed else None
        parts = tuple(torch.split(weight, list(_OUTPUTS)))
        return CalibratedGroup(layers, parts, statistics if self.quantizer.calibrates else None, producers)
