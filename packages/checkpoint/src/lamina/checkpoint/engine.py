"""What other tools build on: the links between a module's weights and Hugging Face names."""

from lamina.checkpoint.huggingface.weight_links import HuggingFaceLink, HuggingFaceWeights

__all__ = ["HuggingFaceLink", "HuggingFaceWeights"]
