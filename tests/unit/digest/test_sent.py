"""The sender's digests are those of whole tensors, for any buckets and any dtypes that engines keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.helpers.models import buckets_of, specs_of, weights_of
from weightcast.digest import on_cpu
from weightcast.digest import sent as sent_module
from weightcast.digest.definition import model_digest, tensor_digest, unequal
from weightcast.digest.sent import CastSums, Sent, SentDigests, casts_of
from weightcast.update.prepare import SendPlan
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import DTYPES, Packing, TensorSpec, plan_buckets

WEIGHTS = weights_of(4) | {"empty": torch.zeros(0, 5), "hollow": torch.zeros(5, 0)}


def sent(weights, *, bucket_bytes: int, kept=()):
    found = SentDigests(CastSums(casts_of(specs_of(weights), kept)))
    for bucket in buckets_of(weights, bucket_bytes=bucket_bytes):
        found.add(bucket)
        bucket.data.zero_()  # the sender's buffer is filled again
    return found.finish()


def keeping(dtypes):
    """An engine's tensors, some of them in other dtypes than those that travel."""
    return [replace(spec, dtype=dtypes.get(spec.name, spec.dtype)) for spec in specs_of(WEIGHTS)]


@settings(max_examples=40, deadline=None)
@given(st.integers(32, 3000))
def test_buckets_play_no_part(bucket_bytes):
    found = sent(WEIGHTS, bucket_bytes=bucket_bytes)
    assert found.received == {name: tensor_digest(tensor) for name, tensor in WEIGHTS.items()}
    assert found.kept(specs_of(WEIGHTS)) == found.received


def test_every_engine_gets_the_digest_of_what_it_keeps(monkeypatch):
    monkeypatch.setattr(sent_module, "_CAST_BYTES", 40)  # casts in several parts
    engines = [
        {"q.weight": "bfloat16", "norm.weight": "float32", "scale": "float16"},
        {"q.weight": "float32", "k.weight": "float16", "empty": "bfloat16"},
    ]
    for bucket_bytes in (64, 4000):
        found = sent(WEIGHTS, bucket_bytes=bucket_bytes, kept=[keeping(dtypes) for dtypes in engines])
        assert found.received["q.weight"] == tensor_digest(WEIGHTS["q.weight"])
        for dtypes in engines:
            kept = {spec.name: WEIGHTS[spec.name].to(spec.torch_dtype) for spec in keeping(dtypes)}
            right = {name: tensor_digest(tensor) for name, tensor in kept.items()}
            assert found.kept(keeping(dtypes)) == right
    assert found.kept(specs_of(WEIGHTS)) == found.received


