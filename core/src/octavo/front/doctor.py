"""`octavo doctor`: whether a model folder would load and fit, what would run, and what looks wrong, in seconds.

Loading stops at the first refusal; the doctor asks the same questions of the same code one by one, and takes down every
answer. It reads settings, headers of tensors, and at most `READ_LIMIT` bytes more: the tokenizer, scales, a few layers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.attention.kv_format import KVLayout
from octavo.attention.selection import LayoutSelection, select_for_layout
from octavo.config import EngineConfig
from octavo.engine.kv_plan import KVPlan, free_bytes, kv_layout, plan_kv
from octavo.errors import CheckpointError
from octavo.front.lint import Finding, Findings, as_json, scale_types, tokenizer_facts, unused_files
from octavo.front.llm import registry_for
from octavo.front.plan_report import console, plan_json, print_plan
from octavo.front.preflight import check_headers, check_kv_scales, sample, unread
from octavo.model.architectures import DecoderConfig, decoder_config
from octavo.model.checkpoint import Checkpoint, CheckpointReader, open_checkpoint
from octavo.model.decoder import attention_layers
from octavo.model.loader import account
from octavo.model.plan import ModelPlan, end_token_ids
from octavo.plugins import Registry
from octavo.quant.config import TensorInfo

_SEVERITIES = ("error", "warning", "note")


@dataclass(slots=True)
class Diagnosis:
    """What is known of a model folder. Plans are None where an error forbids them.

    `unread_tensors` are what loading would leave in the file, `unread_settings` keys of the quantization settings.
    """

    findings: Findings = field(default_factory=Findings)
    plan: ModelPlan | None = None
    kv_plan: KVPlan | None = None
    attention: LayoutSelection | None = None
    fits: bool | None = None  # None where there is no plan to judge
    free_bytes: int = 0
    has_kv_scales: bool = False
    unread_tensors: list[str] = field(default_factory=list)
    unread_settings: tuple[str, ...] = ()

    @property
    def loads(self) -> bool:
        """Whether nothing that was seen would make octavo refuse the folder; memory is another question."""
        return all(f.severity != "error" or f.kind == "memory" for f in self.findings.found)

    def exit_code(self, strict: bool) -> int:
        warned = strict and any(finding.severity == "warning" for finding in self.findings.found)
        return 1 if warned or self.findings.has_errors else 0

    def as_json(self) -> dict[str, Any]:
        plan = None if self.plan is None else plan_json(self.plan, self.kv_plan, self.attention)
        if plan is not None:
            plan |= {"unread_tensors": self.unread_tensors, "unread_settings": list(self.unread_settings)}
        longest = None if self.kv_plan is None else self.kv_plan.longest_tokens
        verdict = {"loads": self.loads, "fits": self.fits, "longest_tokens": longest, "free_bytes": self.free_bytes}
        return {"verdict": verdict, "findings": [as_json(f) for f in self.findings.found], "plan": plan}


def doctor(config: EngineConfig, *, as_json: bool, strict: bool) -> int:
    """Prints a diagnosis. The exit code is 1 if the model would not load or fit, and with `strict` for any warning; else 0."""
    diagnosis = examine(config)
    if as_json:
        print(json.dumps(diagnosis.as_json(), indent=1))
    else:
        _print(config.model, diagnosis)
    return diagnosis.exit_code(strict)


def examine(config: EngineConfig) -> Diagnosis:
    """Looks at a folder from all sides; raises ConfigError or PluginError only for settings that concern no folder."""
    diagnosis = Diagnosis()
    findings = diagnosis.findings
    with findings.collecting_logs(), torch.inference_mode():
        registry = registry_for(config)
        diagnosis.free_bytes = free_bytes(registry.platform)
        for plugin in registry.failures:
            findings.add(Finding("warning", "plugin", f"plugin {plugin} failed to load: {plugin.reason}"))
        folder = Path(os.path.expanduser(config.model))
        checkpoint, decoder = None, None
        with findings.catching("files"):
            checkpoint = open_checkpoint(config.model, registry.checkpoint_readers)
        known = checkpoint
        if known is None and os.path.isdir(folder):  # its settings may still be readable
            with findings.catching("config"):
                known = Checkpoint(folder, {}, _NoTensors(folder))
                known.config = known.json("config.json")
        if known is not None and known.config:
            with findings.catching("config"):
                decoder = decoder_config(known.config, registry.architectures)
                end_token_ids(known, decoder.vocab_size)
        if checkpoint is not None:
            with findings.catching("files"):
                findings.add(*unused_files(checkpoint), *scale_types(checkpoint.without(config.ignore_tensors)))
        if known is not None:
            vocab_size = None if decoder is None else decoder.vocab_size
            folder = folder if config.tokenizer is None else Path(os.path.expanduser(config.tokenizer))
            with findings.catching("tokenizer"):
                findings.add(*tokenizer_facts(folder, checkpoint, vocab_size, findings))
        if checkpoint is not None:
            _examine_model(config, registry, checkpoint, decoder, diagnosis)
            checkpoint.close()
    findings.found.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    return diagnosis


class _NoTensors(CheckpointReader):
    """Stands for weights that cannot be opened."""

    name = "none"
    tensors: Mapping[str, TensorInfo] = {}

    @classmethod
    def claims(cls, path: Path) -> bool:
        return False

    def __init__(self, path: Path) -> None:
        pass

    def read(self, name: str) -> Tensor:
        raise CheckpointError("the weights cannot be opened", tensor=name)


def _examine_model(
    config: EngineConfig,
    registry: Registry,
    checkpoint: Checkpoint,
    decoder: DecoderConfig | None,
    diagnosis: Diagnosis,
) -> None:
    findings = diagnosis.findings
    plan: ModelPlan | None = None
    with findings.catching("format"):
        plan = ModelPlan.of(config, registry, checkpoint)
    if plan is None:
        # what is missing needs no format to tell
        if decoder is not None and "model.embed_tokens" in checkpoint.modules:
            with findings.catching("tensors"):
                ModelPlan(checkpoint, decoder, None, torch.float32, config, registry).check_complete()
        return
    diagnosis.unread_settings = () if plan.quant is None else plan.quant.unread_keys
    readable = check_headers(plan, findings)
    diagnosis.has_kv_scales = check_kv_scales(plan, findings)
    diagnosis.unread_tensors = unread(plan, readable)
    with findings.catching("unread_tensors"):
        account(plan, diagnosis.unread_tensors)
    sample(plan, readable, findings)
    if plan.head is not None and plan.config.tie_word_embeddings:
        text = f"config.json says that the head is tied, but {plan.head.name} is stored: it is used where it differs"
        stored = next(iter(checkpoint.stored(plan.head.name).values()))
        findings.add(Finding("note", "tied_head", text, file=stored.file, tensor=stored.name))
    if any(finding.kind in ("tensors", "layer", "kernel") for finding in findings.found):
        return  # the table of kernels would have holes
    with findings.catching("format"):
        plan.fill()
        diagnosis.plan = plan
        _check_memory(plan, diagnosis)


# --- memory


def _check_memory(plan: ModelPlan, diagnosis: Diagnosis) -> None:
    config, findings, registry = plan.settings, diagnosis.findings, plan.registry
    layout = None
    with findings.catching("kv_format"):
        layout = kv_layout(plan)
    if layout is None:
        return
    with findings.catching("attention"):
        layers, backends = attention_layers(plan.config), registry.attention_backends
        diagnosis.attention = select_for_layout(layout, layers, registry.platform, backends, config.attention_backend)
    if diagnosis.has_kv_scales and not any(kv_format.uses_scales for kv_format in layout.formats):
        findings.add(_unused_scales(layout))
    if config.max_model_len is not None and config.max_model_len > plan.config.max_positions:
        kind = "settings"
    elif plan.resident_bytes > diagnosis.free_bytes:
        diagnosis.fits = False
        need, free = (f"{n / 2**30:,.2f} GiB" for n in (plan.resident_bytes, diagnosis.free_bytes))
        text, hint = "the weights do not fit into memory", "use a checkpoint of fewer bits, or free memory"
        findings.add(Finding("error", "memory", text, expected=f"about {need} free", found=free, hint=hint))
        return
    else:
        kind = "memory"
    with findings.catching(kind):
        diagnosis.kv_plan = plan_kv(config, plan.config, layout, registry.platform, plan.resident_bytes)
    if kind == "memory":
        diagnosis.fits = diagnosis.kv_plan is not None


def _unused_scales(layout: KVLayout) -> Finding:
    """Says that the checkpoint's calibrated scales stay unused: harmless where K and V keep 16 bits or bring their own."""
    text = f"the checkpoint's KV scales are not used: K and V are stored as '{layout.name}'"
    if all(kv_format.storage.itemsize > 1 or kv_format.has_scales for kv_format in layout.formats):
        return Finding("note", "kv_scales_unused", text)
    return Finding("warning", "kv_scales_unused", f"{text}, in 8 bits without a scale")


