"""What the commands of the command line do, once their arguments are parsed."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

from octavo.attention.selection import select_for_layout
from octavo.config import EngineConfig
from octavo.engine.kv_plan import kv_layout, plan_kv
from octavo.engine.sampling_params import SamplingParams
from octavo.errors import PluginError
from octavo.front.llm import LLM, registry_for
from octavo.front.output_processor import TextDelta
from octavo.front.plan_report import console, plan_json, print_plan
from octavo.model.checkpoint import open_checkpoint
from octavo.model.decoder import attention_layers
from octavo.model.plan import plan_model
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
    counts = stats.scheduler
    swaps = f" ({counts.num_swaps} by swap)" if counts.num_swaps else ""
    first = sum(printer.first_token_s) / max(len(printer.first_token_s), 1)
    kernels = sorted({f"{r.kernel} ({r.spec})" for r in llm.engine.model_info.linears})
    return (
        f"{printer.tokens} tokens in {elapsed:.2f} s = {printer.tokens / max(elapsed, 1e-9):.1f} tokens/s; "
        f"TTFT {first * 1000:.0f} ms; KV use at most {counts.peak_blocks:,} of {stats.num_blocks:,} blocks; "
        f"prefix hits {stats.prefix_hit_rate:.0%}; preemptions {counts.num_preemptions}{swaps}; "
        f"kernels: {', '.join(kernels)}"
    )


def inspect(config: EngineConfig, *, as_json: bool, every_layer: bool) -> int:
    """Prints the kernel table and the KV plan of a checkpoint, from its headers alone, for a GPU that is not here too."""
    registry = registry_for(config, plans_only=True)
    if registry.platform.supposed_bytes is not None:
        major, minor = registry.platform.capability or (0, 0)
        memory = registry.platform.supposed_bytes // 2**30
        print(
            f"no CUDA device is here; this is the plan for one of compute capability {major}.{minor} with {memory} GiB",
            file=sys.stderr,
        )
    checkpoint = open_checkpoint(config.model, registry.checkpoint_readers)
    plan = plan_model(config, registry, checkpoint)
    layout = kv_layout(plan)
    kv_plan = plan_kv(config, plan.config, layout, registry.platform, plan.resident_bytes)
    layers, backends = attention_layers(plan.config), registry.attention_backends
    attention = select_for_layout(layout, layers, registry.platform, backends, config.attention_backend)
    if as_json:
        print(json.dumps(plan_json(plan, kv_plan, attention), indent=1))
    else:
        print_plan(plan, kv_plan, attention, every_layer)
    return 0


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
        console().print(table)
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
