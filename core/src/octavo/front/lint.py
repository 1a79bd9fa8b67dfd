"""What looks wrong in a model folder though it may load: facts about files, settings, the tokenizer and sampled numbers.

A finding is an error where octavo would refuse to load, a warning where it would load and probably answer badly, and a note
where a person may want to know. Thresholds are set so that checkpoints of working tools are silent.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from octavo.errors import CheckpointError, OctavoError
from octavo.model.checkpoint import Checkpoint
from octavo.quant.config import TensorInfo
from octavo.quant.weight import CODES, LinearLayer, QuantizedWeight

READ_LIMIT = 32 * 2**20
"""Bytes that `octavo doctor` reads of a model at most, beside the headers of its weights."""

_TOKENIZER_LIMIT = 16 * 2**20
_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "spiece.model", "tokenizer_config.json")
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SAMPLED_NUMBERS = 2**20  # of one layer
_LEAST_NORMAL_FP16 = 2.0**-14


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. `severity` is "error", "warning" or "note"; `kind` is a stable name for scripts."""

    severity: str
    kind: str
    message: str
    file: str | None = None
    tensor: str | None = None
    layer: str | None = None
    expected: str | None = None
    found: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: Exception, kind: str, layer: str | None = None) -> Finding:
        """A refusal as a finding, its facts in fields of their own."""
        if not isinstance(error, OctavoError):
            return cls("error", kind, f"{type(error).__name__}: {error}", layer=layer)
        if not isinstance(error, CheckpointError):
            return cls("error", kind, str(error), layer=layer)
        facts = {name: getattr(error, name) for name in ("file", "tensor", "expected", "found", "hint")}
        stated = {name: str(value) for name, value in facts.items() if value is not None}
        lines = str(error).splitlines()
        told = [line for line in lines if not any(line == f"  {name}: {value}" for name, value in stated.items())]
        return cls("error", kind, "\n".join(told), layer=layer, **stated)

    def __str__(self) -> str:
        facts = (("tensor", self.tensor), ("file", self.file), ("expected", self.expected), ("found", self.found))
        lines = [f"{self.severity}: {self.message}", *(f"  {name}: {value}" for name, value in facts if value)]
        return "\n".join([*lines, f"  hint: {self.hint}"] if self.hint else lines)


@dataclass(slots=True)
class Findings:
    """All findings of one run, each once, and the bytes that may still be read for more."""

    found: list[Finding] = field(default_factory=list)
    bytes_left: int = READ_LIMIT

    def add(self, *findings: Finding) -> None:
        self.found += [
            one for one in dict.fromkeys(findings) if not any(self._same(one, other) for other in self.found)
        ]

    @staticmethod
    def _same(one: Finding, other: Finding) -> bool:
        return (one.message, one.tensor, one.found) == (other.message, other.tensor, other.found)

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.found)

    @contextmanager
    def catching(self, kind: str, layer: str | None = None) -> Iterator[None]:
        """Takes down what is raised, plugins' own exceptions too, and goes on after the block."""
        try:
            yield
        except Exception as error:
            self.add(Finding.of(error, kind, layer))

    def afford(self, num_bytes: int, reserve: int = 0) -> bool:
        """Whether `num_bytes` may be read and still leave `reserve`; they then count as read."""
        if num_bytes > self.bytes_left - reserve:
            return False
        self.bytes_left -= num_bytes
        return True

    @contextmanager
    def collecting_logs(self) -> Iterator[None]:
        """Takes down what octavo and its plugins log as warnings, instead of showing it; other records pass."""
        root = logging.getLogger()
        outer = root.handlers
        root.handlers = [_LogCollector(self, outer)]
        try:
            yield
        finally:
            root.handlers = outer


class _LogCollector(logging.Handler):
    def __init__(self, findings: Findings, outer: Sequence[logging.Handler]) -> None:
        super().__init__(logging.INFO)
        self._findings, self._outer = findings, outer

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.split(".")[0].split("_")[0] != "octavo":
            for handler in self._outer:
                handler.handle(record)
        elif record.levelno >= logging.WARNING:
            self._findings.add(Finding("warning", "log", record.getMessage()))


