"""SGLang as its project ships it."""
