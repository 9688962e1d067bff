"""One group of parameters: its weights, its main weights, its gradients."""
