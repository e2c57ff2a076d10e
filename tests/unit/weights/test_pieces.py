"""Several processes make one version, each with its own rows, and read it with other borders than it was written with."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Replicate

from polyrhythm.errors import RunError
from polyrhythm.weights.export import Rows, whole
from polyrhythm.weights.pieces import writing
from polyrhythm.weights.snapshot import MANIFEST_FILE, SnapshotError, Written, newest_whole_version, read_manifest
from polyrhythm.weights.store import WeightStore

SHAPES = {"table": (10, 7), "matrix": (8, 3, 2), "norm": (3,), "count": ()}
"""Of four writers the norm leaves one without rows, and the count belongs to the first."""


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def share(tensors: dict[str, torch.Tensor], index: int, num: int) -> Iterator[Rows]:
    """As FSDP2 divides: rows in chunks of equal size, the last ones short or empty."""
    for name, tensor in tensors.items():
        if not tensor.dim():
            if index == 0:
                yield whole(name, tensor)
            continue
        size = -(-len(tensor) // num)
        first = min(index * size, len(tensor))
        yield Rows(name, tuple(tensor.shape), first, tensor[first : first + size])


def in_shares(store: WeightStore, version: int, num: int, of: dict[str, torch.Tensor] | None = None) -> Path:
    of = of or tensors()
    store.begin([whole(name, tensor) for name, tensor in of.items()], version)
    return store.finish(version, [store.write_rows(share(of, index, num), version) for index in range(num)])


@pytest.fixture
def store(tmp_path) -> WeightStore:
    return WeightStore(tmp_path / "weights")


WRITER = """
import sys
from pathlib import Path
import msgspec
from polyrhythm.weights.store import WeightStore
from tests.unit.weights.test_pieces import share, tensors
written = WeightStore(Path(sys.argv[1])).write_rows(share(tensors(), int(sys.argv[2]), 4), 1)
sys.stdout.buffer.write(msgspec.json.encode(written))
"""


def test_four_processes_write_what_one_would(store, tmp_path):
    store.begin([whole(name, tensor) for name, tensor in tensors().items()], 1)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(store.root), str(index)], stdout=subprocess.PIPE)
        for index in range(4)
    ]
    assert store.versions() == [], "nothing is visible before it is complete"
    written = [msgspec.json.decode(writer.communicate(timeout=300)[0], type=Written) for writer in writers]
    folder = store.finish(1, written)
    alone = WeightStore(tmp_path / "alone").publish([whole(name, tensor) for name, tensor in tensors().items()], 1)
    assert (folder / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST_FILE, "model.safetensors"]
    assert len(read_manifest(store.root, 1).tensors["table"].pieces) == 4


@pytest.mark.parametrize("num_readers", [1, 2, 3, 7])
def test_what_four_have_written_is_read_and_verified_with_other_borders(store, num_readers):
    in_shares(store, 1, 4)
    for index in range(num_readers):
        targets = [rows._replace(rows=torch.zeros_like(rows.rows)) for rows in share(tensors(), index, num_readers)]
        store.load_rows_into(targets, 1, is_part=index > 0)
        for target, right in zip(targets, share(tensors(), index, num_readers), strict=True):
            assert torch.equal(target.rows, right.rows), target.name
    full = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    store.load_into(full, 1)
    assert all(torch.equal(full[name], tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize("first, last", [(0, 10), (0, 3), (4, 5), (2, 9), (6, 6)])
def test_own_rows_are_compared_with_what_was_published(store, first, last):
    table = tensors()["table"]
    in_shares(store, 1, 4, {"table": table})
    own = Rows("table", (10, 7), first, table[first:last].clone())
    store.verify([own], 1)
    if first < last:
        own.rows[-1, -1] += 1
        with pytest.raises(SnapshotError, match="table of weights v1 is not what was published"):
            store.verify([own], 1)


def test_an_altered_byte_is_refused_by_whoever_touches_its_piece(store):
    folder = in_shares(store, 1, 4)
    entry = read_manifest(store.root, 1).tensors["table"]
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[entry.offset + entry.pieces[1].offset + 5] ^= 1  # of row 3
    path.write_bytes(content)
    shape = SHAPES["table"]
    for first, last, is_refused in ((0, 3, False), (2, 4, True), (5, 6, True), (6, 10, False)):
        rows = Rows("table", shape, first, torch.zeros(last - first, 7))
        if is_refused:
            with pytest.raises(SnapshotError, match="table of weights v1 is not what was published"):
                store.load_rows_into([rows], 1, is_part=True)
        else:
            store.load_rows_into([rows], 1, is_part=True)


def test_a_missing_piece_and_one_that_came_twice_are_refused_at_the_end(store):
    of = tensors()
    store.begin([whole(name, tensor) for name, tensor in of.items()], 1)
    written = [store.write_rows(share(of, index, 4), 1) for index in range(4)]
    with pytest.raises(SnapshotError, match="table of weights v1 is not all there: nobody has written bytes 84 to 168"):
        store.finish(1, [written[0], *written[2:]])
    with pytest.raises(SnapshotError, match="table of weights v1: bytes 0 to 84 were written twice"):
        store.finish(1, [*written, written[0]])
    assert store.versions() == []
    store.finish(1, written)


def test_rows_go_into_what_was_begun_and_nowhere_else(store):
    of = tensors()
    with pytest.raises(SnapshotError, match="nothing was begun there"):
        store.write_rows(share(of, 0, 2), 1)
    store.begin([whole(name, tensor) for name, tensor in of.items()], 1)
    with pytest.raises(SnapshotError, match=r"weights v2 cannot be written .* nothing was begun there"):
        store.write_rows(share(of, 0, 2), 2)
    with pytest.raises(SnapshotError, match="begun without a tensor other"):
        store.write_rows([whole("other", torch.ones(2))], 1)
    with pytest.raises(SnapshotError, match=r"table is F32\[10, 7\] in weights v1, the model has BF16"):
        store.write_rows([whole("table", of["table"].bfloat16())], 1)
    with pytest.raises(SnapshotError, match="are not rows of"):
        store.write_rows([Rows("table", (10, 7), 8, of["table"][:3])], 1)


def test_a_tensor_that_is_one_in_name_only_is_refused_by_its_name(store, tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1
    )  # pyright: ignore
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        shard = DTensor.from_local(torch.ones(4, 2), mesh, [Replicate()])
        with pytest.raises(SnapshotError, match="embedding is a DTensor"):
            store.publish([whole("embedding", shard)], 1)
    finally:
        torch.distributed.destroy_process_group()


def test_a_large_tensor_is_written_in_several_pieces(store, monkeypatch):
    monkeypatch.setattr(writing, "PIECE_BYTES", 100)
    folder = in_shares(store, 1, 2)
    assert len(read_manifest(store.root, 1).tensors["table"].pieces) == 4  # 140 bytes each
    assert torch.equal(load_file(folder / "model.safetensors")["table"], tensors()["table"])
    store.verify([whole(name, tensor) for name, tensor in tensors().items()], 1)


def test_a_larger_model_has_several_ordinary_files(tmp_path):
    store = WeightStore(tmp_path)
    store.file_bytes = 200
    for version in range(4):  # the last one in recycled space
        folder = in_shares(store, version, 3)
    names = [f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)]
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST_FILE, *names]
    parts = [load_file(folder / name) for name in names]
    assert [list(part) for part in parts] == [["table"], ["matrix"], ["norm", "count"]]
    full = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    store.load_into(full, 3)
    assert all(torch.equal(full[name], tensor) for name, tensor in tensors().items())
    assert newest_whole_version(tmp_path) == 3
    (folder / names[1]).write_bytes(b"")
    assert newest_whole_version(tmp_path) == 2
    store.file_bytes = 10**6
    assert sorted(path.name for path in in_shares(store, 4, 2).iterdir()) == [MANIFEST_FILE, "model.safetensors"]


def test_a_manifest_of_an_earlier_release_is_read(store):
    folder = store.publish([whole(name, tensor) for name, tensor in tensors().items()], 1)
    said = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes())
    del said["files"]
    for entry in said["tensors"].values():
        (piece,) = entry.pop("pieces")
        entry["digest"] = piece["digest"]
    assert set(said) == {"version", "num_bytes", "tensors", "probe"}
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(said))
    assert newest_whole_version(store.root) == 1
    store.verify([whole(name, tensor) for name, tensor in tensors().items()], 1)
    altered = tensors() | {"norm": torch.zeros(3)}
    with pytest.raises(SnapshotError, match="norm of weights v1 is not what was published"):
        store.verify([whole(name, tensor) for name, tensor in altered.items()], 1)


@pytest.mark.parametrize(
    "name", ["../secret", "model.safetensors/../../x", "manifest.json", "model-1-of-2.safetensors"]
)
def test_a_manifest_names_no_other_file(store, name):
    folder = store.publish([whole("a", torch.ones(2))], 1)
    said = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes())
    said["files"] = {name: said["num_bytes"]}
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(said))
    with pytest.raises(SnapshotError, match="is not a file of weights v1"):
        store.load_into({"a": torch.zeros(2)}, 1)


def test_what_must_be_rounded_goes_through_buffers_that_are_used_again(store, monkeypatch):
    monkeypatch.setattr(writing, "PIECE_BYTES", 64)
    wide = {"table": tensors()["table"], "turned": torch.randn(9, 5, generator=torch.Generator().manual_seed(1)).T}
    rows = [whole(name, tensor)._replace(dtype=torch.bfloat16) for name, tensor in wide.items()]
    folder = store.publish(rows, 1)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name], tensor.bfloat16()) for name, tensor in wide.items())
    assert len(store.manifest(1).tensors["table"].pieces) == 3 and len(store.manifest(1).tensors["turned"].pieces) == 2
    store.verify(rows, 1)
    store.publish(rows, 2)
    assert (store.folder(2) / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_after_a_failure_the_buffers_are_as_good_as_new(store, monkeypatch):
    rows = [whole(name, tensor)._replace(dtype=torch.bfloat16) for name, tensor in tensors().items()]

    def disk_full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="No space left"):
        patch.setattr(writing, "_write_at", disk_full)
        store.publish(rows, 1)
    store.publish(rows, 2)
    store.verify(rows, 2)
