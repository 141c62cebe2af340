"""Who is in: what each engine is, and whether it takes part."""
