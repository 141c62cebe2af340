"""Checkpoints on disk give the same bytes as the safetensors library, and broken ones are refused by name."""

import json
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.helpers.exports import bucketize, plan
from tests.helpers.ranks import allocate_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import ConfigError, WeightcastError
from weightcast.exporters import safetensors_file
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.wire.layout import Packing, plan_buckets

CPU = torch.device("cpu")
ALONE = TrainerGroup.connect(CPU, timeout_s=5)
MIB = 1 << 20


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(11, 6),
        "model.norm.weight": torch.randn(6).to(torch.bfloat16),
        "model.layers.0.weight": torch.randn(7, 6).half(),
        "scale": torch.randn(()).double(),
        "mask": torch.arange(6) % 2 == 0,
        "ids": torch.arange(5),
        "small": torch.arange(5, dtype=torch.uint8),
        "fp8": torch.randn(3, 3).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
    }


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def export(exporter, *, bucket_bytes=1 << 20, packing=None) -> dict[str, bytes]:
    layouts = plan_buckets(exporter.specs(), bucket_bytes=bucket_bytes, packing=packing or Packing())
    slots = [slot.random_(0, 256) for slot in allocate_slots(CPU, bucket_bytes)]
    parts: dict[str, list[bytes]] = {}
    for bucket in bucketize(exporter, layouts, ALONE, slots):
        for slot, view in bucket.views():
            parts.setdefault(slot.spec.name, []).append(raw(view))
    return {name: b"".join(pieces) for name, pieces in parts.items()}


def expected(wire_dtype=None) -> dict[str, bytes]:
    cast = {}
    for name, tensor in tensors().items():
        floating = wire_dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1
        cast[name] = raw(tensor.to(wire_dtype) if floating else tensor)
    return cast


@pytest.fixture
def single(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def write_sharded(folder, extra=None, **index):
    everything = list(tensors().items())
    weight_map = {}
    for number, part in enumerate((everything[:4], everything[4:])):
        name = f"model-{number + 1:05}-of-00002.safetensors"
        save_file(dict(part) | ((extra or {}) if number else {}), folder / name)
        weight_map |= {key: name for key, _ in part}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map | index}))
    return path


# -- valid checkpoints


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", ["file", "folder", "sharded", "index", "odd name"])
def test_every_shape_of_checkpoint_gives_the_bytes_of_its_tensors(tmp_path, shape, wire_dtype):
    path = tmp_path
    if shape in ("sharded", "index"):
        path = write_sharded(tmp_path) if shape == "index" else (write_sharded(tmp_path), tmp_path)[1]
    else:
        name = "weights.safetensors" if shape == "odd name" else "model.safetensors"
        save_file(tensors(), tmp_path / name)
        path = tmp_path / name if shape == "file" else tmp_path
    with CheckpointExporter(path, wire_dtype=wire_dtype) as exporter:
        assert exporter.device == CPU
        assert exporter.skipped == ()
        # 200 bytes: tensors are cut between rows.
        assert export(exporter, bucket_bytes=200, packing=Packing(alignment_bytes=1)) == expected(wire_dtype)
        assert export(exporter) == expected(wire_dtype)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 40), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int32]),
    wire_dtype=st.sampled_from([None, torch.float16, torch.float64]),
    chunk_bytes=st.sampled_from([8, 64, 4096]),
)
def test_any_tensor_is_read_whole_through_any_chunk(tmp_path, monkeypatch, shape, dtype, wire_dtype, chunk_bytes):
    monkeypatch.setattr(safetensors_file, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(safetensors_file, "_MAX_READ_BYTES", 100)
    tensor = (torch.randn(shape) * 100).to(dtype)
    save_file({"before": torch.ones(3), "t": tensor}, tmp_path / "model.safetensors")
    with CheckpointExporter(tmp_path, wire_dtype=wire_dtype) as exporter:
        got = export(exporter, bucket_bytes=40 * 40 * 8)
    want = tensor.to(wire_dtype) if wire_dtype and tensor.is_floating_point() else tensor
    assert got["t"] == raw(want)


def test_one_part_of_a_checkpoint_is_sent_by_the_names_of_its_tensors(single):
    with CheckpointExporter(single, match=r"model\..*norm\.weight|fp8") as exporter:
        assert [spec.name for spec in exporter.specs()] == ["model.norm.weight", "fp8"]
        assert export(exporter) == {name: expected()[name] for name in ("fp8", "model.norm.weight")}
    with pytest.raises(ConfigError, match=r"has no tensors that match 'model'"):
        CheckpointExporter(single, match="model")


def test_tensors_are_read_one_by_one_in_the_dtype_of_the_file(single):
    with CheckpointExporter(single, wire_dtype=torch.bfloat16) as exporter:
        found = dict(exporter.tensors())
    for name, tensor in tensors().items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)


