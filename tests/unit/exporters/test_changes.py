"""Between two updates users do things to a model.  Afterwards the engine has what the trainer has, or the update fails.

Each test makes an exporter, sends everything once, changes something, and asks as an update does.  What is sent then
must be what ``state_dict()`` has, or, for models with adapters, must give the logits of the trainer's own forward pass.
Otherwise the change must be refused by name.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

from tests.helpers import families
from tests.helpers.exports import ALONE, bucketize, export, raw
from tests.helpers.ranks import allocate_slots
from weightcast.errors import ConfigError, WeightcastError
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.exporters.lora_adapter import AdapterExporter
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.multi_module import ComposedExporter, Part
from weightcast.exporters.state_dict import StateDictExporter
from weightcast.wire.layout import Packing, plan_buckets

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TOKENS = torch.tensor([[3, 4, 17, 33, 9, 60, 21]])
TARGETS = ["q_proj", "down_proj"]
Change = Callable[[Any], object]


def update(exporter: Any) -> dict[str, bytes]:
    """Asks as an update does, and returns the bytes of one update."""
    if exporter.changed():
        exporter.look_again()
        exporter.prepare(ALONE)
        assert not exporter.changed()
    return export(exporter, bucket_bytes=9000)


def tensors_of(exporter: Any, sent: dict[str, bytes]) -> dict[str, torch.Tensor]:
    return {
        spec.name: torch.frombuffer(bytearray(sent[spec.name]), dtype=spec.torch_dtype).view(spec.shape)
        for spec in exporter.specs()
    }


def noise(model: nn.Module, scale: float = 0.1) -> None:
    """Another value for every parameter that can have one."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            if 0 in parameter.stride():  # expanded
                parameter.data = parameter.data.clone()
            parameter.add_((torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype))


def plain(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    return families.make("qwen3", tie_word_embeddings=tied).eval()


def step(kind: type[torch.optim.Optimizer], **options: Any) -> Change:
    def change(model: nn.Module) -> None:
        model.train()
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer = kind([one for one in model.parameters() if one.requires_grad], lr=0.05, **options)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()

    return change


def layer_of(model: nn.Module) -> nn.Module:
    return model.get_submodule("model.layers.0.mlp.up_proj")


def put(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(model: nn.Module) -> None:
        layer = layer_of(model)
        layer.weight = nn.Parameter(make(layer.weight.detach()), requires_grad=False)

    return change


def other_layer(model: Any) -> None:
    new = copy.deepcopy(model.model.layers[1])
    noise(new)
    model.model.layers[1] = new


def swapped_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() + 0.1 for name, tensor in model.state_dict().items()}, assign=True)


def resized(model: Any) -> None:
    model.resize_token_embeddings(80, mean_resizing=False)
    model.resize_token_embeddings(70, mean_resizing=False)
    noise(model)


def new_parameters(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach() + 0.1))


def new_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() + 0.1


def averaged(model: nn.Module) -> None:
    """As trainers swap in an average of the weights."""
    shadow = [parameter.detach() * 0.5 for parameter in model.parameters()]
    for parameter, other in zip(model.parameters(), shadow, strict=True):
        parameter.data = other


def pruned_for_good(model: nn.Module) -> None:
    prune.l1_unstructured(layer_of(model), "weight", amount=0.5)
    prune.remove(layer_of(model), "weight")


class Negated(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight


def freed(model: nn.Module) -> None:
    layer_of(model).weight = nn.Parameter(torch.ones(44, 24))
    layer_of(model).weight.untyped_storage().resize_(0)


def wrapped_layer(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    noise(model)


def swapped_tensors(model: nn.Module) -> None:
    weight = layer_of(model).weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.randn_like(weight)))


def in_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(dict.fromkeys(model.parameters()))
    nn.utils.vector_to_parameters(vector.detach() * 0.5, list(dict.fromkeys(model.parameters())))


def cast(dtype: torch.dtype) -> Change:
    def change(model: nn.Module) -> None:
        noise(model)
        model.to(dtype)

    return change


