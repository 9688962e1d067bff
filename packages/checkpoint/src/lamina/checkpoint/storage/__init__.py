"""Where checkpoints lie: directories, stores, manifests, checksums."""
