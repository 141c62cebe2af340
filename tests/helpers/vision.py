"""Checkpoints of a Qwen3-VL or Qwen2.5-VL that differ in vision tower or language model, and questions about an image.

Qwen2.5-VL attends within windows of an image in its first layer, and names its tensors without ``model.`` or
``language_model``.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from tests.helpers.tiny import VOCAB, tiny_tokenizer

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PROCESSORS = {"image": "Qwen2VLImageProcessor", "video": "Qwen3VLVideoProcessor"}
PROCESSOR = {"qwen3_vl": "Qwen3VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 96,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
VISION_WINDOWS: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 96,
    "out_hidden_size": 128,
    "patch_size": 16,
    "window_size": 32,
    "fullatt_block_indexes": [1],
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,
    },
}


def made(root: Path, dtype: torch.dtype = torch.float32, family: str = "qwen3_vl") -> dict[str, Path]:
    """Returns the folders: ``B`` has another vision tower than ``A``, and ``C`` another language model."""
    newest = family == "qwen3_vl"
    text = TEXT | {"rope_parameters": TEXT["rope_parameters"] | {"mrope_interleaved": newest}}
    folders = {name: root / name for name in "ABC"}
    for folder in folders.values():
        tiny_tokenizer(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
        tokenizer.save_pretrained(folder)
    start, end, picture, video = AutoTokenizer.from_pretrained(root / "A").convert_tokens_to_ids(list(MARKS))
    config = AutoConfig.for_model(
        family,
        text_config=text if newest else {key: value for key, value in text.items() if key != "head_dim"},
        vision_config=VISION if newest else VISION_WINDOWS,
        image_token_id=picture,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config).to(dtype).eval()
    first: dict[str, torch.Tensor] = {}
    for name, folder in folders.items():
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                of_vision = ".visual." in parameter_name
                if (name == "A" or of_vision == (name == "B")) and parameter.ndim > 1:
                    parameter.copy_(torch.randn_like(parameter) * 0.3)
                elif name == "C" and of_vision:
                    parameter.copy_(first[parameter_name])
            if not newest:  # its model takes a mark that it has made itself for one more image
                model.lm_head.weight[[start, end, picture, video]] = 0
            first = first or {key: tensor.clone() for key, tensor in model.named_parameters()}
        model.save_pretrained(folder)
        both: dict[str, Any] = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
        both |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": PROCESSOR[family]}
        both["size"] = {"shortest_edge": 64 * 64, "longest_edge": 64 * 64}
        images, videos = ({f"{kind}_processor_type": name} for kind, name in PROCESSORS.items())
        (folder / "preprocessor_config.json").write_text(json.dumps(both | images))
        (folder / "video_preprocessor_config.json").write_text(json.dumps(both | videos))
    return folders


def says(ask: Callable[[dict[str, Any]], dict[str, Any]], image: Image.Image) -> tuple[str, list[float]]:
    """The greedy answer about an image, with its log-probabilities.

    Args:
        ask: Posts a body to an engine's ``/v1/chat/completions``; returns what it answered.
        image: What is asked about.
    """
    data = io.BytesIO()
    image.save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    asked = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this?"}]
    body = {"messages": [{"role": "user", "content": asked}], "max_tokens": 12, "temperature": 0}
    (choice,) = ask(body | {"ignore_eos": True, "logprobs": True})["choices"]
    return choice["message"]["content"], [token["logprob"] for token in choice["logprobs"]["content"]]
