"""What users call: `fully_shard`, `shard_module`, the wrapper over torch's FSDP2."""
