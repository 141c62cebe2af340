from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.helpers import families
from weightcast.cli.app import app
from weightcast.cli.plan_model import model_at
from weightcast.exporters.memory_estimate import WORK_BYTES
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.quantise import Fp8Blocks
from weightcast.report import format_bytes
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.update.estimate import make_plan
from weightcast.wire.layout import Packing, TensorSpec, total_bytes


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="weightcast")


def spec(name, *shape):
    return TensorSpec(name=name, dtype="float32", shape=shape)


SPECS = [spec("a", 256), spec("big", 64, 256), spec("b", 256), spec("c", 3072), spec("d", 2048)]


def test_plan_names_what_is_cut_and_what_travels_alone():
    found = make_plan(SPECS, model="m", engine="native", packing=Packing(), bucket_bytes=16384, engine_ranks=6)
    assert found.cut == ("big",)
    assert "c" in found.alone or "d" in found.alone
    assert found.size_bytes == total_bytes(SPECS)
    assert found.largest_bucket_bytes <= 16384
    assert found.trainer_peak_bytes == 2 * found.largest_bucket_bytes + WORK_BYTES
    assert found.all_links_bytes == 6 * found.link_bytes == 6 * found.size_bytes
    assert found.seconds is None


def test_one_bucket_needs_no_second_one():
    found = make_plan(SPECS, model="m", engine="native", packing=Packing(), bucket_bytes=1 << 20, engine_ranks=1)
    assert found.buckets == 1
    assert found.trainer_peak_bytes == found.largest_bucket_bytes + WORK_BYTES
    assert found.cut == found.alone == ()


def test_seconds_follow_from_the_bandwidth():
    found = make_plan(
        SPECS, model="m", engine="native", packing=Packing(), bucket_bytes=1 << 20, engine_ranks=1, link_gb_per_s=0.001
    )
    assert found.seconds == pytest.approx(total_bytes(SPECS) / 1e6)


def test_direct_is_planned_by_link():
    specs = [spec("matrix", 100, 40), spec("vector", 30)]
    found = make_plan(
        specs,
        model="m",
        engine="native",
        packing=Packing(),
        bucket_bytes=1 << 20,
        engine_ranks=6,
        tp=2,
        trainer_ranks=4,
        link_gb_per_s=1e-6,
    ).direct
    assert found.into_engine_rank_bytes == 100 * 40 * 4 // 2 + 30 * 4
    assert found.out_of_trainer_rank_bytes == 6 * found.into_engine_rank_bytes // 4
    assert (found.busiest, found.refused, found.computed) == ("trainer rank", "", ())
    assert found.seconds == pytest.approx(found.out_of_trainer_rank_bytes / 1e3)


def test_plan_says_what_cannot_go_direct_and_why(tmp_path):
    save_file({"layers.0.mlp.up_proj.weight": torch.ones(256, 128)}, tmp_path / "model.safetensors")
    done = run("plan", tmp_path / "model.safetensors", "--trainer-ranks", "8", "--tp", "2")
    assert "the busiest link is that of an engine rank" in done.output
    assert "keep_mapped" not in done.output
    done = run("plan", tmp_path / "model.safetensors", "--quantise", "fp8")
    assert "2 tensors by bucket, because their values are computed when they are sent" in done.output
    done = run("plan", tmp_path / "model.safetensors", "--engine", "sglang")
    assert "direct: not possible, because sglang without our receiver" in done.output


def test_plan_of_a_checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1000, 100), "n": torch.zeros(100)}, path)
    result = run("plan", path, "--bucket-bytes", "128KiB", "--link-gb-per-s", "10", "--targets", "2", "--tp", "3")
    assert result.exit_code == 0, result.output
    assert "2 tensors, 391.0 KiB, 4 buckets of at most 128.0 KiB" in result.stdout
    assert "1 tensor travels in pieces: w" in result.stdout
    assert "391.0 KiB into each of 6 engine ranks, 2.3 MiB in all" in result.stdout
    assert "at 10 GB/s" in result.stdout
    document = json.loads(run("plan", path, "--bucket-bytes", "128KiB", "--json").stdout)
    assert document["buckets"] == 4
    assert document["cut"] == ["w"]
    assert document["seconds"] is None
    half = json.loads(run("plan", path, "--dtype", "bfloat16", "--json").stdout)
    assert half["size_bytes"] * 2 == document["size_bytes"] == 400_400


