"""`octavo eval`: what a model, or several versions of it, make of a text: perplexity, distance from the first, size, speed.

The engine itself computes: its kernels, and K and V through blocks. The text is tokenised once, without special tokens, and cut
into windows that do not overlap; each gives the negative log likelihood of all its tokens but the first.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.config import EngineConfig
from octavo.engine.runner import Runner
from octavo.engine.sampling_params import SamplingParams
from octavo.errors import ConfigError
from octavo.front.kv_calibration import default_text, first_tokens, read_text
from octavo.front.llm import LLM
from octavo.model.loader import progress

logger = logging.getLogger(__name__)

_ROWS = 256  # whose logits are held at once
_DECODED = 32  # tokens for the decoding speed


@dataclass(frozen=True, slots=True)
class Scores:
    """What one model scored.

    `perplexity` is exp of the mean negative log likelihood. Against the reference, by token: `kl` is the mean Kullback-Leibler
    divergence in nats, `agreement` the share of positions with the same most likely token; None for the reference itself.
    `layer_errors` is the mean over tokens of ||h - h'||^2 / ||h'||^2 after each decoder layer, in the first window.
    """

    model: str
    scheme: str
    num_bytes: int
    perplexity: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    kl: float | None = None
    agreement: float | None = None
    layer_errors: tuple[float, ...] = ()


def evaluate(
    configs: Sequence[EngineConfig], text: str | None, num_windows: int, window: int, plot: str | None, as_json: bool
) -> int:
    """Prints a table of all models, the first of which the others are compared with; returns the exit code.

    `text` names a file, None: text that comes with Python. Raises ConfigError where it is too short.
    """
    if plot is not None:
        _need_matplotlib()
    content = default_text() if text is None else read_text(text, "--text")
    reference: _Reference | None = None
    rows: list[Scores] = []
    for config in configs:
        scores, own = _score(config, content, num_windows, window, reference, keep=len(configs) > 1)
        rows.append(scores)
        reference = reference or own
    if plot is not None:
        draw_errors(rows, plot)
    if as_json:
        print(json.dumps({"windows": num_windows, "window": window, "models": [asdict(row) for row in rows]}, indent=2))
    else:
        _print(rows, num_windows, window)
    return 0


@dataclass(frozen=True, slots=True)
class _Reference:
    """What the other models are compared with: the last hidden states of all windows, the head, and the first one's layers."""

    tokens: tuple[tuple[int, ...], ...]
    hidden: list[Tensor]
    head: nn.Module
    layers: list[Tensor]


