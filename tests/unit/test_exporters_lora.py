"""Adapters: merged on the way as PEFT merges them, or sent by themselves as PEFT saves them."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.unit import families
from tests.unit.exports import ALONE, CPU, export
from tests.unit.ranks import Ranks
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters.lora import AdapterExporter
from weightcast.exporters.module import ModuleExporter

peft = pytest.importorskip("peft")

# PEFT uses deprecated parts of transformers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed"),
]


def adapted(dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    """Makes a model with adapters that change its outputs."""
    model = families.make("qwen3").to(dtype)
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj", "lm_head"]} | options
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def tensors_of(exporter, group=ALONE, **options) -> dict[str, torch.Tensor]:
    got = export(exporter, group, **options)
    return {
        spec.name: torch.frombuffer(bytearray(got[spec.name]), dtype=spec.torch_dtype).view(spec.shape)
        for spec in exporter.specs()
        if spec.name in got
    }


def check(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        changed = any(part in name for part in ("q_proj", "down_proj", "lm_head"))
        assert torch.equal(tensor, plain[name]) is not changed
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[tensor.dtype] if changed else 0
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}], ids=str)
def test_merged_weights_equal_pefts_merge(dtype, options):
    model = adapted(dtype, **options)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    got = tensors_of(ModuleExporter(model), bucket_bytes=5000)
    assert [n for n, p in model.named_parameters() if not torch.equal(p, before[n])] == []
    plain = families.make("qwen3").to(dtype).state_dict()
    check(got, model.merge_and_unload().state_dict(), plain)


def test_an_adapter_that_is_switched_off_or_merged_already_is_not_added():
    model = adapted()
    plain = families.make("qwen3").state_dict()
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.enable_adapters(False)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in tensors_of(ModuleExporter(model)).items())
    model = adapted()
    model.merge_adapter()
    want = {name: tensor.clone() for name, tensor in tensors_of(ModuleExporter(model)).items()}
    model.unmerge_adapter()
    check(tensors_of(ModuleExporter(model)), want, plain)


def test_modules_that_were_trained_whole_keep_their_names():
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_parameter("base_model.model.lm_head.modules_to_save.default.weight").fill_(7)
    got = tensors_of(ModuleExporter(model))
    assert set(got) == set(families.make("qwen3").state_dict())
    assert got["lm_head.weight"].unique().tolist() == [7]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, r"q_proj has lora_magnitude_vector"),
        ({"lora_bias": True}, r"q_proj has a bias"),
        ({"target_modules": ["embed_tokens"]}, r"embed_tokens has lora_embedding_A"),
    ],
    ids=["dora", "bias", "embedding"],
)
def test_adapters_that_are_not_a_product_are_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        ModuleExporter(adapted(**options))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"]), r"q_proj has an .*with oft_R"),
        (lambda: peft.LoHaConfig(r=4, target_modules=["q_proj"]), r"q_proj has an .*with hada_w1_a"),
        (lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), r"q_proj has an .*with ia3_l"),
        (lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9), r"q_proj has an .*with lora_E"),
        (
            lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 4]),
            r"embed_tokens has an adapter.*trainable_tokens_delta",
        ),
        (
            lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
            r"the model has an adapter.*with prompt_encoder",
        ),
    ],
    ids=["oft", "loha", "ia3", "adalora", "tokens", "prompt"],
)
def test_other_adapters_are_refused_by_name(config, words):
    model = peft.get_peft_model(families.make("qwen3"), config())
    with pytest.raises(ConfigError, match=words) as caught:
        ModuleExporter(model)
    assert "merge_and_unload" in (caught.value.hint or "")


def test_exported_adapters_equal_pefts_files(tmp_path):
    model = adapted()
    exporter = AdapterExporter(model)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    want = load_file(tmp_path / "adapter_model.safetensors")
    got = tensors_of(exporter)
    assert set(got) == set(want)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert (exporter.config["r"], exporter.config["lora_alpha"]) == (4, 6)
    with pytest.raises(ConfigError, match="no LoRA adapter 'other'"):
        AdapterExporter(model, adapter="other")


def sharded() -> None:
    """Exports a sharded model, where every rank merges its own rows."""
    want = adapted().merge_and_unload().state_dict()
    plain = families.make("qwen3").state_dict()
    model = adapted()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    group = TrainerGroup.connect(CPU, timeout_s=30)
    group.receivers = (0, 1)
    for _ in range(2):
        got = tensors_of(ModuleExporter(model), group, bucket_bytes=5000)
        check(got, want, plain)
    adapters = tensors_of(AdapterExporter(model), group)
    assert {name.split(".")[-2] for name in adapters} == {"lora_A", "lora_B"}
    group.close()


def test_a_sharded_model_merges_where_the_weights_are():
    ranks = Ranks(2)
    try:
        ranks.run(sharded)
    finally:
        ranks.close()