# What happens to a module.  The words of a refusal are for a model without ties, and with them; None where it is sent.
MODULES: dict[str, tuple[Change, str | None, str | None]] = {
    "nothing": (lambda model: None, None, None),
    "a step of SGD": (step(torch.optim.SGD, momentum=0.9), None, None),
    "a step of AdamW for each tensor": (step(torch.optim.AdamW, foreach=False), None, None),
    "a step of AdamW for all tensors": (step(torch.optim.AdamW, foreach=True), None, None),
    "load_state_dict": (lambda m: m.load_state_dict({n: t + 0.1 for n, t in m.state_dict().items()}), None, None),
    "load_state_dict(assign=True)": (assigned, None, "lm_head.weight was tied"),
    "other memory for every parameter": (new_memory, None, None),
    "an average swapped in": (averaged, None, None),
    "new parameters everywhere": (new_parameters, None, "lm_head.weight was tied"),
    "parameters as one vector": (in_vector, None, None),
    "torch.utils.swap_tensors": (swapped_tensors, None, None),
    "another layer": (other_layer, None, None),
    "layers swapped": (swapped_layers, None, None),
    "another head": (lambda m: setattr(m, "lm_head", nn.Linear(24, 70, bias=False)), None, "lm_head.weight was tied"),
    "a head with a bias": (lambda m: setattr(m, "lm_head", nn.Linear(24, 70)), "lm_head.bias is new", "lm_head"),
    "other embeddings": (lambda m: m.set_input_embeddings(nn.Embedding(70, 24)), None, "lm_head.weight was tied"),
    "embeddings resized there and back": (resized, None, None),
    "larger embeddings": (
        lambda m: m.resize_token_embeddings(80, mean_resizing=False),
        r"embed_tokens.weight is float32 \[80, 24\] and was float32 \[70, 24\]",
        r"embed_tokens.weight is float32 \[80, 24\] and was float32 \[70, 24\]",
    ),
    "a layer less": (lambda m: m.model.layers.__delitem__(1), "layers.1.* is gone", "layers.1.* is gone"),
    "a layer more": (
        lambda m: m.model.layers.append(copy.deepcopy(m.model.layers[0])),
        "layers.2.* is new",
        "layers.2.* is new",
    ),
    "bfloat16": (cast(torch.bfloat16), None, None),
    "float64": (cast(torch.float64), None, None),
    "another layout in memory": (put(lambda w: w.t().contiguous().t() + 0.1), None, None),
    "an expanded weight": (put(lambda w: w[:1].clone().expand_as(w)), None, None),
    "a transposed weight": (put(lambda w: w.t()), r"up_proj.weight is float32 \[24, 44\]", "up_proj.weight"),
    "a negated view": (put(lambda w: torch._neg_view(w.clone())), "up_proj.weight is a view", "up_proj.weight is a"),
    "a negated view of the same memory": (put(torch._neg_view), "up_proj.weight is a view", "up_proj.weight is a view"),
    "a wrapper subclass": (
        put(lambda w: TwoTensor(w.clone(), w.clone())),
        "up_proj.weight is a TwoT",
        "is a TwoTensor",
    ),
    "a sparse weight": (put(lambda w: w.to_sparse()), "only dense", "only dense"),
    "a complex weight": (put(lambda w: w.to(torch.complex64)), "complex64", "complex64"),
    "8-bit floats": (put(lambda w: w.to(torch.float8_e4m3fn)), "up_proj.weight is float8", "up_proj.weight is float8"),
    "a weight without values": (put(lambda w: w.to("meta")), "meta device", "meta device"),
    "a weight whose memory was freed": (freed, "up_proj.weight has no memory", "up_proj.weight has no memory"),
    "pruning": (
        lambda m: prune.l1_unstructured(layer_of(m), "weight", amount=0.5),
        "up_proj.weight_orig is new",
        "up_proj.weight_orig is new",
    ),
    "pruning for good": (pruned_for_good, None, None),
    "a parametrization": (
        lambda m: parametrize.register_parametrization(layer_of(m), "weight", Negated()),
        "parametrizations.weight.original is new",
        "parametrizations.weight.original is new",
    ),
    "a weight norm": (lambda m: nn.utils.parametrizations.weight_norm(layer_of(m)), "weight is gone", "weight is gone"),
    "a bias": (
        lambda m: setattr(layer_of(m), "bias", nn.Parameter(torch.ones(44))),
        "up_proj.bias is new",
        "up_proj.bias is new",
    ),
    "a parameter less": (lambda m: delattr(layer_of(m), "weight"), "up_proj.weight is gone", "up_proj.weight is gone"),
    "a new buffer": (lambda m: m.register_buffer("steps", torch.ones(2)), "steps is new", "steps is new"),
    "a buffer that is not saved": (lambda m: m.register_buffer("own", torch.ones(2), persistent=False), None, None),
    "frozen layers": (lambda m: m.model.layers.requires_grad_(False), None, None),
    "gradient checkpointing": (lambda m: m.gradient_checkpointing_enable(), None, None),
    "a layer wrapped for checkpointing": (wrapped_layer, None, None),
    "a head tied later": (lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight), None, None),
    "shared memory": (lambda m: (noise(m), m.share_memory()), None, None),
}


