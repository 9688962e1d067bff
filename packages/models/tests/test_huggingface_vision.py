"""Vision-language types of transformers: the same logits, and the same bits back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina.mesh import ParallelLayout
from lamina.models import (
    TransformerConfig,
    VisionConfig,
    VisionLanguageModel,
    from_huggingface,
    vision_language_config,
    vision_language_from_huggingface,
    vision_language_to_huggingface,
)
from lamina.models.vision.huggingface_types import VISION_LANGUAGE_TYPES
from lamina_testing import device_type

from .test_tensor_parallel import check_alike

transformers = pytest.importorskip("transformers")

from .test_huggingface_types import ROUNDING, distance  # noqa: E402 - it needs transformers too

safetensors = pytest.importorskip("safetensors.torch")

IMAGE = 60
TEXT: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
    "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
COHERE = {**TEXT, "model_type": "cohere2", "head_dim": 8, "sliding_window": 5,
          "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
         "intermediate_size": 24, "patch_size": 4, "image_size": 16}  # fmt: skip
CLIP = {"vision_config": {**SIZES, "model_type": "clip_vision_model"}, "image_token_index": IMAGE}
SIGLIP = {"vision_config": {**SIZES, "model_type": "siglip_vision_model", "vision_use_head": False}}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {**CLIP, "text_config": TEXT},
    "vipllava": {**CLIP, "text_config": TEXT, "vision_feature_layer": [-2, -3, 1]},
    "idefics3": {"vision_config": SIZES, "text_config": TEXT, "image_token_id": IMAGE},
    "smolvlm": {"vision_config": SIZES, "text_config": TEXT, "image_token_id": IMAGE},
    "deepseek_vl": {**SIGLIP, "text_config": TEXT, "image_token_id": IMAGE},
    "aya_vision": {**SIGLIP, "text_config": COHERE, "image_token_index": IMAGE,
                   "alignment_intermediate_size": 20},
    "cohere2_vision": {**SIGLIP, "text_config": COHERE, "image_token_id": IMAGE,
                       "alignment_intermediate_size": 20},
}  # fmt: skip


def live(kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**CONFIGS[kind])
    auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def inputs_of(model: VisionLanguageModel) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    number = model.vision.config.tokens_of(pixels[0])
    tokens = torch.randint(0, IMAGE, (2, 24), generator=generator)
    tokens[:, 3 : 3 + number] = IMAGE
    return tokens, pixels


@torch.no_grad()
def logits_of(theirs: Any, tokens: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    images = theirs.config.model_type in ("idefics3", "smolvlm")
    return theirs(input_ids=tokens, pixel_values=pixels[:, None] if images else pixels).logits


@torch.no_grad()
def check_exact(kind: str, folder: Path) -> None:
    theirs = live(kind)
    model = vision_language_from_huggingface(theirs).eval()
    tokens, pixels = inputs_of(model)
    expected = logits_of(theirs, tokens, pixels)
    assert distance(model(tokens, pixels), expected) < ROUNDING
    theirs.save_pretrained(folder)
    from_files = vision_language_from_huggingface(folder)
    for (name, ours), other in zip(model.state_dict().items(), from_files.state_dict().values(),
                                   strict=True):  # fmt: skip
        assert torch.equal(ours, other), name
    saved: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        saved |= safetensors.load_file(file)
    back = vision_language_to_huggingface(model)
    assert back.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in back.items())
    written = json.loads(json.dumps(vision_language_config(model)))
    config = transformers.AutoConfig.for_model(written.pop("model_type"), **written)
    auto = transformers.AutoModelForImageTextToText
    again = auto.from_config(config, dtype=torch.float32).eval()
    tensors = vision_language_to_huggingface(model, names="memory")
    missing, unexpected = again.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    again.tie_weights()
    assert distance(logits_of(again, tokens, pixels), expected) < ROUNDING


FEW = ("llava", "smolvlm", "aya_vision")


@pytest.mark.parametrize("kind", FEW)
def test_a_type_goes_both_ways(kind, tmp_path):
    check_exact(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(VISION_LANGUAGE_TYPES.keys() - {*FEW}))
def test_the_other_types_go_both_ways(kind, tmp_path):
    check_exact(kind, tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llava", {"vision_feature_select_strategy": "full"}, "only 'default' is known"),
        ("llava", {"pooling": 2}, "says pooling=2, which nothing here reads"),
        ("deepseek_vl", {"vision_config": {"vision_use_head": True}}, "vision_use_head=True"),
        ("deepseek_vl", {"vision_config": {"windows": 2}}, "says windows=2, which nothing"),
        ("smolvlm", {"text_config": {"attention_gate": True}}, "says attention_gate=True, which"),
        ("aya_vision", {"vision_config": {"model_type": "clip_vision_model"}}, "only 'siglip_vis"),
    ],
)
def test_what_no_part_computes_is_refused(kind, change, words, tmp_path):
    theirs = live(kind)
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for name, value in change.items():
        written[name] = {**written[name], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=words):
        vision_language_from_huggingface(tmp_path)


def test_refusals_say_which_call_reads_a_type(tmp_path):
    with pytest.raises(ValueError, match=r"vision_language_from_huggingface reads llava"):
        from_huggingface(live("llava"))
    text = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TEXT))
    with pytest.raises(ValueError, match=r"(?s)known vision-language types are llava.*fully_shard"):
        vision_language_from_huggingface(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"class_token": True}, "class_token without image_size"),
        ({"features": (4,)}, "features has 4, and there are 3 layers"),
        ({"image_size": 18}, "image_size"),
        ({"projector": "resampler"}, "projector is 'resampler'"),
    ],
)
def test_encoders_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        VisionConfig(hidden_size=16, num_layers=3, num_heads=2, patch_size=4, **change)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("projector", ["gated", "linear"])
def test_the_parts_train_over_tp_as_in_one_process(projector):
    vision = VisionConfig(
        hidden_size=16, num_layers=2, num_heads=2, patch_size=4, image_size=16, class_token=True,
        embedding_norm=True, activation="gelu_sigmoid", features=(-1, 1), projector=projector,
        projector_norm_eps=1e-6, merge=2,
    )  # fmt: skip
    shape = {"vocab_size": 62, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    mesh = ParallelLayout(tp=2).build(device_type())
    pair = [VisionLanguageModel(vision, TransformerConfig(**shape), each, image_token=IMAGE, seed=1)
            for each in (None, mesh)]  # fmt: skip
    for model in (each.double() for each in pair):
        tokens, pixels = inputs_of(model)
        labels = tokens.roll(-1, 1).masked_fill(tokens.roll(-1, 1) == IMAGE, -100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(3):
            model(tokens, pixels.double(), labels=labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    check_alike(*pair, 1e-9)