def unused_files(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files of weights in the folder that no tensor is read from."""
    if not checkpoint.path.is_dir():
        return
    used = {Path(info.file).name for info in checkpoint.tensors.values()}
    index = next((file.name for file in sorted(checkpoint.path.glob("*.index.json"))), None)
    for file in sorted(file for pattern in _WEIGHT_FILES for file in checkpoint.path.glob(pattern)):
        if file.name not in used:
            named = f"; {index} does not name it" if index and file.suffix == ".safetensors" else ""
            yield Finding("note", "unused_file", f"the file is not read{named}", file=str(file))


def scale_types(tensors: dict[str, TensorInfo]) -> Iterator[Finding]:
    """Scales that are stored in different types in different layers."""
    by_suffix: dict[str, dict[torch.dtype, str]] = {}
    for name, info in tensors.items():
        if (suffix := name.rpartition(".")[2]).endswith(("scale", "scales", "scale_inv")):
            by_suffix.setdefault(suffix, {}).setdefault(info.dtype, name)
    for suffix, examples in by_suffix.items():
        if len(examples) > 1:
            shown = ", ".join(f"{dtype} in {name}" for dtype, name in examples.items())
            yield Finding("note", "scale_types", f"'{suffix}' is stored in several types", found=shown)


def tokenizer_facts(
    folder: Path, checkpoint: Checkpoint | None, vocab_size: int | None, findings: Findings
) -> Iterator[Finding]:
    """A tokenizer that is missing, damaged or larger than the embedding, and a missing chat template."""
    file, size = folder / "tokenizer.json", 0
    if file.is_file():
        size = file.stat().st_size
    elif checkpoint is not None and checkpoint.may_hold_tokenizer:
        text = "the tokenizer is taken from the file of the weights, and was not examined"  # to build it takes seconds
        yield Finding("note", "tokenizer", text, file=str(checkpoint.path))
        return
    elif not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        hint = "copy the tokenizer's files from the original model, or name its folder by --tokenizer"
        yield Finding("error", "tokenizer", "the folder holds no tokenizer", file=str(folder), hint=hint)
        return
    if size and size <= _TOKENIZER_LIMIT and findings.afford(size):
        from tokenizers import Tokenizer

        try:
            largest = max(Tokenizer.from_str(file.read_text()).get_vocab().values(), default=-1)
        except Exception as error:  # the library raises bare Exceptions
            yield Finding("error", "tokenizer", f"cannot load the tokenizer: {error}", file=str(file))
            return
        if vocab_size is not None and largest >= vocab_size:
            yield Finding(
                "warning",
                "vocabulary",
                "the tokenizer makes ids for which the model has no embedding: prompts that hold them are refused",
                file=str(file),
                expected=f"ids below {vocab_size}",
                found=f"ids up to {largest}",
            )
    else:
        yield Finding(
            "note", "tokenizer", "the tokenizer is there and was not examined", file=str(file if size else folder)
        )
    yield from _template_facts(folder)


def _template_facts(folder: Path) -> Iterator[Finding]:
    """A missing chat template, and damaged files where it might be."""
    settings, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    found: Any = None
    for file in (settings, template):
        try:
            text = file.read_text(encoding="utf-8") if file.is_file() else "{}"
            found = found or (json.loads(text).get("chat_template") if file is settings else file.is_file())
        except (OSError, ValueError, RecursionError, AttributeError) as error:
            yield Finding("error", "tokenizer", f"cannot load the tokenizer: {error}", file=str(file))
            return
    if not found:
        text = "the model has no chat template: chat requests will be refused"
        yield Finding("note", "chat_template", text, file=str(folder))


def odd_numbers(layer: LinearLayer, weight: QuantizedWeight) -> Iterator[Finding]:
    """What codes, zeros and scales of one layer hardly ever are when they were written and read alike."""
    scales, code = weight.scales, CODES.get(weight.spec.code)
    if scales is None or code is None:
        return

    def suspect(kind: str, message: str, found: str, hint: str | None = None, severity: str = "warning") -> Finding:
        return Finding(severity, kind, message, layer=layer.name, found=found, hint=hint)

    if zero := int((scales == 0).sum()):
        text = f"{zero} of {scales.numel()} scales are 0: all weights of these groups are 0"
        yield suspect("zero_scales", text, f"{zero / scales.numel():.1%}")
    if scales.dtype is torch.float16:
        small = float(((scales != 0) & (scales.abs() < _LEAST_NORMAL_FP16)).float().mean())
        if small > 0.01:
            text = "scales are so small that fp16 holds only some of their digits"
            yield suspect("small_scales", text, f"{small:.1%} below {_LEAST_NORMAL_FP16:.1e}", severity="note")
    if code.dtype not in (torch.uint8, torch.int8):
        return
    weight = weight.slice_out(0, max(_SAMPLED_NUMBERS // weight.in_features, 1))
    assert weight.scales is not None
    low, high = int(weight.codes.min()), int(weight.codes.max())
    if high - low < (code.high - code.low) / 2:
        text = "the codes use less than half of their range"
        yield suspect("code_range", text, f"{low} to {high} of {code.low:g} to {code.high:g}")
    mean = float(replace(weight, scales=torch.ones_like(weight.scales)).dequantize().mean())
    if abs(mean) > 0.5 and code.high - code.low <= 15:  # of more bits, the mean of good weights may be a scale or two
        text = "the weights are not centred: on average they are off by more than half of a scale"
        hint = "zeros stored by one convention and read by another (GPTQ v1, v2) shift all weights by 1 scale"
        yield suspect("mean", text, f"mean of {mean:+.2f} scales", hint)
    if (constant := _constant_groups(weight)) > 0.01:
        text = "groups hold one number only: their range was lost, or their inputs were dead when it was measured"
        yield suspect("constant_groups", text, f"{constant:.1%} of the groups")


def _constant_groups(weight: QuantizedWeight) -> float:
    """The share of groups whose codes are all alike and not 0; 0.0 where groups are of unequal size or smaller than 8."""
    codes, group = weight.codes, weight.spec.group_shape[1]
    group = weight.in_features if group == -1 else group
    if group < 8 or weight.in_features % group or weight.spec.group_shape[0] != 1 or weight.scales is None:
        return 0.0
    if weight.group_index is not None:
        index = weight.group_index.long()
        if not bool((index.bincount(minlength=weight.scales.shape[1]) == group).all()):
            return 0.0
        codes = codes[:, index.argsort()]
    grouped = codes.reshape(codes.shape[0], -1, group)
    alike = (grouped == grouped[..., :1]).all(-1) & (weight.scales != 0)
    if weight.zeros is not None:
        alike &= grouped[..., 0] != weight.zeros
    else:
        alike &= grouped[..., 0] != 0
    return float(alike.float().mean())


def as_json(finding: Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in Finding.__slots__}