# --- showing


def _print(model: str, diagnosis: Diagnosis) -> None:
    plan = diagnosis.plan
    if plan is not None:
        print_plan(plan, diagnosis.kv_plan, diagnosis.attention)
    output = console()
    for finding, count in _alike(diagnosis.findings.found):
        output.print(f"{finding}{f'{chr(10)}  and {count - 1} more like this' if count > 1 else ''}")
    fits = {True: "yes", False: "no", None: "unknown"}[diagnosis.fits]
    memory = "" if plan is None else f" (weights about {plan.resident_bytes / 2**20:,.0f} MiB of "
    memory += f"{diagnosis.free_bytes / 2**20:,.0f} MiB free)" if memory else ""
    longest = "" if diagnosis.kv_plan is None else f"; longest context: {diagnosis.kv_plan.longest_tokens:,} tokens"
    counts = ((s, sum(f.severity == s for f in diagnosis.findings.found)) for s in _SEVERITIES)
    counted = ", ".join(f"{n} {severity}{'s' * (n != 1)}" for severity, n in counts if n) or "nothing to report"
    output.print(f"{model}: loads: {'yes' if diagnosis.loads else 'no'}; fits: {fits}{memory}{longest}; {counted}")


def _alike(found: list[Finding]) -> Iterator[tuple[Finding, int]]:
    """The first of each run of findings that differ by numbers only, and how many there are."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in found:
        key = (
            finding.severity,
            finding.kind,
            re.sub(r"\d+", "*", finding.message),
            (finding.tensor or "").rpartition(".")[2],
        )
        groups.setdefault(key, []).append(finding)
    yield from ((group[0], len(group)) for group in groups.values())
