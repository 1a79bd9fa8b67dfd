"""Damaged checkpoints: small folders of every format, ways to damage their descriptions, and what may come of it.

A description is what says how numbers are meant: headers, index, settings. Damage to it must end in one of octavo's errors or
change nothing. Where it rightly changes the model, `excuse` knows it by name.
"""

from __future__ import annotations

import io
import json
import math
import random
import resource
import runpy
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from convert_support import quantised_model
from safetensors.torch import load_file, save_file
from support import registry

from octavo import (
    ActivationSpec,
    EngineConfig,
    KVGeometry,
    OctavoError,
    PlainKV,
    QuantSource,
    SamplingParams,
    Step,
    WeightSpec,
)
from octavo.attention.backend import AttentionRequest
from octavo.attention.kv_format import AttentionStep, PagedKV
from octavo.attention.reference import ReferenceAttention
from octavo.engine.executor import ModelInfo
from octavo.engine.request import Request
from octavo.engine.runner import Runner
from octavo.model.checkpoint import open_checkpoint
from octavo.model.decoder import attention_layers
from octavo.model.loader import LoadedModel, load_model
from octavo.model.plan import end_token_ids, plan_model
from octavo.testing import tiny_model

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 8,
    "num_hidden_layers": 2,
}
PROMPT = [1, 5, 9, 60, 200, 33]
ALLOWED_BYTES, ALLOWED_CPU_SECONDS = 2**29, 30.0
"""What one input may take beyond what the process holds, and how long: a thousand times what a healthy one needs."""
REGISTRY = registry()

Json = Any
Outcome = tuple[torch.Tensor, ...]


# --- folders


def _per_layer(name: str, *tensors: torch.Tensor, **scales: float) -> dict[str, torch.Tensor]:
    return {f"model.layers.{i}.{name}.{k}": torch.tensor([v]) for i in range(2) for k, v in scales.items()}


def _float(folder: Path) -> None:
    tiny_model(folder, "Qwen2ForCausalLM", dtype=torch.float16, shards=2, **SMALL)


def _kv_scales(folder: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    settings = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme}
    tiny_model(folder, settings=settings, dtype=torch.bfloat16, tie=True, **SMALL)
    stored = load_file(folder / "model.safetensors")
    save_file(stored | _per_layer("self_attn", k_scale=0.5, v_scale=0.25), folder / "model.safetensors")


def _quantised(target: str, spec: WeightSpec, **options: Any) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        quantised_model(folder, target, spec, sizes=SMALL, **options)

    return build


def _symmetric_gptq(bits: int, group_size: int) -> Callable[[Path], None]:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": True, "desc_act": False}

    def build(folder: Path) -> None:
        config = REGISTRY.quant_configs["gptq"].parse(QuantSource(settings, "test"))
        spec = WeightSpec(f"uint{bits}", (1, group_size))
        tiny_model(folder, quantize=(config, spec), settings=settings, **SMALL)

    return build


def _side_file(folder: Path) -> None:
    """GPTQ with its settings where AutoGPTQ put them."""
    quantised_model(folder, "gptq", WeightSpec("uint4", (1, 32), True), sizes=SMALL)
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    settings.pop("quant_method")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps({**settings, "group_size": 32, "desc_act": False}))


def _gguf(folder: Path) -> None:
    source = tiny_model(folder / "source", **SMALL)
    tools = runpy.run_path(str(ROOT / "plugins" / "gguf" / "tests" / "conftest.py"))
    tools["write_gguf"](source, folder / "model.gguf", tools["TYPES"].Q4_1, tools["TYPES"].Q8_0)
    for file in sorted(source.iterdir()):
        file.unlink()
    source.rmdir()


def _bin(folder: Path) -> None:
    """AWQ in a pickle, as the first AutoAWQ wrote it."""
    quantised_model(folder, "awq", WeightSpec("uint4", (1, 32), True), sizes=SMALL)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


