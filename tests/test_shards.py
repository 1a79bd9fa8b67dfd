"""The writer of safetensors files, read back by the safetensors library itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from octavo import CheckpointError
from octavo.model.checkpoint import SAFETENSORS_DTYPES
from octavo.model.shards import ShardWriter

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def write(folder: Path, tensors: dict[str, torch.Tensor], limit: int = 10**9) -> int:
    with ShardWriter(folder, tensors, limit) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish()
    return writer.total_size


def expect_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].double(), tensor.double()), name


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)), min_size=1, max_size=12
    ),
    limit=st.sampled_from([1, 200, 2500, 10**9]),
)
def test_any_tensors_come_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[tuple[int, ...], torch.dtype]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"t{n}.ü": random_tensor(shape, dtype, n) for n, (shape, dtype) in enumerate(shapes)}
    size = write(folder, tensors, limit)
    assert size == sum(t.numel() * t.itemsize for t in tensors.values())
    files = sorted(folder.glob("*.safetensors"))
    expect_same({name: t for file in files for name, t in load_file(file).items()}, tensors)
    assert all(file.stat().st_size <= limit or len(load_file(file)) == 1 or not _sizes(file) for file in files)
    assert all(starts_are_aligned(file) for file in files), "other readers map tensors where they lie"
    assert not list(folder.glob("*.part"))


def starts_are_aligned(file: Path) -> bool:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    sizes = [SAFETENSORS_DTYPES[entry["dtype"]].itemsize for entry in entries]
    starts = [8 + length + entry["data_offsets"][0] for entry in entries]
    return all(start % size == 0 for start, size in zip(starts, sizes, strict=True))


def _sizes(file: Path) -> int:
    """How many tensors of a file are larger than nothing: empty ones may stand beside one that is too large."""
    return max(sum(t.numel() > 0 for t in load_file(file).values()) - 1, 0)


def test_every_type_that_is_read_is_written(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(3, dtype=torch.uint8).to(dtype) for name, dtype in SAFETENSORS_DTYPES.items()}
    write(tmp_path, tensors)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert {name: file.get_slice(name).get_dtype() for name in tensors} == {name: name for name in tensors}
        assert file.metadata() == {"format": "pt"}


def test_views_are_written_in_order(tmp_path: Path) -> None:
    tensors = {"columns": torch.arange(12.0).reshape(3, 4).T, "every third": torch.arange(12.0)[::3]}
    write(tmp_path, tensors)
    expect_same(load_file(tmp_path / "model.safetensors"), tensors)


def test_one_file_has_no_index_and_several_have(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    tensors = {f"t{n}": torch.full((64,), float(n)) for n in range(5)}
    write(tmp_path / "one", tensors)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    write(tmp_path / "many", tensors, 1)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 5 * 256},
        "weight_map": {f"t{n}": f"model-{n + 1:05}-of-00005.safetensors" for n in range(5)},
    }


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, ["w"], 1) as writer:
        writer.add("w", torch.zeros(2))
        with pytest.raises(CheckpointError, match="tensor: w"):
            writer.add("w", torch.zeros(2))


def test_types_without_a_name_are_refused(tmp_path: Path) -> None:
    with (
        ShardWriter(tmp_path, ["w"], 1) as writer,
        pytest.raises(CheckpointError, match=r"no name for torch\.complex128"),
    ):
        writer.add("w", torch.zeros(2, dtype=torch.complex128))
