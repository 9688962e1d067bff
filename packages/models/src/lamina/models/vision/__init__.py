"""Images, and language models that read them."""
