"""Names that a payload for SGLang may contain; SGLang's unpickler has a list of its own."""

# Every name that a payload may contain, beside torch's dtypes.
GLOBALS = frozenset(
    {
        "torch Tensor",
        "torch uint8",
        "torch.storage TypedStorage",
        "torch.storage UntypedStorage",
        "torch.multiprocessing.reductions rebuild_tensor",
        "torch.multiprocessing.reductions rebuild_typed_storage",
        "torch.multiprocessing.reductions rebuild_storage_filename",
        "torch.multiprocessing.reductions rebuild_cuda_tensor",
        "types SimpleNamespace",
    }
)