def refused(change: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        change()


def check_module(exporter: Any, model: nn.Module) -> None:
    """Checks that an update sends all of the state dict as it is now."""
    got, state = update(exporter), model.state_dict()
    dtypes = {spec.name: spec.torch_dtype for spec in exporter.specs()}
    names = {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in state.items()}
    sent_by_tie = {name for name in names if name not in got}
    assert all(any(names[name] is not names[other] for other in got) for name in sent_by_tie)
    assert set(got) <= set(names)
    assert [n for n in got if got[n] != raw(names[n].to(dtypes[n]))] == []
    for name in sent_by_tie:  # under another name
        assert any(torch.equal(names[name], names[other]) for other in got), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("what", MODULES)
def test_a_changed_module_is_sent_as_it_is_or_refused_by_name(what, tied):
    change, *words = MODULES[what]
    model = plain(tied)
    exporter = ModuleExporter(model)
    check_module(exporter, model)
    change(model)
    if words[tied] is None:
        check_module(exporter, model)
        noise(model)
        check_module(exporter, model)
    else:
        for _ in range(2):  # it stays refused
            refused(lambda: update(exporter), words[tied])


def test_an_update_goes_on_when_the_change_was_undone():
    model = plain(False)
    exporter = ModuleExporter(model)
    update(exporter)
    head = model.lm_head
    model.lm_head = nn.Linear(24, 70)
    refused(lambda: update(exporter), r"lm_head.bias is new.*Nothing has been sent")
    model.lm_head = head
    noise(model)
    check_module(exporter, model)


# -- adapters


def adapted(**options: Any) -> nn.Module:
    model = plain(False)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS} | options
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    if not options:
        model.add_adapter("other", peft.LoraConfig(**settings))
    train_adapters(model)
    return model.eval()


def train_adapters(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def scaled(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.scaling["default"] *= 3


def deleted_and_made_again(model: Any) -> None:
    model.set_adapter("other")
    model.delete_adapter("default")
    model.add_adapter("default", peft.LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "up_proj"]))
    model.set_adapter("default")
    train_adapters(model)


def in_a_window(model: Any) -> None:
    train_adapters(model)
    model.merge_adapter()


