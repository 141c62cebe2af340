"""Exporters turn a trainer's model, plain or sharded, or a checkpoint on disk into named, unsharded tensors."""
