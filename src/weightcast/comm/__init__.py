"""Communication mechanisms that know bytes and ranks, but no engine and no weights."""
