"""Text to token ids and back: a thin wrapper around the model's own tokenizer and chat template.

Built from the files in the folder alone, with no network and no code from the folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, RequestError


class Tokenizer:
    """One model's tokenizer. Holds no state that a call changes, so threads may share it.

    `hf_tokenizer` is a ready one that the container of the weights brought along; else the files of `folder` are read.
    """

    def __init__(self, folder: str | Path, hf_tokenizer: Any | None = None) -> None:
        self._path = Path(folder).expanduser()
        self.hf_tokenizer = hf_tokenizer or _load(self._path)

    def encode(self, text: str) -> list[int]:
        """A prompt's ids, with the special tokens (BOS) that the tokenizer adds to raw text."""
        return self._encode(text, "prompt", add_special_tokens=True)

    def encode_plain(self, text: str, param: str = "prompt") -> list[int]:
        """The ids of a piece of text, with nothing added. `param` is what a refusal names."""
        return self._encode(text, param, add_special_tokens=False)

    def _encode(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        try:
            return list(self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:  # text that is none, such as half a surrogate pair
            raise RequestError(f"{param}: cannot be tokenized as text: {error}", param=param) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids, spaces as they are."""
        return str(
            self.hf_tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The end token, if the tokenizer has one."""
        end = self.hf_tokenizer.eos_token_id
        return frozenset() if end is None else frozenset([end])

    def special_id(self, text: str) -> int | None:
        """The id of a special token written as text, such as "<|im_end|>"; None for other text."""
        ids: Mapping[str, int] = self.hf_tokenizer.get_added_vocab()
        return ids.get(text)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a conversation, by the model's template (sandboxed), ready for the answer. Adds no further specials.

        Raises as `render` does.
        """
        return self.encode_plain(self.render(messages, **options), "messages")

    def render(self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **options: Any) -> str:
        """The text of a conversation, by `chat_template` or else the model's.

        Raises RequestError where there is no template, or with the template's own words where it refuses.
        """
        if chat_template is None and self.hf_tokenizer.chat_template is None:
            raise RequestError(
                f"the model has no chat template ({self._path.name} has neither chat_template.jinja nor one in "
                "tokenizer_config.json); send a plain prompt instead, or start the server with --chat-template",
                param="messages",
            )
        try:
            return str(
                self.hf_tokenizer.apply_chat_template(
                    [_plain(m) for m in messages],
                    **{
                        "add_generation_prompt": True,
                        **options,
                        "chat_template": chat_template,
                        "tokenize": False,
                    },
                )
            )
        except RequestError:
            raise
        except Exception as error:  # templates raise what they like
            raise RequestError(f"the chat template refuses the messages: {error}", param="messages") from None

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences that spell each word, at the start of a text and after a space."""
        found: list[list[int]] = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = self.encode_plain(text, "bad_words")
                if ids and ids not in found:
                    found.append(ids)
        return found


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content, if it comes in text parts, is one text."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return dict(message)
    if other := [part for part in parts if not isinstance(part, Mapping) or part.get("type") != "text"]:
        raise RequestError(f"messages may hold parts of type 'text' only, got {other[0]!r}", param="messages")
    return {**message, "content": "".join(str(part.get("text", "")) for part in parts)}


def _load(path: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # A tokenizer.json is complete: the plain fast class reads it and the files beside it, whatever class they name.
    kind: Any = PreTrainedTokenizerFast if os.path.isfile(path / "tokenizer.json") else AutoTokenizer
    try:
        if not path.is_dir():
            raise FileNotFoundError("no such tokenizer folder")
        return kind.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizer libraries raise bare Exceptions
        raise CheckpointError(
            f"cannot load the tokenizer: {error}", file=str(path), expected="tokenizer.json of a fast tokenizer"
        ) from None
