"""The vision Transformer, images of different sizes, and images spliced into text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lamina.models import (
    MambaConfig,
    MoEConfig,
    TransformerConfig,
    VisionConfig,
    VisionLanguageModel,
    generate,
    pipeline,
    tensor_parallel_plan,
    to_huggingface,
)
from lamina.models.decoder.splice import image_positions
from lamina.models.vision import VisionTransformer, cut_patches
from lamina_testing import device_type

VISION = VisionConfig(hidden_size=16, num_layers=2, num_heads=2, patch_size=4, max_grid=8)
LANGUAGE = TransformerConfig(
    vocab_size=20, hidden_size=12, num_layers=2, num_heads=2, ffn_size=16, max_sequence_length=32
)
IMAGE = 19


def image(height, width, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, height, width, generator=generator, dtype=dtype)


def model_of(vision=VISION, language=LANGUAGE):
    return VisionLanguageModel(vision, language, image_token=IMAGE, seed=3).double()


def text(*parts):
    """A row of tokens; a negative number is that many image tokens."""
    return torch.tensor([t for p in parts for t in ([IMAGE] * -p if p < 0 else [p])])


@pytest.mark.parametrize("merge", [1, 2])
def test_patches_are_cut_in_reading_order_of_tokens(merge):
    config = replace(VISION, merge=merge)
    picture = image(8, 16)
    patches = cut_patches([picture], config)
    assert patches.pixels.shape == (1, 8, 48)
    for k in range(8):
        r, c = int(patches.rows[0, k]), int(patches.columns[0, k])
        wanted = picture[:, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4]
        assert torch.equal(patches.pixels[0, k].view(3, 4, 4), wanted)
    if merge == 1:
        assert (patches.rows * 4 + patches.columns).tolist() == [list(range(8))]
    else:  # the left square, then the right one
        assert patches.columns[0].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert config.tokens_of(picture) == 8 // merge**2


def test_the_encoder_equals_torchs_own_layers():
    encoder = VisionTransformer(VISION).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    pictures = torch.stack([image(8, 12, 1), image(8, 12, 2)])
    pixels = nn.functional.unfold(pictures, 4, stride=4).transpose(1, 2)
    rows, columns = torch.arange(6) // 3, torch.arange(6) % 3
    x = pixels @ encoder.patch.weight.t() + encoder.patch.bias
    x = x + encoder.row_embedding.weight[rows] + encoder.column_embedding.weight[columns]
    names = [
        ("self_attn.in_proj_", "attention.qkv"),
        ("self_attn.out_proj.", "attention.output"),
        ("linear1.", "mlp.up"),
        ("linear2.", "mlp.down"),
        ("norm1.", "attention_norm"),
        ("norm2.", "mlp_norm"),
    ]
    for block in encoder.blocks:
        layer = nn.TransformerEncoderLayer(
            16, 2, 64, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True, dtype=torch.float64
        )
        layer.load_state_dict(
            {
                f"{theirs}{kind}": getattr(block.get_submodule(ours), kind).detach()
                for theirs, ours in names
                for kind in ("weight", "bias")
            }
        )
        x = layer(x)
    expected = nn.functional.layer_norm(x, (16,), encoder.norm.weight, encoder.norm.bias, 1e-6)
    torch.testing.assert_close(encoder(pictures), expected.flatten(0, 1))


@pytest.mark.parametrize("merge", [1, 2])
def test_images_of_different_sizes_are_encoded_as_each_alone(merge):
    model = model_of(replace(VISION, merge=merge))
    pictures = [image(8, 8, 1), image(16, 8, 2), image(8, 24, 3), image(8, 8, 4)]
    together = model.encode(pictures)
    alone = torch.cat([model.encode(picture[None]) for picture in pictures])
    torch.testing.assert_close(together, alone)
    assert len(together) == sum(model.vision.config.tokens_of(p) for p in pictures)
    alike = [pictures[0], pictures[3]]
    assert torch.equal(model.encode(alike), model.encode(torch.stack(alike)))


def test_padding_gets_no_gradient_and_gives_none():
    model = model_of()
    small, large = image(8, 8, 1).requires_grad_(), image(16, 16, 2)
    small_alone = small.detach().clone().requires_grad_()
    model.encode([small, large])[:4].square().sum().backward()
    model.encode([small_alone]).square().sum().backward()
    torch.testing.assert_close(small.grad, small_alone.grad)


def test_vectors_of_images_take_the_places_of_image_tokens():
    """Oracle: embeddings put together by hand, run through the decoder's own blocks."""
    model = model_of()
    pictures = [image(8, 8, 1), image(8, 12, 2), image(4, 4, 3)]
    tail = (8, 9, 1, 2, 3, 4, 5, 6, 7, 8)
    tokens = torch.stack([text(1, -4, 2, -6, 3, 4), text(5, 6, 7, -1, *tail)])
    vectors = [model.encode([picture]) for picture in pictures]
    table = model.language.embedding.weight
    first = torch.cat([table[[1]], vectors[0], table[[2]], vectors[1], table[[3, 4]]])
    second = torch.cat([table[[5, 6, 7]], vectors[2], table[list(tail)]])
    x = torch.stack([first, second])
    for block in model.language.blocks:
        x = block(x)
    expected = model.language.final_norm(x) @ model.language.head.weight.t()
    torch.testing.assert_close(model(tokens, pictures), expected)
    labels = tokens.roll(-1, 1).masked_fill(tokens.roll(-1, 1) == IMAGE, -100)
    loss = nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(model(tokens, pictures, labels), loss)
    wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    found = torch.autograd.grad(model(tokens, pictures, labels), list(model.parameters()))
    for (name, _), one, other in zip(model.named_parameters(), found, wanted, strict=True):
        torch.testing.assert_close(one, other, msg=lambda m, n=name: f"{n}: {m}")


