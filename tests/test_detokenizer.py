"""Text out of tokens, with real byte-level and byte-fallback decoders: nothing lost, nothing doubled, little held back."""

from __future__ import annotations

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.front.detokenizer import Detokenizer

BAD = "\ufffd"
EMOJI = "🌶"
NASTY = [
    "Hello world 🌶 ok",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽",  # joiners and modifiers
    "漢字かな交じり文、한국어도",
    "e\u0301 a\u0308\u0323 Z͑͗a̴lgo",  # combining
    f"a genuine {BAD} and {BAD}one",
    "  two  spaces   three\n\n\tand\r\nlines ",
    "🌶🌶🌶🌶🌶🌶🌶🌶🌶🌶🌶🌶",
    "",
]


@functools.cache
def byte_level():
    """Merges for a few words only: each byte beyond ASCII is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator(["Hello world, hello family"] * 3, trainer)
    return tokenizer


# the byte of each character of the byte-level alphabet, as GPT-2 defined it
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
UNICODE_OF_BYTE = {byte: chr(byte) for byte in PRINTABLE}
UNICODE_OF_BYTE |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in UNICODE_OF_BYTE)}


def byte_level_of(pieces):
    """A byte-level tokenizer whose token i is the bytes `pieces[i]`, wherever these cut characters."""
    names = ["".join(UNICODE_OF_BYTE[byte] for byte in piece) for piece in pieces]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(dict.fromkeys(names))}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, [tokenizer.token_to_id(name) for name in names]


@functools.cache
def byte_fallback():
    """In the style of SentencePiece: words with a leading ▁, and bytes for whatever the vocabulary lacks."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁b", "a", "b", "c", "é"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer, vocab


def fallback_ids(text):
    """Token ids of `text`: words where there are any, else bytes."""
    _, vocab = byte_fallback()
    ids = []
    for character in text:
        known = "▁" if character == " " else character
        ids += [vocab[known]] if known in vocab else [vocab[f"<0x{byte:02X}>"] for byte in character.encode()]
    return ids


def stream(tokenizer, ids, prompt=()):
    """All pieces, the flushed one last."""
    detokenizer = Detokenizer(tokenizer.decode, prompt)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.flush()]


def assert_streams(tokenizer, ids, expected=None, most_held=3):
    """The stream is the one-shot text, and is never more than `most_held` characters behind the text so far."""
    expected = tokenizer.decode(ids) if expected is None else expected
    detokenizer, sent = Detokenizer(tokenizer.decode), ""
    for token_id in ids:
        sent += detokenizer.add(token_id)
        assert expected.startswith(sent)
    held = detokenizer.flush()
    assert sent + held == expected
    assert len(held) <= most_held
    assert set(held) <= {BAD}
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("text", NASTY)
def test_v27_text_streams_whole(text):
    assert_streams(byte_level(), byte_level().encode(text).ids, text)
    tokenizer, _ = byte_fallback()
    assert_streams(tokenizer, fallback_ids(text), text.removeprefix(" "))


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.integers(0, 200))
def test_v27_any_text_cut_anywhere(text, end):
    ids = byte_level().encode(text).ids[:end]
    assert_streams(byte_level(), ids)
    text = text.replace(BAD, "x")
    assert_streams(byte_fallback()[0], fallback_ids(text), text.removeprefix(" "))


@pytest.mark.parametrize("size", [2, 3, 6, 50])
def test_v27_genuine_replacement_characters_in_a_row(size):
    text = f"漢{BAD * size}a{EMOJI}"
    assert_streams(byte_level(), byte_level().encode(text).ids, text)
    # as bytes they cannot be told from garbage, which is shown by the byte
    streamed = "".join(stream(byte_fallback()[0], fallback_ids(text)))
    assert streamed.replace(BAD, "") == text.replace(BAD, "")
    assert streamed.startswith("漢" + BAD * size)


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=5), max_size=60))
@example([b"\xf0\x9f", *[b"\x98\x80\xf0\x9f"] * 59])
@example([b"\xff"] * 60)
@example([b"\xe4\xbd"] * 60)
@example([b"\xf0", b"\x9f", b"\x8c"] * 20)
def test_v27_any_bytes_in_tokens_that_cut_characters_anywhere(pieces):
    tokenizer, ids = byte_level_of(pieces)
    text = b"".join(pieces).decode(errors="replace")
    assert tokenizer.decode(ids) == text
    assert_streams(tokenizer, ids, text, most_held=3 * 5)


