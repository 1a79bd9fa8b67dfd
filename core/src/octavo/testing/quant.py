"""The conformance suite of checkpoint formats: goldens bit by bit, exact round trips, and errors that name what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.config import Golden, QuantConfig, QuantSource, TensorInfo
from octavo.quant.weight import CODES, LinearLayer, QuantizedWeight, WeightSpec
from octavo.testing.suite import Suite, expect_none_wrong, same_bits
from octavo.testing.weights import FIELDS, random_weight

LAYER = "model.layers.0.mlp.kit_proj"


class QuantConfigSuite(Suite):
    """Set `config` to the `QuantConfig` under test. All that the suite checks, it derives from the format's goldens."""

    config: ClassVar[type[QuantConfig]]
    _subject = "config"

    def test_names(self) -> None:
        config = self.config
        for name in (config.name, *config.method_names):
            assert isinstance(name, str), f"{name!r} is not a string"
            assert name == name.strip().lower() != "", f"'{name}' must be lower case, without spaces around"
        fields = set(config.model_fields)
        assert set(config.aliases_of) <= fields, f"aliases of {set(config.aliases_of) - fields}, which are no fields"
        spellings = [*fields, *(alias for aliases in config.aliases_of.values() for alias in aliases)]
        twice = {s for s in spellings if spellings.count(s) > 1}
        assert not twice, f"{twice} spell more than one setting"
        ignored = set(config.ignored_keys) & set(spellings)
        assert not ignored, f"{ignored} are read and ignored at once"
        assert config.suffixes, "suffixes is empty: the loader would not know the format's tensors"
        for golden in self._goldens():
            strange = set(golden.tensors) - set(config.suffixes)
            assert not strange, f"a golden holds {strange}, which suffixes does not list"

    def test_a_golden_does_not_read_the_same_backwards(self) -> None:
        def directed(weight: Tensor) -> bool:
            return all(size == 1 or not torch.equal(weight, weight.flip(dim)) for dim, size in enumerate(weight.shape))

        goldens = self._goldens()
        assert any(directed(golden.weight) and golden.weight.numel() > 1 for golden in goldens), (
            "each golden is symmetric along an axis, so that a wrong order of elements would not show"
        )

    def test_goldens_stand_for_their_weights(self) -> None:
        for number, golden in enumerate(self._goldens()):
            weight = self._load(golden)
            assert weight is not None, f"golden {number} is taken for unquantised"
            found, expected = weight.dequantize(torch.float32), golden.weight.float()
            assert found.shape == expected.shape, f"golden {number}: shape {tuple(found.shape)}"
            wrong = int((found != expected).sum())
            assert not wrong, f"golden {number}: {wrong} of {found.numel()} weights differ:\n{found}\n{expected}"

    def test_goldens_are_written_as_they_were_read(self) -> None:
        for number, golden in enumerate(self._goldens()):
            weight = self._load(golden)
            assert weight is not None, f"golden {number} is taken for unquantised"
            if golden.read_only:
                reason = self._why_not_unwritten(golden, weight)
                assert reason is None, f"golden {number} is read_only, but {reason}"
                continue
            written = self._settings(golden).serialise(_layer(golden), weight)
            assert set(written) == set(golden.tensors), f"golden {number}: wrote {set(written)}"
            for suffix, tensor in golden.tensors.items():
                found = written[suffix]
                assert same_bits(found, tensor), (
                    f"golden {number}: {suffix} was written as\n{found}\ninstead of\n{tensor}"
                )
                assert found.is_contiguous(), f"golden {number}: {suffix} is not contiguous"

    def test_spec_agrees_with_weight(self) -> None:
        for number, golden in enumerate(self._goldens()):
            spec, weight = self._spec(golden), self._load(golden)
            assert weight is not None, f"golden {number} is taken for unquantised"
            allowed = (spec, spec and replace(spec, act_order=False))
            assert weight.spec in allowed, f"golden {number}: spec_for says {spec}, canonicalise {weight.spec}"

    def test_reading_modifies_nothing(self) -> None:
        for golden in self._goldens():
            before = {suffix: tensor.clone() for suffix, tensor in golden.tensors.items()}
            self._load(golden)
            changed = [suffix for suffix, tensor in golden.tensors.items() if not same_bits(tensor, before[suffix])]
            assert not changed, f"canonicalise modified {changed}"

    def test_random_weights_survive(self) -> None:
        wrong, tried = [], 0
        for number, golden in enumerate(self._goldens()):
            if golden.read_only:
                tried += 1
                continue
            for out_features, in_features in _sizes(golden):
                generator = torch.Generator().manual_seed(out_features * 7919 + in_features)
                layer = LinearLayer(LAYER, in_features, out_features)
                weight = self._random(golden, out_features, in_features, generator)
                if weight is None:
                    continue
                tried += 1
                place = f"golden {number}, {weight.spec}, {out_features} x {in_features}"
                tensors = self._settings(golden).serialise(layer, weight)
                found = self._load(replace(golden, tensors=tensors), layer)
                if found is None:
                    wrong.append(f"{place}: written tensors are taken for unquantised")
                    continue
                wrong += [f"{place}: {name} differ" for name in FIELDS if not _equal(weight, found, name)]
                again = self._settings(golden).serialise(layer, found)
                wrong += [
                    f"{place}: {s} is written differently" for s in tensors if not same_bits(again[s], tensors[s])
                ]
        expect_none_wrong(wrong, tried)

    def test_a_plain_weight_is_left_alone(self) -> None:
        for golden in self._goldens():
            layer = _layer(golden)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                shape = (layer.out_features, layer.in_features)
                stored = {"weight": TensorInfo(f"{LAYER}.weight", dtype, shape, "kit")}
                spec = self._settings(golden).spec_for(layer, stored)
                assert spec is None, f"a layer that holds only a {dtype} 'weight' is taken for {spec}"

    def test_a_missing_tensor_is_named(self) -> None:
        wrong, tried = [], 0
        for number, golden in enumerate(self._goldens()):
            for suffix in golden.tensors:
                if suffix == "bias" or len(golden.tensors) == 1:
                    continue
                tried += 1
                fewer = {name: tensor for name, tensor in golden.tensors.items() if name != suffix}
                reason = self._why_not_refused(golden, fewer, naming=(suffix,))
                if reason is not None and not self._reads_the_same(golden, fewer):
                    wrong.append(f"golden {number} without {suffix}: {reason}")
        expect_none_wrong(wrong, tried)

    def test_wrong_shapes_are_refused(self) -> None:
        wrong, tried = [], 0
        for number, golden in enumerate(self._goldens()):
            for suffix, tensor in golden.tensors.items():
                for what, changed in _reshaped(tensor):
                    tried += 1
                    tensors = {**golden.tensors, suffix: changed}
                    reason = self._why_not_refused(golden, tensors, naming=(LAYER, *golden.tensors))
                    if reason is not None:
                        wrong.append(f"golden {number}, {suffix} {tuple(tensor.shape)} {what}: {reason}")
        expect_none_wrong(wrong, tried)

    def test_wrong_types_are_refused(self) -> None:
        wrong, tried = [], 0
        for number, golden in enumerate(self._goldens()):
            for suffix, tensor in golden.tensors.items():
                if suffix == "bias":
                    continue
                tried += 1
                other = torch.int32 if tensor.dtype.is_floating_point else torch.float32
                tensors = {**golden.tensors, suffix: tensor.float().to(other)}
                reason = self._why_not_refused(golden, tensors, naming=(LAYER, *golden.tensors))
                if reason is not None:
                    wrong.append(f"golden {number}, {suffix} as {other} instead of {tensor.dtype}: {reason}")
        expect_none_wrong(wrong, tried)

    def test_unknown_settings_are_reported(self) -> None:
        for golden in self._goldens():
            source = QuantSource({**golden.settings, "kit_unknown_setting": 1}, "kit")
            assert "kit_unknown_setting" in self.config.parse(source).unread_keys, "an unknown setting is not reported"
            unread = self._settings(golden).unread_keys
            assert not unread, f"a golden's own settings {unread} are not read"

    def test_written_settings_are_read_back(self) -> None:
        for golden in self._goldens() if self.config.targets else []:
            config = self._settings(golden)
            source = QuantSource(config.settings(), "kit-file")
            assert source.raw.get("quant_method") in (config.name, *config.method_names), "settings lack quant_method"
            again = self.config.parse(source)
            assert again == config, f"settings are read back as {again} instead of {config}"
            assert not again.unread_keys, f"settings {again.unread_keys} are written and not read"

    def test_spellings_that_disagree_are_refused(self) -> None:
        for golden in self._goldens():
            for field, aliases in self.config.aliases_of.items():
                plain = {k: v for k, v in golden.settings.items() if k not in (field, *aliases)}
                given = [golden.settings[k] for k in (field, *aliases) if golden.settings.get(k) is not None]
                value = given[0] if given else "kit-some"
                for alias in aliases:
                    source = QuantSource({**plain, field: value, alias: "kit-other"}, "kit-file")
                    try:
                        self.config.parse(source)
                    except CheckpointError:
                        continue
                    raise AssertionError(f"{field} = {value!r} and {alias} = 'kit-other' are accepted together")

    def test_a_foreign_weight_is_refused(self) -> None:
        for golden in self._goldens():
            layer = _layer(golden)
            shape = (layer.out_features, layer.in_features)
            spec = WeightSpec("kit-unknown", (1, -1))
            weight = QuantizedWeight(spec, torch.zeros(shape, dtype=torch.uint8), torch.ones(shape[0], 1))
            try:
                self._settings(golden).serialise(layer, weight)
            except CheckpointError as error:
                message = str(error)
            else:
                raise AssertionError("serialise writes a weight of code 'kit-unknown', which it cannot understand")
            assert LAYER in message, f"the error does not name the layer: {message}"

    def test_other_folders_are_not_claimed(self) -> None:
        floats = {
            f"{LAYER.rpartition('.')[0]}.{name}.weight": TensorInfo(f"{name}.weight", torch.float16, (64, 32), "kit")
            for name in ("up_proj", "down_proj")
        }
        unrelated = QuantSource({"kit_unknown_setting": 1}, "kit")
        for source, tensors in ((None, {}), (None, floats), (unrelated, {}), (unrelated, floats)):
            claimed = self.config.detect(source, tensors)
            assert claimed is False, f"detect claims a folder with settings {source} and {len(tensors)} float tensors"

    def _goldens(self) -> list[Golden]:
        goldens = list(self.config.goldens())
        assert goldens, "goldens() is empty: write one layer of the format out, bit by bit"
        return goldens

    def _settings(self, golden: Golden) -> QuantConfig:
        return self.config.parse(QuantSource(golden.settings, "kit"))

    def _spec(self, golden: Golden, layer: LinearLayer | None = None) -> WeightSpec | None:
        stored = {
            suffix: TensorInfo(f"{LAYER}.{suffix}", tensor.dtype, tuple(tensor.shape), "kit")
            for suffix, tensor in golden.tensors.items()
        }
        return self._settings(golden).spec_for(layer or _layer(golden), stored)

    def _load(self, golden: Golden, layer: LinearLayer | None = None) -> QuantizedWeight | None:
        """What a loader does with a layer; None where the format calls it unquantised."""
        layer = layer or _layer(golden)
        if self._spec(golden, layer) is None:
            return None
        weight = self._settings(golden).canonicalise(layer, dict(golden.tensors))
        weight.check(layer)
        return weight

    def _why_not_refused(self, golden: Golden, tensors: Mapping[str, Tensor], naming: tuple[str, ...]) -> str | None:
        """None if loading these tensors raises a CheckpointError that names one of `naming`, else what happens instead."""
        try:
            weight = self._load(replace(golden, tensors=tensors), _layer(golden))
        except CheckpointError as error:
            named = any(name in str(error) for name in naming)
            return None if named else f"the error names none of {', '.join(naming)}: {error}"
        except Exception as error:
            return f"raised {error!r} instead of a CheckpointError"
        return "is taken for unquantised" if weight is None else "is read without an error"

    def _why_not_unwritten(self, golden: Golden, weight: QuantizedWeight) -> str | None:
        """None if writing the weight raises a CheckpointError that names the layer, else what happens instead."""
        try:
            self._settings(golden).serialise(_layer(golden), weight)
        except CheckpointError as error:
            return None if LAYER in str(error) else f"the error does not name the layer: {error}"
        return "serialise writes it"

    def _reads_the_same(self, golden: Golden, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the tensors, one of which may be optional, still stand for the golden's weight."""
        try:
            weight = self._load(replace(golden, tensors=tensors))
        except Exception:
            return False
        return weight is not None and torch.equal(weight.dequantize(torch.float32), golden.weight.float())

    def _random(
        self, golden: Golden, out_features: int, in_features: int, generator: torch.Generator
    ) -> QuantizedWeight | None:
        """A random weight of the golden's spec whose scales any storage type holds; None for a spec that core does not know."""
        model = self._load(golden)
        assert model is not None
        if model.spec.code not in CODES:
            return None
        spec, code = model.spec, CODES[model.spec.code]
        middle = float((code.low + code.high + 1) // 2)
        symmetric = model.zeros is None or bool((model.zeros == middle).all())
        zeros = "midpoint" if symmetric else "integer"
        weight = random_weight(spec, out_features, in_features, generator, zeros=zeros)
        assert weight.scales is not None
        scales = torch.randint(65, 128, weight.scales.shape, generator=generator) * 2.0**-12
        has_bias = model.bias is not None or (
            "bias" in self.config.suffixes and weight.codes.shape != model.codes.shape
        )
        bias = torch.randint(-64, 64, (out_features,), generator=generator) / 32.0 if has_bias else None
        static = replace(weight, input_scale=model.input_scale, input_zero=model.input_zero)
        return replace(static, scales=scales, bias=bias)


def _layer(golden: Golden) -> LinearLayer:
    out_features, in_features = golden.weight.shape
    return LinearLayer(LAYER, in_features, out_features)


def _sizes(golden: Golden) -> Iterator[tuple[int, int]]:
    """Multiples of the golden's shape, so that whatever must divide it divides them."""
    out_features, in_features = golden.weight.shape
    for rows, columns in ((1, 1), (3, 1), (1, 3), (9, 2), (2, 5)):
        yield rows * out_features, columns * in_features


def _reshaped(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the same data whose shape is wrong in one way."""
    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    for dim, size in enumerate(tensor.shape):
        changes[f"with dimension {dim} one shorter"] = partial(torch.narrow, dim=dim, start=0, length=size - 1)
        changes[f"with dimension {dim} doubled"] = partial(torch.repeat_interleave, repeats=2, dim=dim)
    if tensor.dim() == 2 and 1 < tensor.shape[0] != tensor.shape[1] > 1:
        changes["transposed"] = torch.t
    for what, change in changes.items():
        yield what, change(tensor).contiguous()


def _equal(left: QuantizedWeight, right: QuantizedWeight, name: str) -> bool:
    """Whether a field of both holds the same numbers, whatever the type they are stored in."""
    a, b = getattr(left, name), getattr(right, name)
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(a.double(), b.double())
