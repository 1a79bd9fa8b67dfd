"""What the commands of the command line do, once their arguments are parsed."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from octavo.attention.selection import AttentionSelection, attention_request, select_attention
from octavo.config import EngineConfig
from octavo.engine.kv_plan import KVPlan, choose_kv_format, kv_geometry, plan_kv
from octavo.engine.sampling_params import SamplingParams
from octavo.errors import PluginError
from octavo.front.llm import LLM, registry_for
from octavo.front.output_processor import TextDelta
from octavo.model.checkpoint import open_checkpoint
from octavo.model.decoder import attention_layers
from octavo.model.plan import LinearReport, ModelPlan, plan_model
from octavo.platforms import Platform
from octavo.plugins import discover


def generate(config: EngineConfig, prompts: list[str], params: SamplingParams, *, chat: bool, as_json: bool) -> int:
    """Streams completions to stdout and a summary line to stderr. One prompt streams; several are shown one after another."""
    llm = LLM(config)
    inputs: list[Any] = list(prompts)
    if chat:
        messages = [[{"role": "user", "content": text}] for text in prompts]
        inputs = [
            {"prompt": p, "prompt_token_ids": llm.tokenizer.chat(m)} for p, m in zip(prompts, messages, strict=True)
        ]
    start = time.monotonic()
    printer = _Printer(as_json, several=len(prompts) * params.n > 1)
    for delta in llm.stream(inputs, params):
        printer.show(delta)
    elapsed = time.monotonic() - start
    print(_summary(llm, printer, elapsed), file=sys.stderr)
    return 1 if printer.failed else 0


class _Printer:
    """Writes deltas in the order of prompts and sequences: the first unfinished one streams, later ones wait."""

    def __init__(self, as_json: bool, several: bool) -> None:
        self.as_json, self.several = as_json, several
        self.tokens, self.first_token_s = 0, []  # type: int, list[float]
        self.failed: set[int] = set()
        self._pending: dict[tuple[int, int], list[str]] = {}
        self._done: set[tuple[int, int]] = set()
        self._current: tuple[int, int] = (0, 0)
        self._sizes: dict[int, int] = {}
        self._titles: dict[int, str] = {}
        self._titled = False

    def show(self, delta: TextDelta) -> None:
        output, completion = delta.output, delta.completion
        request = int(output.request_id)
        if delta.finished:
            self.tokens += len(completion.token_ids)
            if delta.sequence_index == 0 and output.metrics.time_to_first_token_s:
                self.first_token_s.append(output.metrics.time_to_first_token_s)
            if completion.finish_reason == "error" and request not in self.failed:
                self.failed.add(request)
                print(f"octavo: prompt {request} failed: {completion.stop_reason}", file=sys.stderr)
        if self.as_json:
            if delta.finished:
                record = {"request": request, "prompt": output.prompt, **asdict(completion)}
                if output.prompt_logprobs is not None:
                    record["prompt_logprobs"] = asdict(output)["prompt_logprobs"]
                print(json.dumps(record), flush=True)
            return
        key = (request, delta.sequence_index)
        self._sizes[request] = len(output.outputs)
        self._titles[request] = output.prompt or ""
        self._pending.setdefault(key, []).append(delta.text)
        if delta.finished:
            self._done.add(key)
        while self._flush():
            pass

    def _flush(self) -> bool:
        """Prints what is known of the current sequence; True if it is complete and the next may follow."""
        request, index = self._current
        if self._current not in self._pending:
            return False
        if self.several and not self._titled:
            number = f" [{index}]" if self._sizes[request] > 1 else ""
            print(f"=== {self._titles[request]}{number}", flush=True)
            self._titled = True
        print("".join(self._pending[self._current]), end="", flush=True)
        self._pending[self._current].clear()
        if self._current not in self._done:
            return False
        print(flush=True)
        self._current = (request, index + 1) if index + 1 < self._sizes[request] else (request + 1, 0)
        self._titled = False
        return True


def _summary(llm: LLM, printer: _Printer, elapsed: float) -> str:
    stats = llm.stats()
    first = sum(printer.first_token_s) / max(len(printer.first_token_s), 1)
    kernels = sorted({f"{r.kernel} ({r.spec})" for r in llm.engine.model_info.linears})
    return (
        f"{printer.tokens} tokens in {elapsed:.2f} s = {printer.tokens / max(elapsed, 1e-9):.1f} tokens/s; "
        f"TTFT {first * 1000:.0f} ms; KV use at most {stats.scheduler.peak_blocks:,} of {stats.num_blocks:,} blocks; "
        f"prefix hits {stats.prefix_hit_rate:.0%}; preemptions {stats.scheduler.num_preemptions}; "
        f"kernels: {', '.join(kernels)}"
    )


def inspect(config: EngineConfig, *, as_json: bool, every_layer: bool) -> int:
    """Prints the kernel table and the KV plan of a checkpoint, from its headers alone."""
    registry = registry_for(config)
    checkpoint = open_checkpoint(config.model, registry.checkpoint_readers)
    plan = plan_model(config, registry, checkpoint)
    geometry = kv_geometry(plan.config, config.block_size, plan.dtype)
    kv_format = choose_kv_format(config.kv_cache_dtype, registry.kv_formats, geometry)
    kv_plan = plan_kv(config, plan.config, kv_format, registry.platform, plan.resident_bytes)
    request = attention_request(attention_layers(plan.config), kv_format, registry.platform)
    attention = select_attention(request, registry.attention_backends, config.attention_backend)
    if as_json:
        print(json.dumps(_plan_json(plan, kv_plan, attention), indent=1))
    else:
        _print_plan(plan, kv_plan, attention, every_layer)
    return 0


def _console() -> Any:
    """Standard output for tables: as wide as the terminal, or wide enough for any table where there is none."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return Console(markup=False, highlight=False, soft_wrap=True, width=width)