@settings(deadline=None)
@given(st.text("a🌶漢é", max_size=30), st.lists(st.integers(1, 5), min_size=150, max_size=150))
def test_v27_characters_that_share_tokens(text, sizes):
    data, pieces = text.encode(), []
    for size in sizes:
        pieces, data = pieces + [data[:size]] * bool(data), data[size:]
    tokenizer, ids = byte_level_of(pieces)
    assert_streams(tokenizer, ids, text)


def fallback_oracle(text_ids, vocab):
    """Runs of bytes as far as they are valid, then one U+FFFD for each byte to the end of the run."""
    names = {i: name for name, i in vocab.items()}
    text, run = "", b""
    for name in [*(names[i] for i in text_ids), None]:
        if name is not None and name.startswith("<0x"):
            run += bytes([int(name[3:5], 16)])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError as error:
            text += run[: error.start].decode() + BAD * (len(run) - error.start)
        run = b""
        text += (name or "").replace("▁", " ").replace("<s>", "")
    return text.removeprefix(" ")


GOOD = st.sampled_from(["a", "▁b", "▁", "é", "漢", EMOJI, "<s>"])
GARBAGE = st.binary(min_size=1, max_size=8)  # of a longer one the beginning is forgotten, and the rest may look good


@settings(deadline=None)
@given(st.lists(GOOD | GARBAGE, max_size=25))
@example([EMOJI, b"\xe5", "a"])
@example(["漢", "漢", "漢", b"\xff\xff\xff\xff\xff\xff", "▁b"])
@example(["漢", b"\xf0\x9f\x8c"])
def test_v27_garbage_among_byte_tokens_spoils_nothing_before_it(parts):
    tokenizer, vocab = byte_fallback()
    ids = [vocab["a"]]  # else a space at the start may be stripped before it is known to be one
    for part in parts:
        if part == "<s>":
            # inside a run of bytes it would be skipped, and the run goes on: not what this test is about
            ids += [vocab["a"], vocab["<s>"]]
        elif isinstance(part, bytes):
            # a run of garbage ends here: what a character of the same run would mean is anybody's guess
            ids += [*(vocab[f"<0x{byte:02X}>"] for byte in part), vocab["b"]]
        else:
            ids += [vocab[part]] if part in vocab else fallback_ids(part)
    assert_streams(tokenizer, ids, fallback_oracle(ids, vocab), most_held=3)


@pytest.mark.parametrize("byte", [0xFF, 0x80, 0xE4, 0xF0])
def test_v27_bytes_that_never_become_valid_are_not_held_for_ever(byte):
    tokenizer, vocab = byte_fallback()
    pieces = stream(tokenizer, [vocab["a"], *[vocab[f"<0x{byte:02X}>"]] * 200, vocab["▁b"]])
    assert "".join(pieces) == "a" + BAD * 200 + " b"
    assert len("".join(pieces[:101])) >= 1 + 100 - 3

    ids = byte_level().encode(BAD * 100).ids  # genuine ones: valid, but they look unfinished
    pieces = stream(byte_level(), ids)
    assert "".join(pieces) == BAD * 100
    assert len("".join(pieces[:150])) >= 50 - 3


def test_v27_ending_inside_a_character_gives_its_replacement_once():
    ids = byte_level().encode("hot " + EMOJI).ids
    for missing in (1, 2, 3):
        assert stream(byte_level(), ids[:-missing])[-1] == BAD
    ids = fallback_ids("漢" + EMOJI)
    for missing in (1, 2, 3):
        assert "".join(stream(byte_fallback()[0], ids[:-missing])) == "漢" + BAD * (4 - missing)


