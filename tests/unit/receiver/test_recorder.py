"""The recorder learns a loader's copies by watching it; other writes stay with the loader."""

from __future__ import annotations

import pytest
import torch

from weightcast.errors import ConfigError
from weightcast.receiver.coverage import uncovered
from weightcast.receiver.recorder import RecordedLoad, record_routes
from weightcast.wire.layout import TensorSpec
from weightcast.wire.routes import Region


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def record(load_one, specs, residents) -> RecordedLoad:
    """A loader that treats one weight at a time."""

    def load(weights):
        for name, weight in weights:
            load_one(name, weight)

    before = {name: tensor.clone() for name, tensor in residents.items()}
    storages = {name: tensor.data_ptr() for name, tensor in residents.items()}
    recording = record_routes(load, specs, residents)
    for name, tensor in residents.items():
        assert torch.equal(tensor, before[name]), f"{name} was changed by watching"
        assert tensor.data_ptr() == storages[name]
    return recording


def apply_routes(recording: RecordedLoad, sources, residents) -> None:
    for name, routes in recording.routes.items():
        for route in routes:
            part = sources[name]
            for dim, (offset, size) in enumerate(zip(route.box_offset, route.box_shape, strict=True)):
                part = part.narrow(dim, offset, size)
            whole = residents[route.parameter]
            region = route.region
            target = whole.as_strided(region.shape, region.stride, whole.storage_offset() + region.offset)
            target.copy_(part)


def check_replay(load_one, specs, residents) -> RecordedLoad:
    """Routes put the same values in the same places as the loader itself, bit for bit."""
    recording = record(load_one, specs, residents)
    assert recording.why == {}
    sources = {s.name: torch.randn(s.shape).to(s.torch_dtype) for s in specs}
    for name, tensor in sources.items():
        load_one(name, tensor)
    wanted = {name: tensor.clone() for name, tensor in residents.items()}
    for tensor in residents.values():
        tensor.zero_()
    apply_routes(recording, sources, residents)
    for name, tensor in residents.items():
        assert torch.equal(tensor, wanted[name]), name
    return recording


def test_a_plain_copy():
    param = {"p": torch.zeros(3, 4)}
    recording = check_replay(lambda _, w: param["p"].copy_(w), [spec("w", 3, 4)], param)
    [route] = recording.routes["w"]
    assert (route.box_offset, route.box_shape, route.parameter) == ((0, 0), (3, 4), "p")
    assert route.region == Region(offset=0, shape=(3, 4), stride=(4, 1))


def test_a_copy_casts_to_the_dtype_that_is_kept():
    param = {"p": torch.zeros(3, 4, dtype=torch.bfloat16)}
    check_replay(lambda _, w: param["p"].data.copy_(w), [spec("w", 3, 4)], param)


@pytest.mark.parametrize("how", [{"device": "cpu"}, {"device": "cpu", "dtype": torch.float32}])
def test_a_source_that_is_moved_to_the_parameters_device_is_still_a_copy(how):
    residents = {"w": torch.zeros(2, 4)}
    for inference in (False, True):
        with torch.inference_mode(inference):
            recording = check_replay(
                lambda name, weight: residents["w"].copy_(weight.to(**how).chunk(2, 1)[1]), [spec("x", 2, 8)], residents
            )
        assert recording.routes["x"][0].box_offset == (0, 4)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_slice_of_a_tensor_parallel_rank(dim, rank):
    shape = [6, 6]
    shape[dim] //= 3
    param = {"p": torch.zeros(shape)}
    recording = check_replay(lambda _, w: param["p"].copy_(w.chunk(3, dim)[rank]), [spec("w", 6, 6)], param)
    [route] = recording.routes["w"]
    assert route.box_offset[dim] == 2 * rank


def test_fused_query_key_value():
    param = {"qkv": torch.zeros(8, 4)}
    rows = {"q": slice(0, 4), "k": slice(4, 6), "v": slice(6, 8)}
    specs = [spec("q", 8, 4), spec("k", 4, 4), spec("v", 4, 4)]

    def load(name, weight):
        size = rows[name].stop - rows[name].start
        param["qkv"][rows[name]].copy_(weight.narrow(0, size, size))  # the second of two ranks

    recording = check_replay(load, specs, param)
    assert [route.region.offset for routes in recording.routes.values() for route in routes] == [0, 16, 24]


