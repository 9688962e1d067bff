"""Train a small model to describe pictures that it was never shown.

torchrun --nproc-per-node 2 examples/multimodal/train.py
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from scenes import (
    CAPTION_LENGTH,
    IMAGE,
    PATCH,
    SIZES,
    WORDS,
    Scene,
    batch,
    decode,
    draw,
    prompt,
    random_scenes,
)
from sheet import contact_sheet

from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, Runtime, init_distributed
from lamina.models import (
    TransformerBlock,
    TransformerConfig,
    VisionConfig,
    VisionLanguageModel,
    generate,
)

HELD_OUT_SEED = 10**9  # training counts its seeds from 0


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=330)
    parser.add_argument("--batch", type=int, default=48, help="pictures per rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--held-out", type=int, default=240, help="pictures to be described")
    parser.add_argument("--sheet", type=Path, default=Path("runs/multimodal/contact_sheet.png"))
    return parser.parse_args()


def build() -> VisionLanguageModel:
    """An encoder of patches, a projector, a decoder of words."""
    return VisionLanguageModel(
        VisionConfig(hidden_size=64, num_layers=2, num_heads=4, patch_size=PATCH, max_grid=8,
                     init_std=0.1),
        TransformerConfig(
            vocab_size=len(WORDS), hidden_size=64, num_layers=2, num_heads=4, ffn_size=192,
            max_sequence_length=64, init_std=0.1,
        ),
        image_token=IMAGE,
        seed=0,
    )  # fmt: skip


def train(args: argparse.Namespace, runtime: Runtime) -> torch.nn.Module:
    """The loop: plain PyTorch, sharded by one line."""
    mesh = ParallelLayout().build(runtime.device.type)
    model = build().to(runtime.device)
    size = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, pct_start=0.1)
    model, optimizer = fully_shard(
        model, optimizer, device_mesh=mesh, fsdp_unit_modules=[TransformerBlock]
    )
    if runtime.is_main:
        print(f"{size} parameters on {runtime.world_size} ranks", flush=True)
    for step in range(args.steps):
        seed = step * runtime.world_size + runtime.rank  # other pictures on every rank
        tokens, images, labels = batch(random_scenes(args.batch, seed))
        images = [image.to(runtime.device) for image in images]
        loss = model(tokens.to(runtime.device), images, labels.to(runtime.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if runtime.is_main and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f} nats per word", flush=True)
    return model


def describe(model: torch.nn.Module, scenes: list[Scene], device: torch.device) -> dict[Scene, str]:
    """The model's caption of each picture; every rank takes part in every forward."""
    captions: dict[Scene, str] = {}
    for size in range(len(SIZES)):
        same = [scene for scene in scenes if scene.size == size]
        if not same:
            continue
        tokens = torch.tensor([prompt(scene) for scene in same], device=device)
        images = torch.stack(draw(same)).to(device)
        written = generate(
            model, tokens, CAPTION_LENGTH, temperature=0.0, inputs={"images": images}
        )
        for scene, row in zip(same, written[:, tokens.shape[1] :].tolist(), strict=True):
            captions[scene] = decode(row)
    return captions


def main() -> None:
    """Train, describe what was held out, draw the contact sheet."""
    args = options()
    if find_spec("matplotlib") is None:  # before the training, not after it
        sys.exit("the contact sheet needs matplotlib: pip install matplotlib")
    with init_distributed() as runtime:
        model = train(args, runtime)
        new = random_scenes(args.held_out, HELD_OUT_SEED)
        unseen = random_scenes(args.held_out, HELD_OUT_SEED, unseen=True)
        captions = describe(model, new + unseen, runtime.device)
        if runtime.is_main:
            print(f"new pictures described rightly: {score(new, captions)}")
            print(f"of colour, shape and place never shown together: {score(unseen, captions)}")
            contact_sheet(new[:18] + unseen[:6], captions, args.sheet)
            print(f"contact sheet: {args.sheet}")
            print(f"{time.process_time():.0f} s of processor time on this rank")


def score(scenes: list[Scene], captions: dict[Scene, str]) -> str:
    """How many captions are right in every word."""
    right = sum(captions[scene] == scene.caption for scene in scenes)
    return f"{right} of {len(scenes)} ({100 * right / len(scenes):.0f}%)"


if __name__ == "__main__":
    main()
