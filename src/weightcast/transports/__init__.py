"""How buckets travel: lifetimes, order, failure.  Engines are the adapters' business."""