def _plan_json(plan: ModelPlan, kv_plan: KVPlan, attention: AttentionSelection) -> dict[str, Any]:
    return {
        "model": plan.settings.model,
        "format": plan.quant.name if plan.quant else None,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "linears": [asdict(report) for report in plan.linears],
        "other_bytes": plan.other_bytes,
        "total_bytes": plan.stored_bytes,
        "resident_bytes": plan.resident_bytes,
        "attention": {"kernel": str(attention), "refusals": attention.refusals},
        "kv": {
            **asdict(kv_plan),
            "bytes_per_token": kv_plan.bytes_per_token,
            "capacity_tokens": kv_plan.capacity_tokens,
            "longest_tokens": kv_plan.longest_tokens,
        },
    }


def _print_plan(plan: ModelPlan, kv_plan: KVPlan, attention: AttentionSelection, every_layer: bool) -> None:
    from rich.table import Column, Table

    decoder = plan.config
    console = _console()
    scheme = f"{plan.quant.name} checkpoint" if plan.quant else "unquantised checkpoint"
    console.print(
        f"{plan.settings.model}: {scheme}, {decoder.num_layers} layers, hidden {decoder.hidden_size}, {decoder.heads} heads / "
        f"{decoder.kv_heads} kv heads of {decoder.head_dim}, vocabulary {decoder.vocab_size}; computes in "
        f"{str(plan.dtype).removeprefix('torch.')}"
    )
    columns = (Column("layer", overflow="fold"), "scheme", "kernel", "MiB in file", "why not a better one")
    table = Table(*columns, box=None, pad_edge=False)
    for label, reports in _rows(plan.linears, every_layer):
        first = reports[0]
        size = sum(r.num_bytes for r in reports) / 2**20
        table.add_row(label, first.spec, first.kernel, f"{size:.2f}", _reasons(first.refusals, first.note))
    table.add_row("attention", f"KV as {kv_plan.format}", str(attention), "-", _reasons(attention.refusals))
    table.add_row("embedding, norms", "float", "-", f"{plan.other_bytes / 2**20:.2f}", "-")
    table.add_row("total", "", "", f"{plan.stored_bytes / 2**20:.2f}", "")
    console.print(table)
    console.print(f"weights in memory: about {plan.resident_bytes / 2**20:,.2f} MiB")
    console.print(str(kv_plan))


def _reasons(refusals: Sequence[tuple[str, str]], note: str = "") -> str:
    return "; ".join([*([note] if note else []), *(f"{name}: {why}" for name, why in refusals)]) or "-"


def _rows(linears: list[LinearReport], every_layer: bool) -> list[tuple[str, list[LinearReport]]]:
    """Table rows: layers that differ by their number only share one, unless every layer is wanted."""
    if every_layer:
        return [(r.layer, [r]) for r in linears]
    grouped: dict[tuple[Any, ...], list[LinearReport]] = {}
    for report in linears:
        key = (re.sub(r"\.\d+\.", ".*.", report.layer), report.spec, report.kernel, report.refusals, report.note)
        grouped.setdefault(key, []).append(report)
    rows = []
    for key, reports in grouped.items():
        numbers = [int(m.group(1)) for r in reports if (m := re.search(r"\.(\d+)\.", r.layer))]
        rows.append((key[0].replace("*", _ranges(numbers), 1) if numbers else key[0], reports))
    return rows


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        values = [value for _, value in run]
        parts.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return ",".join(parts)


def plugins(config: EngineConfig, *, verbose: bool, as_json: bool) -> int:
    """Lists plugins; the exit code is 1 if any failed."""
    registry = registry_for(config)
    if as_json:
        print(json.dumps([asdict(p) for p in registry.plugins], indent=1))
    else:
        from rich.table import Table

        table = Table("plugin", "distribution", "version", "state", "hooks", box=None, pad_edge=False)
        for plugin in registry.plugins:
            state = f"failed: {plugin.reason}" if plugin.state == "failed" else plugin.state
            hooks = ", ".join(hook.removeprefix("octavo_") for hook in plugin.hooks)
            table.add_row(plugin.name, plugin.distribution, plugin.version, state, hooks or "-")
        _console().print(table)
        if verbose:
            for plugin in registry.failures:
                print(f"\n{plugin}:\n{plugin.trace}")
        elif registry.failures:
            print("\nrun with -v for tracebacks", file=sys.stderr)
    return 1 if registry.failures else 0


def check_plugin(config: EngineConfig, name: str, *, verbose: bool) -> int:
    """Runs the conformance kit on all that a plugin contributes."""
    try:
        from octavo.testing import run_suites, suites_for
    except ImportError as error:
        raise PluginError(str(error)) from None
    registry = discover(Platform.detect(config.device), required=[name])
    return run_suites(suites_for(registry, name), verbose=verbose)