def test_a_rank_without_a_bucket_reads_nothing(single):
    with CheckpointExporter(single) as exporter:
        [layout] = plan_buckets(exporter.specs(), bucket_bytes=1 << 20, packing=Packing())
        plan(exporter, [layout])[0].fill(None)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_a_head_that_the_configuration_ties_is_left_out_and_named(tmp_path, same, nested):
    embedding = torch.randn(11, 6)
    head = embedding.clone() if same else torch.randn(11, 6)
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": head}, tmp_path / "model.safetensors")
    for tied in (False, True):
        config = {"tie_word_embeddings": tied}
        (tmp_path / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
        with CheckpointExporter(tmp_path) as exporter:
            names = [spec.name for spec in exporter.specs()]
            assert ("lm_head.weight" in names) is not tied
            assert exporter.skipped == (("lm_head.weight",) if tied else ())


def test_tensors_that_the_index_does_not_list_are_left_out_and_named(tmp_path):
    write_sharded(tmp_path, extra={"rotary.inv_freq": torch.ones(3)})
    with CheckpointExporter(tmp_path) as exporter:
        assert exporter.skipped == ("rotary.inv_freq",)
        assert export(exporter) == expected()


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["own", "bf16"])
def test_memory_is_the_buckets_and_a_chunk(tmp_path, wire_dtype):
    save_file({f"t{number}": torch.ones(1024, 2048) for number in range(20)}, tmp_path / "model.safetensors")
    with CheckpointExporter(tmp_path, wire_dtype=wire_dtype) as exporter:
        layouts = plan_buckets(exporter.specs(), bucket_bytes=16 * MIB, packing=Packing())
        slots = [slot.fill_(0) for slot in allocate_slots(CPU, 16 * MIB)]
        with PeakMemory(CPU) as peak:
            for bucket in bucketize(exporter, layouts, ALONE, slots):
                assert all(view.min() == 1 == view.max() for _, view in bucket.views())
    assert peak.extra_bytes < 8 * MIB


# -- broken checkpoints