def after_a_window(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()
    train_adapters(model)


def weighted(model: Any) -> None:
    model.add_weighted_adapter(["default", "other"], [0.3, 0.7], "both", combination_type="cat")
    model.set_adapter("both")


def one_layer_off(model: nn.Module) -> None:
    layers_of(model)[0].enable_adapters(False)


ADAPTED: dict[str, tuple[Change, str | None]] = {
    "nothing": (lambda m: None, None),
    "a step": (step(torch.optim.AdamW), None),
    "merge_adapter": (lambda m: m.merge_adapter(), None),
    "trained and merged": (in_a_window, None),
    "merged, unmerged and trained": (after_a_window, None),
    "set_adapter": (lambda m: m.set_adapter("other"), None),
    "two active adapters": (lambda m: m.base_model.set_adapter(["default", "other"]), None),
    "disable_adapter_layers": (lambda m: m.base_model.disable_adapter_layers(), None),
    "one layer switched off": (one_layer_off, None),
    "off and on": (lambda m: (m.base_model.disable_adapter_layers(), m.base_model.enable_adapter_layers()), None),
    "another scale": (scaled, None),
    "delete_adapter": (lambda m: (m.set_adapter("other"), m.delete_adapter("default")), None),
    "deleted and made again, of another rank": (deleted_and_made_again, None),
    "add_adapter": (lambda m: m.add_adapter("third", peft.LoraConfig(r=2, target_modules=["k_proj"])), None),
    "add_weighted_adapter": (weighted, None),
    "merge_and_unload": (lambda m: m.merge_and_unload(), None),
    "unload": (lambda m: m.unload(), None),
    "a step of the weights under adapters": (noise, None),
    "merged, then switched off": (
        lambda m: (m.merge_adapter(), m.base_model.disable_adapter_layers()),
        "q_proj has the adapter default merged into its weight, and its adapters are switched off",
    ),
    "one of two active ones merged": (
        lambda m: (m.base_model.set_adapter(["default", "other"]), m.merge_adapter(["default"])),
        "q_proj has the adapter default merged into its weight, and other is active as well",
    ),
}


def check_adapted(exporter: Any, model: Any) -> None:
    """A plain model with what an update sends now computes what the trainer's model does now."""
    got = tensors_of(exporter, update(exporter))
    served = plain(False)
    assert set(got) == set(served.state_dict())
    served.load_state_dict(got)
    with torch.no_grad():
        torch.testing.assert_close(served(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)


def check_change(exporter: Any, model: Any, change: Change, words: str | None) -> None:
    check_adapted(exporter, model)
    with torch.no_grad():
        before = model(TOKENS).logits
    change(model)
    if words is not None:
        for _ in range(2):
            refused(lambda: update(exporter), words)
        return
    check_adapted(exporter, model)
    noise(model)
    check_adapted(exporter, model)
    with torch.no_grad():
        assert not torch.equal(model(TOKENS).logits, before)


@pytest.mark.parametrize("what", ADAPTED)
def test_adapters_are_merged_as_they_are_now_or_refused_by_name(what):
    model = adapted()
    check_change(ModuleExporter(model), model, *ADAPTED[what])


WHOLE = {"modules_to_save": ["lm_head"]}
DORA = {"use_dora": True}


@pytest.mark.parametrize("options", [WHOLE, DORA], ids=["modules_to_save", "dora"])
@pytest.mark.parametrize(
    "what", ["nothing", "merge_adapter", "disable_adapter_layers", "off and on", "merge_and_unload"]
)
def test_parts_that_are_no_product_are_sent_as_they_are_now(what, options):
    model = adapted(**options)
    check_change(ModuleExporter(model), model, *ADAPTED[what])


def test_adapters_that_were_added_later_are_merged():
    model = plain(False)
    exporter = ModuleExporter(model)
    check_adapted(exporter, model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS))
    train_adapters(wrapped)
    check_adapted(exporter, wrapped.eval())


ALONE_CHANGES: dict[str, tuple[Change, str | None]] = {
    "a step": (step(torch.optim.SGD), None),
    "another scale": (scaled, None),
    "merge_adapter": (lambda m: m.merge_adapter(), None),
    "set_adapter": (lambda m: m.set_adapter("other"), None),
    "deleted": (lambda m: (m.set_adapter("other"), m.delete_adapter("default")), "no LoRA adapter 'default'"),
    "made again, of another rank": (deleted_and_made_again, r"up_proj.lora_A.weight is new"),
}


@pytest.mark.parametrize("what", ALONE_CHANGES)
def test_an_adapter_by_itself_is_sent_as_it_is_now_or_refused_by_name(what):
    change, words = ALONE_CHANGES[what]
    model = adapted()
    exporter = AdapterExporter(model, scaled=True)
    update(exporter)
    change(model)
    if words is not None:
        refused(lambda: update(exporter), words)
        return
    got = update(exporter)
    for path, layer in model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        for part, scale in (("lora_A", 1.0), ("lora_B", layer.scaling["default"])):
            value = getattr(layer, part)["default"].weight.detach() * scale
            assert got[f"{path}.{part}.weight"] == raw(value)


# -- state dicts


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(4, 6, generator=generator) for name in ("a.weight", "b.weight", "c.weight")}
    return made | {"d.weight": made["c.weight"]}