@pytest.mark.parametrize("compiled", [True, False], ids=["numba", "torch"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_casts_have_the_digests_of_each_tensor_cast_by_itself(compiled, monkeypatch, data):
    """Gaps between tensors and the size of a part play no role."""
    assert on_cpu.available()
    wide = ["float32", "bfloat16", "float16", "float64"]
    make = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    weights, kept = {}, []
    for number in range(data.draw(st.integers(1, 9))):
        shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
        dtype = data.draw(st.sampled_from([*wide, "int16"]))
        tensor = (torch.randn(shape, generator=make) * 50).to(DTYPES[dtype])
        weights[f"t{number}"] = tensor
        keeps = data.draw(st.sampled_from(wide)) if dtype != "int16" else dtype
        kept.append(replace(specs_of({f"t{number}": tensor})[0], dtype=keeps))
    packing = Packing(alignment_bytes=data.draw(st.sampled_from([1, 16, 256])))
    specs = specs_of(weights)
    with monkeypatch.context() as patch:
        patch.setattr(sent_module, "_CAST_BYTES", data.draw(st.sampled_from([1, 60, 300, 16 << 20])))
        if not compiled:
            patch.setattr(on_cpu, "worth_it", lambda size_bytes: False)
        casts = CastSums(casts_of(specs, [kept, specs]))
        layouts = plan_buckets(specs, bucket_bytes=data.draw(st.integers(800, 9000)), packing=packing)
        for _ in range(2):
            found = SentDigests(casts)
            for layout in layouts:
                bucket = Bucket(layout, torch.full((layout.size_bytes,), 255, dtype=torch.uint8))
                for slot, view in bucket.views():
                    rows = slice(slot.first_row, slot.first_row + slot.num_rows)
                    view.copy_(weights[slot.spec.name][rows] if slot.shape else weights[slot.spec.name])
                found.add(bucket)
            want = {spec.name: tensor_digest(weights[spec.name].to(spec.torch_dtype)) for spec in kept}
            assert found.finish().kept(kept) == want
            found.release()


def test_what_an_engine_does_not_keep_is_not_expected_of_it():
    found = sent(WEIGHTS, bucket_bytes=4000)
    some = specs_of(WEIGHTS)[1:]
    assert found.kept(some) == {spec.name: found.received[spec.name] for spec in some}
    with pytest.raises(KeyError):
        found.kept([*some, replace(some[0], name="not sent")])


def test_only_other_dtypes_are_cast():
    specs = specs_of(WEIGHTS)
    assert casts_of(specs, [specs, specs]) == {}
    other, third = keeping({"q.weight": "bfloat16"}), keeping({"q.weight": "float16", "scale": "bfloat16"})
    assert casts_of(specs, [specs, other, third]) == {"q.weight": {"bfloat16", "float16"}, "scale": {"bfloat16"}}
    assert casts_of(specs, [[replace(specs[0], name="not sent", dtype="int8")]]) == {}


def test_what_engines_cast_is_looked_for_again_whenever_a_table_is_another():
    same, other = keeping({}), keeping({"scale": "bfloat16"})
    plan = SendPlan(keeping({}), ())
    assert plan.casts([same]).dtypes == {}
    assert plan.casts([same, other]).dtypes == {"scale": {"bfloat16"}}
    assert plan.casts([other]).dtypes == {"scale": {"bfloat16"}}
    assert plan.casts([same]).dtypes == {}


def test_what_differs_is_named():
    digests_of = sent(WEIGHTS, bucket_bytes=4000).received
    assert unequal(digests_of, dict(digests_of)) == []
    assert unequal(digests_of, digests_of | {"more": "0" * 16}) == []
    assert unequal(digests_of, digests_of | {"scale": "0" * 16}) == ["scale"]
    assert unequal(digests_of, {}) == list(digests_of)


@pytest.mark.parametrize("what", ["bit", "elements", "tensors"])
def test_any_change_changes_it(what):
    changed = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    names = {"q.weight"}
    if what == "bit":
        changed["q.weight"].view(torch.int32)[3, 5] ^= 1
    elif what == "elements":
        changed["q.weight"][0, 0], changed["q.weight"][7, 7] = WEIGHTS["q.weight"][7, 7], WEIGHTS["q.weight"][0, 0]
    else:
        changed["k.weight"], changed["v.weight"] = changed["v.weight"], changed["k.weight"]
        names = {"k.weight", "v.weight"}
    before = sent(WEIGHTS, bucket_bytes=200).received
    after = sent(changed, bucket_bytes=200).received
    assert {name for name in before if before[name] != after[name]} == names


def test_nothing_sent_is_nothing():
    found = SentDigests().finish()
    assert not found
    assert not Sent()
    assert found.received == found.kept([]) == {}


def test_one_digest_stands_for_all():
    def of_all(weights):
        found = sent(weights, bucket_bytes=4000)
        assert found
        return found.digest_arrived(specs_of(weights))

    right = of_all(WEIGHTS)
    assert right == of_all(dict(reversed(WEIGHTS.items()))) == model_digest(sent(WEIGHTS, bucket_bytes=200).received)
    others = [
        of_all({name: tensor.to(torch.float64) for name, tensor in WEIGHTS.items()}),
        *(of_all({name if name != one else "other": WEIGHTS[name] for name in WEIGHTS}) for one in WEIGHTS),
    ]
    for one in WEIGHTS:
        flipped = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
        if flipped[one].numel():
            flipped[one].view(-1).view(torch.uint8)[0] ^= 1
            others.append(of_all(flipped))
    assert len({right, *others}) == 1 + len(others)


def test_one_digest_says_what_ranks_copy_of_what_was_sent():
    """In the dtype that an engine keeps, and of nothing that did not travel."""
    kept = keeping({"q.weight": "bfloat16", "scale": "float16"})
    found = sent(WEIGHTS, bucket_bytes=200, kept=[kept])
    specs = [*kept, TensorSpec(name="of no trainer", dtype="float32", shape=(2,))]
    as_kept = {name: found.cast.get(name, {}).get("bfloat16", digest) for name, digest in found.received.items()}
    assert as_kept["q.weight"] == tensor_digest(WEIGHTS["q.weight"].to(torch.bfloat16))
    as_kept["scale"] = tensor_digest(WEIGHTS["scale"].to(torch.float16))
    assert found.arrived(specs) == as_kept
    assert found.digest_arrived(specs) == found.digest_kept(kept) == model_digest(as_kept)


def test_one_digest_says_what_must_be_kept_in_other_dtypes():
    other = keeping({"q.weight": "bfloat16", "scale": "float16"})
    found = sent(WEIGHTS, bucket_bytes=200, kept=[other])
    for table in (specs_of(WEIGHTS), other):
        kept = dict(found.kept(table))
        assert found.digest_kept(table) == model_digest(kept)


def test_what_engines_must_keep_is_worked_out_once_for_all_with_the_same_tensors(monkeypatch):
    weights = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    sent = SentDigests()
    for bucket in buckets_of(weights, bucket_bytes=1000):
        sent.add(bucket)
    found, specs = sent.finish(), specs_of(weights)
    some = specs[1:]
    digests = {name: tensor_digest(tensor) for name, tensor in weights.items()}
    assert found.digest_kept(specs) == found.digest == model_digest(digests)
    assert found.digest_arrived(some) == model_digest({"b": digests["b"]})
    monkeypatch.setattr(found, "_totals", None)  # nothing is worked out again
    assert found.digest_kept(specs) == model_digest(digests)
    assert found.digest_arrived(some) == model_digest({"b": digests["b"]})
