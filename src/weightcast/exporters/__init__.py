"""What a trainer has, as named, unsharded tensors: a module, plain or sharded, or a checkpoint posing as one."""