STATES: dict[str, tuple[Change, str | None]] = {
    "nothing": (lambda s: None, None),
    "in place": (lambda s: s["a.weight"].add_(1), None),
    "an entry replaced": (lambda s: s.update({"a.weight": torch.ones(4, 6)}), None),
    "every entry replaced": (lambda s: s.update({n: t + 1 for n, t in s.items()}), "d.weight was tied"),
    "an entry in another dtype": (lambda s: s.update({"a.weight": torch.ones(4, 6).double()}), None),
    "an entry taken out and put in last": (lambda s: s.update({"a.weight": s.pop("a.weight") + 1}), None),
    "an entry less": (lambda s: s.pop("b.weight"), "b.weight is gone"),
    "an entry more": (lambda s: s.update({"e.weight": torch.ones(3)}), "e.weight is new"),
    "another shape": (lambda s: s.update({"a.weight": torch.ones(4, 7)}), r"a.weight is float32 \[4, 7\]"),
    "another shape in place": (lambda s: s["a.weight"].resize_(2, 3), r"a.weight is float32 \[2, 3\]"),
    "no tensor": (lambda s: s.update({"a.weight": None}), "a.weight is a NoneType"),
    "integers": (
        lambda s: s.update({"a.weight": torch.ones(4, 6, dtype=torch.int64)}),
        r"a.weight is int64 \[4, 6\] and was float32",
    ),
    "cleared": (lambda s: s.clear(), "no parameters"),
    "untied": (lambda s: s.update({"d.weight": s["d.weight"].clone()}), "d.weight was tied"),
    "a negated view": (lambda s: s.update({"a.weight": torch._neg_view(s["a.weight"])}), "a.weight is a view"),
    "a wrapper subclass": (
        lambda s: s.update({"a.weight": TwoTensor(torch.ones(4, 6), torch.ones(4, 6))}),
        "a.weight is a TwoTensor",
    ),
}


@pytest.mark.parametrize("what", STATES)
def test_a_changed_state_dict_is_sent_as_it_is_or_refused_by_name(what):
    change, words = STATES[what]
    tensors = state()
    exporter = StateDictExporter(tensors)
    update(exporter)
    change(tensors)
    if words is not None:
        refused(lambda: update(exporter), words)
        return
    got = update(exporter)
    assert set(got) == set(tensors) - {"d.weight"}
    assert all(sent == raw(tensors[name].float()) for name, sent in got.items())


# -- checkpoints


def save(folder: Path, seed: int, *, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    torch.manual_seed(seed)
    model = families.make("qwen3").to(dtype)
    noise(model, scale=0.1 * seed)
    model.save_pretrained(folder, **options)


def rewrite(folder: Path, change: Callable[[Path, bytes], object], **metadata: str) -> None:
    file, aside = folder / "model.safetensors", folder / "aside"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, aside, {"format": "pt", **metadata})
    data = aside.read_bytes()
    aside.unlink()
    change(file, data)


def in_place(file: Path, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.write(data)
        opened.truncate(len(data))


def in_place_at_the_same_time(file: Path, data: bytes) -> None:
    found = file.stat()
    in_place(file, data)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def renamed(file: Path, data: bytes) -> None:
    other = file.with_name("written-aside")
    other.write_bytes(data)
    other.replace(file)


def other_link(folder: Path) -> None:
    other = folder.with_name("other")
    save(other, 2)
    folder.unlink()
    folder.symlink_to(other)


def with_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), "lm_head.bias": torch.ones(70)}, file, {"format": "pt"})


def tied_by_configuration(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))


CHECKPOINTS: dict[str, tuple[Change, str | None]] = {
    "nothing": (lambda folder: None, None),
    "saved again": (lambda folder: save(folder, 2), None),
    "written aside and renamed": (lambda folder: rewrite(folder, renamed), None),
    "written in place": (lambda folder: rewrite(folder, in_place), None),
    "written in place, with an old time": (lambda folder: rewrite(folder, in_place_at_the_same_time), None),
    "written in place, with a longer header": (lambda folder: rewrite(folder, in_place, step="1000" * 40), None),
    "saved in several files": (
        lambda folder: ((folder / "model.safetensors").unlink(), save(folder, 2, max_shard_size="20KB")),
        None,
    ),
    "saved in another dtype": (lambda folder: save(folder, 2, dtype=torch.float64), None),
    "touched": (lambda folder: os.utime(folder / "model.safetensors"), None),
    "another folder behind a link": (other_link, None),
    "deleted": (lambda folder: (folder / "model.safetensors").unlink(), "is not a safetensors checkpoint"),
    "half written": (lambda folder: os.truncate(folder / "model.safetensors", 9000), "is truncated"),
    "no checkpoint": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "not a safetensors file"),
    "a tensor more": (with_tensor, "lm_head.bias is new"),
    "tied by its configuration": (tied_by_configuration, "lm_head.weight is gone"),
}


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check_checkpoint(exporter: CheckpointExporter, folder: Path) -> None:
    got, there = update(exporter), on_disk(folder)
    dtypes = {spec.name: spec.torch_dtype for spec in exporter.specs()}
    assert got == {name: raw(tensor.to(dtypes[name])) for name, tensor in there.items()}


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_a_checkpoint_is_sent_as_it_is_now_or_refused_by_name(what, tmp_path):
    change, words = CHECKPOINTS[what]
    first, folder = tmp_path / "first", tmp_path / "checkpoint"
    save(first, 1)
    if what == "another folder behind a link":
        folder.symlink_to(first)
    else:
        shutil.copytree(first, folder)
    with CheckpointExporter(folder) as exporter:
        check_checkpoint(exporter, folder)
        change(folder)
        if words is None:
            check_checkpoint(exporter, folder)
            return
        for _ in range(2):
            refused(lambda: update(exporter), words)
        shutil.rmtree(folder)
        save(folder, 3)
        check_checkpoint(exporter, folder)  # once it is whole again


