"""Files that are truncated, damaged or made to harm: each ends in an error of octavo's that names the file, at once."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from octavo import LLM, CheckpointError, ConfigError
from octavo.testing import tiny_model
from octavo_gguf.header import read_header
from octavo_gguf.reader import GGUFReader

Tools = dict[str, Callable[..., Any]]
Opened = Callable[..., Any]
Healthy = tuple[bytes, int]
Convert = Callable[..., tuple[Path, Path]]
TYPES = gguf.GGMLQuantizationType
HUGE = (2**31, 2**40, 2**63, 2**64 - 1)


@pytest.fixture(scope="module")
def healthy(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """(content, length of the front part) of a small file that loads."""
    folder = tmp_path_factory.mktemp("healthy")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_hidden_layers": 1}
    model = tiny_model(folder / "model", "LlamaForCausalLM", **sizes)
    file = tools["write_gguf"](model, folder / "model.gguf", TYPES.Q4_1, TYPES.Q8_0)
    return file.read_bytes(), min(tensor.start for tensor in read_header(file).tensors)


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """What comes of a file with this content: the message of the refusal; None where it reads to the last tensor."""

    def attempt(content: bytes, with_tokenizer: bool = False) -> str | None:
        file = tmp_path / "model.gguf"
        file.write_bytes(content)
        try:
            reader = GGUFReader(file)
            reader.config()
            for name, info in reader.tensors.items():
                tensor = reader.read(name)
                assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype)
            if with_tokenizer:
                reader.tokenizer().encode("some text")
        except (CheckpointError, ConfigError) as error:
            message = str(error)
        else:
            return None
        assert str(file) in message
        return message

    return attempt


def at_key(content: bytes, key: str) -> int:
    """Where the value of a metadata key begins: its type."""
    return content.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)


def test_the_file_is_healthy(healthy: Healthy, opened: Opened) -> None:
    assert opened(healthy[0], with_tokenizer=True) is None


def test_truncated_anywhere(healthy: Healthy, opened: Opened) -> None:
    content, front = healthy
    lengths = {*range(0, 64), *range(64, front, 97), front - 1, *range(front, len(content), 1009), len(content) - 33}
    for length in sorted(lengths):
        assert opened(content[:length]) is not None, length


def test_padding_at_the_end_may_be_missing_or_more(healthy: Healthy, opened: Opened) -> None:
    assert opened(healthy[0] + bytes(4096)) is None


def test_an_empty_file_and_a_folder_of_that_name(tmp_path: Path, opened: Opened) -> None:
    assert "cannot read the file as GGUF" in opened(b"")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(CheckpointError, match=r"folder\.gguf"):
        read_header(tmp_path / "folder.gguf")


def test_other_files_of_that_name(opened: Opened) -> None:
    for content in (b"{}" * 100, b"PK\3\4" + bytes(100), b"ggml" + bytes(100), b"GGUF"):
        assert opened(content) is not None
    assert "no GGUF file" in opened(b"ggjt" + bytes(100))


def test_versions(healthy: Healthy, opened: Opened) -> None:
    content = healthy[0]
    assert opened(content[:4] + struct.pack("<I", 2) + content[8:]) is None  # 2 and 3 differ in big-endian files only
    for version in (0, 1, 4, 2**31):
        message = opened(content[:4] + struct.pack("<I", version) + content[8:])
        assert "version 2 or 3" in message or "big-endian" in message
    assert "big-endian" in opened(content[:4] + struct.pack(">I", 3) + content[8:])


@pytest.mark.parametrize("count", [*HUGE, 0, 1, 10_000])
@pytest.mark.parametrize("place", [8, 16])
def test_wrong_counts_of_tensors_and_keys(count: int, place: int, healthy: Healthy, opened: Opened) -> None:
    content = healthy[0]
    message = opened(content[:place] + struct.pack("<Q", count) + content[place + 8 :])
    assert message is not None


@pytest.mark.parametrize("size", [*HUGE, 2**20])
def test_huge_texts(size: int, healthy: Healthy, opened: Opened) -> None:
    content = healthy[0]
    for place in (24, at_key(content, "general.architecture") + 4):
        assert "the file ends inside" in opened(content[:place] + struct.pack("<Q", size) + content[place + 8 :])


@pytest.mark.parametrize("count", [*HUGE, 2**20])
@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"])
def test_huge_arrays_take_neither_time_nor_memory(key: str, count: int, healthy: Healthy, opened: Opened) -> None:
    content = healthy[0]
    place = at_key(content, key) + 8
    tracemalloc.start()
    message = opened(content[:place] + struct.pack("<Q", count) + content[place + 8 :])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "more than it has room for" in message
    assert key in message
    assert peak < 20 * len(content)


@pytest.mark.parametrize("kind", [9, 13, 2**32 - 1])
def test_arrays_of_arrays_and_of_nothing_known(kind: Any, healthy: Healthy, opened: Opened) -> None:
    content = healthy[0]
    place = at_key(content, "tokenizer.ggml.tokens") + 4
    assert "tokenizer.ggml.tokens" in opened(content[:place] + struct.pack("<I", kind) + content[place + 4 :])


def test_a_key_that_is_there_twice(healthy: Healthy, opened: Opened) -> None:
    content = healthy[0]
    assert "twice" in opened(content.replace(b"llama.context_length", b"general.architecture"))


def test_text_that_is_none(healthy: Healthy, opened: Opened) -> None:
    content = healthy[0]
    assert "UTF-8" in opened(content.replace(b"general.architecture", b"general.architectur\xff"))


def entry(content: bytes, name: bytes = b"output_norm.weight") -> int:
    """Where the number of dimensions of a tensor stands."""
    return content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


@pytest.mark.parametrize(
    ("place", "form", "value", "fact"),
    [
        (0, "<I", 0, "0 dimensions"),
        (0, "<I", 2**32 - 1, "dimensions"),
        (4, "<Q", 2**63, "does not lie where the file says"),
        (4, "<Q", 0, "no elements"),
        (12, "<I", 999, "type 999, which is not known"),
        (12, "<I", 12, "no whole blocks of Q4_K"),
        (16, "<Q", 2**62, "does not lie where the file says"),
        (16, "<Q", 3, "does not lie where the file says"),
        (16, "<Q", 0, "does not lie where the file says"),  # where another tensor lies
        (16, "<Q", 64, "does not lie where the file says"),
        (12, "<I", 1, "data follow the last tensor"),  # F16, half as long
        (16, "<Q", 2**64 - 1, "does not lie where the file says"),
    ],
)
def test_tensors_that_cannot_be(place: int, form: str, value: int, fact: str, healthy: Healthy, opened: Opened) -> None:
    content = healthy[0]
    at = entry(content) + place
    message = opened(content[:at] + struct.pack(form, value) + content[at + struct.calcsize(form) :])
    assert fact in message
    assert "output_norm.weight" in message


def test_products_of_sizes_beyond_64_bits(healthy: Healthy, opened: Opened) -> None:
    content = healthy[0]
    at = entry(content, b"blk.0.attn_v.weight") + 4
    message = opened(content[:at] + struct.pack("<QQ", 2**40, 2**40) + content[at + 16 :])
    assert "blk.0.attn_v.weight" in message


def test_a_tensor_that_is_listed_twice(healthy: Healthy, opened: Opened) -> None:
    content = healthy[0]
    assert "'blk.0.attn_v.weight' twice" in opened(content.replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight"))


@pytest.mark.parametrize("value", [0, 4, 12, 33])
def test_alignments_that_cannot_be(value: int, convert: Convert) -> None:
    _, file = convert(options={"metadata": [("add_uint32", "general.alignment", value)]})
    with pytest.raises(CheckpointError, match=r"general\.alignment"):
        GGUFReader(file)


def test_flipped_bytes_anywhere_in_the_front_part(healthy: Healthy, opened: Opened) -> None:
    """2,500 files with one to three bytes changed: refused or read whole, never anything else."""
    content, front = healthy
    chosen, outcomes = random.Random(0), []
    for number in range(2500):
        damaged = bytearray(content)
        for _ in range(chosen.randint(1, 3)):
            damaged[chosen.randrange(front)] = chosen.choice([0, 1, 0x7F, 0x80, 0xFF, chosen.randrange(256)])
        outcomes.append(opened(bytes(damaged), with_tokenizer=number % 10 == 0))
    refused = sum(outcome is not None for outcome in outcomes)
    assert 100 < refused < 2400  # most bytes of the front part are those of tokens


def test_a_damaged_file_ends_in_an_error_of_octavos_through_the_engine(healthy: Healthy, tmp_path: Path) -> None:
    content, front = healthy
    file = tmp_path / "model.gguf"
    for damaged in (content[:front], content[: front + 2000], content[:100], b"GGUF" + bytes(60)):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError) as caught:
            LLM(str(file), num_blocks_override=8)
        assert str(file) in str(caught.value)
