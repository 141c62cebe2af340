"""From buckets to parameters: the same bits as the model's own loader, whatever the buckets, ranks and staging."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.models import FusedModel, ScalingModel, buckets_of, differing, fill, specs_of, state, weights_of
from weightcast.digest.definition import tensor_digest, unequal
from weightcast.errors import ConfigError, Refused
from weightcast.receiver.loader import Loader, residents_of
from weightcast.receiver.rank_answers import ResidentFold
from weightcast.wire.answers import RankAck
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec

OLD, NEW = weights_of(1), weights_of(2)


def loaded(weights, **kwargs) -> FusedModel:
    model = FusedModel(**kwargs)
    with torch.no_grad():
        model.load_weights(weights.items())
    return model


def make(model: nn.Module, place: str = "device", **kwargs) -> Loader:
    loader = Loader(model, load_weights=model.load_weights, expected=specs_of(NEW), **kwargs)
    loader.stage(place)
    return loader


def update(loader: Loader, weights, *, bucket_bytes: int = 100) -> None:
    loader.check(specs_of(weights))
    loader.begin()
    for bucket in buckets_of(weights, bucket_bytes=bucket_bytes):
        loader.load(bucket)
    assert loader.missing(specs_of(weights)) == []
    loader.live.commit()


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("place", ["device", "host", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_equals_the_models_own_loading(place, tp_size, dtype):
    for rank in range(tp_size):
        kwargs = {"tp_rank": rank, "tp_size": tp_size, "dtype": dtype}
        model, wanted = loaded(OLD, **kwargs), state(loaded(NEW, **kwargs))
        assert differing(model, wanted)
        loader = make(model, place)
        assert not loader.unstaged_because()
        update(loader, NEW)
        assert differing(model, wanted) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(64, 400), st.sampled_from(["device", "host", "none"]), st.randoms())
def test_buckets_may_be_cut_anywhere(bucket_bytes, place, random):
    model, wanted = loaded(OLD, tp_rank=1, tp_size=2), state(loaded(NEW, tp_rank=1, tp_size=2))
    loader = make(model, place)
    names = list(NEW)
    random.shuffle(names)  # a trainer may send in any order
    update(loader, {name: NEW[name] for name in names}, bucket_bytes=bucket_bytes)
    assert differing(model, wanted) == []


@pytest.mark.parametrize("place", ["device", "host"])
def test_nothing_is_seen_before_the_commit_and_an_undone_commit_never_was(place):
    model = loaded(OLD)
    before = state(model)
    loader = make(model, place)
    loader.begin()
    for bucket in buckets_of(NEW, bucket_bytes=200):
        loader.load(bucket)
        assert differing(model, before) == []
    assert not loader.touched
    loader.live.commit()
    assert differing(model, before)
    loader.live.undo()
    assert differing(model, before) == []


def test_an_update_given_up_leaves_no_trace_in_the_next():
    model = loaded(OLD)
    loader = make(model)
    loader.begin()
    for bucket in buckets_of(weights_of(3), bucket_bytes=200)[:3]:
        loader.load(bucket)
    update(loader, NEW)
    assert differing(model, state(loaded(NEW))) == []


@pytest.mark.parametrize("place", ["device", "host", "none"])
def test_what_no_weight_writes_stays_as_it_is_and_is_named(place):
    model = loaded(OLD)
    loader = make(model, place)
    assert loader.not_updated == ("embed", "requests_served")
    for number in range(3):
        model.requests_served += 1  # the engine counts on while versions change
        update(loader, weights_of(10 + number))
        assert model.requests_served.tolist() == [124 + number]
        assert model.embed[10:].unique().tolist() == [FusedModel.PAD]
        loader.live.undo()
        assert model.requests_served.tolist() == [124 + number]
        assert model.embed[10:].unique().tolist() == [FusedModel.PAD]


def test_without_staging_live_parameters_are_touched_at_once():
    model = loaded(OLD)
    before = state(model)
    loader = make(model, "none")
    loader.begin()
    assert not loader.touched
    loader.load(buckets_of(NEW, bucket_bytes=200)[0])
    assert loader.touched
    assert differing(model, before)


def test_parameter_objects_stay_and_finishers_run_once():
    model = loaded(OLD)
    ids = {name: id(parameter) for name, parameter in model.named_parameters()}
    ran: list[str] = []
    loader = make(model, finishers=[lambda: ran.append("graphs"), lambda: ran.append("packed")])
    update(loader, NEW)
    assert ran == ["graphs", "packed"]
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == ids


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("place", ["device", "none"])
def test_what_is_read_back_adds_up_to_what_was_sent(place, tp_size):
    acks = []
    for rank in range(tp_size):
        loader = make(loaded(OLD, tp_rank=rank, tp_size=tp_size), place)
        update(loader, NEW)
        acks.append(RankAck(rank=rank, **loader.live.held().fields))
    result = ResidentFold().fold(acks)
    assert result.broken == ()
    assert result.digests == {name: tensor_digest(tensor) for name, tensor in NEW.items()}


def test_what_is_read_back_is_what_is_live():
    model = loaded(OLD)
    loader = make(model)
    loader.begin()
    for bucket in buckets_of(NEW, bucket_bytes=200):
        loader.load(bucket)
    old = ResidentFold().fold([RankAck(rank=0, **loader.live.held().fields)]).digests
    assert old == {name: tensor_digest(tensor) for name, tensor in OLD.items()}
    loader.live.commit()
    with torch.no_grad():
        model.w2[1, 3, 2] += 1  # somebody tampers
    broken = ResidentFold().fold([RankAck(rank=0, **loader.live.held().fields)])
    wanted = {name: tensor_digest(tensor) for name, tensor in NEW.items()}
    assert unequal(wanted, broken.digests) == ["experts.1.down.weight"]


def test_weights_kept_in_another_dtype_are_digested_in_it():
    loader = make(loaded(OLD, dtype=torch.bfloat16))
    update(loader, NEW)
    digests = ResidentFold().fold([RankAck(rank=0, **loader.live.held().fields)]).digests
    assert digests["q.weight"] == tensor_digest(NEW["q.weight"].bfloat16())
    assert digests["scale"] == tensor_digest(NEW["scale"])


# -- arrival


def slot_bucket(spec: TensorSpec, first_row: int, num_rows: int, weights) -> Bucket:
    slot = TensorSlot(spec=spec, offset_bytes=0, first_row=first_row, num_rows=num_rows)
    layout = BucketLayout(index=0, slots=(slot,), size_bytes=slot.size_bytes)
    return fill(Bucket(layout, torch.empty(max(slot.size_bytes, 1), dtype=torch.uint8)), weights)


def test_rows_come_in_order_and_once():
    loader = make(loaded(OLD))
    spec = TensorSpec.of("q.weight", NEW["q.weight"])
    loader.begin()
    with pytest.raises(Refused, match=r"q\.weight: rows from 4 arrived after 0"):
        loader.load(slot_bucket(spec, 4, 4, NEW))
    loader.load(slot_bucket(spec, 0, 4, NEW))
    assert "q.weight" in loader.missing([spec])
    with pytest.raises(Refused, match="arrived after 4"):
        loader.load(slot_bucket(spec, 0, 4, NEW))
    with pytest.raises(Refused, match="arrived after 4"):
        loader.load(slot_bucket(spec, 5, 1, NEW))
    loader.load(slot_bucket(spec, 4, 4, NEW))
    assert loader.missing([spec]) == []
    with pytest.raises(Refused):
        loader.load(slot_bucket(spec, 0, 8, NEW))
    loader.begin()
    assert loader.missing([spec]) == ["q.weight"]


def test_a_scalar_and_an_empty_tensor_arrive_too():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.hollow = nn.Parameter(torch.empty(3, 0))

        def load_weights(self, weights):
            for name, tensor in weights:
                getattr(self, name).data.copy_(tensor)

    weights = {"scalar": torch.tensor(5.0), "empty": torch.empty(0, 3), "hollow": torch.empty(3, 0)}
    model = Model()
    loader = Loader(model, load_weights=model.load_weights, expected=specs_of(weights))
    loader.stage("device")
    assert loader.missing(specs_of(weights)) == list(weights)
    update(loader, weights)
    assert model.scalar.item() == 5.0
    digests = ResidentFold().fold([RankAck(rank=0, **loader.live.held().fields)]).digests
    assert digests == {name: tensor_digest(tensor) for name, tensor in weights.items()}


# -- what fits


def test_what_does_not_fit_is_named_all_of_it():
    loader = make(loaded(OLD))
    specs = {spec.name: spec for spec in specs_of(NEW)}
    loader.check(list(specs.values()))
    loader.check(
        [
            TensorSpec(name=s.name, dtype="bfloat16" if "weight" in s.name else s.dtype, shape=s.shape)
            for s in specs.values()
        ]
    )
    wrong = dict(specs)
    del wrong["norm.weight"]
    wrong["extra.weight"] = TensorSpec(name="extra.weight", dtype="float32", shape=(1,))
    wrong["o.weight"] = TensorSpec(name="o.weight", dtype="float32", shape=(8, 9))
    wrong["steps"] = TensorSpec(name="steps", dtype="float32", shape=(2,))
    with pytest.raises(Refused) as caught:
        loader.check(list(wrong.values()))
    for words in (
        "missing norm.weight",
        "unknown to this model: extra.weight",
        r"o.weight has shape (8, 9)",
        "steps travels as float32 and the engine keeps int64",
    ):
        assert words in str(caught.value)
    with pytest.raises(Refused, match="twice"):
        loader.check([*specs.values(), specs["scale"]])


def test_many_problems_are_counted_not_listed():
    loader = make(loaded(OLD))
    specs = [TensorSpec(name=s.name, dtype=s.dtype, shape=(*s.shape, 1)) for s in specs_of(NEW)]
    with pytest.raises(Refused, match="and 6 more"):
        loader.check(specs)


# -- loaders that compute


@pytest.mark.parametrize("keep_storage", [False, True])
@pytest.mark.parametrize("place", ["device", "host", "none"])
def test_computed_weights_go_through_the_models_own_loader_at_the_commit(place, keep_storage):
    model = ScalingModel()
    with torch.no_grad():
        model.load_weights(OLD.items())
    loader = Loader(model, load_weights=model.load_weights, expected=specs_of(NEW))
    assert loader.computed == {"norm.weight"}
    assert loader.unstaged_because(keep_storage=keep_storage) == ""
    assert loader.not_updated == ("embed", "requests_served")
    assert loader.held_bytes == NEW["norm.weight"].nbytes
    loader.stage(place, keep_storage=keep_storage)
    old, (wanted, again) = state(model), (ScalingModel(), ScalingModel())
    with torch.no_grad():
        wanted.load_weights(NEW.items())
        again.load_weights(OLD.items())
    for bucket_bytes in (64, 1000):
        loader.check(specs_of(NEW))
        loader.begin()
        for bucket in buckets_of(NEW, bucket_bytes=bucket_bytes):
            loader.load(bucket)
        if place != "none":
            assert differing(model, old) == []
        assert loader.touched == (place == "none")
        loader.live.commit()
        assert differing(model, state(wanted)) == []
        loader.live.undo()
        assert differing(model, state(wanted if place == "none" else again)) == []
        update(loader, NEW, bucket_bytes=bucket_bytes)
        assert differing(model, state(wanted)) == []
        held = ResidentFold().fold([RankAck(rank=0, **loader.live.held().fields)])
        assert held.digests == {name: tensor_digest(tensor) for name, tensor in NEW.items()}
        update(loader, OLD, bucket_bytes=bucket_bytes)
        assert differing(model, state(again)) == []


@pytest.mark.parametrize("keep_storage", [False, True])
def test_a_commit_that_fails_while_it_loads_computed_weights_is_undone(keep_storage):
    model = ScalingModel()
    with torch.no_grad():
        model.load_weights(OLD.items())
    broken = False

    def load_weights(weights):
        model.load_weights(weights)
        if broken:
            raise RuntimeError("half way")

    loader = Loader(model, load_weights=load_weights, expected=specs_of(NEW))
    loader.stage("device", keep_storage=keep_storage)
    old = state(model)
    broken = True
    with pytest.raises(RuntimeError, match="half way"):
        update(loader, NEW)
    assert differing(model, old) != []
    loader.live.undo()
    assert differing(model, old) == []


def test_a_loader_that_looks_at_values_is_refused_by_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def load_weights(self, weights):
            for _, tensor in weights:
                self.w.data.copy_(tensor / 2 if tensor.abs().max() > 10 else tensor)

    model = Model()
    with pytest.raises(ConfigError, match="w among them, so no update could be proven"):
        Loader(model, load_weights=model.load_weights, expected=specs_of({"w": torch.zeros(3)}))


def test_a_computed_weight_in_rows_is_put_together_first():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(6, 4))

        def load_weights(self, weights):
            for _, tensor in weights:
                assert tensor.shape == (6, 4)
                self.w.data.copy_(tensor * 2)

    model, weights = Model(), {"w": torch.randn(6, 4)}
    loader = Loader(model, load_weights=model.load_weights, expected=specs_of(weights))
    update(loader, weights, bucket_bytes=32)
    assert torch.equal(model.w, weights["w"] * 2)


def test_a_parameter_that_a_loader_gathers_several_weights_for_is_computed_from_all_of_them():
    class Gathering(FusedModel):
        def load_weights(self, weights):
            held = {}
            for name, tensor in weights:
                if name[0] not in "qkv" or "." not in name:
                    self.load_one(name, tensor)
                    continue
                held[name[0]] = tensor
                if len(held) == 3:
                    self.qkv.copy_(torch.cat([held[key] for key in "qkv"]))

    model, wanted = Gathering(), state(loaded(NEW))
    loader = make(model, "none")
    assert loader.computed == {"q.weight", "k.weight", "v.weight"}
    update(loader, NEW)
    assert differing(model, wanted) == []


def test_a_loader_that_puts_other_parameters_in_place_is_refused():
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def load_weights(self, weights):
            for name, tensor in weights:
                setattr(self, name, nn.Parameter(tensor))

    model = Replacing()
    with pytest.raises(ConfigError, match="another parameter in the place of w"):
        Loader(model, load_weights=model.load_weights, expected=specs_of({"w": torch.zeros(3)}))


def test_a_parameter_written_twice_is_refused():
    class Twice(FusedModel):
        def load_one(self, name, tensor):
            super().load_one(name, tensor)
            if name == "k.weight":
                self.qkv[0:4].copy_(tensor)

    model = Twice()
    with pytest.raises(ConfigError, match=r"qkv is written twice, from k\.weight, q\.weight"):
        Loader(model, load_weights=model.load_weights, expected=specs_of(NEW))


# -- memory that is shared


class Tied(nn.Module):
    """A head that is the embedding: as the same parameter, as another over the same memory, or as a view."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        match how:
            case "same":
                self.head = self.embed
            case "memory":
                self.head = nn.Parameter(self.embed.data, requires_grad=False)
            case "view":
                self.head = nn.Parameter(self.embed.data[1:3], requires_grad=False)

    def load_weights(self, weights):
        for _, tensor in weights:
            self.embed.copy_(tensor)