def test_row_larger_than_a_bucket_says_how_large_one_must_be(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(2, 10_000)}, path)
    result = run("plan", path, "--bucket-bytes", "8KiB")
    assert result.exit_code == 2
    assert "error: one row of w has 40000 bytes" in result.stderr


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config"])
def test_plan_of_a_config_equals_that_of_its_checkpoint(name, tied, tmp_path):
    config = getattr(transformers, name)(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=96,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "whole")
    config.save_pretrained(tmp_path / "config")

    from_config = model_at(tmp_path / "config" / "config.json", None).specs
    assert {(spec.name, spec.dtype, spec.shape) for spec in from_config} == {
        (spec.name, spec.dtype, spec.shape) for spec in model_at(tmp_path / "whole", None).specs
    }
    assert [spec.name for spec in from_config] == [name for name, _ in model.named_parameters()]
    assert {spec.dtype for spec in model_at(tmp_path / "config", "float32").specs} == {"float32"}
    result = run("plan", tmp_path / "config" / "config.json", "--json")
    assert json.loads(result.stdout)["tensors"] == len(from_config)


@pytest.mark.parametrize("model_type", families.SETTINGS)
def test_plan_of_a_config_is_what_the_exporter_would_send(model_type, tmp_path):
    model = families.make(model_type)
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(tmp_path)
    want = {(spec.name, spec.dtype, spec.shape) for spec in ModuleExporter(model, wire_dtype=torch.bfloat16).specs()}
    assert {(spec.name, spec.dtype, spec.shape) for spec in model_at(tmp_path / "config.json", None).specs} == want
    quantised = model_at(tmp_path / "config.json", None, fp8=True).specs
    exporter = ModuleExporter(model, wire_dtype=torch.bfloat16, quantise=Fp8Blocks())
    assert list(quantised) == list(exporter.specs())


def test_plan_says_everything_about_a_config(tmp_path):
    settings = families.SETTINGS["deepseek_v3"] | {"tie_word_embeddings": True, "num_nextn_predict_layers": 1}
    config = transformers.AutoConfig.for_model("deepseek_v3", dtype="bfloat16", **settings)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    shown = run("plan", path, "--bucket-bytes", "2KiB", "--trainer-ranks", "4")
    assert shown.exit_code == 0, shown.output
    assert "names: a checkpoint's names, from the table 'transformers'" in shown.stdout
    assert "not covered: lm_head.weight: tied to model.embed_tokens.weight, sent once" in shown.stdout
    assert "not covered: 1 draft (MTP) layer: transformers' model has none" in shown.stdout
    assert "B float32" in shown.stdout  # the router's correction
    assert "lmdeploy: buckets of 3.3 KiB or more are needed" in shown.stdout
    assert "on each of 4 trainer ranks" in shown.stdout
    found = json.loads(run("plan", path, "--bucket-bytes", "2KiB", "--trainer-ranks", "4", "--json").stdout)
    assert "model.embed_tokens.weight" in found["oversized"]
    assert found["trainer_peak_bytes"] == 2 * found["largest_bucket_bytes"] + (1 << 20) + WORK_BYTES
    assert {other["engine"]: other["buckets"] > 0 for other in found["others"]} == {
        "native": True,
        "sglang": False,
        "vllm": False,
        "lmdeploy": False,
    }
    for engine in ("sglang", "vllm", "lmdeploy"):
        failed = run("plan", path, "--bucket-bytes", "2KiB", "--engine", engine)
        assert failed.exit_code == 2
        assert "model.embed_tokens.weight has 3360 bytes" in failed.stderr
        done = json.loads(run("plan", path, "--bucket-bytes", "4KiB", "--engine", engine, "--json").stdout)
        assert next(other for other in done["others"] if other["engine"] == engine)["buckets"] == done["buckets"]


def test_a_ceiling_sets_the_size_of_a_bucket_or_says_what_it_needs(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1000, 1000), "n": torch.zeros(100)}, path)
    done = run("plan", path, "--ceiling", "67MiB", "--trainer-ranks", "2", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["bucket_bytes"] == 1 << 20
    assert found["trainer_peak_bytes"] <= 67 << 20
    failed = run("plan", path, "--ceiling", "67MiB", "--engine", "sglang", "--trainer-ranks", "2")
    assert failed.exit_code == 2
    assert "w has 4000000 bytes" in failed.stderr
    assert f"allow {10_000_000 + (64 << 20)} bytes or more" in failed.stderr


def test_a_large_model_is_planned_with_the_buckets_that_connect_chooses(tmp_path):
    config = transformers.Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=24, vocab_size=151936, dtype="bfloat16"
    )
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    found = json.loads(run("plan", path, "--json").stdout)
    shown = run("plan", path)
    assert shown.exit_code == 0, shown.output
    size = format_bytes(found["bucket_bytes"])
    assert f"bucket size: {size} is what connect chooses for ipc on GPUs with enough free memory;" in shown.stdout
    assert found["bucket_bytes"] == found["size_bytes"] // 8 == found["default_bucket_bytes"]["ipc"]
    assert json.loads(run("plan", path, "--trainer-ranks", "8", "--json").stdout)["bucket_bytes"] == 512 << 20
    # Stock engines map nothing of ours, and SGLang's takes whole tensors only.
    assert json.loads(run("plan", path, "--engine", "vllm", "--json").stdout)["bucket_bytes"] >= 512 << 20
    whole = json.loads(run("plan", path, "--engine", "sglang", "--json").stdout)
    assert whole["bucket_bytes"] == whole["largest_bucket_bytes"] == 151936 * 4096 * 2
    asked = run("plan", path, "--bucket-bytes", "512MiB")
    assert "bucket size" not in asked.stdout
    bounded = run("plan", path, "--max-extra-bytes", "1GiB", "--json")
    assert json.loads(bounded.stdout)["trainer_peak_bytes"] <= 1 << 30


