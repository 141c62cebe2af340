"""Digests of many tensors from a vector of sums are those of the definition, tensor by tensor."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightcast.digest.definition import as_unsigned, finish, key_of, model_digest
from weightcast.digest.table import Absent, DigestTable

SHAPES = [(), (3,), (2, 5)]


@given(
    st.dictionaries(st.text("ab.é", min_size=1, max_size=4), st.integers(-(2**63), 2**63 - 1), max_size=8), st.data()
)
def test_sums_become_the_digests_of_the_definition(sums, data):
    names = list(sums)
    shapes = [SHAPES[number % 3] for number in range(len(names))]
    keys = torch.tensor([key_of(torch.bfloat16, shape) for shape in shapes], dtype=torch.int64)
    table, values = DigestTable(names, keys), torch.tensor(list(sums.values()), dtype=torch.int64)
    wanted = {
        name: finish(as_unsigned(total), dtype=torch.bfloat16, shape=shape)
        for (name, total), shape in zip(sums.items(), shapes, strict=True)
    }
    assert table.by_name(values) == wanted
    assert table.of_all(values) == model_digest(wanted)

    some = data.draw(st.permutations(names))[: len(names) // 2 + 1]
    left_out = frozenset(some[:1])
    chosen = [_Named(name) for name in some]
    assert table.of_some(values, chosen, left_out) == model_digest({name: wanted[name] for name in some[1:]})
    assert table.of_some(values, [_Named("elsewhere")], ()) == ""
    assert table.of_some(values, [*chosen, _Named("elsewhere")], {"elsewhere"}) == model_digest(
        {name: wanted[name] for name in some}
    )


def test_names_that_are_missing_elsewhere_follow_the_lists():
    absent = Absent()
    kept, sent = [_Named("a"), _Named("b")], [_Named("a")]
    assert absent.names(kept, sent) == {"b"}
    assert absent.names(kept, sent) is absent.names(kept, sent)  # not worked out again
    assert absent.names(kept, [_Named("b")]) == {"a"}
    assert absent.names([_Named("c")], sent) == {"c"}
    assert absent.names(kept, sent) == {"b"}


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


def test_a_selection_is_known_again_only_by_the_same_tensors():
    keys = torch.zeros(3, dtype=torch.int64)
    table, values = DigestTable(["a", "b", "c"], keys), torch.arange(3)
    specs = [_Named("a"), _Named("b")]
    first = table.of_some(values, specs, ())
    assert first != table.of_some(values, specs, {"a"}) != ""
    assert first == table.of_some(values, specs, ())
    assert first != table.of_some(values, [_Named("a"), _Named("c")], ())
    assert len({table.of_some(values, [_Named("a")], ()) for _ in range(40)}) == 1
    assert len(table._parts) <= 16