def test_assignment_to_a_slice_is_a_copy():
    param = {"p": torch.zeros(4, 4)}

    def load(name, weight):
        param["p"][2:, 1:3] = weight[:2, :2]

    check_replay(load, [spec("w", 4, 4)], param)


def test_stacked_experts():
    param = {"w13": torch.zeros(2, 6, 4), "w2": torch.zeros(2, 4, 3)}
    specs = [spec(f"{e}.{w}", 3, 4) for e in range(2) for w in ("gate", "up")] + [
        spec(f"{e}.down", 4, 3) for e in range(2)
    ]

    def load(name, weight):
        expert, which = name.split(".")
        if which == "down":
            param["w2"].data[int(expert)].copy_(weight)
        else:
            param["w13"][int(expert)].narrow(0, 0 if which == "gate" else 3, 3).copy_(weight)

    check_replay(load, specs, param)


def test_one_stacked_source_into_many_parameters():
    param = {f"e{index}": torch.zeros(4, 3) for index in range(3)}

    def load(name, weight):
        for index in range(3):
            param[f"e{index}"].copy_(weight[index])

    recording = check_replay(load, [spec("experts", 3, 4, 3)], param)
    assert len(recording.routes["experts"]) == 3


def test_a_transposed_copy():
    param = {"p": torch.zeros(4, 3)}
    check_replay(lambda _, w: param["p"].copy_(w.t()), [spec("w", 3, 4)], param)
    check_replay(lambda _, w: param["p"].t().copy_(w), [spec("w", 3, 4)], param)
    heads = {"p": torch.zeros(2, 3, 4)}
    check_replay(lambda _, w: heads["p"].copy_(w.permute(2, 0, 1)), [spec("w", 3, 4, 2)], heads)


def test_a_copy_of_a_source_on_the_way_is_the_source():
    # As gpt-oss loads its experts, whose checkpoint has them transposed.
    param = {"p": torch.zeros(2, 3, 4)}
    check_replay(lambda _, w: param["p"].copy_(w.permute(0, 2, 1).contiguous()), [spec("w", 2, 4, 3)], param)
    row = {"p": torch.zeros(3, 4)}
    check_replay(lambda _, w: row["p"].copy_(w[1:].clone()), [spec("w", 4, 4)], row)


def test_scalars_dimensions_of_one_and_empty_tensors():
    param = {"s": torch.zeros(()), "one": torch.zeros(1, 4, 1), "empty": torch.zeros(0, 3)}
    specs = [spec("s"), spec("one", 1, 4, 1), spec("empty", 0, 3)]
    check_replay(lambda name, w: param[name].copy_(w), specs, param)
    column = {"c": torch.zeros(4)}
    check_replay(lambda _, w: column["c"].copy_(w.squeeze(1)), [spec("w", 4, 1)], column)
    check_replay(lambda _, w: column["c"].copy_(w[:, 2]), [spec("w", 4, 3)], column)


def test_a_parameter_that_starts_in_the_middle_of_its_storage():
    base = torch.zeros(20)
    param = {"p": base[4:16].view(3, 4)}
    check_replay(lambda _, w: param["p"][1:].copy_(w[1:]), [spec("w", 3, 4)], param)


def test_a_source_that_nobody_wants_has_no_routes():
    recording = record(lambda name, w: None, [spec("w", 3)], {"p": torch.zeros(3)})
    assert recording.routes == {"w": []}
    assert recording.why == {}
    assert recording.places == []


