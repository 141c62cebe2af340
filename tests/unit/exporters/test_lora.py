"""Adapters: merged on the way as PEFT merges them, or sent by themselves as PEFT saves them."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.helpers import families
from tests.helpers.exports import ALONE, export
from weightcast.errors import ConfigError
from weightcast.exporters import peft_layers
from weightcast.exporters.lora_adapter import AdapterExporter
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


TARGETS = ["q_proj", "down_proj"]
# Configurations of every kind of adapter whose merge is the forward pass.
MERGED = {
    "dora": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "bias": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True),
    "embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens"]),
    "tokens-and-lora": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, trainable_token_indices=[3, 4]),
    "stacked": lambda: peft.LoraConfig(
        r=4, target_modules=TARGETS, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=TARGETS, total_step=9),
    "boft": lambda: peft.BOFTConfig(boft_block_size=2, target_modules=TARGETS),
    "c3a": lambda: peft.C3AConfig(block_size=2, target_modules=TARGETS),
    "deft": lambda: peft.DeftConfig(target_modules=TARGETS),
    "delora": lambda: peft.DeloraConfig(r=4, target_modules=TARGETS),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=TARGETS),
    "glora": lambda: peft.GloraConfig(r=4, target_modules=TARGETS),
    "gralora": lambda: peft.GraloraConfig(r=4, gralora_k=2, target_modules=TARGETS),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=TARGETS),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "ln_tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=TARGETS),
    "miss": lambda: peft.MissConfig(r=4, target_modules=TARGETS),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS),
    "peanut": lambda: peft.PeanutConfig(target_modules=TARGETS),
    "psoft": lambda: peft.PsoftConfig(r=4, target_modules=TARGETS),
    "randlora": lambda: peft.RandLoraConfig(r=4, target_modules=TARGETS),
    "road": lambda: peft.RoadConfig(target_modules=TARGETS, group_size=4),
    "shira": lambda: peft.ShiraConfig(r=4, target_modules=TARGETS),
    "tinylora": lambda: peft.TinyLoraConfig(r=2, target_modules=TARGETS),
    "trainable_tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 4], target_modules=["embed_tokens"]),
    "unilora": lambda: peft.UniLoraConfig(r=4, target_modules=TARGETS),
    "vblora": lambda: peft.VBLoRAConfig(r=4, vector_length=4, num_vectors=20, topk=2, target_modules=TARGETS),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=TARGETS),
    "waveft": lambda: peft.WaveFTConfig(n_frequency=20, target_modules=TARGETS),
}
NEEDS_BIAS = {"bias"}
QUICK = {"dora", "bias", "embedding", "tokens-and-lora", "stacked", "oft", "ia3", "ln_tuning"}


def trained(config, family: str = "qwen3", **settings) -> nn.Module:
    """Makes a model whose adapters are a step away from their start."""
    torch.manual_seed(0)
    model = peft.get_peft_model(families.make(family, **settings), config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def test_every_kind_that_is_merged_by_peft_is_tested():
    assert {*MERGED} >= peft_layers.MERGED - {"lora"}


# PEFT warns of missing CUDA extensions, of unusual targets and of tied weights.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.wide) for kind in MERGED]
)
def test_adapters_of_other_kinds_are_sent_as_peft_merges_them(kind):
    family, settings = "qwen3", {"attention_bias": kind in NEEDS_BIAS}
    if kind == "stacked":
        family, settings = "qwen3_moe", {"moe_intermediate_size": 12}
    model = trained(MERGED[kind](), family, **settings)
    tokens = torch.tensor([[3, 4, 17, 33, 9, 60]])
    before = model(tokens).logits
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    got = tensors_of(ModuleExporter(model), bucket_bytes=5000)
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, kept[name])] == []
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, before, rtol=1e-5, atol=1e-5)
    want = tensors_of(ModuleExporter(merged))
    plain = tensors_of(ModuleExporter(families.make(family, **settings)))
    assert set(got) == set(want) == set(plain)
    assert any(not torch.equal(want[name], plain[name]) for name in want)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: peft.LoraConfig(r=4, target_modules=TARGETS, lora_bias=True), r"q_proj has .*base layer has no bias"),
        (lambda: peft.PveraConfig(r=4, target_modules=TARGETS), r"q_proj has an adapter.*with pvera_lambda_b"),
        (lambda: peft.LilyConfig(r=4, target_modules=TARGETS), r"q_proj has an adapter.*with lily_A"),
        (
            lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
            r"the model has an adapter.*with prompt_encoder",
        ),
    ],
    ids=["no-bias", "random", "input", "prompt"],
)
def test_adapters_that_cannot_be_merged_are_refused_by_name(config, words):
    model = peft.get_peft_model(families.make("qwen3"), config())
    with pytest.raises(ConfigError, match=words) as caught:
        ModuleExporter(model)
    hint = "train a kind that has a merge" if words.endswith("prompt_encoder") else "merge_and_unload"
    assert hint in (caught.value.hint or "")


def test_a_merge_that_changes_a_shape_is_refused_by_name(monkeypatch):
    """Its values would be read in the shape that the weight had."""
    model = trained(MERGED["ia3"]())

    def merge(layer, *_):
        layer.base_layer.weight.data = layer.base_layer.weight.data.new_zeros(200, 100)

    monkeypatch.setattr(peft.tuners.ia3.layer.Linear, "merge", merge)
    with pytest.raises(ConfigError, match=r"q_proj has an adapter .*other tensors than before: weight"):
        tensors_of(ModuleExporter(model))


def test_adapters_beside_the_layers_of_a_model_are_refused_by_name():
    """PEFT's adaption prompts wrap attention, which then has other names."""
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")
    model = peft.get_peft_model(families.make("llama"), config)
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn has an adapter.*with adaption_prompt") as caught:
        ModuleExporter(model)
    assert "train a kind that has a merge" in (caught.value.hint or "")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_mixture_of_adapters_is_refused_by_name(tmp_path):
    """X-LoRA's layers look like LoRA's, and every input gets another sum of them."""
    for name in ("one", "two"):
        trained(peft.LoraConfig(r=4, target_modules=TARGETS)).save_pretrained(tmp_path / name)
    base = families.make("qwen3")
    base.config.use_cache = False
    adapters = {name: str(tmp_path / name) for name in ("one", "two")}
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=base.config.hidden_size, adapters=adapters)
    with pytest.raises(ConfigError, match=r"has an adapter.*with xlora"):
        ModuleExporter(peft.get_peft_model(base, config))


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    ("config", "tied"),
    [
        (lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens"]), "lm_head"),
        (lambda: peft.LoraConfig(r=4, target_modules=["lm_head"]), "another"),
    ],
    ids=["embedding", "head"],
)
def test_an_adapter_of_a_tied_weight_is_refused(config, tied):
    # Merged into the one weight, it would change the other use too, which the forward pass does not.
    model = trained(config(), "qwen2")
    with pytest.raises(ConfigError, match=rf"tied to {tied}|tied to .*{tied}"):
        ModuleExporter(model)


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
