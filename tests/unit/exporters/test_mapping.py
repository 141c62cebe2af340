"""Tables of names and layouts give the checkpoint that transformers writes."""

import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.helpers import families, library
from tests.helpers.exports import ALONE, export, raw
from weightcast.errors import ConfigError
from weightcast.exporters.checkpoint_layout import Stored, arrange_as_saved
from weightcast.exporters.families import FAMILIES, PLAIN, family_named
from weightcast.exporters.mapping import Family, Rule, arrange
from weightcast.exporters.module import ModuleExporter


@pytest.mark.parametrize("model_type", families.SETTINGS)
def test_an_export_equals_the_checkpoint_of_transformers(model_type, tmp_path):
    model = families.make(model_type)
    want = {name: raw(tensor) for name, tensor in families.written(model, tmp_path).items()}
    # The embedding and the stacked experts are larger than a bucket and travel in slices.
    got = export(ModuleExporter(model), ALONE, bucket_bytes=9000 if model_type == "gpt_oss" else 2048)
    assert set(got) == set(want)
    assert [name for name in got if got[name] != want[name]] == []


@pytest.mark.parametrize("model_type", families.SETTINGS)
def test_transformers_reads_an_export(model_type, tmp_path):
    model = families.make(model_type, seed=1)
    model.config.save_pretrained(tmp_path)
    exporter = ModuleExporter(model)
    got = export(exporter)
    tensors = {
        spec.name: torch.frombuffer(bytearray(got[spec.name]), dtype=spec.torch_dtype).view(spec.shape)
        for spec in exporter.specs()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    want = model.state_dict()
    assert [name for name, tensor in read.state_dict().items() if not torch.equal(tensor, want[name])] == []


def test_every_table_is_for_a_family_that_is_checked():
    assert set().union(*(family.model_types for family in FAMILIES)) <= set(families.SETTINGS)


@pytest.mark.parametrize("model_type", sorted(set().union(*(family.model_types for family in FAMILIES))))
def test_a_table_alone_gives_the_checkpoint_of_transformers(model_type, tmp_path):
    # This is for modules outside transformers that have its names.
    model = families.make(model_type)
    want = {name: raw(tensor) for name, tensor in families.written(model, tmp_path).items()}
    assert export(ModuleExporter(model, family=model_type), ALONE) == want


@pytest.mark.parametrize("model_type", families.SETTINGS)
def test_shapes_are_known_without_weights(model_type):
    bare = families.make(model_type, device="meta")
    tensors = {id(t): (name, t) for name, t in reversed(bare.state_dict(keep_vars=True).items())}
    named = [Stored(name=name, shape=tuple(t.shape), dtype=t.dtype) for name, t in tensors.values()]
    model = families.make(model_type)
    _, arranged = arrange_as_saved(bare, named, {number: n for n, number in enumerate(tensors)}, bare.config)
    stored = [(tensor.name, tensor.shape) for tensor in named]
    found = {tensor.name: tensor.shape for tensor in arranged}
    # Every element is used once, and a real model sends the same shapes.
    assert sum(math.prod(shape) for shape in found.values()) == sum(math.prod(shape) for _, shape in stored)
    for spec in ModuleExporter(model).specs():
        assert found[spec.name] == spec.shape


@pytest.mark.parametrize("model_type", sorted(set(families.STACKED) - {"mixtral"}))
def test_experts_that_lie_one_by_one_keep_their_names(model_type, tmp_path):
    # transformers 4 has the checkpoint's own names.
    tensors = families.written(families.make(model_type), tmp_path)
    stored = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    family = family_named(model_type)
    assert [tensor.name for tensor in arrange(stored, family, None)] == [name for name, _ in stored]


def module_of(tensors: dict[str, torch.Tensor], config=None) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = model
        for step in path:
            if not hasattr(owner, step):
                owner.add_module(step, nn.Module())
            owner = getattr(owner, step)
        owner.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    model.config = config
    return model


def fused_attention(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The fused weights that a trainer makes of a checkpoint."""
    fused: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{which}_proj")] for which in "qkv"]
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj." in name and "experts." not in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            fused[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, up])
        elif not any(part in name for part in (".k_proj.", ".v_proj.")) and not (
            ".up_proj." in name and "experts." not in name
        ):
            fused[name] = tensor
    return fused


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_fused_projections_are_taken_apart(model_type, tmp_path):
    model = families.make(model_type)
    want = families.written(model, tmp_path)
    fused = fused_attention(want)
    assert len(fused) < len(want)
    got = export(ModuleExporter(module_of(fused, model.config)), ALONE, bucket_bytes=1024)
    assert got == {name: raw(tensor) for name, tensor in want.items()}


def test_experts_one_by_one_become_a_fused_format(tmp_path):
    model = families.make("qwen3_vl_moe")
    want = families.written(model, tmp_path)
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in want.items():
        if name.endswith("experts.gate_up_proj"):  # [experts, hidden, 2 x width]
            for index, expert in enumerate(tensor):
                gate, up = expert.t().chunk(2)
                apart[name.replace("gate_up_proj", f"{index}.gate_proj.weight")] = gate.contiguous()
                apart[name.replace("gate_up_proj", f"{index}.up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for index, expert in enumerate(tensor):
                apart[name.replace("down_proj", f"{index}.down_proj.weight")] = expert.t().contiguous()
        else:
            apart[name] = tensor
    got = export(ModuleExporter(module_of(apart, model.config)), ALONE, bucket_bytes=4096)
    assert got == {name: raw(tensor) for name, tensor in want.items()}


def test_experts_that_are_fused_as_in_the_checkpoint_stay_so(tmp_path):
    model = families.make("qwen3_vl_moe")
    want = families.written(model, tmp_path)
    got = export(ModuleExporter(module_of(want, model.config)), ALONE)
    assert got == {name: raw(tensor) for name, tensor in want.items()}


def test_experts_that_may_lie_either_way_are_refused():
    square = {"model.language_model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 4)}
    config = SimpleNamespace(model_type="qwen3_vl_moe", text_config=SimpleNamespace(hidden_size=4))
    with pytest.raises(ConfigError, match="may be transposed or not"):
        ModuleExporter(module_of(square, config))


def megatron_qkv(heads: int, kv_heads: int, width: int, hidden: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Megatron's fused projection: for each group its queries, its keys, its values."""
    q, k, v = (torch.randn(n * width, hidden) for n in (heads, kv_heads, kv_heads))
    groups = [t.view(kv_heads, -1, hidden) for t in (q, k, v)]
    return torch.cat(groups, dim=1).reshape(-1, hidden), [q, k, v]


def test_a_projection_fused_group_by_group_is_taken_apart():
    fused, parts = megatron_qkv(6, 2, 4, 10)
    family = Family(
        name="mine",
        model_types=frozenset(),
        rules=(
            Rule(
                match=r"(.*)linear_qkv",
                names=(r"\1q", r"\1k", r"\1v"),
                sizes=lambda config: (3 * config.head_dim, config.head_dim, config.head_dim),
                groups=lambda config: config.num_key_value_heads,
            ),
        ),
    )
    config = SimpleNamespace(num_attention_heads=6, num_key_value_heads=2, head_dim=4, hidden_size=10)
    exporter = ModuleExporter(module_of({"a.linear_qkv": fused}, config), family=family)
    got = export(exporter, ALONE, bucket_bytes=256)
    assert got == {f"a.{name}": raw(part) for name, part in zip("qkv", parts, strict=True)}


def test_unknown_models_are_refused_or_keep_their_names():
    experts = {"layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 3)}
    unknown = SimpleNamespace(model_type="never_heard_of_it")
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj holds several experts.*never_heard_of_it"):
        ModuleExporter(module_of(experts, unknown))
    for model, options in ((module_of(experts, unknown), {"family": "plain"}), (module_of(experts), {})):
        exporter = ModuleExporter(model, **options)
        assert exporter.family is PLAIN
        assert [spec.name for spec in exporter.specs()] == list(experts)
    as_qwen = ModuleExporter(module_of(experts, unknown), family="qwen3_moe")
    assert next(spec.name for spec in as_qwen.specs()) == "layers.0.mlp.experts.0.gate_proj.weight"
    for model_type in ("mixtral", "gpt_oss"):  # transformers knows these names, and only its own models have them
        with pytest.raises(ConfigError, match=rf"holds several experts.*{model_type}"):
            ModuleExporter(module_of(experts, SimpleNamespace(model_type=model_type)))
    plain = ModuleExporter(module_of({"layers.0.mlp.up.weight": torch.ones(4, 3)}, unknown))
    assert [spec.name for spec in plain.specs()] == ["layers.0.mlp.up.weight"]
    with pytest.raises(ConfigError, match="not known"):
        ModuleExporter(module_of(experts), family="qwen9")


@pytest.mark.parametrize(
    ("tensors", "rules", "words"),
    [
        ({"a": torch.ones(5, 2)}, [Rule(match="a", names=("b", "c"))], "should be 2 [+] 2, and is 5"),
        ({"a": torch.ones(4)}, [Rule(match="a", names=("b", "c"), dim=1)], "too few dimensions"),
        ({"a": torch.ones(4, 2), "b": torch.ones(4, 2)}, [Rule(match="a", names=("b",))], "uses 16 of its 8"),
        (
            {"a.1": torch.ones(4, 2)},
            [Rule(match=r"a\.(\d)", names=("b",), stack=1)],
            r"b \[2, 4, 2\].*uses 8 of its 16",
        ),
    ],
    ids=["uneven", "flat", "twice", "gap"],
)
def test_a_table_for_another_layout_is_refused(tensors, rules, words):
    with pytest.raises(ConfigError, match=words):
        ModuleExporter(module_of(tensors), family=Family(name="mine", model_types=frozenset(), rules=tuple(rules)))


def test_protected_tensors_keep_their_dtype():
    model = families.make("deepseek_v3")
    dtypes = {spec.name: spec.dtype for spec in ModuleExporter(model, wire_dtype=torch.bfloat16).specs()}
    kept = {name for name, dtype in dtypes.items() if dtype == "float32"}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in kept
    # transformers 5.24 keeps the router's weight in float32 as well.
    assert kept == {name for name in dtypes if library.stays_in_float32(model, name)}