def _score(
    config: EngineConfig, text: str, num_windows: int, window: int, reference: _Reference | None, keep: bool
) -> tuple[Scores, _Reference | None]:
    updates: dict[str, Any] = {
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
        "max_num_batched_tokens": window + 1,
        "max_model_len": None,
        "num_blocks_override": -(-(window + 1) // config.block_size) + 1,
    }
    llm = LLM(config.model_copy(update=updates))
    runner: Runner = llm.engine.executor.runner  # type: ignore[attr-defined]
    windows = _windows(llm, text, num_windows, window)
    if reference is not None and reference.tokens != windows:
        raise ConfigError(f"{config.model}: its tokenizer cuts the text otherwise than the first model's")
    kept: list[Tensor] = []
    layers: list[Tensor] = []
    errors: list[float] = []
    lost = divergence = 0.0
    count = same = 0
    seconds = 0.0
    with progress(f"evaluating {Path(config.model).name}", num_windows, config.disable_progress) as advance:
        for number, ids in enumerate(windows):

            def seen(stream: Tensor) -> None:
                if reference is not None:
                    other = reference.layers[len(errors)].float()
                    shares = (stream.float() - other).square().sum(-1) / other.square().sum(-1)
                    errors.append(float(shares.mean()))
                elif keep:
                    layers.append(stream.clone())

            start = time.perf_counter()
            hidden = runner.probe(ids, seen if number == 0 else None)
            if number or num_windows == 1:
                seconds += time.perf_counter() - start
            first = len(ids) - window
            rows, following = hidden[first:-1], torch.tensor(ids[first + 1 :], device=hidden.device)
            if keep and reference is None:
                kept.append(rows.clone())
            base = None if reference is None else reference.hidden[number]
            for logits, right, logits_before in _chunks(runner, rows, following, base, reference):
                logs = F.log_softmax(logits, -1)
                lost -= float(logs.gather(1, right[:, None]).double().sum())
                count += len(right)
                if logits_before is not None:
                    before = F.log_softmax(logits_before, -1)
                    divergence += float((before.exp() * (before - logs)).double().sum())
                    same += int((logits.argmax(-1) == logits_before.argmax(-1)).sum())
            if not math.isfinite(lost):
                raise ConfigError(f"{config.model}: window {number} gives no finite likelihood")
            advance()
    timed = max(1, num_windows - 1) * len(windows[0])
    scores = Scores(
        config.model,
        ", ".join(sorted({report.spec for report in llm.engine.model_info.linears if report.note != "the embedding"})),
        sum(info.num_bytes for info in runner.loaded.plan.checkpoint.tensors.values()),
        math.exp(lost / count),
        timed / seconds,
        _decoding_speed(llm, windows[0][:16]),
        None if reference is None else divergence / count,
        None if reference is None else same / count,
        tuple(errors),
    )
    own = _Reference(windows, kept, runner.loaded.decoder.head, layers) if keep and reference is None else None
    llm.shutdown()
    return scores, own


def _windows(llm: LLM, text: str, num_windows: int, window: int) -> tuple[tuple[int, ...], ...]:
    tokens = llm.tokenizer.encode_plain(text)
    begin = first_tokens(llm.tokenizer)
    if len(tokens) < num_windows * window:
        raise ConfigError(
            f"--text: {len(tokens):,} tokens are {len(tokens) // window} windows of {window}, not {num_windows}: give a longer "
            "text, or say --windows or --window"
        )
    longest = llm.engine.model_info.max_model_len
    if len(begin) + window > longest:
        raise ConfigError(f"--window {window}: the model takes at most {longest - len(begin)} tokens")
    return tuple((*begin, *tokens[start : start + window]) for start in range(0, num_windows * window, window))


@torch.inference_mode()
def _chunks(
    runner: Runner, rows: Tensor, following: Tensor, base: Tensor | None, reference: _Reference | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Logits of some rows at once, the tokens that follow, and the reference's logits."""
    for start in range(0, len(rows), _ROWS):
        part = slice(start, start + _ROWS)
        before = None if base is None or reference is None else reference.head(base[part]).float()
        yield runner.model.logits(rows[part]), following[part], before


def _decoding_speed(llm: LLM, prompt: Sequence[int]) -> float:
    def seconds(count: int) -> float:
        start = time.perf_counter()
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        return time.perf_counter() - start

    seconds(1)  # kernels warm up
    return _DECODED / max(seconds(_DECODED + 1) - seconds(1), 1e-9)


def _print(rows: Sequence[Scores], num_windows: int, window: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{num_windows} windows of {window} tokens",
        title_justify="left",
        box=None,
        header_style="",
        pad_edge=False,
    )
    table.add_column("model", overflow="fold")
    table.add_column("scheme", overflow="fold")
    for label in ("MiB", "perplexity", "rise", "KL", "top-1 same", "prefill tok/s", "decode tok/s"):
        table.add_column(label, justify="right")
    for row in rows:
        table.add_row(
            Path(row.model).name,
            row.scheme,
            f"{row.num_bytes / 2**20:.1f}",
            f"{row.perplexity:.3f}",
            "-" if row.kl is None else f"{row.perplexity - rows[0].perplexity:+.3f}",
            "-" if row.kl is None else f"{row.kl:.4f}",
            "-" if row.agreement is None else f"{100 * row.agreement:.1f}%",
            f"{row.prefill_tokens_per_s:.0f}",
            f"{row.decode_tokens_per_s:.1f}",
        )
    Console(width=118, highlight=False).print(table)


def _need_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install matplotlib")


def draw_errors(rows: Sequence[Scores], file: str) -> None:
    """A PNG (or what the name's ending asks for) of each model's error after each decoder layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4.5))
    for row in rows:
        if row.layer_errors:
            axis.plot(range(len(row.layer_errors)), row.layer_errors, marker=".", label=Path(row.model).name)
    axis.set_yscale("log")
    axis.set_xlabel("decoder layer")
    axis.set_ylabel("||h - h'||² / ||h'||²")
    axis.set_title(f"error of the hidden states, against {Path(rows[0].model).name}")
    axis.grid(visible=True, alpha=0.3)
    if len(rows) > 1:
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