def test_a_model_with_thousands_of_experts_is_planned_without_their_memory(tmp_path):
    config = transformers.Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    with PeakMemory(torch.device("cpu")) as peak:
        done = run("plan", tmp_path / "config.json", "--engine", "sglang", "--bucket-bytes", "1GiB", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["tensors"], found["engine"]) == (18867, "sglang")
    assert found["size_bytes"] == 61_064_245_248
    assert peak.extra_bytes < 512 << 20


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model_type": "abacus"}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_config_of_nothing_is_one_line(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)
    result = run("plan", path)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.stderr.splitlines()[0].startswith("error: ")


def test_plan_divides_the_bytes_of_several_hosts_into_memory_and_messages():
    of = {"model": "m", "engine": "native", "packing": Packing(), "bucket_bytes": 1 << 20}
    one = make_plan([spec("m", 100, 40)], **of, engine_ranks=4, tp=2, trainer_ranks=4).direct
    assert (one.memory_bytes, one.message_bytes) == (0, 0)
    two = make_plan([spec("m", 100, 40)], **of, engine_ranks=4, tp=2, trainer_ranks=4, hosts=2).direct
    assert two.into_engine_rank_bytes == 8000
    assert (two.memory_bytes, two.message_bytes) == (16_000, 16_000)
    beyond = make_plan([spec("m", 100, 40)], **of, engine_ranks=2, tp=2, trainer_ranks=1, hosts=2).direct
    assert (beyond.memory_bytes, beyond.message_bytes) == (8000, 8000)


def test_plan_shows_the_busiest_host(tmp_path):
    of = {"model": "m", "engine": "native", "packing": Packing(), "bucket_bytes": 1 << 20, "link_gb_per_s": 1e-6}
    assert make_plan([spec("m", 100, 40)], **of, engine_ranks=4, tp=2, trainer_ranks=4).ways == ()
    # Two engine ranks on each host get half of their 8,000 bytes from the other host.
    two = make_plan([spec("m", 100, 40)], **of, engine_ranks=4, tp=2, trainer_ranks=4, hosts=2).ways
    [direct] = [way for way in two if "direct" in way.taken_by]
    assert (direct.busiest_bytes, direct.busiest_link) == (8000, "out of host 2")
    assert direct.seconds == pytest.approx(8.0)
    # One trainer rank sends all that the engines need on two other hosts.
    beyond = make_plan([spec("m", 100, 40)], **of, engine_ranks=4, tp=2, engine_hosts=2).ways
    [messages] = [way for way in beyond if way.name == "direct by messages"]
    assert (messages.busiest_bytes, messages.busiest_link) == (4 * 8000, "out of host 1")

    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1000, 100)}, path)
    spread = ("plan", path, "--targets", "4", "--tp", "2", "--trainer-ranks", "4", "--hosts", "2")
    done = run(*spread)
    assert "ipc: 195.3 KiB out of host 2; auto takes it" in done.output
    assert "direct by messages: 390.6 KiB out of host 2; direct takes it" in done.output
    assert "direct by messages between GPUs takes longer than a broadcast of the same weights" in " ".join(
        done.output.split()
    )
    apart = ("plan", path, "--device", "cpu", "--link-gb-per-s", "1")
    done = run(*apart, "--targets", "2", "--engine-hosts", "2")
    assert "direct by relay: 390.6 KiB out of host 1, 0.4 ms at 1 GB/s; auto and direct take it" in done.output
    done = run(*apart, "--targets", "3", "--engine-hosts", "3")
    assert "broadcast: 781.2 KiB out of host 1, 0.8 ms at 1 GB/s; auto takes it" in done.output
    assert "direct by relay: 390.6 KiB out of host 1, in the time of 585.9 KiB, since its links wait" in done.output
    assert "between GPUs" not in done.output
    assert run(*spread, "--device", "tpu").exit_code == 2