COMPUTED = {
    "cast": (lambda p, w: p.copy_(w.to(torch.float64)), (3, 4)),
    "sum": (lambda p, w: p.copy_(w + 1), (3, 4)),
    "added to what is there": (lambda p, w: p.add_(w), (3, 4)),
    "scaled before the copy": (lambda p, w: p.copy_(w.mul_(0.5)), (3, 4)),
    "negated in place": (lambda p, w: (w.neg_(), p.copy_(w)), (3, 4)),
    "source overwritten": (lambda p, w: (w.copy_(torch.empty(3, 4, device="meta")), p.copy_(w)), (3, 4)),
    "broadcast": (lambda p, w: p.copy_(w), (4,)),
    "a copy that is changed": (lambda p, w: p.copy_(w.clone().mul_(2)), (3, 4)),
    "a copy in another order of elements": (lambda p, w: p.copy_(w.view(2, 2, 3).transpose(0, 1).reshape(3, 4)), (12,)),
    "every second": (lambda p, w: p.copy_(w[:, ::2]), (3, 8)),
    "reversed": (lambda p, w: p.copy_(w.flip(0)), (3, 4)),
    "by index": (lambda p, w: p.index_copy_(0, torch.arange(3), w), (3, 4)),
    "set": (lambda p, w: p.set_(torch.empty(3, 4)), (3, 4)),
    "filled": (lambda p, w: p.fill_(1.0), (3, 4)),
    "many at once": (lambda p, w: torch._foreach_copy_([p], [w]), (3, 4)),
    "out": (lambda p, w: torch.add(torch.zeros(3, 4), 1, out=p), (3, 4)),
}


@pytest.mark.parametrize("how", COMPUTED)
def test_what_is_not_a_plain_copy_is_computed(how):
    load, shape = COMPUTED[how]
    param = {"p": torch.randn(3, 4), "other": torch.randn(2)}

    def load_one(name, weight):
        if name == "other":
            param["other"].copy_(weight)
        else:
            load(param["p"], weight)

    recording = record(load_one, [spec("w", *shape), spec("other", 2)], param)
    assert recording.computed == ["w"]
    assert recording.why["w"]
    assert list(recording.routes) == ["other"]
    assert {place.parameter for place in recording.places} == {"p"}
    assert sum(place.box.numel for place in recording.places) == 12


def test_a_loader_that_looks_at_values_is_refused_with_the_names():
    param = {"p": torch.zeros(3), "q": torch.zeros(3)}

    def load_one(name, weight):
        if name == "p" and weight.abs().max() > 10:
            weight = weight / 10
        param[name].copy_(weight)

    with pytest.raises(ConfigError, match=r"weights that have no values, p among them, so no update could be proven"):
        record(load_one, [spec("p", 3), spec("q", 3)], param)


@pytest.mark.parametrize("how", ["waits for three", "asks for the others"])
def test_a_loader_that_gathers_several_weights_gets_them_together(how):
    # It holds q and k in its hands until v comes; given one at a time it would never copy any.
    param = {"qkv": torch.zeros(9, 4), "norm": torch.zeros(4)}

    def load(weights):
        held = {}
        for name, weight in weights:
            if name == "norm":
                param["norm"].copy_(weight)
                continue
            held[name] = weight
            if len(held) == 3:
                param["qkv"].copy_(torch.cat([held["q"], held["k"], held["v"]]))
        if how == "asks for the others":
            param["qkv"].copy_(torch.cat([held["q"], held["k"], held["v"]]))

    specs = [spec("q", 3, 4), spec("k", 3, 4), spec("v", 3, 4), spec("norm", 4)]
    recording = record_routes(load, specs, param)
    [group] = recording.groups
    assert group.sources == ("q", "k", "v")
    assert [place.region.shape for place in group.places] == [(9, 4)]
    assert [route.parameter for route in recording.routes["norm"]] == ["norm"]


def test_a_loader_that_wants_more_than_it_computes_with_is_refused():
    param = {"p": torch.zeros(3), "q": torch.zeros(3)}

    def load(weights):
        held = dict(weights)
        if len(held) == 2:
            param["p"].copy_(held["p"] + 1)
            param["q"].copy_(held["q"])

    with pytest.raises(ConfigError, match="writes p only when it is given several weights at once"):
        record_routes(load, [spec("p", 3), spec("q", 3)], param)


@pytest.mark.parametrize("how", ["by way of a buffer", "in place of a source", "by reading the parameter"])
def test_sources_that_are_combined_are_one_group(how):
    param = {"p": torch.zeros(4), "other": torch.zeros(4)}

    def load(weights):
        held = {}
        for name, weight in weights:
            if name == "c":
                param["other"].copy_(weight)
                continue
            held[name] = weight
            if len(held) < 2:
                if how == "by reading the parameter":
                    param["p"].copy_(weight)
            elif how == "by way of a buffer":
                both = torch.zeros(2, 4)
                both[0], both[1] = held["a"], held["b"]
                param["p"].copy_(both.sum(0))
            elif how == "in place of a source":
                param["p"].copy_(held["a"].add_(held["b"]))
            else:
                param["p"].copy_(param["p"] * weight)

    recording = record_routes(load, [spec("a", 4), spec("b", 4), spec("c", 4)], param)
    [group] = recording.groups
    assert group.sources == ("a", "b")
    assert {place.parameter for place in group.places} == {"p"}
    assert len(recording.routes["c"]) == 1