def test_a_decoder_with_experts_and_mamba_reads_images_and_leaves_padding_out():
    moe = MoEConfig(num_experts=4, top_k=2, ffn_size=8, switch_loss=0.1)
    mamba = MambaConfig(state_size=8, head_dim=8)
    language = replace(LANGUAGE, layer_pattern="TM", num_layers=2, mamba=mamba, moe=moe)
    model, pictures = model_of(language=language), [image(8, 8, 1)]
    tokens = text(1, -4, 2, 3, 0, 0)[None]
    labels = tokens.masked_fill((tokens == IMAGE) | (tokens == 0), -100)
    gradients = []
    for length in (9, 7):  # with two tokens of padding, and without them
        cut, padding = tokens[:, :length], (tokens == 0)[:, :length]
        model(cut, pictures, labels[:, :length], padding_mask=padding).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert model.language.blocks[0].mlp.router.latest.chosen.sum() == 2 * 2 * 7


def test_a_default_device_does_not_move_what_finds_the_places_of_images():
    tokens = torch.tensor([[7, 7, 1]])
    with torch.device("meta"):
        positions = image_positions(tokens, 7, [2])
    assert positions[0, :2].tolist() == [0, 1]


def test_text_without_images_is_the_decoders_own():
    model = model_of()
    tokens = torch.arange(12).view(2, 6)
    expected = model.language(tokens)
    for none in (None, [], torch.zeros(0, 3, 8, 8)):
        assert torch.equal(model(tokens, none), expected)
    # Ranks that share the encoder all run it: it is on the graph, with gradients of zero.
    model(tokens, None, tokens).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.vision.parameters())


@pytest.mark.parametrize(
    ("row", "sizes", "message"),
    [
        ([1, -4, 2], [(8, 12)], r"has 4 image tokens \(id 19\) in its 1 sequences, and 1 images "
                                "give 6 vectors"),
        ([1, -3, 2], [(4, 4), (8, 4)], None),
        ([1, -3, 2], [(4, 4), (8, 8)], r"2 images give 1 \+ 4 = 5 vectors"),
        ([1, -3, 2], [], r"has 3 image tokens .* 0 images give 0 vectors"),
        ([1, 2], [(4, 4)], "has 0 image tokens"),
    ],
)  # fmt: skip
def test_counts_that_differ_are_named(row, sizes, message):
    model = model_of()
    pictures = [image(*size) for size in sizes]
    if message is None:
        model(text(*row)[None], pictures)
        return
    with pytest.raises(ValueError, match=message):
        model(text(*row)[None], pictures)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, -3, 2], [1, -3, 2]], r"at token 1 of sequence 1 begins inside image 0: 3 tokens lie "
                                   r"before it, .* 4 \+ 2 = 6 vectors"),
        ([[-4, 1], [2, 3, 4, -2]], None),
        ([[-6, 1], [2] * 7], None),
        ([[1, -3, 2, -3]], r"at token 5 of sequence 0 begins inside image 0"),
        ([[-4, -1, 1, -1]], r"at token 6 of sequence 0 begins inside image 1: 5 tokens"),
    ],
)  # fmt: skip
def test_vectors_of_an_image_stay_together(rows, message):
    """As many places as vectors in all, laid out otherwise than the images (4 and 2 vectors)."""
    model, pictures = model_of(), [image(8, 8), image(4, 8)]
    tokens = torch.stack([text(*row) for row in rows])
    if message is None:
        model(tokens, pictures)
        return
    with pytest.raises(ValueError, match=message):
        model(tokens, pictures)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 10, 8), r"height is 10 pixels: need a multiple of 8 .patch_size 4 x merge 2."),
        ((3, 8, 40), r"width is 40 pixels: need a multiple of 8 .* 32 at most"),
        ((1, 8, 8), r"has shape \(1, 8, 8\): need \[channels, height, width\] with 3 channels"),
        ((8, 8), r"has shape \(8, 8\)"),
    ],
)
def test_images_that_fit_no_patches_are_refused(shape, message):
    model = model_of(replace(VISION, merge=2))
    with pytest.raises(ValueError, match=message):
        model(text(1, -1)[None], [torch.zeros(shape)])


