"""Which casts an engine makes of what a trainer sends, and which it refuses before anything moves."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.helpers.models import buckets_of, specs_of
from tests.helpers.sessions import Sender
from weightcast.errors import ConfigError, Refused
from weightcast.receiver import WeightReceiver
from weightcast.receiver.loader import Loader
from weightcast.transports.preflight import check_fits
from weightcast.wire.layout import DTYPES, TensorSpec

FLOATS = {"float64", "float32", "bfloat16", "float16"}


class One(nn.Module):
    """A model of one parameter, whose loader copies."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.w.data.copy_(tensor)


def spec(dtype: str) -> TensorSpec:
    return TensorSpec(name="w", dtype=dtype, shape=(4, 4))


def loader_of(kept: str, *, expected: str = "") -> Loader:
    model = One(DTYPES[kept])
    return Loader(model, load_weights=model.load_weights, expected=[spec(expected or kept)])


@pytest.mark.parametrize(("sent", "kept"), list(itertools.product(DTYPES, DTYPES)))
def test_only_wide_floats_are_cast(sent, kept):
    link = SimpleNamespace(url="http://e", info=SimpleNamespace(model="m", specs=(spec(kept),), optional=()))
    if sent == kept or {sent, kept} <= FLOATS:
        loader_of(kept).check((spec(sent),))
        check_fits([link], (spec(sent),))
        return
    for check, error in ((loader_of(kept).check, Refused), (lambda specs: check_fits([link], specs), ConfigError)):
        with pytest.raises(error, match=f"w travels as {sent} and the engine keeps {kept}.*send it as {kept}"):
            check((spec(sent),))


@pytest.mark.parametrize("kept", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_parameter_counts_and_not_what_the_checkpoint_says(kept):
    loader = loader_of(kept, expected="bfloat16")
    with pytest.raises(Refused, match=f"w travels as bfloat16 and the engine keeps {kept}"):
        loader.check((spec("bfloat16"),))


def test_a_loader_that_widens_its_own_checkpoint_may_go_on_doing_so():
    loader = loader_of("bfloat16", expected="float8_e4m3fn")
    loader.check((spec("float8_e4m3fn"),))
    with pytest.raises(Refused, match="w travels as bfloat16 and the engine keeps float8_e4m3fn"):
        loader.check((spec("bfloat16"),))


@pytest.mark.parametrize("staging", ["device", "none"])
@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float32, torch.float64])
def test_values_that_float16_does_not_hold_are_refused_before_the_switch(sent, staging):
    model = One(torch.float16)
    receiver = WeightReceiver(model, load_weights=model.load_weights, staging=staging)
    good = torch.randn(4, 4).to(sent)
    good[0, 0], good[0, 1] = 65504.0, float("inf")  # what is infinite in the trainer is so in the engine
    bad = torch.randn(4, 4).to(sent)
    bad[3, 2] = -70000.0
    sender = Sender({"w": bad}, bucket_bytes=64)
    acks = [receiver.apply(message) for message in sender.transfer()]
    assert [ack.ok for ack in acks] == [*[True] * (len(acks) - 1), False]
    assert "w has values beyond float16's" in acks[-1].error
    assert not receiver.apply(sender.commit()).ok
    assert receiver.apply(sender.abort()).touched == (staging == "none")
    assert staging == "none" or not model.w.any()
    sender = Sender({"w": good}, bucket_bytes=64)
    for message in sender.transfer():
        ack = receiver.apply(message)
        assert ack.ok, ack.error
    assert receiver.apply(sender.commit()).ok
    assert torch.equal(model.w, good.to(torch.float16))


def test_what_float16_does_not_hold_is_found_in_a_part_of_a_tensor():
    model = One(torch.float16)
    loader = Loader(model, load_weights=model.load_weights, expected=[spec("float32")])
    weights = {"w": torch.zeros(4, 4)}
    weights["w"][3, 3] = 1e6
    loader.check(specs_of(weights))
    loader.begin()
    found = []
    for bucket in buckets_of(weights, bucket_bytes=16):
        loader.load(bucket)
        found.append(loader.copier.overflowed())
    assert found[0] == []
    assert found[-1] == ["w"]
    loader.begin()
    assert loader.copier.overflowed() == []