def test_places_of_parts_are_those_parts_and_nothing_is_counted_twice():
    param = {"p": torch.zeros(6, 4), "q": torch.zeros(3)}

    def load_one(name, weight):
        if name == "q":
            param["q"].zero_()
            param["q"][:2].copy_(weight + 1)
        else:
            part = param["p"][3 * int(name) : 3 * int(name) + 3]
            part.copy_(weight)
            part.copy_(torch.exp(part))

    recording = record(load_one, [spec("0", 3, 4), spec("1", 3, 4), spec("q", 2)], param)
    found = {group.sources: [place.region for place in group.places] for group in recording.groups}
    assert found == {
        ("0",): [Region(offset=0, shape=(3, 4), stride=(4, 1))],
        ("1",): [Region(offset=12, shape=(3, 4), stride=(4, 1))],
        ("q",): [Region(offset=0, shape=(3,), stride=(1,))],
    }


def test_a_source_may_meet_the_parameters_own_values():
    param = {"p": torch.zeros(3, 4), "scale": torch.randn(3)}
    recording = record(lambda name, w: param["p"].copy_(w * param["scale"][:, None]), [spec("w", 3, 4)], param)
    assert recording.computed == ["w"]


def test_a_loader_that_does_not_find_what_it_wants_is_refused():
    def load_one(name, weight):
        raise KeyError(name)

    with pytest.raises(ConfigError, match="KeyError: 'w'"):
        record(load_one, [spec("w", 3)], {"p": torch.zeros(3)})


