"""Text to token ids and back: a thin wrapper around the model's own tokenizer and chat template.

Built from the files in the folder alone, with no network and no code from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, RequestError


class Tokenizer:
    """One model's tokenizer. Holds no state that a call changes, so threads may share it."""

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder)
        self._tokenizer = _load(self._path)

    def encode(self, text: str) -> list[int]:
        """A prompt's ids, with the special tokens (BOS) that the tokenizer adds to raw text."""
        return list(self._tokenizer.encode(text))

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a piece of text, with nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids, spaces as they are."""
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The end token, if the tokenizer has one."""
        end = self._tokenizer.eos_token_id
        return frozenset() if end is None else frozenset([end])

    def special_id(self, text: str) -> int | None:
        """The id of a special token written as text, such as "<|im_end|>"; None for other text."""
        ids: Mapping[str, int] = self._tokenizer.get_added_vocab()
        return ids.get(text)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a conversation, by the model's template (sandboxed), ready for the answer. Adds no further specials.

        Raises RequestError where the model has no template, or with the template's own words where it refuses.
        """
        if self._tokenizer.chat_template is None:
            raise RequestError(
                f"the model has no chat template ({self._path} has neither chat_template.jinja nor one in "
                "tokenizer_config.json); send a plain prompt instead",
                param="messages",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, **{"add_generation_prompt": True, **options}
            )
        except Exception as error:  # templates raise what they like
            raise RequestError(f"the chat template refuses the messages: {error}", param="messages") from None
        return self.encode_plain(text)

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences that spell each word, at the start of a text and after a space."""
        found: list[list[int]] = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = self.encode_plain(text)
                if ids and ids not in found:
                    found.append(ids)
        return found


def _load(path: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not path.is_dir():
        raise CheckpointError("no such tokenizer folder", file=str(path))
    file, settings_file = path / "tokenizer.json", path / "tokenizer_config.json"
    try:
        settings = json.loads(settings_file.read_text()) if settings_file.is_file() else {}
        if not file.is_file():
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        known = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "model_max_length")
        chosen = {key: _text(settings[key]) for key in known if settings.get(key) is not None}
        template_file = path / "chat_template.jinja"
        if template_file.is_file():
            chosen["chat_template"] = template_file.read_text()
        return PreTrainedTokenizerFast(tokenizer_file=str(file), **chosen)
    except Exception as error:  # the tokenizer libraries raise bare Exceptions
        raise CheckpointError(
            f"cannot load the tokenizer: {error}", file=str(path), expected="tokenizer.json of a fast tokenizer"
        ) from None


def _text(value: Any) -> Any:
    """A special token as text: old configs write it as {"content": ..., "lstrip": ...}."""
    if isinstance(value, dict) and "content" in value:
        return value["content"]
    if isinstance(value, list):  # several named chat templates
        return next((t["template"] for t in value if t.get("name") == "default"), None)
    return value
