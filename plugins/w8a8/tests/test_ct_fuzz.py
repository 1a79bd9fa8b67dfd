"""Damaged settings and headers: every answer is a scheme, None or a refusal that octavo knows."""

import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import CheckpointError, LinearLayer, QuantSource, TensorInfo
from octavo_w8a8.compressed_tensors import CompressedTensorsConfig
from octavo_w8a8.goldens import goldens, optional_zeros

GOLDENS = [*goldens(), *optional_zeros()]
LAYER = "model.layers.0.mlp.up_proj"
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.sampled_from(["group", "tensor", "block", "int", "float", "local", "0x3", "re:(", "Linear", "W4A16", "NVFP4"])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
TYPES = [
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.bits8,
]


def outcome(action, *arguments):
    """What an action gives, or None where it refuses; any other exception passes."""
    try:
        return action(*arguments)
    except CheckpointError:
        return None


def places(value, path=()):
    """Paths of all values in a nested object."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(golden=st.sampled_from(GOLDENS), data=st.data())
def test_damaged_settings_are_understood_or_refused(golden, data):
    raw = copy.deepcopy(golden.settings)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([p for p in places(raw) if p]))
        holder = raw
        for key in path[:-1]:
            holder = holder[key]
        if isinstance(holder, dict) and data.draw(st.booleans()):
            holder[data.draw(st.sampled_from([*holder, "weights", "strategy", "dynamic"]))] = data.draw(VALUES)
        else:
            holder[path[-1]] = data.draw(VALUES)
    source = QuantSource(raw, "fuzz")
    assert CompressedTensorsConfig.detect(source, {}) in (True, False)
    config = outcome(CompressedTensorsConfig.parse, source)
    if config is None:
        return
    outcome(lambda: config.kv_cache)
    layer = LinearLayer(LAYER, golden.weight.shape[1], golden.weight.shape[0])
    headers = {s: TensorInfo(f"{LAYER}.{s}", t.dtype, tuple(t.shape), "fuzz") for s, t in golden.tensors.items()}
    spec = outcome(config.spec_for, layer, headers)
    if spec is not None and (weight := outcome(config.canonicalise, layer, golden.tensors)) is not None:
        outcome(weight.check, layer)
    again = CompressedTensorsConfig.parse(QuantSource(config.settings(), "again"))
    assert again.model_dump() == config.model_dump()


@settings(max_examples=200, deadline=None)
@given(golden=st.sampled_from(GOLDENS), data=st.data())
def test_damaged_headers_are_refused(golden, data):
    """One header is changed. What is still accepted must be unquantised, or mean what it meant before."""
    config = CompressedTensorsConfig.parse(QuantSource(golden.settings, "fuzz"))
    layer = LinearLayer(LAYER, golden.weight.shape[1], golden.weight.shape[0])
    headers = {s: TensorInfo(f"{LAYER}.{s}", t.dtype, tuple(t.shape), "fuzz") for s, t in golden.tensors.items()}
    before = config.spec_for(layer, headers)
    suffix = data.draw(st.sampled_from([*CompressedTensorsConfig.suffixes, "meta", "weight_global_scale"]))
    if data.draw(st.booleans()):
        headers.pop(suffix, None)
    else:
        shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 12, 32]), max_size=3)))
        headers[suffix] = TensorInfo(f"{LAYER}.{suffix}", data.draw(st.sampled_from(TYPES)), shape, "fuzz")
    after = outcome(config.spec_for, layer, headers)
    optional = suffix in ("weight_zero_point", "weight_g_idx")
    assert after is None or after == before or optional
