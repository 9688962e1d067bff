"""Weights and configurations in Hugging Face form."""