def test_tied_weights_are_one_resident():
    model = Tied("same")
    assert list(residents_of(model)) == ["embed"]
    weights = {"w": torch.randn(4, 3)}
    loader = Loader(model, load_weights=model.load_weights, expected=specs_of(weights))
    loader.stage("device")
    update(loader, weights)
    assert torch.equal(model.head, weights["w"])


@pytest.mark.parametrize("how", ["memory", "view"])
def test_memory_that_is_shared_is_never_torn_apart(how):
    model = Tied(how)
    weights = {"w": torch.randn(4, 3)}
    loader = Loader(model, load_weights=model.load_weights, expected=specs_of(weights))
    if not loader.unstaged_because():
        loader.stage("device")
    update(loader, weights)
    assert torch.equal(model.embed, weights["w"])
    assert torch.equal(model.head, weights["w"] if how == "memory" else weights["w"][1:3])


def test_buffers_that_are_not_persistent_are_no_residents():
    assert "cache" not in residents_of(FusedModel())
    assert "steps" in residents_of(FusedModel())


# -- tensors that the loader skips


class Skipping(nn.Module):
    """Keeps ``w``; skips what it has no layer for, and a head that it ties."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 3), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "w":
                self.w.data.copy_(tensor)


def test_a_tensor_that_the_loader_skips_may_come_or_stay_away():
    specs = specs_of({"w": torch.zeros(4, 3), "mtp.fc": torch.zeros(2, 3)})
    model = Skipping()
    loader = Loader(model, load_weights=model.load_weights, expected=specs)
    loader.stage("device")
    assert loader.skipped == {"mtp.fc"}
    loader.check(specs)
    loader.check(specs[:1])
    for fresh in ({"w": torch.randn(4, 3)}, {"w": torch.randn(4, 3), "mtp.fc": torch.randn(2, 3)}):
        loader.check(specs_of(fresh))
        update(loader, fresh)
        assert torch.equal(model.w, fresh["w"])
        digests = ResidentFold().fold([RankAck(rank=0, **loader.live.held().fields)]).digests
        assert digests == {"w": tensor_digest(fresh["w"])}
    with pytest.raises(Refused, match="missing w"):
        loader.check(specs[1:])


def test_a_loader_that_changes_its_source_changes_nothing_of_the_trainers():
    class Zeroing(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.ones(3), requires_grad=False)

        def load_weights(self, weights):
            for _, tensor in weights:  # as gpt-oss does on every rank but the first
                tensor.zero_()
                self.bias.data.copy_(tensor)

    model = Zeroing()
    weights = {"bias": torch.randn(3)}
    loader = Loader(model, load_weights=model.load_weights, expected=specs_of(weights))
    assert loader.computed == {"bias"}
    loader.stage("none")
    loader.begin()
    for bucket in buckets_of(weights, bucket_bytes=100):
        before = bucket.data.clone()
        loader.load(bucket)
        assert torch.equal(bucket.data, before)
    loader.live.commit()
    assert torch.equal(model.bias, torch.zeros(3))


# -- views of what is written


class Absorbing(nn.Module):
    """Keeps views of a projection as parameters, as vLLM's latent attention does, and another matrix of its own."""

    def __init__(self):
        super().__init__()
        self.kv_b = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.up = nn.Parameter(self.kv_b.data.t()[:, 2:], requires_grad=False)
        self.own = nn.Parameter(torch.zeros(2, 4), requires_grad=False)

    def load_weights(self, weights):
        for _, tensor in weights:
            self.kv_b.data.copy_(tensor)


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_view_of_a_parameter_is_updated_with_it_where_contents_are_exchanged(place):
    model = Absorbing()
    weights = {"kv_b": torch.randn(6, 4)}
    loader = Loader(model, load_weights=model.load_weights, expected=specs_of(weights))
    assert loader.not_updated == ("own",)
    assert "share memory" in loader.unstaged_because()
    assert loader.unstaged_because(keep_storage=True) == ""
    loader.stage(place, keep_storage=True)
    update(loader, weights)
    assert torch.equal(model.kv_b, weights["kv_b"])
    assert torch.equal(model.up, weights["kv_b"].t()[:, 2:])


