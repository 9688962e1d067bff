"""Decoder stacks: the block, the layer stack, the language model, generation."""