def test_a_shard_is_sent_as_it_is_now(tmp_path):
    save(tmp_path, 1, max_shard_size="20KB")
    with CheckpointExporter(tmp_path) as exporter:
        check_checkpoint(exporter, tmp_path)
        save(tmp_path, 2, max_shard_size="20KB")
        check_checkpoint(exporter, tmp_path)


def test_one_file_of_a_folder_is_sent_as_it_is_now(tmp_path):
    save(tmp_path, 1)
    with CheckpointExporter(tmp_path / "model.safetensors") as exporter:
        check_checkpoint(exporter, tmp_path)
        save(tmp_path, 2)
        check_checkpoint(exporter, tmp_path)


def sent_while_written(exporter: CheckpointExporter, before_bucket: int, write: Callable[[], object]) -> None:
    layouts = plan_buckets(exporter.specs(), bucket_bytes=9000, packing=Packing())
    slots = allocate_slots(torch.device("cpu"), 9000)
    assert before_bucket < len(layouts)
    buckets = bucketize(exporter, layouts, ALONE, slots)
    for number in range(len(layouts)):
        if number == before_bucket:
            write()
        next(buckets)


@pytest.mark.parametrize("before_bucket", [0, 1, 3])
@pytest.mark.parametrize("change", [renamed, in_place])
def test_a_checkpoint_that_is_written_during_an_update_is_refused(change, before_bucket, tmp_path):
    save(tmp_path, 1)
    with CheckpointExporter(tmp_path) as exporter:
        check_checkpoint(exporter, tmp_path)
        with pytest.raises(WeightcastError, match=r"model.safetensors was written or replaced while an update read it"):
            sent_while_written(exporter, before_bucket, lambda: rewrite(tmp_path, change))
        check_checkpoint(exporter, tmp_path)


# -- several exporters as one


def test_a_change_of_any_part_is_noticed_and_refused_with_its_name(tmp_path):
    save(tmp_path, 1)
    model, tensors = plain(False), state()
    with CheckpointExporter(tmp_path) as frozen:
        parts = {
            "policy": ModuleExporter(model),
            "draft": Part(exporter=StateDictExporter(tensors), prefix="draft."),
            "vision": Part(exporter=frozen, prefix="vision."),
        }
        exporter = ComposedExporter(parts)

        def check() -> None:
            got = update(exporter)
            want = {name: raw(tensor) for name, tensor in model.state_dict().items()}
            want |= {f"draft.{name}": raw(tensor) for name, tensor in tensors.items() if name != "d.weight"}
            want |= {f"vision.{name}": raw(tensor) for name, tensor in on_disk(tmp_path).items()}
            assert got == want

        check()
        other_layer(model)
        check()
        tensors["a.weight"] = torch.ones(4, 6)
        check()
        save(tmp_path, 2)
        check()
        kept = tensors.pop("b.weight")
        refused(lambda: update(exporter), r"^draft: .*b.weight is gone")
        tensors["b.weight"] = kept
        other_layer(model)
        check()
        model.lm_head = nn.Linear(24, 70)
        refused(lambda: update(exporter), r"^policy: .*lm_head.bias is new")