def test_two_parameters_with_an_element_in_common_are_never_exchanged():
    class Crossing(nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.zeros(6)
            self.a = nn.Parameter(flat[:4], requires_grad=False)
            self.b = nn.Parameter(flat[3:], requires_grad=False)

        def load_weights(self, weights):
            for name, tensor in weights:
                getattr(self, name).data.copy_(tensor)

    model = Crossing()
    loader = Loader(model, load_weights=model.load_weights, expected=specs_of({"a": torch.ones(4), "b": torch.ones(3)}))
    assert loader.unstaged_because(keep_storage=True) == "a and b share memory"


class TiedPaddedModel(torch.nn.Module):
    """A head that is the embedding, with rows that no checkpoint has; its loader takes the weight by either name."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight[6:] = 0

    def load_weights(self, weights):
        for _name, weight in weights:
            self.embed.weight.data.zero_()
            self.embed.weight.data[:6].copy_(weight)


@pytest.mark.parametrize("keep_storage", [True, False])
def test_a_tied_head_with_padded_rows_is_staged(keep_storage):
    model = TiedPaddedModel()
    specs = [TensorSpec.of(name, torch.zeros(6, 4)) for name in ("embed.weight", "head.weight")]
    loader = Loader(model, load_weights=model.load_weights, expected=specs)
    assert loader.unstaged_because(keep_storage=keep_storage) == ""
    assert loader.placed == ["head.weight"]


class PaddingRowModel(torch.nn.Module):
    """An embedding whose row 2 is padding: the loader sets it to 0, whatever the checkpoint says."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4, padding_idx=2)

    def load_weights(self, weights):
        for _name, weight in weights:
            self.embed.weight.data.copy_(weight)
            self.embed.weight.data[2] = 0


@pytest.mark.parametrize("place", ["device", "host", "none"])
@pytest.mark.parametrize("padding", [0.0, 1.0])
def test_a_padding_row_counts_in_the_proof(place, padding):
    model = PaddingRowModel()
    sent = torch.arange(24.0).view(6, 4) + 1
    sent[2] = padding
    loader = Loader(model, load_weights=model.load_weights, expected=[TensorSpec.of("embed.weight", sent)])
    loader.stage(place)
    update(loader, {"embed.weight": sent})
    assert not model.embed.weight[2].any()
    assert torch.equal(model.embed.weight[3:], sent[3:])
    digests = ResidentFold().fold([RankAck(rank=0, **loader.live.held().fields)]).digests
    assert (digests["embed.weight"] == tensor_digest(sent)) == (padding == 0)
