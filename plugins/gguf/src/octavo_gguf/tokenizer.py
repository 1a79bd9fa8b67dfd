"""The tokenizer that a GGUF file describes, by the conversion that transformers has for it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from octavo import CheckpointError

logger = logging.getLogger(__name__)

_MODELS = ("gpt2", "llama")  # byte-level BPE, sentencepiece BPE
_KEYS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
    "add_space_prefix": "add_prefix_space",
}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_CUT_LIKE_GPT2 = ("default", "gpt-2", "gpt2")  # what the conversion does where it knows no rule
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Cut like GPT-2's, after each digit was made a piece of its own (llama-vocab.cpp), which the conversion does not know."""
# By llama.cpp's rules (llama-vocab.cpp) texts of these begin with BOS unless the file says otherwise, and a piece of text
# that is a token is that token, whether or not merges lead to it.
_LLAMA3_LIKE = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
)


def build_tokenizer(file: str, metadata: Mapping[str, Any]) -> Any:
    """A transformers tokenizer; raises CheckpointError that names the file where its parts are missing or contradictory."""
    parts = {theirs: metadata[key] for ours, theirs in _KEYS.items() if (key := f"tokenizer.ggml.{ours}") in metadata}
    _check(file, parts)
    tokens: list[str] = parts["tokens"]
    kind, pre = parts["tokenizer_type"], parts.get("pre_tokenizer_type", "default")
    options: dict[str, Any] = {"add_bos_token": kind == "llama" or pre in _LLAMA3_LIKE, "add_eos_token": False}
    for name in options:
        options[name] = bool(metadata.get(f"tokenizer.ggml.{name}", options[name]))
    for name, key in _SPECIAL.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and (type(number) is not int or not 0 <= number < len(tokens)):
            raise CheckpointError(
                f"the metadata names a {name} that the vocabulary does not hold",
                file=file,
                expected=f"an id below {len(tokens)}",
                found=repr(number),
            )
        options[name] = None if number is None else tokens[number]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        options["chat_template"] = template
    return _convert(file, str(metadata.get("general.architecture")), parts, options)


def _convert(file: str, architecture: str, parts: dict[str, Any], options: dict[str, Any]) -> Any:
    try:
        from tokenizers import pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import convert_gguf_tokenizer
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as KNOWN

        pre = parts.get("pre_tokenizer_type", "default")
        if parts["tokenizer_type"] == "gpt2" and pre not in (*KNOWN, *_CUT_LIKE_GPT2, *_DIGITS_ALONE):
            logger.warning(
                "%s: transformers has no rule for tokenizer.ggml.pre '%s' and cuts text like GPT-2 does; unusual runs of "
                "spaces and digits may give other tokens than the model was trained on",
                file,
                pre,
            )
        backend, more = convert_gguf_tokenizer(architecture, parts)
        if parts["tokenizer_type"] == "gpt2" and pre in _LLAMA3_LIKE:
            backend.model.ignore_merges = True
        if parts["tokenizer_type"] == "gpt2" and pre in _DIGITS_ALONE:
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
        if parts["tokenizer_type"] == "llama" and parts.get("add_prefix_space") is False:
            _leave_out_prefix(backend)  # the conversion reads the key and forgets it
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options, **more)
    except BaseException as error:  # the tokenizer library panics with exceptions that are no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(
            f"cannot build the tokenizer that the file describes: {type(error).__name__}: {error}", file=file
        ) from None


def _leave_out_prefix(backend: Any) -> None:
    """Makes a sentencepiece tokenizer neither put a space before a text nor take one away from the start of an answer."""
    from tokenizers import decoders, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _check(file: str, parts: Mapping[str, Any]) -> None:
    """Raises CheckpointError where the conversion would fail, or build something else than the file means."""
    if parts.get("tokenizer_type") not in _MODELS:
        raise CheckpointError(
            "the file holds no tokenizer that can be built",
            file=file,
            expected=f"tokenizer.ggml.model one of {', '.join(_MODELS)}",
            found=repr(parts.get("tokenizer_type")),
        )
    tokens = parts.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(
            "the file holds no vocabulary", file=file, expected="tokenizer.ggml.tokens, a list of texts"
        )
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise CheckpointError("the vocabulary holds a token twice", file=file, found=repr(twice))
    for name in ("scores", "token_type"):
        if name in parts and (not isinstance(parts[name], list) or len(parts[name]) != len(tokens)):
            raise CheckpointError(
                f"tokenizer.ggml.{name} does not belong to the vocabulary", file=file, expected=f"{len(tokens)} numbers"
            )
    merges = parts.get("merges")
    if merges is None and (parts["tokenizer_type"] == "gpt2" or "scores" not in parts):
        raise CheckpointError("the file holds neither merges nor scores for its tokenizer", file=file)
    if merges is not None and not (isinstance(merges, list) and all(isinstance(m, str) for m in merges)):
        raise CheckpointError("tokenizer.ggml.merges is no list of texts", file=file)
