"""Weights move whole: published by rename, verified before they are used."""

import blake3
import msgspec
import pytest
import torch
from safetensors.torch import load_file

from polyrhythm.errors import RunError
from polyrhythm.weights.export import exported, named_weights, whole
from polyrhythm.weights.snapshot import MANIFEST_FILE, WEIGHTS_FILE, SnapshotError, read_manifest
from polyrhythm.weights.store import WeightStore
from tests.conftest import build_tiny_model


@pytest.fixture
def store(tmp_path) -> WeightStore:
    return WeightStore(tmp_path / "weights", keep=2)


def perturbed(model: torch.nn.Module, amount: float) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount)
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_loaded_version_has_the_published_bits(store, kind):
    model, other = build_tiny_model(kind), build_tiny_model(kind, seed=1)
    store.publish(exported(model), 0)
    store.load_into(named_weights(other), 0)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_a_snapshot_is_an_ordinary_safetensors_file(store):
    model = build_tiny_model("llama")
    tensors = load_file(store.publish(exported(model), 3) / WEIGHTS_FILE)
    assert tensors.keys() == named_weights(model).keys()
    assert "lm_head.weight" not in tensors, "tied weights are written once"
    assert all(torch.equal(tensors[name], tensor) for name, tensor in named_weights(model).items())


def test_old_versions_go_and_their_space_is_used_again(store):
    model = build_tiny_model("llama")
    inodes = []
    for version in range(6):
        folder = store.publish(exported(perturbed(model, 0.01)), version)
        inodes.append((folder / WEIGHTS_FILE).stat().st_ino)
        assert store.versions() == list(range(max(0, version - 1), version + 1))
        other = build_tiny_model("llama", seed=1)
        store.load_into(named_weights(other), version)
        assert torch.equal(next(other.parameters()), next(model.parameters()))
    assert len(set(inodes)) == 3


@pytest.mark.parametrize("damage", ["flip", "truncate", "no manifest", "bad manifest", "other version", "no bytes"])
def test_a_damaged_snapshot_is_refused(store, damage):
    folder = store.publish(exported(build_tiny_model("llama")), 1)
    weights, manifest = folder / WEIGHTS_FILE, folder / MANIFEST_FILE
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
        weights.write_bytes(content)
    elif damage == "truncate":
        weights.write_bytes(content[:-100])
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text("{")
    elif damage == "other version":
        manifest.write_bytes(msgspec.json.encode(msgspec.structs.replace(read_manifest(store.root, 1), version=2)))
    else:
        said = read_manifest(store.root, 1)
        name, entry = next(iter(said.tensors.items()))
        said.tensors[name] = msgspec.structs.replace(entry, num_bytes=0, digest=blake3.blake3(b"").hexdigest())
        manifest.write_bytes(msgspec.json.encode(said))
    with pytest.raises(SnapshotError):
        store.load_into(named_weights(build_tiny_model("llama", seed=1)), 1)


def test_another_model_is_refused(store):
    store.publish(exported(build_tiny_model("llama")), 0)
    with pytest.raises(SnapshotError, match="another model"):
        store.load_into(named_weights(build_tiny_model("qwen3")), 0)


@pytest.mark.parametrize("version", [-1, "../v00000000", "0", 1.0])
def test_only_a_number_names_a_version(store, version):
    with pytest.raises(SnapshotError, match="not a version number"):
        store.folder(version)


def test_a_failed_publication_leaves_no_version_behind(store, monkeypatch):
    model = build_tiny_model("llama")
    store.publish(exported(model), 0)

    def disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polyrhythm.weights.pieces.writing._write_at", disk_full)
    with pytest.raises(RunError, match=r"publishing weights v1 .* No space left on device: make room"):
        store.publish(exported(model), 1)
    assert store.versions() == [0]
    store.load_into(named_weights(build_tiny_model("llama", seed=1)), 0)


def test_a_version_can_be_published_again(store):
    model = build_tiny_model("llama")
    store.publish(exported(model), 0)
    store.publish(exported(perturbed(model, 0.5)), 0)
    other = build_tiny_model("llama", seed=1)
    store.load_into(named_weights(other), 0)
    assert torch.equal(next(other.parameters()), next(model.parameters()))


def test_a_version_stays_until_the_one_that_replaces_it_is_complete(store, monkeypatch):
    model, other = build_tiny_model("llama"), build_tiny_model("llama", seed=1)
    store.publish(exported(model), 0)

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("polyrhythm.weights.store._write_file", crash)
        store.publish(exported(other), 0)
    assert store.versions() == [0]
    store.verify(exported(model), 0)
    store.publish(exported(other), 0)
    store.verify(exported(other), 0)


def test_a_writer_that_was_given_up_and_wakes_later_leaves_the_next_version_alone(store):
    model = build_tiny_model("llama")
    late, now = WeightStore(store.root), WeightStore(store.root)
    now.publish(exported(model), 1)
    (store.root / ".staging").mkdir()  # of a version before 0.4.0
    now.begin(exported(model), 2)
    written = now.write_rows(exported(model), 2)
    with pytest.raises(SnapshotError, match="v1 cannot be written"):
        late.finish(1, [])  # another one has finished it meanwhile
    late.begin(exported(perturbed(build_tiny_model("llama"), 0.5)), 1)
    late.write_rows(exported(build_tiny_model("llama", seed=1)), 1)
    now.finish(2, [written])
    store.verify(exported(model), 2)
    assert sorted(path.name for path in store.root.iterdir()) == ["v00000001", "v00000002"], "nothing unfinished stays"


def test_versions_with_gaps_are_kept_by_their_number(store):
    model = build_tiny_model("llama")
    for version in (20, 40, 60):
        store.publish(exported(model), version)
    assert store.versions() == [40, 60]


def test_a_part_of_a_tensor_is_not_published_as_if_it_were_the_tensor(store):
    table = torch.arange(12.0).reshape(6, 2)
    half = whole("table", table)._replace(rows=table[:3])
    with pytest.raises(
        SnapshotError, match="table of weights v0 is not all there: nobody has written bytes 24 to 48 of 48"
    ):
        store.publish([half], 0)
    assert store.versions() == []