@pytest.mark.parametrize("how", ["rows", "columns"])
def test_parameters_that_are_views_of_one_storage_are_told_apart(how):
    flat = torch.zeros(6, 4)
    first, second = (flat[:4], flat[4:]) if how == "rows" else (flat[:, :1], flat[:, 1:])
    param = {"first": first, "second": second}
    specs = [spec(f"{name}.{half}", len(part) // 2, part.shape[1]) for name, part in param.items() for half in "ab"]

    def load_one(name, weight):
        parameter, half = name.split(".")
        param[parameter].chunk(2)["ab".index(half)].copy_(weight)

    recording = check_replay(load_one, specs, param)
    routes = [route for found in recording.routes.values() for route in found]
    assert [route.parameter for route in routes] == ["first", "first", "second", "second"]
    assert uncovered(routes, param) == []
    assert uncovered(routes[1:], param) == ["first"]
    with pytest.raises(ConfigError, match="second is written twice"):
        uncovered([*routes, routes[-1]], param)


def test_a_copy_over_two_parameters_at_once_is_computed():
    flat = torch.zeros(6, 4)
    param = {"first": flat[:4], "second": flat[4:]}
    recording = record(lambda _, w: flat.copy_(w), [spec("w", 6, 4)], param)
    assert recording.why == {"w": "one copy writes first and second, which share memory"}
    assert {place.parameter for place in recording.places} == {"first", "second"}


def test_a_loader_that_reads_ahead_is_not_mistaken():
    param = {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(3)}

    def load(weights):
        for name, weight in list(weights):
            param[name].copy_(weight + 1 if name == "a" else weight)

    recording = record_routes(load, [spec(name, 3) for name in "abc"], param)
    assert recording.computed == ["a"]
    assert {place.parameter for place in recording.places} == {"a"}
    assert {name: len(routes) for name, routes in recording.routes.items()} == {"b": 1, "c": 1}


def test_padding_that_would_change_makes_the_weight_computed():
    param = {"embed": torch.randn(5, 4)}

    def load_one(name, weight):
        param["embed"][:3].copy_(weight)
        param["embed"][3:].fill_(0)

    recording = record(load_one, [spec("w", 3, 4)], param)
    assert recording.computed == ["w"]
    assert {place.parameter for place in recording.places} == {"embed"}


@pytest.mark.parametrize("how", ["zeroed, then copied", "copied whole, then zeroed", "zeroed twice"])
@pytest.mark.parametrize("pad", ["rows", "columns"])
def test_padding_that_overlaps_a_copy_is_learnt(how, pad):
    live = torch.randn(7, 6)
    (live[4:] if pad == "rows" else live[:, 4:]).zero_()
    param = {"embed": live}

    def load_one(name, weight):
        p = param["embed"]
        kept, rest = (p[:4], p[4:]) if pad == "rows" else (p[:, :4], p[:, 4:])
        if how == "copied whole, then zeroed":
            p.copy_(weight)
        else:
            p.zero_()
            kept.copy_(weight[:4] if pad == "rows" else weight[:, :4])
        if how != "zeroed, then copied":
            rest.fill_(0)

    recording = check_replay(load_one, [spec("w", 7, 6)], param)
    routes = recording.routes["w"]
    assert [route.box_shape for route in routes] == [(4, 6) if pad == "rows" else (7, 4)]
    assert recording.filled == {"embed": 18 if pad == "rows" else 14}
    assert uncovered(routes, param, recording.filled) == []


def test_a_constant_between_two_copies_is_cut_out():
    live = torch.randn(6, 4)
    live[2:4] = 0.0
    param = {"p": live}

    def load_one(name, weight):
        param["p"].copy_(weight)
        param["p"][2:4].fill_(0.0)

    recording = check_replay(load_one, [spec("w", 6, 4)], param)
    assert [(route.box_offset, route.box_shape) for route in recording.routes["w"]] == [
        ((0, 0), (2, 4)),
        ((4, 0), (2, 4)),
    ]


def test_a_row_that_is_set_to_a_number_is_cut_out():
    live = torch.randn(6, 4)
    live[2] = 0
    param = {"embed": live}

    def load_one(name, weight):
        param["embed"].copy_(weight)
        param["embed"][2] = 0

    recording = check_replay(load_one, [spec("w", 6, 4)], param)
    assert [(route.box_offset, route.box_shape) for route in recording.routes["w"]] == [
        ((0, 0), (2, 4)),
        ((3, 0), (3, 4)),
    ]
    assert recording.filled == {"embed": 4}
    [constant] = recording.constants
    assert (constant.box_offset, constant.box_shape) == ((2, 0), (1, 4))
    assert constant.region == Region(offset=8, shape=(1, 4), stride=(4, 1))


@pytest.mark.parametrize("computed", ["from another parameter", "in place", "from the weight"])
def test_a_row_that_gets_a_computed_number_stays_with_the_loader(computed):
    param = {"embed": torch.zeros(6, 4), "scale": torch.zeros(())}

    def load_one(name, weight):
        param["embed"].copy_(weight)
        if computed == "from another parameter":
            number = param["scale"] * 2
        elif computed == "in place":
            number = torch.tensor(0.0).add_(param["scale"])
        else:
            number = weight.max()
        param["embed"][2] = number

    recording = record(load_one, [spec("w", 6, 4)], param)
    assert recording.computed == ["w"]


def test_of_two_weights_for_one_place_the_later_one_is_kept():
    shared = torch.zeros(5, 4)
    param = {"embed": shared, "norm": torch.zeros(4)}
    place = {"embed": shared, "head": shared.view(5, 4), "norm": param["norm"]}
    specs = [spec("embed", 5, 4), spec("norm", 4), spec("head", 5, 4)]
    recording = record(lambda name, weight: place[name].copy_(weight), specs, param)
    assert {name: len(found) for name, found in recording.routes.items()} == {"embed": 0, "norm": 1, "head": 1}
    assert not recording.why
    assert uncovered([route for found in recording.routes.values() for route in found], param) == []


def test_a_constant_over_a_part_that_is_no_box_keeps_the_weight_with_the_loader():
    param = {"p": torch.zeros(4, 6)}

    def load_one(name, weight):
        param["p"].copy_(weight)
        param["p"][:, ::2].fill_(0)

    recording = record(load_one, [spec("w", 4, 6)], param)
    assert recording.why == {"w": "p is written twice, in parts that are no boxes"}
    assert {place.parameter for place in recording.places} == {"p"}
