"""Tests of the payloads that dialects read: pickles are never executed, and inconsistent tables are refused."""

from __future__ import annotations

import contextlib
import os
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightcast.comm import pickle_writer
from weightcast.errors import WireError
from weightcast.lab.dialects.live_weights import cut, open_cuda, table
from weightcast.lab.dialects.sglang_bodies import bucket_of
from weightcast.lab.dialects.unpickled import Called, Named, read

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/should-never-be-there",)


@given(plain)
def test_plain_data_is_read_as_pickle_itself_reads_it(value: Any) -> None:
    for protocol in (4, 5):  # those before call functions to make bytes
        assert read(pickle.dumps(value, protocol=protocol)) == value


def test_a_call_stays_a_description() -> None:
    found = read(pickle.dumps(Evil()))
    assert found == Called(Named("posix", "system"), ("touch /tmp/should-never-be-there",))
    assert not os.path.exists("/tmp/should-never-be-there")
    found = read(pickle.dumps(SimpleNamespace(name="w", dtype=torch.bfloat16)))
    assert str(found.function) == "types.SimpleNamespace"
    assert found.state["name"] == "w"
    assert str(found.state["dtype"]) == "torch.bfloat16"


@given(st.binary(max_size=64) | plain.map(lambda value: pickle.dumps(value)[3:40]))
def test_nothing_but_a_refusal_comes_of_garbage(data: bytes) -> None:
    with contextlib.suppress(WireError):
        read(data)


@pytest.mark.parametrize("payload", [b"", b"\x80\x04", b"\x80\x04]", b"\x80\x04u.", b"\x80\x04K\x01)R.", b"cos\n."])
def test_broken_pickles_are_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        read(payload)


def test_what_is_written_by_hand_is_read_by_pickle() -> None:
    content = pickle_writer.mapping(
        [
            ("numbers", pickle_writer.integers((0, -1, 127, 128, 255, 1 << 40))),
            ("nothing", pickle_writer.listing([])),
            ("words", pickle_writer.listing([pickle_writer.text("ä"), pickle_writer.raw(b"\0x"), pickle_writer.NONE])),
            ("truth", pickle_writer.sequence([pickle_writer.boolean(True), pickle_writer.boolean(False)])),
            ("dtype", pickle_writer.name("torch", "bfloat16")),
            ("entry", pickle_writer.namespace([("name", pickle_writer.text("w"))])),
        ]
    )
    assert pickle.loads(pickle_writer.pickled(content)) == {
        "numbers": (0, -1, 127, 128, 255, 1 << 40),
        "nothing": [],
        "words": ["ä", b"\0x", None],
        "truth": (True, False),
        "dtype": torch.bfloat16,
        "entry": SimpleNamespace(name="w"),
    }


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes"),
    [
        (["a", "b"], ["float32"], [[1], [1]]),  # a shorter list would drop tensors without a word
        (["a"], ["float32"], [[1], [2]]),
        (["a"], ["Tensor"], [[1]]),  # an attribute of torch, but no dtype
        (["a"], ["float32"], [[1 << 50]]),
    ],
)
def test_lists_that_do_not_fit_together_are_refused(names: Any, dtypes: Any, shapes: Any) -> None:
    with pytest.raises(ValueError, match=r"zip|dtype|bytes"):
        table(names, dtypes, shapes)


def test_flat_bytes_are_cut_end_to_end() -> None:
    specs = table(["a", "b"], ["bfloat16", "float32"], [[3], [2, 2]])
    first, second = torch.arange(3).bfloat16(), torch.arange(4).float().view(2, 2)
    flat = torch.cat([first.view(torch.uint8), second.view(-1).view(torch.uint8)])
    assert [(name, tensor.tolist()) for name, tensor in cut(flat, specs)] == [
        ("a", first.tolist()),
        ("b", second.tolist()),
    ]


def cuda_tensor(uuid: str, *, count: int = 15) -> Any:
    """A CUDA handle in torch's form as ``read`` describes it."""
    typed, byte = Named("torch.storage", "TypedStorage"), Named("torch", "uint8")
    arguments = [Named("torch", "Tensor"), (8,), (1,), 0, typed, byte, uuid, b"h", 8, 0, False, b"r", 0, b"", False]
    return Called(Named("torch.multiprocessing.reductions", "rebuild_cuda_tensor"), tuple(arguments[:count]))


def test_memory_of_a_gpu_that_cannot_be_seen_is_refused_by_its_uuid() -> None:
    with pytest.raises(WireError, match="does not see GPU 1b2c"):
        bucket_of({"flattened_tensor": cuda_tensor("1b2c"), "metadata": []})


def test_a_handle_of_another_form_is_refused() -> None:
    with pytest.raises(WireError, match="needs 15 arguments, not 14"):
        open_cuda(cuda_tensor("1b2c", count=14).arguments, torch.device("cuda", 0))