_TOKEN, _STATIC = ActivationSpec("int8"), ActivationSpec("int8", "per_tensor", dynamic=False, symmetric=False)
_GROUPS = ActivationSpec("fp8_e4m3", "per_group", group_size=32)
_STATIC_FP8 = ActivationSpec("fp8_e4m3", "per_tensor", dynamic=False)
FOLDERS: Mapping[str, Callable[[Path], None]] = {
    "float": _float,
    "kv_scales": _kv_scales,
    "awq": _quantised("awq", WeightSpec("uint4", (1, 32), True), shards=2),
    "gptq": _symmetric_gptq(bits=4, group_size=32),
    "gptq_side_file": _side_file,
    "gptq_ordered": _quantised("gptq_v2", WeightSpec("uint4", (1, 16), True, act_order=True)),
    "gptq_channel": _symmetric_gptq(bits=8, group_size=-1),
    "ct_packed": _quantised("compressed-tensors", WeightSpec("uint4", (1, 32), True)),
    "ct_tokens": _quantised("compressed-tensors", WeightSpec("int8", (1, -1), activation=_TOKEN)),
    "ct_static": _quantised("compressed-tensors", WeightSpec("int8", (1, -1), activation=_STATIC)),
    "fp8_static": _quantised("fp8", WeightSpec("fp8_e4m3", (-1, -1), activation=_STATIC_FP8)),
    "fp8_blocks": _quantised("fp8", WeightSpec("fp8_e4m3", (16, 32), activation=_GROUPS)),
    "w8a8_int8": _quantised("w8a8_int8", WeightSpec("int8", (1, -1), activation=_TOKEN)),
    "bin": _bin,
    "gguf": _gguf,
}


@dataclass
class Subject:
    """A healthy folder, what it computes, and the files of it that describe something."""

    name: str
    folder: Path
    outcome: Outcome
    healthy: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def build(cls, name: str, folder: Path) -> Subject:
        folder.mkdir()
        FOLDERS[name](folder)
        for leftover in ("tokenizer.json", "tokenizer_config.json"):
            (folder / leftover).unlink(missing_ok=True)
        outcome = load(folder)
        assert outcome[0].isfinite().all()
        assert outcome[0].std() > 0.1
        return cls(name, folder, outcome, {file.name: file.read_bytes() for file in sorted(folder.iterdir())})

    @property
    def settings_files(self) -> list[str]:
        return [name for name in self.healthy if name.endswith("config.json") and name != "generation_config.json"]

    @property
    def tensor_files(self) -> list[str]:
        return [name for name in self.healthy if name.endswith((".safetensors", ".gguf", ".bin"))]

    def front(self, name: str) -> int:
        """How far the description reaches into a healthy file."""
        if name.endswith(".gguf"):
            from octavo_gguf.header import read_header

            return min(tensor.start for tensor in read_header(self.folder / name).tensors)
        content = self.healthy[name]
        return 8 + int.from_bytes(content[:8], "little") if name.endswith(".safetensors") else len(content)

    def with_file(self, name: str, content: bytes) -> None:
        """Replaces a file by a new one, because the old one may still be mapped."""
        new = self.folder / "new"
        new.write_bytes(content)
        new.rename(self.folder / name)


def load(folder: Path) -> Outcome:
    """Plans and loads a folder; the logits of a prompt, and the scales of its KV cache."""
    settings = EngineConfig(model=str(folder), max_model_len=64, disable_progress=True)
    checkpoint = open_checkpoint(settings.model, REGISTRY.checkpoint_readers)
    try:
        plan = plan_model(settings, REGISTRY, checkpoint)
        end_token_ids(checkpoint, plan.config.vocab_size)
        loaded = load_model(settings, REGISTRY, checkpoint)
        return (_logits(loaded), *(scale for scales in loaded.kv_scales for scale in (scales.k, scales.v)))
    finally:
        checkpoint.close()