def header(fields, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BROKEN = {
    "empty file": (b"", "0 bytes"),
    "no header": (b"\x08\0\0\0\0\0\0\0", "truncated"),
    "text": (b"hello, this is not a checkpoint at all", "not a safetensors file"),
    "zip": (b"PK\x03\x04" + b"\0" * 60, "not a safetensors file"),
    "huge header": (header({}, length=1 << 40), "header would have"),
    "header past the end": (header({"a": one()}, length=90_000_000), "truncated"),
    "not json": (header(b"{" + b"x" * 30), "header is not valid"),
    "not utf-8": (header(b'{"\xff\xfe": 1}'), "header is not valid"),
    "not an object": (header(b"[1, 2]"), "not an object"),
    "deep": (header(b"[" * 100_000), "header is not valid"),
    "no tensors": (header({}), "no tensors"),
    "metadata only": (header({"__metadata__": {"format": "pt"}}), "no tensors"),
    "no dtype": (header({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8), "header is not valid"),
    "text as shape": (header({"a": one(shape="ab")}, b"\0" * 8), "header is not valid"),
    "bool as extent": (header({"a": one(shape=(True,))}, b"\0" * 8), "header is not valid"),
    "truncated": (header({"a": one()}, b"\0" * 7), "truncated: .* a ends at byte"),
    "bytes too many": (header({"a": one()}, b"\0" * 9), "last 1 bytes"),
    "hole": (header({"a": one(), "b": one(offsets=(9, 17))}, b"\0" * 17), "1 bytes before b"),
    "overlap": (header({"a": one(), "b": one(offsets=(4, 12))}, b"\0" * 12), "b overlaps a"),
    "wrong size": (header({"a": one(shape=(3,))}, b"\0" * 8), "needs 12 bytes"),
    "negative extent": (header({"a": one(shape=(-2, -1))}, b"\0" * 8), "cannot be sent"),
    "negative offset": (header({"a": one(offsets=(-8, 0))}, b"\0" * 8), "has -8 to 0"),
    "backwards": (header({"a": one(shape=(0,), offsets=(8, 0))}, b"\0" * 8), "needs 0 bytes"),
    "too large": (header({"a": one(shape=(1 << 40, 1 << 40), offsets=(0, 1 << 82))}), "truncated|cannot be sent|needs"),
    "nine dimensions": (header({"a": one(shape=(1,) * 8 + (2,))}, b"\0" * 8), "cannot be sent"),
    "dtype unknown": (header({"a": one(dtype="C64", shape=(1,))}, b"\0" * 8), "dtype C64"),
    "same name twice": (header(b'{"a": %b, "a": %b}' % ((json.dumps(one()).encode(),) * 2), b"\0" * 8), "twice"),
    "name with a space": (header({"a b": one()}, b"\0" * 8), "printable"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_in_one_line(tmp_path, case):
    data, words = BROKEN[case]
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=words) as caught:
        CheckpointExporter(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_still_valid(tmp_path, data):
    whole = header({"a": one(), "b": one("BF16", (2, 2), (8, 16))}, bytes(range(16)))
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(0, len(whole))) :]
    path = tmp_path / "model.safetensors"
    path.write_bytes(damaged)
    try:
        exporter = CheckpointExporter(path)
    except ConfigError:
        return
    with exporter:
        assert sum(map(len, export(exporter).values())) == 16


def test_wrong_paths_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        CheckpointExporter(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        CheckpointExporter(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="not a safetensors checkpoint"):
        CheckpointExporter(tmp_path)
    for name in "ab":
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match="has 2"):
        CheckpointExporter(tmp_path)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ConfigError, match="cannot be opened"):
        CheckpointExporter(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": "model-00003-of-00002.safetensors"}, "not beside it"),
        ({"ids": "../model.safetensors"}, "not beside it"),
        ({"missing": "model-00001-of-00002.safetensors"}, "lists missing in"),
        ({"ids": "model-00001-of-00002.safetensors"}, "lists ids in"),
    ],
)
def test_an_index_that_does_not_match_its_files_is_refused(tmp_path, change, words):
    write_sharded(tmp_path, **change)
    with pytest.raises(ConfigError, match=words):
        CheckpointExporter(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{"])
def test_an_invalid_index_is_refused(tmp_path, text):
    write_sharded(tmp_path).write_text(text)
    with pytest.raises(ConfigError, match="index"):
        CheckpointExporter(tmp_path)


def test_a_truncated_shard_is_refused(tmp_path):
    write_sharded(tmp_path)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"00002-of-00002\.safetensors is truncated"):
        CheckpointExporter(tmp_path)


def test_a_file_that_shrinks_later_is_an_error(single):
    with CheckpointExporter(single) as exporter:
        [layout] = plan_buckets(exporter.specs(), bucket_bytes=1 << 20, packing=Packing())
        os.truncate(single / "model.safetensors", 500)
        with pytest.raises(WeightcastError, match="shorter"):
            plan(exporter, [layout])[0].fill(torch.zeros(1 << 20, dtype=torch.uint8))


def test_another_checkpoints_layout_is_refused(single, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    save_file({"a": torch.ones(3)}, other / "model.safetensors")
    with CheckpointExporter(single) as exporter, CheckpointExporter(other) as stranger:
        [layout] = plan_buckets(stranger.specs(), bucket_bytes=1 << 20, packing=Packing())
        with pytest.raises(ConfigError, match=r"carries a \[3\], and .* (has it as|does not have it)"):
            plan(exporter, [layout])


def test_a_checkpoint_wire_dtype_that_needs_scales_is_refused(single):
    with pytest.raises(ConfigError, match="cast"):
        CheckpointExporter(single, wire_dtype=torch.float8_e4m3fn)
