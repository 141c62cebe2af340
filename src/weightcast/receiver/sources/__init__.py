"""Where buckets come from; each file mirrors the transport of the same name."""
