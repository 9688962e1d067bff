"""Files with blockwise FP8 or MXFP4: read as transformers reads them, and written back."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lamina.checkpoint import export_huggingface, import_huggingface
from lamina.checkpoint.engine import HuggingFaceWeights
from lamina.checkpoint.errors import CheckpointMismatchError
from lamina.checkpoint.huggingface.files import Files
from lamina.checkpoint.huggingface.quantised import Requantised
from lamina.checkpoint.ranks import Ranks
from lamina.fsdp import fully_shard
from lamina.models import (
    GPTModel,
    LatentAttention,
    TransformerConfig,
    WeightLink,
    from_huggingface,
)

safetensors = pytest.importorskip("safetensors.torch")
finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


class Model(nn.Module):
    """A matrix whose sides are no multiples of 128, a stack of experts, and a vector."""

    def __init__(self, value=0.0):
        super().__init__()
        self.matrix = nn.Parameter(torch.full((300, 130), value))
        self.experts = nn.Parameter(torch.full((2, 64, 6), value))
        self.vector = nn.Parameter(torch.full((5,), value))

    def huggingface_weights(self):
        links = [
            WeightLink("matrix", ("a.weight",)),
            WeightLink("experts", ("e.gate_up_proj",)),
            WeightLink("vector", ("v",)),
        ]
        return HuggingFaceWeights({"model_type": "toy"}, links)


def written(directory):
    """Files of random codes with random scales; of FP8 each block has the largest code."""
    torch.manual_seed(0)
    directory.mkdir()
    codes = (torch.randn(300, 130) * 100).to(torch.float8_e4m3fn)
    codes[::128, ::128] = 448.0
    tensors = {
        "a.weight": codes,
        "a.weight_scale_inv": torch.rand(3, 2) * 0.01,
        "e.gate_up_proj_blocks": torch.randint(0, 256, (2, 6, 2, 16), dtype=torch.uint8),
        "e.gate_up_proj_scales": torch.randint(110, 130, (2, 6, 2), dtype=torch.uint8),
        "v": torch.arange(5.0),
    }
    safetensors.save_file(tensors, directory / "model.safetensors")
    config = {"model_type": "toy", "quantization_config": {"quant_method": "fp8"}}
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


def test_weights_are_what_transformers_makes_of_codes_and_scales(tmp_path):
    tensors = written(tmp_path / "a")
    model = Model()
    assert import_huggingface(model, tmp_path / "a") == ()
    reader = finegrained.Fp8Dequantize(SimpleNamespace(quantization_config=None))
    # transformers' own takes blocks that divide the matrix.
    inner = reader._dequantize_one(
        tensors["a.weight"][:256, :128], tensors["a.weight_scale_inv"][:2, :1], torch.float32
    )
    assert torch.equal(model.matrix[:256, :128], inner)
    last = tensors["a.weight"][256:, 128:].float() * tensors["a.weight_scale_inv"][2, 1]
    assert torch.equal(model.matrix[256:, 128:], last)
    blocks, scales = tensors["e.gate_up_proj_blocks"], tensors["e.gate_up_proj_scales"]
    wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(model.experts, wanted)
    half = Model().bfloat16()
    import_huggingface(half, tmp_path / "a")
    assert torch.equal(half.experts, mxfp4.convert_moe_packed_tensors(blocks, scales))


@pytest.mark.ranks(2)
def test_unchanged_weights_go_back_byte_for_byte_from_a_sharded_model(tmp_path, ranks):
    source = tmp_path / f"source{ranks.rank}"
    tensors = written(source)
    model = fully_shard(Model())
    import_huggingface(model, source)
    export_huggingface(model, tmp_path / "back", like=source)
    torch.distributed.barrier()
    back = safetensors.load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    minus_zero = back["e.gate_up_proj_blocks"]
    for name, value in tensors.items():
        assert torch.equal(back[name].view(torch.uint8), value.view(torch.uint8)), name
    assert minus_zero.dtype is torch.uint8
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "fp8"}


def test_a_programs_default_device_changes_nothing(tmp_path):
    tensors, model = written(tmp_path / "a"), Model()
    with torch.device("meta"):
        import_huggingface(model, tmp_path / "a")
        export_huggingface(model, tmp_path / "b", like=tmp_path / "a")
        with Files(tmp_path / "a") as files:
            for _ in Requantised(files).stored("a.weight", model.matrix):
                assert torch.empty(1).is_meta  # the reader's own default stays
        assert Ranks(None).lists(["a"]) == [["a"]]
    back = safetensors.load_file(tmp_path / "b" / "model.safetensors")
    for name, value in tensors.items():
        assert torch.equal(back[name].view(torch.uint8), value.view(torch.uint8)), name


def test_trained_weights_are_as_near_as_the_format_allows(tmp_path):
    written(tmp_path / "a")
    model = Model()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    export_huggingface(model, tmp_path / "b", like=tmp_path / "a")
    read = Model()
    import_huggingface(read, tmp_path / "b")
    # e4m3 has 3 bits behind its leading one; below 2^-6 of its scale steps are equal.
    peak = model.matrix.abs().max()
    error = (read.matrix - model.matrix).abs()
    assert (error <= model.matrix.abs() / 16 + peak / 448 / 2**9).all()
    groups = model.experts.mT.reshape(-1, 32)
    found = read.experts.mT.reshape(-1, 32)
    # The nearest of all numbers of the format under the best power of two.
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))
    for group, got in zip(groups, found, strict=True):
        scale = 2.0 ** (torch.floor(torch.log2(group.abs().max())) - 2)
        near = (group[:, None] / scale - values).abs().min(dim=1).values * scale
        torch.testing.assert_close((got - group).abs(), near)


def test_a_model_that_computes_with_codes_takes_them_as_they_are(tmp_path):
    class Coded(Model):
        def __init__(self):
            super().__init__()
            zeros = torch.zeros(300, 130, dtype=torch.float8_e4m3fn)
            self.matrix = nn.Parameter(zeros, requires_grad=False)
            self.scale = nn.Parameter(torch.zeros(3, 2))

        def huggingface_weights(self):
            weights = super().huggingface_weights()
            links = [*weights.links, WeightLink("scale", ("a.weight_scale_inv",))]
            return HuggingFaceWeights(weights.config, links)

    tensors = written(tmp_path / "a")
    model = Coded()
    import_huggingface(model, tmp_path / "a")
    assert torch.equal(model.matrix.view(torch.uint8), tensors["a.weight"].view(torch.uint8))
    assert torch.equal(model.scale, tensors["a.weight_scale_inv"])


def test_another_models_directory_and_other_shapes_are_refused(tmp_path):
    written(tmp_path / "a")
    model = Model()
    model.matrix = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"'a.weight' is \[4, 4\] in the model and \[300, 130\]"):
        export_huggingface(model, tmp_path / "b", like=tmp_path / "a")
    with pytest.raises(CheckpointMismatchError, match=r"a.weight"):
        import_huggingface(model, tmp_path / "a")


def test_deepseek_in_fp8_has_the_logits_of_its_numbers(tmp_path):
    config = TransformerConfig(
        vocab_size=61, hidden_size=256, num_layers=2, num_heads=4, ffn_size=200,
        mla=LatentAttention(kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8,
                            qk_rope_head_dim=6, v_head_dim=10),
    )  # fmt: skip
    model = GPTModel(config, seed=1)
    plain = export_huggingface(model, tmp_path / "plain")
    tensors = safetensors.load_file(plain / "model.safetensors")
    coded, numbers = {}, {}
    for name, value in tensors.items():
        coded[name] = numbers[name] = value
        if "proj" in name and value.ndim == 2:
            grid = torch.rand([-(-size // 128) for size in value.shape]) * 1e-3 + 1e-4
            spread = grid.repeat_interleave(128, 0).repeat_interleave(128, 1)
            spread = spread[: value.shape[0], : value.shape[1]]
            coded[name] = (value / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
            coded[f"{name}_scale_inv"] = grid
            numbers[name] = coded[name].float() * spread
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    safetensors.save_file(coded, quantised / "model.safetensors")
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    written_config = json.loads((plain / "config.json").read_text()) | {"quantization_config": said}
    (quantised / "config.json").write_text(json.dumps(written_config))
    safetensors.save_file(numbers, plain / "model.safetensors")
    tokens = torch.arange(12).view(2, 6)
    found, wanted = from_huggingface(quantised), from_huggingface(plain)
    assert torch.equal(found(tokens), wanted(tokens))
    assert not torch.equal(found(tokens), model(tokens))
    back = export_huggingface(found, tmp_path / "back", like=quantised)
    stored = safetensors.load_file(back / "model.safetensors")
    assert stored.keys() == coded.keys()
    assert stored["model.layers.0.self_attn.o_proj.weight"].dtype is torch.float8_e4m3fn