@torch.inference_mode()
def _logits(loaded: LoadedModel) -> torch.Tensor:
    config, platform = loaded.plan.config, REGISTRY.platform
    layers = attention_layers(config)
    geometry = KVGeometry(config.num_layers, config.kv_heads, config.head_dim, 16, torch.float32)
    kv = PagedKV(PlainKV(geometry), layers, 2, "cpu")
    backend = ReferenceAttention(AttentionRequest(layers, torch.float32, 16, torch.float32, platform))
    info = ModelInfo(config.vocab_size, 64, frozenset())
    runner = Runner.with_model(loaded.decoder, kv, backend, info, REGISTRY)
    request = Request("probe", PROMPT[: config.max_positions], SamplingParams())
    request.block_ids = [0]
    batch, ids, positions = runner._batch(Step([request], [len(request.token_ids)], [], len(request.token_ids)))
    hidden = runner.model.forward(ids, positions, AttentionStep(batch, backend, backend.plan(batch), kv))
    return runner.model.logits(hidden)


# --- bounds


@contextmanager
def bounded() -> Iterator[None]:
    """No more memory than `ALLOWED_BYTES` beyond what is mapped now, no more time than `ALLOWED_CPU_SECONDS`."""

    def out_of_time(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {ALLOWED_CPU_SECONDS} seconds")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ALLOWED_BYTES, hard))
    before = signal.signal(signal.SIGVTALRM, out_of_time)
    signal.setitimer(signal.ITIMER_VIRTUAL, ALLOWED_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# --- what descriptions say


def described(name: str, content: bytes) -> dict[str, Json]:
    """All that a file says, by path; empty where it is no such file any more."""
    try:
        if name.endswith(".safetensors"):
            length = int.from_bytes(content[:8], "little")
            says = json.loads(content[8 : 8 + length])
            says = {
                tensor: {k: entry[k] for k in ("dtype", "shape")} for tensor, entry in says.items() if tensor[0] != "_"
            }
            return dict(_leaves({t: {**entry, "shape": repr(entry["shape"])} for t, entry in says.items()}))
        return {} if name.endswith(".gguf") else dict(_leaves(json.loads(content)))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return {}


def _leaves(value: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}/{key}" if path else str(key))
    else:
        yield path, value


FREE = (
    *("rope_theta", "rope_parameters*", "rope_scaling*", "rms_norm_eps", "hidden_act", "text_config*"),
    "quantization_config/config_groups/*/input_activations*",
)
"""Settings that change the model and that nothing stored could contradict."""


def excuse(subject: Subject, file: str, content: bytes) -> str | None:
    """The change of a description that rightly changes the model, None where there is none."""
    before, after = described(file, subject.healthy[file]), described(file, content)
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if same(old, new):
            continue
        if any(fnmatchcase(path, pattern) for pattern in FREE) or _undecidable(subject, path, old, new):
            return f"{path}: {old!r} -> {new!r}"
    return None


def _undecidable(subject: Subject, path: str, old: Json, new: Json) -> bool:
    """Changes that leave a description which is as good as the old one."""
    halves = {"F16", "BF16"}
    if path.endswith("/dtype") and {old, new} == halves:
        return True  # 16 bits mean other numbers
    if path.endswith(("k_scale/dtype", "v_scale/dtype")) and new is None:
        return True  # one scale serves both K and V (Q61)
    if subject.name == "ct_packed" and path.endswith("weights/group_size") and type(new) is int:
        return 32 <= new < 64  # 32 and 64 inputs in 1 and 2 groups, the last one short (Q38)
    if subject.name == "fp8_blocks" and path.endswith("weight_block_size"):
        return [-(-size // block) for size, block in ((64, new[0]), (32, new[0]), (64, new[1]), (32, new[1]))] == [
            4,
            2,
            2,
            1,
        ]
    if path.endswith("weight_zero_point/dtype") and new is None:
        return True  # zero points that are all 0 need not be stored (Q21)
    asymmetric = subject.name in ("gptq_ordered", "gptq_side_file")
    return asymmetric and path.endswith(("checkpoint_format", "/format"))  # zeros of v1 or v2: nothing else tells


def same(old: Json, new: Json) -> bool:
    if isinstance(old, float) and isinstance(new, float) and math.isnan(old) and math.isnan(new):
        return True
    return type(old) is type(new) and bool(old == new)


# --- the judgement


def judge(subject: Subject, file: str, content: bytes) -> str | None:
    """Loads the folder with a damaged file: what is wrong with the outcome, None where it is as it must be."""
    subject.with_file(file, content)
    try:
        with bounded():
            found = load(subject.folder)
    except OctavoError as error:
        return None if str(error).strip() else "a refusal without a word"
    except BaseException as error:  # whatever else it is, it is not ours
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        subject.with_file(file, subject.healthy[file])
    whole = len(found[0]) == len(PROMPT)
    expected = [subject.outcome[0][: len(found[0])], *subject.outcome[1:]]
    # products of fewer rows are rounded otherwise
    equal = len(found) == len(expected) and all(map(torch.equal if whole else close, found, expected))
    return None if equal or excuse(subject, file, content) is not None else "loaded, and computes something else"


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-4)


# --- damage


def flip(chosen: random.Random, content: bytes, end: int, start: int = 0) -> bytes:
    """1 to 3 bytes from `start` to `end` changed, or in some cases the file cut off there, or bytes put in or taken out."""
    kind, at = chosen.randrange(16), chosen.randrange(start, end)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[at + chosen.randint(1, 9) :]
    if kind == 2:
        return content[:at] + chosen.randbytes(chosen.randint(1, 9)) + content[at:]
    damaged = bytearray(content)
    for _ in range(chosen.randint(1, 3)):
        at = chosen.randrange(start, end)
        damaged[at] = chosen.choice([damaged[at] ^ 1 << chosen.randrange(8), chosen.randrange(256), *b'0189"[{,-'])
    return bytes(damaged)


_DEEP = "[" * 400 + "]" * 400
VALUES: tuple[Json, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 96, 128, 1024, 10**6),
    *(2**31 - 1, 2**31, -(2**31), 2**63, 2**64, 10**40, 0.0, -0.0, 0.5, 1.5, 4.0, 32.0, 1e-300, 1e308),
    *(math.nan, math.inf, -math.inf, "", " ", "0", "4", "32", "-1", "null", "group", "tensor", "channel", "token"),
    *("int", "float", "gptq", "gptq_v2", "awq", "gemm", "gemv", "fp8", "compressed-tensors", "w8a8_int8", "gguf"),
    *("marlin", "auto-round", "static", "dynamic", "re:.*", "re:(", "Linear", "lm_head", "int64", "float32", "silu"),
    *("yarn", "llama3", "linear", "\u202e\u0000é", "\ud800", "model.layers.0.mlp.up_proj", "x" * 5000),
    *([], {}, [[]], [None], [0], [1, 2, 3], [32, 32], ["Linear"], {"": 0}, {"bits": 8}, {"x": {"y": []}}),
    *([0] * 1000, json.loads(_DEEP)),
)
KEYS = (
    *(
        "text_config",
        "compression_config",
        "quantization_config",
        "rope_scaling",
        "rope_parameters",
        "head_dim",
        "bits",
    ),
    *(
        "sliding_window",
        "attention_bias",
        "mlp_bias",
        "layer_types",
        "max_window_layers",
        "use_sliding_window",
        "dtype",
    ),
    *("group_size", "sym", "zero_point", "desc_act", "checkpoint_format", "format", "dynamic", "lm_head", "version"),
    *("w_bit", "q_group_size", "pack_dtype", "meta", "backend", "method", "activation_scheme", "weight_block_size"),
    *("kv_cache_scheme", "config_groups", "ignore", "quant_method", "quant_algo", "modules_to_not_convert", "actorder"),
    *("is_marlin_format", "num_bits", "strategy", "symmetric", "type", "block_structure", "targets", "weights"),
)


def change_json(chosen: random.Random, value: Json) -> Json:
    """A JSON value with one thing changed somewhere: a key gone, another type, a number beyond all bounds, ..."""
    if isinstance(value, dict | list) and value and chosen.random() < 0.85:
        key = chosen.choice(list(value)) if isinstance(value, dict) else chosen.randrange(len(value))
        if isinstance(value, dict) and isinstance(value.get("quantization_config"), dict) and chosen.random() < 0.5:
            key = "quantization_config"
        changed = dict(value) if isinstance(value, dict) else list(value)
        kind = chosen.random()
        if kind < 0.12:
            del changed[key]
        elif kind < 0.2 and isinstance(changed, dict):
            changed[chosen.choice(KEYS)] = chosen.choice(VALUES)
        elif kind < 0.26 and isinstance(changed, dict):
            name = chosen.choice([key.upper(), f"{key} ", key[:-1], chosen.choice(KEYS)])
            changed[name] = changed.pop(key)
        elif kind < 0.3:
            other = chosen.choice(list(value)) if isinstance(value, dict) else chosen.randrange(len(value))
            changed[key], changed[other] = changed[other], changed[key]
        else:
            changed[key] = change_json(chosen, value[key])
        return changed
    if type(value) in (int, float) and chosen.random() < 0.4:
        return chosen.choice([value + 1, value - 1, value * 2, value // 2, -value, float(value), str(value), [value]])
    if isinstance(value, str) and chosen.random() < 0.3:
        return chosen.choice([value.upper(), value[:-1], value + "x", [value], {value: value}, value * 2])
    return chosen.choice(VALUES)


def json_bytes(value: Json) -> bytes:
    return json.dumps(value).encode()


DTYPES = [
    "F64",
    "F32",
    "F16",
    "BF16",
    "I64",
    "I32",
    "I16",
    "I8",
    "U8",
    "U32",
    "BOOL",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "X",
]
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}
SUFFIXES = (
    "weight",
    "bias",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_scale",
    "weight_packed",
    "input_scale",
    "x",
)


def change_header(chosen: random.Random, content: bytes) -> bytes:
    """One entry of a safetensors header changed; in most cases so that the file as a whole stays sound."""
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Json] = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    metadata = header.pop("__metadata__", None)
    parts = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    name = chosen.choice(list(header))
    entry, kind = header[name], chosen.randrange(10)
    if kind == 0:
        del header[name], parts[name]
    elif kind == 1:
        new = f"{name.rpartition('.')[0]}.{chosen.choice(SUFFIXES)}"
        new = chosen.choice([new, name.replace("layers.1", "layers.2"), name.upper(), name[6:], f"{name}.weight"])
        header[new], parts[new] = header.pop(name), parts.pop(name)
    elif kind in (2, 3):
        entry["dtype"] = chosen.choice(DTYPES)
        if entry["shape"] and chosen.random() < 0.7:  # as many bytes as before
            entry["shape"][-1] = len(parts[name]) // WIDTHS.get(entry["dtype"], 1)
            entry["shape"][-1] //= math.prod(entry["shape"][:-1]) or 1
    elif kind in (4, 5):
        shape, count = entry["shape"], math.prod(entry["shape"])
        entry["shape"] = chosen.choice(
            [shape[::-1], [count], [1, *shape], [*shape, 1], [count // 2, 2], [], [0], [2**40, 2**40], [-1], shape * 2]
        )
    elif kind == 6:
        entry[chosen.choice(list(entry))] = chosen.choice(VALUES)
    elif kind == 7:  # half of it, said to be all
        entry["shape"] = [*entry["shape"][:-1], entry["shape"][-1] // 2] if entry["shape"] else [2]
        parts[name] = parts[name][: len(parts[name]) // 2]
    elif kind == 8:
        return content[:8] + json_bytes(change_json(chosen, header)) + data
    else:
        entry["data_offsets"] = [at + chosen.choice([0, 1, -1, 32, 2**40]) for at in entry["data_offsets"]]
    if kind not in (6, 9):
        at = 0
        for other, part in parts.items():
            header[other]["data_offsets"], at = [at, at + len(part)], at + len(part)
        data = b"".join(parts.values())
    text = json_bytes({"__metadata__": metadata, **header} if metadata else header)
    return len(text).to_bytes(8, "little") + text + data


def change_gguf(chosen: random.Random, content: bytes, end: int) -> bytes:
    """One number of a GGUF header replaced by another of its width, or one name by another of its length."""
    names = [b"general.architecture", b"general.alignment", b"llama.", b"blk.0.", b"blk.1.", b"output", b"token_embd"]
    name = chosen.choice([n for n in names if n in content])
    starts = [at for at in range(end) if content.startswith(name, at)]
    start = chosen.choice(starts)
    length = int.from_bytes(content[start - 8 : start], "little")
    damaged = bytearray(content)
    if chosen.random() < 0.15:
        other = chosen.choice(starts)
        size = int.from_bytes(content[other - 8 : other], "little")
        return content[: start - 8] + content[other - 8 : other + size] + content[start + length :]
    width = chosen.choice([4, 8])
    at = min(start + length + chosen.choice([0, 4, 8, 12, 16, 20, 24, 28]), end - width)
    number = chosen.choice([0, 1, 2, 3, 4, 7, 8, 12, 16, 30, 32, 64, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])
    if chosen.random() < 0.5:
        old = int.from_bytes(content[at : at + width], "little")
        number = chosen.choice([old + 1, old - 1, old * 2, old // 2, old ^ 1 << chosen.randrange(8 * width), old + 32])
    if width == 4 and chosen.random() < 0.2:
        damaged[at : at + 4] = struct.pack("<f", chosen.choice([0.0, 1.0, -1.0, 1e-6, 1e30, math.nan, math.inf]))
    else:
        damaged[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(damaged)


# --- inputs


def _settings(subject: Subject, chosen: random.Random) -> tuple[str, bytes]:
    file = chosen.choice(subject.settings_files)
    return file, subject.healthy[file]


def _flipped_settings(subject: Subject, chosen: random.Random) -> tuple[str, bytes]:
    file, content = _settings(subject, chosen)
    return file, flip(chosen, content, len(content))


def _changed_settings(subject: Subject, chosen: random.Random) -> tuple[str, bytes]:
    file, content = _settings(subject, chosen)
    return file, json_bytes(change_json(chosen, json.loads(content)))


def _flipped_header(subject: Subject, chosen: random.Random) -> tuple[str, bytes]:
    file = chosen.choice(subject.tensor_files)
    content = subject.healthy[file]
    if file.endswith(".bin"):  # a zip file: the pickle is its first part, the list of parts its end
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            second = sorted(part.header_offset for part in archive.infolist())[1]
            start, end = chosen.choice([(0, second), (archive.start_dir, len(content))])
        return file, flip(chosen, content, end, start)
    return file, flip(chosen, content, subject.front(file))


def _changed_header(subject: Subject, chosen: random.Random) -> tuple[str, bytes]:
    file = chosen.choice(subject.tensor_files)
    content = subject.healthy[file]
    if file.endswith(".gguf"):
        return file, change_gguf(chosen, content, subject.front(file))
    return file, change_header(chosen, content)


def _changed_index(subject: Subject, chosen: random.Random) -> tuple[str, bytes]:
    file = "model.safetensors.index.json"
    content = subject.healthy[file]
    if chosen.random() < 0.4:
        return file, flip(chosen, content, len(content))
    return file, json_bytes(change_json(chosen, json.loads(content)))


DAMAGE: Mapping[str, Callable[[Subject, random.Random], tuple[str, bytes]]] = {
    "flipped_settings": _flipped_settings,
    "changed_settings": _changed_settings,
    "flipped_header": _flipped_header,
    "changed_header": _changed_header,
    "changed_index": _changed_index,
}


def damage(subject: Subject, kind: str, seed: int) -> tuple[str, bytes]:
    """(file, its new content) of one input: the same for the same seed."""
    return DAMAGE[kind](subject, random.Random(f"{subject.name} {kind} {seed}"))