PROMPT = "Hello world " + EMOJI


@pytest.mark.parametrize("missing", [1, 2, 3, 4])
@pytest.mark.parametrize("encode", [lambda text: byte_level().encode(text).ids, fallback_ids])
def test_v28_a_prompt_that_ends_inside_a_character_is_not_echoed(encode, missing):
    tokenizer = byte_fallback()[0] if encode is fallback_ids else byte_level()
    ids = encode(PROMPT)
    prompt, rest = ids[:-missing], ids[-missing:]
    assert stream(tokenizer, rest, prompt) == [""] * (missing - 1) + [EMOJI, ""]
    assert stream(tokenizer, [*rest, *encode("a")], prompt)[missing:] == ["a", ""]
    assert stream(tokenizer, [], prompt) == [""]
    if missing < 4:  # what the prompt left unfinished stays so: one replacement, or one for each byte
        text = "".join(stream(tokenizer, encode("a"), prompt))
        assert text.rstrip("a") in {BAD * size for size in range(1, 4)}
        assert text.endswith("a")


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_v28_a_prompt_of_one_run_of_bytes(missing):
    tokenizer, _ = byte_fallback()
    ids = fallback_ids("漢" * 30 + EMOJI)
    assert stream(tokenizer, ids[-missing:] + fallback_ids("漢b"), ids[:-missing])[missing - 1 :] == [
        EMOJI, "", "", "漢", "b", "",
    ]  # fmt: skip


def test_v28_a_prompt_whose_tokens_share_characters():
    tokenizer, ids = byte_level_of([b"\xf0\x9f", *[b"\x98\x80\xf0\x9f"] * 40, b"\x98\x80"])
    assert stream(tokenizer, ids[30:], ids[:30]) == ["😀"] * 12 + [""]


@settings(deadline=None)
@given(st.text("ab 漢é🌶", max_size=30), st.text("ab 漢é🌶", max_size=10))
def test_prompt_gives_context_only(prompt, text):
    ids = byte_level().encode(text).ids
    assert "".join(stream(byte_level(), ids, byte_level().encode(prompt).ids)) == text
    expected = text if prompt.strip(" ") else (prompt + text).removeprefix(" ")[max(0, len(prompt) - 1) :]
    assert "".join(stream(byte_fallback()[0], fallback_ids(text), fallback_ids(prompt))) == expected


def test_special_tokens_are_no_context():
    tokenizer, vocab = byte_fallback()
    end = vocab["</s>"]
    assert stream(tokenizer, [vocab["▁b"]], [vocab["▁a"], *[end] * 5]) == [" b", ""]
    ids = [vocab["▁a"], *[end] * 100, vocab["▁b"], end]
    assert stream(tokenizer, ids) == ["a", *[""] * 100, " b", "", ""]
    assert "".join(stream(tokenizer, [*[end] * 100, vocab["▁a"], vocab["▁b"]])) == "a b"


@pytest.mark.parametrize("odd", [-1, 10**6, 2**31, 2**63])
def test_s02_an_id_that_the_tokenizer_lacks_has_no_text(odd):
    tokenizer = byte_level()
    ids = tokenizer.encode("hot " + EMOJI).ids
    with_odd = [odd, *(i for token_id in ids for i in (token_id, odd))]
    assert "".join(stream(tokenizer, with_odd, [*ids, odd, odd])) == "hot " + EMOJI
    assert "".join(stream(tokenizer, ids, with_odd)) == "hot " + EMOJI


def test_the_cost_of_a_token_does_not_grow():
    sizes = []

    def decode(ids):
        sizes.append(len(ids))
        return byte_level().decode(ids)

    for text, decoded in (("Hello world, hello family. ", 8), ("漢字🌶", 16), (BAD, 20)):
        sizes.clear()
        ids = byte_level().encode(text * 40).ids
        detokenizer = Detokenizer(decode, ids)
        for token_id in ids:
            detokenizer.add(token_id)
        assert max(sizes) <= 17
        assert sum(sizes) <= decoded * len(ids) + 100