def test_image_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"image_token is 20: .* 0 to 19"):
        VisionLanguageModel(VISION, LANGUAGE, image_token=20)


@pytest.mark.parametrize("frozen", [("vision",), ("language",), ("vision", "language")])
def test_frozen_parts_have_no_gradients_and_the_others_the_same(frozen):
    tokens, pictures = text(1, -4, 2, -6, 3, 4)[None], [image(8, 8, 1), image(8, 12, 2)]
    free, model = model_of(), model_of().freeze(*frozen)
    for each in (free, model):
        each(tokens, pictures, tokens.masked_fill(tokens == IMAGE, -100)).backward()
    for (name, one), other in zip(model.named_parameters(), free.parameters(), strict=True):
        if name.startswith(frozen):
            assert one.grad is None
        else:
            torch.testing.assert_close(one.grad, other.grad)
    model.freeze()
    assert all(parameter.requires_grad for parameter in model.parameters())
    # What is trained is what requires gradients, whoever said so.
    model.freeze("vision").vision.norm.requires_grad_(True)
    model.zero_grad()
    model(tokens, pictures, tokens.masked_fill(tokens == IMAGE, -100)).backward()
    torch.testing.assert_close(model.vision.norm.weight.grad, free.vision.norm.weight.grad)


def test_a_frozen_encoder_keeps_no_activations():
    free, frozen = model_of(), model_of().freeze("vision")
    kept = {}
    for name, model in (("free", free), ("frozen", frozen)):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            assert model.encode([image(16, 16)]).requires_grad
        kept[name] = sum(sizes)
    assert kept["frozen"] < kept["free"] / 8
    with pytest.raises(ValueError, match=r"parts \['eyes'\] do not exist"):
        frozen.freeze("eyes")


def test_meta_start_and_generation():
    with torch.device("meta"):
        late = VisionLanguageModel(VISION, LANGUAGE, image_token=IMAGE, seed=3)
    late.to_empty(device=device_type()).init_weights()
    model = VisionLanguageModel(VISION, LANGUAGE, image_token=IMAGE, seed=3)
    for one, other in zip(model.parameters(), late.parameters(), strict=True):
        assert torch.equal(one, other)
    pictures = torch.stack([image(8, 8, 1), image(8, 8, 2)]).float()
    prompt = torch.stack([text(-4, 1)] * 2)
    found = generate(model, prompt, 3, temperature=0.0, inputs={"images": pictures})
    tokens = prompt
    for _ in range(3):
        following = model(tokens, pictures)[:, -1].argmax(-1)
        tokens = torch.cat((tokens, following[:, None]), dim=1)
    assert torch.equal(found, tokens)
    # It writes no places of images, however likely they are.
    with torch.no_grad():
        model.language.head.weight[IMAGE] = 9 * model.language.head.weight[found[0, -1]]
    found = generate(model, prompt, 3, temperature=0.0, inputs={"images": pictures})
    assert not (found[:, 5:] == IMAGE).any()
    # Beyond the context the first tokens are forgotten, and images must not be among them.
    late = torch.stack([text(1, 2, -4, 1)] * 2)
    options = {"context_length": 8, "temperature": 0.0, "inputs": {"images": pictures}}
    assert generate(model, late, 4, **options).shape == (2, 11)
    with pytest.raises(ValueError, match=r"reach 3 beyond the context of 8, .* image tokens"):
        generate(model, late, 5, **options)


def test_what_is_for_the_decoder_names_it():
    model = model_of()
    for what, call in {
        r"to_huggingface\(\)": lambda: to_huggingface(model),
        "tensor_parallel_plan": lambda: tensor_parallel_plan(model),
        r"pipeline\(\)": lambda: pipeline(model, None),
    }.items():
        message = f"{what} is for a GPTModel, not for a VisionLanguageModel: give it model.language"
        with pytest.raises(TypeError, match=message):
            call()
